"""What DeepSpeed wraps: one stream of tokens in, its losses and their scaled sum out."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from megapack.attention import varlen_arguments
from megapack.data import Batch
from megapack.data.batch import slot_tokens
from megapack.training.config import EngineConfig
from megapack.training.model.loss import linear_cross_entropy
from megapack.training.model.sharding import whole_shape

__all__ = ["TrainingModel", "on_device"]

Saving: TypeAlias = Callable[[], saved_tensors_hooks]


class TrainingModel(nn.Module):
    """A causal language model that takes one stream of tokens and gives its losses."""

    def __init__(self, model: nn.Module, *, chunk_tokens: int, fused_loss: bool = False) -> None:
        super().__init__()
        self.model = model
        self.chunk_tokens = chunk_tokens
        self.fused_loss = fused_loss

    @property
    def configuration(self) -> Any:
        """The transformers configuration."""
        return self.model.config

    @property
    def num_parameters(self) -> int:
        """Trained numbers, tied ones once, wherever ZeRO-3 keeps them."""
        return sum(math.prod(whole_shape(p)) for p in self.parameters())

    @property
    def layers(self) -> nn.ModuleList:
        """The decoder layers."""
        count = self.configuration.num_hidden_layers
        lists = (m for m in self.model.modules() if isinstance(m, nn.ModuleList))
        return next(layers for layers in lists if len(layers) == count)

    def hidden_states(
        self,
        tokens: Tensor,
        position_ids: Tensor,
        cu_seqlens: Tensor,
        max_seqlen: int,
        sequence_parallel_size: int = 1,
    ) -> Tensor:
        """``[T, width]``: the states before the head, of ``tokens [1, T]``."""
        base: Any = self.model.base_model
        result: Tensor = base(
            input_ids=tokens,
            position_ids=position_ids,
            **varlen_arguments(cu_seqlens, max_seqlen, sequence_parallel_size),
        ).last_hidden_state
        return result.flatten(0, 1)

    def forward(
        self,
        tokens: Tensor,
        labels: Tensor,
        position_ids: Tensor,
        cu_seqlens: Tensor,
        *,
        max_seqlen: int,
        label_weights: Tensor | None = None,
        scale: float = 1.0,
        sequence_parallel_size: int = 1,
    ) -> tuple[Tensor, Tensor]:
        """``scale`` times the summed loss of one micro batch, and the loss of every position
        ``[T]``, without a gradient; see ``linear_cross_entropy``. With ``sequence_parallel_size``
        above 1 they are of a slice, and ``cu_seqlens`` of the whole."""
        hidden = self.hidden_states(
            tokens, position_ids, cu_seqlens, max_seqlen, sequence_parallel_size
        )
        head: Any = self.model.get_output_embeddings()  # type: ignore[operator]
        if (factor := _logit_factor(self.configuration)) != 1:
            hidden = hidden * factor
        return linear_cross_entropy(
            hidden,
            head.weight,
            labels.flatten(),
            label_weights=None if label_weights is None else label_weights.flatten(),
            scale=scale,
            softcap=getattr(self.configuration, "final_logit_softcapping", None) or 0.0,
            chunk_tokens=self.chunk_tokens,
            fused=self.fused_loss,
        )

    def cast(self, dtype: torch.dtype) -> TrainingModel:
        """Parameters in ``dtype``; buffers (RoPE frequencies) keep their precision."""
        for parameter in self.parameters():
            parameter.data = parameter.data.to(dtype)
            share = getattr(parameter, "ds_tensor", None)  # of ZeRO-3
            if share is not None:
                share.data = share.data.to(dtype)
        return self

    def checkpoint_activations(self, saving: Saving | None = None) -> None:
        """Recompute every layer in the backward instead of keeping its activations.

        Args:
            saving: hooks that get what a layer keeps for it: its input ``[1, T, width]``. What all
                layers share (RoPE's table, cu_seqlens) is referred to, not saved.
        """
        model: Any = self.model
        enable = getattr(model, "activation_checkpointing_enable", None)
        if enable is None:  # transformers before 5.20
            model.gradient_checkpointing_enable({"use_reentrant": False})
        else:
            enable()
        if saving is not None:
            for module in model.modules():
                if (recompute := vars(module).get("_gradient_checkpointing_func")) is not None:
                    module._gradient_checkpointing_func = partial(_saved_by, saving, recompute)

    def save(self, directory: str | Path, weights: dict[str, Tensor] | None = None) -> None:
        """Write what ``from_pretrained`` loads.

        Args:
            directory: created when missing.
            weights: full parameters by name in this module, when they are not held here (ZeRO-3).
        """
        state = None
        if weights is not None:
            state = {name.removeprefix("model."): value for name, value in weights.items()}
        model: Any = self.model
        model.save_pretrained(directory, state_dict=state)


def _saved_by(saving: Saving, recompute: Callable[..., Any], *layer: Any, **arguments: Any) -> Any:
    """Inside of the layer the checkpoint's own hooks are the innermost, which alone are called."""
    with saving():
        return recompute(*layer, **arguments)


def _logit_factor(configuration: Any) -> float:
    """What an architecture multiplies its logits with: Cohere's scale, Granite's divisor."""
    scale = getattr(configuration, "logit_scale", None) or 1.0
    divisor = getattr(configuration, "logits_scaling", None) or 1.0
    return float(scale) / float(divisor)


def on_device(batch: Batch, device: torch.device, config: EngineConfig) -> dict[str, Any]:
    """The arguments of ``TrainingModel.forward`` for one micro batch.

    Its ``loss_mask`` goes along where it holds more than which labels there are.
    """
    names = {name: name for name in ("tokens", "labels", "position_ids", "cu_seqlens")}
    if is_weighted(batch):
        names["label_weights"] = "loss_mask"
    moved = {name: batch[field].to(device, non_blocking=True) for name, field in names.items()}
    shared = int(batch.get("sequence_parallel_size", 1))
    return {
        **moved,
        "max_seqlen": longest_segment(batch, config),
        "sequence_parallel_size": shared,
    }


def is_weighted(batch: Batch) -> bool:
    """Whether losses are weighted: a loader's batch says what the weights of the step add up to."""
    return "step_label_weight" in batch


def longest_segment(batch: Batch, config: EngineConfig) -> int:
    """The ``max_seqlen`` a forward is given.

    The exact one keeps the attention grid tight. A compiled layer is specialised on it, so there
    it is the most that the bucket can have (the padding of an empty slot), whatever the attention
    window: one graph per bucket instead of one per batch.
    """
    if not config.compile:
        return int(batch["max_seqlen"])
    capacity = int(batch["capacity"])
    return slot_tokens(capacity, int(batch.get("row_tokens", capacity)))[-1]
