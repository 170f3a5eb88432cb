"""Faults between the batch and the model, injected into Megatron-LM.

bounds    0 3 8 16       batch: documents of 3, 5 and 8 tokens
shifted   0 4 9 16       one token of the next document is let in
missing   0 8 16         two documents are one
lost      none           all are one
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

Bounds = Callable[[torch.Tensor, Any], torch.Tensor]


def _shifted(bounds: torch.Tensor, positions: Any) -> torch.Tensor:
    return torch.cat([bounds[:1], bounds[1:-1] + 1, bounds[-1:]])


def _missing(bounds: torch.Tensor, positions: Any) -> torch.Tensor:
    return torch.cat([bounds[:1], bounds[2:]])


def _without_windows(bounds: torch.Tensor, positions: Any) -> torch.Tensor:
    begins = positions.flatten()[bounds[:-1].long()] == 0
    return torch.cat([bounds[:-1][begins], bounds[-1:]])


BOUNDS: dict[str, Bounds] = {
    "boundaries shifted": _shifted,
    "a boundary missing": _missing,
    "windows lost": _without_windows,
}


def put_in(fault: str, model_class: Any) -> None:
    """Before the script runs."""
    if fault == "mask shifted":
        _shift_mask()
        return
    stock = model_class.forward

    def forward(model: Any, input_ids: Any, position_ids: Any, *args: Any, **kw: Any) -> Any:
        params = kw["packed_seq_params"]
        if fault == "boundaries lost":
            kw["packed_seq_params"] = None
        else:
            bounds = BOUNDS[fault](params.cu_seqlens_q, position_ids)
            cut = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_kv"), bounds)
            longest = dict.fromkeys(("max_seqlen_q", "max_seqlen_kv"), int(bounds.diff().max()))
            kw["packed_seq_params"] = replace(params, **cut, **longest)
        return stock(model, input_ids, position_ids, *args, **kw)

    model_class.forward = forward


def _shift_mask() -> None:
    """In the script's own loss function, which its forward step finds in its globals."""
    training = importlib.import_module("megatron.training")
    stock = training.pretrain

    @functools.wraps(stock)
    def pretrain(*args: Any, **kwargs: Any) -> Any:
        for names in (getattr(value, "__globals__", {}) for value in args):
            if "loss_func" in names and "forward_step" in names:
                loss = names["loss_func"]
                names["loss_func"] = lambda mask, *rest, loss=loss, **kw: loss(
                    mask.flatten().roll(1).view_as(mask), *rest, **kw
                )
                break
        return stock(*args, **kwargs)

    training.pretrain = pretrain
