"""Documents of sources, on disk or in an object store, opened on first use.

- ``SourceDocuments``: one source, a list of shards with the labels and weights of their tokens.
- ``Opened``: one shard. ``carried_columns``: the columns that batches carry.
- ``open_sources``: opens documents and samples of every source for ``PackedDataset``.
- ``end_tokens``: the tokens that end documents.
- ``RemoteReads``: prefetches the parts of object stores that a gather reads, and checks them.

    source = open_source("docs", SampleIndex.load("docs.samples"))
    source.open(0).documents                         # the only shard
"""

from __future__ import annotations

import abc
import logging
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
import xxhash
from numpy.typing import NDArray

from megapack import _core
from megapack.config import check_known
from megapack.errors import ConfigError, IndexMismatchError, MegapackWarning
from megapack.packing.shard_packing import packed_columns
from megapack.packing.sharded import ShardedIndex, SourceIndex, load_index
from megapack.storage import IndexedDataset
from megapack.storage.address import is_remote
from megapack.storage.columns import Column, ColumnSpec
from megapack.storage.dataset import (
    LabelDocuments,
    label_list,
    open_labels,
    open_weights,
    weights_identity,
)
from megapack.storage.index_file import LABELS, WEIGHTS
from megapack.storage.metadata import common_metadata, differing_tokens
from megapack.storage.remote.cache import open_cache
from megapack.storage.remote.checksums import BLOCK_BYTES
from megapack.storage.remote.reader import RemoteRows, blocks_of, read_consistently

Ids = NDArray[np.int64]

logger = logging.getLogger("megapack")

_BLOCKS, _BLOCK_TOKENS = 64, 1 << 16


class Opened(NamedTuple):
    """Files of one shard, mapped."""

    documents: IndexedDataset
    labels: IndexedDataset | None
    weights: IndexedDataset | None
    recorded: Iterable[str] | None = None
    """Columns that the shard manifest records; None without a manifest."""

    @property
    def columns(self) -> dict[str, Column]:
        """Columns of the documents by name, without those that the manifest does not record."""
        columns = self.documents.columns
        return {
            name: columns[name] for name in (columns if self.recorded is None else self.recorded)
        }


class SourceDocuments(abc.ABC):
    """Documents of one source, with the labels and loss weights of their tokens: a list of shards.

    ``DatasetDocuments`` has one shard, ``ShardedDocuments`` has the shards of a manifest.
    """

    prefix: str
    """Name of the source in messages: the dataset's prefix or the manifest's path."""
    dtype: np.dtype[Any]
    """Token dtype, the widest of all shards."""
    vocab_size: int | None
    """Number of token ids of the tokenizer; None if unknown."""
    meta: dict[str, Any] | None
    """``max_token_id``, ``document_end_token`` and other facts; None if a meta file is missing."""
    weights_identity: str | None
    """Digest of the loss weights; None without weights."""
    num_documents: int
    num_tokens: int
    has_labels: bool
    """True if labels are stored next to the tokens."""
    is_remote: bool
    """True if some shard is in an object store."""
    prefixes: list[str]
    """Prefixes of all shards; for a single dataset, also of its labels and weights."""
    num_shards: int = 1
    shard_index: SourceIndex | None = None
    """Samples of the shard manifest that names these documents."""

    @property
    @abc.abstractmethod
    def columns(self) -> list[tuple[str, Mapping[str, ColumnSpec]]]:
        """Prefix and columns of every shard."""

    @property
    @abc.abstractmethod
    def fingerprint(self) -> str:
        """Identity of the layout of all documents."""

    @abc.abstractmethod
    def open(self, number: int) -> Opened:
        """Return the files of one shard, mapped.

        Raises:
            IndexMismatchError: they are not the documents that were packed.
            FormatError, OSError: a file is damaged or missing.
        """

    def document_tokens(self, fact: str) -> set[Any]:
        """Return the tokens that the meta files name as ``fact``, one of ``BOUNDARY_TOKENS``.

        None stands for a meta file without this fact, "unknown" for a missing meta file.
        """
        return {"unknown" if self.meta is None else self.meta.get(fact)}

    @abc.abstractmethod
    def largest_token_id(self, at_least: int) -> tuple[str, int]:
        """Return the dataset with the largest id of tokens and labels, and this id.

        May skip files whose dtype cannot store ids of ``at_least`` or more.
        """


