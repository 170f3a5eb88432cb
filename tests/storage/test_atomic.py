"""Files get their final names when they are complete; locks exclude other writers."""

from __future__ import annotations

import errno
import gc
import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from programs import PYTHON, ended, on_small_disk, started

from megapack.errors import ConfigError, LockedError
from megapack.packing.verify import verify_samples
from megapack.storage import IndexedDataset, IndexedDatasetBuilder
from megapack.storage.files import (
    TEMPORARY_BYTES,
    AtomicFile,
    atomic_write,
    check_target,
    target_of,
)
from megapack.storage.locks import WriterLock
from megapack.storage.verify import leftovers, verify
from storage.strategies import errors, names


def test_old_content_stays_until_new_content_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    with atomic_write(path, "w") as file:
        file.write("new \u00e4")
        file.flush()
        assert path.read_text() == "old"
    assert path.read_bytes() == "new \u00e4".encode()
    with pytest.raises(RuntimeError), atomic_write(path) as file:
        file.write(b"half")
        raise RuntimeError
    assert path.read_bytes() == "new \u00e4".encode()
    assert names(tmp_path) == ["file"]


def test_appending_is_all_or_nothing(tmp_path: Path) -> None:
    file = AtomicFile(tmp_path / "file")
    file.write(b"abc")
    with pytest.raises(RuntimeError), file.all_or_nothing():
        file.write(b"def")
        raise RuntimeError
    file.write(np.array([0x6867], np.uint16))
    assert file.temporary.read_bytes() == b"abcgh"
    (tmp_path / "short").write_bytes(b"1234")
    with (tmp_path / "short").open("rb", buffering=0) as source:
        with pytest.raises(OSError, match="4 bytes early"):
            file.copy_from(source, 8)
        source.seek(1)
        file.copy_from(source, 2)
    assert file.temporary.read_bytes() == b"abcgh23"
    file.discard()


FILL = """
import resource, signal, sys
import numpy as np
from megapack.storage import IndexedDatasetBuilder
if sys.argv[2] == "limit":
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
builder = IndexedDatasetBuilder(sys.argv[1] + "/data", np.uint16)
try:
    for _ in range(int(sys.argv[3])):
        builder.add_document(np.zeros(1000, np.uint16))
    if sys.argv[4] == "index":  # many empty documents: .bin fits, .idx does not
        builder.add_documents([], np.zeros(100_001, np.int64))
    builder.finalize()
except OSError as error:
    print(type(error).__name__, error.errno, error)
"""


@pytest.mark.parametrize(("documents", "what"), [(2000, "tokens"), (100, "index")])
def test_file_size_limit_leaves_no_file(tmp_path: Path, documents: int, what: str) -> None:
    suffix = "bin" if what == "tokens" else "idx"
    said = ended(*PYTHON, FILL, tmp_path, "limit", documents, what).stdout
    assert "File too large while writing" in said and f"data.{suffix}'" in said
    assert names(tmp_path) == []


def test_full_disk_is_named_and_leaves_no_file(tmp_path: Path) -> None:
    script = '"$0" -c "$2" "$1" disk 2000 x; ls "$1"'
    done = on_small_disk(tmp_path, 1, "sh", "-c", script, sys.executable, tmp_path, FILL)
    assert "No space left on device while writing" in done.stdout
    assert done.stdout.count("\n") == 1, "something was left: " + done.stdout


REPLACE = """
import numpy as np, sys
from megapack.storage import IndexedDatasetBuilder
print("started", flush=True)
for i in range(1, 100_000):
    with IndexedDatasetBuilder(sys.argv[1] + "/data", np.uint16, overwrite=True) as builder:
        builder.add_documents(np.full(3 * i, i % 999), [0, i, 2 * i, 3 * i])
"""


def test_sigkill_leaves_a_complete_dataset_or_none(tmp_path: Path) -> None:
    waits, seen = random.Random(0), 0
    for _ in range(5):
        process = started(REPLACE, tmp_path, says="started")
        time.sleep(waits.uniform(0.01, 0.2))
        process.kill()
        process.wait()
        if IndexedDataset.exists(tmp_path / "data"):
            seen += 1
            assert not errors(tmp_path / "data")
    assert seen, "no dataset was ever finished: the test would pass vacuously"


