"""A trained model as a directory that ``from_pretrained`` loads, from any ZeRO stage."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from megapack.training.distributed import World

__all__ = ["export_model"]

logger = logging.getLogger("megapack")


def export_model(
    engine: Any, directory: Path, world: World, *, tokenizer: str | None = None
) -> None:
    """Write the engine's model; collective, since ZeRO-3 gathers its parameters.

    The directory appears complete: it is written beside its place and renamed.

    Args:
        engine: of ``start_engine``.
        directory: replaced if it exists.
        world: this process.
        tokenizer: the checkpoint the model began from; its tokenizer goes along, if it has one.
    """
    weights = _gather(engine, world)
    if world.is_first:
        partial = directory.with_name(f"{directory.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        engine.module.save(partial, weights)
        if tokenizer is not None:
            _copy_tokenizer(tokenizer, partial)
        shutil.rmtree(directory, ignore_errors=True)
        partial.rename(directory)
    dist.barrier()


def _copy_tokenizer(source: str, target: Path) -> None:
    from transformers import AutoTokenizer  # noqa: PLC0415

    try:
        AutoTokenizer.from_pretrained(source).save_pretrained(target)
    except (OSError, ValueError) as error:
        logger.info("no tokenizer goes with the model: %s", str(error).split("\n")[0])


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
