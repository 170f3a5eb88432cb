"""A remote dataset or file, opened: small files whole in the cache, .bin by ranges."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import DTypeLike, NDArray

from megapack.errors import ConfigError, FormatError
from megapack.storage.index_file import path_of
from megapack.storage.metadata import checksum, read_meta
from megapack.storage.remote.address import split
from megapack.storage.remote.cache import (
    PLANNED_SECONDS,
    REQUEST_BYTES,
    Cache,
    Patience,
    SparseFile,
    make_room,
    open_cache,
    runs_of,
    wait_for,
)
from megapack.storage.remote.checksums import BLOCK_BYTES, SUFFIX, BlockChecksums
from megapack.storage.remote.client import RemoteObject, find_object

# ---- The tokens of a remote .bin: an array of which blocks are fetched when they are needed -----

T = TypeVar("T")
Blocks = NDArray[np.int64]
Stamp = NDArray[np.uint32]

GAP_BLOCKS = 8  # that are fetched, too, rather than ask twice
AWAITED_SECONDS = PLANNED_SECONDS // 10  # of blocks that somebody waits for: they go last
MANY_TIMES = 1000  # that blocks are fetched, or read, before the cache is called too small


class RemoteTokens:
    """Tokens of one .bin, 1-D. Slices and single tokens are fetched, checked and copied.

    Whoever reads the mapping itself (``mapped``) looks before whether all of it is there (``hold``)
    and after whether it had been there all the time (``held``); ``read_consistently`` does both,
    and waits for what is not there.

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
        cache.add_file(self._file)

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

    def want(self, blocks: Blocks, within: int = PLANNED_SECONDS) -> set[Future[None]]:
        """Have blocks fetched; returns at once.

        Args:
            blocks: ascending numbers, each once.
            within: seconds in which they are needed, about: what is needed later is dropped sooner.

        Returns:
            The requests that bring those that are not here, other callers' included.
        """
        file = self._file
        file.stamps[blocks] = int(time.time()) + within
        absent = blocks[file.changes[blocks] % 2 == 0]
        if not absent.size:
            return set()
        with self._lock:
            new = np.array([b for b in absent.tolist() if b not in self._coming], np.int64)
            for begin, end in runs_of(new, GAP_BLOCKS):
                for first in range(begin, end, REQUEST_BYTES // BLOCK_BYTES):
                    self._request(first, min(first + REQUEST_BYTES // BLOCK_BYTES, end))
            return {self._coming[b] for b in absent.tolist()}

    def are_here(self, blocks: Blocks) -> bool:
        """Whether blocks are all here just now."""
        return bool((self._file.changes[blocks] % 2).all())

    def hold(self, blocks: Blocks) -> Stamp | None:
        """What ``held`` compares with, if blocks are all here just now."""
        seen = self._file.changes[blocks]
        return seen if (seen % 2).all() else None

    def held(self, blocks: Blocks, seen: Stamp | None) -> bool:
        """Whether blocks have been here all the time since ``hold``; they are used now."""
        if seen is None or not np.array_equal(self._file.changes[blocks], seen):
            return False
        self._file.stamps[blocks] = int(time.time())
        return True

    def num_changes(self, blocks: Blocks) -> int:
        """Grows when one of the blocks comes or goes."""
        return int(self._file.changes[blocks].sum(dtype=np.int64))

    def first_absent(self, blocks: Blocks) -> str | None:
        """The first block that is not here and who fetches it, in words; None: all are here."""
        absent = blocks[self._file.changes[blocks] % 2 == 0]
        if not absent.size:
            return None
        block = int(absent[0])
        end = min((block + 1) * BLOCK_BYTES, self._object.num_bytes)
        owner = self._cache.locks.owner(self._file.name, block)
        return (
            f"block {block} (bytes [{block * BLOCK_BYTES}, {end})) of {self._object.url}"
            + (f" and {absent.size - 1} more of it" if absent.size > 1 else "")
            + (f", which process {owner} of this node fetches" if owner else "")
        )

    def _request(self, first: int, last: int) -> None:
        """Have blocks ``[first, last)`` fetched that nobody fetches yet. The lock is held: until
        they are written down the request cannot forget them."""
        mine = [block for block in range(first, last) if block not in self._coming]
        request = self._cache.pool.submit(self._fetch, first, last, mine)
        self._coming.update(dict.fromkeys(mine, request))

    def _fetch(self, first: int, last: int, mine: list[int]) -> None:
        """In a thread of the pool: what is not here of blocks ``[first, last)``. Those that others
        wait for are forgotten before anybody hears that the request is done, whatever became of it.
        """
        try:
            if self._cache.will_write((last - first) * BLOCK_BYTES):
                make_room(self._cache)
            with self._cache.locks.held(self._file.name, first, last - first):
                self._fetch_absent(first, last)
        finally:
            with self._lock:
                for block in mine:
                    self._coming.pop(block, None)

    def _fetch_absent(self, first: int, last: int) -> None:
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
        TimeoutError: nothing of them came for long.
        ConfigError: they are dropped again and again before they can be read.
        Whatever ``read`` and ``RemoteObject.read`` raise.
    """
    patience: Patience | None = None
    for _ in range(MANY_TIMES):
        seen = [tokens.hold(blocks) for tokens, blocks in wanted]
        if all(stamp is not None for stamp in seen):
            result = read()
            if all(t.held(b, then) for (t, b), then in zip(wanted, seen, strict=True)):
                return result
        else:
            patience = patience or Patience(
                partial(_awaited, wanted), partial(_num_changes, wanted)
            )
            requests = [tokens.want(blocks, AWAITED_SECONDS) for tokens, blocks in wanted]
            wait_for(set[Future[None]]().union(*requests), patience)  # all of them at once
    raise ConfigError(
        "the cache drops what is needed faster than it can be read: let MEGAPACK_CACHE_SIZE be "
        "larger (256M and 128M for every process of the node are enough)"
    )


def _awaited(wanted: list[tuple[RemoteTokens, Blocks]]) -> str:
    absent = (tokens.first_absent(blocks) for tokens, blocks in wanted)
    return next((text for text in absent if text), "blocks that came just now")


def _num_changes(wanted: list[tuple[RemoteTokens, Blocks]]) -> int:
    return sum(tokens.num_changes(blocks) for tokens, blocks in wanted)


log = logging.getLogger(__name__)

_SUFFIXES = (".idx", ".bin", ".meta.json", SUFFIX)


@dataclass(frozen=True, kw_only=True)
class RemotePair:
    """One version of a remote dataset.

    Attributes:
        local_prefix: where copies of .idx and, if there is one, .meta.json lie.
    """

    prefix: str
    local_prefix: str
    bin_object: RemoteObject
    checksums: BlockChecksums | None
    cache: Cache

    def tokens(self, dtype: DTypeLike, size: int) -> RemoteTokens:
        """The .bin as an array of ``size`` tokens."""
        path = path_of(self.local_prefix, ".bin")
        return RemoteTokens(
            self.bin_object,
            path,
            dtype=dtype,
            size=size,
            checksums=self.checksums,
            cache=self.cache,
        )


def open_remote_pair(prefix: str) -> RemotePair:
    """The objects of a dataset as they are now, all of one writer.

    A writer removes the old .idx first and gives the new one its name last (``upload``). So an .idx
    that is the same before and after belongs to all that was found in between.

    Raises:
        FileNotFoundError: there is no .idx or no .bin.
        FormatError: an object was replaced meanwhile, or is damaged.
        ConfigError, OSError: as of ``RemoteObject.read``.
    """
    cache = open_cache()
    before, bin_object, meta, sums = _find(f"{prefix}{suffix}" for suffix in _SUFFIXES)
    for found, suffix in ((before, ".idx"), (bin_object, ".bin")):
        if found is None:
            raise FileNotFoundError(f"{prefix}{suffix} does not exist (or is not visible)")
    assert before is not None and bin_object is not None
    _, name = split(prefix)
    entry = cache.entry(name, prefix, before, bin_object, meta, sums)
    local_prefix = str(entry / name)
    checksums = None
    if sums is not None:
        path = path_of(local_prefix, SUFFIX)
        cache.fetch(sums, path, BlockChecksums.read)
        checksums = BlockChecksums.read(path)
        _check_sizes(prefix, checksums, bin_object)
    if meta is not None:
        check = _is_file(checksums, ".meta.json")
        cache.fetch(meta, path_of(local_prefix, ".meta.json"), check)
    if not path_of(local_prefix, ".idx").exists():
        cache.fetch(before, path_of(local_prefix, ".idx"), _check_of_index(local_prefix, checksums))
        after = find_object(before.url)
        if after is None or after.version != before.version:
            raise FormatError(f"{prefix} was replaced while it was opened; open it again")
    if checksums is None:
        log.info(
            "%s has no %s: of what is read only lengths and versions are compared "
            "(`megapack-build upload` writes it)",
            prefix,
            SUFFIX,
        )
    return RemotePair(
        prefix=prefix,
        local_prefix=local_prefix,
        bin_object=bin_object,
        checksums=checksums,
        cache=cache,
    )


def fetch_file(url: str, check: Callable[[Path], object] = lambda _: None) -> Path:
    """A whole object in the cache, fetched once by one process of the node.

    Args:
        url: its address.
        check: raises FormatError where the file that it is given is damaged.

    Raises:
        FileNotFoundError: it is not there.
        FormatError, ConfigError, OSError: as of ``Cache.fetch``.
    """
    found = find_object(url)
    if found is None:
        raise FileNotFoundError(f"{url} does not exist (or is not visible)")
    cache = open_cache()
    _, name = split(url)
    path = cache.entry(name, url, found) / name
    cache.fetch(found, path, check)
    return path


def exists(prefix: str) -> bool:
    """Whether .idx and .bin of a remote dataset are there. Raises as ``RemoteObject.read``."""
    return all(_find(f"{prefix}{suffix}" for suffix in (".idx", ".bin")))


def _find(urls: Iterable[str]) -> list[RemoteObject | None]:
    with ThreadPoolExecutor(len(_SUFFIXES)) as pool:
        return list(pool.map(find_object, urls))


def _check_sizes(prefix: str, checksums: BlockChecksums, bin_object: RemoteObject) -> None:
    if checksums.bin_bytes != bin_object.num_bytes:
        raise FormatError(
            f"{prefix}{SUFFIX} is of a .bin of {checksums.bin_bytes:,} bytes, the one that is "
            f"there has {bin_object.num_bytes:,}: write it again (`megapack-build upload`)"
        )


def _check_of_index(
    local_prefix: str, checksums: BlockChecksums | None
) -> Callable[[Path], object]:
    """By the best that is known of it; without a meta file nothing is."""
    if checksums is not None:
        return _is_file(checksums, ".idx")
    meta = read_meta(local_prefix)
    return _has_checksum(None if meta is None else meta["idx"]["xxh3_128"])


def _is_file(checksums: BlockChecksums | None, suffix: str) -> Callable[[Path], object]:
    known = None if checksums is None else checksums.files.get(suffix)
    return _has_checksum(None if known is None else known[1])


def _has_checksum(expected: str | None) -> Callable[[Path], object]:
    def check(path: Path) -> None:
        if expected is not None and checksum(path) != expected:
            raise FormatError(
                f"{os.fspath(path.name)} came without the checksum that is written down for it: "
                "the object is damaged, or was replaced by itself"
            )

    return check
