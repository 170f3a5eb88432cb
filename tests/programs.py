"""Programs in processes of their own: run to their end, or talked to by lines."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

__all__ = ["PEAK_BYTES", "PYTHON", "answer", "ended", "on_small_disk", "started", "tell"]

PYTHON = (sys.executable, "-c")
# Put before a program that tells its memory. Not by ru_maxrss: a process begins with that of the
# one that started it, here of a test process, and would seem to need nothing.
PEAK_BYTES = """
import pathlib, re
def peak_bytes():
    status = pathlib.Path("/proc/self/status").read_text()
    return 1024 * int(re.search(r"VmHWM:\\s+(\\d+)", status)[1])
"""


def ended(*command: object, status: int | None = 0, **how: Any) -> subprocess.CompletedProcess[str]:
    """A command that has ended, with this status if one is given, and what it said."""
    words = [str(word) for word in command]
    done = subprocess.run(words, check=False, capture_output=True, text=True, **how)
    assert status is None or done.returncode == status, done
    return done


def on_small_disk(
    disk: Path, megabytes: int, *command: object, **how: Any
) -> subprocess.CompletedProcess[str]:
    """``ended``, where the folder is a real file system of this size, seen by the command alone;
    skips where nobody may mount one.
    """
    if shutil.which("unshare") is None:
        pytest.skip("no unshare")
    mount = f'mount -t tmpfs -o size={megabytes}m none "$0" || exit 77; exec "$@"'
    done = ended("unshare", "-rm", "sh", "-c", mount, disk, *command, status=None, **how)
    if done.returncode == 77 or "unshare failed" in done.stderr:
        pytest.skip(f"mounting is not allowed here: {done.stderr.strip()}")
    assert done.returncode == 0, done
    return done


def started(program: str, *arguments: object, says: str = "ready") -> subprocess.Popen[str]:
    """A program of Python that has printed its first line, which is this; ``communicate("")`` ends
    it.
    """
    process = subprocess.Popen(
        [*PYTHON, program, *map(str, arguments)], stdin=-1, stdout=-1, text=True
    )
    assert answer(process) == says
    return process


def tell(process: subprocess.Popen[str]) -> None:
    """Send it a line."""
    assert process.stdin is not None
    print(file=process.stdin, flush=True)


def answer(process: subprocess.Popen[str]) -> str:
    """Its next line."""
    assert process.stdout is not None
    return process.stdout.readline().strip()
