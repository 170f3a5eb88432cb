"""The definition: one dense float64 softmax over the whole stream, masked to segments."""

from __future__ import annotations

import torch
from torch import Tensor


def reference_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: list[int],
    *,
    causal: bool = True,
    window: int = 0,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
) -> Tensor:
    """q ``[T, H, D]``, k and v ``[T, Hkv, D]`` in float64, on the CPU."""
    num_tokens, num_heads, width = q.shape
    segment = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    position = torch.arange(num_tokens)
    distance = position[:, None] - position[None, :]
    visible = segment[:, None] == segment[None, :]
    if causal:
        visible &= distance >= 0
    if window:
        visible &= distance < window
    factor = num_heads // k.shape[1]
    keys, values = (x.repeat_interleave(factor, dim=1) for x in (k, v))
    scores = torch.einsum("ihd,jhd->hij", q, keys) * width**-0.5
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if alibi_slopes is not None:
        scores = scores - alibi_slopes.double()[:, None, None] * distance.abs()
    weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
    return torch.einsum("hij,jhd->ihd", weights, values)
