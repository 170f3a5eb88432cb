"""Many strategies on the same lengths: what each does, what it costs, which one to take.

Lengths and cases in, a Comparison out; ``html.render`` turns it into a page. Stands on packing.
"""

from megapack.packing.compare.cases import Case, default_cases, parse_case
from megapack.packing.compare.cost import GPUS, MODELS, Breakdown, Gpu, Model, TrainingRun, estimate
from megapack.packing.compare.evaluate import Comparison, Corpus, Evaluation, compare
from megapack.packing.compare.recommend import Recommendation, recommend
from megapack.packing.compare.workload import BucketWork, measure_work

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
    "Recommendation",
    "TrainingRun",
    "compare",
    "default_cases",
    "estimate",
    "measure_work",
    "parse_case",
    "recommend",
]
