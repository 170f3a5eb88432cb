"""Samples of all sources of a run, numbered together, and facts that need no tokens.

- ``SampleSource``: global ids -> source, capacity, segments, attention cost, labels; orders.
- ``Shards``: shard that holds a sample, opened on first use.

    sources of 3 and of 5 samples: bases = 0 3 8            # ids 0 to 2, and 3 to 7
    locate([1, 3, 7])                                       # -> sources 0 1 1, samples 1 0 4

Ids do not change when documents are excluded: methods that read samples take a ``StepView``.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from megapack import _core
from megapack.data.blend import Mixture
from megapack.data.bucket_streams import Bucket, SourceBucket, buckets_of
from megapack.data.exclusions import Exclusions, read_exclusions
from megapack.data.fim import Fim
from megapack.data.sample_order import BlockOrder, ScoreOrder, score_orders
from megapack.data.steps import PLAIN, Attention, StepView
from megapack.errors import ConfigError
from megapack.packing import SampleIndex
from megapack.packing.metrics import segment_pairs
from megapack.packing.sharded import SourceIndex
from megapack.storage.columns import ColumnSpec

Ids = NDArray[np.int64]


class Shards:
    """Shards of all sources, numbered consecutively; a source of one dataset is one shard.

    Attributes:
        indices: indices of the sources.
        bases: (sources + 1,) int64, the first sample id of each source, and the number of samples.
        first_ids, shards, first_samples: ids from ``first_ids[r]`` to ``first_ids[r + 1]`` are
            consecutive samples of ``shards[r]``, from ``first_samples[r]`` on; int64.
        sources: (shards,) int64, the source of each shard.
        first_documents: (shards,) int64, number of the shard's first document in the source.
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
        """Return (shard, sample in the shard) of valid ids, int64 both."""
        run = np.searchsorted(self.first_ids, ids, side="right") - 1
        return self.shards[run], self.first_samples[run] + ids - self.first_ids[run]

    def by_shard(self, ids: Ids) -> Iterator[tuple[int, Ids, Ids]]:
        """Yield (shard, positions in ``ids``, samples in the shard) for all shards of the ids."""
        if len(self.shards) == 1:  # one run of samples of one shard
            yield int(self.shards[0]), np.arange(len(ids)), self.first_samples[0] + ids
            return
        shards, local = self.locate(ids)
        order = np.argsort(shards, kind="stable")
        present, begins = np.unique(shards[order], return_index=True)
        for shard, positions in zip(present.tolist(), np.split(order, begins)[1:], strict=True):
            yield shard, positions, local[positions]

    def of_source(self, source: int) -> range:
        return range(*np.searchsorted(self.sources, [source, source + 1]).tolist())

    def ids(self, shard: int) -> Ids:
        """Return the ids of all samples of a shard, in the shard's order."""
        runs = np.flatnonzero(self.shards == shard)
        parts = map(np.arange, self.first_ids[runs], self.first_ids[runs + 1])
        return np.concatenate([np.zeros(0, np.int64), *parts])

    def is_open(self, shard: int) -> bool:
        return self._open[shard] is not None

    def number_in_source(self, shard: int) -> int:
        """Return the position of a shard among the shards of its source."""
        return shard - self.of_source(int(self.sources[shard])).start

    def opened(self, source: int) -> Iterator[tuple[SampleIndex, int, Ids]]:
        """Open the shards of a source; yield their samples, the number of their first document in
        the source and the numbers of their samples in the source."""
        for shard in self.of_source(source):
            numbers = self.ids(shard) - self.bases[source]
            yield self.index(shard), int(self.first_documents[shard]), numbers

    def holding(self, source: int, documents: Ids) -> Ids:
        """Return the ids, ascending, of the samples with a piece of the documents (ascending)."""
        shards = self.of_source(source)
        holder = np.searchsorted(self.first_documents[shards], documents, side="right") - 1
        ids = [np.zeros(0, np.int64)]
        for number in np.unique(holder).tolist():
            shard = shards[number]
            index = self.index(shard)
            wanted = documents[holder == number] - self.first_documents[shard]
            segments = _places_of(wanted, index.segment_document, index.num_documents)
            if index.end_document is not None and index.segment_end_offsets is not None:
                # Each document ends in one sample.
                ends = _places_of(wanted, index.end_document, index.num_documents)
                segments = np.searchsorted(index.segment_end_offsets, ends, side="right") - 1
            local = np.searchsorted(index.sample_segment_offsets, segments, side="right") - 1
            ids.append(self.ids(shard)[np.unique(local)])
        return np.sort(np.concatenate(ids))

    def index(self, shard: int) -> SampleIndex:
        """Return the samples of a shard. Raises the errors of ``SourceIndex.open``."""
        index = self._open[shard]
        if index is None:
            source = self.indices[int(self.sources[shard])]
            index = self._open[shard] = source.open(self.number_in_source(shard))
        return index