# Writers that are killed after the last write, before the rename.
WRITERS = {
    "builder": (
        "from megapack.storage import IndexedDatasetBuilder\n"
        "with IndexedDatasetBuilder(root + '/data', overwrite=True) as builder:\n"
        "    builder.add_documents(np.zeros(500_000, np.int32), [0, 500_000])\n"
    ),
    "columns": (
        "from megapack.storage import ColumnSpec, IndexedDatasetBuilder\n"
        "columns = {'x': ColumnSpec(dtype='int8', shape=(3,))}\n"
        "options = {'columns': columns, 'overwrite': True}\n"
        "with IndexedDatasetBuilder(root + '/data', **options) as builder:\n"
        "    ids, rows = np.zeros(500_000, np.int32), np.zeros((500_000, 3), np.int8)\n"
        "    builder.add_documents(ids, [0, 500_000], columns={'x': rows})\n"
    ),
    "merge": (
        "from megapack.storage.merge import merge\n"
        "merge([root + '/a', root + '/b'], root + '/data', overwrite=True)\n"
    ),
    "import": (
        "from megapack.storage.importing import import_dataset\n"
        "import_dataset(root + '/a', root + '/data', link='copy', overwrite=True)\n"
    ),
    "pack": (
        "from megapack.cli.main import main\n"
        "main(['pack', root + '/a', '--output', root + '/data.samples', '--buckets', '64'])\n"
    ),
}
WAITING = """
import os, sys, time
import numpy as np
root = sys.argv[1]
def wait(_):
    print("written", flush=True)
    time.sleep(600)
os.fsync = wait
"""


def killed(program: str, root: Path) -> None:
    process = started(WAITING + program, root, says="written")
    process.kill()
    process.wait()


def temporary(root: Path) -> list[Path]:
    return sorted(root.glob("*.tmp-*"))


@pytest.mark.parametrize("writer", WRITERS)
def test_leftovers_of_a_killed_writer_are_removed(tmp_path: Path, writer: str) -> None:
    for name in "ab":
        with IndexedDatasetBuilder(tmp_path / name, np.int32) as builder:
            builder.add_documents(np.zeros(300_000, np.int32), [0, 30, 300_000])
    killed(WRITERS[writer], tmp_path)
    first = temporary(tmp_path)
    assert sum(path.stat().st_size for path in first) > 50, "it left something of size"
    assert not [path for path in tmp_path.glob("data.*") if path.suffix in (".bin", ".samples")]
    check = verify_samples if writer == "pack" else verify
    checked = check(str(tmp_path / ("data.samples" if writer == "pack" else "data")))
    said = [finding.message for finding in checked if finding.code == "leftover"]
    assert {path.name for path in first} == {Path(text.split(" ")[0]).name for text in said}
    killed(WRITERS[writer], tmp_path)
    second = temporary(tmp_path)
    assert len(second) == len(first) and not set(second) & set(first), "one killed run, not two"
    other = tmp_path / "other.bin.tmp-01234567"  # for another target
    other.write_bytes(b"x")
    program = "import sys\nimport numpy as np\nroot = sys.argv[1]\n" + WRITERS[writer]
    done = ended(*PYTHON, program, tmp_path)
    assert temporary(tmp_path) == [other]
    said = [line for line in done.stderr.splitlines() if line.startswith("removed ")]
    assert len(said) == len(second), done.stderr
    assert all(line.endswith(" bytes), left by a killed process") for line in said)


SLOW = """
import sys
from megapack.storage.files import AtomicFile
file = AtomicFile(sys.argv[1])
file.write(b"slow")
print("written", flush=True)
sys.stdin.read()
file.sync()
file.take_name()
"""


def test_temporary_files_of_running_processes_stay(tmp_path: Path) -> None:
    target = tmp_path / "data"
    process = started(SLOW, target, says="written")
    with atomic_write(target) as file:
        file.write(b"quick")
    assert target.read_bytes() == b"quick" and len(temporary(tmp_path)) == 1
    assert [finding.code for finding in leftovers(target)] == ["being-written"]
    process.communicate("")
    assert process.returncode == 0
    assert target.read_bytes() == b"slow" and temporary(tmp_path) == []


