"""What a run will consist of, known before it starts: counted from cursors, not from its steps.

- ``plan_run``: steps, buckets, shares and epochs of every source. ``check_epochs`` refuses repeats;
  ``often_repeated`` says when they begin to cost.
- ``times_drawn``, ``last_step``: how often samples were drawn before a step, and when last.
- ``unseen_documents``: what a run has not seen yet in the present pass over a source.
- ``plan_exclusions``: what the lists of excluded documents do to a run.

    print(plan_run(schedule, 1000).table())
    # ->  weight       realised    epochs  repeated      samples  source
    #     80.00%       80.0001%     0.412     0.00%      120,000  web
    #     20.00%       19.9999%     1.730    42.20%        9,000  code

What a query costs grows with the samples that are asked about, and with neither steps nor epochs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megapack.data.program import check_reach
from megapack.data.schedule import Schedule, StageDraws
from megapack.data.sources import segments_of
from megapack.data.steps import StepView
from megapack.errors import ConfigError

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
    for capacity, sources, firsts, sizes in stage.samples.buckets:
        for at in np.flatnonzero(sources == source).tolist():
            first, size = int(firsts[at]), int(sizes[at])
            mine = np.flatnonzero((first <= ids) & (ids < first + size))
            if len(mine):
                yield capacity, mine, ids[mine] - first


def unseen_documents(schedule: Schedule, source: int, step: int) -> tuple[Ids, int]:
    """Documents of a source that were seen less often than once more than all were.

    A document was seen as often as that one of its samples that was drawn least often in the steps
    before ``step`` (or passed over). With c the least of all documents, the present pass is the one
    behind c whole passes, and unseen in it is what was seen c times. Documents that no sample
    holds, and those masked at ``step``, are not among them.

    A source that goes on in another packing (longer samples, other buckets) cannot take over a
    cursor: its new samples hold seen and unseen documents side by side. What is exact is a packing
    of the rest: the unseen documents, packed by themselves, are a source of their own.

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
    masked = samples.exclusions.masks(source, unseen, stage.view)
    return unseen[~masked], passes


@dataclass(frozen=True)
class ExclusionPlan:
    """Effect of a list of excluded documents on one source."""

    source: str
    """Whose documents are masked."""
    from_step: int
    """The first step at which they are."""
    num_documents: int
    """Those that no list before it has."""
    num_samples: int
    """That hold a piece of them."""
    draws_before: int
    """Draws of those samples before from_step, when the documents were seen."""
    last_seen: int | None
    """The step of the last of these; None: there is none."""
    draws_since: int
    """Draws of those samples from from_step on."""
    shown_since: int
    """Draws since then that still show one of the documents."""