class DatasetDocuments(SourceDocuments):
    """Documents of one dataset.

    Args:
        dataset: the documents.
        labels, weights: labels and loss weights of their tokens; None if there are none.
    """

    def __init__(
        self,
        dataset: IndexedDataset,
        labels: IndexedDataset | None = None,
        weights: IndexedDataset | None = None,
    ) -> None:
        self.dataset, self.labels, self.weights = dataset, labels, weights
        self.prefix, self.dtype, self.meta = dataset.prefix, dataset.dtype, dataset.meta
        self.num_documents, self.num_tokens = dataset.num_documents, dataset.num_tokens
        self.vocab_size, self.has_labels = dataset.vocab_size, labels is not None
        self.weights_identity = None if weights is None else weights_identity(weights)
        self.is_remote = is_remote(dataset.prefix)
        self.prefixes = [file.prefix for file in (dataset, labels, weights) if file is not None]

    @property
    def columns(self) -> list[tuple[str, Mapping[str, ColumnSpec]]]:
        specs = {name: column.spec for name, column in self.dataset.columns.items()}
        return [(self.prefix, specs)]

    @property
    def fingerprint(self) -> str:
        return self.dataset.fingerprint

    def open(self, number: int) -> Opened:
        assert number == 0, "a dataset is one shard"
        return Opened(self.dataset, self.labels, self.weights)

    def largest_token_id(self, at_least: int) -> tuple[str, int]:
        files = [file for file in (self.dataset, self.labels) if file is not None]
        wide = [file for file in files if np.iinfo(file.dtype).max >= at_least]
        largest = [(file.prefix, _largest_token_id(file)) for file in wide]
        return max(largest, key=lambda item: item[1], default=(self.prefix, -1))


def _largest_token_id(dataset: IndexedDataset) -> int:
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
    """Documents of a shard manifest; ``open`` maps one shard.

    Args:
        index: samples of the shards.
        with_labels, with_weights: use the labels and loss weights next to the shards.
    """

    def __init__(
        self, index: ShardedIndex, *, with_labels: bool, with_weights: bool = True
    ) -> None:
        self.index, self.with_labels, self.with_weights = index, with_labels, with_weights
        self.shard_index, self.prefix = index, str(index.path)
        self.num_documents, self.num_tokens = index.num_documents, index.num_tokens
        self.has_labels = with_labels and any(shard.labels for shard in index.shards)
        self.is_remote = any(is_remote(shard.prefix) for shard in index.shards)
        self.prefixes = [str(shard.prefix) for shard in index.shards]
        self.num_shards = len(index.shards)
        dtypes = {np.dtype(shard.dtype) for shard in index.shards}
        self.dtype = max(dtypes, key=lambda dtype: int(np.iinfo(dtype).max))
        sizes = [shard.vocab_size for shard in index.shards if shard.vocab_size is not None]
        self.vocab_size = max(sizes) if len(sizes) == len(index.shards) else None
        self.meta, self.weights_identity = self._meta(), None
        weights = [shard.weights for shard in index.shards]
        if with_weights and any(weights):
            self.weights_identity = xxhash.xxh3_64_hexdigest(repr(weights).encode())

    @property
    def columns(self) -> list[tuple[str, Mapping[str, ColumnSpec]]]:
        return [
            (shard.prefix, {name: column.spec for name, column in shard.columns.items()})
            for shard in self.index.shards
        ]

    @property
    def fingerprint(self) -> str:
        text = ";".join(shard.fingerprint for shard in self.index.shards)
        return f"{xxhash.xxh3_128_hexdigest(text.encode())} of {len(self.index.shards)} shards"

    def _meta(self) -> dict[str, Any] | None:
        largest = [s.max_token_id for s in self.index.shards if s.max_token_id is not None]
        if len(largest) < len(self.index.shards):
            return None
        ends = {shard.document_end_token for shard in self.index.shards}
        end = ends.pop() if len(ends) == 1 else None
        return {"max_token_id": max(largest), "document_end_token": end}

    def metadata(self) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        """Return the metadata that all shards share: for tokens, for labels and for weights.

        Opens every shard. Raises the errors of ``open``.
        """
        metas: tuple[list[Any], list[Any], list[Any]] = [], [], []
        for number in range(len(self.index.shards)):
            for of_kind, dataset in zip(metas, self.open(number)[:3], strict=True):
                of_kind.extend([] if dataset is None else [dataset.meta])
        tokens, labels, weights = (common_metadata(of_kind or [None]) for of_kind in metas)
        return tokens, labels, weights

    def document_tokens(self, fact: str) -> set[Any]:
        return {shard.document_token(fact) for shard in self.index.shards}

    def largest_token_id(self, at_least: int) -> tuple[str, int]:
        if np.iinfo(self.dtype).max < at_least and not self.has_labels:  # labels are int32
            return self.prefix, -1
        if self.meta is None:
            message = "%s: some shards have no .meta.json: their token ids were not checked"
            logger.warning(message, self.prefix)
            return self.prefix, -1
        return self.prefix, int(self.meta["max_token_id"])

    def open(self, number: int) -> Opened:
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
        columns = packed_columns(dataset) if shard.columns else {}
        for name, column in shard.columns.items():
            if columns.get(name) != column:
                raise IndexMismatchError(
                    f"column {name} of {shard.prefix} has changed since {self.prefix} was written; "
                    "restore it, or run `megapack-build pack` again, which records its columns"
                )
        labels = shard.prefix + LABELS if self.with_labels and shard.labels else None
        weights = shard.prefix + WEIGHTS if self.with_weights and shard.weights else None
        opened = open_weights(dataset, weights)
        if opened is not None and weights_identity(opened) != shard.weights:
            raise IndexMismatchError(
                f"{weights} has changed since {self.prefix} was written; restore it, or pack the "
                "shards again"
            )
        return Opened(dataset, open_labels(dataset, labels), opened, shard.columns)


