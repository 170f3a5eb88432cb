"""FlexAttention: soft cap and ALiBi on CUDA without a flash-attn wheel.

Autograd differentiates it, so ``varlen_attention`` calls it directly and not inside the opaque
operator. Layers with the same window share the block mask of a batch. In a tree, a key is visible
if its node is an ancestor of the query's, so keys are not gathered.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megapack.attention.problem import AttentionNeeds, Backend, ScoreRule, TreeSegments


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


def attend(q: Tensor, k: Tensor, v: Tensor, segments: TreeSegments, rule: ScoreRule) -> Tensor:
    """Compute attention of every row to its path; shapes as in ``varlen_attention``."""
    mask, depth = _block_mask(segments, q.shape[0], rule)
    out: Tensor = _function("flex_attention", q.device.type)(
        q.transpose(0, 1).unsqueeze(0),
        k.transpose(0, 1).unsqueeze(0),
        v.transpose(0, 1).unsqueeze(0),
        score_mod=_score_mod(rule, depth),
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


def _score_mod(rule: ScoreRule, depth: Tensor) -> Callable[..., Tensor] | None:
    alibi_slopes, softcap = rule.alibi_slopes, rule.softcap
    if alibi_slopes is None and not softcap:
        return None

    def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        del b
        if softcap:
            score = torch.tanh(score / softcap) * softcap
        if alibi_slopes is not None:
            score = score - alibi_slopes[h] * (depth[i] - depth[j]).abs()
        return score

    return score_mod


_last_masks: dict[tuple[int, bool, int], tuple[weakref.ref[Tensor], int, tuple[Any, Tensor]]] = {}


def _block_mask(segments: TreeSegments, num_tokens: int, rule: ScoreRule) -> tuple[Any, Tensor]:
    """Return the mask of this batch and window, and the depths of its tokens; reuse the last ones
    for the same segments."""
    if torch.compiler.is_compiling():
        return _make_block_mask(segments, num_tokens, rule)
    identity = segments.cu_seqlens_q if segments.kv_index is None else segments.kv_index
    key = (num_tokens, rule.causal, rule.window)
    known = _last_masks.get(key)
    version = 0 if identity.is_inference() else identity._version
    if known is not None and known[0]() is identity and known[1] == version:
        return known[2]
    mask = _make_block_mask(segments, num_tokens, rule)
    _last_masks[key] = (weakref.ref(identity), version, mask)
    return mask


def _make_block_mask(
    segments: TreeSegments, num_tokens: int, rule: ScoreRule
) -> tuple[Any, Tensor]:
    depth, end = segments.spans(num_tokens)
    create = _function("create_block_mask", segments.device.type)
    mask_mod = _mask_mod(depth, end, rule)
    device = str(segments.device)
    return create(mask_mod, None, None, num_tokens, num_tokens, device=device), depth


def _mask_mod(depth: Tensor, end: Tensor, rule: ScoreRule) -> Callable[..., Tensor]:
    def mask_mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        del b, h
        if not rule.causal:  # documents only: each has another end
            return end[i] == end[j]
        visible = (i >= j) & (i < end[j])
        if rule.window:
            visible = visible & (depth[i] - depth[j] < rule.window)
        return visible

    return mask_mod


def tree_mask(segments: TreeSegments, num_tokens: int, *, window: int = 0) -> Tensor:
    """Return a dense mask, bool ``[1, 1, T, T]``, True where a query (row) sees a key (column).

    The convention is that of torch's scaled_dot_product_attention and of the ``attention_mask`` of
    transformers models with ``attn_implementation="sdpa"``. Memory is quadratic: for short rows and
    for checking backends. ``window`` as in ``varlen_attention``.
    """
    row = torch.arange(num_tokens, device=segments.device)
    rule = ScoreRule(scale=1.0, window=window)
    mask_mod = _mask_mod(*segments.spans(num_tokens), rule)
    return mask_mod(row, row, row[:, None], row)[None, None]


BACKEND = Backend(
    name="flex", title="FlexAttention", forward=attend, backward=None, refusal=_refusal
)
