"""The gather over all shards: each is opened when a sample of it is asked for the first time."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megapack import _core
from megapack.data.documents import ShardedDocuments, SourceDocuments
from megapack.data.exclusions import Exclusions
from megapack.data.remote_reads import RemoteReads
from megapack.data.shards import Shards
from megapack.storage import IndexedDataset
from megapack.storage.remote import is_remote

__all__ = ["Gathering"]

Ids = NDArray[np.int64]


class Gathering:
    """Samples of open and not yet open shards, by the C++ gather.

    Args:
        shards: of all sources.
        datasets: of every source.
        labels: of every source: labels beside its documents; those of shards are their own.
        exclusions: lists of excluded documents.
        options: of ``_core.Gatherer``.
    """

    def __init__(
        self,
        shards: Shards,
        datasets: Sequence[SourceDocuments],
        labels: Sequence[IndexedDataset | None],
        exclusions: Exclusions,
        options: dict[str, Any],
    ) -> None:
        self._shards, self._exclusions = shards, exclusions
        self._datasets, self._labels = datasets, labels
        self._opening = threading.Lock()
        self._documents: dict[int, IndexedDataset] = {}
        self._gatherer = _core.Gatherer(
            first_ids=shards.first_ids,
            shards=shards.shards,
            first_samples=shards.first_samples,
            sources=shards.sources,
            **options,
        )
        expected = any(map(_is_remote, datasets))
        self.remote_reads = RemoteReads(self._gatherer, self._open_for, expected=expected)
        self._remote_labels = RemoteReads(self._gatherer, self._open_for, expected=expected)
        for shard in range(len(shards)):
            if shards.is_open(shard):
                self.documents(shard)

    def gather(self, ids: Ids, how: dict[str, Any]) -> Any:
        """``_core.Gatherer.gather``."""
        self._open_for(ids)
        if not self.remote_reads.num_open:
            return self._gatherer.gather(ids, **how)
        return self.remote_reads.read(ids, partial(self._gatherer.gather, ids, **how))

    def count_labels(self, ids: Ids, num_lists: int = 0) -> Ids:
        """int64 (len(ids),), tokens of every sample that have a label."""
        self._open_for(ids)
        count = partial(self._gatherer.count_labels, ids, num_lists)
        return self._remote_labels.read(ids, count)

    def will_need(self, ids: Ids) -> int:
        """``_core.Gatherer.will_need``."""
        self._open_for(ids)
        return self._gatherer.will_need(ids)

    def read_exactly(self) -> None:
        """``_core.Gatherer.read_exactly``, also of shards that are not open yet."""
        self._gatherer.read_exactly()

    def documents(self, shard: int) -> IndexedDataset:
        """Of one shard, opened now if they are not yet.

        Raises:
            IndexMismatchError: they are not those that were packed.
            FormatError, OSError: a file is damaged or missing.
        """
        with self._opening:
            if shard not in self._documents:
                self._documents[shard] = self._open(shard)
            return self._documents[shard]

    def _open_for(self, ids: Ids) -> None:
        if self._gatherer.num_closed:
            for shard in self._gatherer.closed(ids).tolist():
                self.documents(shard)

    def _open(self, shard: int) -> IndexedDataset:
        source = int(self._shards.sources[shard])
        found, labels = self._datasets[source], self._labels[source]
        if isinstance(found, ShardedDocuments):
            dataset, labels = found.open(self._shards.number_in_source(shard))
        else:
            dataset = found
        index = self._shards.index(shard)
        if index.source:  # in every process: what is read of the .idx is held to its checksums
            index.check_source(dataset)
        first = int(self._shards.first_documents[shard])
        excluded, excluded_by = self._exclusions.of_documents(
            source, first, first + dataset.num_documents
        )
        self._gatherer.open(
            shard,
            tokens=dataset.mapped_tokens,
            labels=None if labels is None else labels.mapped_tokens,
            index_bytes=dataset.index_bytes,
            index_name=f"{dataset.prefix}.idx",
            sample_segment_offsets=index.sample_segment_offsets,
            segment_document=index.segment_document,
            segment_begin=index.segment_begin,
            segment_length=index.segment_length,
            excluded=excluded,
            excluded_by=excluded_by,
        )
        self.remote_reads.add(shard, dataset, labels)
        self._remote_labels.add(shard, labels)
        return dataset


def _is_remote(documents: SourceDocuments) -> bool:
    if isinstance(documents, ShardedDocuments):
        return any(is_remote(shard.prefix) for shard in documents.index.shards)
    return is_remote(documents.prefix)
