"""Attention node by node: by the formula, and with PyTorch's fused CPU kernel.

``EAGER`` computes the formula on any device, in any dtype, with every rule. It processes queries in
blocks, so memory grows linearly with the path, and skips keys that the mask hides from a whole
block. ``SDPA`` is the default on the CPU. It calls the kernels of ``scaled_dot_product_attention``
directly, because they return the log-sum-exp that the backward pass needs; the public function does
not return it, and autograd is off inside a custom operator.

Both copy ``cu_seqlens`` to the CPU. The copy waits for a GPU, so GPUs prefer the faster backends.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from megapack.attention.problem import (
    AttentionNeeds,
    Backend,
    Forward,
    ScoreRule,
    TreeSegments,
    accumulator,
)

_BLOCK_ROWS = 512


class Node(NamedTuple):
    """Rows of the queries of a node, and rows of its path among the keys."""

    begin: int
    end: int
    path_begin: int
    path_end: int


def nodes(segments: TreeSegments, num_tokens: int, num_keys: int) -> list[Node]:
    """Return the nodes that are not empty. Raises ValueError if the nodes do not cover the row
    (some tokens would have no result), or if a path is shorter than its node."""
    if segments.kv_index is None:
        bounds = _bounds("cu_seqlens", segments.cu_seqlens_q, num_tokens, "stream")
        return [Node(a, b, a, b) for a, b in bounds if b > a]
    bounds = _bounds("cu_seqlens_q", segments.cu_seqlens_q, num_tokens, "stream")
    paths = _bounds("cu_seqlens_k", segments.cu_seqlens_k, num_keys, "paths")
    listed = [Node(*rows, *path) for rows, path in zip(bounds, paths, strict=True)]
    for begin, end, path_begin, path_end in listed:
        if path_end - path_begin < end - begin:
            raise ValueError(
                f"the node of rows {begin} to {end} has a path of {path_end - path_begin} tokens; "
                "a path includes its node"
            )
    return [node for node in listed if node.end > node.begin]


def _bounds(name: str, cu_seqlens: Tensor, last: int, of: str) -> Iterator[tuple[int, int]]:
    ends = cu_seqlens.tolist()
    if [*ends[:1], *ends[-1:]] != [0, last] or ends != sorted(ends):
        raise ValueError(
            f"{name} is {ends!s:.80}; it must ascend from 0 to {last}, the tokens of the {of} "
            "(padding is a segment)"
        )
    return itertools.pairwise(ends)


def formula_forward(
    q: Tensor, k: Tensor, v: Tensor, segments: TreeSegments, rule: ScoreRule
) -> tuple[Tensor, Tensor]:
    out = q.new_empty(q.shape)
    lse = q.new_empty((q.shape[1], q.shape[0]), dtype=accumulator(q))
    for rows, keys, offset in _blocks(nodes(segments, len(q), len(k)), rule):
        scores, _ = _scores(q[rows], k[keys], offset, rule)
        log_sum = scores.logsumexp(-1)
        weights = (scores - log_sum.unsqueeze(-1)).exp()
        out[rows] = (weights @ _heads(v[keys], q.shape[1])).transpose(0, 1).to(out.dtype)
        lse[:, rows] = log_sum
    return out, lse


def formula_backward(
    grad_out: Tensor, done: Forward, segments: TreeSegments, rule: ScoreRule
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v, out, lse = done
    groups, wide = k.shape[1], accumulator(q)
    grad_q = q.new_empty(q.shape)
    grad_k = k.new_zeros(k.shape, dtype=wide)
    grad_v = v.new_zeros(v.shape, dtype=wide)
    for rows, keys, offset in _blocks(nodes(segments, len(q), len(k)), rule):
        scores, slope = _scores(q[rows], k[keys], offset, rule)
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


def _blocks(listed: list[Node], rule: ScoreRule) -> Iterator[tuple[slice, slice, int]]:
    """Yield blocks of query rows, the range of keys that each attends to, and the position of its
    first row minus that of its first key."""
    for node in listed:
        shift = node.path_end - node.end  # row i of the queries is row i + shift of the keys
        for first in range(node.begin, node.end, _BLOCK_ROWS):
            last = min(first + _BLOCK_ROWS, node.end)
            low = node.path_begin
            if rule.window:
                low = max(low, first + shift - rule.window + 1)
            high = last + shift if rule.causal else node.path_end
            yield slice(first, last), slice(low, high), first + shift - low


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
    return "it runs on the CPU only (on a GPU, each per-segment call would wait for the device)"


def sdpa_forward(
    q: Tensor, k: Tensor, v: Tensor, segments: TreeSegments, rule: ScoreRule
) -> tuple[Tensor, Tensor]:
    out = q.new_empty(q.shape)
    lse = q.new_empty((q.shape[1], q.shape[0]), dtype=accumulator(q))
    bias = _bias(q, segments, rule)
    for node in nodes(segments, len(q), len(k)):
        path, mask = slice(*node[2:]), _mask(bias, node, rule)
        o, s = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            _batch(q[node.begin : node.end]),
            _repeated(k[path], q.shape[1]),
            _repeated(v[path], q.shape[1]),
            0.0,
            rule.causal and mask is None,
            attn_mask=mask,
            scale=rule.scale,
        )
        out[node.begin : node.end] = o[0].transpose(0, 1)
        lse[:, node.begin : node.end] = s[0]
    return out, lse


def sdpa_backward(
    grad_out: Tensor, done: Forward, segments: TreeSegments, rule: ScoreRule
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v, out, lse = done
    grad_q, grad_k, grad_v = q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
    bias = _bias(q, segments, rule)
    for node in nodes(segments, len(q), len(k)):
        rows, path, mask = slice(*node[:2]), slice(*node[2:]), _mask(bias, node, rule)
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            _batch(grad_out[rows]),
            _batch(q[rows]),
            _repeated(k[path], q.shape[1]),
            _repeated(v[path], q.shape[1]),
            _batch(out[rows]),
            lse[:, rows].unsqueeze(0).contiguous(),
            0.0,
            rule.causal and mask is None,
            attn_mask=mask,
            scale=rule.scale,
        )
        grad_q[rows] = dq[0].transpose(0, 1)
        grad_k[path] = sum_groups(dk[0], k.shape[1])
        grad_v[path] = sum_groups(dv[0], v.shape[1])
    return grad_q, grad_k, grad_v


def _batch(x: Tensor) -> Tensor:
    """Map ``[L, H, D]`` to ``[1, H, L, D]``: one node or path as a batch of one."""
    return x.transpose(0, 1).unsqueeze(0)


def _repeated(x: Tensor, num_heads: int) -> Tensor:
    factor = num_heads // x.shape[1]
    return _batch(x) if factor == 1 else _batch(x).repeat_interleave(factor, dim=1)


def _bias(q: Tensor, segments: TreeSegments, rule: ScoreRule) -> Tensor | None:
    """Return the bias of the longest node and path, both aligned to the end. None: no node needs
    one."""
    if rule.alibi_slopes is None and not rule.window and segments.kv_index is None:
        return None
    position = torch.arange(segments.max_seqlen_k, device=q.device)
    distance = position[-segments.max_seqlen_q :].unsqueeze(1) - position
    # Never bfloat16: a distance of 1000 would be rounded to a multiple of 4.
    dtype = accumulator(q)
    if rule.alibi_slopes is None:
        bias = torch.zeros(1, 1, *distance.shape, dtype=dtype, device=q.device)
    else:
        bias = -rule.alibi_slopes.to(dtype).view(1, -1, 1, 1) * distance.abs()
    if (hidden := rule.hides(distance)) is not None:
        bias = bias.masked_fill(hidden, float("-inf"))
    return bias


def _mask(bias: Tensor | None, node: Node, rule: ScoreRule) -> Tensor | None:
    """Return the bias of a node, the last rows and columns of ``bias``. None: the kernel's causal
    mask is enough. That mask is aligned to the first key, so it only fits roots."""
    rows, keys = node.end - node.begin, node.path_end - node.path_begin
    if bias is None or (rows == keys and rule.alibi_slopes is None and not rule.window):
        return None
    return bias[:, :, -rows:, -keys:]


SDPA = Backend(
    name="sdpa",
    title="scaled_dot_product_attention",
    forward=sdpa_forward,
    backward=sdpa_backward,
    refusal=_sdpa_refusal,
    softcap=False,
)
