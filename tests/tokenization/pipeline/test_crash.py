"""kill -9, a full disk, a broken worker: finished shards stay; the result has the same bytes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from patience import PATIENCE
from programs import ended, on_small_disk

from megapack import IndexedDataset
from megapack.errors import LockedError

from ..helpers import Build, files_of, write_jsonl

pytestmark = pytest.mark.multiprocess

# Program that replaces the command line.
CLI = """
import ctypes, os, pathlib, shutil, sys, time
from megapack.cli.main import main
from megapack.tokenization.pipeline import run, worker
{}
if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
"""
# Slow enough to be killed in the middle: every shard waits before it is finished.
SLOW_CLI = CLI.format("""
original = worker.write_record
def slow(*args):
    time.sleep(0.1)
    original(*args)
worker.write_record = slow
""")
# Unresponsive workers: in the middle of a shard they hold the interpreter's lock forever.
STUCK_CLI = CLI.format("""
def stuck(*args):
    pathlib.Path(sys.argv[0] + f".{os.getpid()}").touch()
    ctypes.PyDLL(None).sleep(600)
worker.write_record = stuck
""")
# The server that forks the workers is killed while it starts.
KILLED_SERVER_CLI = CLI.format("""
os.environ["PYTHONPATH"] += os.pathsep + os.path.dirname(__file__)
original = run.prepare_processes
run.prepare_processes = lambda modules: original(["killed", *modules])
""")
# Reports an empty disk, as if another process filled it later.
UNAWARE_CLI = CLI.format(
    "shutil.disk_usage = lambda path: shutil._ntuple_diskusage(1 << 60, 0, 1 << 60)"
)
Files = tuple[bytes, bytes]  # of ``files_of``
ROOT = Path(__file__).parents[3]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}


def command(corpus: Path, prefix: Path, *more: str) -> list[str]:
    arguments = ["tokenize", "--input", str(corpus), "--tokenizer", "bytes", "--append-eod"]
    arguments += ["--output-prefix", str(prefix), "--shard-bytes", "20K", "--workers", "1", *more]
    return [sys.executable, "-m", "megapack.cli.main", *arguments]


def start(program: str, corpus: Path, *more: str, **options: Any) -> subprocess.Popen[str]:
    """Start ``command`` into ``out`` next to the corpus, by a program that replaces the command
    line.
    """
    script = corpus.with_name("cli.py")
    script.write_text(program)
    words = [sys.executable, str(script), *command(corpus, corpus.with_name("out"), *more)[3:]]
    return subprocess.Popen(words, env=ENVIRONMENT, text=True, stderr=subprocess.PIPE, **options)


@pytest.fixture
def calm(tmp_path: Path, corpus: Path, run_build: Build) -> Files:
    """Build the corpus without disturbance."""
    run_build(corpus, append_eod=True, output_prefix="calm")
    return files_of(tmp_path / "calm")


def run(arguments: list[str], status: int = 0) -> subprocess.CompletedProcess[str]:
    return ended(*arguments, status=status, env=ENVIRONMENT, timeout=PATIENCE)


def wait_for(process: subprocess.Popen[str], reached: Callable[[], object]) -> None:
    while not reached():
        assert process.poll() is None, "the build ended before it could be killed"
        time.sleep(0.01)


def finished(prefix: Path) -> set[str]:
    return {path.name for path in Path(f"{prefix}.build").glob("*/shard-??????.json")}


@pytest.mark.parametrize("workers", ["1", "3"])
def test_killed_build_resumes_to_the_same_bytes(
    tmp_path: Path, corpus: Path, calm: Files, workers: str
) -> None:
    prefix = tmp_path / "out"
    for already in (0, 4):  # killed twice, the second time behind what the first run finished
        process = start(SLOW_CLI, corpus, "--workers", workers)
        wait_for(process, lambda most=already + 3: len(finished(prefix)) >= most)
        kill_with_children(process)
        assert not IndexedDataset.exists(prefix)
    kept = finished(prefix)
    done = run(command(corpus, prefix, "--workers", workers))
    assert f"({len(kept)} kept from before)" in done.stdout
    assert files_of(prefix) == calm


def test_workers_of_a_killed_build_end_at_once(tmp_path: Path, corpus: Path) -> None:
    process = start(STUCK_CLI, corpus, "--workers", "2")
    wait_for(process, lambda: len(list(tmp_path.glob("cli.py.*"))) == 2)
    assert len(workers_of(process.pid)) == 2
    kill_with_children(process)
    assert not finished(tmp_path / "out")


def kill_with_children(process: subprocess.Popen[str]) -> None:
    children = below(process.pid)
    process.kill()
    process.wait()
    wait_for_end(children)


def wait_for_end(pids: Sequence[int]) -> None:
    deadline = time.monotonic() + PATIENCE
    while any(is_alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not [pid for pid in pids if is_alive(pid)], "workers outlive the build"


def below(pid: int) -> list[int]:
    """Return all descendants of a process: the server of workers, and the workers."""
    children: dict[int, list[int]] = {}
    for process in Path("/proc").iterdir():  # glob would ask each whether it still exists
        if not process.name.isdigit():
            continue
        try:
            parent = int((process / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        children.setdefault(parent, []).append(int(process.name))
    pids = list(children.get(pid, ()))
    for child in pids:
        pids += children.get(child, ())
    return pids


def workers_of(pid: int) -> list[int]:
    """Return the workers: descendants forked by another Python process."""
    return [child for direct in below(pid) for child in below(direct)]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_killed_worker_is_an_error_with_a_remedy(tmp_path: Path, corpus: Path) -> None:
    process = start(SLOW_CLI, corpus, "--workers", "2")
    wait_for(process, lambda: finished(tmp_path / "out"))
    os.kill(workers_of(process.pid)[0], signal.SIGKILL)
    assert_killed_worker_is_reported(process)
    assert "kept from before" in run(command(corpus, tmp_path / "out")).stdout


def assert_killed_worker_is_reported(process: subprocess.Popen[str]) -> None:
    _, stderr = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1
    assert "a worker process was killed" in stderr
    assert "Traceback" not in stderr


def test_killed_server_of_workers_is_the_same_error(tmp_path: Path, corpus: Path) -> None:
    """It raised EOFError."""
    (tmp_path / "killed.py").write_text("import os\nos.kill(os.getpid(), 9)\n")
    process = start(KILLED_SERVER_CLI, corpus, "--workers", "2", "--shard-bytes", "100K")
    assert_killed_worker_is_reported(process)


@pytest.mark.parametrize(
    ("program", "everybody"), [(SLOW_CLI, True), (STUCK_CLI, False)], ids=["group", "build alone"]
)
def test_interrupt_ends_all_processes(
    tmp_path: Path, corpus: Path, program: str, everybody: bool
) -> None:
    """A terminal sends SIGINT to all processes; a scheduler may send it to the first only."""
    # A script starts background jobs with SIGINT ignored, and children inherit that.
    usual = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        process = start(program, corpus, "--workers", "2", start_new_session=True)
    finally:
        signal.signal(signal.SIGINT, usual)
    out, stuck = tmp_path / "out", "cli.py.*"
    wait_for(process, lambda: finished(out) or len(list(tmp_path.glob(stuck))) == 2)
    children = below(process.pid)
    (os.killpg if everybody else os.kill)(process.pid, signal.SIGINT)
    _, stderr = process.communicate(timeout=PATIENCE)
    assert (process.returncode, stderr.splitlines()[-1]) == (130, "megapack-build: interrupted")
    assert "Traceback" not in stderr
    wait_for_end(children)


def test_full_disk_keeps_finished_shards(tmp_path: Path) -> None:
    # The second shard's .bin is larger than a file may be; the kernel refuses the write as it
    # refuses one on a full disk.
    records = [{"text": "small"}] * 2000 + [{"text": "x" * 400_000}] * 3
    corpus = write_jsonl(tmp_path / "corpus.jsonl", records)
    prefix = tmp_path / "out"
    limited = f"ulimit -f 300; exec {' '.join(command(corpus, prefix))}"
    output = run(["bash", "-c", limited], status=1).stderr
    assert "File too large" in output and ".bin" in output, "the message names the file"
    assert "Traceback" not in output
    kept = len(finished(prefix))
    assert kept >= 1
    assert not list(Path(f"{prefix}.build").glob("**/*.tmp-*")), "nothing half-written is left"
    assert f"({kept} kept from before)" in run(command(corpus, prefix)).stdout


# A disk of 8 MB with $2 MB of something else on it, which is removed before the second run.
FULL_DISK = """
disk=$1; ballast=$2; shift 2
head -c "${ballast}M" /dev/zero > "$disk/ballast"
"$@" > full.out 2> full.err; echo $? > full.status
ls -R "$disk" > full.files
rm "$disk/ballast"
"$@" > again.out 2> again.err; echo $? > again.status
cp "$disk"/out.* . 2> /dev/null
true
"""


def build_twice(tmp_path: Path, ballast: int, build: list[str]) -> dict[str, str]:
    """Build twice on a real file system of 8 MB; return the output by file name. The corpus makes
    about 2 MB of shards, and 2 MB of result.
    """
    disk = tmp_path / "disk"
    disk.mkdir()
    script = ["sh", "-c", FULL_DISK, "sh", disk, ballast, *build[:-1], disk / "out"]
    on_small_disk(disk, 8, *script, cwd=tmp_path, env=ENVIRONMENT)
    output = {path.name: path.read_text() for path in tmp_path.glob("*.*") if path.suffix in SAID}
    assert "Traceback" not in output["full.err"] + output["again.err"], output
    assert ".tmp-" not in output["full.files"], "nothing half-written is left"
    return output


SAID = (".status", ".err", ".out", ".files")


@pytest.mark.parametrize(
    ("workers", "ballast", "missing"), [("2", 7, "shards"), ("1", 5, "the result")]
)
def test_build_resumes_after_a_full_disk(
    tmp_path: Path, corpus: Path, calm: Files, workers: str, ballast: int, missing: str
) -> None:
    (tmp_path / "cli.py").write_text(UNAWARE_CLI)
    arguments = command(corpus, Path(), "--workers", workers)[3:]
    program = [sys.executable, str(tmp_path / "cli.py"), *arguments]
    output = build_twice(tmp_path, ballast, [*program, "--output-prefix", ""])
    assert output["full.status"] == "1\n", output
    assert "No space left on device while writing" in output["full.err"]
    files = output["full.files"].split()
    kept = len([name for name in files if re.fullmatch(r"shard-\d{6}\.json", name)])
    assert kept >= 1 and "out.bin" not in files
    assert output["again.status"] == "0\n", output
    counts = re.search(r"shards +(\d+) \((\d+) kept from before\)", output["again.out"])
    assert counts is not None, output
    assert int(counts[2]) == kept
    assert (kept == int(counts[1])) == (missing == "the result")
    assert files_of(tmp_path / "out") == calm


def test_too_small_disk_is_refused_first(tmp_path: Path, corpus: Path) -> None:
    build = command(corpus, Path(), "--output-prefix", "")
    output = build_twice(tmp_path, 7, build)
    assert output["full.status"] == "1\n"
    assert re.search(
        r"has (1\.0\d MiB|\d+ KiB) free, and the build needs about [12]\.\d+ MiB",
        output["full.err"],
    )
    assert "shard-" not in output["full.files"]
    assert output["again.status"] == "0\n"


def test_shards_are_deleted_during_the_join_on_a_small_disk(
    tmp_path: Path, corpus: Path, calm: Files
) -> None:
    build = command(corpus, Path(), "--output-prefix", "")
    output = build_twice(tmp_path, 5, build)
    assert output["full.status"] == "0\n", output
    assert "each shard is deleted after it is copied" in output["full.err"]
    assert "nothing to do" in output["again.out"]
    assert files_of(tmp_path / "out") == calm


def test_two_runs_of_one_build_exclude_each_other(
    tmp_path: Path, corpus: Path, run_build: Build
) -> None:
    process = start(SLOW_CLI, corpus)
    wait_for(process, lambda: finished(tmp_path / "out"))
    with pytest.raises(LockedError, match=r"out\.build is being written by process \d+ on .*tok"):
        run_build(corpus, append_eod=True, shard_bytes=20_000)
    process.communicate(timeout=PATIENCE)
    assert process.returncode == 0
