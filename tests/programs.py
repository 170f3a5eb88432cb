"""Run programs to their end, or start them and exchange lines with them."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

__all__ = ["PEAK_BYTES", "PYTHON", "answer", "ended", "on_small_disk", "started", "tell"]

PYTHON = (sys.executable, "-c")
# Code that a program needs to measure its peak memory. ru_maxrss would not do: it starts with the
# value of the parent, here a test process.
PEAK_BYTES = """
import pathlib, re
def peak_bytes():
    status = pathlib.Path("/proc/self/status").read_text()
    return 1024 * int(re.search(r"VmHWM:\\s+(\\d+)", status)[1])
"""


def ended(*command: object, status: int | None = 0, **how: Any) -> subprocess.CompletedProcess[str]:
    """Run a command, check its status unless that is None, and return its output."""
    words = [str(word) for word in command]
    done = subprocess.run(words, check=False, capture_output=True, text=True, **how)
    assert status is None or done.returncode == status, done
    return done


def on_small_disk(
    disk: Path, megabytes: int, *command: object, **how: Any
) -> subprocess.CompletedProcess[str]:
    """Run a command that sees ``disk`` as a file system of this size; skip if it cannot."""
    if shutil.which("unshare") is None:
        pytest.skip("no unshare")
    mount = f'mount -t tmpfs -o size={megabytes}m none "$0" || exit 77; exec "$@"'
    done = ended("unshare", "-rm", "sh", "-c", mount, disk, *command, status=None, **how)
    if done.returncode == 77 or "unshare failed" in done.stderr:
        pytest.skip(f"mounting is not allowed here: {done.stderr.strip()}")
    assert done.returncode == 0, done
    return done


def started(program: str, *arguments: object, says: str = "ready") -> subprocess.Popen[str]:
    """Start a Python program and wait for its first line; ``communicate("")`` ends it."""
    process = subprocess.Popen(
        [*PYTHON, program, *map(str, arguments)], stdin=-1, stdout=-1, text=True
    )
    assert answer(process) == says
    return process


def tell(process: subprocess.Popen[str]) -> None:
    """Send an empty line."""
    assert process.stdin is not None
    print(file=process.stdin, flush=True)


def answer(process: subprocess.Popen[str]) -> str:
    """Return the next line."""
    assert process.stdout is not None
    return process.stdout.readline().strip()
