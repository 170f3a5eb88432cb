"""A trained model as a directory that ``from_pretrained`` loads, from any ZeRO stage."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from megapack.training.distributed import World

__all__ = ["export_model"]


def export_model(engine: Any, directory: Path, world: World) -> None:
    """Write the engine's model; collective, since ZeRO-3 gathers its parameters.

    The directory appears complete: it is written beside its place and renamed.
    """
    weights = _gather(engine, world)
    if world.is_first:
        partial = directory.with_name(f"{directory.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        engine.module.save(partial, weights)
        shutil.rmtree(directory, ignore_errors=True)
        partial.rename(directory)
    dist.barrier()


def _gather(engine: Any, world: World) -> dict[str, Tensor] | None:
    """Whole parameters on the first rank, one after the other; None when they are whole anyway."""
    if engine.zero_optimization_stage() < 3:
        return None
    import deepspeed  # noqa: PLC0415

    weights = {}
    for name, parameter in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter]):
            if world.is_first:
                weights[name] = parameter.detach().cpu().clone()
    return weights
