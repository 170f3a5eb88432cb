"""Samples of a bucket, blended from its sources into one endless sequence.

- ``BucketStream``: all samples of one capacity as an endless sequence, blended from the sources.
- ``FiniteStream``: every sample once, source after source, for evaluation.
- ``CostWindows``: draws with samples of similar cost.

A stream draws from its sources by exact weights (``_core.Blend``): of its first n samples, each
source provides n times its weight, within 1.69, for any number of sources and every n up to 2^53
(proof in csrc/core/schedule/blend.hpp: 1.681, plus 2^-9 because weights are multiples of 2^-62).
The cursor of a source decides its next sample (``megapack.data.sample_order``). Sample ids are
global: first those of source 0, then of source 1, ...
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from megapack import _core
from megapack.data.sample_order import BlockOrder, Epochs, Move, ScoreOrder
from megapack.data.steps import fold_key
from megapack.errors import ConfigError
from megapack.packing.sharded import SourceIndex

Ids = NDArray[np.int64]
SourceBucket: TypeAlias = tuple[int, int]  # number of the source, capacity
Cursors: TypeAlias = Mapping[int, Ids]  # capacity -> samples taken of every source; default 0
Moves: TypeAlias = Mapping[SourceBucket, Move]  # samples that cost windows moved

_CACHED_WINDOWS = 2  # per bucket: one for the draws of a run, one for queries
_SHARE_BITS = 62  # _core.Blend takes shares in units of 2^-62
_PART_BITS = 128  # relative error of a part: at most 2^-64, for up to 2^64 tokens


class CostWindows(NamedTuple):
    """Groups of consecutive draws of a bucket whose samples are sorted by cost.

    The blend decides which source gives each sample of a window. Within the window, every source
    reorders its samples of an epoch: the draws have random ranks, and samples of ascending cost go
    to draws of ascending rank:

        draws of a window, of ranks 1, 2, 0      costs of web      costs of code
        as shuffled                              9 2 | 5 5 | 1 7     4 | 1 | 6
        with the window                          5 5 | 7 9 | 1 2     4 | 6 | 1

    All sources use the same ranks, so the costs in a draw differ only because the sources differ.
    If an epoch ends inside a window, each part is sorted separately. If a stage ends inside a
    window, its remaining samples keep their new order (``Move``) in the next stage. Costs are those
    of whole documents (sum of squared segment lengths), independent of masks and attention windows.

    Attributes:
        key: random key of the ranks of the draws.
        cost: global ids of samples of the bucket -> the cost of each.
        moves: returns the remaining moves of windows of earlier stages.
    """

    num_draws: int
    samples_per_draw: int
    key: int
    cost: Callable[[Ids], Ids]
    moves: Callable[[], Moves]

    @property
    def size(self) -> int:
        return self.num_draws * self.samples_per_draw


class Bucket(NamedTuple):
    """Samples of one capacity: numbers of their sources, first global ids, sizes; (D,) int64."""

    capacity: int
    sources: Ids
    first_sample: Ids
    sizes: Ids


def shuffle_keys(seed: int, capacity: int, sources: Ids) -> NDArray[np.uint64]:
    """Return the keys of the shuffles of one bucket, one per source, for all epochs."""
    key = fold_key(seed, 1, capacity)
    return np.array([_core.random_bits(key, source) for source in sources.tolist()], np.uint64)


class _Range(NamedTuple):
    """Range of a stream, source by source: run r has ``counts[r]`` samples, from cursor
    ``begins[r]`` of ``sources[which[r]]`` on."""

    which: NDArray[np.int32]
    begins: Ids
    counts: Ids
    positions: NDArray[np.int32]  # position of every sample in the range
    samples: Ids  # global id of every sample, in the order of ``positions``

    def by_position(self) -> Ids:
        """Return the global ids in the order of the stream."""
        ids = np.empty_like(self.samples)
        ids[self.positions] = self.samples
        return ids


class BucketStream:
    """All samples of one capacity, as an endless sequence. Sources are numbered within the bucket.

    Attributes:
        sources: (D,) int64, numbers of the sources with samples of this capacity.
        first_sample, sizes: (D,) int64, first global id and number of samples of each source.
        starts: (D,) int64, cursor of each source at the start of this stream.
        blend: sequence of the sources, by the exact weights.
        samples_per_epoch: samples that the schedule counts as one epoch of this bucket: with one
            source, its samples; with several, a share of the blend's tokens.
    """

    def __init__(
        self,
        bucket: Bucket,
        parts: Sequence[int],
        samples_per_epoch: int,
        *,
        seed: int | None,
        starts: Ids,
        orders: Mapping[int, ScoreOrder | BlockOrder],
        windows: CostWindows | None,
    ) -> None:
        self.capacity, self.sources, self.first_sample, self.sizes = bucket
        self.starts, self.samples_per_epoch = starts, samples_per_epoch
        self.blend = _core.Blend(whole_shares(parts))
        self._shuffled, self._orders, self._windows = seed is not None, orders, windows
        self._keys = shuffle_keys(seed or 0, bucket.capacity, self.sources)
        self._recent: OrderedDict[int, tuple[_Range, Ids]] = OrderedDict()
        self._last_moved: tuple[int, int, Epochs] = (-1, -1, Epochs(0, None))

    @property
    def num_samples(self) -> int:
        return int(self.sizes.sum())

    def ids(self, begin: int, end: int) -> Ids:
        """Return the global sample ids at positions ``[begin, end)``; shape (end - begin,)."""
        if self._windows is None:
            return self._range(begin, end).by_position()
        size = self._windows.size
        first = begin // size
        parts = [self._window(number)[1] for number in range(first, -(-end // size))]
        ids = parts[0] if len(parts) == 1 else np.concatenate([np.zeros(0, np.int64), *parts])
        return ids[begin - first * size : end - first * size]

    def epochs(self, begin: int, end: int) -> Ids:
        """Return the epoch of each of the ``ids`` within its source; cost windows keep it."""
        which, first, counts, positions = self.blend.range(begin, end)
        epochs = np.empty(end - begin, np.int64)
        epochs[positions] = _epochs(which, self.starts[which] + first, counts, self.sizes)
        return epochs

    def cursor(self, i: int, end: int) -> int:
        """Return the cursor of source ``i`` at position ``end``."""
        return int(self.starts[i]) + self.blend.taken_of(i, end)

    def taken(self, end: int) -> Ids:
        """Return (D,) int64, samples of every source among the first ``end``."""
        counts: Ids = self.blend.taken(end)
        return counts

    def positions(self, sample: int, end: int) -> list[int]:
        """Return the positions of a global sample id in ``[0, end)``, one per epoch."""
        [i] = np.flatnonzero(
            (self.first_sample <= sample) & (sample < self.first_sample + self.sizes)
        ).tolist()
        order, local = self._epochs(i), np.array([sample - int(self.first_sample[i])])
        size = self._windows.size if self._windows else 1
        first, last = int(self.starts[i]), self.cursor(i, -(-end // size) * size)
        result = []
        for epoch in range(first // order.size, -(-last // order.size)):
            cursor = epoch * order.size + int(order.positions(epoch, local)[0])
            if first <= cursor < last:
                position = self._position(i, cursor)
                if self._windows:  # the window may have moved the sample
                    position = self._moved_position(i, position // size, cursor)
                result += [position] if position < end else []
        return result

    def latest(self, i: int, samples: Ids, end: int) -> int:
        """Return the last position before ``end`` that has one of ``samples`` of source ``i``,
        numbered within the source; one of them must have been drawn."""
        cursor = self.cursor(i, end)
        last = int(self.order_at(i, end).last(cursor, samples).max())
        if self._windows is not None:  # all windows before the one that contains ``end`` are whole
            size = self._windows.size
            number = end // size
            begin = self.cursor(i, number * size)
            if last < begin:
                last = int(self._epochs(i).last(begin, samples).max())
                number = self._position(i, last) // size
                cursor = self.cursor(i, (number + 1) * size)
                last = int(self._in_window(i, number).last(cursor, samples).max())
        return self._position(i, last)

    def order_at(self, i: int, end: int) -> Epochs:
        """Return the order of the samples of source ``i`` at position ``end``."""
        if self._windows is None or end % self._windows.size == 0:
            return self._epochs(i)
        return self._in_window(i, end // self._windows.size)

    def moves_at(self, end: int) -> dict[SourceBucket, Move]:
        """Return the moves of cost windows at position ``end``."""
        if self._windows is None:
            return {}
        changed = set(self._moves)
        if end % self._windows.size:
            changed |= set(self._window(end // self._windows.size)[0].which.tolist())
        moves = ((i, self.order_at(i, end).move) for i in sorted(changed))
        return {
            (int(self.sources[i]), self.capacity): move for i, move in moves if move is not None
        }

    def _position(self, i: int, cursor: int) -> int:
        """Return the position at which source ``i`` reaches a cursor."""
        num_taken, high = cursor - int(self.starts[i]), 1
        while self.blend.taken_of(i, high) <= num_taken:
            high *= 2
        return bisect_right(range(high), num_taken, key=lambda n: self.blend.taken_of(i, n)) - 1

    def _epochs(self, i: int) -> Epochs:
        key = int(self._keys[i]) if self._shuffled else None
        order = self._orders.get(int(self.sources[i]))
        return Epochs(int(self.sizes[i]), key, order, self._moves.get(i))

    @cached_property
    def _moves(self) -> dict[int, Move]:
        if self._windows is None:
            return {}
        moves = self._windows.moves()
        of_sources = (
            (i, moves.get((d, self.capacity))) for i, d in enumerate(self.sources.tolist())
        )
        return {i: move for i, move in of_sources if move is not None}

    def _range(self, begin: int, end: int, only: int | None = None) -> _Range:
        """Return a range of the stream, or its samples of source ``only``."""
        which, first, count, positions = self.blend.range(begin, end)
        if only is not None:
            is_chosen = which == only
            positions = positions[np.repeat(is_chosen, count)]
            which, first, count = which[is_chosen], first[is_chosen], count[is_chosen]
        cursors = self.starts[which] + first
        local = _core.permute_epochs(
            self._keys[which], self.sizes[which], cursors, count, self._shuffled
        )
        if self._orders or self._moves:  # some runs are not plain shuffles
            is_ordered = np.isin(self.sources, list(self._orders))[which]
            ends = [self._moves[i].end if i in self._moves else 0 for i in which.tolist()]
            for run in np.flatnonzero(is_ordered | (cursors < ends)).tolist():
                number, last = int(count[run]), int(count[: run + 1].sum())
                order = self._epochs(int(which[run]))
                local[last - number : last] = order.samples(int(cursors[run]), number)
        samples = local + np.repeat(self.first_sample[which], count)
        return _Range(which, cursors, count, positions, samples)

    def _window(self, number: int) -> tuple[_Range, Ids]:
        """Return the range of a window with its samples sorted, and its ids by position."""
        cached = self._recent.get(number)
        if cached is not None:
            return cached
        window = self._sorted_window(number)
        self._recent[number] = result = (window, window.by_position())
        while len(self._recent) > _CACHED_WINDOWS:
            with suppress(KeyError):  # another thread may have emptied it
                self._recent.popitem(last=False)
        return result

    def _sorted_window(self, number: int, only: int | None = None) -> _Range:
        """Return the range of a window with its samples sorted; ``only``: of one source."""
        assert self._windows is not None
        size, num_draws = self._windows.size, self._windows.num_draws
        window = self._range(number * size, (number + 1) * size, only)
        ranks = _core.permute_range(fold_key(self._windows.key, number), num_draws, 0, num_draws)
        ranks = ranks.astype(np.min_scalar_type(num_draws))  # small integers sort faster
        group = _epochs_of_runs(window, self.sizes)
        moved = np.empty_like(window.samples)
        by_rank = _sort_in_groups(ranks[window.positions // self._windows.samples_per_draw], group)
        by_cost = _sort_in_groups(self._windows.cost(window.samples), group)
        moved[by_rank] = window.samples[by_cost]
        return window._replace(samples=moved)

    def _moved_position(self, i: int, number: int, cursor: int) -> int:
        """Return the position to which a window moves the sample that source ``i`` would take at a
        cursor: counts cheaper samples instead of sorting the window."""
        assert self._windows is not None
        num_draws = self._windows.num_draws
        window = self._range(number * self._windows.size, (number + 1) * self._windows.size, i)
        begin, size = int(window.begins[0]), int(self.sizes[i])
        epoch = cursor // size
        part = slice(max(epoch * size - begin, 0), (epoch + 1) * size - begin)
        costs, positions = self._windows.cost(window.samples[part]), window.positions[part]
        at = cursor - begin - part.start
        cheaper = costs < costs[at]
        cheaper[:at] |= costs[:at] == costs[at]
        place = int(np.count_nonzero(cheaper))
        # Find the place in the order of the draws' ranks; samples of a draw keep their order.
        ranks = _core.permute_range(fold_key(self._windows.key, number), num_draws, 0, num_draws)
        ranks = ranks[positions // self._windows.samples_per_draw]
        ends = np.bincount(ranks, minlength=num_draws).cumsum()
        rank = int(ends.searchsorted(place, "right"))
        of_rank = np.flatnonzero(ranks == rank)
        moved = int(of_rank[place - int(ends[rank])])  # counts from the end
        return number * self._windows.size + int(positions[moved])

    def _in_window(self, i: int, number: int) -> Epochs:
        """Return the order of source ``i`` with the moves of a window."""
        source, window, order = self._last_moved  # one read: other threads may replace it
        if (source, window) == (i, number):
            return order
        order, moved = self._epochs(i), self._sorted_window(number, only=i)
        if len(moved.which):
            local = moved.samples - self.first_sample[i]
            order = order.moved(int(moved.begins[0]), local)
        self._last_moved = (i, number, order)
        return order


class FiniteStream(BucketStream):
    """Every sample of one capacity once, source after source, in the order of the indices. Four
    draws of 2 from 5 samples get 2, 2, 1 and 0 samples."""

    def __init__(self, bucket: Bucket) -> None:
        sizes = bucket.sizes.tolist()
        none = np.zeros(len(sizes), np.int64)
        super().__init__(bucket, sizes, sum(sizes), seed=None, starts=none, orders={}, windows=None)
        self._ends = self.sizes.cumsum()

    def ids(self, begin: int, end: int) -> Ids:
        """Return the global sample ids at positions ``[begin, end)``, fewer at the end."""
        positions = np.arange(begin, min(end, self.num_samples))
        which = self._ends.searchsorted(positions, "right")
        return self.first_sample[which] + positions - (self._ends - self.sizes)[which]

    def cursor(self, i: int, end: int) -> int:
        return int(self.taken(end)[i])

    def taken(self, end: int) -> Ids:
        return np.clip(end - (self._ends - self.sizes), 0, self.sizes)

    def _position(self, i: int, cursor: int) -> int:
        return int(self._ends[i] - self.sizes[i]) + cursor


def _sort_in_groups(values: NDArray[Any], group: Ids) -> Ids:
    """Return positions sorted by group, then by value (stable)."""
    is_one_group = not group[-1]
    return np.argsort(values, kind="stable") if is_one_group else np.lexsort((values, group))


def _epochs_of_runs(window: _Range, sizes: Ids) -> Ids:
    """Return an ascending number for every sample, equal within one epoch of one source."""
    which, begins, counts, _, _ = window
    epochs = _epochs(which, begins, counts, sizes)
    changes = np.diff(np.repeat(which, counts)) | np.diff(epochs)
    return np.cumsum(np.r_[0, changes != 0])


def _epochs(which: NDArray[np.int32], begins: Ids, counts: Ids, sizes: Ids) -> Ids:
    """Return the epoch of every sample of the runs of a ``_Range``."""
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    epochs: Ids = (np.repeat(begins, counts) + within) // np.repeat(sizes[which], counts)
    return epochs


def bucket_streams(
    buckets: Sequence[Bucket],
    weights: Sequence[float | None],
    seed: int,
    *,
    shuffled: bool = True,
    starts: Cursors | None = None,
    orders: Mapping[SourceBucket, ScoreOrder | BlockOrder] | None = None,
    windows: Callable[[int], CostWindows | None] = lambda _: None,
) -> list[BucketStream]:
    """Return one stream per capacity, ascending, of all sources together.

    Weights are shares of tokens (samples x capacity). Every source keeps its distribution over
    buckets: bucket b of source d gets ``weight[d] * tokens[d, b] / tokens[d]`` of the tokens, so
    that all buckets of a source are repeated equally often. All arithmetic is in integers.

    Args:
        buckets: ``buckets_of`` at least one index.
        weights: share of every source in the tokens; 0: leave it out; None: its tokens decide.
        seed: random seed of the shuffles.
        shuffled: False: samples in the order of their index.
        starts: samples taken before.
        orders: orders by score, or of an arranged source, that replace the shuffle.
        windows: capacity -> cost windows of the bucket; None: samples are not sorted by cost.
    """
    counted = np.zeros(len(weights), np.int64)
    for bucket in buckets:
        np.add.at(counted, bucket.sources, bucket.capacity * bucket.sizes)
    tokens = counted.tolist()
    exact = _exact_weights(weights, tokens)
    drawn = np.array([weight > 0 for weight in exact])
    epoch_tokens = sum(size for size, weight in zip(tokens, exact, strict=True) if weight)
    scale = sum(exact) << _PART_BITS
    none = np.zeros(len(weights), np.int64)
    result = []
    for capacity, *arrays in buckets:
        bucket = Bucket(capacity, *(array[drawn[arrays[0]]] for array in arrays))
        if not len(bucket.sources):
            continue
        parts = [
            (exact[d] * capacity * size << _PART_BITS) // tokens[d]
            for d, size in zip(bucket.sources.tolist(), bucket.sizes.tolist(), strict=True)
        ]
        epoch = (2 * sum(parts) * epoch_tokens + scale * capacity) // (2 * scale * capacity)

        result.append(
            BucketStream(
                bucket,
                parts,
                max(1, epoch),
                seed=seed if shuffled else None,
                starts=(starts or {}).get(capacity, none)[bucket.sources],
                orders={d: order for (d, c), order in (orders or {}).items() if c == capacity},
                windows=windows(capacity),
            )
        )
    return result


def _exact_weights(weights: Sequence[float | None], tokens: Sequence[int]) -> list[int]:
    """Return integers in the exact proportions of the weights; None stands for the tokens."""
    if not tokens:
        raise ConfigError("a schedule needs at least one sample index")
    if min(tokens) == 0:
        raise ConfigError(f"index {tokens.index(0)} has no samples; leave it out")
    if len(weights) != len(tokens):
        raise ConfigError(f"{len(weights)} weights for {len(tokens)} indices; give one for each")
    filled = [t if weight is None else weight for weight, t in zip(weights, tokens, strict=True)]
    if not any(filled):
        raise ConfigError(f"all {len(filled)} weights are 0; give at least one index a weight")
    return whole_weights(filled)


def whole_weights(weights: Sequence[float]) -> list[int]:
    """Return integers in the exact proportions of the weights. Raises ConfigError if a weight is
    negative or not finite."""
    for d, weight in enumerate(weights):
        if not (math.isfinite(weight) and weight >= 0):
            raise ConfigError(f"weight of index {d} is {weight}; it must be finite and at least 0")
    ratios = [weight.as_integer_ratio() for weight in weights]  # denominators are powers of two
    common = max((denominator for _, denominator in ratios), default=1)
    return [numerator * (common // denominator) for numerator, denominator in ratios]


def whole_shares(parts: Sequence[int]) -> NDArray[np.int64]:
    """Return integers with sum 2^62, each less than 1 from its exact share (largest remainders)."""
    total = sum(parts)
    divided = [divmod(part << _SHARE_BITS, total) for part in parts]
    shares = np.array([share for share, _ in divided], np.int64)
    missing = (1 << _SHARE_BITS) - int(shares.sum())
    shares[sorted(range(len(parts)), key=lambda i: -divided[i][1])[:missing]] += 1
    return shares


def buckets_of(indices: Sequence[SourceIndex]) -> list[Bucket]:
    """Return the buckets of all indices by ascending capacity."""
    columns: dict[int, tuple[list[int], list[int], list[int]]] = {}  # columns of Bucket
    base = 0
    for d, index in enumerate(indices):
        offsets = index.bucket_sample_offsets.tolist()
        for capacity, (begin, end) in zip(
            index.bucket_capacity.tolist(), pairwise(offsets), strict=True
        ):
            if begin < end:
                of_bucket = columns.setdefault(capacity, ([], [], []))
                for column, value in zip(of_bucket, (d, base + begin, end - begin), strict=True):
                    column.append(value)
        base += offsets[-1]
    return [Bucket(capacity, *np.array(c, np.int64)) for capacity, c in sorted(columns.items())]
