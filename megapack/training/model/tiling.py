"""MLPs of long rows, a chunk of tokens at a time, by DeepSpeed's TiledMLP.

The activations between an MLP's two projections are its widest. In chunks, only those of one chunk
exist at once, and they are computed again in the backward (Bekman et al., *Arctic Long Sequence
Training*, 2025). The gradients of a weight over the chunks of a micro batch are added up in the
weight's dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megapack.errors import ConfigError

__all__ = ["num_chunks", "tile_mlps"]


def num_chunks(num_tokens: int, chunk_tokens: int) -> int:
    """Equal chunks (the last may be shorter) of at most so many tokens: how many ``torch.chunk``
    really makes, which is fewer than it is asked for where they would not come out."""
    size = -(-num_tokens // -(-num_tokens // chunk_tokens))
    return -(-num_tokens // size)


def tile_mlps(layers: nn.ModuleList, chunk_tokens: int) -> None:
    """Compute the MLP of every layer in chunks of tokens.

    Args:
        layers: decoder layers with an ``mlp`` each; changed.
        chunk_tokens: the most of a chunk.

    Raises:
        ConfigError: an MLP is none of dense layers alone: where a chunk does not reach a weight (a
            mixture of experts), its gradient would be lost, and dropout would not be drawn again.
    """
    for layer in layers:
        mlp = getattr(layer, "mlp", None)
        if problem := _problem(mlp):
            raise ConfigError(
                f"engine.mlp_chunk_tokens is {chunk_tokens}, and {type(layer).__name__} {problem}; "
                "set it to null"
            )
        assert mlp is not None
        mlp.forward = partial(_in_chunks, mlp, mlp.forward, chunk_tokens)


def _problem(mlp: nn.Module | None) -> str | None:
    from transformers.pytorch_utils import Conv1D  # noqa: PLC0415

    if mlp is None:
        return "has no mlp"
    for module in mlp.modules():
        if isinstance(module, nn.Dropout) and module.p > 0:
            return f"has dropout {module.p} in its {type(mlp).__name__}"
        own = next(module.parameters(recurse=False), None)
        if isinstance(module, nn.ModuleList) or not (
            own is None or isinstance(module, (nn.Linear, Conv1D))
        ):
            return f"has a {type(module).__name__} in its {type(mlp).__name__}"
    return None


def _in_chunks(
    mlp: nn.Module, forward: Callable[[Tensor], Tensor], chunk_tokens: int, hidden: Tensor
) -> Tensor:
    """``forward(hidden)`` of ``[..., tokens, width]``."""
    from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledMLP  # noqa: PLC0415

    chunks = num_chunks(hidden.shape[-2], chunk_tokens)
    if chunks == 1:
        return forward(hidden)
    kind = hidden.device.type
    # The backward, which computes it again, runs outside of the forward's autocast.
    autocast = kind != "meta" and torch.is_autocast_enabled(kind)
    dtype = torch.get_autocast_dtype(kind) if autocast else None

    def chunk(_: Any, part: Tensor) -> Tensor:
        if not autocast:
            return forward(part)
        with torch.autocast(kind, dtype=dtype):
            return forward(part)

    result: Tensor = TiledMLP.apply(chunk, mlp, hidden, chunks, list(mlp.parameters()))
    return result
