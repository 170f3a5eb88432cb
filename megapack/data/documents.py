"""The documents of sources, near or far, opened when they are needed.

- ``open_sources``: what ``PackedDataset`` is given -> documents, labels, weights, samples.
- ``ShardedDocuments``: of one of many shards what is known of all; each is opened when needed.
- ``end_tokens``: with which tokens documents end.
- ``RemoteReads``: what a gather reads of object stores: fetched before, looked at again after.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
import xxhash
from numpy.typing import NDArray

from megapack import _core
from megapack.errors import ConfigError, IndexMismatchError
from megapack.packing import SampleIndex
from megapack.packing.sharded import ShardedIndex, SourceIndex, load_index
from megapack.storage import IndexedDataset
from megapack.storage.dataset import (
    LabelDocuments,
    label_list,
    open_labels,
    open_weights,
    weights_identity,
)
from megapack.storage.index_file import LABELS, WEIGHTS
from megapack.storage.metadata import common_metadata
from megapack.storage.remote.cache import open_cache
from megapack.storage.remote.checksums import BLOCK_BYTES
from megapack.storage.remote.reader import RemoteTokens, blocks_of, read_consistently

Ids = NDArray[np.int64]
# Of one source: as they are given, None for those of a shard manifest, and open.
Documents: TypeAlias = "IndexedDataset | ShardedDocuments | str | os.PathLike[str] | None"
SourceDocuments: TypeAlias = "IndexedDataset | ShardedDocuments"
Index: TypeAlias = "SampleIndex | ShardedIndex | str | os.PathLike[str]"


class ShardedDocuments:
    """An ``IndexedDataset`` of the merged shards, from their manifest; none is open.

    Args:
        index: their samples.
        with_labels, with_weights: whether labels and loss weights beside shards are used.
    """

    def __init__(
        self, index: ShardedIndex, *, with_labels: bool, with_weights: bool = True
    ) -> None:
        self.index, self.with_labels, self.with_weights = index, with_labels, with_weights

    @property
    def prefix(self) -> str:
        """Its name in messages: the manifest's path."""
        return str(self.index.path)

    @property
    def num_documents(self) -> int:
        return self.index.num_documents

    @property
    def num_tokens(self) -> int:
        return self.index.num_tokens

    @cached_property
    def dtype(self) -> np.dtype[Any]:
        """The widest of the shards."""
        found = {np.dtype(shard.dtype) for shard in self.index.shards}
        return max(found, key=lambda dtype: int(np.iinfo(dtype).max))

    @cached_property
    def fingerprint(self) -> str:
        """Identity of the layout of all documents."""
        text = ";".join(shard.fingerprint for shard in self.index.shards)
        return f"{xxhash.xxh3_128_hexdigest(text.encode())} of {len(self.index.shards)} shards"

    @cached_property
    def vocab_size(self) -> int | None:
        """Number of token ids of the tokenizer, None where a shard does not tell."""
        sizes = {shard.vocab_size for shard in self.index.shards}
        return None if None in sizes else max(size for size in sizes if size is not None)

    @cached_property
    def meta(self) -> dict[str, Any] | None:
        """``max_token_id`` (of labels, too) and ``document_end_token`` (None where shards differ);
        None where a shard has no meta file.
        """
        largest = [shard.max_token_id for shard in self.index.shards]
        known = [token for token in largest if token is not None]
        if len(known) < len(largest):
            return None
        ends = {shard.document_end_token for shard in self.index.shards}
        end = ends.pop() if len(ends) == 1 else None
        return {"max_token_id": max(known), "document_end_token": end}

    @property
    def weights_identity(self) -> str | None:
        """What tells the loss weights beside shards from others; None: none are used."""
        known = [shard.weights for shard in self.index.shards]
        if not self.with_weights or not any(known):
            return None
        return xxhash.xxh3_64_hexdigest(repr(known).encode())

    @property
    def has_labels(self) -> bool:
        """Whether labels beside some shard are used."""
        return self.with_labels and any(shard.labels for shard in self.index.shards)

    def metadata(self) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        """What the builders of all shards, and of the labels and weights beside some, were told
        alike; every shard is opened. Raises as ``open``."""
        metas: tuple[list[Any], list[Any], list[Any]] = [], [], []
        for number in range(len(self.index.shards)):
            for of_kind, dataset in zip(metas, self.open(number), strict=True):
                of_kind.extend([] if dataset is None else [dataset.meta])
        tokens, labels, weights = (common_metadata(of_kind or [None]) for of_kind in metas)
        return tokens, labels, weights

    def open(
        self, number: int
    ) -> tuple[IndexedDataset, IndexedDataset | None, IndexedDataset | None]:
        """The documents of one shard, their labels and their loss weights, mapped.

        Raises:
            IndexMismatchError: they are not those that the manifest speaks of.
            FormatError, OSError: a file is damaged or missing.
        """
        shard = self.index.shards[number]
        dataset = IndexedDataset(shard.prefix)
        for name, now, then in (
            ("tokens", dataset.num_tokens, shard.num_tokens),
            ("documents", dataset.num_documents, shard.num_documents),
            ("type", dataset.dtype.name, shard.dtype),
            ("fingerprint", dataset.fingerprint, shard.fingerprint),
        ):
            if now != then:
                raise IndexMismatchError(
                    f"{shard.prefix} has changed since {self.prefix} was written: {name} {now}, "
                    f"and it was {then}; restore it, or pack the shards again"
                )
        labels = shard.prefix + LABELS if self.with_labels and shard.labels else None
        weights = shard.prefix + WEIGHTS if self.with_weights and shard.weights else None
        opened = open_weights(dataset, weights)
        if opened is not None and weights_identity(opened) != shard.weights:
            raise IndexMismatchError(
                f"{weights} has changed since {self.prefix} was written; restore it, or pack the "
                "shards again"
            )
        return dataset, open_labels(dataset, labels), opened


