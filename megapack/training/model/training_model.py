"""Module that DeepSpeed wraps: computes the losses of a stream of tokens and their scaled sum.

The scaled sum is the architecture's training loss, ``model(labels=...).loss`` of transformers,
times the number of labels in the stream, with the load-balancing loss if the architecture has one
(``megapack.attention.experts``); ``check_architecture`` compares the two. A z-loss may be added,
and the divergence from a teacher mixed in (``megapack.training.model.loss``).

    result = TrainingModel(model, chunk_tokens=2048)(**on_device(batch, ...))
    # -> the sum of the losses of the labels, the loss of every position, None without experts,
    #    None without a teacher
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from megapack.attention import (
    LoadBalancing,
    TreeSegments,
    replay_routes,
    token_mask,
    tree_arguments,
    varlen_arguments,
)
from megapack.attention.routes import COLUMN
from megapack.attention.transformers_interface import add_segment_numbers
from megapack.data import Batch
from megapack.data.batch import last_slot
from megapack.training.config import DistillConfig, EngineConfig
from megapack.training.model.flops import whole_shape
from megapack.training.model.loss import (
    IGNORED_LABEL,
    Teacher,
    linear_cross_entropy,
    top_log_probabilities,
)

Saving: TypeAlias = Callable[[], saved_tensors_hooks]


class TrainingModel(nn.Module):
    """Causal language model that computes the losses of one stream of tokens.

    Args:
        model: transformers model.
        chunk_tokens: number of positions whose logits exist at once.
        fused_loss: compile the elementwise part of the loss.
        z_loss: coefficient of the z-loss (``linear_cross_entropy``).
        distill: distillation from a teacher; None: none.
        sequence_group: process group of the ranks that share long samples.
        replays: replay ``expert_routes`` of a forward pass; False: ignore them.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        chunk_tokens: int,
        fused_loss: bool = False,
        z_loss: float = 0.0,
        distill: DistillConfig | None = None,
        sequence_group: Any = None,
        replays: bool = False,
    ) -> None:
        super().__init__()
        self.model = model
        self.replays = replays
        add_segment_numbers(model)
        self.chunk_tokens = chunk_tokens
        self.fused_loss = fused_loss
        self.z_loss = z_loss
        self.distill = distill
        self.sequence_group = sequence_group
        balancing = LoadBalancing.of(model)
        is_on = getattr(model.config, "output_router_logits", False)
        self.balancing = balancing if is_on else None
        self.unused_balancing = None if is_on else balancing

    @property
    def configuration(self) -> Any:
        return self.model.config

    @property
    def num_parameters(self) -> int:
        """Number of parameters, over all ranks of ZeRO-3; tied parameters count once."""
        return sum(math.prod(whole_shape(p)) for p in self.parameters())

    @property
    def description(self) -> str:
        """Text for the log: architecture, size, and additional losses."""
        text = f"{self.configuration.model_type}, {self.num_parameters:,} parameters"
        if self.z_loss:
            text += f", with {self.z_loss:g} times the z-loss"
        if self.distill is not None:
            text += f", distilled from column {self.distill.logits} (alpha {self.distill.alpha:g})"
        if self.replays:
            text += ", with replayed routes"
        if self.balancing is not None:
            return f"{text}, with {self.balancing}"
        if self.unused_balancing is not None:
            hint = "model.overrides.output_router_logits adds it"
            return f"{text}, without {self.unused_balancing} ({hint})"
        return text

    @property
    def layers(self) -> nn.ModuleList:
        count = self.configuration.num_hidden_layers
        lists = (m for m in self.model.modules() if isinstance(m, nn.ModuleList))
        return next(layers for layers in lists if len(layers) == count)

    @property
    def hidden_matrices(self) -> list[nn.Parameter]:
        """Trained matrices of the decoder layers, which Muon updates."""
        return [p for p in self.layers.parameters() if p.requires_grad and p.ndim == 2]

    def hidden_states(self, tokens: Tensor, position_ids: Tensor, *segments: Any) -> Tensor:
        """Return the states before the head, ``[T, width]``, of ``tokens [1, T]``; ``segments`` as
        in ``varlen_arguments``."""
        result: Tensor = self._outputs(tokens, position_ids, *segments).last_hidden_state
        return result.flatten(0, 1)

    def _outputs(self, tokens: Tensor, position_ids: Tensor, *segments: Any, **options: Any) -> Any:
        """Return the outputs of the model without its head. ``segments``: also ``TreeSegments``."""
        base: Any = self.model.base_model
        trees = segments[0] if isinstance(segments[0], TreeSegments) else None
        arguments = varlen_arguments(*segments) if trees is None else tree_arguments(trees)
        return base(input_ids=tokens, position_ids=position_ids, **arguments, **options)

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
        teacher_ids: Tensor | None = None,
        teacher_logits: Tensor | None = None,
        expert_routes: Tensor | None = None,
        cu_seqlens_k: Tensor | None = None,
        kv_index: Tensor | None = None,
        max_seqlen_k: int | None = None,
        predecessors: Tensor | None = None,
        scale: float = 1.0,
        sequence_parallel_size: int = 1,
        sequence_parallel_rank: int = 0,
        few_labels: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """Return the losses of a micro batch, or of a slice of it (``sequence_parallel_size`` > 1).

        Args:
            tokens, labels, position_ids: ``[1, T]`` int64.
            cu_seqlens: ``[entries]`` int32, of the whole micro batch.
            max_seqlen: longest segment.
            label_weights: ``[1, T]`` float32, factors on the loss of every label; None: 1.
            dataset_ids: ``[segments]`` int32, of the whole micro batch, -1: padding; None: none.
            teacher_ids, teacher_logits: ``[1, T, k]``, ids and log-probabilities of a ``Teacher``,
                which ``distill`` mixes into the loss in training mode.
            expert_routes: ``[1, T, layers, top_k]``, experts to replay (``replay_routes``); None:
                the router's choices.
            cu_seqlens_k, kv_index, max_seqlen_k: paths of the nodes ``cu_seqlens`` of prefix trees
                (``TreeSegments``).
            predecessors: ``[T]`` int64: the token that predicts each token of a tree (-1: none).
                Then labels, weights and results belong to the predicted tokens.
            scale: factor on the first result.
            few_labels: compute logits only at positions with a label, in evaluation mode; the host
                waits until it knows their number.

        Returns:
            Four results; the scalars of all slices add up to those of the micro batch. First,
            ``scale`` times the training loss, a scalar (in evaluation mode, the cross entropy
            alone). Second, the loss of every position, ``[T]``, without a gradient
            (``linear_cross_entropy``). Third, the load-balancing loss times the number of labels in
            the micro batch, a scalar without a gradient, multiplied by neither ``scale`` nor its
            coefficient; None without experts or in evaluation mode. Fourth, the divergence of every
            position, ``[T]``, without a gradient; None without a teacher or in evaluation mode.
        """
        segments: tuple[Any, ...] = cu_seqlens, max_seqlen, sequence_parallel_size
        if cu_seqlens_k is not None and max_seqlen_k is not None:
            nodes = cu_seqlens, cu_seqlens_k, kv_index, max_seqlen, max_seqlen_k
            segments = (TreeSegments(*nodes),)
        balancing = self.balancing if self.training else None
        options = {} if self.balancing is None else {"output_router_logits": self.training}
        routes = expert_routes if self.replays else None
        with nullcontext() if routes is None else replay_routes(self.model, routes):
            outputs = self._outputs(tokens, position_ids, *segments, **options)
        hidden, weight, softcap = self._head(outputs)
        if predecessors is not None:  # the label of a token without one is -100
            hidden = hidden[predecessors.clamp(min=0)]
        teacher = None
        if teacher_ids is not None and teacher_logits is not None and self.training:
            assert self.distill is not None, "the weight of a teacher is unknown"
            tables = teacher_ids.flatten(0, 1), teacher_logits.flatten(0, 1)
            teacher = Teacher(*tables, self.distill.alpha, self.distill.temperature)
        targets = labels.flatten()
        weights = None if label_weights is None else label_weights.flatten()
        labeled: Any = slice(None)
        if few_labels:
            labeled = (targets != IGNORED_LABEL).nonzero()[:, 0]
            weights = None if weights is None else weights[labeled]
        loss, losses, divergences = linear_cross_entropy(
            hidden[labeled],
            weight,
            targets[labeled],
            label_weights=weights,
            scale=scale,
            softcap=softcap,
            z_loss=self.z_loss if self.training else 0.0,
            teacher=teacher,
            chunk_tokens=self.chunk_tokens,
            fused=self.fused_loss,
        )
        if few_labels:
            losses = losses.new_zeros(len(targets)).index_copy(0, labeled, losses)
        if balancing is None:
            return loss, losses, None, divergences
        group = self.sequence_group if sequence_parallel_size > 1 else None
        mask = torch.ones_like(losses, dtype=torch.bool)
        if dataset_ids is not None:
            num_tokens = len(losses) * sequence_parallel_size
            whole = token_mask(cu_seqlens, dataset_ids, num_tokens)
            mask = whole.view(sequence_parallel_size, -1)[sequence_parallel_rank]
        counted = (labels != IGNORED_LABEL).float() if label_weights is None else label_weights
        label_weight = counted.sum()
        if group is not None:
            dist.all_reduce(label_weight, group=group)
        balance = label_weight * balancing.loss(outputs.router_logits, mask, group)
        loss = loss + scale * balancing.coefficient * balance
        return loss, losses, balance.detach(), divergences

    def _head(self, outputs: Any) -> tuple[Tensor, Tensor, float]:
        """Return the states before the head ``[T, width]``, its weight, and the logits' softcap."""
        hidden = outputs.last_hidden_state.flatten(0, 1)
        head: Any = self.model.get_output_embeddings()  # type: ignore[operator]
        # Some architectures scale their logits: Cohere has a factor, Granite a divisor.
        scales = (getattr(self.configuration, x, None) for x in ("logit_scale", "logits_scaling"))
        factor, divisor = (float(value or 1.0) for value in scales)
        if factor != divisor:
            hidden = hidden * (factor / divisor)
        softcap = getattr(self.configuration, "final_logit_softcapping", None) or 0.0
        return hidden, head.weight, softcap

    @torch.no_grad()
    def most_likely(
        self, tokens: Tensor, position_ids: Tensor, *segments: Any, k: int, vocab_size: int
    ) -> tuple[Tensor, Tensor]:
        """Return ids and log-probabilities ``[T, k]`` of the most likely next tokens.

        Args: as in ``hidden_states``; only ids below ``vocab_size`` exist for the result.
        """
        hidden, weight, softcap = self._head(self._outputs(tokens, position_ids, *segments))
        options: dict[str, Any] = {"softcap": softcap, "chunk_tokens": self.chunk_tokens}
        return top_log_probabilities(hidden, weight[:vocab_size], k, **options)

    def cast(self, dtype: torch.dtype) -> TrainingModel:
        """Cast parameters to ``dtype``; buffers (RoPE frequencies) keep their dtype."""
        for parameter in self.parameters():
            parameter.data = parameter.data.to(dtype)
            share = getattr(parameter, "ds_tensor", None)  # ZeRO-3
            if share is not None:
                share.data = share.data.to(dtype)
        return self

    def checkpoint_activations(self, saving: Saving | None = None) -> None:
        """Recompute every layer in the backward pass instead of keeping its activations. Hooks of
        ``saving`` save a layer's input, ``[1, T, width]``; tensors that all layers share (RoPE's
        table, cu_seqlens) are not saved."""
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
        """Write a directory for ``from_pretrained``. For ZeRO-3, ``weights`` contains the complete
        parameters, by their names in this module."""
        state = None
        if weights is not None:
            state = {name.removeprefix("model."): value for name, value in weights.items()}
        model: Any = self.model
        model.save_pretrained(directory, state_dict=state)


