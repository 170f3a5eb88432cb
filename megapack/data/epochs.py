"""One bucket of a source as an endless sequence of epochs, each of which has every sample once.

A cursor counts the samples that were taken: in a bucket of n samples cursor c stands at place
``c mod n`` of epoch ``c div n``, and takes the sample that the order of that epoch has there: a
shuffle, the order of the index, or one of its own (by score, by blocks of an arranged source).
Where a window of cost (``megapack.data.streams``) has put the next samples into another order, that
is remembered as a ``Move``: its cursors take the same samples of the same epochs, each once. So an
epoch is a permutation whatever was moved. Samples are counted from the bucket's first one here.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megapack import _core
from megapack.data.blocks import BlockOrder
from megapack.data.scores import ScoreOrder

__all__ = ["Epochs", "Move"]

Ids = NDArray[np.int64]


class Move(NamedTuple):
    """What cursors from ``begin`` on take, one sample each."""

    begin: int
    samples: Ids

    @property
    def end(self) -> int:
        return self.begin + len(self.samples)


class Epochs(NamedTuple):
    """See the module."""

    size: int
    """Samples of the bucket."""
    key: int | None
    """Of the shuffles of all epochs; None: every epoch is in the order of the index."""
    order: ScoreOrder | BlockOrder | None = None
    """Instead of a shuffle."""
    moves: tuple[Move, ...] = ()
    """Ranges of cursors that do not overlap, each with the samples of its range in other order."""

    def samples(self, cursor: int, count: int) -> Ids:
        """What cursors ``[cursor, cursor + count)`` take."""
        if self.key is None:
            result = np.arange(cursor, cursor + count) % self.size
        elif self.order is not None:
            result = self.order.samples(partial(_core.random_bits, self.key), cursor, count)
        else:
            size, begin, number = np.array([[self.size], [cursor], [count]], np.int64)
            key = np.array([self.key], np.uint64)
            result = _core.permute_epochs(key, size, begin, number, True)
        for begin, moved in self.moves:
            low, high = max(cursor, begin), min(cursor + count, begin + len(moved))
            if low < high:
                result[low - cursor : high - cursor] = moved[low - begin : high - begin]
        return result

    def moved(self, begin: int, samples: Ids) -> Epochs:
        """The same, and cursors from ``begin`` on take their samples in this order."""
        new = Move(begin, samples)
        met = [move for move in self.moves if move.begin < new.end and new.begin < move.end]
        apart = [move for move in self.moves if move.begin >= new.end or new.begin >= move.end]
        low, high = min(m.begin for m in (new, *met)), max(m.end for m in (new, *met))
        joined = self.samples(low, high - low)
        joined[new.begin - low : new.end - low] = samples
        return self._replace(moves=(*apart, Move(low, joined)))

    def places(self, epoch: int, samples: Ids) -> Ids:
        """Where some samples stand in an epoch."""
        first = epoch * self.size
        places: Ids
        if self.key is None:
            places = samples.copy()
        elif self.order is not None:
            places = self.order.places(epoch, _core.random_bits(self.key, epoch), samples).copy()
        else:
            key = _core.random_bits(self.key, epoch)
            places = _core.permute_inverse(key, self.size, samples)
        for move in self.moves:
            low, high = max(move.begin, first), min(move.end, first + self.size)
            there = (low <= places + first) & (places + first < high)
            if there.any():
                own = move.samples[low - move.begin : high - move.begin]
                by_id = np.argsort(own)
                found = np.searchsorted(own, samples[there], sorter=by_id)
                places[there] = low - first + by_id[found]
        return places

    def times(self, cursor: int, samples: Ids) -> Ids:
        """How often each of some samples was taken before a cursor."""
        epoch, place = divmod(cursor, self.size)
        times: Ids = epoch + (self.places(epoch, samples) < place)
        return times

    def last(self, cursor: int, samples: Ids) -> Ids:
        """The last cursor before ``cursor`` that took each of some samples; negative: none did."""
        epoch, place = divmod(cursor, self.size)
        now, before = (self.places(max(0, e), samples) for e in (epoch, epoch - 1))
        last: Ids = self.size * epoch + np.where(now < place, now, before - self.size)
        return last
