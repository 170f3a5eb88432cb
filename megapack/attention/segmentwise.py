"""Attention segment by segment: by the formula, and with PyTorch's fused CPU kernel.

``EAGER`` computes the formula on any device, in any dtype, with every rule. It processes queries in
blocks, so memory grows linearly with the segment, and skips keys that the mask hides from a whole
block. ``SDPA`` is the default on the CPU. It calls the kernels of ``scaled_dot_product_attention``
directly, because they return the log-sum-exp that the backward pass needs; the public function does
not return it, and autograd is off inside a custom operator.

Both copy ``cu_seqlens`` to the CPU. The copy waits for a GPU, so GPUs prefer the faster backends.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from megapack.attention.problem import (
    AttentionNeeds,
    Backend,
    Forward,
    ScoreRule,
    Segments,
    accumulator,
)

_BLOCK_ROWS = 512


def bounds(segments: Segments, num_tokens: int) -> list[tuple[int, int]]:
    """Return ``(begin, end)`` of every segment that is not empty. Raises ValueError if segments do
    not cover the stream, because some tokens would have no result."""
    ends = segments.cu_seqlens.tolist()
    if [*ends[:1], *ends[-1:]] != [0, num_tokens] or ends != sorted(ends):
        raise ValueError(
            f"cu_seqlens is {ends!s:.80}; it must ascend from 0 to {num_tokens}, the tokens of "
            "the stream (padding is a segment)"
        )
    return [(a, b) for a, b in itertools.pairwise(ends) if b > a]


def formula_forward(
    q: Tensor, k: Tensor, v: Tensor, segments: Segments, rule: ScoreRule
) -> tuple[Tensor, Tensor]:
    out = q.new_empty(q.shape)
    lse = q.new_empty((q.shape[1], q.shape[0]), dtype=accumulator(q))
    for rows, keys in _blocks(segments, len(q), rule):
        scores, _ = _scores(q[rows], k[keys], rows.start - keys.start, rule)
        log_sum = scores.logsumexp(-1)
        weights = (scores - log_sum.unsqueeze(-1)).exp()
        out[rows] = (weights @ _heads(v[keys], q.shape[1])).transpose(0, 1).to(out.dtype)
        lse[:, rows] = log_sum
    return out, lse


def formula_backward(
    grad_out: Tensor, done: Forward, segments: Segments, rule: ScoreRule
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v, out, lse = done
    groups, wide = k.shape[1], accumulator(q)
    grad_q = q.new_empty(q.shape)
    grad_k = k.new_zeros(k.shape, dtype=wide)
    grad_v = v.new_zeros(v.shape, dtype=wide)
    for rows, keys in _blocks(segments, len(q), rule):
        scores, slope = _scores(q[rows], k[keys], rows.start - keys.start, rule)
        weights = (scores - lse[:, rows].unsqueeze(-1)).exp()
        d_out = grad_out[rows].transpose(0, 1).to(wide)
        grad_v[keys] += sum_groups(weights.transpose(1, 2) @ d_out, groups)
        delta = (d_out * out[rows].transpose(0, 1).to(wide)).sum(-1, keepdim=True)
        d_weights = d_out @ _heads(v[keys], q.shape[1]).transpose(1, 2)
        d_scores = weights * (d_weights - delta) * rule.scale
        if slope is not None:
            d_scores = d_scores * slope
        grad_q[rows] = (d_scores @ _heads(k[keys], q.shape[1])).transpose(0, 1).to(q.dtype)
        queries = q[rows].transpose(0, 1).to(wide)
        grad_k[keys] += sum_groups(d_scores.transpose(1, 2) @ queries, groups)
    return grad_q, grad_k.to(k.dtype), grad_v.to(v.dtype)


def _blocks(segments: Segments, num_tokens: int, rule: ScoreRule) -> Iterator[tuple[slice, slice]]:
    """Yield blocks of query rows, each with the range of keys that it attends to."""
    for begin, end in bounds(segments, num_tokens):
        for first in range(begin, end, _BLOCK_ROWS):
            last = min(first + _BLOCK_ROWS, end)
            low = max(begin, first - rule.window + 1) if rule.window else begin
            yield slice(first, last), slice(low, last if rule.causal else end)


def _heads(x: Tensor, num_heads: int) -> Tensor:
    """Map ``[L, Hkv, D]`` to ``[H, L, D]`` in the accumulator's dtype; repeat each key head."""
    wide = x.transpose(0, 1).to(accumulator(x))
    return wide.repeat_interleave(num_heads // x.shape[1], dim=0)


def sum_groups(x: Tensor, groups: int) -> Tensor:
    """Map ``[H, L, D]`` to ``[L, Hkv, D]``: add the gradients of heads that share a key head."""
    return x.reshape(groups, -1, *x.shape[1:]).sum(1).transpose(0, 1)


def _scores(q: Tensor, k: Tensor, offset: int, rule: ScoreRule) -> tuple[Tensor, Tensor | None]:
    """Return scores ``[H, rows, keys]`` ready for softmax, and the derivative of the soft cap or
    None. ``offset`` is the position of the first row minus that of the first key."""
    queries = q.transpose(0, 1).to(accumulator(q))
    scores = queries @ _heads(k, q.shape[1]).transpose(1, 2) * rule.scale
    slope = None
    if rule.softcap:
        squashed = torch.tanh(scores / rule.softcap)
        scores, slope = squashed * rule.softcap, 1 - squashed.square()
    rows = torch.arange(q.shape[0], device=q.device) + offset
    distance = rows.unsqueeze(1) - torch.arange(k.shape[0], device=q.device)
    if rule.alibi_slopes is not None:
        scores = scores - rule.alibi_slopes.to(scores.dtype).view(-1, 1, 1) * distance.abs()
    if (hidden := rule.hides(distance)) is not None:
        scores = scores.masked_fill(hidden, float("-inf"))
    return scores, slope


EAGER = Backend(
    name="eager", title="the formula", forward=formula_forward, backward=formula_backward
)


# ---- PyTorch's fused CPU kernel


def _sdpa_refusal(needs: AttentionNeeds) -> str | None:
    if needs.device.type == "cpu":
        return None
    return "it is the CPU's backend (per-segment calls would wait for the device)"


def sdpa_forward(
    q: Tensor, k: Tensor, v: Tensor, segments: Segments, rule: ScoreRule
) -> tuple[Tensor, Tensor]:
    out = q.new_empty(q.shape)
    lse = q.new_empty((q.shape[1], q.shape[0]), dtype=accumulator(q))
    bias = _bias(q, segments.max_seqlen, rule)
    for begin, end in bounds(segments, len(q)):
        o, s = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            _rows(q, begin, end),
            _repeated(k, begin, end, q.shape[1]),
            _repeated(v, begin, end, q.shape[1]),
            0.0,
            rule.causal and bias is None,
            attn_mask=_corner(bias, end - begin),
            scale=rule.scale,
        )
        out[begin:end] = o[0].transpose(0, 1)
        lse[:, begin:end] = s[0]
    return out, lse


