"""Comparison -> plain dicts and lists for ``--json``: what the table and the page show."""

from __future__ import annotations

import dataclasses
from typing import Any

from megapack import __version__
from megapack.compare.comparison import Comparison
from megapack.compare.evaluation import Evaluation

__all__ = ["to_json"]


def to_json(comparison: Comparison, prefix: str = "PREFIX") -> dict[str, Any]:
    """The comparison as JSON values; units are those of the dataclasses' documentation.

    Args:
        prefix: of the dataset, for the command that packs it as recommended.
    """
    corpus = dataclasses.asdict(comparison.corpus)
    for name in ("edges", "documents_per_interval", "tokens_per_interval"):
        corpus[name] = corpus[name].tolist()
    recommendation = comparison.recommendation
    fixed = recommendation.best_fixed
    labels = [evaluation.label for evaluation in comparison.evaluations]
    return {
        "megapack": __version__,
        "corpus": corpus,
        "run": dataclasses.asdict(comparison.run),
        "num_ranks": comparison.num_ranks,
        "tokens_per_rank": comparison.tokens_per_rank,
        "seed": comparison.seed,
        "strategies": [
            {**_evaluation(evaluation), "excluded": why}
            for evaluation, why in zip(comparison.evaluations, recommendation.out, strict=True)
        ],
        "planned_steps": [dataclasses.asdict(planned) for planned in comparison.planned],
        "left_out": comparison.left_out,
        "recommendation": {
            "label": labels[recommendation.best],
            "command": comparison.evaluations[recommendation.best].case.command(
                prefix, comparison.seed
            ),
            "fixed_length": None if fixed is None else labels[fixed],
            "reasons": list(recommendation.reasons),
        },
    }


def _evaluation(evaluation: Evaluation) -> dict[str, Any]:
    bill = evaluation.breakdown
    return {
        "label": evaluation.label,
        "strategy": evaluation.case.strategy,
        "buckets": list(evaluation.case.buckets),
        "parameters": dict(evaluation.case.parameters),
        "decisions": evaluation.decisions,
        "seconds": evaluation.seconds,
        "metrics": evaluation.metrics,
        "work": [dataclasses.asdict(bucket) for bucket in evaluation.work],
        "cost": {
            **dataclasses.asdict(bill),
            "gpu_hours": bill.gpu_hours,
            "hours": bill.hours,
            "cost": bill.cost,
        },
    }
