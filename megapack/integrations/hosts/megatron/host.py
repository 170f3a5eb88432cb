"""The Megatron of this process: its release, the arguments of its script, its batch sizes."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import __version__ as release
from megatron.core import num_microbatches_calculator as calculator

HOST = f"megatron-core {release}"


def version(text: str = release) -> tuple[int, int]:
    major, minor = text.split(".")[:2]
    return int(major), int(minor)


def device() -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def script_arguments() -> Any | None:
    """Return ``get_args()`` of Megatron-LM; None without Megatron-LM or before it parses them."""
    module = sys.modules.get("megatron.training.global_vars")
    if module is None:
        return None
    try:
        return module.get_args()
    except AssertionError:  # not parsed yet
        return None


@dataclass(frozen=True, kw_only=True)
class BatchSizes:
    """Batch sizes of one split, in rows."""

    micro_batch_size: int  # rows of one rank
    rows_per_micro_step: int  # rows of all ranks: micro_batch_size x data_parallel_size
    shared: int | None
    """Greatest common divisor of all global batch sizes of the run; None: unknown calculator."""


def batch_sizes(*, evaluation: bool = False) -> BatchSizes | None:
    """Return the batch sizes of training, or of validation and test (own sizes from 0.18 on). None:
    unknown, because megatron-core runs without its micro batch calculator."""
    args = script_arguments()
    if evaluation and getattr(args, "eval_micro_batch_size", None) is not None:
        return _from_arguments(args, "eval_")
    state = calculator._GLOBAL_NUM_MICROBATCHES_CALCULATOR
    if state is not None:
        return BatchSizes(
            micro_batch_size=state.get_micro_batch_size(),
            rows_per_micro_step=state.get_current_running_global_batch_size() // state.get(),
            shared=_shared(state),
        )
    # tools/prepare_cache.py parses the arguments of a run but creates no calculator.
    return None if args is None else _from_arguments(args, "")


def _from_arguments(args: Any, prefix: str) -> BatchSizes:
    micro_batch_size = int(getattr(args, f"{prefix}micro_batch_size"))
    return BatchSizes(
        micro_batch_size=micro_batch_size,
        rows_per_micro_step=micro_batch_size * int(args.data_parallel_size),
        shared=int(getattr(args, f"{prefix}global_batch_size")),
    )


def _shared(state: Any) -> int | None:
    kind = type(state).__name__
    if kind == "ConstantNumMicroBatchesCalculator":
        return int(state.get_current_global_batch_size())
    if kind == "RampupBatchsizeNumMicroBatchesCalculator":  # 0.16 and 0.17
        return math.gcd(state.start_global_batch_size, state.batch_size_increment)
    if kind == "StepBatchsizeNumMicroBatchesCalculator":  # from 0.18 on
        return math.gcd(*(size for _, size in state.schedule))
    return None
