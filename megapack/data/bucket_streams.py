"""Which samples the draws of a bucket take: its sources blended to one endless sequence.

- ``BucketStream``: all samples of one capacity as an endless sequence, blended from the sources.
- ``FiniteStream``: the same once, source after source: evaluation.
- ``CostWindows``: draws with samples of like cost.
- ``bucket_streams``: the streams of all capacities, by the weights of the sources.

A bucket's stream takes from its sources by their exact weights (``_core.Blend``): of its first n
samples every source has given n times its weight, within 1.69 samples, for any number of sources
and every n up to 2^53 (csrc/core/schedule/blend.hpp has the proof: 1.681, and 2^-9 because weights
are whole numbers of 2^-62). What a source gives next, its own cursor says
(``megapack.data.sample_order``). Sample ids are global: those of source 0, then of source 1, ...
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
Place: TypeAlias = tuple[int, int]  # number of the source, capacity
Cursors: TypeAlias = Mapping[int, Ids]  # capacity -> samples taken of every source; none: 0 of all
Moves: TypeAlias = Mapping[Place, Move]  # what windows of cost moved of each

_WINDOWS = 2  # remembered of every bucket: the draws of a run need one, a look back another
_SHARE_BITS = 62  # what _core.Blend takes
_PART_BITS = 128  # parts are precise to 2^-64 of themselves for up to 2^64 tokens


class CostWindows(NamedTuple):
    """How the draws of a bucket are given samples of like cost.

    Whose turn it is stays; at the begin of every window of so many draws, each source puts those
    samples of an epoch that the window takes from it into another order. The draws of a window have
    ranks, a random permutation, and what a source gives to draws of rising rank rises in cost:

        draws of a window, of ranks 1, 2, 0      costs of web      costs of code
        as shuffled                              9 2 | 5 5 | 1 7     4 | 1 | 6
        with the window                          5 5 | 7 9 | 1 2     4 | 6 | 1

    All sources of a draw have its rank, so costs are alike in it as far as they are among the
    sources. An epoch that ends inside a window is put in order by itself, and so is what the next
    one begins with. A stage that ends inside a window leaves the rest of it as it lies (``Move``),
    and the windows of the next stage go on from there. Costs are those of whole documents (the sum
    of squared segment lengths), whatever is masked, cut by attention windows, or attended to.

    Attributes:
        num_draws: of a window.
        samples_per_draw: of the bucket.
        key: of the ranks of the draws.
        cost: global ids of samples of the bucket -> the cost of each.
        moves: what windows moved before of samples that are still to come.
    """

    num_draws: int
    samples_per_draw: int
    key: int
    cost: Callable[[Ids], Ids]
    moves: Callable[[], Moves]

    @property
    def size(self) -> int:
        """Positions of a window."""
        return self.num_draws * self.samples_per_draw


class Bucket(NamedTuple):
    """The samples of one capacity: numbers of the sources that have some, the first global id of
    each and how many it has; (D,) int64."""

    capacity: int
    sources: Ids
    first_sample: Ids
    sizes: Ids


def shuffle_keys(seed: int, capacity: int, sources: Ids) -> NDArray[np.uint64]:
    """Keys of the shuffles of one bucket, one per source; they serve all epochs."""
    key = fold_key(seed, 1, capacity)
    return np.array([_core.random_bits(key, source) for source in sources.tolist()], np.uint64)


class _Range(NamedTuple):
    """Some positions of a stream, source by source: run r is ``counts[r]`` samples from cursor
    ``begins[r]`` of ``sources[which[r]]`` on."""

    which: NDArray[np.int32]
    begins: Ids
    counts: Ids
    places: NDArray[np.int32]
    """Position of every sample, counted from the first one of the range."""
    samples: Ids
    """Global id of every sample, beside ``places``."""

    def in_place(self) -> Ids:
        """Its samples by position."""
        ids = np.empty_like(self.samples)
        ids[self.places] = self.samples
        return ids


class BucketStream:
    """All samples of one capacity, as an endless sequence. Sources are counted within the bucket.

    Attributes:
        capacity: tokens per sample.
        sources: (D,) int64, numbers of the sources that have samples of this capacity.
        first_sample, sizes: (D,) int64, the first global id of each and how many it has; the ids
            are consecutive.
        starts: (D,) int64, how many of its samples each gave before this stream began.
        blend: whose turn it is, by the exact weights.
        samples_per_epoch: samples that the schedule counts as one epoch of this bucket. With one
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
        """Different samples of this capacity."""
        return int(self.sizes.sum())

    def ids(self, begin: int, end: int) -> Ids:
        """Global sample ids at positions ``[begin, end)``; shape (end - begin,)."""
        if self._windows is None:
            return self._range(begin, end).in_place()
        size = self._windows.size
        first = begin // size
        parts = [self._window(number)[1] for number in range(first, -(-end // size))]
        ids = parts[0] if len(parts) == 1 else np.concatenate([np.zeros(0, np.int64), *parts])
        return ids[begin - first * size : end - first * size]

    def epochs(self, begin: int, end: int) -> Ids:
        """Beside ``ids``: the pass over its source's samples that each is of; windows of cost move
        samples within a pass."""
        which, first, counts, places = self.blend.range(begin, end)
        epochs = np.empty(end - begin, np.int64)
        epochs[places] = _epochs(which, self.starts[which] + first, counts, self.sizes)
        return epochs

    def cursor(self, i: int, end: int) -> int:
        """How many samples source ``i`` gave, before this stream and in its first ``end``."""
        return int(self.starts[i]) + self.blend.taken_of(i, end)

    def taken(self, end: int) -> Ids:
        """(D,) int64, how many samples every source gave in the first ``end``."""
        counts: Ids = self.blend.taken(end)
        return counts

    def positions(self, sample: int, end: int) -> list[int]:
        """Where a global sample id stands in positions ``[0, end)``; once per epoch."""
        [i] = np.flatnonzero(
            (self.first_sample <= sample) & (sample < self.first_sample + self.sizes)
        ).tolist()
        order, own = self._epochs(i), np.array([sample - int(self.first_sample[i])])
        size = self._windows.size if self._windows else 1
        first, last = int(self.starts[i]), self.cursor(i, -(-end // size) * size)
        found = []
        for epoch in range(first // order.size, -(-last // order.size)):
            cursor = epoch * order.size + int(order.places(epoch, own)[0])
            if first <= cursor < last:  # and where its window moved it
                position = self._position(i, cursor)
                if self._windows:
                    moved = self._in_window(i, position // size).places(epoch, own)
                    position = self._position(i, epoch * order.size + int(moved[0]))
                found += [position] if position < end else []
        return found

    def latest(self, i: int, samples: Ids, end: int) -> int:
        """The last position before ``end`` that has one of some samples of source ``i``, counted
        from its first one; there is such a position."""
        cursor = self.cursor(i, end)
        last = int(self.order_at(i, end).last(cursor, samples).max())
        if self._windows is not None:  # those before the one of ``end`` are whole
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
        """The order of the samples of source ``i`` as position ``end`` finds it."""
        if self._windows is None or end % self._windows.size == 0:
            return self._epochs(i)
        return self._in_window(i, end // self._windows.size)

    def moves_at(self, end: int) -> dict[Place, Move]:
        """Moves of windows that position ``end`` finds, by place."""
        if self._windows is None:
            return {}
        changed = set(self._moves)
        if end % self._windows.size:
            changed |= set(self._window(end // self._windows.size)[0].which.tolist())
        found = {i: self.order_at(i, end).move for i in sorted(changed)}
        return {
            (int(self.sources[i]), self.capacity): move
            for i, move in found.items()
            if move is not None
        }

    def _position(self, i: int, cursor: int) -> int:
        """Where source ``i`` is taken at a cursor that it has in this stream."""
        turn, high = cursor - int(self.starts[i]), 1
        while self.blend.taken_of(i, high) <= turn:
            high *= 2
        return bisect_right(range(high), turn, key=lambda n: self.blend.taken_of(i, n)) - 1

    def _epochs(self, i: int) -> Epochs:
        key = int(self._keys[i]) if self._shuffled else None
        order = self._orders.get(int(self.sources[i]))
        return Epochs(int(self.sizes[i]), key, order, self._moves.get(i))

    @cached_property
    def _moves(self) -> dict[int, Move]:
        """Moves that sources bring along from before this stream, by source."""
        if self._windows is None:
            return {}
        places = {(source, self.capacity): i for i, source in enumerate(self.sources.tolist())}
        moves = self._windows.moves().items()
        return {places[place]: move for place, move in moves if place in places}

    def _range(self, begin: int, end: int) -> _Range:
        which, first, count, places = self.blend.range(begin, end)
        cursors = self.starts[which] + first
        own = _core.permute_epochs(
            self._keys[which], self.sizes[which], cursors, count, self._shuffled
        )
        if self._orders or self._moves:  # these runs are no shuffles
            special = np.isin(self.sources, list(self._orders))[which]
            ends = [self._moves[i].end if i in self._moves else 0 for i in which.tolist()]
            for run in np.flatnonzero(special | (cursors < ends)).tolist():
                number, last = int(count[run]), int(count[: run + 1].sum())
                order = self._epochs(int(which[run]))
                own[last - number : last] = order.samples(int(cursors[run]), number)
        samples = own + np.repeat(self.first_sample[which], count)
        return _Range(which, cursors, count, places, samples)

    def _window(self, number: int) -> tuple[_Range, Ids]:
        """The positions of a window, the samples of every source in the order of the ranks; and
        their ids by position."""
        known = self._recent.get(number)
        if known is not None:
            return known
        assert self._windows is not None
        size, num_draws = self._windows.size, self._windows.num_draws
        found = self._range(number * size, (number + 1) * size)
        ranks = _core.permute_range(fold_key(self._windows.key, number), num_draws, 0, num_draws)
        ranks = ranks.astype(np.min_scalar_type(num_draws))  # small numbers are sorted faster
        group = _epochs_of_runs(found, self.sizes)
        moved = np.empty_like(found.samples)
        by_rank = _ordered(ranks[found.places // self._windows.samples_per_draw], group)
        moved[by_rank] = found.samples[_ordered(self._windows.cost(found.samples), group)]
        found = found._replace(samples=moved)
        self._recent[number] = result = (found, found.in_place())
        while len(self._recent) > _WINDOWS:  # threads may do so at once: nothing is lost
            with suppress(KeyError):
                self._recent.popitem(last=False)
        return result

    def _in_window(self, i: int, number: int) -> Epochs:
        """The order of source ``i`` with what a window moves."""
        source, window, order = self._last_moved  # at once: other threads may ask, too
        if (source, window) == (i, number):
            return order
        which, begins, counts, _, samples = self._window(number)[0]
        order = self._epochs(i)
        for run in np.flatnonzero(which == i).tolist():  # at most one
            end = int(counts[: run + 1].sum())
            own = samples[end - int(counts[run]) : end] - int(self.first_sample[i])
            order = order.moved(int(begins[run]), own)
        self._last_moved = (i, number, order)
        return order


class FiniteStream(BucketStream):
    """Every sample of one capacity once, source after source as their indices have them.

    Of 5 samples that four draws of 2 ask for, they give 2, 2, 1 and none.
    """

    def __init__(self, bucket: Bucket) -> None:
        sizes = bucket.sizes.tolist()
        none = np.zeros(len(sizes), np.int64)
        super().__init__(bucket, sizes, sum(sizes), seed=None, starts=none, orders={}, windows=None)
        self._ends = self.sizes.cumsum()

    def ids(self, begin: int, end: int) -> Ids:
        """Global sample ids at positions ``[begin, end)``, as far as there are some."""
        at = np.arange(begin, min(end, self.num_samples))
        which = self._ends.searchsorted(at, "right")
        return self.first_sample[which] + at - (self._ends - self.sizes)[which]

    def cursor(self, i: int, end: int) -> int:
        return int(self.taken(end)[i])

    def taken(self, end: int) -> Ids:
        return np.clip(end - (self._ends - self.sizes), 0, self.sizes)

    def _position(self, i: int, cursor: int) -> int:
        return int(self._ends[i] - self.sizes[i]) + cursor


def _ordered(values: NDArray[Any], group: Ids) -> Ids:
    """Positions by group, then by value; equal ones as they stand."""
    one = not group[-1]
    return np.argsort(values, kind="stable") if one else np.lexsort((values, group))


def _epochs_of_runs(found: _Range, sizes: Ids) -> Ids:
    """A number for every sample: the same for those of one epoch of one source, rising."""
    which, begins, counts, _, _ = found
    epochs = _epochs(which, begins, counts, sizes)
    changes = np.diff(np.repeat(which, counts)) | np.diff(epochs)
    return np.cumsum(np.r_[0, changes != 0])


def _epochs(which: NDArray[np.int32], begins: Ids, counts: Ids, sizes: Ids) -> Ids:
    """Of every sample of some runs: run r is ``counts[r]`` cursors of source ``which[r]`` from
    ``begins[r]`` on."""
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
    orders: Mapping[Place, ScoreOrder | BlockOrder] | None = None,
    windows: Callable[[int], CostWindows | None] = lambda _: None,
) -> list[BucketStream]:
    """One stream per capacity, ascending, of all sources together.

    Args:
        buckets: ``buckets_of`` at least one index.
        weights: of every source: a share of the tokens, 0 to leave it out, None for its tokens.
        seed: of the shuffles.
        shuffled: False: samples in the order of their index.
        starts: samples taken before.
        orders: by score, or of an arranged source, instead of a shuffle.
        windows: of the bucket of a capacity; None: its samples come as they are.

    Weights are shares of tokens (samples x capacity). Every source keeps its own distribution over
    buckets: bucket b of source d is given ``weight[d] * tokens[d, b] / tokens[d]`` of the tokens,
    so that all buckets of a source are repeated equally often. All of it in whole numbers.
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
        own = {d: order for (d, c), order in (orders or {}).items() if c == capacity}
        result.append(
            BucketStream(
                bucket,
                parts,
                max(1, epoch),
                seed=seed if shuffled else None,
                starts=(starts or {}).get(capacity, none)[bucket.sources],
                orders=own,
                windows=windows(capacity),
            )
        )
    return result


def _exact_weights(weights: Sequence[float | None], tokens: Sequence[int]) -> list[int]:
    """Whole numbers in the weights' exact proportions; the tokens where a weight is None."""
    if not tokens:
        raise ConfigError("a schedule needs at least one sample index")
    if min(tokens) == 0:
        raise ConfigError(f"index {tokens.index(0)} has no samples; leave it out")
    if len(weights) != len(tokens):
        raise ConfigError(f"{len(weights)} weights for {len(tokens)} indices; give one for each")
    given = [t if weight is None else weight for weight, t in zip(weights, tokens, strict=True)]
    if not any(given):
        raise ConfigError(f"all {len(given)} weights are 0; give at least one index a weight")
    return whole_weights(given)


def whole_weights(weights: Sequence[float]) -> list[int]:
    """Whole numbers in the exact proportions of some weights, one of each index.

    Raises:
        ConfigError: a weight is no number or negative.
    """
    for d, weight in enumerate(weights):
        if not (math.isfinite(weight) and weight >= 0):
            raise ConfigError(f"weight of index {d} is {weight}; it must be a positive number")
    ratios = [weight.as_integer_ratio() for weight in weights]  # denominators are powers of two
    common = max((denominator for _, denominator in ratios), default=1)
    return [numerator * (common // denominator) for numerator, denominator in ratios]


def whole_shares(parts: Sequence[int]) -> NDArray[np.int64]:
    """Whole numbers with sum 2^62, each less than 1 from its exact share (largest remainders).

    Args:
        parts: not negative, in any unit.
    """
    total = sum(parts)
    divided = [divmod(part << _SHARE_BITS, total) for part in parts]
    shares = np.array([share for share, _ in divided], np.int64)
    lacking = (1 << _SHARE_BITS) - int(shares.sum())
    most_lacking = sorted(range(len(parts)), key=lambda i: -divided[i][1])[:lacking]
    shares[most_lacking] += 1
    return shares


def buckets_of(indices: Sequence[SourceIndex]) -> list[Bucket]:
    """The samples of all indices by rising capacity."""
    found: dict[int, tuple[list[int], list[int], list[int]]] = {}  # the rows of Bucket
    base = 0
    for d, index in enumerate(indices):
        offsets = index.bucket_sample_offsets.tolist()
        for capacity, (begin, end) in zip(
            index.bucket_capacity.tolist(), pairwise(offsets), strict=True
        ):
            if begin < end:
                rows = found.setdefault(capacity, ([], [], []))
                for row, value in zip(rows, (d, base + begin, end - begin), strict=True):
                    row.append(value)
        base += offsets[-1]
    return [Bucket(c, *np.array(rows, np.int64)) for c, rows in sorted(found.items())]
