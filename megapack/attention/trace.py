"""What a model makes of a row of documents: every module's output, position by position."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from megapack.attention.transformers_interface import varlen_arguments

__all__ = ["Row", "Trace", "difference", "joined", "plain_arguments", "trace"]

# What every module gave, float32 ``[T, ...]`` by name, in the order in which they finished; the
# last is "", the logits.
Trace: TypeAlias = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Row:
    """Documents in one row, as a model in training gets them."""

    tokens: Tensor
    """``[1, T]`` int64."""
    labels: Tensor
    """``[1, T]`` int64: the next token of the same document, -100 at its last."""
    position_ids: Tensor
    """``[1, T]`` int64, from 0 in every document."""
    cu_seqlens: Tensor
    """``[documents + 1]`` int32."""
    max_seqlen: int

    @staticmethod
    def of(documents: list[Tensor]) -> Row:
        """``documents``: int64 ``[L]`` each, on one device."""
        lengths, device = [len(tokens) for tokens in documents], documents[0].device
        labels = [nn.functional.pad(tokens[1:], (0, 1), value=-100) for tokens in documents]
        ends = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)
        positions = [torch.arange(length, device=device) for length in lengths]
        return Row(
            tokens=torch.cat(documents).unsqueeze(0),
            labels=torch.cat(labels).unsqueeze(0),
            position_ids=torch.cat(positions).unsqueeze(0),
            cu_seqlens=ends,
            max_seqlen=max(lengths),
        )

    def to(self, device: torch.device) -> Row:
        """The same row there."""
        return Row(
            tokens=self.tokens.to(device),
            labels=self.labels.to(device),
            position_ids=self.position_ids.to(device),
            cu_seqlens=self.cu_seqlens.to(device),
            max_seqlen=self.max_seqlen,
        )

    def arguments(self) -> dict[str, Any]:
        """Of a transformers model's forward."""
        return {
            "input_ids": self.tokens,
            "position_ids": self.position_ids,
            **varlen_arguments(self.cu_seqlens, self.max_seqlen),
        }


def plain_arguments(tokens: Tensor) -> dict[str, Any]:
    """Of a forward of one document ``[L]`` as anybody calls it."""
    return {"input_ids": tokens.unsqueeze(0), "use_cache": False}


def trace(model: Any, arguments: dict[str, Any]) -> Trace:
    """Run without gradients; see ``Trace``."""
    length = arguments["input_ids"].shape[1]
    found: Trace = {}

    def keep(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            del module, inputs
            value = output[0] if isinstance(output, tuple) else output
            if isinstance(value, Tensor) and value.is_floating_point() and value.dim() > 1:
                if value.shape[:2] == (1, length):
                    found.setdefault(name, value[0].detach().float())
                elif value.shape[0] == length:
                    found.setdefault(name, value.detach().float())

        return hook

    hooks = [
        module.register_forward_hook(keep(name)) for name, module in model.named_modules() if name
    ]
    try:
        with torch.no_grad():
            logits = model(**arguments).logits
    finally:
        for hook in hooks:
            hook.remove()
    return {**found, "": logits[0].float()}


def joined(traces: Iterable[Trace]) -> Trace:
    """Of documents one by one, as one row."""
    listed = list(traces)
    names = [name for name in listed[0] if all(name in trace for trace in listed)]
    return {name: torch.cat([trace[name] for trace in listed]) for name in names}


def difference(ours: Tensor, theirs: Tensor) -> float:
    """The largest, in standard deviations of ``theirs``."""
    if ours.shape != theirs.shape:
        return float("inf")
    return float((ours - theirs).abs().max() / theirs.std().clamp(min=1e-6))
