"""PyTorch's fused CPU attention, called once per segment: the default on the CPU.

This module calls the kernels behind ``scaled_dot_product_attention``, because they return the
log-sum-exp that the backward needs. The public function keeps it for autograd, which is off inside
a custom operator.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megapack.attention.eager import bounds, sum_groups
from megapack.attention.problem import (
    AttentionNeeds,
    Backend,
    Forward,
    ScoreRule,
    Segments,
    accumulator,
)


def _refusal(needs: AttentionNeeds) -> str | None:
    if needs.device.type == "cpu":
        return None
    return "it is the CPU's backend (per-segment calls would wait for the device)"


def forward(
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


def backward(
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
    """``[T, H, D]`` to ``[1, H, L, D]``: one segment as a batch of one."""
    return x[begin:end].transpose(0, 1).unsqueeze(0)


def _repeated(x: Tensor, begin: int, end: int, num_heads: int) -> Tensor:
    wide = _rows(x, begin, end)
    factor = num_heads // x.shape[1]
    return wide if factor == 1 else wide.repeat_interleave(factor, dim=1)


def _bias(q: Tensor, max_seqlen: int, rule: ScoreRule) -> Tensor | None:
    """The additive bias of the longest segment; a shorter segment's is its top left corner."""
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


BACKEND = Backend(
    name="sdpa",
    title="scaled_dot_product_attention",
    forward=forward,
    backward=backward,
    refusal=_refusal,
    softcap=False,
)