class OpenSources(NamedTuple):
    """What a ``PackedDataset`` is of: one of each per source."""

    documents: list[SourceDocuments]
    labels: list[IndexedDataset | None]
    weights: list[IndexedDataset | None]
    indices: list[SourceIndex]


def open_sources(
    documents: Documents | Sequence[Documents],
    indices: Index | Sequence[Index],
    labels: LabelDocuments | Sequence[LabelDocuments],
    weights: LabelDocuments | Sequence[LabelDocuments],
    *,
    positions: str,
) -> OpenSources:
    """Documents, labels, weights, samples of one source or several, as ``PackedDataset`` is given.

    Raises as ``PackedDataset`` does.
    """
    given = _as_list(documents)
    found = [
        item if isinstance(item, (SampleIndex, ShardedIndex)) else load_index(item)
        for item in _as_list(indices)
    ]
    if len(found) != len(given):
        raise ConfigError(f"{len(given)} datasets and {len(found)} indices; give one for each")
    for index in found:
        if isinstance(index, ShardedIndex) and index.arranged and positions == "document":
            raise ConfigError(
                f"{index.path} is an arranged source, whose segments do not tell where in their "
                "document they began: use positions: segment, or the source that it was made of"
            )
    lists = label_list(labels, len(given)), label_list(weights, len(given), "weight")
    sources = [_open_source(*source) for source in zip(given, found, *lists, strict=True)]
    opened, own_labels, own_weights = (list(of) for of in zip(*sources, strict=True))
    return OpenSources(opened, own_labels, own_weights, found)


def end_tokens(datasets: Iterable[SourceDocuments]) -> dict[int | None, str]:
    """The tokens with which documents end, as the meta files say, and the first dataset that says
    each; None: one says nothing of it."""
    found: dict[int | None, str] = {}
    for dataset in datasets:
        found.setdefault((dataset.meta or {}).get("document_end_token"), dataset.prefix)
    return found


def _as_list(items: Any) -> list[Any]:
    return list(items) if isinstance(items, (list, tuple)) else [items]


