"""One bucket of a source as an endless sequence of epochs, each of which has every sample once.

A cursor counts the samples that were taken: in a bucket of n samples cursor c stands at place
``c mod n`` of epoch ``c div n``. Samples are counted from the bucket's first one here.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megapack import _core
from megapack.data.blocks import BlockOrder
from megapack.data.scores import ScoreOrder

__all__ = ["Epochs"]

Ids = NDArray[np.int64]


class Epochs(NamedTuple):
    """See the module."""

    size: int
    """Samples of the bucket."""
    key: int | None
    """Of the shuffles of all epochs; None: every epoch is in the order of the index."""
    order: ScoreOrder | BlockOrder | None
    """Their order by score, or of an arranged source, instead of a shuffle."""

    def places(self, epoch: int, samples: Ids) -> Ids:
        """Where some samples stand in an epoch."""
        if self.key is None:
            return samples
        key = _core.random_bits(self.key, epoch)
        if self.order is not None:
            return self.order.places(epoch, key, samples)
        return _core.permute_inverse(key, self.size, samples)

    def times(self, cursor: int, samples: Ids) -> Ids:
        """How often each of some samples was taken before a cursor."""
        epoch, place = divmod(cursor, self.size)
        return epoch + (self.places(epoch, samples) < place)

    def last(self, cursor: int, samples: Ids) -> Ids:
        """The last cursor before ``cursor`` that took each of some samples; negative: none did."""
        epoch, place = divmod(cursor, self.size)
        now, before = (self.places(max(0, e), samples) for e in (epoch, epoch - 1))
        return self.size * epoch + np.where(now < place, now, before - self.size)
