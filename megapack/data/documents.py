"""Documents of sources, on disk or in an object store, opened on first use.

- ``SourceDocuments``: one source, a list of shards; ``open_source`` and ``open_sources`` open it.
- ``carried_columns``: the columns that batches carry.
- ``RemoteReads``: prefetches the parts of object stores that a gather reads, and checks them.

    source = open_source("docs", SampleIndex.load("docs.samples"))
    source.open(0).tokens                            # tokens of the only shard
"""

from __future__ import annotations

import abc
import logging
import os
import threading
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import cached_property
from itertools import chain, pairwise
from typing import Any, Literal, TypeAlias, TypeVar

import numpy as np
import xxhash
from numpy.typing import NDArray

from megapack import _core
from megapack.config import check_known
from megapack.errors import ConfigError, IndexMismatchError, MegapackWarning
from megapack.packing.shard_packing import packed_columns
from megapack.packing.sharded import PackedColumn, ShardedIndex, SourceIndex, load_index
from megapack.storage import IndexedDataset
from megapack.storage.address import is_remote
from megapack.storage.columns import INTERPRETED, LABELS, WEIGHTS, Column, ColumnSpec
from megapack.storage.dataset import check_converted
from megapack.storage.metadata import common_metadata, differing_tokens
from megapack.storage.remote.cache import CHUNK_BLOCKS, NUM_COPIES, open_cache
from megapack.storage.remote.checksums import BLOCK_BYTES
from megapack.storage.remote.reader import RemoteRows, blocks_of, read_consistently

Ids = NDArray[np.int64]

logger = logging.getLogger("megapack")

_BLOCKS, _BLOCK_TOKENS = 64, 1 << 16


class SourceDocuments(abc.ABC):
    """Documents of one source, a list of shards. ``DatasetDocuments`` has one shard,
    ``ShardedDocuments`` has the shards of a manifest."""

    prefix: str  # of the dataset, or path of the manifest, for messages
    dtype: np.dtype[Any]  # token dtype, the widest of all shards
    vocab_size: int | None  # token ids of the tokenizer; None if unknown
    meta: dict[str, Any] | None
    """``max_token_id``, ``document_end_token`` and other facts; None if a meta file is missing."""
    num_documents: int
    num_tokens: int
    is_remote: bool  # some shard is in an object store
    ignored: Collection[str]  # names of columns that are not used, such as ``labels``
    columns: list[tuple[str, Mapping[str, PackedColumn]]]
    """Prefix and columns of every shard, without ignored ones."""
    num_shards: int = 1
    shard_index: SourceIndex | None = None
    """Samples of the shard manifest that names these documents."""

    @property
    def has_labels(self) -> bool:
        """True if the labels of some shard are a column."""
        return any(LABELS in columns for _, columns in self.columns)

    @property
    def weights_identity(self) -> str | None:
        """Digest of the loss weights; None without weights."""
        weights = [columns.get(WEIGHTS) for _, columns in self.columns]
        identities = [None if column is None else column.identity for column in weights]
        return xxhash.xxh3_64_hexdigest(repr(identities).encode()) if any(identities) else None

    @property
    @abc.abstractmethod
    def fingerprint(self) -> str:
        """Identity of the layout of all documents."""

    @abc.abstractmethod
    def open(self, number: int) -> IndexedDataset:
        """Return one shard, mapped. Raises IndexMismatchError if it does not have the documents
        that were packed, FormatError or OSError if a file is damaged or missing."""

    def open_columns(self, shard: IndexedDataset, names: Iterable[str]) -> dict[str, Column]:
        """Return the columns of an open shard that are in ``names`` and are not ignored. Raises the
        errors of ``IndexedDataset.columns``."""
        existing = [name for name in names if name in _used_columns(shard, self.ignored)]
        columns = shard.columns if existing else {}
        return {name: columns[name] for name in existing}

    def document_tokens(self, fact: str) -> set[Any]:
        """Return the tokens that the meta files name as ``fact``, one of ``BOUNDARY_TOKENS``; None:
        a meta file does not have it; "unknown": the meta file is missing."""
        return {"unknown" if self.meta is None else self.meta.get(fact)}

    @abc.abstractmethod
    def largest_token_id(self, at_least: int) -> tuple[str, int]:
        """Return the dataset with the largest id of tokens and labels, and this id. May skip files
        whose dtype cannot store ids of ``at_least`` or more."""


