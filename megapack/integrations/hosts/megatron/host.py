"""The Megatron of this process: its release, its script's arguments, its batch sizes."""

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
    """Major and minor number of a release."""
    major, minor = text.split(".")[:2]
    return int(major), int(minor)


def device() -> torch.device:
    """Of this rank."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def script_arguments() -> Any | None:
    """``get_args()`` of Megatron-LM; None with megatron-core alone, or before it has parsed."""
    module = sys.modules.get("megatron.training.global_vars")
    if module is None:
        return None
    try:
        return module.get_args()
    except AssertionError:  # Megatron's own words for "not parsed yet"
        return None


@dataclass(frozen=True, kw_only=True)
class BatchSizes:
    """Rows that the micro steps of one split take."""

    micro_batch_size: int
    """Of one rank."""
    rows_at_once: int
    """Of all ranks: micro_batch_size x data_parallel_size."""
    shared: int | None
    """What all global batches of the run share: the global batch size, or with a ramp-up the
    greatest common divisor of its batch sizes; None: Megatron counts them in an unknown way."""


def batch_sizes(*, evaluation: bool = False) -> BatchSizes | None:
    """Batch sizes of training, or of validation and test, which from 0.18 on may have their own.

    Returns:
        None where nobody has said any: megatron-core without its micro batch calculator.
    """
    args = script_arguments()
    if evaluation and getattr(args, "eval_micro_batch_size", None) is not None:
        return _of_arguments(args, "eval_")
    state = calculator._GLOBAL_NUM_MICROBATCHES_CALCULATOR
    if state is not None:
        return BatchSizes(
            micro_batch_size=state.get_micro_batch_size(),
            rows_at_once=state.get_current_running_global_batch_size() // state.get(),
            shared=_shared(state),
        )
    # tools/prepare_cache.py parses the arguments of a run and begins none.
    return None if args is None else _of_arguments(args, "")


def _of_arguments(args: Any, prefix: str) -> BatchSizes:
    micro_batch_size = int(getattr(args, f"{prefix}micro_batch_size"))
    return BatchSizes(
        micro_batch_size=micro_batch_size,
        rows_at_once=micro_batch_size * int(args.data_parallel_size),
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
