"""How often samples were drawn before a step, and when last: from cursors, not from the steps.

What a query costs grows with the samples that are asked about, and with neither steps nor epochs.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from megapack.data.stage import StageDraws

__all__ = ["last_step", "times_drawn"]

Ids = NDArray[np.int64]


def times_drawn(stage: StageDraws, source: int, ids: Ids, step: int) -> Ids:
    """How often each of some samples was drawn since the run began, or passed over.

    Args:
        stage: that ``step`` belongs to, or that ends with it.
        source: number of the source whose samples they are.
        ids: global ids, int64.
        step: the draws of the steps before it are counted.

    Returns:
        int64, of the shape of ``ids``.
    """
    times = np.zeros(len(ids), np.int64)
    for capacity, mine, samples in _by_bucket(stage, source, ids):
        epochs, cursor = stage.order_at(source, capacity, step)
        times[mine] = epochs.times(cursor, samples)
    return times


def last_step(stage: StageDraws, source: int, ids: Ids, step: int) -> int:
    """The last step of a stage before ``step`` that draws one of some samples.

    Arguments are those of ``times_drawn``; the stage draws each of the samples before ``step``.
    """
    return max(
        stage.last_step(source, capacity, samples, step)
        for capacity, _, samples in _by_bucket(stage, source, ids)
    )


def _by_bucket(stage: StageDraws, source: int, ids: Ids) -> Iterator[tuple[int, Ids, Ids]]:
    """Every bucket that has some of the ids of a source: its capacity, where they stand, and the
    samples counted from its first one."""
    for capacity, datasets, firsts, sizes in stage.samples.buckets:
        for at in np.flatnonzero(datasets == source).tolist():
            first, size = int(firsts[at]), int(sizes[at])
            mine = np.flatnonzero((first <= ids) & (ids < first + size))
            if len(mine):
                yield capacity, mine, ids[mine] - first
