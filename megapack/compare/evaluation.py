"""Everything that is said of one strategy on one corpus."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megapack.compare.cases import Case
from megapack.compare.cost import Breakdown, Dealing, TrainingRun, estimate
from megapack.compare.workload import BucketWork
from megapack.packing import SampleIndex

__all__ = ["Evaluation"]


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Everything known about one case.

    Attributes:
        metrics: ``SampleIndex.metrics()``, unchanged.
        decisions: what the strategy decided by itself, and why.
        work: per non-empty bucket, ascending capacity.
        breakdown: GPU-hours and money.
        seconds: time to pack (not to measure), with as many threads as were asked for.
    """

    case: Case
    metrics: dict[str, Any]
    decisions: dict[str, str]
    work: list[BucketWork]
    breakdown: Breakdown
    seconds: float

    @classmethod
    def of(
        cls,
        case: Case,
        index: SampleIndex,
        work: list[BucketWork],
        run: TrainingRun,
        seconds: float,
    ) -> Evaluation:
        """What is known of an index; it is not kept."""
        metrics = index.metrics()
        return cls(
            case=case,
            metrics=metrics,
            decisions=index.decisions,
            work=work,
            breakdown=estimate(
                work,
                num_tokens=metrics["num_tokens"],
                dropped_tokens=metrics["dropped_tokens"],
                repeated_tokens=metrics["repeated_tokens"],
                run=run,
            ),
            seconds=seconds,
        )

    @property
    def label(self) -> str:
        """Name in tables."""
        return self.case.label

    @property
    def num_positions(self) -> int:
        """Token positions that are computed, padding included."""
        return sum(bucket.num_positions for bucket in self.work)

    @property
    def mean_context(self) -> float:
        """Attention inside documents: mean squared segment length per position, in tokens."""
        return sum(bucket.work for bucket in self.work) / self.num_positions

    @property
    def mean_sample_context(self) -> float:
        """Attention over whole samples: mean squared capacity per position, in tokens."""
        return sum(bucket.sample_squares for bucket in self.work) / self.num_positions

    def imbalance(self, dealing: Dealing) -> float:
        """Busiest rank over mean rank, buckets weighted by their attention work."""
        total = sum(bucket.work for bucket in self.work)
        return sum(bucket.work * bucket.imbalance(dealing) for bucket in self.work) / total
