"""Reports on a run before it starts, computed from the cursors of its stages.

- ``plan_run``: steps, buckets, shares and epochs of every source; ``check_epochs`` refuses, and
  ``often_repeated`` warns of, sources that are repeated too often.
- ``unseen_documents``, ``plan_exclusions``: documents that a run has not seen, or masks.
- ``check_token_ids``: compares the token ids of the documents with a model's vocabulary.

    print(plan_run(schedule, 1000).table())
    # ->  weight       realised    epochs  repeated      samples  source
    #     80.00%       80.0001%     0.412     0.00%      120,000  web
    #     20.00%       19.9999%     1.730    42.20%        9,000  code

The cost of a query depends on the number of its samples, not on the number of steps or epochs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megapack.data.program import check_reach
from megapack.data.schedule import Schedule, StageDraws
from megapack.data.sources import segments_of
from megapack.data.steps import StepView
from megapack.errors import ConfigError
from megapack.units import counted

if TYPE_CHECKING:
    from megapack.data.dataset import PackedDataset

Ids = NDArray[np.int64]


def times_drawn(stage: StageDraws, source: int, ids: Ids, step: int) -> Ids:
    """Return how often each sample of a source was drawn or skipped in the steps before ``step``,
    int64, of the shape of ``ids`` (global, int64). ``stage`` contains ``step`` or ends there."""
    times = np.zeros(len(ids), np.int64)
    for capacity, positions, samples in _by_bucket(stage, source, ids):
        epochs, cursor = stage.order_at(source, capacity, step)
        times[positions] = epochs.times(cursor, samples)
    return times


def last_step(stage: StageDraws, source: int, ids: Ids, step: int) -> int:
    """Return the last step of a stage before ``step`` that draws one of the samples; the stage must
    have drawn each of them."""
    return max(
        stage.last_step(source, capacity, samples, step)
        for capacity, _, samples in _by_bucket(stage, source, ids)
    )


def _by_bucket(stage: StageDraws, source: int, ids: Ids) -> Iterator[tuple[int, Ids, Ids]]:
    """Yield (capacity, positions in ``ids``, samples counted from the bucket's first one) of every
    bucket that has some of the ids of a source."""
    for capacity, sources, firsts, sizes in stage.samples.buckets:
        for i in np.flatnonzero(sources == source).tolist():
            first, size = int(firsts[i]), int(sizes[i])
            positions = np.flatnonzero((first <= ids) & (ids < first + size))
            if len(positions):
                yield capacity, positions, ids[positions] - first


def unseen_documents(schedule: Schedule, source: int, step: int) -> tuple[Ids, int]:
    """Return the documents of a source that the current epoch has not seen, int64, ascending, and
    the number c of complete epochs, before ``step``. Reads the index of the source.

    A document was seen as many times as its least-drawn sample was drawn (or skipped). The minimum
    over all documents is c, and the documents seen c times are unseen in the current epoch.
    Documents without a sample and documents masked at ``step`` are left out.

    A source cannot change its packing (longer samples, other buckets) and keep its cursors, since
    the new samples mix seen and unseen documents: pack the unseen documents as a new source.
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

    source: str  # name of the source
    from_step: int  # first step at which the documents are masked
    num_documents: int  # documents that no earlier list contains
    num_samples: int  # samples with a piece of these documents
    draws_before: int  # draws of these samples before from_step
    last_seen: int | None  # step of the last such draw; None without one
    draws_since: int  # draws of these samples from from_step on
    shown_since: int  # those that still show one of the documents


def plan_exclusions(schedule: Schedule, num_steps: int) -> list[ExclusionPlan]:
    """Return the effects of the lists of excluded documents in the first ``num_steps`` steps.

    Reads 4 bytes per segment of the sources concerned.
    """
    exclusions = schedule.samples.exclusions
    return [
        _plan_exclusion(schedule, source, number, num_steps)
        for source in exclusions.sources
        for number in np.unique(exclusions.first_lists[source]).tolist()
    ]


def _plan_exclusion(schedule: Schedule, source: int, number: int, num_steps: int) -> ExclusionPlan:
    exclusions = schedule.samples.exclusions
    documents = exclusions.documents[source][exclusions.first_lists[source] == number]
    from_step = schedule.masked_from(source, int(documents[0]))
    assert from_step is not None
    before = since = shown = 0
    last_seen = None
    num_samples, draws = draws_of(schedule, source, documents, num_steps)
    for begin, drawn, showing, last in draws:
        if begin >= from_step:
            since += drawn
            shown += showing
        elif drawn:
            before += drawn
            last_seen = last()
    return ExclusionPlan(
        source=schedule.samples.names[source],
        from_step=from_step,
        num_documents=len(documents),
        num_samples=num_samples,
        draws_before=before,
        last_seen=last_seen,
        draws_since=since,
        shown_since=shown,
    )


class DocumentDraws(NamedTuple):
    """Draws, in one stage, of samples with a piece of some documents."""

    begin: int  # first step of the stage
    drawn: int
    showing: int  # draws of samples in which at least one document is not masked
    last: Callable[[], int]  # returns the step of the last of these; call it only if there is one


def draws_of(
    schedule: Schedule, source: int, documents: Ids, num_steps: int
) -> tuple[int, list[DocumentDraws]]:
    """Return the number of samples with a piece of some documents (ascending) of a source, and
    their draws in every stage of the first ``num_steps`` steps."""
    holders = np.array(schedule.samples.samples_of(source, documents), np.int64)
    result = []
    for stage, end in schedule.spans(num_steps):
        at_end, at_begin = (times_drawn(stage, source, holders, i) for i in (end, stage.begin))
        drawn = at_end - at_begin
        shows = _shows(schedule, source, holders, documents, stage.view)
        shown = holders[shows & (drawn > 0)]
        last = partial(last_step, stage, source, shown, end)
        result.append(DocumentDraws(stage.begin, int(drawn.sum()), int(drawn[shows].sum()), last))
    return len(holders), result


def _shows(
    schedule: Schedule, source: int, ids: Ids, documents: Ids, view: StepView
) -> NDArray[np.bool_]:
    """Return for each sample whether the view still shows one of the documents in it."""
    samples, shown = schedule.samples, np.zeros(len(ids), np.bool_)
    for shard, positions, local in samples.shards.by_shard(ids):
        segments, owner = segments_of(samples.shards.index(shard), local)
        held = np.asarray(samples.shards.index(shard).segment_document[segments], np.int64)
        held += samples.shards.first_documents[shard]
        visible = np.isin(held, documents) & ~samples.exclusions.masks(source, held, view)
        shown[positions] = np.bincount(owner[visible], minlength=len(positions)) > 0
    return shown


@dataclass(frozen=True)
class BucketShare:
    """One bucket of a stage: its samples, samples per draw, draws, and its share of tokens."""

    capacity: int
    num_samples: int
    samples_per_draw: int
    num_draws: int
    share: float


class SourceShare(NamedTuple):
    """One source: its requested and its realised share of tokens, and its repeats."""

    name: str
    weight: float
    realised: float
    num_samples: int
    tokens: int
    epochs: float
    repeated: float  # share of its tokens that the run had seen before


@dataclass(frozen=True)
class StagePlan:
    """Steps ``[begin, end)``."""

    begin: int
    end: int
    steps_per_epoch: int
    tokens_per_step: int
    buckets: tuple[BucketShare, ...]
    ramping: bool = False
    fim_rates: str = ""  # fill-in-the-middle per source; "" without it

    def __str__(self) -> str:
        rows = [self.fim_rates] if self.fim_rates else []
        rows += [
            f"{self.end - self.begin:,} steps of {self.tokens_per_step:,} tokens "
            f"(one epoch: {counted(self.steps_per_epoch, 'step')})",
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
    datasets: tuple[SourceShare, ...]
    loss: str  # kind of mean, sources with weights per token; "" for the plain mean

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
        """Return one line per source: shares of the tokens, epochs and repeats."""
        columns = f"{'weight':>8} {'realised':>14} {'epochs':>9} {'repeated':>9} {'samples':>12}"
        rows = [f"{columns}  source"]
        rows += [
            f"{s.weight:>8.2%} {s.realised:>14.4%} {s.epochs:>9.3f} {s.repeated:>9.2%} "
            f"{s.num_samples:>12,}  {s.name}"
            for s in self.datasets
        ]
        return "\n".join([*rows, *often_repeated(self)])


# Epochs above which a plan warns of repeats. Up to four epochs train almost as well as new data,
# later ones help less and less (Muennighoff et al. 2023, arXiv 2305.16264); a scarce source of a
# mixture can be repeated 15 to 20 times (arXiv 2605.12715).
EPOCHS_OF_MOST = 4
EPOCHS_OF_SCARCE = 15


def often_repeated(plan: RunPlan) -> list[str]:
    """Return a warning per source with too many epochs: more than 4 if it provides half of the
    tokens or more, else more than 15."""
    lines = []
    for source in plan.datasets:
        is_large = source.realised >= 0.5
        bound = EPOCHS_OF_MOST if is_large else EPOCHS_OF_SCARCE
        if source.epochs > bound:
            reason = (
                f"up to {bound} epochs train almost as well as new data, later ones help less and "
                "less (arXiv 2305.16264)"
                if is_large
                else f"a scarce source can be repeated {bound} to 20 times (arXiv 2605.12715)"
            )
            lines.append(
                f"warning: source {source.name} is seen {source.epochs:.1f} times: {reason}. Lower "
                "its weight, or give it max_epochs and the manifest run_tokens"
            )
    return lines


def plan_run(schedule: Schedule, num_steps: int) -> RunPlan:
    """Return the plan of the first ``num_steps`` steps, in time independent of the data's size."""
    return RunPlan(
        num_steps=num_steps,
        stages=tuple(_plan_stage(stage, end) for stage, end in schedule.spans(num_steps)),
        datasets=_shares(schedule, num_steps),
        loss=_loss(schedule),
    )


def _loss(schedule: Schedule) -> str:
    samples = schedule.samples
    weighted = [
        n for n, weights in zip(samples.names, samples.token_weights, strict=True) if weights
    ]
    if not samples.weighs_tokens:
        return ""
    return samples.mixture.loss + f", weights per token of {', '.join(weighted)}" * bool(weighted)


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
        ramping=stage.settings.ramping,
        fim_rates=describe_fim(stage),
        buckets=tuple(BucketShare(s.capacity, s.num_samples, *row) for s, *row in rows),
    )


def describe_fim(stage: StageDraws) -> str:
    """Return the rates of fill-in-the-middle of all sources that a stage draws; "" if none."""
    settings = stage.settings
    rates = zip(stage.samples.names, settings.fim_rates or (), settings.weights, strict=False)
    entries = [f"{name} {rate:.4g}" for name, rate, weight in rates if rate and weight != 0]
    more = f" and {len(entries) - 20} more" if len(entries) > 20 else ""
    text = f"fill-in-the-middle, share of documents: {', '.join(entries[:20])}{more}"
    return text if entries else ""


def _shares(schedule: Schedule, num_steps: int) -> tuple[SourceShare, ...]:
    """Return the shares of all sources; weights are means over the stages, weighted by tokens."""
    samples = schedule.samples
    per_epoch = samples.tokens_per_epoch
    samples_taken = {c: np.zeros(len(per_epoch), np.int64) for c in schedule.capacities}
    taken, requested = np.zeros(len(per_epoch), np.int64), np.zeros(len(per_epoch))
    for stage, end in schedule.spans(num_steps):
        before = int(taken.sum())
        for capacity, sources, counts in stage.taken(end):
            taken[sources] += counts * capacity
            samples_taken[capacity][sources] += counts
        weights = np.array(stage.settings.weights, np.float64)  # nan for None
        weights = np.where(np.isnan(weights), per_epoch, weights)
        requested += weights / weights.sum() * (int(taken.sum()) - before)
    repeated = np.zeros(len(per_epoch), np.int64)
    for capacity, sources, _, sizes in samples.buckets:
        if capacity in samples_taken:
            repeats = np.maximum(samples_taken[capacity][sources] - sizes, 0)
            repeated[sources] += repeats * capacity
    total = max(1, int(taken.sum()))
    columns = (requested / total, taken / total, np.diff(samples.bases), taken, taken / per_epoch)
    rows = zip(*(c.tolist() for c in (*columns, repeated / np.maximum(taken, 1))), strict=True)
    return tuple(SourceShare(name, *row) for name, row in zip(samples.names, rows, strict=True))


def check_epochs(schedule: Schedule, num_steps: int) -> None:
    """Raise ConfigError if a run repeats a source too often or has more than 2^53 tokens."""
    check_reach(schedule.program, "the run", num_steps, "take fewer steps")
    mixture = schedule.samples.mixture
    assert isinstance(mixture.max_epochs, Sequence)
    limits = [math.inf if limit is None else limit for limit in mixture.max_epochs]
    if schedule.finite or num_steps == 0 or min(limits) == math.inf:
        return
    sources = zip(plan_run(schedule, num_steps).datasets, limits, strict=True)
    worst, limit = max(sources, key=lambda pair: pair[0].epochs / pair[1])
    # The last draw of an epoch reaches into the next: allow one more per bucket and stage.
    slack = sum(len(stage.buckets) for stage, _ in schedule.spans(num_steps)) / num_steps
    if worst.epochs > limit * (1 + slack):
        total, planned = schedule.tokens_before(num_steps), mixture.run_tokens
        remedy = f"Lower its weight ({worst.weight:.4g})"
        if planned is None or planned < total:
            now = "" if planned is None else f", which is {planned:,},"
            remedy += f", set run_tokens{now} to {total:,} so that the weights respect max_epochs"
        raise ConfigError(
            f"{num_steps} steps would repeat source {worst.name} {worst.epochs:.2f} times; "
            f"max_epochs is {limit:g}. {remedy}, run fewer steps, add data, or raise max_epochs"
        )


def check_labels(schedule: Schedule, num_steps: int) -> None:
    """Raise ConfigError if no step of a run has a label; counts up to the first one."""
    if num_steps and not any(schedule.step(i).num_label_tokens for i in range(num_steps)):
        raise ConfigError(
            f"no token of the run's {num_steps} steps has a label, so there is nothing to learn: "
            "documents have one token each, or column labels masks all of them. Give labels "
            "(megapack-build tokenize --messages-key), or documents of two tokens or more"
        )


def steps_without_labels(schedule: Schedule, num_steps: int) -> str | None:
    """Report how many of the first steps (at most 1,024) have no label; None if all have one."""
    num_counted = min(num_steps, 1024)
    num_empty = sum(not schedule.step(i).num_label_tokens for i in range(num_counted))
    if not num_empty:
        return None
    among = "" if num_counted == num_steps else f" among the first {num_counted:,}"
    counts = f"{num_empty:,} of {num_counted:,}"
    return f"steps without a label{among}: {counts} (loss 0, nothing is learned)"


# ---- Token ids within a model's vocabulary


def check_token_ids(data: PackedDataset, vocab_size: int) -> None:
    """Check that the model has an embedding for every id of the documents and their labels.

    Args:
        data: dataset of the run.
        vocab_size: rows of the model's embedding.

    Raises:
        ConfigError: an id is too large; the message names the dataset and its largest id.
    """
    fim = data.samples.fim
    if fim is not None and fim.largest_id >= vocab_size:
        raise ConfigError(
            f"fim writes token id {fim.largest_id}, and the model has ids below {vocab_size}: give "
            "it a larger vocabulary, or choose other sentinels"
        )
    for source in data.datasets:
        prefix, largest = source.largest_token_id(vocab_size)
        if largest >= vocab_size:
            raise ConfigError(
                f"{prefix} holds token id {largest}, and the model has ids below "
                f"{vocab_size}; tokenize with the model's own tokenizer, or give the model a "
                "larger vocabulary"
            )