def open_sources(
    documents: Documents | Sequence[Documents],
    indices: Index | Sequence[Index],
    labels: LabelDocuments | Sequence[LabelDocuments],
    weights: LabelDocuments | Sequence[LabelDocuments],
    *,
    positions: str,
) -> tuple[list[SourceDocuments], list[SourceIndex]]:
    """Open documents and samples of one source or several.

    Arguments and errors are those of ``PackedDataset``.
    """
    each_documents = _as_list(documents)
    loaded: list[SourceIndex] = [
        load_index(item) if isinstance(item, str | os.PathLike) else item
        for item in _as_list(indices)
    ]
    count = len(each_documents)
    if len(loaded) != count:
        raise ConfigError(f"{count} datasets and {len(loaded)} indices; give one for each")
    for index in loaded:
        if index.arranged and positions == "document":
            raise ConfigError(
                f"{index.path} is an arranged source, whose segments have no position in "
                "the document: use positions: segment, or the source that was arranged"
            )
    each_labels, each_weights = label_list(labels, count), label_list(weights, count, "weight")
    columns = (each_documents, loaded, each_labels, each_weights)
    sources = [open_source(*source) for source in zip(*columns, strict=True)]
    _warn_of_document_tokens(sources)
    return sources, loaded


Carried: TypeAlias = "Sequence[str] | Mapping[str, str]"
_IF_MISSING = ("require", "fill")


def carried_columns(
    columns: Carried | None, sources: Sequence[SourceDocuments]
) -> dict[str, ColumnSpec]:
    """Return the types of the columns that batches carry, in alphabetical order.

    Args:
        columns: names; or name -> what to do with a source without the column: ``require`` refuses
            it, ``fill`` gives its tokens the fill value. A name in a list is required.
        sources: of the run.

    Raises:
        ConfigError: a required column is missing, no source has it, or sources disagree on its
            type.
    """
    if not columns:
        return {}
    rules = columns if isinstance(columns, Mapping) else dict.fromkeys(columns, "require")
    shards = [shard for source in sources for shard in source.columns]
    known = {name for _, specs in shards for name in specs}
    check_known(", ".join(source.prefix for source in sources), "column", rules, known)
    carried: dict[str, ColumnSpec] = {}
    for name, rule in sorted(rules.items()):
        if rule not in _IF_MISSING:
            raise ConfigError(f"columns: {name} is {rule!r}; it is 'require' or 'fill'")
        lacking = [prefix for prefix, specs in shards if name not in specs]
        if lacking and rule == "require":
            raise ConfigError(
                f"{', '.join(lacking[:8])} has no column {name}: add it (`megapack-build column "
                f"add`), leave it out of columns, or set columns: {{{name}: fill}}"
            )
        having = [(prefix, specs[name]) for prefix, specs in shards if name in specs]
        first, carried[name] = having[0]
        for prefix, spec in having:
            if spec != carried[name]:
                raise ConfigError(
                    f"column {name} is {carried[name]} in {first} and {spec} in {prefix}; write "
                    "both alike"
                )
    return carried


