"""Many strategies on the same lengths: what each does, what it costs, which one to take.

Lengths and cases in, a Comparison out; ``html.render`` turns it into a page. Stands on packing
and planning.
"""

from megapack.compare.cases import Case, default_cases, parse_case
from megapack.compare.comparison import Comparison, compare
from megapack.compare.corpus import Corpus
from megapack.compare.cost import GPUS, MODELS, Breakdown, Gpu, Model, TrainingRun, estimate
from megapack.compare.evaluation import Evaluation
from megapack.compare.planned import PlannedWork, measure_plans
from megapack.compare.recommend import Recommendation, recommend
from megapack.compare.workload import BucketWork, measure_work

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
