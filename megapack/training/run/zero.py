"""Which ZeRO stage: what DeepSpeed is told of it, and what it means for the gradients.

Of the stages that leave parameters whole, one reduces gradients while the backward goes on, and it
depends on the precision which (DeepSpeed 0.19). In bfloat16, stage 1 is DeepSpeed's
``BF16_Optimizer``: one all-reduce after the last backward of a step, and nothing overlaps it. Stage
2 reduces after every micro step, bucket by bucket, behind the backward of what comes before. In
float32 stage 1 does that, too, and only in the last micro step.
"""

from __future__ import annotations

from typing import Any

import torch

from megapack.training.config import EngineConfig

__all__ = ["describe_reduction", "zero_section"]


def zero_section(engine: EngineConfig) -> dict[str, Any]:
    """DeepSpeed's ``zero_optimization``, and how gradients are sent."""
    section: dict[str, Any] = {
        "zero_optimization": {
            "stage": engine.stage,
            "overlap_comm": torch.cuda.is_available() and engine.stage > 0,
            "contiguous_gradients": True,
        }
    }
    if engine.precision == "bf16" and engine.stage >= 2:
        section["communication_data_type"] = "fp32"  # as stage 1 and 0 have it
    return section


def describe_reduction(
    engine: EngineConfig, num_parameters: int, ranks: int, micro_steps: int
) -> str:
    """A line for people: the stage, why, and when how much is reduced.

    Args:
        engine: of the run.
        num_parameters: of the model.
        ranks: data parallel size.
        micro_steps: of an optimizer step.
    """
    chosen = f"ZeRO: stage {engine.stage}" + (" (auto)" if engine.zero_stage == "auto" else "")
    if ranks == 1:
        return f"{chosen}; one rank, nothing to reduce"
    size = f"{num_parameters * 4 / 2**30:.2f} GiB of gradients (float32)"
    every = f"{size} are reduced in each of {micro_steps} micro steps"
    once = f"{size} are reduced once per step"
    if engine.stage == 0:
        return f"{chosen}; {once}, after the last backward, which does not hide it"
    if engine.stage == 3:
        return f"{chosen}; {every}, during the backward, and parameters are gathered twice"
    if engine.stage == 2:
        return f"{chosen}; {every}, during the backward"
    if engine.precision == "fp32":
        return f"{chosen}; {once}, during the last backward"
    return (
        f"{chosen}; {once}, after the last backward, which does not hide it (stage 2 reduces in "
        f"each of {micro_steps} micro steps, during the backward)"
    )
