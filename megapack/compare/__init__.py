"""Many strategies on the same lengths: what each does, what it costs, which one to take.

Lengths and cases in, a Comparison out; ``html.render`` turns it into a page. Stands on packing
and planning.
"""

from megapack.compare.cases import Case, default_cases, parse_case
from megapack.compare.comparison import Comparison, Corpus, compare
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
from megapack.compare.evaluation import Evaluation, Recommendation, recommend
from megapack.compare.planned import PlannedWork, measure_plans

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
