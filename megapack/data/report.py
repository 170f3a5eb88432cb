"""What a run will consist of, known before it starts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megapack.data.schedule import Schedule
from megapack.data.stage import StageDraws
from megapack.errors import ConfigError

__all__ = [
    "BucketPlan",
    "DatasetPlan",
    "DatasetPlans",
    "RunPlan",
    "StagePlan",
    "check_epochs",
    "plan_run",
]


@dataclass(frozen=True)
class BucketPlan:
    """One bucket: samples it has, samples per draw, draws and share of tokens of the stage."""

    capacity: int
    num_samples: int
    samples_per_draw: int
    num_draws: int
    share: float


class DatasetPlan(NamedTuple):
    """One dataset: the share of tokens asked for and realised, and how often it is repeated."""

    name: str
    weight: float
    realised: float
    num_samples: int
    tokens: int
    epochs: float


class DatasetPlans:
    """One ``DatasetPlan`` per dataset, made when it is asked for: there may be tens of thousands.

    Attributes:
        names, columns: what the rows hold, each (D,).
    """

    def __init__(self, names: Sequence[str], *columns: NDArray[Any]) -> None:
        self.names, self.columns = names, columns

    def __len__(self) -> int:
        return len(self.names)

    def __iter__(self) -> Iterator[DatasetPlan]:
        rows = zip(self.names, *(column.tolist() for column in self.columns), strict=True)
        return map(DatasetPlan._make, rows)  # twice as fast as by the constructor

    def __getitem__(self, i: int) -> DatasetPlan:
        return DatasetPlan(self.names[i], *(column[i].item() for column in self.columns))


@dataclass(frozen=True)
class StagePlan:
    """Steps ``[begin, end)``."""

    begin: int
    end: int
    steps_per_epoch: int
    tokens_per_step: int
    buckets: tuple[BucketPlan, ...]
    ramping: bool = False

    def __str__(self) -> str:
        return "\n".join(
            [
                f"{self.end - self.begin:,} steps of {self.tokens_per_step:,} tokens "
                f"(one epoch: {self.steps_per_epoch:,} steps)",
                f"{'bucket':>8} {'samples':>14} {'per draw':>9} {'draws':>12} {'tokens':>8}",
            ]
            + [
                f"{b.capacity:>8} {b.num_samples:>14,} {b.samples_per_draw:>9,} {b.num_draws:>12,} "
                f"{b.share:>8.2%}"
                for b in self.buckets
            ]
        )


@dataclass(frozen=True)
class RunPlan:
    """The first ``num_steps`` steps of a schedule."""

    num_steps: int
    stages: tuple[StagePlan, ...]
    datasets: DatasetPlans

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
        return "\n".join([*lines, self.table()])

    def table(self) -> str:
        """One line per dataset: shares of the tokens, and how often each is repeated."""
        return "\n".join(
            [f"{'weight':>8} {'realised':>14} {'epochs':>9} {'samples':>12}  dataset"]
            + [
                f"{d.weight:>8.2%} {d.realised:>14.4%} {d.epochs:>9.3f} {d.num_samples:>12,}  "
                f"{d.name}"
                for d in self.datasets
            ]
        )


def plan_run(schedule: Schedule, num_steps: int) -> RunPlan:
    """Count what the first ``num_steps`` steps hold; costs nothing that grows with the data."""
    return RunPlan(
        num_steps=num_steps,
        stages=tuple(_plan_stage(stage, end) for stage, end in schedule.spans(num_steps)),
        datasets=_plan_datasets(schedule, num_steps),
    )


def _plan_stage(stage: StageDraws, end: int) -> StagePlan:
    draws = stage.num_draws(end)
    capacities = [stream.capacity for stream in stage.buckets]
    tokens = draws * stage.samples_per_draw * capacities
    return StagePlan(
        begin=stage.begin,
        end=end,
        steps_per_epoch=stage.steps_per_epoch,
        tokens_per_step=stage.config.tokens_per_step,
        ramping=stage.ramping,
        buckets=tuple(
            BucketPlan(stream.capacity, stream.num_samples, per_draw, int(count), float(share))
            for stream, per_draw, count, share in zip(
                stage.buckets,
                stage.samples_per_draw,
                draws,
                tokens / max(1, tokens.sum()),
                strict=True,
            )
        ),
    )


def _plan_datasets(schedule: Schedule, num_steps: int) -> DatasetPlans:
    """Weights are the mean over the stages, by their tokens."""
    source = schedule.samples
    there = source.tokens_per_epoch
    taken, wanted = np.zeros(len(there), np.int64), np.zeros(len(there))
    for stage, end in schedule.spans(num_steps):
        before = int(taken.sum())
        for capacity, datasets, samples in stage.taken(end):
            taken[datasets] += samples * capacity
        given = np.array(stage.weights, np.float64)  # nan for None
        shares = np.where(np.isnan(given), there, given)
        wanted += shares / shares.sum() * (int(taken.sum()) - before)
    total = max(1, int(taken.sum()))
    samples = np.diff(source.bases)
    return DatasetPlans(source.names, wanted / total, taken / total, samples, taken, taken / there)


def check_epochs(schedule: Schedule, num_steps: int) -> None:
    """Refuse a run that repeats a dataset more often than allowed.

    A draw per bucket and stage more is granted: the last one of an epoch reaches into the next.

    Raises:
        ConfigError: names the dataset, how often it would be repeated, and the remedies.
    """
    limit = schedule.samples.max_epochs
    if limit is None or num_steps == 0:
        return
    worst = max(plan_run(schedule, num_steps).datasets, key=lambda dataset: dataset.epochs)
    slack = sum(len(stage.buckets) for stage in schedule.stages) / num_steps
    if worst.epochs > limit * (1 + slack):
        raise ConfigError(
            f"{num_steps} steps would repeat dataset {worst.name} {worst.epochs:.2f} times; "
            f"max_epochs is {limit:g}. Lower its weight ({worst.weight:.4g}), run fewer steps, add "
            "data, or raise max_epochs"
        )
