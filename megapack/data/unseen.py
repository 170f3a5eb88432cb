"""The documents that a run has not seen yet in the present pass over a source.

A source that goes on in another packing (longer samples, other buckets) cannot take over a cursor:
its new samples hold seen and unseen documents side by side. What is exact is a packing of the rest:
the documents that are unseen at a step, packed by themselves, are a source of their own.
"""

from __future__ import annotations

from functools import partial

import numpy as np
from numpy.typing import NDArray

from megapack import _core
from megapack.data.order import order_named
from megapack.data.schedule import Schedule
from megapack.data.streams import fold_key
from megapack.errors import ConfigError

__all__ = ["unseen_documents"]

Ids = NDArray[np.int64]


def unseen_documents(schedule: Schedule, source: int, step: int) -> tuple[Ids, int]:
    """Documents of a source that were seen less often than once more than all were.

    A document was seen as often as that one of its samples that was drawn least often in the steps
    before ``step`` (or passed over). With c the least of all documents, the present pass is the one
    behind c whole passes, and unseen in it is what was seen c times. Documents that no sample
    holds, and those masked at ``step``, are not among them.

    Args:
        schedule: of the run.
        source: number of the source.
        step: how many steps are done.

    Returns:
        Ids of the documents, ascending, int64; and c. Costs the time of reading the source's index.

    Raises:
        ConfigError: samples are drawn in windows of cost, which a step may leave half done.
    """
    if schedule.config.cost_window > 1:
        raise ConfigError(
            f"cost_window is {schedule.config.cost_window}: after {step} steps a window may be "
            "half done, which no cursor can tell; only runs with cost_window 1 know what is unseen"
        )
    index, stage = schedule.samples.indices[source], schedule.stage_at(step)
    drawn = _times_drawn(schedule, source, step)
    owner = np.repeat(np.arange(index.num_samples), np.diff(index.sample_segment_offsets))
    documents = np.asarray(index.segment_document, np.int64)
    never = np.iinfo(np.int64).max
    seen = np.full(index.num_documents, never)
    np.minimum.at(seen, documents, drawn[owner])
    passes = int(seen.min())
    unseen = np.flatnonzero(seen == passes)
    masked = schedule.samples.exclusions.masks(source, unseen, stage.num_lists)
    return unseen[~masked], passes


def _times_drawn(schedule: Schedule, source: int, step: int) -> Ids:
    """(samples,) how often each sample of a source was drawn, or passed over, before a step."""
    samples, seed = schedule.samples, schedule.config.seed
    index, base = samples.indices[source], int(samples.bases[source])
    cursors = schedule.stage_at(step).cursors(step)
    shuffled = order_named(schedule.config.order).shuffled
    times = np.zeros(index.num_samples, np.int64)
    for bucket in samples.buckets:
        for at in np.flatnonzero(bucket.datasets == source).tolist():
            first, size = int(bucket.first_sample[at]) - base, int(bucket.sizes[at])
            epoch, place = divmod(cursors.get((source, bucket.capacity), 0), size)
            key = fold_key(seed, 1, bucket.capacity, source) if shuffled else 0
            order = samples.score_orders.get((source, bucket.capacity))
            if order is not None:
                done = order.samples(partial(fold_key, key), epoch * size, place)
            elif shuffled:
                done = _core.permute_range(fold_key(key, epoch), size, 0, place)
            else:
                done = np.arange(place)
            times[first : first + size] = epoch
            times[first + done] += 1
    return times
