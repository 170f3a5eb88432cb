"""The documents that a run has not seen yet in the present pass over a source.

A source that goes on in another packing (longer samples, other buckets) cannot take over a cursor:
its new samples hold seen and unseen documents side by side. What is exact is a packing of the rest:
the documents that are unseen at a step, packed by themselves, are a source of their own.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from megapack.data.schedule import Schedule
from megapack.data.times_drawn import times_drawn

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
    """
    samples, stage = schedule.samples, schedule.stage_at(step)
    ids = np.arange(*samples.bases[source : source + 2], dtype=np.int64)
    drawn = times_drawn(stage, source, ids, step)
    never = np.iinfo(np.int64).max
    seen = np.full(samples.indices[source].num_documents, never)
    for index, first, numbers in samples.shards.opened(source):
        times = np.repeat(drawn[numbers], np.diff(index.sample_segment_offsets))
        np.minimum.at(seen, first + np.asarray(index.segment_document, np.int64), times)
    passes = int(seen.min())
    unseen = np.flatnonzero(seen == passes)
    masked = samples.exclusions.masks(source, unseen, stage.num_lists)
    return unseen[~masked], passes
