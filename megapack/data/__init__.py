"""Schedule, sampler, gather and loader: turn a SampleIndex and documents into batches.

Batches need torch, but code that reads a run's configuration and computes its order does not. So
every name is imported on first use: a wrong configuration fails before torch is imported.
"""

from __future__ import annotations

import ast
import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # public names and their modules, for type checkers and the code below
    from megapack.data.batch import Batch as Batch
    from megapack.data.batch import BatchLayout as BatchLayout
    from megapack.data.batch import MicroBatch as MicroBatch
    from megapack.data.batch import allocate as allocate
    from megapack.data.blend import BlendConfig as BlendConfig
    from megapack.data.blend import Ramp as Ramp
    from megapack.data.blend import Source as Source
    from megapack.data.blend import Stage as Stage
    from megapack.data.blend import load_blend as load_blend
    from megapack.data.dataset import PackedDataset as PackedDataset
    from megapack.data.dataset import open_blend as open_blend
    from megapack.data.fim import FimConfig as FimConfig
    from megapack.data.fim import Sentinels as Sentinels
    from megapack.data.loader import PackedLoader as PackedLoader
    from megapack.data.loader import build_loader as build_loader
    from megapack.data.report import check_token_ids as check_token_ids
    from megapack.data.report import plan_exclusions as plan_exclusions
    from megapack.data.report import plan_run as plan_run
    from megapack.data.report import unseen_documents as unseen_documents
    from megapack.data.sample_order import Scores as Scores
    from megapack.data.sampler import BucketBatchSampler as BucketBatchSampler
    from megapack.data.schedule import Draw as Draw
    from megapack.data.schedule import Schedule as Schedule
    from megapack.data.schedule import Step as Step
    from megapack.data.steps import ORDERS as ORDERS
    from megapack.data.steps import ScheduleConfig as ScheduleConfig
    from megapack.data.tensors import RankChecker as RankChecker
    from megapack.data.tensors import block_diagonal_mask as block_diagonal_mask
    from megapack.data.tensors import flex_block_mask as flex_block_mask
    from megapack.data.tensors import segment_ids as segment_ids
    from megapack.data.trees import TreeBatch as TreeBatch
    from megapack.data.trees import tree_batch as tree_batch

_HOME = {  # public name -> module that defines it
    name.name: node.module
    for node in ast.walk(ast.parse(Path(__file__).read_text(encoding="utf-8")))
    if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("megapack.data.")
    for name in node.names
}
__all__ = sorted(_HOME)  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'megapack.data' has no attribute {name!r}")
    return getattr(importlib.import_module(str(_HOME[name])), name)