def end_tokens(datasets: Iterable[SourceDocuments]) -> dict[int | None, str]:
    """Return the tokens that end documents according to the meta files, each with a dataset.

    The key None stands for datasets without this information.
    """
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
    documents: Documents,
    samples: SourceIndex | None,
    labels: LabelDocuments = "auto",
    weights: LabelDocuments = "auto",
) -> SourceDocuments:
    """Open the documents of one source. A shard manifest opens its shards on first use.

    Args:
        documents: the dataset or its prefix; None if ``samples`` is a shard manifest.
        samples: samples packed from these documents; None if they are not packed yet.
        labels, weights: labels and loss weights of the tokens, see ``PackedDataset``.

    Raises:
        ConfigError: documents, labels or weights are given for a shard manifest, or documents
            are missing for any other index.
        IndexMismatchError, FormatError, OSError: see ``PackedDataset``.
    """
    if isinstance(documents, SourceDocuments):
        return documents
    if isinstance(samples, ShardedIndex):
        if documents is not None or not {labels, weights} <= {"auto", None}:
            raise ConfigError(
                f"{samples.path} names the documents of its shards, with their labels and weights "
                "(PREFIX.labels, PREFIX.weights): leave out prefix, labels and weights"
            )
        return ShardedDocuments(
            samples, with_labels=labels is not None, with_weights=weights is not None
        )
    if documents is None:
        name = "the index" if samples is None else samples.path or samples
        raise ConfigError(f"{name} does not name its documents; give a prefix")
    dataset = documents if isinstance(documents, IndexedDataset) else IndexedDataset(documents)
    if samples is not None:
        samples.open(0).check_source(dataset)
    return DatasetDocuments(dataset, open_labels(dataset, labels), open_weights(dataset, weights))


T = TypeVar("T")

AHEAD_BYTES = 1 << 26
_CACHE_PART = 16  # a prefetch uses 1 / 16 of the cache: all processes of a node share it


class RemoteReads:
    """Prefetches and checks the remote tokens and columns that a gatherer reads.

    Args:
        gatherer: maps samples to ranges of tokens.
        open_for: opens the shards of samples.
        expected: True if shards that are not open yet may be remote.
    """

    def __init__(
        self, gatherer: _core.Gatherer, open_for: Callable[[Ids], None], *, expected: bool
    ) -> None:
        self._gatherer, self._open_for, self._expected = gatherer, open_for, expected
        self._rows: dict[int, list[RemoteRows]] = {}  # by shard

    def add(self, shard: int, *arrays: Any) -> None:
        """Register the arrays of a shard that was opened: tokens, labels, weights, columns."""
        remote = [array for array in arrays if isinstance(array, RemoteRows)]
        if remote:
            self._rows[shard] = remote

    @property
    def any(self) -> bool:
        """True if a shard, open or not, is remote."""
        return self._expected or bool(self._rows)

    @property
    def num_open(self) -> int:
        """Number of open remote shards."""
        return len(self._rows)

    @property
    def ahead_bytes(self) -> int:
        """Bytes to prefetch for later micro batches."""
        limit = open_cache().limit
        return AHEAD_BYTES if limit is None else min(AHEAD_BYTES, limit // _CACHE_PART)

    def prefetch(self, sample_ids: Ids) -> int:
        """Fetch the blocks that a gather of samples reads, in the background.

        Returns the number of bytes. Raises the errors of the gather.
        """
        self._open_for(sample_ids)
        num_bytes = 0
        for rows, blocks in self._blocks(sample_ids):
            rows.want(blocks)
            num_bytes += blocks.size * BLOCK_BYTES
        return num_bytes

    def are_local(self, sample_ids: Ids) -> bool:
        """Return whether a gather of samples would not have to wait."""
        return all(rows.are_here(blocks) for rows, blocks in self._blocks(sample_ids))

    def read(self, sample_ids: Ids, gather: Callable[[], T]) -> T:
        """Wait until all data of the samples is local; return ``gather()``.

        Raises:
            FormatError, ConfigError, OSError: a fetch fails (see ``RemoteObject.read``).
        """
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
