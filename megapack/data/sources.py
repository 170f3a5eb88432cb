"""The samples of all sources of a run under one numbering, and what is known of them unread.

- ``SampleSource``: global ids -> source, capacity, segments, attention cost, labels; orders.
  ``LabelTotals``: how many labels, and what they weigh.
- ``Shards``: which shard of which source holds a sample; each is opened when it is asked for.
- ``Exclusions``, ``read_exclusions``: documents that are masked from a step on.

    sources of 3 and of 5 samples: bases = 0 3 8            # ids 0 to 2, and 3 to 7
    locate([1, 3, 7])                                       # -> sources 0 1 1, samples 1 0 4

Ids do not change when documents are excluded. Methods that read samples take the ``StepView`` of
the step, which says how many exclusion lists are in force.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import numpy as np
import xxhash
from numpy.typing import NDArray

from megapack import _core
from megapack.data.blend import Mixture, Stage
from megapack.data.bucket_streams import Bucket, Place, buckets_of
from megapack.data.fim import Fim
from megapack.data.program import numbered
from megapack.data.sample_order import BlockOrder, ScoreOrder, score_orders
from megapack.data.steps import PLAIN, Attention, StepView
from megapack.errors import ConfigError
from megapack.packing import SampleIndex
from megapack.packing.sharded import SourceIndex
from megapack.storage.dataset import read_documents

Ids = NDArray[np.int64]


class Shards:
    """Shards are numbered through the sources; ids of samples are global ones, nothing masked.

    A source that was packed as one dataset is one shard.

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
        num_shards, first_documents, first_ids, shards, first_samples = [], [], [], [], []
        for index, base in zip(indices, self.bases.tolist(), strict=False):
            first, shard, sample = index.runs
            first_ids.append(base + first[:-1])
            shards.append(len(self._open) + shard)
            first_samples.append(sample)
            first_documents.append(index.first_documents[:-1])
            num_shards.append(len(index.open_shards))
            self._open += index.open_shards
        self.sources = np.repeat(np.arange(len(indices)), num_shards)
        self.first_documents = np.concatenate(first_documents)
        self.first_ids = np.append(np.concatenate(first_ids), self.bases[-1])
        self.shards, self.first_samples = np.concatenate(shards), np.concatenate(first_samples)

    def __len__(self) -> int:
        return len(self._open)

    def locate(self, ids: Ids) -> tuple[Ids, Ids]:
        """Ids that exist -> (number of the shard, sample there), int64 both."""
        run = np.searchsorted(self.first_ids, ids, side="right") - 1
        return self.shards[run], self.first_samples[run] + ids - self.first_ids[run]

    def by_shard(self, ids: Ids) -> Iterator[tuple[int, Ids, Ids]]:
        """Every shard that has some of the ids: its number, where they stand, samples there."""
        if len(self.shards) == 1:  # one run of samples of one shard
            yield int(self.shards[0]), np.arange(len(ids)), self.first_samples[0] + ids
            return
        shards, local = self.locate(ids)
        order = np.argsort(shards, kind="stable")
        present, begins = np.unique(shards[order], return_index=True)
        for shard, mine in zip(present.tolist(), np.split(order, begins)[1:], strict=True):
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
        """Return the samples of a shard. Raises as ``SourceIndex.open`` does."""
        index = self._open[shard]
        if index is None:
            source = self.indices[int(self.sources[shard])]
            index = self._open[shard] = source.open(self.number_in_source(shard))
        return index


