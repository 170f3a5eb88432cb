"""The shards of all sources of a run, and which of them holds a sample.

A source packed as one dataset has one shard, itself. A shard of a source of many is opened when it
is asked for the first time; what is known before stands in the source's shard manifest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from megapack.packing import SampleIndex
from megapack.packing.shards import ShardedIndex, SourceIndex

__all__ = ["Shards"]

Ids = NDArray[np.int64]


class Shards:
    """Shards are numbered through the sources; ids of samples are global ones, nothing masked.

    Attributes:
        indices: of the sources.
        bases: (sources + 1,) int64, the id of the first sample of each, and how many there are.
        first_ids, shards, first_samples: ids from ``first_ids[r]`` to ``first_ids[r + 1]`` are
            consecutive samples of ``shards[r]``, from ``first_samples[r]`` on; int64.
        sources: (shards,) int64, the number of each one's source.
        first_documents: (shards,) int64, the number of its first document in the source.
    """

    def __init__(self, indices: Sequence[SourceIndex]) -> None:
        self.indices = list(indices)
        self.bases = np.cumsum([0] + [index.num_samples for index in indices], dtype=np.int64)
        self._open: list[SampleIndex | None] = []
        of_many = {i: index for i, index in enumerate(indices) if isinstance(index, ShardedIndex)}
        counts = np.ones((2, len(indices)), np.int64)  # of shards and runs
        for source, many in of_many.items():
            counts[:, source] = len(many.shards), len(many.runs[1])
        for index in indices:
            self._open += [None] * len(index.shards) if isinstance(index, ShardedIndex) else [index]
        # As if every source was one shard; then those that are not.
        first_shards, first_runs = np.cumsum(counts, axis=1) - counts
        self.sources = np.repeat(np.arange(len(indices)), counts[0])
        self.first_documents = np.zeros(len(self.sources), np.int64)
        first_ids = np.repeat(self.bases[:-1], counts[1])
        self.shards = np.repeat(first_shards, counts[1])
        self.first_samples = np.zeros(len(self.shards), np.int64)
        for source, many in of_many.items():
            first, shards, samples = many.runs
            runs = slice(first_runs[source], first_runs[source] + len(shards))
            first_ids[runs] += first[:-1]
            self.shards[runs] += shards
            self.first_samples[runs] = samples
            self.first_documents[self.of_source(source)] = many.first_documents[:-1]
        self.first_ids = np.append(first_ids, self.bases[-1])

    def __len__(self) -> int:
        return len(self._open)

    def locate(self, ids: Ids) -> tuple[Ids, Ids]:
        """Ids that exist -> (number of the shard, sample there), int64 both."""
        run = np.searchsorted(self.first_ids, ids, side="right") - 1
        return self.shards[run], self.first_samples[run] + ids - self.first_ids[run]

    def by_shard(self, ids: Ids) -> Iterator[tuple[int, Ids, Ids]]:
        """Every shard that has some of the ids: its number, where they stand, samples there."""
        shards, local = self.locate(ids)
        order = np.argsort(shards, kind="stable")
        present, begins = np.unique(shards[order], return_index=True)
        for shard, mine in zip(present.tolist(), np.split(order, begins[1:]), strict=True):
            yield shard, mine, local[mine]

    def of_source(self, source: int) -> range:
        """The numbers of a source's shards."""
        return range(*np.searchsorted(self.sources, [source, source + 1]).tolist())

    def ids(self, shard: int) -> Ids:
        """The ids of all samples of a shard, in their order there."""
        own = np.flatnonzero(self.shards == shard)
        counts = self.first_ids[own + 1] - self.first_ids[own]
        parts = map(np.arange, self.first_ids[own], self.first_ids[own] + counts)
        return np.concatenate([np.zeros(0, np.int64), *parts])

    def is_open(self, shard: int) -> bool:
        """Whether its samples are mapped."""
        return self._open[shard] is not None

    def number_in_source(self, shard: int) -> int:
        """Counted from the first shard of its source."""
        return shard - self.of_source(int(self.sources[shard])).start

    def opened(self, source: int) -> Iterator[tuple[SampleIndex, int, Ids]]:
        """Every shard of a source: its samples, opened now; the number of its first document, and
        those of its samples, in the source.
        """
        for shard in self.of_source(source):
            numbers = self.ids(shard) - self.bases[source]
            yield self.index(shard), int(self.first_documents[shard]), numbers

    def holding(self, source: int, documents: Ids) -> Ids:
        """Ids, ascending, of the samples that hold a piece of some documents (ascending)."""
        own = self.of_source(source)
        holder = np.searchsorted(self.first_documents[own], documents, side="right") - 1
        found = [np.zeros(0, np.int64)]
        for place in np.unique(holder).tolist():
            shard = own[place]
            index = self.index(shard)
            listed = np.zeros(index.num_documents, np.bool_)
            listed[documents[holder == place] - self.first_documents[shard]] = True
            segments = np.flatnonzero(listed[index.segment_document])
            local = np.searchsorted(index.sample_segment_offsets, segments, side="right") - 1
            found.append(self.ids(shard)[np.unique(local)])
        return np.sort(np.concatenate(found))

    def index(self, shard: int) -> SampleIndex:
        """The samples of a shard. Raises as ``ShardedIndex.open`` does."""
        index = self._open[shard]
        if index is None:
            sharded = self.indices[int(self.sources[shard])]
            assert isinstance(sharded, ShardedIndex)
            index = self._open[shard] = sharded.open(self.number_in_source(shard))
        return index
