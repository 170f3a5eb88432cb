"""Many strategies on the same lengths: what each does, what it costs, which one to take.

Lengths and cases in, a Comparison out; ``page.render`` turns it into a page. Stands on packing
and planning.
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
    estimate,
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
    "estimate",
    "measure_plans",
    "measure_work",
    "parse_case",
    "recommend",
]
