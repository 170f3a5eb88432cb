"""SampleIndex and documents in, batches out: schedule, sampler, gather, loader. Needs torch."""

from megapack.data.batch import Batch, BatchLayout, MicroBatch, allocate
from megapack.data.blend import BlendConfig, Source, load_blend
from megapack.data.dataset import PackedDataset
from megapack.data.exclusion_plan import plan_exclusions
from megapack.data.loader import PackedLoader, build_loader
from megapack.data.masks import block_diagonal_mask, flex_block_mask, segment_ids
from megapack.data.order import ORDERS
from megapack.data.program import Stage
from megapack.data.ramp import Ramp
from megapack.data.rank_check import RankChecker
from megapack.data.report import plan_run
from megapack.data.sampler import BucketBatchSampler
from megapack.data.schedule import Schedule
from megapack.data.scores import Scores
from megapack.data.step import Draw, ScheduleConfig, Step
from megapack.data.unseen import unseen_documents
from megapack.data.vocabulary import check_token_ids

__all__ = [
    "ORDERS",
    "Batch",
    "BatchLayout",
    "BlendConfig",
    "BucketBatchSampler",
    "Draw",
    "MicroBatch",
    "PackedDataset",
    "PackedLoader",
    "Ramp",
    "RankChecker",
    "Schedule",
    "ScheduleConfig",
    "Scores",
    "Source",
    "Stage",
    "Step",
    "allocate",
    "block_diagonal_mask",
    "build_loader",
    "check_token_ids",
    "flex_block_mask",
    "load_blend",
    "plan_exclusions",
    "plan_run",
    "segment_ids",
    "unseen_documents",
]
