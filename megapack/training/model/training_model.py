"""What DeepSpeed wraps: one stream of tokens in, its losses and their scaled sum out.

The scaled sum is the architecture's own training loss, ``model(labels=...).loss`` of transformers,
times the labels of the stream: with the load-balancing loss of a mixture of experts, where the
architecture adds one (``megapack.attention.experts``); ``check_architecture`` compares the two. A
z-loss may be added to it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from megapack.attention import LoadBalancing, token_mask, varlen_arguments
from megapack.attention.transformers_interface import add_segment_numbers
from megapack.data import Batch
from megapack.data.batch import slot_tokens
from megapack.training.config import EngineConfig
from megapack.training.model.loss import IGNORED_LABEL, linear_cross_entropy
from megapack.training.model.sharding import whole_shape

Saving: TypeAlias = Callable[[], saved_tensors_hooks]


class TrainingModel(nn.Module):
    """A causal language model that takes one stream of tokens and gives its losses.

    Args:
        model: of transformers.
        chunk_tokens: positions whose logits exist at once.
        fused_loss: compile the elementwise part of the loss.
        z_loss: coefficient of the z-loss (``linear_cross_entropy``).
        sequence_group: process group of the ranks that share long samples.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        chunk_tokens: int,
        fused_loss: bool = False,
        z_loss: float = 0.0,
        sequence_group: Any = None,
    ) -> None:
        super().__init__()
        self.model = model
        add_segment_numbers(model)
        self.chunk_tokens = chunk_tokens
        self.fused_loss = fused_loss
        self.z_loss = z_loss
        self.sequence_group = sequence_group
        found = LoadBalancing.of(model)
        wanted = getattr(model.config, "output_router_logits", False)
        self.balancing = found if wanted else None
        self.left_out = None if wanted else found

    @property
    def configuration(self) -> Any:
        """The transformers configuration."""
        return self.model.config

    @property
    def num_parameters(self) -> int:
        """Trained numbers, tied ones once, wherever ZeRO-3 keeps them."""
        return sum(math.prod(whole_shape(p)) for p in self.parameters())

    @property
    def description(self) -> str:
        """For people: architecture, size, and what is trained besides the loss of the labels."""
        text = f"{self.configuration.model_type}, {self.num_parameters:,} parameters"
        if self.z_loss:
            text += f", with {self.z_loss:g} times the z-loss"
        if self.balancing is not None:
            return f"{text}, with {self.balancing}"
        if self.left_out is not None:
            return f"{text}, without {self.left_out} (model.overrides.output_router_logits adds it)"
        return text

    @property
    def layers(self) -> nn.ModuleList:
        """The decoder layers."""
        count = self.configuration.num_hidden_layers
        lists = (m for m in self.model.modules() if isinstance(m, nn.ModuleList))
        return next(layers for layers in lists if len(layers) == count)

    @property
    def hidden_matrices(self) -> list[nn.Parameter]:
        """The trained matrices of the decoder layers: what Muon is for."""
        return [p for p in self.layers.parameters() if p.requires_grad and p.ndim == 2]

    def hidden_states(self, tokens: Tensor, position_ids: Tensor, *segments: Any) -> Tensor:
        """``[T, width]``: the states before the head, of ``tokens [1, T]``; ``segments`` as of
        ``varlen_arguments``."""
        result: Tensor = self._outputs(tokens, position_ids, *segments).last_hidden_state
        return result.flatten(0, 1)

    def _outputs(self, tokens: Tensor, position_ids: Tensor, *segments: Any, **options: Any) -> Any:
        """Outputs of the model without its head."""
        base: Any = self.model.base_model
        return base(
            input_ids=tokens, position_ids=position_ids, **varlen_arguments(*segments), **options
        )

    def forward(
        self,
        tokens: Tensor,
        labels: Tensor,
        position_ids: Tensor,
        cu_seqlens: Tensor,
        *,
        max_seqlen: int,
        label_weights: Tensor | None = None,
        dataset_ids: Tensor | None = None,
        scale: float = 1.0,
        sequence_parallel_size: int = 1,
        sequence_parallel_rank: int = 0,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Losses of one micro batch, or of a slice of it (``sequence_parallel_size`` above 1);
        ``cu_seqlens`` and ``dataset_ids`` are of the whole.

        Args:
            tokens, labels, position_ids: ``[1, T]`` int64.
            cu_seqlens: ``[entries]`` int32.
            max_seqlen: the longest segment.
            label_weights: ``[1, T]`` float32, a factor on the loss of every label; None: 1.
            dataset_ids: int32, of every segment, -1 for padding; None: there is no padding.
            scale: factor on the first result.

        Returns:
            ``scale`` times its part of the training loss, a scalar (where the model is evaluated,
            of the labels alone); the loss of every position ``[T]``, without a gradient
            (``linear_cross_entropy``); and its part of the load-balancing loss times the labels of
            the micro batch, a scalar without a gradient, neither scaled nor multiplied with its
            coefficient (None: there is none, or the model is evaluated). The parts of slices add
            up.
        """
        segments = cu_seqlens, max_seqlen, sequence_parallel_size
        balancing = self.balancing if self.training else None
        options = {} if self.balancing is None else {"output_router_logits": self.training}
        outputs = self._outputs(tokens, position_ids, *segments, **options)
        hidden = outputs.last_hidden_state.flatten(0, 1)
        head: Any = self.model.get_output_embeddings()  # type: ignore[operator]
        # What some architectures multiply their logits with: Cohere's scale, Granite's divisor.
        scales = (getattr(self.configuration, x, None) for x in ("logit_scale", "logits_scaling"))
        factor, divisor = (float(value or 1.0) for value in scales)
        if factor != divisor:
            hidden = hidden * (factor / divisor)
        loss, losses = linear_cross_entropy(
            hidden,
            head.weight,
            labels.flatten(),
            label_weights=None if label_weights is None else label_weights.flatten(),
            scale=scale,
            softcap=getattr(self.configuration, "final_logit_softcapping", None) or 0.0,
            z_loss=self.z_loss if self.training else 0.0,
            chunk_tokens=self.chunk_tokens,
            fused=self.fused_loss,
        )
        if balancing is None:
            return loss, losses, None
        group = self.sequence_group if sequence_parallel_size > 1 else None
        mask = torch.ones_like(losses, dtype=torch.bool)
        if dataset_ids is not None:
            num_tokens = len(losses) * sequence_parallel_size
            whole = token_mask(cu_seqlens, dataset_ids, num_tokens)
            mask = whole.view(sequence_parallel_size, -1)[sequence_parallel_rank]
        weight = (labels != IGNORED_LABEL).float() if label_weights is None else label_weights
        weight = weight.sum()
        if group is not None:
            dist.all_reduce(weight, group=group)
        balance = weight * balancing.loss(outputs.router_logits, mask, group)
        return loss + scale * balancing.coefficient * balance, losses, balance.detach()

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


def on_device(batch: Batch, device: torch.device, config: EngineConfig) -> dict[str, Any]:
    """The arguments of ``TrainingModel.forward`` for one micro batch.

    Its ``loss_mask`` goes along where it holds more than which labels there are.
    """
    names = ("tokens", "labels", "position_ids", "cu_seqlens", "dataset_ids")
    given = {name: batch[name] for name in names}
    if is_weighted(batch):
        given["label_weights"] = batch["loss_mask"]
    return {
        **{name: value.to(device, non_blocking=True) for name, value in given.items()},
        "max_seqlen": longest_segment(batch, config),
        "sequence_parallel_size": int(batch.get("sequence_parallel_size", 1)),
        "sequence_parallel_rank": int(batch.get("sequence_parallel_rank", 0)),
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
