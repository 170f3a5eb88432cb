"""flash-attn where there is no GPU: real attention in plain torch, and a note of every call.

Only the kernel is replaced. The functions stand where flash-attn's stand, under its names, so that
what a host imports, and what megapack wraps, is what it imports and wraps on a GPU.
"""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Callable
from itertools import pairwise
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

VERSION = "2.8.3"  # hosts ask for it before they choose a function

Note = Callable[[Tensor | None, int | None], None]
"""Is told the boundaries and the longest segment of a call; None where it had no boundaries."""


def put_flash_attn(note: Note) -> None:
    """Make ``flash_attn`` importable for the rest of this process."""

    def flash_attn_func(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
    ) -> Tensor:
        note(None, None)
        return _attend(q, k, v, dropout_p, softmax_scale, causal)

    def flash_attn_varlen_func(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
    ) -> Tensor:
        if (
            not torch.equal(cu_seqlens_q, cu_seqlens_k)
            or max_seqlen_q != max_seqlen_k
            or not causal
        ):
            raise ValueError("causal attention of segments onto themselves is what was expected")
        note(cu_seqlens_q, max_seqlen_q)
        parts = [
            _attend(q[a:b][None], k[a:b][None], v[a:b][None], dropout_p, softmax_scale, True)[0]
            for a, b in pairwise(cu_seqlens_q.tolist())
        ]
        return torch.cat(parts)

    interface = {
        "flash_attn_func": flash_attn_func,
        "flash_attn_varlen_func": flash_attn_varlen_func,
    }
    package = _module("flash_attn", {**interface, "__version__": VERSION, "__path__": []})
    package.flash_attn_interface = _module("flash_attn.flash_attn_interface", interface)  # type: ignore[attr-defined]
    _module("flash_attn.flash_attn_triton", {"flash_attn_func": _not_here})
    stock = importlib.metadata.version
    importlib.metadata.version = lambda name: VERSION if name == "flash-attn" else stock(name)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float, softmax_scale: float | None, causal: bool
) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = F.scaled_dot_product_attention(
        q, k, v, dropout_p=dropout_p, is_causal=causal, scale=softmax_scale, enable_gqa=True
    )
    return out.transpose(1, 2)


def _module(name: str, contents: dict[str, Any]) -> ModuleType:
    module = ModuleType(name)
    vars(module).update(contents)
    sys.modules[name] = module
    return module


def _not_here(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("a host calls triton's kernel, which has no meaning on a CPU")
