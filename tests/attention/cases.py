"""Problems for attention backends, and their comparison with the definition."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from megapack.attention import AttentionNeeds, alibi_slopes, varlen_attention


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
    """The definition: one dense float64 softmax over the whole stream, masked to segments.

    q is ``[T, H, D]``, k and v are ``[T, Hkv, D]``.
    """
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


@dataclass(frozen=True)
class Case:
    lengths: tuple[int, ...]  # the last one is the padding segment when there is one
    key_heads: int = 2
    group: int = 2
    width: int = 8
    causal: bool = True
    window: int = 0
    softcap: float = 0.0
    alibi: bool = False
    repeats: int = 0  # how often cu_seqlens repeats its last entry

    def rule(self, device: str) -> dict[str, Any]:
        heads = self.key_heads * self.group
        slopes = alibi_slopes(heads).to(device) if self.alibi else None
        rule = {"causal": self.causal, "window": self.window, "softcap": self.softcap}
        return {**rule, "alibi_slopes": slopes}

    def needs(self, device: str, dtype: torch.dtype) -> AttentionNeeds:
        return AttentionNeeds(
            device=torch.device(device),
            dtype=dtype,
            head_dim=self.width,
            num_heads=self.key_heads * self.group,
            num_key_value_heads=self.key_heads,
            window=bool(self.window),
            softcap=bool(self.softcap),
            alibi=self.alibi,
        )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    causal = draw(st.booleans())
    return Case(
        lengths=tuple(draw(st.lists(st.integers(1, 40), min_size=1, max_size=6))),
        key_heads=draw(st.sampled_from([1, 2, 3])),
        group=draw(st.sampled_from([1, 2, 4])),
        width=draw(st.sampled_from([4, 8, 16])),
        causal=causal,
        window=draw(st.sampled_from([0, 1, 5, 16])) if causal else 0,
        softcap=draw(st.sampled_from([0.0, 0.7, 5.0])),
        alibi=draw(st.booleans()),
        repeats=draw(st.sampled_from([0, 3])),
    )


def run_case(
    case: Case, backend: str, device: str, dtype: torch.dtype, *, backward: bool = True
) -> None:
    """Output and gradients of ``backend`` are those of the definition in float64."""
    torch.manual_seed(len(case.lengths) + sum(case.lengths))
    total, heads = sum(case.lengths), case.key_heads * case.group
    shapes = [(total, heads), (total, case.key_heads), (total, case.key_heads), (total, heads)]
    # Rounded to the dtype under test, so that the reference sees the same numbers.
    q, k, v, weight = (torch.randn(*s, case.width).to(dtype).double() for s in shapes)
    for x in (q, k, v):
        x.requires_grad_(backward)
    expected = reference_attention(q, k, v, list(case.lengths), **case.rule("cpu"))

    bounds = torch.tensor([0, *case.lengths]).cumsum(0)
    bounds = torch.cat([bounds, bounds[-1:].expand(case.repeats)]).to(torch.int32)
    ours = [x.detach().to(device, dtype).requires_grad_(backward) for x in (q, k, v)]
    how = {"max_seqlen": max(case.lengths), "backend": backend, **case.rule(device)}
    out = varlen_attention(*ours, bounds.to(device), **how)
    assert out.dtype == dtype and out.shape == q.shape
    tolerance = {torch.float64: 1e-11, torch.float32: 3e-5, torch.bfloat16: 4e-2}[dtype]
    assert_close(out, expected, tolerance, "output")
    if not backward:
        return
    (expected * weight).sum().backward()
    (out * weight.to(device, dtype)).sum().backward()
    for name, mine, theirs in zip("qkv", ours, (q, k, v), strict=True):
        assert mine.grad is not None and theirs.grad is not None
        assert_close(mine.grad, theirs.grad, tolerance, f"gradient of {name}")


def assert_close(got: Tensor, expected: Tensor, tolerance: float, what: str) -> None:
    error = (got.detach().cpu().double() - expected.detach()).abs().max().item()
    scale = max(1.0, expected.detach().abs().max().item())
    assert error <= tolerance * scale, f"{what}: error {error:.2e} against {tolerance * scale:.2e}"
