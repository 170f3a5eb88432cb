"""Locks between the processes of a node: the kernel's, so a process that dies holds none."""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import xxhash

__all__ = ["RangeLocks"]

_POLL_SECONDS = 0.005


class RangeLocks:
    """Locks on ranges of numbers under a name, all in one file of which no byte is ever written.

    A name is a part of the file that its hash chooses; two names of one hash wait for each other
    now and then. The file is opened once and stays open: closing it anywhere would give all locks
    of the process back (POSIX).

    Args:
        path: of the file.
    """

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        # The kernel knows processes only; what threads of this one hold stands here.
        self._ours: list[tuple[int, int]] = []
        self._mutex = threading.Lock()

    @contextlib.contextmanager
    def held(self, name: str, first: int = 0, count: int = 1) -> Iterator[None]:
        """Wait for numbers ``[first, first + count)`` of a name and keep everybody else away."""
        while True:
            with self.if_free(name, first, count) as free:
                if free:
                    yield
                    return
            time.sleep(_POLL_SECONDS)

    @contextlib.contextmanager
    def if_free(self, name: str, first: int = 0, count: int = 1) -> Iterator[bool]:
        """The same without waiting: whether they were free, and are held now."""
        begin = _begin(name) + first
        free = self._lock(begin, begin + count)
        try:
            yield free
        finally:
            if free:
                self._unlock(begin, begin + count)

    def share(self, name: str) -> None:
        """Wait until nobody has a name for himself, and keep it so until this process ends."""
        fcntl.lockf(self._file, fcntl.LOCK_SH, 1, _begin(name))

    def _lock(self, begin: int, end: int) -> bool:
        with self._mutex:
            if any(begin < theirs_end and their < end for their, theirs_end in self._ours):
                return False
            try:
                fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, end - begin, begin)
            except (BlockingIOError, PermissionError):  # POSIX allows either
                return False
            self._ours.append((begin, end))
            return True

    def _unlock(self, begin: int, end: int) -> None:
        with self._mutex:
            self._ours.remove((begin, end))
            fcntl.lockf(self._file, fcntl.LOCK_UN, end - begin, begin)


def _begin(name: str) -> int:
    return (xxhash.xxh3_64_intdigest(name.encode()) & 0x3FFF_FFFF) << 32
