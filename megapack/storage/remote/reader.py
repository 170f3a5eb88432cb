"""Open a remote dataset: small files whole in the cache, tokens and columns by ranges.

- ``open_remote_pair``: the objects of a dataset, all from one upload, as a ``RemotePair``
- ``RemoteRows``: its .bin or a column as an array; ``read_consistently``: read several at once
- ``fetch_file``: one whole object; ``exists``: check for a dataset

Blocks are numbered from 0, 16 KiB each: 4,096 tokens of int32. A gather of tokens [5000, 9000) ::

    blocks = blocks_of(np.array([5000]), np.array([9000]), 4)       # -> [1, 2]
    tokens.want(blocks)                                            # other threads fetch them
    read_consistently([(tokens, blocks)], lambda: tokens.mapped[5000:9000].sum())
"""

from __future__ import annotations

import logging
import math
import mmap
import os
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import DTypeLike, NDArray

from megapack.errors import FormatError, MegapackError
from megapack.storage.address import split_address
from megapack.storage.columns import Column, ColumnEntry
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
from megapack.storage.remote.checksums import BLOCK_BYTES, SUFFIX, BlockChecksums, DatasetChecksums
from megapack.storage.remote.client import RemoteObject, find_object, missing

log = logging.getLogger(__name__)
T = TypeVar("T")

