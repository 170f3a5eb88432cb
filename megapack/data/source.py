"""The samples of one or several indices under one numbering, and what is known of them unread."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from megapack import _core
from megapack.data.blocks import BlockOrder
from megapack.data.counting import Masks, document_ends, label_counts, segment_costs, segments_of
from megapack.data.exclusions import Exclusions, read_exclusions
from megapack.data.program import Stage
from megapack.data.sample_orders import ScoreOrders, arranged_orders
from megapack.data.scores import ScoreOrder, Scores
from megapack.data.shards import Shards
from megapack.data.streams import Bucket, Place, buckets_of
from megapack.errors import ConfigError
from megapack.packing import SampleIndex
from megapack.packing.shards import ShardedIndex, SourceIndex

__all__ = ["HasSamples", "SampleSource"]

Ids = NDArray[np.int64]


class HasSamples(Protocol):
    """What a schedule needs of a PackedDataset (which imports torch; schedules do not)."""

    @property
    def samples(self) -> SampleSource: ...


class SampleSource:
    """Samples of several indices; the global id of sample s of index d is ``bases[d] + s``.

    ``num_lists`` says how many lists of excluded documents are in force, where that matters.

    Args:
        indices: at least one.
        weights: shares of tokens for a blend; None: in proportion to the tokens. A source of weight
            0 is not drawn until a stage gives it another.
        shards: of the indices; None: their own.
        stages: what changes at later steps of a run.
        exclusions: their lists of excluded documents; None: read now.
        attention: ``document`` or ``sample``: what a token attends to, which decides the cost.
        names: of the indices, for people; None: their files.
        scores: of every index, its order by score; None, also in the list: shuffled.
        max_epochs: a run that would repeat an index more often is refused; None: no limit.
        loss_weights: factors on the loss of every index's labels; None: 1 for all.
        attention_window: of the first stage (``megapack.data.window``); None or 0: none.
        counter: (global ids, num_lists) -> labels of each; None: derived from the indices, which
            works as long as no strategy dropped tokens.
    """

    def __init__(
        self,
        indices: Sequence[SourceIndex],
        weights: Sequence[float | None] | None = None,
        *,
        shards: Shards | None = None,
        names: Sequence[str] | None = None,
        stages: Sequence[Stage] = (),
        exclusions: Exclusions | None = None,
        scores: Sequence[Scores | None] | None = None,
        max_epochs: float | None = None,
        loss_weights: Sequence[float] | None = None,
        attention_window: int | None = None,
        attention: Literal["document", "sample"] = "document",
        counter: Callable[[Ids, int], Ids] | None = None,
    ) -> None:
        if not indices:
            raise ConfigError("no sample index was given; give at least one")
        self.indices = list(indices)
        self.shards = shards or Shards(self.indices)
        self.weights = weights and [None if weight is None else float(weight) for weight in weights]
        if weights is not None and len(weights) != len(indices):
            raise ConfigError(f"{len(weights)} weights for {len(indices)} indices; one for each")
        self.stages = tuple(stages)
        self.names = list(names) if names else [str(i.path or i.strategy) for i in self.indices]
        self.scores = list(scores or [None] * len(self.indices))
        self.max_epochs = max_epochs
        self.attention_window = attention_window
        self.loss_weights = None if loss_weights is None else list(loss_weights)
        if self.loss_weights is not None and len(self.loss_weights) != len(indices):
            raise ConfigError(
                f"{len(self.loss_weights)} loss weights for {len(indices)} indices; one for each"
            )
        self.attention = attention
        self._counter = counter
        self.exclusions = exclusions or read_exclusions(
            self.stages, self.names, [index.num_documents for index in self.indices]
        )
        self.bases = self.shards.bases
        self._orders = ScoreOrders(self.indices, self.shards, self.scores)

    @staticmethod
    def of(
        index: SourceIndex | Sequence[SourceIndex] | HasSamples,
        weights: Sequence[float | None] | None = None,
        names: Sequence[str] | None = None,
        stages: Sequence[Stage] = (),
    ) -> SampleSource:
        """What a schedule accepts, as a SampleSource."""
        if isinstance(index, (SampleIndex, ShardedIndex, Sequence)):
            indices = index if isinstance(index, Sequence) else [index]
            return SampleSource(indices, weights, names=names, stages=stages)
        if weights is not None or names or stages:
            raise ConfigError(
                "a PackedDataset brings its weights, names and stages; give them when it is made"
            )
        return index.samples

    @property
    def windows(self) -> list[int]:
        """All attention windows that the run and its stages ask for, tokens."""
        given = (self.attention_window, *(stage.attention_window for stage in self.stages))
        return [window for window in given if window]

    @cached_property
    def num_samples(self) -> int:
        return int(self.bases[-1])

    @cached_property
    def fingerprints(self) -> list[str]:
        """Content identity of every index, and of its order by score."""
        digests = [f", by score {digest}" if digest else "" for digest in self._orders.digests]
        return [f"{i.fingerprint}{by}" for i, by in zip(self.indices, digests, strict=True)]

    @property
    def score_orders(self) -> dict[Place, ScoreOrder]:
        """(number of the index, capacity) -> the order of its samples, where it has scores."""
        return self._orders.by_score

    @cached_property
    def orders(self) -> dict[Place, ScoreOrder | BlockOrder]:
        """(number of the index, capacity) -> the order of its samples, where it is no shuffle."""
        return {**arranged_orders(self.indices, self.buckets), **self.score_orders}

    @cached_property
    def buckets(self) -> list[Bucket]:
        """The samples of all indices by rising capacity."""
        return buckets_of(self.indices)

    @cached_property
    def tokens_per_epoch(self) -> Ids:
        """(indices,) samples x capacity of every index, padding included."""
        return np.array(
            [
                int(np.diff(index.bucket_sample_offsets) @ np.asarray(index.bucket_capacity))
                for index in self.indices
            ],
            np.int64,
        )

    def locate(self, ids: Ids) -> tuple[Ids, Ids]:
        """Global ids -> (number of the index, sample id there), int64 both.

        Raises:
            IndexError: an id that does not exist.
        """
        if len(ids) and (ids.min() < 0 or ids.max() >= self.num_samples):
            raise IndexError(f"sample ids [{ids.min()}, {ids.max()}] of {self.num_samples} samples")
        if len(self.indices) == 1:
            return np.zeros(len(ids), np.int64), ids
        source = np.searchsorted(self.bases, ids, side="right") - 1
        return source, ids - self.bases[source]

    def capacity_of(self, sample: int) -> int:
        """Capacity of one global id, tokens. Raises IndexError."""
        if not 0 <= sample < self.num_samples:
            raise IndexError(f"sample {sample} of {self.num_samples} samples")
        starts, capacities = self._bucket_table
        return capacities[bisect_right(starts, sample) - 1]

    @cached_property
    def _bucket_table(self) -> tuple[list[int], list[int]]:
        """First global id and capacity of every bucket that has samples."""
        starts, capacities = [], []
        for base, index in zip(self.bases.tolist(), self.indices, strict=False):
            offsets = index.bucket_sample_offsets.tolist()
            for b, capacity in enumerate(index.bucket_capacity.tolist()):
                if offsets[b] < offsets[b + 1]:
                    starts.append(base + offsets[b])
                    capacities.append(capacity)
        return starts, capacities

    def segments(self, sample: int, num_lists: int = 0) -> tuple[int, list[tuple[int, int, int]]]:
        """(number of the index, its segments (document, begin, length)) of a global id.

        Without those of documents that are masked.
        """
        shard, local = self.shard_of(sample)
        source, first = int(self.shards.sources[shard]), int(self.shards.first_documents[shard])
        segments = [(first + d, b, n) for d, b, n in self.shards.index(shard).sample(local)[1]]
        documents = np.array([document for document, _, _ in segments], np.int64)
        masked = self.exclusions.masks(source, documents, num_lists)
        return source, [s for s, out in zip(segments, masked.tolist(), strict=True) if not out]

    def shard_of(self, sample: int) -> tuple[int, int]:
        """(number of the shard, sample there) of a global id. Raises IndexError."""
        ids = np.array([sample])
        self.locate(ids)  # refuses what does not exist
        shard, local = self.shards.locate(ids)
        return int(shard[0]), int(local[0])

    def samples_of(self, source: int, documents: int | Ids) -> list[int]:
        """Global ids of the samples that hold a piece of some documents of an index, ascending.

        Reads all of the ``segment_document`` of the shards that have them, 4 bytes per segment, and
        takes a byte per document. Raises ConfigError for a document that the index does not have.
        """
        last, num_documents = int(np.max(documents, initial=0)), self.indices[source].num_documents
        if last >= num_documents:
            raise ConfigError(
                f"document {last} of {self.names[source]}: it has {num_documents} documents, "
                "counted from 0"
            )
        samples: list[int] = self.shards.holding(source, np.unique(documents)).tolist()
        return samples

    def segment_lengths(self, ids: Ids, num_lists: int = 0) -> Ids:
        """Lengths of all segments of some samples that are not masked, tokens, in any order."""
        parts = [np.zeros(0, np.int64)]
        for shard, _, local in self._by_shard(ids):
            index = self.shards.index(shard)
            segments, _ = segments_of(index, local)
            masks = self._masks(shard, num_lists)
            kept = ~masks(np.asarray(index.segment_document[segments], np.int64))
            parts.append(np.asarray(index.segment_length[segments[kept]], np.int64))
        return np.concatenate(parts)

    def attention_cost(
        self,
        ids: Ids,
        capacity: int,
        window: int | None = None,
        *,
        num_lists: int = 0,
        whole: bool | None = None,
    ) -> Ids:
        """Token pairs per sample: sum of squared segment lengths, its padding included.

        A window cuts segments, and padding, into pieces of at most so many tokens. ``whole``: the
        sample attends as a whole; None: as ``attention`` says.
        """
        whole = self.attention == "sample" if whole is None else whole
        costs = np.empty(len(ids), np.int64)
        for shard, mine, local in self._by_shard(ids):
            index = self.shards.index(shard)
            if window is not None or num_lists:
                costs[mine] = segment_costs(
                    index,
                    local,
                    self._masks(shard, num_lists),
                    capacity=capacity,
                    window=capacity if window is None else window,
                    whole=whole,
                )
                continue
            costs[mine] = _core.attention_cost_of(
                index.sample_segment_offsets,
                index.segment_length,
                local,
                capacity,
                whole,
            )
        return costs

    def count_labels(self, ids: Ids, num_lists: int = 0) -> Ids:
        """Tokens of every sample that have a label, int64 (len(ids),)."""
        if self._counter is not None:
            return self._counter(ids, num_lists)
        counts = np.empty(len(ids), np.int64)
        for shard, mine, local in self._by_shard(ids):
            index = self.shards.index(shard)
            if shard not in self._ends:
                self._ends[shard] = document_ends(index)
            masks = self._masks(shard, num_lists)
            counts[mine] = label_counts(index, local, masks, self._ends[shard])
        return counts

    def _masks(self, shard: int, num_lists: int) -> Masks:
        """Which documents of a shard are masked."""
        source, first = int(self.shards.sources[shard]), int(self.shards.first_documents[shard])
        return lambda documents: self.exclusions.masks(source, first + documents, num_lists)

    def _by_shard(self, ids: Ids) -> Iterator[tuple[int, Ids, Ids]]:
        """Every shard that has some of the ids: its number, where they stand, samples there."""
        self.locate(ids)  # refuses what does not exist
        return self.shards.by_shard(ids)

    @cached_property
    def _ends(self) -> dict[int, Ids]:
        return {}