def sdpa_backward(
    grad_out: Tensor, done: Forward, segments: Segments, rule: ScoreRule
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v, out, lse = done
    grad_q, grad_k, grad_v = q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
    bias = _bias(q, segments.max_seqlen, rule)
    for begin, end in bounds(segments, len(q)):
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            _rows(grad_out, begin, end),
            _rows(q, begin, end),
            _repeated(k, begin, end, q.shape[1]),
            _repeated(v, begin, end, q.shape[1]),
            _rows(out, begin, end),
            lse[:, begin:end].unsqueeze(0).contiguous(),
            0.0,
            rule.causal and bias is None,
            attn_mask=_corner(bias, end - begin),
            scale=rule.scale,
        )
        grad_q[begin:end] = dq[0].transpose(0, 1)
        grad_k[begin:end] = sum_groups(dk[0], k.shape[1])
        grad_v[begin:end] = sum_groups(dv[0], v.shape[1])
    return grad_q, grad_k, grad_v


def _rows(x: Tensor, begin: int, end: int) -> Tensor:
    """Map ``[T, H, D]`` to ``[1, H, L, D]``: one segment as a batch of one."""
    return x[begin:end].transpose(0, 1).unsqueeze(0)


def _repeated(x: Tensor, begin: int, end: int, num_heads: int) -> Tensor:
    wide = _rows(x, begin, end)
    factor = num_heads // x.shape[1]
    return wide if factor == 1 else wide.repeat_interleave(factor, dim=1)


def _bias(q: Tensor, max_seqlen: int, rule: ScoreRule) -> Tensor | None:
    """Return the bias of the longest segment; shorter segments use its top left corner."""
    if rule.alibi_slopes is None and not rule.window:
        return None
    position = torch.arange(max_seqlen, device=q.device)
    distance = position.unsqueeze(1) - position
    # Never bfloat16: a distance of 1000 would be rounded to a multiple of 4.
    dtype = accumulator(q)
    if rule.alibi_slopes is None:
        bias = torch.zeros(1, 1, max_seqlen, max_seqlen, dtype=dtype, device=q.device)
    else:
        bias = -rule.alibi_slopes.to(dtype).view(1, -1, 1, 1) * distance.abs()
    if (hidden := rule.hides(distance)) is not None:
        bias = bias.masked_fill(hidden, float("-inf"))
    return bias


def _corner(bias: Tensor | None, length: int) -> Tensor | None:
    return None if bias is None else bias[:, :, :length, :length]


SDPA = Backend(
    name="sdpa",
    title="scaled_dot_product_attention",
    forward=sdpa_forward,
    backward=sdpa_backward,
    refusal=_sdpa_refusal,
    softcap=False,
)
