"""How much memory a rank will need, counted before it is taken.

Activations are counted, not guessed: the forward runs on tensors without storage ("meta"), and
what autograd keeps for the backward is added up.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from megapack.training.config import PretrainConfig
from megapack.training.model.training_model import TrainingModel

__all__ = ["estimate_memory", "saved_activations"]


def estimate_memory(
    model: TrainingModel, config: PretrainConfig, world_size: int, *, longest: int
) -> tuple[dict[str, int], int]:
    """Bytes per rank: of its device by what they hold, and page-locked ones of its host.

    Args:
        model: on the meta device; its dtype is changed.
        config: the run.
        world_size: ranks, over which ZeRO divides.
        longest: tokens of the largest bucket.
    """
    engine = config.engine
    if engine.precision == "bf16":  # under autocast activations are bfloat16 as well
        model.cast(torch.bfloat16)
    count = sum(p.numel() for p in model.parameters())
    low = engine.precision == "bf16" and engine.stage > 0
    over = {stage: world_size if engine.stage >= stage else 1 for stage in (1, 2, 3)}
    head = model.model.get_output_embeddings().weight  # type: ignore[operator]
    micro_batch_tokens = config.data.micro_batch_tokens
    activations, on_host = _activations(model, config, longest)
    if engine.mlp_chunk_tokens is not None and engine.mlp_chunk_tokens < micro_batch_tokens:
        activations += _of_one_chunk(model, engine.mlp_chunk_tokens)
    parts = {
        "parameters": count * (2 if low else 4) // over[3],
        "gradients": count * 4 // over[2] + (count * 2 // over[2] if low else 0),
        "master weights": count * 4 // over[1] if low else 0,
        "optimizer state": count * 8 // over[1],
        "activations": activations,
        # float32 logits of a chunk, their copy in the products' dtype, the weight's gradient.
        "loss": min(engine.loss_chunk_tokens, micro_batch_tokens) * head.shape[0] * 6
        + head.numel() * 4,
    }
    return {name: size for name, size in parts.items() if size}, on_host


def _activations(model: TrainingModel, config: PretrainConfig, longest: int) -> tuple[int, int]:
    """Bytes on the device, and on its host."""
    engine, num_tokens = config.engine, config.data.micro_batch_tokens
    activations = saved_activations(model, num_tokens, longest)
    if not engine.activation_checkpointing:
        return activations, 0
    inputs = _Kept(model)
    model.checkpoint_activations(inputs.hooks)
    recomputed = activations // len(model.layers)  # one layer at a time
    activations = saved_activations(model, num_tokens, longest) + recomputed
    # Between layers autocast leaves float32, which here was cast.
    wide = 2 if engine.precision == "bf16" and engine.stage == 0 else 1
    sizes = [size * wide for size in inputs.sizes]
    if engine.offload_activations:  # torch takes page-locked memory in powers of two
        return activations, sum(1 << (size - 1).bit_length() for size in sizes)
    return activations + sum(sizes), 0


def saved_activations(model: TrainingModel, num_tokens: int, longest: int) -> int:
    """Bytes that autograd keeps between forward and backward of one micro batch.

    Uncompiled: a compiled layer keeps less.
    """
    tokens = torch.empty(1, num_tokens, dtype=torch.int64, device="meta")
    cu_seqlens = torch.empty(2, dtype=torch.int32, device="meta")
    model.train()
    kept = _Kept(model)
    with kept.hooks():
        model(tokens, tokens, tokens, cu_seqlens, max_seqlen=longest)
    return sum(kept.sizes)


def _of_one_chunk(model: TrainingModel, num_tokens: int) -> int:
    """Of an MLP that is computed again in the backward."""
    mlp: Any = model.layers[0].mlp
    width, dtype = model.configuration.hidden_size, next(model.parameters()).dtype
    hidden = torch.empty(1, num_tokens, width, dtype=dtype, device="meta", requires_grad=True)
    kept = _Kept(model)
    with kept.hooks():
        mlp(hidden)
    return sum(kept.sizes)


class _Kept:
    """What autograd keeps while its hooks are entered, parameters apart."""

    def __init__(self, model: TrainingModel) -> None:
        self._own = {p.untyped_storage()._cdata for p in model.parameters()}
        self._tensors: dict[int, Tensor] = {}  # held, so that no address is used again

    def hooks(self) -> saved_tensors_hooks:
        """The innermost alone are called: what those inside of these get is not counted here."""
        return saved_tensors_hooks(self._keep, lambda tensor: tensor)

    @property
    def sizes(self) -> list[int]:
        """Bytes of every storage."""
        return [tensor.untyped_storage().nbytes() for tensor in self._tensors.values()]

    def _keep(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()._cdata
        if storage not in self._own:
            self._tensors[storage] = tensor
        return tensor
