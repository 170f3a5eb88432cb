"""Python programs in processes of their own, which tests talk to by lines."""

from __future__ import annotations

import subprocess
import sys

__all__ = ["answer", "started", "tell"]


def started(program: str, *arguments: object, says: str = "ready") -> subprocess.Popen[str]:
    """A program that has printed its first line, which is this; ``communicate("")`` ends it."""
    command = [sys.executable, "-c", program, *map(str, arguments)]
    process = subprocess.Popen(command, stdin=-1, stdout=-1, text=True)
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
