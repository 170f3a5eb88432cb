"""Every backend that can run here computes the definition, forward and backward."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megapack.attention import (
    BACKENDS,
    AttentionNeeds,
    alibi_slopes,
    flex,
    survey,
    varlen_attention,
)
from megapack.attention.flash import TorchFlash
from megapack.attention.problem import Forward, ScoreRule, Segments

from .reference import reference_attention

HAS_CUDA = torch.cuda.is_available()
CUDA_BACKENDS = ["flash3", "flash2", "torch", "flex"]


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

    def rule(self) -> dict[str, object]:
        slopes = alibi_slopes(self.key_heads * self.group) if self.alibi else None
        return {
            "causal": self.causal,
            "window": self.window,
            "softcap": self.softcap,
            "alibi_slopes": slopes,
        }

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


def _run(
    case: Case, backend: str, device: str, dtype: torch.dtype, *, backward: bool = True
) -> None:
    torch.manual_seed(len(case.lengths) + sum(case.lengths))
    total, heads = sum(case.lengths), case.key_heads * case.group
    shapes = [(total, heads), (total, case.key_heads), (total, case.key_heads), (total, heads)]
    # Rounded to the dtype under test, so that the reference sees the same numbers.
    q, k, v, weight = (torch.randn(*s, case.width).to(dtype).double() for s in shapes)
    for x in (q, k, v):
        x.requires_grad_(backward)
    expected = reference_attention(q, k, v, list(case.lengths), **case.rule())  # type: ignore[arg-type]

    bounds = torch.tensor([0, *case.lengths]).cumsum(0)
    bounds = torch.cat([bounds, bounds[-1:].expand(case.repeats)]).to(torch.int32)
    ours = [x.detach().to(device, dtype).requires_grad_(backward) for x in (q, k, v)]
    rule = case.rule()
    if isinstance(rule["alibi_slopes"], Tensor):
        rule["alibi_slopes"] = rule["alibi_slopes"].to(device)
    out = varlen_attention(
        *ours,
        bounds.to(device),
        max_seqlen=max(case.lengths),
        backend=backend,
        **rule,  # type: ignore[arg-type]
    )
    assert out.dtype == dtype and out.shape == q.shape
    tolerance = {torch.float64: 1e-11, torch.float32: 3e-5, torch.bfloat16: 4e-2}[dtype]
    _close(out, expected, tolerance, "output")
    if not backward:
        return
    (expected * weight).sum().backward()
    (out * weight.to(device, dtype)).sum().backward()
    for name, mine, theirs in zip("qkv", ours, (q, k, v), strict=True):
        assert mine.grad is not None and theirs.grad is not None
        _close(mine.grad, theirs.grad, tolerance, f"gradient of {name}")


def _close(got: Tensor, expected: Tensor, tolerance: float, what: str) -> None:
    error = (got.detach().cpu().double() - expected.detach()).abs().max().item()
    scale = max(1.0, expected.detach().abs().max().item())
    assert error <= tolerance * scale, f"{what}: error {error:.2e} against {tolerance * scale:.2e}"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("backend", ["sdpa", "eager"])
@settings(max_examples=25)
@given(case=cases())
def test_cpu_backends_compute_the_definition(backend: str, dtype: torch.dtype, case: Case) -> None:
    if survey(case.needs("cpu", dtype))[backend] is None:
        _run(case, backend, "cpu", dtype)
    else:
        with pytest.raises(ValueError, match="cannot apply a soft cap"):
            _run(case, backend, "cpu", dtype)


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
def test_cpu_backends_in_bfloat16_and_across_row_blocks(backend: str) -> None:
    lengths = (700, 1, 520, 30)  # longer than one block of rows
    _run(Case(lengths=lengths, width=16), backend, "cpu", torch.bfloat16)
    _run(Case(lengths=lengths, window=33, alibi=True), backend, "cpu", torch.float32)
    _run(Case(lengths=lengths, alibi=True), backend, "cpu", torch.bfloat16)


@settings(max_examples=15)
@given(case=cases())
def test_flex_masks_and_scores_are_the_definition(case: Case) -> None:
    # FlexAttention has no backward on the CPU; the gpu test below covers it.
    wide = Case(**{**case.__dict__, "width": 16})
    _run(wide, "flex", "cpu", torch.float32, backward=False)


def test_flex_makes_one_mask_per_batch_and_window(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    original = flex._make_block_mask
    monkeypatch.setattr(flex, "_make_block_mask", lambda *a: made.append(a) or original(*a))
    q = torch.randn(12, 2, 16)
    for batch in range(2):
        bounds = torch.tensor([0, 5 + batch, 12], dtype=torch.int32)
        for _layer in range(3):
            for window in (0, 4):
                varlen_attention(q, q, q, bounds, max_seqlen=7, backend="flex", window=window)
    assert len(made) == 4  # 2 batches x 2 windows, not x 3 layers


@pytest.mark.parametrize("window", [0, 16])
def test_torchs_flash_operators_take_our_arguments(window: int) -> None:
    """On tensors without storage: the operators of this torch, their schema and their shapes."""
    q = torch.empty(40, 8, 64, dtype=torch.bfloat16, device="meta")
    k = torch.empty(40, 2, 64, dtype=torch.bfloat16, device="meta")
    segments = Segments(torch.empty(4, dtype=torch.int32, device="meta"), 20)
    rule = ScoreRule(scale=0.1, window=window)
    out, lse = TorchFlash().forward(q, k, k, segments, rule)
    assert (out.shape, lse.shape, lse.dtype) == (q.shape, (8, 40), torch.float32)
    grads = TorchFlash().backward(out, Forward(q, k, k, out, lse), segments, rule)
    assert [g.shape for g in grads] == [q.shape, k.shape, k.shape]


def test_flex_stands_in_a_compiled_graph() -> None:
    @torch.compile(backend="eager", fullgraph=True)
    def layer(q: Tensor, bounds: Tensor) -> Tensor:
        return varlen_attention(q, q, q, bounds, max_seqlen=9, backend="flex", softcap=2.0)

    q = torch.randn(16, 2, 16)
    for lengths in ([7, 9], [16]):
        bounds = torch.tensor([0, *lengths, *[0] * (2 - len(lengths))]).cumsum(0).to(torch.int32)
        expected = reference_attention(*[q.double()] * 3, lengths, softcap=2.0)
        _close(layer(q, bounds), expected, 1e-5, "output")


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_CUDA, reason="no CUDA device")
@pytest.mark.parametrize("backend", CUDA_BACKENDS)
@settings(max_examples=40)
@given(case=cases(), width=st.sampled_from([64, 128, 256]))
def test_cuda_backends_compute_the_definition(backend: str, case: Case, width: int) -> None:
    wide = Case(**{**case.__dict__, "width": width})
    if survey(wide.needs("cuda", torch.bfloat16))[backend] is None:
        _run(wide, backend, "cuda", torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_CUDA, reason="no CUDA device")
def test_some_cuda_backend_serves_every_model_we_train() -> None:
    plain = Case(lengths=(1,), width=64)
    served = survey(plain.needs("cuda", torch.bfloat16))
    assert any(served[name] is None for name in CUDA_BACKENDS), served
    capped = Case(lengths=(1,), width=256, softcap=50.0, window=4096)
    served = survey(capped.needs("cuda", torch.bfloat16))
    assert any(served[name] is None for name in CUDA_BACKENDS), served


def test_every_backend_is_in_the_survey_in_order_of_preference() -> None:
    needs = Case(lengths=(1,)).needs("cpu", torch.float32)
    assert list(survey(needs)) == list(BACKENDS)


@pytest.mark.parametrize("causal", [True, False])
def test_one_graph_serves_every_segmentation(causal: bool) -> None:
    graphs = []

    def count(graph: torch.fx.GraphModule, _inputs: object) -> object:
        graphs.append(graph)
        return graph.forward

    @torch.compile(backend=count, fullgraph=True)
    def layer(x: Tensor, bounds: Tensor, longest: int) -> Tensor:
        q = (x * 2).view(16, 2, 4)
        return varlen_attention(
            q, q, q, bounds, max_seqlen=longest, backend="sdpa", causal=causal
        ).sum()

    for lengths in ([7, 9], [16, 0], [3, 13]):
        x = torch.randn(16, 8, requires_grad=True)
        bounds = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
        total = layer(x, bounds, 16)
        (grad,) = torch.autograd.grad(total, x)
        q = (x * 2).view(16, 2, 4).double()
        expected = reference_attention(q, q, q, lengths, causal=causal).sum()
        (expected_grad,) = torch.autograd.grad(expected, x)
        assert torch.allclose(total.double(), expected)
        assert torch.allclose(grad, expected_grad, atol=1e-5)
    assert len(graphs) == 1


def test_the_operator_obeys_the_rules_of_custom_operators() -> None:
    q = torch.randn(9, 4, 8, requires_grad=True)
    k = torch.randn(9, 2, 8, requires_grad=True)
    bounds = torch.tensor([0, 4, 9], dtype=torch.int32)
    torch.library.opcheck(
        torch.ops.megapack.varlen_attn.default,
        (q, k, k.detach().clone().requires_grad_(), bounds, None),
        {
            "max_seqlen": 5,
            "scale": 0.3,
            "causal": True,
            "window": 0,
            "softcap": 0.0,
            "backend": "eager",
        },
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )
