"""Of two writers of one name the second is told who the first is; a dead one locks nobody out."""

from __future__ import annotations

import errno
import gc
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from megapack.errors import LockedError
from megapack.storage.files import WriterLock

HOLD = """
import sys
from megapack.storage.files import WriterLock
with WriterLock(sys.argv[1], what="a test", shared="shared" in sys.argv):
    print("held", flush=True)
    sys.stdin.read()
"""


def hold(path: Path, *how: str) -> subprocess.Popen[str]:
    """A process that holds the lock until its stdin ends."""
    command = [sys.executable, "-c", HOLD, str(path), *how]
    process = subprocess.Popen(command, stdin=-1, stdout=-1, text=True)
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    return process


def test_the_second_writer_is_told_host_process_and_purpose(tmp_path: Path) -> None:
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
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link"]


def test_two_writers_of_one_process_exclude_each_other(tmp_path: Path) -> None:
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


def test_a_killed_writer_locks_nobody_out(tmp_path: Path) -> None:
    process = hold(tmp_path / "data")
    process.kill()
    assert process.wait() == -signal.SIGKILL
    assert (tmp_path / "data.lock").exists()
    with WriterLock(tmp_path / "data", what="the next"):
        assert f"process {process.pid} " not in (tmp_path / "data.lock").read_text()


def test_a_forked_child_does_not_unlock_its_parent(tmp_path: Path) -> None:
    held = WriterLock(tmp_path / "data", what="the parent")
    child = os.fork()
    if child == 0:
        held.release()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    with pytest.raises(LockedError):
        WriterLock(tmp_path / "data", what="another")
    held.release()


def test_many_share_it_and_nobody_holds_it_alone_then(tmp_path: Path) -> None:
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
from megapack.storage.files import WriterLock
counter = Path(sys.argv[1])
done = 0
while done < 200:
    try:
        with WriterLock(counter, what="counting"):
            counter.write_text(str(int(counter.read_text()) + 1))
            done += 1
    except LockedError:
        pass
"""


def test_no_two_processes_hold_it_at_once(tmp_path: Path) -> None:
    """The file is removed and made anew at every turn; a lock on a removed file is none."""
    counter = tmp_path / "counter"
    counter.write_text("0")
    command = [sys.executable, "-c", COUNT, str(counter)]
    processes = [subprocess.Popen(command) for _ in range(3)]
    assert [process.wait() for process in processes] == [0, 0, 0]
    assert counter.read_text() == "600"


def test_disk_without_room_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """os.write names no file: "No space left on device" alone would say nothing."""

    def full(descriptor: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match=r"while writing: '.*data\.lock'"):
        WriterLock(tmp_path / "data", what="test")
    assert not list(tmp_path.iterdir())
    monkeypatch.undo()
    with WriterLock(tmp_path / "data", what="test"):
        pass