class LabelTotals(NamedTuple):
    """Labels of some samples: three arrays (samples,)."""

    labels: Ids  # tokens that have a label, int64
    weight: NDArray[np.float64]  # sum of the weights of these tokens
    sequences: Ids
    """Sequences (the part of a document in the sample) with a label of weight above 0, int64."""


class HasSamples(Protocol):
    """The part of a PackedDataset that a schedule needs (it imports torch; schedules do not)."""

    @property
    def samples(self) -> SampleSource: ...


class SampleSource:
    """Samples of several indices; the global id of sample s of index d is ``bases[d] + s``.

    Args:
        indices: at least one.
        mixture: settings of the run for these sources.
        exclusions: exclusions of the mixture's stages; None: read them now.
        attention: reach of attention, which determines the cost.
        counter: (global ids, view) -> labels of each; None: derive them from the indices, which
            works only if no strategy dropped tokens and fill-in-the-middle is off.
        token_weights: digest of every index's loss weights per token; None, for all or for one
            index: no weights.
        fim: fill-in-the-middle with token ids; None: off.
        columns: types of the columns that batches carry.
    """

    def __init__(
        self,
        indices: Sequence[SourceIndex],
        mixture: Mixture | None = None,
        *,
        exclusions: Exclusions | None = None,
        attention: Attention = "document",
        counter: Callable[[Ids, StepView], LabelTotals] | None = None,
        token_weights: Sequence[str | None] | None = None,
        fim: Fim | None = None,
        columns: Mapping[str, ColumnSpec] | None = None,
    ) -> None:
        if not indices:
            raise ConfigError("no sample index was given; give at least one")
        check_trees(indices, attention)
        self.indices, self.attention, self._counter = list(indices), attention, counter
        self.token_weights, self.fim = list(token_weights or [None] * len(indices)), fim
        self.columns = dict(columns or {})
        self.shards = Shards(self.indices)
        self.bases = self.shards.bases
        self.mixture = (mixture or Mixture()).of([str(i.path or i.strategy) for i in indices])
        self.names = list(self.mixture.names or ())
        self.exclusions = exclusions or read_exclusions(
            self.mixture.stages, self.names, [index.num_documents for index in self.indices]
        )
        self._ends: dict[int, Ids] = {}

    @property
    def weighs_tokens(self) -> bool:
        """True if the loss masks carry weights, in every step of the run. In trees, a token has the
        sum of the weights that its documents give it."""
        in_trees = self.attention == "tree"
        return in_trees or self.mixture.loss != "token_mean" or any(self.token_weights)

    @property
    def fim_room(self) -> int:
        """Tokens that fill-in-the-middle adds to a document; 0 if it is off."""
        return 0 if self.fim is None else self.fim.room

    @property
    def windows(self) -> list[int]:
        return self.mixture.windows

    @cached_property
    def num_samples(self) -> int:
        return int(self.bases[-1])

    @cached_property
    def tokens_per_epoch(self) -> Ids:
        """(indices,) samples x capacity of every index, padding included."""
        tokens = [
            np.diff(i.bucket_sample_offsets) @ np.asarray(i.bucket_capacity) for i in self.indices
        ]
        return np.array(tokens, np.int64)

    # --- orders ---------------------------------------------------------------------------------

    @cached_property
    def fingerprints(self) -> list[str]:
        """Identity of the content of every index, and of its order by score."""
        result = [index.fingerprint for index in self.indices]
        for source, (_, digest) in self._scored.items():
            result[source] += f", by score {digest}"
        return result

    @cached_property
    def orders(self) -> dict[SourceBucket, ScoreOrder | BlockOrder]:
        """(number of the index, capacity) -> order of its samples, unless they are shuffled."""
        result: dict[SourceBucket, ScoreOrder | BlockOrder] = {}
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
        """Orders by score and their digest, for every source with scores; reads the files."""
        return {
            source: score_orders(self.indices[source], self.shards.opened(source), scores)
            for source, scores in enumerate(self.mixture.scores or ())
            if scores is not None
        }

    # --- where a sample is ----------------------------------------------------------------------

    @cached_property
    def buckets(self) -> list[Bucket]:
        """Buckets of all indices by ascending capacity."""
        return buckets_of(self.indices)

    def locate(self, ids: Ids) -> tuple[Ids, Ids]:
        """Return (index, sample in the index) of global ids, int64 both. Raises IndexError."""
        if len(ids) and (ids.min() < 0 or ids.max() >= self.num_samples):
            raise IndexError(
                f"sample ids are from {ids.min()} to {ids.max()}; only {self.num_samples} exist"
            )
        if len(self.indices) == 1:
            return np.zeros(len(ids), np.int64), ids
        source = np.searchsorted(self.bases, ids, side="right") - 1
        return source, ids - self.bases[source]

    def capacity_of(self, sample: int) -> int:
        """Return the capacity of one global id, tokens. Raises IndexError if it does not exist."""
        if not 0 <= sample < self.num_samples:
            raise IndexError(f"sample {sample} does not exist; there are {self.num_samples}")
        starts, capacities = self._bucket_table
        return capacities[bisect_right(starts, sample) - 1]

    @cached_property
    def _bucket_table(self) -> tuple[list[int], list[int]]:
        """First global ids and capacities of all buckets of all indices, ascending."""
        rows = sorted(
            (first, bucket.capacity)
            for bucket in self.buckets
            for first in bucket.first_sample.tolist()
        )
        return [first for first, _ in rows], [capacity for _, capacity in rows]

    def shard_of(self, sample: int) -> tuple[int, int]:
        """Return (shard, sample in the shard) of a global id, or raise IndexError."""
        [(shard, _, local)] = self._by_shard(np.array([sample]))
        return shard, int(local[0])

    def _by_shard(self, ids: Ids) -> Iterator[tuple[int, Ids, Ids]]:
        self.locate(ids)  # raises for an invalid id
        return self.shards.by_shard(ids)

    # --- what a sample holds --------------------------------------------------------------------

    def segments(
        self, sample: int, view: StepView = PLAIN
    ) -> tuple[int, list[tuple[int, int, int]]]:
        """Return the number of the index and the segments (document, begin, length) of a sample,
        without those of excluded documents."""
        shard, local = self.shard_of(sample)
        source, first = int(self.shards.sources[shard]), int(self.shards.first_documents[shard])
        segments = [(first + d, b, n) for d, b, n in self.shards.index(shard).sample(local)[1]]
        documents = np.array([document for document, _, _ in segments], np.int64)
        masked = self.exclusions.masks(source, documents, view).tolist()
        return source, [s for s, is_out in zip(segments, masked, strict=True) if not is_out]

    def groups_of(self, sample: int, view: StepView = PLAIN) -> list[int]:
        """Return the group of each of the ``segments``, as in ``SampleIndex.groups_of``."""
        shard, local = self.shard_of(sample)
        kept = self._kept(shard, np.array([local]), view)[2] > 0
        numbers = np.array(self.shards.index(shard).groups_of(local), np.int64)[kept]
        return [int(number) for number in np.unique(numbers, return_inverse=True)[1]]

    def samples_of(self, source: int, documents: int | Ids) -> list[int]:
        """Return the global ids, ascending, of samples with a piece of some documents of an index.
        Reads 4 bytes per segment of shards. Raises ConfigError if a document does not exist."""
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
        """Return the lengths of all attention segments of some samples, tokens, in any order,
        without excluded documents. Apply attention windows with ``batch.cut_lengths``."""
        in_groups = self.attention == "group"
        parts = [np.zeros(0, np.int64)]
        for shard, _, local in self._by_shard(ids):
            _, owner, tokens = self._kept(shard, local, view, in_groups=in_groups)
            if self.attention == "sample":
                tokens = _sums(owner, tokens, len(local))
            parts.append(tokens)
        lengths = np.concatenate(parts)
        return lengths[lengths > 0]

    def path_lengths(self, ids: Ids) -> Ids:
        """Return, for every segment in ``segment_lengths`` of samples with prefix trees, the tokens
        of the path to it."""
        parts = [np.zeros(0, np.int64)]
        for shard, _, local in self._by_shard(ids):
            index = self.shards.index(shard)
            parts.append(np.asarray(index.segment_begin[segments_of(index, local)[0]], np.int64))
        return np.concatenate(parts)

    def sequence_lengths(self, ids: Ids) -> Ids:
        """Return the lengths of all documents of samples with prefix trees."""
        parts = [np.zeros(0, np.int64)]
        for shard, _, local in self._by_shard(ids):
            index = self.shards.index(shard)
            segments = segments_of(index, local)[0]
            ends = np.asarray(index.segment_end_offsets)
            lengths = np.asarray(index.segment_length[segments], np.int64)
            lengths += np.asarray(index.segment_begin[segments])
            parts.append(np.repeat(lengths, ends[segments + 1] - ends[segments]))
        return np.concatenate(parts)

    def attention_cost(
        self, ids: Ids, capacity: int, view: StepView = PLAIN, *, whole: bool | None = None
    ) -> Ids:
        """Return token pairs per sample: the sum of squared lengths of its attention segments.

        Padding counts as a segment; the window of the view cuts all segments; in trees, a node
        counts with the path to it (``segment_pairs``). The samples have one capacity, in tokens.
        ``whole``: attention spans whole samples, not segments; None: see ``attention``.
        """
        window = view.window
        in_groups = whole is None and self.attention == "group"
        whole = self.attention == "sample" if whole is None else whole
        costs = np.empty(len(ids), np.int64)
        for shard, positions, local in self._by_shard(ids):
            if self.attention == "tree" and whole is False:
                segments, owner, lengths = self._kept(shard, local, view)
                begins = np.asarray(self.shards.index(shard).segment_begin[segments])
                pairs = _sums(owner, segment_pairs(begins, lengths), len(local))
                costs[positions] = pairs + (capacity - _sums(owner, lengths, len(local))) ** 2
                continue
            if window is None and not view.has_exclusions and not in_groups:
                index = self.shards.index(shard)
                arrays = (index.sample_segment_offsets, index.segment_length)
                costs[positions] = _core.attention_cost_of(*arrays, local, capacity, whole)
                continue
            _, owner, lengths = self._kept(shard, local, view, in_groups=in_groups)
            used = _sums(owner, lengths, len(local))
            size = capacity if window is None else window
            pairs, pairs_of_padding = (
                size * size * (n // size) + (n % size) ** 2
                for n in (used if whole else lengths, capacity - used)
            )
            if not whole:
                pairs = _sums(owner, pairs, len(local))
            costs[positions] = pairs + pairs_of_padding
        return costs

    def second_sizes(self, ids: Ids, capacity: int, view: StepView = PLAIN) -> tuple[int, int]:
        """Return the sum of the second sizes in samples of one capacity, and of their second
        capacities; samples that were packed without second sizes count in neither."""
        held = room = 0
        for shard, _, local in self._by_shard(ids) if self._has_second else ():
            index = self.shards.index(shard)
            if index.segment_second is not None:
                segments, _, lengths = self._kept(shard, local, view)
                kept = segments[lengths > 0]
                bucket = index.bucket_capacity.tolist().index(capacity)
                held += int(np.asarray(index.segment_second[kept], np.int64).sum())
                room += index.parameters["second_capacity"][bucket] * len(local)
        return held, room

    @cached_property
    def _has_second(self) -> bool:
        return any("second_capacity" in index.parameters for index in self.indices)

    def count_labels(self, ids: Ids, view: StepView = PLAIN) -> Ids:
        """Return for every sample the number of tokens with a label, int64 (len(ids),)."""
        return self.label_totals(ids, view).labels

    def label_totals(self, ids: Ids, view: StepView = PLAIN) -> LabelTotals:
        """Return the labels of every sample; without a counter, all but a document's last token."""
        if self._counter is not None:
            return self._counter(ids, view)
        assert view.epochs is None, "fill-in-the-middle needs a counter of labels"
        counts, sequences = np.empty((2, len(ids)), np.int64)
        for shard, positions, local in self._by_shard(ids):
            index = self.shards.index(shard)
            if shard not in self._ends:
                self._ends[shard] = _document_ends(index)
            segments, owner, lengths = self._kept(shard, local, view)
            ends = self._ends[shard][np.asarray(index.segment_document[segments])]
            last = np.asarray(index.segment_begin[segments], np.int64) + lengths == ends
            if self.attention == "group" and index.segment_joined is not None and len(segments):
                # The last token of a document predicts the next document of its group.
                joined = np.asarray(index.segment_joined[segments]) > 0
                last[:-1] &= ~(joined[1:] & (owner[1:] == owner[:-1]) & (lengths[1:] > 0))
            labels = np.maximum(lengths - last, 0)
            counts[positions] = _sums(owner, labels, len(local))
            sequences[positions] = _sums(owner, labels > 0, len(local))
        return LabelTotals(counts, counts.astype(np.float64), sequences)

    def _kept(
        self, shard: int, samples: Ids, view: StepView, *, in_groups: bool = False
    ) -> tuple[Ids, Ids, Ids]:
        """Return segments of some samples of a shard: numbers, positions of their samples, tokens
        (0 if excluded). ``in_groups`` merges the segments of a group."""
        index = self.shards.index(shard)
        segments, owner = segments_of(index, samples)
        lengths = np.asarray(index.segment_length[segments], np.int64)
        if view.has_exclusions:
            source, first = int(self.shards.sources[shard]), self.shards.first_documents[shard]
            documents = first + np.asarray(index.segment_document[segments], np.int64)
            lengths[self.exclusions.masks(source, documents, view)] = 0
        if in_groups and index.segment_joined is not None and len(segments):
            joined = np.asarray(index.segment_joined[segments]) > 0
            first = np.flatnonzero(~joined | (np.diff(owner, prepend=-1) != 0))
            return segments[first], owner[first], np.add.reduceat(lengths, first)
        return segments, owner, lengths


def _places_of(documents: Ids, numbers: Any, num_documents: int) -> Ids:
    """Return the positions of some documents in ``numbers``."""
    if len(documents) == 1:  # ten times as fast as a table
        return np.flatnonzero(numbers == int(documents[0]))
    is_listed = np.zeros(num_documents, np.bool_)
    is_listed[documents] = True
    return np.flatnonzero(is_listed[numbers])


def check_tokens_once(shards: Shards) -> None:
    """Raise ConfigError if an index dropped or repeated tokens."""
    for index in map(shards.index, range(len(shards))):
        if index.dropped_tokens or index.repeated_tokens:
            raise ConfigError(
                f"{index.path or 'the index'}: strategy {index.strategy!r} has dropped "
                f"{index.dropped_tokens:,} tokens and repeated {index.repeated_tokens:,}; evaluate "
                "with an index that places every token once (strategy bucket)"
            )


def check_has_groups(indices: Sequence[SourceIndex]) -> None:
    """Raise ConfigError if no source has groups, or an arranged source lost them."""
    lost = [i.path for i in indices if i.parameters.get("groups") and not i.has_groups]
    if lost or not any(index.has_groups for index in indices):
        why = "no source was packed with groups of documents: pack again with --groups"
        if lost:
            why = f"{lost[0]} lost its groups when it was arranged: use the source before that"
        raise ConfigError(f"attention is group, and {why}, or choose attention: document")


def check_trees(indices: Sequence[SourceIndex], attention: Attention) -> None:
    """Raise ConfigError unless all sources have prefix trees with attention ``tree``, and none with
    another attention."""
    in_trees = attention == "tree"
    for index in indices:
        if index.has_trees != in_trees:
            name = index.path or f"a source of strategy {index.strategy!r}"
            raise ConfigError(
                f"attention is tree, and {name} has no prefix trees: pack it with --strategy tree "
                "(documents without shared prefixes are roots of trees)"
                if in_trees
                else f"{name} has prefix trees, and attention is {attention}: train it with "
                "data.attention: tree (megapack-pretrain), or PackedDataset(attention='tree') "
                "and PackedTrainer; for others, pack the dataset with another strategy"
            )


def check_tree_options(options: Mapping[str, Any]) -> None:
    """Raise ConfigError for options of PackedDataset that attention ``tree`` does not have."""
    fixed = {
        "positions": (("segment", "document"), "positions are depths: leave it out"),
        "label_boundary": (("document",), "a path is one document: leave it out"),
        "alignment": ((1,), "context parallelism cannot divide a path: leave align out"),
        "num_mtp_targets": ((0,), "several tokens may follow one: leave it out"),
    }
    for name, (allowed, reason) in fixed.items():
        if options[name] not in allowed:
            raise ConfigError(f"{name} is {options[name]} with attention: tree; {reason}")


def check_tree_run(samples: SampleSource) -> None:
    """Raise ConfigError for settings of the run that attention ``tree`` does not have."""
    excluded = [samples.names[source] for source in samples.exclusions.sources]
    unsupported = {
        "attention_window": (samples.windows, "a window would cut paths"),
        "fim": (samples.fim and "on", "it moves tokens, so prefixes would differ"),
        "columns": (list(samples.columns), "documents that share a token may differ in them"),
        "exclude": (excluded, "pack the source without these documents (--documents)"),
    }
    for name, (value, reason) in unsupported.items():
        if value:
            raise ConfigError(f"{name} is {value} with attention: tree; {reason}: leave {name} out")


def segments_of(index: SampleIndex, samples: Ids) -> tuple[Ids, Ids]:
    """Return the segments of some samples, and for each the position of its sample."""
    first = np.asarray(index.sample_segment_offsets[samples])
    counts = np.asarray(index.sample_segment_offsets[samples + 1]) - first
    before = np.cumsum(counts) - counts
    segments = np.repeat(first - before, counts) + np.arange(counts.sum())
    return segments, np.repeat(np.arange(len(samples)), counts)


def _document_ends(index: SampleIndex) -> Ids:
    """Return the length of every document. Raises ConfigError if the index dropped tokens."""
    dropped = index.metrics()["dropped_tokens"]
    if dropped:
        raise ConfigError(
            f"the index dropped {dropped} tokens, so the ends of documents are unknown: make the "
            "schedule from the PackedDataset, which counts labels exactly"
        )
    ends = np.zeros(int(np.max(index.segment_document)) + 1, np.int64)
    segment_ends = np.asarray(index.segment_begin, np.int64) + index.segment_length
    np.maximum.at(ends, index.segment_document, segment_ends)
    return ends


def _sums(groups: Ids, values: NDArray[Any], num_groups: int) -> Ids:
    return np.bincount(groups, values, num_groups).astype(np.int64)