@dataclass(frozen=True, eq=False)
class Exclusions:
    """Documents that are masked from a step on (decontamination, takedowns), listed in files.

    A list in force takes the segments of its documents out of the batch: a sample is then what it
    would be had they never been packed, and their room is padding of it. Which samples a step draws
    stays as it is, and so do shapes. Lists add up over the stages of a run.

    Attributes:
        documents: of every source, int64, ascending: all that some list has.
        lists: beside them, int64: the first list that has each, counted from 1; list n is that of
            the n-th stage that has one.
    """

    documents: tuple[Ids, ...]
    lists: tuple[Ids, ...]

    @cached_property
    def sources(self) -> list[int]:
        """Numbers of those sources of which a list has documents."""
        return [source for source, own in enumerate(self.documents) if len(own)]

    def masks(self, source: int, documents: Ids, view: StepView) -> NDArray[np.bool_]:
        """Return for each of some documents of a source whether the lists in force exclude it."""
        known = self.documents[source]
        if not len(known):
            return np.zeros(len(documents), np.bool_)
        at = np.minimum(np.searchsorted(known, documents), len(known) - 1)
        is_listed = known[at] == documents
        masked: NDArray[np.bool_] = is_listed & (self.lists[source][at] <= view.num_lists)
        return masked

    def of_documents(self, source: int, begin: int, end: int) -> tuple[Ids, Ids]:
        """Those of the documents [begin, end) of a source that are listed, counted from ``begin``
        on, and the first list that has each.
        """
        low, high = np.searchsorted(self.documents[source], [begin, end]).tolist()
        return self.documents[source][low:high] - begin, self.lists[source][low:high]

    def first_list(self, source: int, document: int) -> int | None:
        """The first list that has a document of a source; None: it is in none."""
        return next(iter(self.of_documents(source, document, document + 1)[1].tolist()), None)

    def digests(self, num_lists: int, names: Sequence[str]) -> dict[str, str]:
        """Source name -> how many documents the first lists mask, and a digest of their ids."""
        result = {}
        for source in self.sources:
            own = self.documents[source][self.lists[source] <= num_lists]
            masked = np.ascontiguousarray(own, "<i8")
            if len(masked):
                digest = xxhash.xxh3_64_hexdigest(masked.tobytes())
                result[names[source]] = f"{len(masked)} documents, xxh3 {digest}"
        return result


def read_exclusions(
    stages: Sequence[Stage], names: Sequence[str], num_documents: Sequence[int]
) -> Exclusions:
    """The lists of all stages.

    Args:
        stages: of the run, in order.
        names, num_documents: of the sources.

    Raises:
        ConfigError: a source that does not exist, or a document that it does not have.
        FormatError, OSError: a file that is no list of documents, or cannot be read.
    """
    parts: dict[int, list[tuple[Ids, int]]] = {}
    having = [stage for stage in stages if stage.exclude is not None]
    for number, stage in enumerate(having, 1):
        files = numbered(stage.exclude or {}, names, f"{stage} excludes documents of")
        for source, path in files.items():
            listed = read_documents(path)
            if len(listed) and listed[-1] >= num_documents[source]:
                raise ConfigError(
                    f"{stage}: {path} excludes document {listed[-1]} of {names[source]!r}, which "
                    f"has {num_documents[source]} (counted from 0); is it a list of another "
                    "dataset?"
                )
            parts.setdefault(source, []).append((listed, number))
    none = np.zeros(0, np.int64)
    documents, lists = [none] * len(names), [none] * len(names)
    for source, own in parts.items():
        every = np.concatenate([listed for listed, _ in own])
        of_each = np.repeat([number for _, number in own], [len(listed) for listed, _ in own])
        documents[source], first = np.unique(every, return_index=True)  # of equals the first
        lists[source] = np.ascontiguousarray(of_each[first], np.int64)
    return Exclusions(tuple(documents), tuple(lists))


class LabelTotals(NamedTuple):
    """What there is to learn in each of some samples: three arrays (samples,)."""

    labels: Ids
    """Tokens that have a label, int64."""
    weight: NDArray[np.float64]
    """Sum of the weights of these tokens."""
    sequences: Ids
    """Sequences (what the sample has of a document) with a label of some weight, int64."""


class HasSamples(Protocol):
    """The part of a PackedDataset that a schedule needs (it imports torch; schedules do not)."""

    @property
    def samples(self) -> SampleSource: ...


