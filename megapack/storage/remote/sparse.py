"""A file of which only some blocks are here, shared by all processes that map it.

Beside the file lies its state, two uint32 per block, mapped and written by everybody:

- ``changes`` counts how often the block came or went: odd, it is here, whole and checked
- ``stamps``: seconds since 1970. In the past: when it was last used. In the future: it is planned
  for; the later it is needed, the larger the stamp.

Readers take no lock. They look at ``changes``, read, and look again: where a block went meanwhile,
its count differs and what was read is thrown away (a sequence lock). Writers hold a range lock, so
a count is raised by one of them at a time. One that dies leaves its blocks even: not here.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import struct
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megapack.errors import ConfigError
from megapack.storage.remote.checksums import BLOCK_BYTES
from megapack.storage.remote.locks import RangeLocks

__all__ = ["PLANNED_SECONDS", "SparseFile", "runs_of"]

PLANNED_SECONDS = 600  # how far in the future the stamp of a planned block is

_HEADER = struct.Struct("<8s36sxxxxqq")  # magic, boot, size of the file, bytes of a block
_MAGIC = b"MEGASTAT"
_KEEP_SIZE, _PUNCH_HOLE = 1, 2  # of Linux's fallocate
_libc = ctypes.CDLL(None, use_errno=True)


class SparseFile:
    """One of them, mapped.

    Args:
        path: of the file; the state is ``<path>.state``.
        num_bytes: its size.
        locks: of the cache.

    Attributes:
        data: uint8 (num_bytes,), read-only; what is not here reads as zeros.
        changes, stamps: uint32 (num_blocks,), shared.

    Raises:
        OSError: the files cannot be made.
    """

    def __init__(self, path: Path, num_bytes: int, locks: RangeLocks) -> None:
        self.path, self.num_bytes, self.name = path, num_bytes, str(path)
        self.num_blocks = -(-num_bytes // BLOCK_BYTES)
        self._locks = locks
        state_path = path.with_name(f"{path.name}.state")
        with locks.held(f"{self.name}.state"):
            if not _is_valid(state_path, num_bytes):
                self._create(state_path)
            with path.open("rb") as file:
                self._identity = _identity(file.fileno())
                self.data: NDArray[np.uint8] = _mapped(file.fileno(), num_bytes, mmap.PROT_READ)
        with state_path.open("r+b") as file:
            size = _HEADER.size + 8 * self.num_blocks
            state = _mapped(file.fileno(), size, mmap.PROT_READ | mmap.PROT_WRITE)
        self.changes, self.stamps = state[_HEADER.size :].view(np.uint32).reshape(2, -1)

    def _create(self, state_path: Path) -> None:
        """Both files, empty. What an earlier boot left may never have reached the disk."""
        self.path.unlink(missing_ok=True)
        with self.path.open("xb") as file:
            file.truncate(self.num_bytes)
        temporary = state_path.with_name(f"{state_path.name}.tmp")
        with temporary.open("wb") as file:
            file.write(_HEADER.pack(_MAGIC, _boot(), self.num_bytes, BLOCK_BYTES))
            # All of it now: a full disk would else end whoever writes to the mapping (SIGBUS).
            os.posix_fallocate(file.fileno(), 0, _HEADER.size + 8 * max(self.num_blocks, 1))
        temporary.replace(state_path)

    def is_here(self, first: int, last: int) -> NDArray[np.bool_]:
        """(last - first,) of blocks ``[first, last)``."""
        here: NDArray[np.bool_] = self.changes[first:last] % 2 == 1
        return here

    def put(self, first: int, last: int, data: memoryview) -> None:
        """Write those of blocks ``[first, last)`` that are not here. The caller holds their lock.

        Raises:
            OSError: the disk is full, or the file was removed.
        """
        file = self._open()
        try:
            for begin, end in runs_of(np.flatnonzero(~self.is_here(first, last))):
                part = data[begin * BLOCK_BYTES : end * BLOCK_BYTES]
                at = (first + begin) * BLOCK_BYTES
                while part:
                    written = os.pwrite(file, part, at)
                    part, at = part[written:], at + written
                stamps = self.stamps[first + begin : first + end]
                stamps[:] = np.maximum(stamps, int(time.time()))  # what is planned stays so
                self.changes[first + begin : first + end] += 1
        finally:
            os.close(file)

    def drop(self, blocks: NDArray[np.int64]) -> None:
        """Give the disk space of blocks back, but of those that somebody writes just now."""
        file = self._open()
        try:
            for begin, end in runs_of(blocks):
                with self._locks.if_free(self.name, begin, end - begin) as free:
                    if free:
                        here = np.flatnonzero(self.is_here(begin, end))
                        self.changes[begin + here] += 1  # first: who reads now sees it afterwards
                        _punch(file, begin * BLOCK_BYTES, (end - begin) * BLOCK_BYTES)
        finally:
            os.close(file)

    def _open(self) -> int:
        file = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
        if _identity(file) != self._identity:
            os.close(file)
            raise FileNotFoundError(
                errno.ENOENT, "removed from the cache while it was in use", self.name
            )
        return file


def runs_of(numbers: NDArray[np.int64], gap: int = 0) -> list[tuple[int, int]]:
    """Half-open ranges that hold ascending numbers, over gaps of up to so many others."""
    if not numbers.size:
        return []
    breaks = np.flatnonzero(np.diff(numbers) > 1 + gap)
    begins = numbers[np.concatenate([[0], breaks + 1])]
    ends = numbers[np.concatenate([breaks, [numbers.size - 1]])] + 1
    return list(zip(begins.tolist(), ends.tolist(), strict=True))


def _is_valid(state_path: Path, num_bytes: int) -> bool:
    try:
        with state_path.open("rb") as file:
            return file.read(_HEADER.size) == _HEADER.pack(_MAGIC, _boot(), num_bytes, BLOCK_BYTES)
    except FileNotFoundError:
        return False


def _boot() -> bytes:
    """What differs after every start of the machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_bytes().strip()


def _identity(file: int) -> tuple[int, int]:
    status = os.fstat(file)
    return status.st_dev, status.st_ino


def _mapped(file: int, num_bytes: int, access: int) -> NDArray[Any]:
    if num_bytes == 0:
        return np.zeros(0, np.uint8)
    return np.frombuffer(mmap.mmap(file, num_bytes, mmap.MAP_SHARED, access), np.uint8)


def _punch(file: int, begin: int, num_bytes: int) -> None:
    offset, length = ctypes.c_longlong(begin), ctypes.c_longlong(num_bytes)
    if _libc.fallocate(file, _KEEP_SIZE | _PUNCH_HOLE, offset, length) != 0:
        code = ctypes.get_errno()
        if code == errno.EOPNOTSUPP:
            raise ConfigError(
                "the cache's file system cannot free parts of a file (punch holes): put "
                "MEGAPACK_CACHE on ext4, xfs, btrfs or tmpfs, or leave out MEGAPACK_CACHE_SIZE"
            )
        raise OSError(code, os.strerror(code))
