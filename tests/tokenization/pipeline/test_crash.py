"""kill -9, a full disk, a broken worker: what is finished stays, and the end is the same bytes."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from patience import PATIENCE

from megapack import IndexedDataset
from megapack.errors import LockedError

from ..helpers import Build, files_of, write_jsonl

pytestmark = pytest.mark.multiprocess

# Slow enough to be killed in the middle: every shard waits a little before it is finished.
SLOW_CLI = """
import sys, time
from megapack.cli.main import main
from megapack.tokenization.pipeline import worker
original = worker.write_record
def slow(*args):
    time.sleep(0.1)
    original(*args)
worker.write_record = slow
if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
"""


ROOT = Path(__file__).parents[3]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}


def start(
    tmp_path: Path, program: str, arguments: list[str], **options: Any
) -> subprocess.Popen[str]:
    """``arguments`` of ``command``, run by a program that stands for the command line."""
    script = tmp_path / "cli.py"
    script.write_text(program)
    return subprocess.Popen(
        [sys.executable, str(script), *arguments[3:]], env=ENVIRONMENT, text=True, **options
    )


def command(corpus: Path, prefix: Path, *more: str) -> list[str]:
    arguments = ["tokenize", "--input", str(corpus), "--tokenizer", "bytes", "--append-eod"]
    arguments += ["--output-prefix", str(prefix), "--shard-bytes", "20K", "--workers", "1", *more]
    return [sys.executable, "-m", "megapack.cli.main", *arguments]


@pytest.fixture
def calm(tmp_path: Path, corpus: Path, run_build: Build) -> tuple[bytes, bytes]:
    """What a build makes of the corpus that nothing disturbs."""
    run_build(corpus, append_eod=True, output_prefix=str(tmp_path / "calm"))
    return files_of(tmp_path / "calm")


def run(arguments: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        arguments, check=False, capture_output=True, text=True, env=ENVIRONMENT, timeout=PATIENCE
    )


def finished(prefix: Path) -> set[str]:
    return {path.name for path in Path(f"{prefix}.build").glob("*/shard-??????.json")}


@pytest.mark.parametrize("workers", ["1", "3"])
def test_killed_builds_give_the_same_bytes(
    tmp_path: Path, corpus: Path, calm: tuple[bytes, bytes], workers: str
) -> None:
    prefix = tmp_path / "killed"
    arguments = command(corpus, prefix, "--workers", workers)
    for already in (0, 4):  # killed twice, the second time behind what the first run finished
        process = start(tmp_path, SLOW_CLI, arguments)
        while len(finished(prefix)) < already + 3:
            assert process.poll() is None, "the build ended before it could be killed"
            time.sleep(0.01)
        children = below(process.pid)
        process.kill()
        process.wait()
        wait_for_end(children)
        assert not IndexedDataset.exists(prefix)
    kept = finished(prefix)
    done = run(command(corpus, prefix, "--workers", workers))
    assert done.returncode == 0, done.stderr
    assert f"({len(kept)} kept from before)" in done.stdout
    assert files_of(prefix) == calm


# Workers that notice nothing: in the middle of a shard they hold the interpreter's lock for good.
STUCK_CLI = """
import ctypes, os, pathlib, sys
from megapack.cli.main import main
from megapack.tokenization.pipeline import worker
def stuck(*args):
    pathlib.Path(sys.argv[0] + f".{os.getpid()}").touch()
    ctypes.PyDLL(None).sleep(600)