def test_foreign_files_with_temporary_names_stay(tmp_path: Path) -> None:
    """A temporary name contains a hash of the inode, so other files do not have one by chance."""
    for i, name in enumerate(
        ["data.tmp-1234567", "data.tmp", *(f"data.tmp-{i:08}" for i in range(9))]
    ):
        path = tmp_path / name
        (path.write_text if i % 3 else path.symlink_to)("precious")
    (tmp_path / "precious").write_bytes(b"x")
    os.mkfifo(tmp_path / "data.tmp-fifo0001")
    (tmp_path / "data.tmp-folder01").mkdir()
    before = {path.name: path.lstat()[:2] for path in tmp_path.iterdir()}  # mode, inode
    killed(
        "from megapack.storage.files import AtomicFile\nAtomicFile(root + '/data').sync()", tmp_path
    )
    (left,) = (name for name in names(tmp_path) if name not in before)
    (tmp_path / "copy").write_bytes(b"the name of a leftover, and another inode")
    (tmp_path / left).unlink()
    (tmp_path / "copy").rename(tmp_path / left)
    before[left] = (tmp_path / left).lstat()[:2]
    with atomic_write(tmp_path / "data") as file:
        file.write(b"y")
    (tmp_path / "data").unlink()
    assert before == {path.name: path.lstat()[:2] for path in tmp_path.iterdir()}


# ---- Existing files: kept, replaced or refused, by one rule -------------------------------------


def test_equal_files_stay_and_different_ones_need_overwrite(tmp_path: Path) -> None:
    path = tmp_path / "file"

    def never_asked() -> str:
        raise AssertionError("there is nothing to compare with")

    assert check_target(path, overwrite=False, difference=never_asked)
    path.write_text("x")
    assert not check_target(path, overwrite=False, difference=None)
    assert not check_target(path, overwrite=True, difference=None)
    assert not check_target(path, overwrite=False, difference=lambda: None)
    with pytest.raises(ConfigError, match=r"file exists already: its seed is 1, not 2.*--overwr"):
        check_target(path, overwrite=False, difference="its seed is 1, not 2")
    assert check_target(path, overwrite=True, difference=lambda: "its seed is 1, not 2")
    with pytest.raises(ConfigError, match=f"directory {tmp_path}/no does not exist; create it"):
        check_target(tmp_path / "no" / "file", overwrite=False, difference=None)


def test_link_stays_and_its_target_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    real, link = tmp_path / "far" / "real", tmp_path / "link"
    link.symlink_to("far/real")  # its target does not exist yet
    for text in ("first", "second"):
        with atomic_write(link, "w") as file:
            file.write(text)
        assert link.is_symlink() and real.read_text() == text and not real.is_symlink()
    assert names(tmp_path) == ["far", "link"] and names(real.parent) == ["real"]


def special_files(directory: Path) -> dict[str, Path]:
    (directory / "directory").mkdir()
    os.mkfifo(directory / "fifo")
    (directory / "circle").symlink_to("circle")
    (directory / "device").symlink_to("/dev/full")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(directory / "socket"))
    kinds = {"circle": "circular link", "device": "device", "fifo": "FIFO"}
    kinds |= {"socket": "socket", "directory": "directory"}
    return {kind: directory / name for name, kind in kinds.items()}


def test_only_regular_files_are_replaced(tmp_path: Path) -> None:
    """As root, a rename over /dev/full would replace the device."""
    for kind, path in special_files(tmp_path).items():
        before = path.lstat()
        for attempt in (
            lambda path=path: check_target(path, overwrite=True, difference="another"),
            lambda path=path: target_of(path),
            lambda path=path: AtomicFile(path),
            lambda path=path: atomic_write(path).__enter__(),
        ):
            with pytest.raises(ConfigError, match=f"{path.name} is a {kind}; only a regular file"):
                attempt()
        assert os.path.samestat(before, path.lstat())
    assert len(list(tmp_path.iterdir())) == 5


