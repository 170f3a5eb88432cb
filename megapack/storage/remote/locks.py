"""Locks between the processes of a node: the kernel's, so a process that dies holds none."""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import xxhash

from megapack.storage.remote.client import raise_if_ending

__all__ = ["RangeLocks"]

_POLL_SECONDS = 0.005
_FLOCK = struct.Struct("hhqqi4x")  # Linux: type, whence, begin, length, process


class RangeLocks:
    """Locks on ranges of numbers under a name, all in one file of which no byte is ever written.

    A name is a part of the file that its hash chooses; two names of one hash wait for each other
    now and then. The file is opened once and stays open: closing it anywhere would give all locks
    of the process back (POSIX). Nobody waits in the kernel: who waits can be told to stop.

    Args:
        path: of the file.
    """

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        # The kernel knows processes only; what threads of this one hold stands here.
        self._ours: list[tuple[int, int]] = []
        self._shared: Counter[int] = Counter()
        self._mutex = threading.Lock()

    @contextlib.contextmanager
    def held(
        self,
        name: str,
        first: int = 0,
        count: int = 1,
        *,
        waiting: Callable[[], object] = raise_if_ending,
    ) -> Iterator[None]:
        """Wait for numbers ``[first, first + count)`` of a name and keep everybody else away.

        Args:
            waiting: called again and again until they are free; what it raises ends it.
        """
        while True:
            with self.if_free(name, first, count) as free:
                if free:
                    yield
                    return
            waiting()
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
        """Wait until nobody has a name for himself, and keep it so until it is given back as often
        as it was shared, or this process ends."""
        begin = _begin(name)
        while not self._share(begin):
            raise_if_ending()
            time.sleep(_POLL_SECONDS)

    def give_back(self, name: str) -> None:
        """What ``share`` took."""
        begin = _begin(name)
        with self._mutex:
            self._shared[begin] -= 1
            if not self._shared[begin]:
                del self._shared[begin]
                fcntl.lockf(self._file, fcntl.LOCK_UN, 1, begin)

    def owner(self, name: str, first: int = 0) -> int | None:
        """The id of another process that holds a number of a name, if one does."""
        question = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, _begin(name) + first, 1, 0)
        kind, *_, process = _FLOCK.unpack(fcntl.fcntl(self._file, fcntl.F_GETLK, question))
        return None if kind == fcntl.F_UNLCK else int(process)

    def _lock(self, begin: int, end: int) -> bool:
        with self._mutex:
            if begin in self._shared or self._is_ours(begin, end):
                return False
            if not self._from_kernel(fcntl.LOCK_EX, begin, end):
                return False
            self._ours.append((begin, end))
            return True

    def _unlock(self, begin: int, end: int) -> None:
        with self._mutex:
            self._ours.remove((begin, end))
            fcntl.lockf(self._file, fcntl.LOCK_UN, end - begin, begin)

    def _share(self, begin: int) -> bool:
        with self._mutex:
            if self._is_ours(begin, begin + 1):
                return False
            if begin not in self._shared and not self._from_kernel(fcntl.LOCK_SH, begin, begin + 1):
                return False
            self._shared[begin] += 1
            return True

    def _is_ours(self, begin: int, end: int) -> bool:
        return any(begin < theirs_end and their < end for their, theirs_end in self._ours)

    def _from_kernel(self, kind: int, begin: int, end: int) -> bool:
        try:
            fcntl.lockf(self._file, kind | fcntl.LOCK_NB, end - begin, begin)
        except (BlockingIOError, PermissionError):  # POSIX allows either
            return False
        return True


def _begin(name: str) -> int:
    return (xxhash.xxh3_64_intdigest(name.encode()) & 0x3FFF_FFFF) << 32
