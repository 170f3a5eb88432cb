"""Comparison of packing strategies on the same lengths: metrics, cost, recommendation.

``compare`` returns a Comparison; ``page.comparison_page`` writes it as a page.
"""

from megapack.compare.comparison import Comparison, Corpus, PlannedWork, compare, measure_plans
from megapack.compare.cost import (
    GPUS,
    MODELS,
    Breakdown,
    BucketWork,
    Gpu,
    Model,
    TrainingRun,
    estimate_cost,
    measure_work,
)
from megapack.compare.evaluation import (
    Case,
    Evaluation,
    Recommendation,
    default_cases,
    parse_case,
    recommend,
)

__all__ = [
    "GPUS",
    "MODELS",
    "Breakdown",
    "BucketWork",
    "Case",
    "Comparison",
    "Corpus",
    "Evaluation",
    "Gpu",
    "Model",
    "PlannedWork",
    "Recommendation",
    "TrainingRun",
    "compare",
    "default_cases",
    "estimate_cost",
    "measure_plans",
    "measure_work",
    "parse_case",
    "recommend",
]