class DatasetDocuments(SourceDocuments):
    """Documents of one dataset. Raises ConfigError if labels or loss weights of an earlier version
    exist, FormatError if the meta file is damaged."""

    def __init__(self, dataset: IndexedDataset, ignored: Collection[str] = ()) -> None:
        self.dataset, self.ignored = dataset, ignored
        self.prefix, self.dtype, self.meta = dataset.prefix, dataset.dtype, dataset.meta
        self.num_documents, self.num_tokens = dataset.num_documents, dataset.num_tokens
        self.vocab_size, self.is_remote = dataset.vocab_size, is_remote(dataset.prefix)
        columns = _used_columns(dataset, ignored)
        check_converted(self.prefix, {*columns, *ignored})
        self.columns = [(self.prefix, columns)]

    @property
    def fingerprint(self) -> str:
        return self.dataset.fingerprint

    def open(self, number: int) -> IndexedDataset:
        assert number == 0, "a dataset is one shard"
        return self.dataset

    def largest_token_id(self, at_least: int) -> tuple[str, int]:
        largest = -1
        if np.iinfo(self.dtype).max >= at_least:
            largest = largest_id(self.dataset)
        for labels in self.open_columns(self.dataset, [LABELS]).values():
            if labels.largest > largest:
                return f"column {LABELS} of {self.prefix}", labels.largest
        return self.prefix, largest


def _used_columns(dataset: IndexedDataset, ignored: Collection[str]) -> dict[str, PackedColumn]:
    columns = packed_columns(dataset)
    return {name: column for name, column in columns.items() if name not in ignored}


