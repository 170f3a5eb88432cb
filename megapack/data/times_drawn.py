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
from megapack.data.stage import StageDraws
from megapack.data.streams import shuffle_key

__all__ = ["last_step", "times_drawn"]

Ids = NDArray[np.int64]


class _Taken(NamedTuple):
    """What one bucket of one source has given before a step."""

    cursor: int  # how many samples; with windows of cost, up to the begin of a window
    since: Ids  # drawn since then, counted from the bucket's first
    window: int = 1  # cursors less than so far apart may be drawn in the other order


class _Part(NamedTuple):
    """Those samples asked about that lie in one bucket."""

    mine: Ids  # which of those asked about
    samples: Ids  # counted from the bucket's first
    epochs: Epochs
    taken: _Taken


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
    taken = _taken(stage, source, step)
    for capacity, datasets, firsts, sizes in samples.buckets:
        for at in _where(datasets, source):
            first, size = int(firsts[at]), int(sizes[at])
            mine = np.flatnonzero((first <= ids) & (ids < first + size))
            if len(mine):
                key = shuffle_key(seed, capacity, source) if shuffled else None
                epochs = Epochs(size, key, samples.orders.get((source, capacity)))
                still = _Taken(stage.cursor_at_begin(source, capacity), np.zeros(0, np.int64))
                yield _Part(mine, ids[mine] - first, epochs, taken.get(capacity, still))


def _taken(stage: StageDraws, source: int, step: int) -> dict[int, _Taken]:
    """By capacity, of those buckets of a source that the stage draws from."""
    result = {}
    window = stage.config.cost_window
    turns = stage.draws.counts(stage.draw_of(step)).tolist()
    for b, (stream, turn) in enumerate(zip(stage.buckets, turns, strict=True)):
        for at in _where(stream.datasets, source):
            count = stage.samples_per_draw[b]
            begin, _ = stage.draws.window(b, turn, window)
            drawn = [stage.ids(b, n) for n in range(begin, turn)]
            own = np.concatenate([np.zeros(0, np.int64), *drawn]) - int(stream.first_sample[at])
            result[stream.capacity] = _Taken(
                cursor=stream.cursor(at, begin * count),
                since=own[(own >= 0) & (own < stream.sizes[at])],
                window=window * count if window > 1 else 1,
            )
    return result


def _where(datasets: Ids, source: int) -> list[int]:
    """Where a source stands among ascending numbers: at one place, or nowhere."""
    at = int(datasets.searchsorted(source))
    return [at] if datasets[at : at + 1].tolist() == [source] else []
