"""Attention as its formula, segment by segment: any device, any dtype, every rule.

Queries are processed in blocks, so memory grows linearly with the segment, and keys that the mask
hides from a whole block are skipped. Reading ``cu_seqlens`` waits for the device, so faster
backends come first on GPUs.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from megapack.attention.problem import Backend, Forward, ScoreRule, Segments, accumulator

_BLOCK_ROWS = 512


def bounds(segments: Segments, num_tokens: int) -> list[tuple[int, int]]:
    """Return ``(begin, end)`` of every segment that is not empty. Raises ValueError if segments do
    not cover the stream: some tokens would have no result."""
    ends = segments.cu_seqlens.tolist()
    if [*ends[:1], *ends[-1:]] != [0, num_tokens] or ends != sorted(ends):
        raise ValueError(
            f"cu_seqlens is {ends!s:.80}; it must ascend from 0 to {num_tokens}, the tokens of "
            "the stream (padding is a segment)"
        )
    return [(a, b) for a, b in itertools.pairwise(ends) if b > a]


def forward(
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


def backward(
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
    """Yield blocks of query rows, each with the range of keys that they can see."""
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
    """Return scores ``[H, rows, keys]`` ready for softmax, and the derivative of the cap if any.
    ``offset`` is the position of the first row minus that of the first key."""
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


BACKEND = Backend(name="eager", title="the formula", forward=forward, backward=backward)
