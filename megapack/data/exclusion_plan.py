"""What the lists of excluded documents do to a run, counted."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megapack.data.counting import segments_of
from megapack.data.schedule import Schedule
from megapack.data.times_drawn import last_step, times_drawn

__all__ = ["ExclusionPlan", "plan_exclusions"]

Ids = NDArray[np.int64]


@dataclass(frozen=True)
class ExclusionPlan:
    """What a list of excluded documents does to one source.

    Attributes:
        source, from_step: whose documents, masked from which step on.
        num_documents: that no list before it has.
        num_samples: that hold a piece of them.
        draws_before: draws of those samples before from_step, when the documents were seen.
        last_seen: the step of the last of these; None: there is none.
        draws_since: draws of those samples from from_step on.
        shown_since: of these, how many still show one of the documents.
    """

    source: str
    from_step: int
    num_documents: int
    num_samples: int
    draws_before: int
    last_seen: int | None
    draws_since: int
    shown_since: int


def plan_exclusions(schedule: Schedule, num_steps: int) -> list[ExclusionPlan]:
    """What the lists of excluded documents do in the first ``num_steps`` steps.

    Draws are counted from cursors, so the costs do not grow with the steps. Reads 4 bytes per
    segment of the sources concerned.
    """
    lists = schedule.samples.exclusions
    return [
        _plan(schedule, source, number, num_steps)
        for source in lists.sources
        for number in np.unique(lists.lists[source]).tolist()
    ]


def _plan(schedule: Schedule, source: int, number: int, num_steps: int) -> ExclusionPlan:
    samples, lists = schedule.samples, schedule.samples.exclusions
    documents = lists.documents[source][lists.lists[source] == number]
    from_step = schedule.masked_from(source, int(documents[0]))
    assert from_step is not None
    holding = np.array(samples.samples_of(source, documents), np.int64)
    before = since = shown = 0
    last_seen = None
    for stage, end in schedule.spans(num_steps):
        at_end, at_begin = (times_drawn(stage, source, holding, i) for i in (end, stage.begin))
        drawn = at_end - at_begin
        if stage.begin >= from_step:
            since += int(drawn.sum())
            shown += int(drawn[_shows(schedule, source, holding, documents, stage.num_lists)].sum())
        elif drawn.any():
            before += int(drawn.sum())
            last_seen = last_step(stage, source, holding[drawn > 0], end)
    return ExclusionPlan(
        source=samples.names[source],
        from_step=from_step,
        num_documents=len(documents),
        num_samples=len(holding),
        draws_before=before,
        last_seen=last_seen,
        draws_since=since,
        shown_since=shown,
    )


def _shows(
    schedule: Schedule, source: int, ids: Ids, documents: Ids, num_lists: int
) -> NDArray[np.bool_]:
    """Which of some samples still show one of some documents under the first lists."""
    samples, shown = schedule.samples, np.zeros(len(ids), np.bool_)
    for shard, mine, local in samples.shards.by_shard(ids):
        segments, owner = segments_of(samples.shards.index(shard), local)
        held = np.asarray(samples.shards.index(shard).segment_document[segments], np.int64)
        held += samples.shards.first_documents[shard]
        there = np.isin(held, documents) & ~samples.exclusions.masks(source, held, num_lists)
        shown[mine] = np.bincount(owner[there], minlength=len(mine)) > 0
    return shown
