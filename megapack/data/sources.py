"""The samples of one or several indices under one numbering, and what is known of them unread."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Literal, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from megapack import _core
from megapack.data.bucket_order import Bucket, Place, buckets_of
from megapack.data.exclusions import Exclusions, read_exclusions
from megapack.data.program import Stage
from megapack.data.sample_order import BlockOrder, ScoreOrder, Scores, score_orders
from megapack.errors import ConfigError
from megapack.packing import SampleIndex
from megapack.packing.sharded import ShardedIndex, SourceIndex

# ---- The shards of all sources of a run, and which of them holds a sample -----------------------
# A source packed as one dataset has one shard, itself. A shard of a source of many is opened when
# it
# is asked for the first time; what is known before stands in the source's shard manifest.

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


# ---- Of every index and bucket the order of its samples, where it is no shuffle -----------------


class ScoreOrders:
    """By score; scores are read when they are first asked for.

    Args:
        indices: of all sources.
        shards: theirs.
        scores: of every index; None where it has none.
    """

    def __init__(
        self, indices: Sequence[SourceIndex], shards: Shards, scores: Sequence[Scores | None]
    ) -> None:
        self._indices, self._shards, self._scores = indices, shards, scores

    @cached_property
    def by_score(self) -> dict[Place, ScoreOrder]:
        """Of all buckets of the indices that have scores."""
        return {
            (source, capacity): order
            for source, (orders, _) in self._read.items()
            for capacity, order in orders.items()
        }

    @property
    def digests(self) -> list[str]:
        """Of every index one of its orders; empty where it has none."""
        return [self._read[i][1] if i in self._read else "" for i in range(len(self._indices))]

    @cached_property
    def _read(self) -> dict[int, tuple[dict[int, ScoreOrder], str]]:
        return {
            source: score_orders(self._indices[source], self._shards.opened(source), scores)
            for source, scores in enumerate(self._scores)
            if scores is not None
        }


def arranged_orders(
    indices: Sequence[SourceIndex], buckets: Sequence[Bucket]
) -> dict[Place, BlockOrder]:
    """Of the indices that were written in the order in which they are drawn."""
    arranged = {
        source: index.arranged
        for source, index in enumerate(indices)
        if isinstance(index, ShardedIndex) and index.arranged
    }
    return {
        (source, bucket.capacity): BlockOrder(int(size), bucket.capacity, how)
        for bucket in buckets
        for source, how in arranged.items()
        for size in bucket.sizes[bucket.datasets == source]
    }


# ---- What samples cost and how many labels they have, by their index alone ----------------------


# document of each segment -> whether it is masked
Masks: TypeAlias = Callable[[Ids], NDArray[np.bool_]]


def segment_costs(
    index: SampleIndex, samples: Ids, masks: Masks, *, capacity: int, window: int, whole: bool
) -> Ids:
    """(len(samples),) token pairs: squared lengths of what attends to itself, padding included.

    Args:
        index, samples: numbers of samples of one capacity.
        masks: segments that are padding.
        capacity: of the samples, tokens.
        window: attention, also in padding, stays inside pieces of so many tokens.
        whole: samples attend as a whole instead of segment by segment.
    """
    segments, owner = segments_of(index, samples)
    documents = np.asarray(index.segment_document[segments], np.int64)
    lengths = np.asarray(index.segment_length[segments], np.int64)
    kept = np.where(masks(documents), 0, lengths)
    used = _sums(owner, kept, len(samples))
    own, padding = (
        window * window * (n // window) + (n % window) ** 2
        for n in (used if whole else kept, capacity - used)
    )
    return padding + (own if whole else _sums(owner, own, len(samples)))


def label_counts(index: SampleIndex, samples: Ids, masks: Masks, ends: Ids) -> Ids:
    """(len(samples),) tokens with a label: all but the last one of each document that ends there.

    Args:
        index, samples: numbers of samples.
        masks: segments that are padding.
        ends: ``document_ends(index)``.
    """
    segments, owner = segments_of(index, samples)
    documents = np.asarray(index.segment_document[segments], np.int64)
    lengths = np.asarray(index.segment_length[segments], np.int64)
    last = np.asarray(index.segment_begin[segments], np.int64) + lengths == ends[documents]
    labels = np.where(masks(documents), 0, lengths - last)
    return _sums(owner, labels, len(samples))


def document_ends(index: SampleIndex) -> Ids:
    """Length of every document of an index.

    Raises:
        ConfigError: the index dropped tokens, so it does not know.
    """
    dropped = index.metrics()["dropped_tokens"]
    if dropped:
        raise ConfigError(
            f"the index dropped {dropped} tokens, so it does not tell where documents end: make "
            "the schedule from the PackedDataset, which counts labels exactly"
        )
    ends = np.zeros(int(np.max(index.segment_document)) + 1, np.int64)
    np.maximum.at(
        ends,
        index.segment_document,
        np.asarray(index.segment_begin, np.int64) + index.segment_length,
    )
    return ends


def segments_of(index: SampleIndex, samples: Ids) -> tuple[Ids, Ids]:
    """Numbers of the segments of some samples, and the position of the sample of each."""
    first = np.asarray(index.sample_segment_offsets[samples])
    counts = np.asarray(index.sample_segment_offsets[samples + 1]) - first
    before = np.cumsum(counts) - counts
    segments = np.repeat(first - before, counts) + np.arange(counts.sum())
    return segments, np.repeat(np.arange(len(samples)), counts)


def _sums(groups: Ids, values: Ids, num_groups: int) -> Ids:
    return np.bincount(groups, values, num_groups).astype(np.int64)


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
        attention_window: of the first stage (``megapack.data.attention_window``); None or 0: none.
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
