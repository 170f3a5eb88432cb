"""What a run will consist of, known before it starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megapack.data.schedule import Schedule
from megapack.errors import ConfigError

__all__ = ["BucketPlan", "DatasetPlan", "RunPlan", "check_epochs", "plan_run"]


@dataclass(frozen=True)
class BucketPlan:
    """One bucket: samples it has, samples per draw, draws and share of tokens of the run."""

    capacity: int
    num_samples: int
    samples_per_draw: int
    num_draws: int
    share: float


@dataclass(frozen=True)
class DatasetPlan:
    """One dataset: the share of tokens asked for and realised, and how often it is repeated."""

    name: str
    weight: float
    realised: float
    num_samples: int
    epochs: float


@dataclass(frozen=True)
class RunPlan:
    """The first ``num_steps`` steps of a schedule."""

    num_steps: int
    steps_per_epoch: int
    tokens_per_step: int
    buckets: tuple[BucketPlan, ...]
    datasets: tuple[DatasetPlan, ...]

    def __str__(self) -> str:
        lines = [
            f"{self.num_steps:,} steps of {self.tokens_per_step:,} tokens "
            f"(one epoch: {self.steps_per_epoch:,} steps)",
            f"{'bucket':>8} {'samples':>14} {'per draw':>9} {'draws':>12} {'tokens':>8}",
        ]
        lines += [
            f"{b.capacity:>8} {b.num_samples:>14,} {b.samples_per_draw:>9,} {b.num_draws:>12,} "
            f"{b.share:>8.2%}"
            for b in self.buckets
        ]
        lines.append(f"{'weight':>8} {'realised':>14} {'epochs':>9} {'samples':>12}  dataset")
        lines += [
            f"{d.weight:>8.2%} {d.realised:>14.4%} {d.epochs:>9.3f} {d.num_samples:>12,}  {d.name}"
            for d in self.datasets
        ]
        return "\n".join(lines)


def plan_run(schedule: Schedule, num_steps: int) -> RunPlan:
    """Count what the first ``num_steps`` steps hold; costs nothing that grows with the data."""
    draws = schedule.num_draws(num_steps)
    samples = draws * np.asarray(schedule.samples_per_draw)
    tokens = samples * [stream.capacity for stream in schedule.buckets]
    buckets = tuple(
        BucketPlan(stream.capacity, stream.num_samples, per_draw, int(count), float(share))
        for stream, per_draw, count, share in zip(
            schedule.buckets,
            schedule.samples_per_draw,
            draws,
            tokens / max(1, tokens.sum()),
            strict=True,
        )
    )
    return RunPlan(
        num_steps=num_steps,
        steps_per_epoch=schedule.num_steps(),
        tokens_per_step=schedule.config.tokens_per_step,
        buckets=buckets,
        datasets=_plan_datasets(schedule, samples.tolist()),
    )


def _plan_datasets(schedule: Schedule, samples: Sequence[int]) -> tuple[DatasetPlan, ...]:
    source = schedule.samples
    taken = np.zeros(len(source.indices), np.int64)
    there = np.zeros(len(source.indices), np.int64)
    for stream, end in zip(schedule.buckets, samples, strict=True):
        taken[stream.datasets] += stream.taken(end) * stream.capacity
        there[stream.datasets] += stream.sizes * stream.capacity
    weights = np.asarray(source.weights or there, np.float64)
    total = max(1, int(taken.sum()))
    return tuple(
        DatasetPlan(
            name=name,
            weight=float(weight),
            realised=float(used / total),
            num_samples=index.num_samples,
            epochs=float(used / tokens),
        )
        for name, index, weight, used, tokens in zip(
            source.names, source.indices, weights / weights.sum(), taken, there, strict=True
        )
    )


def check_epochs(schedule: Schedule, num_steps: int) -> None:
    """Refuse a run that repeats a dataset more often than allowed.

    A draw per bucket more is granted: the last one of an epoch reaches into the next.

    Raises:
        ConfigError: names the dataset, how often it would be repeated, and the remedies.
    """
    limit = schedule.samples.max_epochs
    if limit is None or num_steps == 0:
        return
    worst = max(plan_run(schedule, num_steps).datasets, key=lambda dataset: dataset.epochs)
    slack = len(schedule.buckets) / num_steps
    if worst.epochs > limit * (1 + slack):
        raise ConfigError(
            f"{num_steps} steps would repeat dataset {worst.name} {worst.epochs:.2f} times; "
            f"max_epochs is {limit:g}. Lower its weight ({worst.weight:.4g}), run fewer steps, add "
            "data, or raise max_epochs"
        )