class SampleSource:
    """Samples of several indices; the global id of sample s of index d is ``bases[d] + s``.

    Methods take the ``StepView`` of a step where their result depends on it.

    Args:
        indices: at least one.
        mixture: what the run says of them.
        shards: of the indices; None: their own.
        exclusions: of the mixture's stages; None: read now.
        attention: what a token attends to, which decides the cost.
        counter: (global ids, view) -> labels of each; None: derive them from the indices, which
            works as long as no strategy dropped tokens, and without fill-in-the-middle.
        token_weights: of every index what tells its loss weights per token from others; None, also
            in the list: there are none.
        fim: the mixture's, with ids; None: there is none.
    """

    def __init__(
        self,
        indices: Sequence[SourceIndex],
        mixture: Mixture | None = None,
        *,
        shards: Shards | None = None,
        exclusions: Exclusions | None = None,
        attention: Attention = "document",
        counter: Callable[[Ids, StepView], LabelTotals] | None = None,
        token_weights: Sequence[str | None] | None = None,
        fim: Fim | None = None,
    ) -> None:
        if not indices:
            raise ConfigError("no sample index was given; give at least one")
        self.indices, self.attention, self._counter = list(indices), attention, counter
        self.token_weights, self.fim = list(token_weights or [None] * len(indices)), fim
        self.shards = shards or Shards(self.indices)
        self.bases = self.shards.bases
        self.mixture = (mixture or Mixture()).of([str(i.path or i.strategy) for i in indices])
        self.names = list(self.mixture.names or ())
        self.exclusions = exclusions or read_exclusions(
            self.mixture.stages, self.names, [index.num_documents for index in self.indices]
        )
        self._ends: dict[int, Ids] = {}

    @property
    def weighs_tokens(self) -> bool:
        """Whether loss masks hold more than which labels there are, in every step of the run."""
        return self.mixture.loss != "token_mean" or any(self.token_weights)

    @property
    def windows(self) -> list[int]:
        """All attention windows that the run and its stages ask for, tokens."""
        given = (self.mixture.attention_window, *(s.attention_window for s in self.mixture.stages))
        return [window for window in given if window]

    @cached_property
    def num_samples(self) -> int:
        return int(self.bases[-1])

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

    # --- orders ---------------------------------------------------------------------------------

    @cached_property
    def fingerprints(self) -> list[str]:
        """Content identity of every index, and of its order by score."""
        return [
            f"{index.fingerprint}, by score {self._scored[source][1]}"
            if source in self._scored
            else index.fingerprint
            for source, index in enumerate(self.indices)
        ]

    @cached_property
    def orders(self) -> dict[Place, ScoreOrder | BlockOrder]:
        """(number of the index, capacity) -> the order of its samples, where it is no shuffle."""
        result: dict[Place, ScoreOrder | BlockOrder] = {}
        for source, index in enumerate(self.indices):
            if source in self._scored:
                orders, _ = self._scored[source]
                result |= {(source, capacity): order for capacity, order in orders.items()}
            elif index.arranged:
                for capacity, sources, _, sizes in self.buckets:
                    for size in sizes[sources == source].tolist():
                        result[source, capacity] = BlockOrder(size, capacity, index.arranged)
        return result

    @cached_property
    def _scored(self) -> dict[int, tuple[dict[int, ScoreOrder], str]]:
        """Orders by score and their digest, for every source that has scores; reads the files."""
        return {
            source: score_orders(self.indices[source], self.shards.opened(source), scores)
            for source, scores in enumerate(self.mixture.scores or ())
            if scores is not None
        }

    # --- where a sample is ----------------------------------------------------------------------

    @cached_property
    def buckets(self) -> list[Bucket]:
        """The samples of all indices by rising capacity."""
        return buckets_of(self.indices)

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
        """First global id and capacity of every bucket of every index, ascending."""
        rows = sorted(
            (first, bucket.capacity)
            for bucket in self.buckets
            for first in bucket.first_sample.tolist()
        )
        return [first for first, _ in rows], [capacity for _, capacity in rows]

    def shard_of(self, sample: int) -> tuple[int, int]:
        """(number of the shard, sample there) of a global id. Raises IndexError."""
        [(shard, _, local)] = self._by_shard(np.array([sample]))
        return shard, int(local[0])

    def _by_shard(self, ids: Ids) -> Iterator[tuple[int, Ids, Ids]]:
        """Every shard that has some of the ids: its number, where they stand, samples there."""
        self.locate(ids)  # refuses what does not exist
        return self.shards.by_shard(ids)

    # --- what a sample holds --------------------------------------------------------------------

    def segments(
        self, sample: int, view: StepView = PLAIN
    ) -> tuple[int, list[tuple[int, int, int]]]:
        """Return the number of the index and the segments (document, begin, length) of a sample.

        Segments of excluded documents are left out.
        """
        shard, local = self.shard_of(sample)
        source, first = int(self.shards.sources[shard]), int(self.shards.first_documents[shard])
        segments = [(first + d, b, n) for d, b, n in self.shards.index(shard).sample(local)[1]]
        documents = np.array([document for document, _, _ in segments], np.int64)
        masked = self.exclusions.masks(source, documents, view)
        return source, [s for s, out in zip(segments, masked.tolist(), strict=True) if not out]

    def groups_of(self, sample: int, view: StepView = PLAIN) -> list[int]:
        """Return the group of each of the ``segments``, as in ``SampleIndex.groups_of``."""
        shard, local = self.shard_of(sample)
        kept = self._kept(shard, np.array([local]), view)[2] > 0
        numbers = np.array(self.shards.index(shard).groups_of(local), np.int64)[kept]
        return [int(number) for number in np.unique(numbers, return_inverse=True)[1]]

    def samples_of(self, source: int, documents: int | Ids) -> list[int]:
        """Global ids of the samples that hold a piece of some documents of an index, ascending.

        Reads all of the ``segment_document`` of the shards that have them, 4 bytes per segment, and
        takes a byte per document. Raises ConfigError for a document that the index does not have.
        """
        wanted, num_documents = np.unique(documents), self.indices[source].num_documents
        for document in wanted[[0, -1]].tolist() if len(wanted) else ():
            if not 0 <= document < num_documents:
                raise ConfigError(
                    f"document {document} of {self.names[source]}: it has {num_documents} "
                    "documents, counted from 0"
                )
        samples: list[int] = self.shards.holding(source, wanted).tolist()
        return samples

    def segment_lengths(self, ids: Ids, view: StepView = PLAIN) -> Ids:
        """Return the lengths of all attention segments of some samples, tokens, in any order.

        Excluded documents are left out; attention windows do not cut (``batch.cut_lengths`` does).
        """
        in_groups = self.attention == "group"
        parts = [
            self._kept(shard, local, view, in_groups=in_groups)[2]
            for shard, _, local in self._by_shard(ids)
        ]
        lengths = np.concatenate([np.zeros(0, np.int64), *parts])
        return lengths[lengths > 0]

    def attention_cost(
        self,
        ids: Ids,
        capacity: int,
        view: StepView = PLAIN,
        *,
        whole: bool | None = None,
    ) -> Ids:
        """Return token pairs per sample: the sum of squared lengths of its attention segments.

        Padding counts as a segment, and the window of the view cuts it, too.

        Args:
            ids: samples of one capacity.
            capacity: of these samples, tokens.
            view: of the step.
            whole: samples attend as a whole instead of segment by segment; None: as ``attention``.
        """
        window = view.window
        in_groups = whole is None and self.attention == "group"
        whole = self.attention == "sample" if whole is None else whole
        costs = np.empty(len(ids), np.int64)
        for shard, mine, local in self._by_shard(ids):
            if window is None and not view.num_lists and not in_groups:
                index = self.shards.index(shard)
                arrays = (index.sample_segment_offsets, index.segment_length)
                costs[mine] = _core.attention_cost_of(*arrays, local, capacity, whole)
                continue
            _, owner, lengths = self._kept(shard, local, view, in_groups=in_groups)
            used = _sums(owner, lengths, len(local))
            size = capacity if window is None else window
            own, padding = (
                size * size * (n // size) + (n % size) ** 2
                for n in (used if whole else lengths, capacity - used)
            )
            costs[mine] = padding + (own if whole else _sums(owner, own, len(local)))
        return costs

    def count_labels(self, ids: Ids, view: StepView = PLAIN) -> Ids:
        """Return the number of tokens with a label of every sample, int64 (len(ids),)."""
        return self.label_totals(ids, view).labels

    def label_totals(self, ids: Ids, view: StepView = PLAIN) -> LabelTotals:
        """Return the labels of every sample.

        Without a counter, every token has a label but the last one of a document that ends there.
        """
        if self._counter is not None:
            return self._counter(ids, view)
        assert view.epochs is None, "bare indices have no fill-in-the-middle"
        counts, sequences = np.empty((2, len(ids)), np.int64)
        for shard, mine, local in self._by_shard(ids):
            index = self.shards.index(shard)
            if shard not in self._ends:
                self._ends[shard] = _document_ends(index)
            segments, owner, lengths = self._kept(shard, local, view)
            ends = self._ends[shard][np.asarray(index.segment_document[segments])]
            last = np.asarray(index.segment_begin[segments], np.int64) + lengths == ends
            if self.attention == "group" and index.segment_joined is not None and len(segments):
                joined = np.asarray(index.segment_joined[segments]) > 0  # and predicted before
                last[:-1] &= ~(joined[1:] & (owner[1:] == owner[:-1]) & (lengths[1:] > 0))
            labels = np.maximum(lengths - last, 0)
            counts[mine] = _sums(owner, labels, len(local))
            sequences[mine] = _sums(owner, labels > 0, len(local))
        return LabelTotals(counts, counts.astype(np.float64), sequences)

    def _kept(
        self, shard: int, samples: Ids, view: StepView, *, in_groups: bool = False
    ) -> tuple[Ids, Ids, Ids]:
        """Return segments of some samples of a shard: numbers, positions of their samples, tokens.

        Excluded segments have 0 tokens. ``in_groups`` joins the segments of a group: the first one
        stands for all of them.
        """
        index = self.shards.index(shard)
        segments, owner = segments_of(index, samples)
        lengths = np.asarray(index.segment_length[segments], np.int64)
        if view.num_lists:
            source, first = int(self.shards.sources[shard]), self.shards.first_documents[shard]
            documents = first + np.asarray(index.segment_document[segments], np.int64)
            lengths[self.exclusions.masks(source, documents, view)] = 0
        if in_groups and index.segment_joined is not None and len(segments):
            joined = np.asarray(index.segment_joined[segments]) > 0
            first = np.flatnonzero(~joined | (np.diff(owner, prepend=-1) != 0))
            return segments[first], owner[first], np.add.reduceat(lengths, first)
        return segments, owner, lengths


def check_has_groups(indices: Sequence[SourceIndex]) -> None:
    """Refuse attention ``group`` where no source has groups, or one had. Raises ConfigError."""
    lost = [i.path for i in indices if i.parameters.get("groups") and not i.has_groups]
    if lost or not any(index.has_groups for index in indices):
        why = "no source was packed with groups of documents: pack again with --groups"
        if lost:
            why = f"{lost[0]} lost its groups when it was arranged: take what it was made of"
        raise ConfigError(f"attention is group, and {why}, or choose attention: document")


def segments_of(index: SampleIndex, samples: Ids) -> tuple[Ids, Ids]:
    """Numbers of the segments of some samples, and the position of the sample of each."""
    first = np.asarray(index.sample_segment_offsets[samples])
    counts = np.asarray(index.sample_segment_offsets[samples + 1]) - first
    before = np.cumsum(counts) - counts
    segments = np.repeat(first - before, counts) + np.arange(counts.sum())
    return segments, np.repeat(np.arange(len(samples)), counts)


def _document_ends(index: SampleIndex) -> Ids:
    """Length of every document of an index. Raises ConfigError: it dropped tokens, so it does not
    know."""
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


def _sums(groups: Ids, values: NDArray[Any], num_groups: int) -> Ids:
    return np.bincount(groups, values, num_groups).astype(np.int64)
