"""A dataset far away, opened: small files whole in the cache, tokens by ranges.

- ``open_remote_pair``: the objects of a dataset, of one writer, as a ``RemotePair``
- ``RemoteTokens``: its .bin as an array; ``read_consistently``: a function of several of them
- ``fetch_file``: one object, whole; ``exists``: whether a dataset is there

Blocks are numbered from 0, 16 KiB each: 4,096 tokens of int32. A gather of tokens [5000, 9000) ::

    blocks = blocks_of(np.array([5000]), np.array([9000]), 4)       # -> [1, 2]
    tokens.want(blocks)                                            # fetched by other threads
    read_consistently([(tokens, blocks)], lambda: tokens.mapped[5000:9000].sum())
"""

from __future__ import annotations

import logging
import mmap
import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import DTypeLike, NDArray

from megapack.errors import FormatError, MegapackError
from megapack.storage.address import split_address
from megapack.storage.index_file import path_of
from megapack.storage.metadata import file_checksum, read_meta
from megapack.storage.remote.cache import (
    Blocks,
    Cache,
    Chunks,
    Patience,
    open_cache,
    requests_of,
    runs_of,
    wait_for,
)
from megapack.storage.remote.checksums import BLOCK_BYTES, SUFFIX, BlockChecksums
from megapack.storage.remote.client import RemoteObject, find_object, missing

T = TypeVar("T")

GAP_BLOCKS = 8  # that are fetched, too, rather than ask twice
# In a page of memory, which goes back to the system as a whole: 64 KiB on some ARM machines.
PAGE_BLOCKS = max(1, mmap.PAGESIZE // BLOCK_BYTES)
_MAP_NORESERVE = 0x4000  # Linux's, which the mmap module names from Python 3.13 on


class RemoteTokens:
    """Tokens of one .bin, 1-D. Slices and single tokens are fetched, checked and copied.

    Whoever reads ``mapped`` itself does it within ``read_consistently``.

    Args:
        pair: whose .bin it is.
        dtype: of the tokens; ``size``: how many of them there are.
    """

    def __init__(self, pair: RemotePair, dtype: DTypeLike, size: int) -> None:
        self.dtype, self.size = np.dtype(dtype), size
        self._object, self._checksums, self._cache = pair.bin_object, pair.checksums, pair.cache
        self._chunks = Chunks(path_of(pair.local_prefix, ".bin"))
        self._asking = threading.Lock()
        self._coming: dict[int, Future[None]] = {}  # block -> its request
        # Room for all of it, of which memory is what is being read (``pin``).
        num_bytes = self._object.num_bytes
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        try:
            self._memory = mmap.mmap(-1, max(1, num_bytes), flags)
        except OSError as error:
            raise MegapackError(
                f"{self._object.url}: the system gives no address space for its {num_bytes:,} "
                f"bytes ({error.strerror}): let vm.overcommit_memory be 0 or 1 and `ulimit -v` "
                "unlimited"
            ) from error
        self._bytes = np.frombuffer(self._memory, np.uint8)[:num_bytes]
        self._pinning = threading.Lock()
        num_pages = -(-num_bytes // (BLOCK_BYTES * PAGE_BLOCKS))
        self._pins = np.zeros(num_pages * PAGE_BLOCKS, np.int32)
        self._is_copied, self._seen = np.zeros((2, self._pins.size), np.bool_)

    @property
    def mapped(self) -> NDArray[Any]:
        """(size,): the tokens that are being read, zeros for all others."""
        tokens = self._bytes[: self.size * self.dtype.itemsize].view(self.dtype)
        tokens.flags.writeable = False
        return tokens

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

    def are_here(self, blocks: Blocks) -> bool:
        """Whether blocks are all in the cache, as far as this process has seen."""
        return bool(self._seen[blocks].all())

    def want(self, blocks: Blocks) -> set[Future[None]]:
        """Have blocks fetched; returns at once.

        Args:
            blocks: ascending numbers, each once.

        Returns:
            The requests that bring those that are not here, other callers' included.
        """
        # Where nothing is evicted, what was here once is not looked for again.
        unsure = blocks[~self._seen[blocks]] if self._cache.limit is None else blocks
        new = self._look(self._not_coming(unsure))
        with self._asking:
            for first, last in requests_of(self._not_coming(new), GAP_BLOCKS):
                mine = [block for block in range(first, last) if block not in self._coming]
                # Until they are written down the request cannot forget them: it takes the lock.
                request = self._cache.submit(self._fetch, first, last, mine)
                self._coming.update(dict.fromkeys(mine, request))
            return {self._coming[b] for b in unsure.tolist() if b in self._coming}

    def _not_coming(self, blocks: Blocks) -> Blocks:
        return np.array([b for b in blocks.tolist() if b not in self._coming], np.int64)

    def _look(self, blocks: Blocks, into: NDArray[np.uint8] | None = None) -> Blocks:
        """``Chunks.copy``, and remember what was seen."""
        absent = self._chunks.copy(blocks, into)
        self._seen[blocks] = True
        self._seen[absent] = False
        return absent

    def _fetch(self, first: int, last: int, mine: list[int]) -> None:
        """In a thread of the cache: what is not here of blocks ``[first, last)``. Those that others
        wait for are forgotten before anybody hears that the request is done, whatever became of it.
        """
        try:
            self._cache.will_write((last - first) * BLOCK_BYTES)
            with self._cache.locks.held(str(self._chunks.folder), first, last - first):
                absent = self._chunks.copy(np.arange(first, last), None)
                for begin, end in runs_of(absent, last - first):  # none: another was faster
                    data = self._object.read(
                        begin * BLOCK_BYTES,
                        min(end * BLOCK_BYTES, self._object.num_bytes),
                        partial(self._check, begin),
                    )
                    with self._cache.naming_full_disk():
                        self._chunks.write(begin, data)
            self._seen[first:last] = True
        finally:
            with self._asking:
                for block in mine:
                    self._coming.pop(block, None)

    def _check(self, first: int, data: memoryview) -> None:
        if self._checksums is not None:
            self._checksums.check(first, data)

    def pin(self, blocks: Blocks) -> None:
        """Keep what is copied of blocks in memory until they are unpinned as often."""
        with self._pinning:
            self._pins[blocks] += 1

    def copy(self, blocks: Blocks) -> Blocks:
        """Copy pinned blocks out of the cache; those that are not copied yet."""
        with self._pinning:
            wanted = blocks[~self._is_copied[blocks]]
            seen = wanted[self._seen[wanted]]
            absent = self._look(seen, self._bytes)
            self._is_copied[seen] = True
            self._is_copied[absent] = False
            return wanted[~self._is_copied[wanted]]

    def unpin(self, blocks: Blocks) -> None:
        """Give memory back that nobody reads any more."""
        with self._pinning:
            self._pins[blocks] -= 1
            pages = np.unique(blocks // PAGE_BLOCKS)
            free = pages[~self._pins.reshape(-1, PAGE_BLOCKS)[pages].any(axis=1)]
            self._is_copied.reshape(-1, PAGE_BLOCKS)[free] = False
            page_bytes = PAGE_BLOCKS * BLOCK_BYTES
            for first, last in runs_of(free):
                begin, num_bytes = first * page_bytes, (last - first) * page_bytes
                self._memory.madvise(mmap.MADV_DONTNEED, begin, num_bytes)

    def awaited(self, blocks: Blocks) -> str | None:
        """The first block that is not here and who fetches it, in words; None: all are here."""
        absent = blocks[~self._seen[blocks]]
        if not absent.size:
            return None
        block = int(absent[0])
        end = min((block + 1) * BLOCK_BYTES, self._object.num_bytes)
        owner = self._cache.locks.owner(str(self._chunks.folder), block)
        return (
            f"block {block} (bytes [{block * BLOCK_BYTES}, {end})) of {self._object.url}"
            + (f" and {absent.size - 1} more of it" if absent.size > 1 else "")
            + (f", which process {owner} of this node fetches" if owner else "")
        )


def blocks_of(begins: NDArray[np.int64], ends: NDArray[np.int64], itemsize: int) -> Blocks:
    """Ascending numbers, each once, of the blocks that hold ranges of tokens, which are ascending
    and do not overlap, (num_ranges,) each."""
    first, last = begins * itemsize // BLOCK_BYTES, -(-ends * itemsize // BLOCK_BYTES)
    first[1:] = np.maximum(first[1:], last[:-1])  # a block of two ranges counts with the first
    counts = last - first
    before = np.cumsum(counts) - counts
    return np.repeat(first - before, counts) + np.arange(counts.sum())


def read_consistently(wanted: list[tuple[RemoteTokens, Blocks]], read: Callable[[], T]) -> T:
    """``read()``, when blocks of .bin files are all in memory; they stay there meanwhile.

    Raises:
        TimeoutError: nothing of them came for long.
        Whatever ``read`` and ``RemoteObject.read`` raise.
    """
    for tokens, blocks in wanted:
        tokens.pin(blocks)
    try:
        absent = [(tokens, tokens.copy(blocks)) for tokens, blocks in wanted]
        patience: Patience | None = None
        while any(blocks.size for _, blocks in absent):
            patience = patience or Patience(
                partial(_awaited, wanted), partial(_num_missing, wanted)
            )
            patience.check()  # also where all of it comes and goes again
            requests = [tokens.want(blocks) for tokens, blocks in absent]
            wait_for(set[Future[None]]().union(*requests), patience)  # all of them at once
            absent = [(tokens, tokens.copy(blocks)) for tokens, blocks in absent]
        return read()
    finally:
        for tokens, blocks in wanted:
            tokens.unpin(blocks)


def _awaited(wanted: list[tuple[RemoteTokens, Blocks]]) -> str:
    missing = (tokens.awaited(blocks) for tokens, blocks in wanted)
    return next((text for text in missing if text), "blocks that came just now")


def _num_missing(wanted: list[tuple[RemoteTokens, Blocks]]) -> int:
    return sum(int((~tokens._seen[blocks]).sum()) for tokens, blocks in wanted)


# ---- Datasets and files -------------------------------------------------------------------------

log = logging.getLogger(__name__)

_SUFFIXES = (".idx", ".bin", ".meta.json", SUFFIX)


@dataclass(frozen=True, kw_only=True)
class RemotePair:
    """One version of a remote dataset.

    Attributes:
        local_prefix: where copies of .idx and, if there is one, .meta.json lie.
    """

    local_prefix: str
    bin_object: RemoteObject
    checksums: BlockChecksums | None
    cache: Cache


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
    if before is None or bin_object is None:
        raise missing(f"{prefix}{'.idx' if before is None else '.bin'}")
    _, name = split_address(prefix)
    entry = cache.entry(name, prefix, before, bin_object, meta, sums)
    local_prefix = str(entry / name)
    checksums, digests = None, dict[str, str]()
    if sums is not None:
        path = path_of(local_prefix, SUFFIX)
        cache.fetch(sums, path, BlockChecksums.read)
        checksums = BlockChecksums.read(path)
        digests = {suffix: digest for suffix, (_, digest) in checksums.files.items()}
        _check_sizes(prefix, checksums, bin_object)
    if meta is not None:
        check = _has_checksum(digests.get(".meta.json"))
        cache.fetch(meta, path_of(local_prefix, ".meta.json"), check)
    if not path_of(local_prefix, ".idx").exists():
        # By the best that is known of it; without a meta file nothing is.
        known = None if checksums is not None else read_meta(local_prefix)
        expected = digests.get(".idx") if known is None else known["idx"]["xxh3_128"]
        cache.fetch(before, path_of(local_prefix, ".idx"), _has_checksum(expected))
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
        local_prefix=local_prefix, bin_object=bin_object, checksums=checksums, cache=cache
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
        raise missing(url)
    cache = open_cache()
    _, name = split_address(url)
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


def _has_checksum(expected: str | None) -> Callable[[Path], object]:
    def check(path: Path) -> None:
        if expected is not None and file_checksum(path) != expected:
            raise FormatError(
                f"{os.fspath(path.name)} came without the checksum that is written down for it: "
                "the object is damaged, or was replaced by itself"
            )

    return check
