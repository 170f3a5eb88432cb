"""In which order buckets are drawn: a pure value, any draw of which is located by itself.

An epoch is ``num_cycles`` cycles. After c cycles bucket b has been drawn

    drawn(b, c) = ceil(c * samples_per_epoch[b] / (num_cycles * samples_per_draw[b]))

times, just enough to cover its samples of those cycles. So cycle c consists of the turns
``[drawn(b, c), drawn(b, c + 1))`` of every bucket b, put in order by an ``Order``.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from megapack import _core
from megapack.data.order import Order
from megapack.data.streams import fold_key

__all__ = ["DrawOrder"]


@dataclass(frozen=True, kw_only=True)
class DrawOrder:
    """The endless sequence of draws; draws and turns are counted from 0.

    Attributes:
        samples_per_epoch: of every bucket, by rising capacity.
        samples_per_draw: of every bucket.
        order: of the draws inside a cycle.
        num_cycles: per epoch.
        seed: of the order.
        largest_first: draw 0 takes the largest bucket, where the order is shuffled.
    """

    samples_per_epoch: tuple[int, ...]
    samples_per_draw: tuple[int, ...]
    order: Order
    num_cycles: int
    seed: int
    largest_first: bool = True

    def locate(self, draw: int) -> tuple[int, int]:
        """(bucket of a draw, how often that bucket was drawn before)."""
        cycle = self._cycle_of(draw)
        bucket, rank = _cycle(self, cycle).at(draw - self.begin(cycle))
        return bucket, self.drawn(bucket, cycle) + rank

    def draw_at(self, bucket: int, turn: int) -> int:
        """The inverse of ``locate``: which draw is the ``turn``-th of a bucket."""
        cycle = turn * self.num_cycles * self.samples_per_draw[bucket]
        cycle //= self.samples_per_epoch[bucket]  # the last one with drawn(bucket, cycle) <= turn
        rank = turn - self.drawn(bucket, cycle)
        return self.begin(cycle) + _cycle(self, cycle).position(bucket, rank)

    def drawn(self, bucket: int, cycles: int) -> int:
        """Draws of a bucket in the first ``cycles`` cycles."""
        samples = cycles * self.samples_per_epoch[bucket]
        return -(-samples // (self.num_cycles * self.samples_per_draw[bucket]))

    def begin(self, cycle: int) -> int:
        """The first draw of a cycle: draws in all cycles before."""
        return sum(self.drawn(b, cycle) for b in range(len(self.samples_per_draw)))

    def buckets(self, begin: int, end: int) -> NDArray[np.int32]:
        """The bucket of draws ``[begin, end)``."""
        parts = [np.zeros(0, np.int32)]
        while begin < end:
            cycle = self._cycle_of(begin)
            first, order = self.begin(cycle), _cycle(self, cycle)
            last = min(end, first + len(order))
            parts.append(order.range(begin - first, last - first))
            begin = last
        return np.concatenate(parts)

    def counts(self, end: int) -> NDArray[np.int64]:
        """(num_buckets,) how often every bucket is drawn in draws ``[0, end)``."""
        cycle = self._cycle_of(end)
        before = [self.drawn(b, cycle) for b in range(len(self.samples_per_draw))]
        return np.array(before, np.int64) + _cycle(self, cycle).counts(end - sum(before))

    def _cycle_of(self, draw: int) -> int:
        """The cycle of a draw: the largest c with begin(c) <= draw."""
        need = sum(
            samples / (self.num_cycles * per_draw)
            for samples, per_draw in zip(self.samples_per_epoch, self.samples_per_draw, strict=True)
        )
        # begin(c) lies in [need * c, need * c + num_buckets).
        low = max(0, int((draw - len(self.samples_per_draw)) / need) - 1)
        high = int((draw + 1) / need) + 2
        return low + bisect_right(range(low, high), draw, key=self.begin) - 1


@lru_cache(maxsize=8)  # random times are sorted once; a run needs one at a time, a look back two
def _cycle(draws: DrawOrder, cycle: int) -> _core.CycleOrder:
    buckets = range(len(draws.samples_per_draw))
    counts = np.array([draws.drawn(b, cycle + 1) - draws.drawn(b, cycle) for b in buckets])
    key = fold_key(draws.seed, 2, cycle)
    return draws.order.cycle(counts, key, largest_first=cycle == 0 and draws.largest_first)