def plan_exclusions(schedule: Schedule, num_steps: int) -> list[ExclusionPlan]:
    """Effects of the lists of excluded documents in the first ``num_steps`` steps.

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
            shown += int(drawn[_shows(schedule, source, holding, documents, stage.view)].sum())
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
    schedule: Schedule, source: int, ids: Ids, documents: Ids, view: StepView
) -> NDArray[np.bool_]:
    """Which of some samples still show one of some documents under the first lists."""
    samples, shown = schedule.samples, np.zeros(len(ids), np.bool_)
    for shard, mine, local in samples.shards.by_shard(ids):
        segments, owner = segments_of(samples.shards.index(shard), local)
        held = np.asarray(samples.shards.index(shard).segment_document[segments], np.int64)
        held += samples.shards.first_documents[shard]
        there = np.isin(held, documents) & ~samples.exclusions.masks(source, held, view)
        shown[mine] = np.bincount(owner[there], minlength=len(mine)) > 0
    return shown


@dataclass(frozen=True)
class BucketShare:
    """One bucket of a stage: samples it has, samples per draw, draws, and its share of tokens."""

    capacity: int
    num_samples: int
    samples_per_draw: int
    num_draws: int
    share: float


class SourceShare(NamedTuple):
    """One source: the share of tokens asked for and realised, and how often it is repeated."""

    name: str
    weight: float
    realised: float
    num_samples: int
    tokens: int
    epochs: float
    repeated: float
    """The share of its tokens that the run had seen before."""


class SourceShares:
    """One ``SourceShare`` per source, made when it is asked for: there may be tens of thousands.

    Attributes:
        names, columns: what the rows hold, each (D,).
    """

    def __init__(self, names: Sequence[str], *columns: NDArray[Any]) -> None:
        self.names, self.columns = names, columns

    def __len__(self) -> int:
        return len(self.names)

    def __iter__(self) -> Iterator[SourceShare]:
        rows = zip(self.names, *(column.tolist() for column in self.columns), strict=True)
        return map(SourceShare._make, rows)  # twice as fast as by the constructor

    def __getitem__(self, i: int) -> SourceShare:
        return SourceShare(self.names[i], *(column[i].item() for column in self.columns))


@dataclass(frozen=True)
class StagePlan:
    """Steps ``[begin, end)``."""

    begin: int
    end: int
    steps_per_epoch: int
    tokens_per_step: int
    buckets: tuple[BucketShare, ...]
    ramping: bool = False
    fim: str = ""
    """Which share of the documents of which source is turned round; "" where none is."""

    def __str__(self) -> str:
        rows = [*([self.fim] if self.fim else [])]
        rows += [
            f"{self.end - self.begin:,} steps of {self.tokens_per_step:,} tokens "
            f"(one epoch: {self.steps_per_epoch:,} steps)",
            f"{'bucket':>8} {'samples':>14} {'per draw':>9} {'draws':>12} {'tokens':>8}",
        ]
        rows += [
            f"{b.capacity:>8} {b.num_samples:>14,} {b.samples_per_draw:>9,} {b.num_draws:>12,} "
            f"{b.share:>8.2%}"
            for b in self.buckets
        ]
        return "\n".join(rows)


@dataclass(frozen=True)
class RunPlan:
    """The first ``num_steps`` steps of a schedule."""

    num_steps: int
    stages: tuple[StagePlan, ...]
    datasets: SourceShares
    loss: str
    """What the loss is the mean of, and whose tokens have weights; "" where all count alike."""

    def __str__(self) -> str:
        lines = []
        for ramping, group in groupby(self.stages, lambda stage: stage.ramping):
            stages = list(group)
            if ramping:
                first, last = stages[0].begin, stages[-1].end - 1
                lines.append(f"steps {first:,} to {last:,}: a ramp in {len(stages)} pieces")
                continue
            for stage in stages:
                if len(self.stages) > 1:
                    lines.append(f"steps {stage.begin:,} to {stage.end - 1:,}:")
                lines.append(str(stage))
        return "\n".join([*lines, self.table(), *([f"loss: {self.loss}"] if self.loss else [])])

    def table(self) -> str:
        """One line per source: shares of the tokens, and how often each is repeated."""
        columns = f"{'weight':>8} {'realised':>14} {'epochs':>9} {'repeated':>9} {'samples':>12}"
        rows = [f"{columns}  source"]
        rows += [
            f"{s.weight:>8.2%} {s.realised:>14.4%} {s.epochs:>9.3f} {s.repeated:>9.2%} "
            f"{s.num_samples:>12,}  {s.name}"
            for s in self.datasets
        ]
        return "\n".join([*rows, *often_repeated(self)])


# Epochs from which on repeats are spoken of. Up to four of all data cost next to nothing, and what
# more bring falls off (Muennighoff et al. 2023, arXiv 2305.16264); a scarce source of a mixture
# bears 15 to 20 (arXiv 2605.12715).
EPOCHS_OF_MOST = 4
EPOCHS_OF_SCARCE = 15


def often_repeated(plan: RunPlan) -> list[str]:
    """A sentence per source that is repeated more often than is known to cost nothing: more than
    4 times where it gives half of the tokens or more, else more than 15 times."""
    lines = []
    for source in plan.datasets:
        most = source.realised >= 0.5
        bound = EPOCHS_OF_MOST if most else EPOCHS_OF_SCARCE
        if source.epochs > bound:
            known = (
                f"up to {bound} epochs cost next to nothing, later ones bring less and less (arXiv "
                "2305.16264)"
                if most
                else f"a scarce source of a mixture bears {bound} to 20 (arXiv 2605.12715)"
            )
            lines.append(
                f"warning: source {source.name} is seen {source.epochs:.1f} times: {known}. Lower "
                "its weight, or give it max_epochs and the manifest run_tokens"
            )
    return lines


def plan_run(schedule: Schedule, num_steps: int) -> RunPlan:
    """Count what the first ``num_steps`` steps hold; costs nothing that grows with the data."""
    return RunPlan(
        num_steps=num_steps,
        stages=tuple(_plan_stage(stage, end) for stage, end in schedule.spans(num_steps)),
        datasets=_shares(schedule, num_steps),
        loss=_loss(schedule),
    )


def _loss(schedule: Schedule) -> str:
    samples = schedule.samples
    weighed = [n for n, of in zip(samples.names, samples.token_weights, strict=True) if of]
    if not samples.weighs_tokens:
        return ""
    return samples.mixture.loss + f", weights per token of {', '.join(weighed)}" * bool(weighed)


def _plan_stage(stage: StageDraws, end: int) -> StagePlan:
    draws = stage.num_draws(end)
    tokens = draws * stage.samples_per_draw * [stream.capacity for stream in stage.buckets]
    shares = (tokens / max(1, tokens.sum())).tolist()
    rows = zip(stage.buckets, stage.samples_per_draw, draws.tolist(), shares, strict=True)
    return StagePlan(
        begin=stage.begin,
        end=end,
        steps_per_epoch=stage.steps_per_epoch,
        tokens_per_step=stage.config.tokens_per_step,
        ramping=stage.ramping,
        fim=describe_fim(stage),
        buckets=tuple(BucketShare(s.capacity, s.num_samples, *row) for s, *row in rows),
    )


def describe_fim(stage: StageDraws) -> str:
    """The rates of a stage, of those sources that have some and are drawn; "" without any."""
    rates = zip(stage.samples.names, stage.fim_rates or (), stage.weights, strict=False)
    found = [f"{name} {rate:.4g}" for name, rate, weight in rates if rate and weight != 0]
    more = f" and {len(found) - 20} more" if len(found) > 20 else ""
    return f"fill-in-the-middle, share of documents: {', '.join(found[:20])}{more}" * bool(found)


def _shares(schedule: Schedule, num_steps: int) -> SourceShares:
    """Weights are the mean over the stages, by their tokens."""
    samples = schedule.samples
    there = samples.tokens_per_epoch
    of_bucket = {c: np.zeros(len(there), np.int64) for c in schedule.capacities}
    taken, wanted = np.zeros(len(there), np.int64), np.zeros(len(there))
    for stage, end in schedule.spans(num_steps):
        before = int(taken.sum())
        for capacity, sources, counts in stage.taken(end):
            taken[sources] += counts * capacity
            of_bucket[capacity][sources] += counts
        given = np.array(stage.weights, np.float64)  # nan for None
        shares = np.where(np.isnan(given), there, given)
        wanted += shares / shares.sum() * (int(taken.sum()) - before)
    repeated = np.zeros(len(there), np.int64)
    for capacity, sources, _, sizes in samples.buckets:
        if capacity in of_bucket:
            again = np.maximum(of_bucket[capacity][sources] - sizes, 0)
            repeated[sources] += again * capacity
    total, again = max(1, int(taken.sum())), repeated / np.maximum(taken, 1)
    columns = (wanted / total, taken / total, np.diff(samples.bases), taken, taken / there, again)
    return SourceShares(samples.names, *columns)


def check_epochs(schedule: Schedule, num_steps: int) -> None:
    """Refuse a run that repeats a source more often than allowed, or has too many tokens to count.

    A draw per bucket and stage more is granted: the last one of an epoch reaches into the next.

    Raises:
        ConfigError: names the source, how often it would be repeated, and the remedies.
    """
    check_reach(schedule.program, "the run", num_steps, "take fewer steps")
    mixture = schedule.samples.mixture
    assert isinstance(mixture.max_epochs, Sequence)
    limits = [math.inf if limit is None else limit for limit in mixture.max_epochs]
    if schedule.finite or num_steps == 0 or min(limits) == math.inf:
        return
    sources = zip(plan_run(schedule, num_steps).datasets, limits, strict=True)
    worst, limit = max(sources, key=lambda pair: pair[0].epochs / pair[1])
    slack = sum(len(stage.buckets) for stage, _ in schedule.spans(num_steps)) / num_steps
    if worst.epochs > limit * (1 + slack):
        total, planned = schedule.tokens_before(num_steps), mixture.run_tokens
        remedy = f"Lower its weight ({worst.weight:.4g})"
        if planned is None or planned < total:
            now = "" if planned is None else f", which is {planned:,},"
            remedy += f", set run_tokens{now} to the run's {total:,} so that weights keep to it"
        raise ConfigError(
            f"{num_steps} steps would repeat source {worst.name} {worst.epochs:.2f} times; "
            f"max_epochs is {limit:g}. {remedy}, run fewer steps, add data, or raise max_epochs"
        )


def check_labels(schedule: Schedule, num_steps: int) -> None:
    """Refuse a run without any label. It counts until the first step that has one.

    Raises:
        ConfigError: every step has loss 0.
    """
    if num_steps and not any(schedule.step(i).num_label_tokens for i in range(num_steps)):
        raise ConfigError(
            f"no token of the run's {num_steps} steps has a label, so there is nothing to learn: "
            "documents have one token each, or <prefix>.labels masks all of them. Give labels "
            "(megapack-build tokenize --messages-key), or documents of two tokens or more"
        )


def steps_without_labels(schedule: Schedule, num_steps: int) -> str | None:
    """Say how many of the first steps (at most 1,024) have no label; None: all have."""
    counted = min(num_steps, 1024)
    empty = sum(not schedule.step(i).num_label_tokens for i in range(counted))
    if not empty:
        return None
    among = "" if counted == num_steps else f" among the first {counted:,}"
    return f"steps without a label{among}: {empty:,} of {counted:,} (loss 0, nothing is learned)"
