"""SampleIndex and documents in, batches out: schedule, sampler, gather, loader.

Batches need torch; what reads a run's configuration and decides its order does not. Every name is
imported on first use, so that a wrong configuration is refused before torch is imported.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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

# public name -> the module that has it
_HOME = {
    "Batch": "batch",
    "BatchLayout": "batch",
    "MicroBatch": "batch",
    "allocate": "batch",
    "BlendConfig": "blend",
    "Source": "blend",
    "load_blend": "blend",
    "PackedDataset": "dataset",
    "plan_exclusions": "exclusion_plan",
    "PackedLoader": "loader",
    "build_loader": "loader",
    "block_diagonal_mask": "masks",
    "flex_block_mask": "masks",
    "segment_ids": "masks",
    "ORDERS": "order",
    "Stage": "program",
    "Ramp": "ramp",
    "RankChecker": "rank_check",
    "plan_run": "report",
    "BucketBatchSampler": "sampler",
    "Schedule": "schedule",
    "Scores": "scores",
    "Draw": "step",
    "ScheduleConfig": "step",
    "Step": "step",
    "unseen_documents": "unseen",
    "check_token_ids": "vocabulary",
}

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


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'megapack.data' has no attribute {name!r}")
    return getattr(importlib.import_module(f"megapack.data.{_HOME[name]}"), name)