_SUFFIXES = (".idx", ".bin", ".meta.json", SUFFIX)
GAP_BLOCKS = 8  # merge two requests if at most this many unneeded blocks are between them
# Blocks per memory page, which is freed as a whole: 64 KiB on some ARM machines.
PAGE_BLOCKS = max(1, mmap.PAGESIZE // BLOCK_BYTES)
_MAP_NORESERVE = 0x4000  # Linux; mmap.MAP_NORESERVE needs Python 3.13


class RemoteRows:
    """Rows of equal width in one remote object, which may have more bytes: tokens (1-D) or a
    column. Slices and single rows are fetched, checked and copied. Read ``mapped`` only within
    ``read_consistently``.

    ``chunks`` are the cached blocks of the object, ``checksums`` those of its blocks (None:
    received bytes are not checked), ``dtype`` and ``shape`` those of all rows, ``(num_rows, ...)``.
    Raises MegapackError if the system has no address space for the object.
    """

    def __init__(
        self,
        remote_object: RemoteObject,
        chunks: Chunks,
        checksums: BlockChecksums | None,
        dtype: DTypeLike,
        shape: tuple[int, ...],
    ) -> None:
        self.dtype, self.shape = np.dtype(dtype), shape
        self.row_bytes = math.prod(shape[1:]) * self.dtype.itemsize
        self._object, self._checksums, self._chunks = remote_object, checksums, chunks
        self._cache = open_cache()
        self._flight_lock = threading.Lock()
        self._in_flight: dict[int, Future[None]] = {}  # block -> its request
        # Address space for the whole object; only pinned blocks use memory (``pin``).
        num_bytes = self._object.num_bytes
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        try:
            self._memory = mmap.mmap(-1, max(1, num_bytes), flags)
        except OSError as error:
            raise MegapackError(
                f"{self._object.url}: no address space for its {num_bytes:,} bytes "
                f"({error.strerror}): set vm.overcommit_memory to 0 or 1, `ulimit -v` to unlimited"
            ) from error
        self._bytes = np.frombuffer(self._memory, np.uint8)[:num_bytes]
        self._pin_lock = threading.Lock()
        num_pages = -(-num_bytes // (BLOCK_BYTES * PAGE_BLOCKS))
        self._pins = np.zeros(num_pages * PAGE_BLOCKS, np.int32)
        self._is_copied, self._seen = np.zeros((2, self._pins.size), np.bool_)

    @property
    def mapped_bytes(self) -> NDArray[np.uint8]:
        """Bytes of all rows, ``(nbytes,)``; 0 except those that are being read."""
        data = self._bytes[: self.nbytes]
        data.flags.writeable = False
        return data

    @property
    def mapped(self) -> NDArray[Any]:
        return self.mapped_bytes.view(self.dtype).reshape(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def nbytes(self) -> int:
        return len(self) * self.row_bytes

    def __getitem__(self, where: Any) -> Any:
        if not isinstance(where, slice):
            return self[where : where + 1 or None][0]
        begin, end, step = where.indices(len(self))
        if step != 1:
            raise ValueError(f"slice step is {step}; slices of remote rows are contiguous")
        ends = np.array([begin, max(begin, end)])
        wanted = [(self, blocks_of(ends[:1], ends[1:], self.row_bytes))]
        rows = read_consistently(wanted, self.mapped[begin:end].copy)
        rows.flags.writeable = False
        return rows

    def __array__(self, dtype: Any = None, copy: Any = None) -> NDArray[Any]:
        return np.asarray(self[:], dtype)

    def are_here(self, blocks: Blocks) -> bool:
        return bool(self._seen[blocks].all())

    def want(self, blocks: Blocks, *, copy: bool = False) -> set[Future[None]]:
        """Request missing blocks without waiting; return all requests that fetch them. ``copy``:
        use the thread pool that copies ahead of reads."""
        # If the cache has no size limit, a cached block is never evicted.
        unseen = blocks[~self._seen[blocks]] if self._cache.limit is None else blocks
        new = self._look(self._not_in_flight(unseen))
        with self._flight_lock:
            for first, last in requests_of(self._not_in_flight(new), GAP_BLOCKS):
                new_blocks = [block for block in range(first, last) if block not in self._in_flight]
                # ``_fetch`` removes the blocks from ``_in_flight`` under the same lock, so it
                # cannot do so before they are recorded below.
                request = self._cache.submit(self._fetch, first, last, new_blocks, copy=copy)
                self._in_flight.update(dict.fromkeys(new_blocks, request))
            return {self._in_flight[b] for b in unseen.tolist() if b in self._in_flight}

    def _not_in_flight(self, blocks: Blocks) -> Blocks:
        return np.array([b for b in blocks.tolist() if b not in self._in_flight], np.int64)

    def _look(self, blocks: Blocks, into: NDArray[np.uint8] | None = None) -> Blocks:
        """Call ``Chunks.copy`` and record which blocks are cached."""
        absent = self._chunks.copy(blocks, into)
        self._seen[blocks] = True
        self._seen[absent] = False
        return absent

    def _fetch(self, first: int, last: int, new_blocks: list[int]) -> None:
        """Fetch the missing blocks of ``[first, last)``, in a thread of the cache. ``new_blocks``
        are in flight until the request ends or fails."""
        try:
            self._cache.will_write((last - first) * BLOCK_BYTES)
            with self._cache.locks.held(str(self._chunks.folder), first, last - first):
                absent = self._chunks.copy(np.arange(first, last), None)
                # One request for all missing blocks; none if another process was faster.
                for begin, end in runs_of(absent, last - first):
                    end_byte = min(end * BLOCK_BYTES, self._object.num_bytes)
                    sums = self._checksums
                    check = partial(sums.check, begin) if sums else lambda _: None
                    data = self._object.read(begin * BLOCK_BYTES, end_byte, check)
                    with self._cache.naming_full_disk():
                        self._chunks.write(begin, data)
                    self._deliver(begin, data)
            self._seen[first:last] = True
        finally:
            with self._flight_lock:
                for block in new_blocks:
                    self._in_flight.pop(block, None)

    def _deliver(self, first: int, data: memoryview) -> None:
        """Copy received blocks to memory where they are pinned: they may be evicted before their
        reader looks for them, especially if it needs more bytes than the cache holds."""
        with self._pin_lock:
            blocks = np.arange(first, first + -(-len(data) // BLOCK_BYTES))
            wanted = blocks[(self._pins[blocks] > 0) & ~self._is_copied[blocks]]
            for begin, end in runs_of(wanted):
                part = data[(begin - first) * BLOCK_BYTES : (end - first) * BLOCK_BYTES]
                at = begin * BLOCK_BYTES
                self._bytes[at : at + len(part)] = np.frombuffer(part, np.uint8)
            self._is_copied[wanted] = True

    def pin(self, blocks: Blocks) -> None:
        """Keep copied blocks in memory until ``unpin``, called once per ``pin``."""
        with self._pin_lock:
            self._pins[blocks] += 1

    def copy(self, blocks: Blocks) -> Blocks:
        """Copy pinned blocks out of the cache; return the missing ones."""
        with self._pin_lock:
            wanted = blocks[~self._is_copied[blocks]]
            seen = wanted[self._seen[wanted]]
            absent = self._look(seen, self._bytes)
            self._is_copied[seen] = True
            self._is_copied[absent] = False
            return wanted[~self._is_copied[wanted]]

    def unpin(self, blocks: Blocks) -> None:
        """Undo one ``pin``; free memory that no thread reads."""
        with self._pin_lock:
            self._pins[blocks] -= 1
            pages = np.unique(blocks // PAGE_BLOCKS)
            free = pages[~self._pins.reshape(-1, PAGE_BLOCKS)[pages].any(axis=1)]
            self._is_copied.reshape(-1, PAGE_BLOCKS)[free] = False
            page_bytes = PAGE_BLOCKS * BLOCK_BYTES
            for first, last in runs_of(free):
                begin, num_bytes = first * page_bytes, (last - first) * page_bytes
                self._memory.madvise(mmap.MADV_DONTNEED, begin, num_bytes)

    @property
    def missing_bytes(self) -> int:
        return BLOCK_BYTES * int((~self._seen[: -(-self.nbytes // BLOCK_BYTES)]).sum())

    def num_missing(self, blocks: Blocks) -> int:
        return int((~self._seen[blocks]).sum())

    def awaited(self, blocks: Blocks) -> str | None:
        """Describe the first missing block and the process that fetches it, if any is missing."""
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


def blocks_of(begins: NDArray[np.int64], ends: NDArray[np.int64], row_bytes: int) -> Blocks:
    """Return the sorted, unique numbers of the blocks that contain ranges of rows, (num_ranges,)
    each, sorted and without overlap."""
    first, last = begins * row_bytes // BLOCK_BYTES, -(-ends * row_bytes // BLOCK_BYTES)
    # if two ranges share a block, count it for the first
    first[1:] = np.maximum(first[1:], last[:-1])
    counts = last - first
    before = np.cumsum(counts) - counts
    return np.repeat(first - before, counts) + np.arange(counts.sum())


def read_consistently(wanted: list[tuple[RemoteRows, Blocks]], read: Callable[[], T]) -> T:
    """Wait until all blocks in ``wanted`` are in memory, and return ``read()``. Raises TimeoutError
    after a long time without progress (``Patience``), and the errors of ``RemoteObject.read``."""
    for rows, blocks in wanted:
        rows.pin(blocks)
    try:
        absent = [(rows, rows.copy(blocks)) for rows, blocks in wanted]
        patience: Patience | None = None
        while any(blocks.size for _, blocks in absent):
            patience = patience or Patience(
                lambda: next(filter(None, (t.awaited(b) for t, b in wanted)), "received blocks"),
                lambda: sum(t.num_missing(b) for t, b in wanted),
            )
            patience.check()  # blocks may be evicted again and again
            requests = [rows.want(blocks) for rows, blocks in absent]
            wait_for(set[Future[None]]().union(*requests), patience)
            absent = [(rows, rows.copy(blocks)) for rows, blocks in absent]
        return read()
    finally:
        for rows, blocks in wanted:
            rows.unpin(blocks)


@dataclass(frozen=True)
class RemotePair:
    """One version of a remote dataset."""

    prefix: str
    local_prefix: str  # prefix of the copies of .idx and, if it exists, .meta.json
    index_object: RemoteObject
    bin_object: RemoteObject
    checksums: DatasetChecksums | None
    cache: Cache

    def open_tokens(self, dtype: DTypeLike, num_tokens: int) -> RemoteRows:
        """Return the tokens. Raises FormatError if the .checksums file belongs to another .bin, and
        the errors of ``RemoteRows``."""
        chunks, sums = Chunks(path_of(self.local_prefix, ".bin")), self.sums_of(self.bin_object)
        return RemoteRows(self.bin_object, chunks, sums, dtype, (num_tokens,))

    def open_columns(self, entries: Mapping[str, ColumnEntry]) -> dict[str, Column]:
        """Return columns, given their entries of the meta file. Raises FormatError if a column is
        missing or has another size, or the dataset was replaced after it was opened, and the errors
        of ``RemoteRows`` and ``RemoteObject.read``."""
        columns = {}
        objects = self.column_objects(entries)
        for (name, entry), column in zip(entries.items(), objects, strict=True):
            file_name, spec = split_address(column.url)[1], entry.spec
            # Each version gets its own cache entry, even if another tool replaced only this object.
            chunks = Chunks(self.cache.entry(file_name, self.prefix, column) / file_name)
            shape = (entry.bytes // spec.row_bytes, *spec.shape)
            rows = RemoteRows(column, chunks, self.sums_of(column), spec.numpy_dtype, shape)
            columns[name] = Column(name, entry, rows, rows.mapped_bytes)
        return columns

    def column_objects(self, entries: Mapping[str, ColumnEntry]) -> list[RemoteObject]:
        """Return the objects of columns. Raises the errors of ``open_columns``."""
        if not entries:
            return []
        urls = [f"{self.prefix}.{name}.col" for name in entries]
        objects = find_objects(urls)
        # An upload removes the .idx first: if it is unchanged, so were the columns.
        index = find_object(self.index_object.url)
        if index is None or index.version != self.index_object.version:
            raise FormatError(f"{self.prefix} was replaced after it was opened; open it again")
        for entry, url, column in zip(entries.values(), urls, objects, strict=True):
            if column is None or column.num_bytes != entry.bytes:
                actual = "does not exist" if column is None else f"has {column.num_bytes:,} bytes"
                raise FormatError(
                    f"{url} {actual}; the meta file says {entry.bytes:,} bytes: upload the dataset "
                    "again (`megapack-build upload`)"
                )
        return [column for column in objects if column is not None]

    def sums_of(self, remote_object: RemoteObject) -> BlockChecksums | None:
        """Return the checksums of .bin or a column; None without a .checksums file. Raises
        FormatError if they belong to a file of another size."""
        if self.checksums is None:
            return None
        suffix = remote_object.url.removeprefix(self.prefix)
        sums = self.checksums.blocks.get(suffix)
        if sums is None or sums.num_bytes != remote_object.num_bytes:
            size = "no bytes" if sums is None else f"{sums.num_bytes:,} bytes"
            raise FormatError(
                f"{self.prefix}{SUFFIX} belongs to a {suffix} of {size}, not "
                f"{remote_object.num_bytes:,}: upload the dataset again (`megapack-build upload`)"
            )
        return sums


def open_remote_pair(prefix: str) -> RemotePair:
    """Return the current objects of a dataset, all from one upload.

    An upload removes the old .idx first and writes the new one last (``upload_dataset``). So if the
    .idx does not change while the other objects are looked up, all objects belong together. Raises
    FileNotFoundError if .idx or .bin does not exist, FormatError if an object was replaced
    meanwhile or is damaged, and the other errors of ``RemoteObject.read``.
    """
    cache = open_cache()
    index, bin_object, meta, sums = find_objects(f"{prefix}{suffix}" for suffix in _SUFFIXES)
    if index is None or bin_object is None:
        raise missing(f"{prefix}{'.idx' if index is None else '.bin'}")
    _, name = split_address(prefix)
    entry = cache.entry(name, prefix, index, bin_object, meta, sums)
    local_prefix = str(entry / name)
    checksums, digests = None, dict[str, str]()
    if sums is not None:
        path = path_of(local_prefix, SUFFIX)
        cache.fetch(sums, path, DatasetChecksums.read)
        checksums = DatasetChecksums.read(path)
        digests = {suffix: digest for suffix, (_, digest) in checksums.files.items()}
    if meta is not None:
        check = _has_checksum(digests.get(".meta.json"))
        cache.fetch(meta, path_of(local_prefix, ".meta.json"), check)
    if not path_of(local_prefix, ".idx").exists():
        # The checksum of .idx is in the .checksums file, else in the meta file.
        recorded = None if checksums is not None else read_meta(local_prefix)
        expected = digests.get(".idx") if recorded is None else recorded["idx"]["xxh3_128"]
        cache.fetch(index, path_of(local_prefix, ".idx"), _has_checksum(expected))
        after = find_object(index.url)
        if after is None or after.version != index.version:
            raise FormatError(f"{prefix} was replaced while it was opened; open it again")
    if checksums is None:
        log.info(
            "%s has no %s (`megapack-build upload` writes it): reads compare lengths and versions",
            prefix,
            SUFFIX,
        )
    pair = RemotePair(prefix, local_prefix, index, bin_object, checksums, cache)
    pair.sums_of(bin_object)  # compares their sizes before the .idx is read
    return pair


def fetch_file(url: str, check: Callable[[Path], object] = lambda _: None) -> Path:
    """Return the local copy of a whole object; one process of the node fetches it. Raises
    FileNotFoundError if the object does not exist, and the errors of ``Cache.fetch``, which also
    describes ``check``."""
    remote_object = find_object(url)
    if remote_object is None:
        raise missing(url)
    cache = open_cache()
    name = split_address(url)[1]
    path = cache.entry(name, url, remote_object) / name
    cache.fetch(remote_object, path, check)
    return path


def exists(prefix: str) -> bool:
    """Return whether .idx and .bin exist. Raises the errors of ``RemoteObject.read``."""
    return all(find_objects(f"{prefix}{suffix}" for suffix in (".idx", ".bin")))


def find_objects(urls: Iterable[str]) -> list[RemoteObject | None]:
    """Return the current version of each object, or None. Raises the errors of
    ``RemoteObject.read``, except that an object may be missing."""
    with ThreadPoolExecutor(len(_SUFFIXES)) as pool:
        return list(pool.map(find_object, urls))


def _has_checksum(expected: str | None) -> Callable[[Path], object]:
    def check(path: Path) -> None:
        if expected is not None and file_checksum(path) != expected:
            raise FormatError(
                f"{os.fspath(path.name)} does not have its recorded checksum: the object is "
                "damaged, or was replaced without the rest of the dataset; upload it again"
            )

    return check
