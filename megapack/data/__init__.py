"""SampleIndex and documents in, batches out: schedule, sampler, gather, loader.

Batches need torch; what reads a run's configuration and decides its order does not. Every name is
imported on first use, so that a wrong configuration is refused before torch is imported.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megapack.data.batch import (
        Batch,
        BatchLayout,
        MicroBatch,
        allocate,
        block_diagonal_mask,
        flex_block_mask,
        segment_ids,
    )
    from megapack.data.blend import BlendConfig, Source, load_blend
    from megapack.data.bucket_order import ORDERS
    from megapack.data.checks import RankChecker, check_token_ids
    from megapack.data.dataset import PackedDataset
    from megapack.data.loader import PackedLoader, build_loader
    from megapack.data.program import Draw, Ramp, ScheduleConfig, Stage, Step
    from megapack.data.report import plan_exclusions, plan_run, unseen_documents
    from megapack.data.sample_order import Scores
    from megapack.data.sampler import BucketBatchSampler
    from megapack.data.schedule import Schedule

# public name -> the module that has it
_HOME = {
    "Batch": "batch",
    "BatchLayout": "batch",
    "BlendConfig": "blend",
    "BucketBatchSampler": "sampler",
    "Draw": "program",
    "MicroBatch": "batch",
    "ORDERS": "bucket_order",
    "PackedDataset": "dataset",
    "PackedLoader": "loader",
    "Ramp": "program",
    "RankChecker": "checks",
    "Schedule": "schedule",
    "ScheduleConfig": "program",
    "Scores": "sample_order",
    "Source": "blend",
    "Stage": "program",
    "Step": "program",
    "allocate": "batch",
    "block_diagonal_mask": "batch",
    "build_loader": "loader",
    "check_token_ids": "checks",
    "flex_block_mask": "batch",
    "load_blend": "blend",
    "plan_exclusions": "report",
    "plan_run": "report",
    "segment_ids": "batch",
    "unseen_documents": "report",
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
