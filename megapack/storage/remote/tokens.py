"""The tokens of a remote .bin: an array of which blocks are fetched when they are needed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import DTypeLike, NDArray

from megapack.errors import ConfigError
from megapack.storage.remote.cache import REQUEST_BYTES, Cache
from megapack.storage.remote.checksums import BLOCK_BYTES, BlockChecksums
from megapack.storage.remote.client import RemoteObject
from megapack.storage.remote.eviction import make_room
from megapack.storage.remote.sparse import PLANNED_SECONDS, SparseFile, runs_of

__all__ = ["Blocks", "RemoteTokens", "Stamp", "blocks_of", "read_consistently"]

T = TypeVar("T")
Blocks = NDArray[np.int64]
Stamp = NDArray[np.uint32]

GAP_BLOCKS = 8  # that are fetched, too, rather than ask twice
MANY_TIMES = 1000


class RemoteTokens:
    """Tokens of one .bin, 1-D. Slices and single tokens are fetched, checked and copied.

    Whoever reads the mapping itself (``mapped``) says so before (``hold``) and asks afterwards
    whether all of it had been there (``held``); ``read_consistently`` does both.

    Args:
        found: the .bin.
        path: of its local copy, in an entry of the cache.
        dtype: of the tokens; ``size``: how many of them there are.
        checksums: None: only lengths and the object's version are compared.
    """

    def __init__(
        self,
        found: RemoteObject,
        path: Path,
        *,
        dtype: DTypeLike,
        size: int,
        checksums: BlockChecksums | None,
        cache: Cache,
    ) -> None:
        self.dtype, self.size = np.dtype(dtype), size
        self._object, self._checksums, self._cache = found, checksums, cache
        self._file = SparseFile(path, found.num_bytes, cache.locks)
        self._lock = threading.Lock()
        self._coming: dict[int, Future[None]] = {}  # block -> its request
        cache.files.add(self._file)

    @property
    def mapped(self) -> NDArray[Any]:
        """(size,): the tokens that are here, zeros for all others."""
        return self._file.data[: self.size * self.dtype.itemsize].view(self.dtype)

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    def __getitem__(self, where: Any) -> Any:
        if not isinstance(where, slice):
            return self[where : where + 1 or None][0]
        begin, end, step = where.indices(self.size)
        if step != 1:
            raise ValueError(f"slice step is {step}; slices of remote tokens are contiguous")
        ends = np.array([begin, max(begin, end)])
        wanted = [(self, blocks_of(ends[:1], ends[1:], self.dtype.itemsize))]
        tokens = read_consistently(wanted, self.mapped[begin:end].copy)
        tokens.flags.writeable = False
        return tokens

    def __array__(self, dtype: Any = None, copy: Any = None) -> NDArray[Any]:
        return np.asarray(self[:], dtype)

    def want(self, blocks: Blocks) -> set[Future[None]]:
        """Have blocks fetched; returns at once.

        Args:
            blocks: ascending numbers, each once.

        Returns:
            The requests that bring those that are not here, other callers' included.
        """
        file = self._file
        file.stamps[blocks] = int(time.time()) + PLANNED_SECONDS
        absent = blocks[file.changes[blocks] % 2 == 0]
        if not absent.size:
            return set()
        with self._lock:
            new = np.array([b for b in absent.tolist() if b not in self._coming], np.int64)
            for begin, end in runs_of(new, GAP_BLOCKS):
                for first in range(begin, end, REQUEST_BYTES // BLOCK_BYTES):
                    last = min(first + REQUEST_BYTES // BLOCK_BYTES, end)
                    self._submit(first, last)
            return {self._coming[b] for b in absent.tolist() if b in self._coming}

    def are_here(self, blocks: Blocks) -> bool:
        """Whether blocks are all here just now."""
        return bool((self._file.changes[blocks] % 2).all())

    def hold(self, blocks: Blocks) -> Stamp:
        """Wait until blocks are here; what ``held`` compares with. Raises as RemoteObject.read."""
        for _ in range(MANY_TIMES):
            seen = self._file.changes[blocks]
            if (seen % 2).all():
                return seen
            for request in self.want(blocks):
                request.result()
        raise _too_small()

    def held(self, blocks: Blocks, seen: Stamp) -> bool:
        """Whether blocks have been here all the time since ``hold``; they are used now."""
        if not np.array_equal(self._file.changes[blocks], seen):
            return False
        self._file.stamps[blocks] = int(time.time())
        return True

    def _submit(self, first: int, last: int) -> None:
        request = self._cache.pool.submit(self._fetch, first, last)
        for block in range(first, last):
            self._coming.setdefault(block, request)
        request.add_done_callback(lambda done: self._forget(first, last, done))

    def _forget(self, first: int, last: int, done: Future[None]) -> None:
        with self._lock:
            for block in range(first, last):
                if self._coming.get(block) is done:
                    del self._coming[block]

    def _fetch(self, first: int, last: int) -> None:
        """In a thread of the pool: what is not here of blocks ``[first, last)``."""
        if self._cache.will_write((last - first) * BLOCK_BYTES):
            make_room(self._cache)
        with self._cache.locks.held(self._file.name, first, last - first):
            absent = np.flatnonzero(~self._file.is_here(first, last))
            if not absent.size:
                return  # another process was faster
            first, last = first + int(absent[0]), first + int(absent[-1]) + 1
            begin, end = first * BLOCK_BYTES, min(last * BLOCK_BYTES, self._object.num_bytes)
            data = self._object.read(begin, end, lambda data: self._check(first, data))
            with self._cache.naming_full_disk():
                self._file.put(first, last, data)

    def _check(self, first: int, data: memoryview) -> None:
        if self._checksums is not None:
            self._checksums.check(first, data)


def blocks_of(begins: NDArray[np.int64], ends: NDArray[np.int64], itemsize: int) -> Blocks:
    """Ascending numbers, each once, of the blocks that hold ranges of tokens, which are ascending
    and do not overlap, (num_ranges,) each."""
    first, last = begins * itemsize // BLOCK_BYTES, -(-ends * itemsize // BLOCK_BYTES)
    first[1:] = np.maximum(first[1:], last[:-1])  # a block of two ranges counts with the first
    counts = last - first
    before = np.cumsum(counts) - counts
    return np.repeat(first - before, counts) + np.arange(counts.sum())


def read_consistently(wanted: list[tuple[RemoteTokens, Blocks]], read: Callable[[], T]) -> T:
    """What ``read`` makes of mappings, called again until all blocks were there while it read.

    Raises:
        Whatever ``read`` and ``RemoteTokens.hold`` raise.
    """
    for _ in range(MANY_TIMES):
        if not all(tokens.are_here(blocks) for tokens, blocks in wanted):
            for tokens, blocks in wanted:
                tokens.want(blocks)  # all of them at once; then each is waited for
        seen = [tokens.hold(blocks) for tokens, blocks in wanted]
        result = read()
        if all(t.held(blocks, then) for (t, blocks), then in zip(wanted, seen, strict=True)):
            return result
    raise _too_small()


def _too_small() -> ConfigError:
    return ConfigError(
        "the cache drops what is needed faster than it can be read: let MEGAPACK_CACHE_SIZE be "
        "larger (256M and 128M for every process of the node are enough)"
    )