def largest_id(dataset: IndexedDataset) -> int:
    """Return the largest id, or -1 without tokens. Without a meta file, sample some blocks."""
    if dataset.meta is not None:
        recorded = dataset.meta["max_token_id"]
        return -1 if recorded is None else int(recorded)
    begins = range(0, dataset.num_tokens, _BLOCK_TOKENS)
    if len(begins) > _BLOCKS:
        begins = begins[:: len(begins) // _BLOCKS]
        logger.warning(
            "%s has no .meta.json (`megapack-build import` writes one): token ids were checked in "
            "%.1f %% of it",
            dataset.prefix,
            100 * len(begins) * _BLOCK_TOKENS / dataset.num_tokens,
        )
    blocks = (dataset.tokens[begin : begin + _BLOCK_TOKENS] for begin in begins)
    return max((_core.token_range(block)[1] for block in blocks), default=-1)


# Documents of one source in an argument; None: the shard manifest names them.
Documents: TypeAlias = "IndexedDataset | SourceDocuments | str | os.PathLike[str] | None"
Index: TypeAlias = "SourceIndex | str | os.PathLike[str]"


class ShardedDocuments(SourceDocuments):
    """Documents of a shard manifest; ``open`` maps one shard."""

    def __init__(self, index: ShardedIndex, ignored: Collection[str] = ()) -> None:
        self.index, self.ignored = index, ignored
        self.shard_index, self.prefix = index, str(index.path)
        self.num_documents, self.num_tokens = index.num_documents, index.num_tokens
        self.is_remote = any(is_remote(shard.prefix) for shard in index.shards)
        self.num_shards = len(index.shards)
        self.columns = [
            (shard.prefix, {n: c for n, c in shard.columns.items() if n not in ignored})
            for shard in index.shards
        ]
        dtypes = {np.dtype(shard.dtype) for shard in index.shards}
        self.dtype = max(dtypes, key=lambda dtype: int(np.iinfo(dtype).max))
        sizes = [shard.vocab_size for shard in index.shards if shard.vocab_size is not None]
        self.vocab_size = max(sizes) if len(sizes) == len(index.shards) else None
        self.meta = self._meta()

    @property
    def fingerprint(self) -> str:
        text = ";".join(shard.fingerprint for shard in self.index.shards)
        return f"{xxhash.xxh3_128_hexdigest(text.encode())} of {len(self.index.shards)} shards"

    @cached_property
    def _recorded(self) -> dict[str, Mapping[str, PackedColumn]]:
        return dict(self.columns)

    def open_columns(self, shard: IndexedDataset, names: Iterable[str]) -> dict[str, Column]:
        recorded = self._recorded[shard.prefix]  # a column that was added later is not read
        return super().open_columns(shard, [name for name in names if name in recorded])

    def _meta(self) -> dict[str, Any] | None:
        largest = [s.max_token_id for s in self.index.shards if s.max_token_id is not None]
        if len(largest) < len(self.index.shards):
            return None
        ends = {shard.document_end_token for shard in self.index.shards}
        end = ends.pop() if len(ends) == 1 else None
        return {"max_token_id": max(largest), "document_end_token": end}

    def metadata(self) -> dict[str, Any]:
        return common_metadata([self.open(number).meta for number in range(self.num_shards)])

    def document_tokens(self, fact: str) -> set[Any]:
        return {shard.document_token(fact) for shard in self.index.shards}

    def largest_token_id(self, at_least: int) -> tuple[str, int]:
        if np.iinfo(self.dtype).max < at_least and not self.has_labels:
            return self.prefix, -1
        if self.meta is None:
            message = "%s: some shards have no .meta.json: their token ids were not checked"
            logger.warning(message, self.prefix)
            return self.prefix, -1
        return self.prefix, int(self.meta["max_token_id"])

    def open(self, number: int) -> IndexedDataset:
        shard = self.index.shards[number]
        dataset = IndexedDataset(shard.prefix)
        for fact, now, then in (
            ("tokens", dataset.num_tokens, shard.num_tokens),
            ("documents", dataset.num_documents, shard.num_documents),
            ("type", dataset.dtype.name, shard.dtype),
            ("fingerprint", dataset.fingerprint, shard.fingerprint),
        ):
            if now != then:
                raise IndexMismatchError(
                    f"{shard.prefix} has changed since {self.prefix} was written: {fact} is "
                    f"{now}, but was {then}; restore it, or pack the shards again"
                )
        columns = packed_columns(dataset)
        # A column that was added later is unknown to the manifest; labels and weights that are
        # silently unused would be a surprise.
        for name in sorted({*shard.columns, *INTERPRETED} - set(self.ignored)):
            if columns.get(name) != shard.columns.get(name):
                raise IndexMismatchError(
                    f"column {name} of {shard.prefix} has changed since {self.prefix} was written; "
                    "restore it, or run `megapack-build pack` again, which records its columns"
                )
        return dataset


def open_sources(
    documents: Documents | Sequence[Documents],
    indices: Index | Sequence[Index],
    labels: Used | Sequence[Used],
    token_weights: Used | Sequence[Used],
    *,
    positions: str,
) -> tuple[list[SourceDocuments], list[SourceIndex]]:
    """Open documents and samples of one or several sources, as ``PackedDataset`` describes."""
    each_documents = _as_list(documents)
    for item in each_documents:
        if isinstance(item, str | os.PathLike) and os.fspath(item).endswith(".samples"):
            name = os.fspath(item)
            other = os.fspath(indices) if isinstance(indices, str | os.PathLike) else "docs"
            raise ConfigError(
                f"dataset is {name!r}, which is the name of an index; give the dataset first, then "
                f"the index, as in PackedDataset({other!r}, {name!r})"
            )
    loaded: list[SourceIndex] = [
        load_index(item) if isinstance(item, str | os.PathLike) else item
        for item in _as_list(indices)
    ]
    count = len(each_documents)
    if len(loaded) != count:
        raise ConfigError(f"{count} datasets and {len(loaded)} indices; give one for each")
    for index in loaded:
        if not hasattr(index, "open_shards"):
            raise ConfigError(
                f"index is {index!r:.200}; give the name of a .samples file, as in "
                "PackedDataset('text', 'text.samples'), or the result of pack"
            )
        if index.arranged and positions == "document":
            raise ConfigError(
                f"{index.path} is an arranged source, whose segments have no position in "
                "the document: use positions: segment, or the source that was arranged"
            )
    used = (_each_used("labels", labels, count), _each_used("token_weights", token_weights, count))
    sources = []
    for each, index, *uses in zip(each_documents, loaded, *used, strict=True):
        ignored = [name for name, use in zip(INTERPRETED, uses, strict=True) if use is None]
        sources.append(open_source(each, index, ignored))
    _warn_of_document_tokens(sources)
    return sources, loaded


Used: TypeAlias = Literal["auto"] | None


def _each_used(option: str, use: Used | Sequence[Used], count: int) -> list[Used]:
    """Return one value per source. Raises ConfigError if the number or a value is wrong."""
    values: list[Any] = list(use) if isinstance(use, (list, tuple)) else [use] * count
    if len(values) != count or not {*map(str, values)} <= {"auto", "None"}:
        raise ConfigError(
            f"{option} is {use!r}; give 'auto' or None, or a list with one of them for each of "
            f"{count} datasets. The column comes from `megapack-build column add`"
        )
    return values


Carried: TypeAlias = "Sequence[str] | Mapping[str, str]"
_IF_MISSING = ("require", "fill")


def carried_columns(
    columns: Carried | None, sources: Sequence[SourceDocuments]
) -> dict[str, ColumnSpec]:
    """Return the types of the columns that batches carry, in alphabetical order.

    ``columns`` are names; or name -> what to do with a source without the column: ``require`` (as
    in a list) refuses it, ``fill`` gives its tokens the fill value. Raises ConfigError if a
    required column is missing, no source has a column, or sources disagree on its type.
    """
    if not columns:
        return {}
    rules = columns if isinstance(columns, Mapping) else dict.fromkeys(columns, "require")
    for name in INTERPRETED.keys() & rules:
        raise ConfigError(
            f"columns names {name}, which becomes the labels and the loss mask of batches wherever "
            "a source has it: leave it out of columns"
        )
    shards = [shard for source in sources for shard in source.columns]
    known = {name for _, packed in shards for name in packed} - INTERPRETED.keys()
    where = ", ".join(source.prefix for source in sources)
    where += " (after `column add` to a shard, run `megapack-build pack` again)"
    check_known(where, "column", rules, known)
    carried: dict[str, ColumnSpec] = {}
    for name, rule in sorted(rules.items()):
        if rule not in _IF_MISSING:
            raise ConfigError(f"columns: {name} is {rule!r}; choose 'require' or 'fill'")
        lacking = [prefix for prefix, packed in shards if name not in packed]
        if lacking and rule == "require":
            raise ConfigError(
                f"{', '.join(lacking[:8])} has no column {name}: add it (`megapack-build column "
                "add`, then `megapack-build pack` if it is a shard), leave it out of columns, or "
                f"set columns: {{{name}: fill}}"
            )
        having = [(prefix, packed[name].spec) for prefix, packed in shards if name in packed]
        first, carried[name] = having[0]
        for prefix, spec in having:
            if spec != carried[name]:
                raise ConfigError(
                    f"column {name} is {carried[name]} in {first} and {spec} in {prefix}; write "
                    "both alike"
                )
    return carried


def end_tokens(datasets: Iterable[SourceDocuments]) -> dict[int | None, str]:
    """Return the end-of-document tokens in meta files, each with a dataset that names it. The key
    None stands for datasets without this information."""
    tokens: dict[int | None, str] = {}
    for dataset in datasets:
        tokens.setdefault((dataset.meta or {}).get("document_end_token"), dataset.prefix)
    return tokens


def _warn_of_document_tokens(datasets: Sequence[SourceDocuments]) -> None:
    """Warn if documents of a blend begin or end with different tokens."""

    def named(fact: str) -> Iterator[tuple[str, Any]]:
        for dataset in datasets:
            for token in dataset.document_tokens(fact):
                yield dataset.prefix, token

    for difference in differing_tokens(named):
        warnings.warn(
            f"{difference}. Build the sources alike (tokenize --prepend-bos, --append-eod) unless "
            "this is intended",
            MegapackWarning,
            stacklevel=3,
        )


def _as_list(items: Any) -> list[Any]:
    return list(items) if isinstance(items, (list, tuple)) else [items]


def open_source(
    documents: Documents, samples: SourceIndex | None, ignored: Collection[str] = ()
) -> SourceDocuments:
    """Open the documents of one source. A shard manifest opens its shards on first use.

    Args:
        documents: the dataset or its prefix; None if ``samples`` is a shard manifest.
        samples: samples packed from these documents; None if they are not packed yet.
        ignored: names of columns that are not used.

    Raises ConfigError if documents are given for a shard manifest, or missing for any other index,
    and the errors of ``PackedDataset``.
    """
    if isinstance(documents, SourceDocuments):
        return documents
    if isinstance(samples, ShardedIndex):
        if documents is not None:
            raise ConfigError(f"{samples.path} names the documents of its shards: leave out prefix")
        return ShardedDocuments(samples, ignored)
    if documents is None:
        name = "the index" if samples is None else samples.path or samples
        raise ConfigError(f"{name} does not name its documents; give a prefix")
    dataset = documents if isinstance(documents, IndexedDataset) else IndexedDataset(documents)
    if samples is not None:
        samples.open(0).check_source(dataset)
    return DatasetDocuments(dataset, ignored)


T = TypeVar("T")

AHEAD_BYTES = 1 << 26
_SOON_BYTES = 1 << 30  # fetched within seconds
_CACHE_PART = 16  # a prefetch uses 1 / 16 of the cache: all processes of a node share it


def _chunks_of(rows: RemoteRows) -> Iterator[tuple[RemoteRows, Ids]]:
    """Yield the blocks of each chunk. Processes of a node begin at different chunks."""
    num_blocks = -(-rows.nbytes // BLOCK_BYTES)
    firsts = range(0, num_blocks, CHUNK_BLOCKS)
    begin = os.getpid() * 40_503 % max(1, len(firsts))
    for first in (*firsts[begin:], *firsts[:begin]):
        yield rows, np.arange(first, min(first + CHUNK_BLOCKS, num_blocks))


def _with_chunks(rows: RemoteRows, blocks: Ids) -> Ids:
    """Return all blocks of the chunks that contain ``blocks``."""
    firsts = np.unique(blocks // CHUNK_BLOCKS) * CHUNK_BLOCKS
    whole = (firsts[:, None] + np.arange(CHUNK_BLOCKS)).ravel()
    return whole[whole * BLOCK_BYTES < rows.nbytes]


class RemoteReads:
    """Prefetches and checks the remote tokens and columns that a gatherer reads. ``open_for`` opens
    the shards of samples; ``expected``: shards that are not open yet may be remote."""

    def __init__(
        self, gatherer: _core.Gatherer, open_for: Callable[[Ids], None], *, expected: bool
    ) -> None:
        self._gatherer, self._open_for, self._expected = gatherer, open_for, expected
        self._rows: dict[int, list[RemoteRows]] = {}  # shard -> its arrays
        self._copied: set[int] = set()  # shards whose chunks have all been requested
        self._chunks: Iterator[tuple[RemoteRows, Ids]] = iter(())
        self._copying: set[Future[None]] = set()
        self._copies = threading.Lock()  # loaders in several threads may share a dataset

    def add(self, shard: int, *arrays: Any) -> None:
        """Register the arrays of a shard that was opened: tokens and rows of columns."""
        remote = [array for array in arrays if isinstance(array, RemoteRows)]
        if remote:
            self._rows[shard] = remote

    @property
    def any(self) -> bool:
        """True if a shard, open or not, is remote."""
        return self._expected or bool(self._rows)

    @property
    def num_open(self) -> int:
        return len(self._rows)

    @property
    def ahead_bytes(self) -> int:
        limit = open_cache().limit
        return AHEAD_BYTES if limit is None else min(AHEAD_BYTES, limit // _CACHE_PART)

    def prefetch(self, sample_ids: Ids, *, whole_chunks: bool = False) -> int:
        """Fetch the blocks for a gather of samples in the background; return their bytes.
        ``whole_chunks``: fetch their chunks, if all missing chunks come within seconds."""
        self._open_for(sample_ids)
        num_bytes = 0
        for rows, blocks in self._blocks(sample_ids):
            num_bytes += blocks.size * BLOCK_BYTES
            soon = rows.missing_bytes <= _SOON_BYTES and open_cache().has_room(_SOON_BYTES)
            rows.want(_with_chunks(rows, blocks) if whole_chunks and soon else blocks)
        return num_bytes

    def copy_ahead(self) -> None:
        """Request the next chunks of the open shards, a few at a time, if the cache has room for
        them: random samples read small ranges, whose latency leaves the connection idle."""
        if not self._copies.acquire(blocking=False):
            return  # another thread does so now
        try:
            self._copying = {request for request in self._copying if not request.done()}
            while len(self._copying) < 2 * NUM_COPIES:
                rows, blocks = next(self._chunks, (None, None))
                if rows is not None and blocks is not None:
                    self._copying |= rows.want(blocks, copy=True)
                elif shards := {*self._rows} - self._copied:
                    self._copied.add(min(shards))
                    arrays = (a for a in self._rows[min(shards)] if open_cache().has_room(a.nbytes))
                    self._chunks = chain.from_iterable(map(_chunks_of, arrays))
                else:
                    return
        finally:
            self._copies.release()

    def are_local(self, sample_ids: Ids) -> bool:
        """Return whether samples can be gathered without waiting."""
        return all(rows.are_here(blocks) for rows, blocks in self._blocks(sample_ids))

    def read(self, sample_ids: Ids, gather: Callable[[], T]) -> T:
        """Wait until all data of the samples is local; return ``gather()``. Raises the errors of
        fetches (see ``RemoteObject.read``)."""
        return read_consistently(self._blocks(sample_ids), gather) if self._rows else gather()

    def _blocks(self, sample_ids: Ids) -> list[tuple[RemoteRows, Ids]]:
        shards, begins, ends = self._gatherer.token_ranges(sample_ids)
        bounds = [0, *(np.flatnonzero(np.diff(shards)) + 1).tolist(), len(shards)]
        return [
            (rows, blocks_of(begins[low:high], ends[low:high], rows.row_bytes))
            for low, high in pairwise(bounds)
            if low < high
            for rows in self._rows.get(int(shards[low]), ())
        ]