def _saved_by(saving: Saving, recompute: Callable[..., Any], *layer: Any, **arguments: Any) -> Any:
    # Outside the layer: inside it, the checkpoint's own hooks are innermost, and only those run.
    with saving():
        return recompute(*layer, **arguments)


def on_device(
    batch: Batch,
    device: torch.device,
    config: EngineConfig,
    distill: DistillConfig | None = None,
) -> dict[str, Any]:
    """Return the arguments of ``TrainingModel.forward`` for one micro batch. ``loss_mask`` is
    passed as ``label_weights`` if losses are weighted, a teacher's columns with ``distill``."""
    names = ("tokens", "labels", "position_ids", "cu_seqlens", "dataset_ids")
    tensors, more = {name: batch[name] for name in names}, {}
    if "kv_index" in batch:  # the probe changes the nodes, and not cu_seqlens
        del tensors["dataset_ids"]
        tensors["cu_seqlens"] = batch["cu_seqlens_q"]
        tensors |= {name: batch[name] for name in ("cu_seqlens_k", "kv_index", "predecessors")}
        more["max_seqlen_k"] = batch["max_seqlen_k"]
    if is_weighted(batch):
        tensors["label_weights"] = batch["loss_mask"]
    if distill is not None:
        tensors["teacher_ids"] = batch[distill.ids]
        tensors["teacher_logits"] = batch[distill.logits]
    if COLUMN in batch:
        tensors["expert_routes"] = batch[COLUMN]
    return {
        **{name: value.to(device, non_blocking=True) for name, value in tensors.items()},
        **more,
        "max_seqlen": longest_segment(batch, config),
        "sequence_parallel_size": int(batch.get("sequence_parallel_size", 1)),
        "sequence_parallel_rank": int(batch.get("sequence_parallel_rank", 0)),
    }


def is_weighted(batch: Batch) -> bool:
    """Return True if losses are weighted: batches then contain the sum of the step's weights."""
    return "step_label_weight" in batch


def longest_segment(batch: Batch, config: EngineConfig) -> int:
    """Return ``max_seqlen`` for a forward pass.

    The exact length keeps the grid of the attention kernel small. But a compiled layer is
    specialized on it, so with ``compile`` it is the longest segment that the bucket allows (or
    padding that fills a whole sample): one graph per bucket instead of one per batch.
    """
    if not config.compile:
        return int(batch["max_seqlen_q" if "kv_index" in batch else "max_seqlen"])
    capacity = int(batch["capacity"])
    return last_slot(capacity, int(batch.get("row_tokens", capacity)))