worker.write_record = stuck
if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
"""


def test_workers_of_a_killed_build_leave_at_once(tmp_path: Path, corpus: Path) -> None:
    arguments = command(corpus, tmp_path / "out", "--workers", "2")
    process = start(tmp_path, STUCK_CLI, arguments)
    while len(list(tmp_path.glob("cli.py.*"))) < 2:
        assert process.poll() is None
        time.sleep(0.01)
    children = below(process.pid)
    assert len(workers_of(process.pid)) == 2
    process.kill()
    process.wait()
    wait_for_end(children)
    assert not finished(tmp_path / "out")


def wait_for_end(pids: Sequence[int]) -> None:
    deadline = time.monotonic() + PATIENCE
    while any(is_alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not [pid for pid in pids if is_alive(pid)], "workers outlive the build"


def below(pid: int) -> list[int]:
    """All processes below one: the server of workers, and the workers."""
    children: dict[int, list[int]] = {}
    for process in Path("/proc").iterdir():  # glob would ask each whether it still exists
        if not process.name.isdigit():
            continue
        try:
            parent = int((process / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        children.setdefault(parent, []).append(int(process.name))
    found = list(children.get(pid, ()))
    for child in found:
        found += children.get(child, ())
    return found


def workers_of(pid: int) -> list[int]:
    """Those of ``below`` that have a process of Python above them, which forked them."""
    return [child for direct in below(pid) for child in below(direct)]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_killed_worker_is_an_error_that_says_what_to_do(tmp_path: Path, corpus: Path) -> None:
    arguments = command(corpus, tmp_path / "out", "--workers", "2")
    process = start(tmp_path, SLOW_CLI, arguments, stderr=subprocess.PIPE)
    while not finished(tmp_path / "out"):
        assert process.poll() is None
        time.sleep(0.01)
    os.kill(workers_of(process.pid)[0], signal.SIGKILL)
    _, stderr = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1
    assert "a worker process was killed" in stderr
    assert "Traceback" not in stderr
    done = run(command(corpus, tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    assert "kept from before" in done.stdout


# The server that forks the workers is killed while it starts.
KILLED_SERVER_CLI = """
import os, sys
os.environ["PYTHONPATH"] += os.pathsep + os.path.dirname(__file__)
from megapack.cli.main import main
from megapack.tokenization.pipeline import run
original = run.prepare_processes
run.prepare_processes = lambda modules: original(["killed", *modules])
if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
"""


def test_a_killed_server_of_workers_is_the_same_error(tmp_path: Path, corpus: Path) -> None:
    """It was a raw EOFError."""
    (tmp_path / "killed.py").write_text("import os\nos.kill(os.getpid(), 9)\n")
    arguments = command(corpus, tmp_path / "out", "--workers", "2", "--shard-bytes", "100K")
    process = start(tmp_path, KILLED_SERVER_CLI, arguments, stderr=subprocess.PIPE)
    _, stderr = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1
    assert "a worker process was killed" in stderr
    assert "Traceback" not in stderr


@pytest.mark.parametrize(
    ("program", "everybody"), [(SLOW_CLI, True), (STUCK_CLI, False)], ids=["group", "build alone"]
)
def test_interrupt_ends_workers(
    tmp_path: Path, corpus: Path, program: str, everybody: bool
) -> None:
    """A terminal sends it to all processes; a scheduler may send it to the first alone."""
    arguments = command(corpus, tmp_path / "out", "--workers", "2")
    process = start(tmp_path, program, arguments, stderr=subprocess.PIPE, start_new_session=True)
    while not (finished(tmp_path / "out") or len(list(tmp_path.glob("cli.py.*"))) == 2):
        assert process.poll() is None
        time.sleep(0.01)
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
    done = run(["bash", "-c", limited])
    assert done.returncode == 1, (done.returncode, done.stderr)
    assert "File too large" in done.stderr
    assert ".bin" in done.stderr, "the message names the file"
    assert "Traceback" not in done.stderr
    kept = len(finished(prefix))
    assert kept >= 1
    assert not list(Path(f"{prefix}.build").glob("**/*.tmp-*")), "nothing half-written is left"
    done = run(command(corpus, prefix))
    assert done.returncode == 0, done.stderr
    assert f"({kept} kept from before)" in done.stdout


# A disk of 8 MB with $2 MB of something else on it, which is removed before the second run.
FULL_DISK = """
disk=$1; ballast=$2; shift 2
mount -t tmpfs -o size=8m none "$disk" || exit 77
head -c "${ballast}M" /dev/zero > "$disk/ballast"
"$@" > full.out 2> full.err; echo $? > full.status
ls -R "$disk" > full.files
rm "$disk/ballast"
"$@" > again.out 2> again.err; echo $? > again.status
cp "$disk"/out.* . 2> /dev/null
true
"""


# Takes the disk for empty, as if somebody else filled it later.
UNAWARE_CLI = """
import shutil, sys
from megapack.cli.main import main
shutil.disk_usage = lambda path: shutil._ntuple_diskusage(1 << 60, 0, 1 << 60)
if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
"""


def on_small_disk(tmp_path: Path, ballast: int, build: list[str]) -> dict[str, str]:
    """Run a build twice on a real file system of 8 MB in a mount namespace of its own; what it
    said, by file name. The corpus makes about 2 MB of shards, and 2 MB of result.
    """
    if shutil.which("unshare") is None:
        pytest.skip("no unshare")
    disk = tmp_path / "disk"
    disk.mkdir()
    build = [*build[:-1], str(disk / "out")]
    script = ["unshare", "-rm", "sh", "-c", FULL_DISK, "sh", str(disk), str(ballast), *build]
    done = subprocess.run(
        script, check=False, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True
    )
    if done.returncode == 77 or "unshare failed" in done.stderr:
        pytest.skip(f"mounting is not allowed here: {done.stderr.strip()}")
    said = {path.name: path.read_text() for path in tmp_path.glob("*.*") if path.suffix in SAID}
    assert "Traceback" not in said["full.err"] + said["again.err"], said
    assert ".tmp-" not in said["full.files"], "nothing half-written is left"
    return said


SAID = (".status", ".err", ".out", ".files")


@pytest.mark.parametrize(
    ("workers", "ballast", "missing"), [("2", 7, "shards"), ("1", 5, "the result")]
)
def test_after_a_disk_was_full_the_same_command_goes_on_and_gives_the_same_bytes(
    tmp_path: Path,
    corpus: Path,
    calm: tuple[bytes, bytes],
    workers: str,
    ballast: int,
    missing: str,
) -> None:
    (tmp_path / "cli.py").write_text(UNAWARE_CLI)
    arguments = command(corpus, Path(), "--workers", workers)[3:]
    program = [sys.executable, str(tmp_path / "cli.py"), *arguments]
    said = on_small_disk(tmp_path, ballast, [*program, "--output-prefix", ""])
    assert said["full.status"] == "1\n", said
    assert "No space left on device while writing" in said["full.err"]
    files = said["full.files"].split()
    kept = len([name for name in files if re.fullmatch(r"shard-\d{6}\.json", name)])
    assert kept >= 1 and "out.bin" not in files
    assert said["again.status"] == "0\n", said
    found = re.search(r"shards +(\d+) \((\d+) kept from before\)", said["again.out"])
    assert found is not None, said
    assert int(found[2]) == kept
    assert (kept == int(found[1])) == (missing == "the result")
    assert files_of(tmp_path / "out") == calm


def test_disk_too_small_for_the_result_is_refused_first(tmp_path: Path, corpus: Path) -> None:
    build = command(corpus, Path(), "--output-prefix", "")
    said = on_small_disk(tmp_path, 7, build)
    assert said["full.status"] == "1\n"
    assert re.search(
        r"has (1\.0\d MiB|\d+ KiB) free, and the build needs about [12]\.\d+ MiB", said["full.err"]
    )
    assert "shard-" not in said["full.files"]
    assert said["again.status"] == "0\n"


def test_shards_are_removed_where_copies_have_no_room(
    tmp_path: Path, corpus: Path, calm: tuple[bytes, bytes]
) -> None:
    build = command(corpus, Path(), "--output-prefix", "")
    said = on_small_disk(tmp_path, 5, build)
    assert said["full.status"] == "0\n", said
    assert "each is removed once it is joined" in said["full.err"]
    assert "nothing to do" in said["again.out"]
    assert files_of(tmp_path / "out") == calm


def test_two_runs_of_one_build_do_not_work_at_the_same_time(
    tmp_path: Path, corpus: Path, run_build: Build
) -> None:
    process = start(tmp_path, SLOW_CLI, command(corpus, tmp_path / "out"))
    while not finished(tmp_path / "out"):
        assert process.poll() is None
        time.sleep(0.01)
    with pytest.raises(LockedError, match=r"out\.build is being written by process \d+ on .*tok"):
        run_build(corpus, append_eod=True, shard_bytes=20_000)
    assert process.wait(timeout=PATIENCE) == 0