def _open_source(
    documents: Documents, samples: SourceIndex, labels: LabelDocuments, weights: LabelDocuments
) -> tuple[SourceDocuments, IndexedDataset | None, IndexedDataset | None]:
    """The documents of a source, the labels and weights beside them; of shards, each opens its own
    later.

    Raises:
        ConfigError: documents, or labels or weights of their own, for a shard manifest; none for an
            index.
        IndexMismatchError, FormatError, OSError: as of ``PackedDataset``.
    """
    if isinstance(documents, ShardedDocuments):
        return documents, None, None
    if isinstance(samples, ShardedIndex):
        if documents is not None or not {labels, weights} <= {"auto", None}:
            raise ConfigError(
                f"{samples.path} names the documents of its shards, and labels and weights stand "
                "beside them (PREFIX.labels, PREFIX.weights): leave out prefix, labels and weights"
            )
        used = {"with_labels": labels is not None, "with_weights": weights is not None}
        return ShardedDocuments(samples, **used), None, None
    if documents is None:
        raise ConfigError(f"{samples.path or samples} does not name its documents; give a prefix")
    opened = documents if isinstance(documents, IndexedDataset) else IndexedDataset(documents)
    samples.check_source(opened)
    return opened, open_labels(opened, labels), open_weights(opened, weights)


T = TypeVar("T")

AHEAD_BYTES = 1 << 26
_CACHE_PART = 16  # of a cache, which all processes of a node share


class RemoteReads:
    """Reads of the remote shards of a gatherer.

    Args:
        gatherer: which knows where the tokens of a sample lie.
        open_for: opens the shards of samples; called before they are wanted.
        expected: whether shards that are not open yet are remote.
    """

    def __init__(
        self, gatherer: _core.Gatherer, open_for: Callable[[Ids], None], *, expected: bool
    ) -> None:
        self._gatherer, self._open_for, self._expected = gatherer, open_for, expected
        self._tokens: dict[int, list[RemoteTokens]] = {}

    def add(self, shard: int, *datasets: IndexedDataset | None) -> None:
        """A shard that was opened: what is read of it: tokens, labels, weights."""
        arrays = [dataset.tokens for dataset in datasets if dataset is not None]
        remote = [array for array in arrays if isinstance(array, RemoteTokens)]
        if remote:
            self._tokens[shard] = remote

    @property
    def any(self) -> bool:
        """Whether a shard, open or not, is remote."""
        return self._expected or bool(self._tokens)

    @property
    def num_open(self) -> int:
        """Remote shards that are open."""
        return len(self._tokens)

    @property
    def ahead_bytes(self) -> int:
        """Bytes that are requested ahead, for the micro batches to come."""
        limit = open_cache().limit
        return AHEAD_BYTES if limit is None else min(AHEAD_BYTES, limit // _CACHE_PART)

    def want(self, sample_ids: Ids) -> int:
        """Have fetched what a gather of samples will read; bytes of the blocks that hold it.

        Returns at once. Raises as the gather does.
        """
        self._open_for(sample_ids)
        num_bytes = 0
        for tokens, blocks in self._blocks(sample_ids):
            tokens.want(blocks)
            num_bytes += blocks.size * BLOCK_BYTES
        return num_bytes

    def are_here(self, sample_ids: Ids) -> bool:
        """Whether a gather of samples would wait for nothing just now."""
        return all(tokens.are_here(blocks) for tokens, blocks in self._blocks(sample_ids))

    def read(self, sample_ids: Ids, gather: Callable[[], T]) -> T:
        """``gather()``, when everything that it reads of samples is there.

        Raises:
            FormatError, ConfigError, OSError: it cannot be fetched (see ``RemoteObject.read``).
        """
        return read_consistently(self._blocks(sample_ids), gather) if self._tokens else gather()

    def _blocks(self, sample_ids: Ids) -> list[tuple[RemoteTokens, Ids]]:
        shards, begins, ends = self._gatherer.token_ranges(sample_ids)
        bounds = [0, *(np.flatnonzero(np.diff(shards)) + 1).tolist(), len(shards)]
        return [
            (tokens, blocks_of(begins[low:high], ends[low:high], tokens.dtype.itemsize))
            for low, high in pairwise(bounds)
            if low < high
            for tokens in self._tokens.get(int(shards[low]), ())
        ]
