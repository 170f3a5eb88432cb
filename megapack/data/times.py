"""How often samples were drawn before a step, and when last: from cursors, not from the steps.

What a query costs grows with the samples that are asked about, and with neither steps nor epochs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megapack.data.epochs import Epochs
from megapack.data.order import order_named
from megapack.data.stage import StageDraws, Taken
from megapack.data.streams import fold_key

__all__ = ["last_step", "times_drawn"]

Ids = NDArray[np.int64]


class _Part(NamedTuple):
    """Those samples asked about that lie in one bucket."""

    mine: Ids  # which of those asked about
    samples: Ids  # counted from the bucket's first
    epochs: Epochs
    taken: Taken


def times_drawn(stage: StageDraws, source: int, ids: Ids, step: int) -> Ids:
    """How often each of some samples was drawn since the run began, or passed over.

    Args:
        stage: that ``step`` belongs to, or that ends with it.
        source: number of the source whose samples they are.
        ids: global ids, int64, of samples of which nothing is masked.
        step: the draws of the steps before it are counted.

    Returns:
        int64, of the shape of ``ids``.
    """
    times = np.zeros(len(ids), np.int64)
    for part in _parts(stage, source, ids, step):
        since = np.bincount(part.taken.since, minlength=part.epochs.size)[part.samples]
        times[part.mine] = part.epochs.times(part.taken.cursor, part.samples) + since
    return times


def last_step(stage: StageDraws, source: int, ids: Ids, step: int) -> int:
    """The last step of a stage before ``step`` that draws one of some samples.

    Arguments are those of ``times_drawn``; the stage draws each of the samples before ``step``.
    """
    found = []
    for part in _parts(stage, source, ids, step):
        latest = np.isin(part.samples, part.taken.since)
        if not latest.any():
            cursors = part.epochs.last(part.taken.cursor, part.samples)
            latest = cursors > cursors.max() - part.taken.window
        found += [stage.steps_of(sample, step)[-1] for sample in ids[part.mine[latest]].tolist()]
    return max(found)


def _parts(stage: StageDraws, source: int, ids: Ids, step: int) -> Iterator[_Part]:
    samples, seed = stage.samples, stage.config.seed
    shuffled = order_named(stage.config.order).shuffled
    taken = stage.taken_of(source, step)
    for capacity, datasets, firsts, sizes in samples.buckets:
        for at in np.flatnonzero(datasets == source).tolist():
            first, size = int(firsts[at]), int(sizes[at])
            mine = np.flatnonzero((first <= ids) & (ids < first + size))
            if len(mine):
                key = fold_key(seed, 1, capacity, source) if shuffled else None
                epochs = Epochs(size, key, samples.score_orders.get((source, capacity)))
                given = taken.get(capacity) or stage.cursor_at_begin(source, capacity)
                yield _Part(mine, ids[mine] - first, epochs, given)
