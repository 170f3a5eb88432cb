"""FlexAttention: soft cap and ALiBi on CUDA without a flash-attn wheel.

Autograd differentiates it, so ``varlen_attention`` calls it directly and not inside the opaque
operator. Layers with the same window share the block mask of a batch.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megapack.attention.problem import AttentionNeeds, Backend, ScoreRule, Segments


def _refusal(needs: AttentionNeeds) -> str | None:
    if needs.device.type != "cuda":
        return f"FlexAttention has no backward on {needs.device.type}"
    if needs.head_dim < 16:
        return f"head_dim {needs.head_dim} is below 16, the smallest that its kernels take"
    try:
        import torch.nn.attention.flex_attention  # noqa: F401, PLC0415
    except ImportError as error:
        return f"this torch has no FlexAttention ({error})"
    return None


def attend(q: Tensor, k: Tensor, v: Tensor, segments: Segments, rule: ScoreRule) -> Tensor:
    """Compute attention inside each segment; shapes as in ``varlen_attention``."""
    mask = _block_mask(segments.cu_seqlens, q.shape[0], rule)
    out: Tensor = _function("flex_attention", q.device.type)(
        q.transpose(0, 1).unsqueeze(0),
        k.transpose(0, 1).unsqueeze(0),
        v.transpose(0, 1).unsqueeze(0),
        score_mod=_score_mod(rule),
        block_mask=mask,
        scale=rule.scale,
        enable_gqa=q.shape[1] != k.shape[1],
        # Below 128 tokens torch would choose its decoding kernel, which refuses some lengths.
        kernel_options={"FORCE_USE_FLEX_ATTENTION": True},
    )
    return out[0].transpose(0, 1)


def _function(name: str, device_type: str) -> Callable[..., Any]:
    """Return a function of the FlexAttention module, compiled on CUDA."""
    # Uncompiled functions hold all T x T scores or mask entries in memory, which only tests on the
    # CPU can afford. If the caller is being compiled, torch inlines the uncompiled functions.
    if torch.compiler.is_compiling() or device_type != "cuda":
        return _plain(name)
    return _compiled(name)


def _plain(name: str) -> Callable[..., Any]:
    import torch.nn.attention.flex_attention as module  # noqa: PLC0415

    function: Callable[..., Any] = getattr(module, name)
    return function


@functools.cache
def _compiled(name: str) -> Callable[..., Any]:
    """Compile one graph per length, window and grad mode; never fall back to uncompiled code."""
    # dynamic=False, because symbolic lengths fail inside torch 2.11. A model with windows needs
    # more graphs than the default limit of 8; above the limit torch.compile would silently not
    # compile.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)
    return torch.compile(_plain(name), fullgraph=True, dynamic=False)


def _score_mod(rule: ScoreRule) -> Callable[..., Tensor] | None:
    alibi_slopes, softcap = rule.alibi_slopes, rule.softcap
    if alibi_slopes is None and not softcap:
        return None

    def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        del b
        if softcap:
            score = torch.tanh(score / softcap) * softcap
        if alibi_slopes is not None:
            score = score - alibi_slopes[h] * (i - j).abs()
        return score

    return score_mod


_last_masks: dict[tuple[int, bool, int], tuple[weakref.ref[Tensor], int, Any]] = {}


def _block_mask(cu_seqlens: Tensor, num_tokens: int, rule: ScoreRule) -> Any:
    """Return the mask of this batch and window; reuse the last one for the same cu_seqlens."""
    if torch.compiler.is_compiling():
        return _make_block_mask(cu_seqlens, num_tokens, rule)
    key = (num_tokens, rule.causal, rule.window)
    known = _last_masks.get(key)
    version = 0 if cu_seqlens.is_inference() else cu_seqlens._version
    if known is not None and known[0]() is cu_seqlens and known[1] == version:
        return known[2]
    mask = _make_block_mask(cu_seqlens, num_tokens, rule)
    _last_masks[key] = (weakref.ref(cu_seqlens), version, mask)
    return mask


def _make_block_mask(cu_seqlens: Tensor, num_tokens: int, rule: ScoreRule) -> Any:
    position = torch.arange(num_tokens, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    segment = torch.searchsorted(cu_seqlens, position, right=True)

    def mask_mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        del b, h
        visible = segment[i] == segment[j]
        if rule.causal:
            visible = visible & (i >= j)
        if rule.window:
            visible = visible & (i - j < rule.window)
        return visible

    create = _function("create_block_mask", cu_seqlens.device.type)
    return create(mask_mod, None, None, num_tokens, num_tokens, device=str(cu_seqlens.device))


BACKEND = Backend(
    name="flex", title="FlexAttention", forward=attend, backward=None, refusal=_refusal
)