def test_names_too_long_for_a_temporary_ending_are_refused(tmp_path: Path) -> None:
    limit = os.pathconf(tmp_path, "PC_NAME_MAX") - TEMPORARY_BYTES
    fits = tmp_path / ("n" * limit)
    with atomic_write(fits, "w") as file:
        file.write("fits")
    assert fits.read_text() == "fits"
    for name in ("n" * (limit + 1), "\u00e4" * (limit // 2 + 1), "n" * 300):
        with pytest.raises(ConfigError, match=rf"has \d+ bytes; the limit is {limit}"):
            check_target(tmp_path / name, overwrite=True, difference=None)
        with pytest.raises(ConfigError, match="choose a shorter one"):
            AtomicFile(tmp_path / name)


# ---- Locks: the second writer's error names the first; locks of killed writers are free ----------


HOLD = """
import sys
from megapack.storage.locks import WriterLock
with WriterLock(sys.argv[1], what="a test", shared="shared" in sys.argv):
    print("held", flush=True)
    sys.stdin.read()
"""


def hold(path: Path, *how: str) -> subprocess.Popen[str]:
    """Start a process that holds the lock until its stdin ends."""
    return started(HOLD, path, *how, says="held")


def test_lock_error_names_host_process_and_purpose(tmp_path: Path) -> None:
    process = hold(tmp_path / "data")
    who = f"data is being written by process {process.pid} on {socket.gethostname()} .a test.; wait"
    with pytest.raises(LockedError, match=who):
        WriterLock(tmp_path / "data", what="another")
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(LockedError):
        WriterLock(tmp_path / "link" / "data", what="through a link")
    with WriterLock(tmp_path / "data2", what="another name"):
        pass
    process.communicate("")
    with WriterLock(tmp_path / "data", what="the next"):
        assert f"process {os.getpid()} on" in (tmp_path / "data.lock").read_text()
    assert names(tmp_path) == ["link"]


def test_writers_in_one_process_exclude_each_other(tmp_path: Path) -> None:
    with (
        WriterLock(tmp_path / "data", what="one"),
        pytest.raises(LockedError, match=f"process {os.getpid()} "),
    ):
        WriterLock(tmp_path / "data", what="two")
    WriterLock(tmp_path / "data", what="dropped")
    gc.collect()
    held = WriterLock(tmp_path / "data", what="three")
    held.release()
    held.release()
    assert not list(tmp_path.iterdir())


def test_lock_of_a_killed_writer_is_free(tmp_path: Path) -> None:
    process = hold(tmp_path / "data")
    process.kill()
    assert process.wait() == -signal.SIGKILL
    assert (tmp_path / "data.lock").exists()
    with WriterLock(tmp_path / "data", what="the next"):
        assert f"process {process.pid} " not in (tmp_path / "data.lock").read_text()


def test_forked_child_releases_no_file_or_lock_of_its_parent(tmp_path: Path) -> None:
    file, held = AtomicFile(tmp_path / "file"), WriterLock(tmp_path / "data", what="the parent")
    child = os.fork()
    if child == 0:
        file.discard()
        held.release()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert file.temporary.exists()
    with pytest.raises(LockedError):
        WriterLock(tmp_path / "data", what="another")
    held.release()
    file.discard()
    assert names(tmp_path) == []


def test_shared_locks_exclude_exclusive_ones(tmp_path: Path) -> None:
    first, second = hold(tmp_path / "data", "shared"), hold(tmp_path / "data", "shared")
    for leaves, stays in ((first, second), (second, None)):
        with pytest.raises(LockedError, match=f"{leaves.pid} .*" if stays is None else "; proc"):
            WriterLock(tmp_path / "data", what="alone")
        leaves.communicate("")
    assert not list(tmp_path.iterdir())
    with (
        WriterLock(tmp_path / "data", what="alone"),
        pytest.raises(LockedError, match=f"process {os.getpid()} .*alone"),
    ):
        WriterLock(tmp_path / "data", what="shared", shared=True)
    assert not list(tmp_path.iterdir())


COUNT = """
import sys
from pathlib import Path
from megapack.errors import LockedError
from megapack.storage.locks import WriterLock
counter = Path(sys.argv[1])
done = 0
while done < 60:
    try:
        with WriterLock(counter, what="counting"):
            counter.write_text(str(int(counter.read_text()) + 1))
            done += 1
    except LockedError:
        pass
"""


def test_only_one_process_holds_a_lock(tmp_path: Path) -> None:
    """Every process removes and creates the file; a lock on a removed file excludes no one."""
    counter = tmp_path / "counter"
    counter.write_text("0")
    processes = [subprocess.Popen([*PYTHON, COUNT, counter]) for _ in range(3)]
    assert [process.wait() for process in processes] == [0, 0, 0]
    assert counter.read_text() == "180"


def test_full_disk_error_names_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error of os.write, "No space left on device", does not name a file."""

    def full(descriptor: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match=r"while writing: '.*data\.lock'"):
        WriterLock(tmp_path / "data", what="test")
    assert not list(tmp_path.iterdir())
    monkeypatch.undo()
    with WriterLock(tmp_path / "data", what="test"):
        pass
