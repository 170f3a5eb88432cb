"""flash-attn without a GPU: real attention in plain torch, and a record of every call.

Only the kernel is replaced. The functions have flash-attn's modules and names, so hosts import, and
megapack wraps, the same names as on a GPU.
"""

from __future__ import annotations

import importlib.metadata
import inspect
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
"""Called with boundaries and longest segment of a call; None without boundaries."""


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
) -> Tensor:
    """q ``(batch, row, heads, dim)``, k and v with fewer heads."""
    assert window_size == (-1, -1), "no model here has windows"
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = F.scaled_dot_product_attention(
        q, k, v, dropout_p=dropout_p, is_causal=causal, scale=softmax_scale, enable_gqa=True
    )
    return out.transpose(1, 2)


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
    window_size: tuple[int, int] = (-1, -1),
) -> Tensor:
    """q ``(tokens, heads, dim)``; segments attend to themselves, as all callers here mean it."""
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    assert torch.equal(cu_seqlens_q, cu_seqlens_k) and max_seqlen_q == max_seqlen_k
    bounds = cu_seqlens_q.tolist()
    assert bounds[-1] == q.shape[0]
    assert max_seqlen_q == max(b - a for a, b in pairwise(bounds))
    parts = [
        flash_attn_func(
            q[a:b][None], k[a:b][None], v[a:b][None], dropout_p, softmax_scale, causal, window_size
        )
        for a, b in pairwise(bounds)
    ]
    return torch.cat([part[0] for part in parts])


def put_flash_attn(note: Note) -> None:
    """Make ``flash_attn`` importable for the rest of this process."""

    def noted(*args: Any, **kwargs: Any) -> Tensor:
        note(None, None)
        return flash_attn_func(*args, **kwargs)

    def noted_varlen(q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        given = inspect.signature(flash_attn_varlen_func).bind(q, k, v, *args, **kwargs).arguments
        if not given.get("causal"):
            raise ValueError("causal attention was expected")
        note(given["cu_seqlens_q"], given["max_seqlen_q"])
        return flash_attn_varlen_func(q, k, v, *args, **kwargs)

    interface = {"flash_attn_func": noted, "flash_attn_varlen_func": noted_varlen}
    package = _module("flash_attn", {**interface, "__version__": VERSION, "__path__": []})
    package.flash_attn_interface = _module("flash_attn.flash_attn_interface", interface)  # type: ignore[attr-defined]
    _module("flash_attn.flash_attn_triton", {"flash_attn_func": _not_here})
    stock = importlib.metadata.version
    importlib.metadata.version = lambda name: VERSION if name == "flash-attn" else stock(name)


def _module(name: str, contents: dict[str, Any]) -> ModuleType:
    module = ModuleType(name)
    vars(module).update(contents)
    sys.modules[name] = module
    return module


def _not_here(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("a host calls triton's kernel, which has no meaning on a CPU")
