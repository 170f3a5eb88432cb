"""Every backend that can run here computes the definition, forward and backward."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from megapack.attention import BACKENDS, flex, refusals, varlen_attention

from .cases import Case, assert_close, cases, run_case
from .reference import reference_attention


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("backend", ["sdpa", "eager"])
@settings(max_examples=25)
@given(case=cases())
def test_cpu_backends_compute_the_definition(backend: str, dtype: torch.dtype, case: Case) -> None:
    if refusals(case.needs("cpu", dtype))[backend] is None:
        run_case(case, backend, "cpu", dtype)
    else:
        with pytest.raises(ValueError, match="cannot apply a soft cap"):
            run_case(case, backend, "cpu", dtype)


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
def test_cpu_backends_in_bfloat16_and_across_row_blocks(backend: str) -> None:
    lengths = (700, 1, 520, 30)  # longer than one block of rows
    run_case(Case(lengths=lengths, width=16), backend, "cpu", torch.bfloat16)
    run_case(Case(lengths=lengths, window=33, alibi=True), backend, "cpu", torch.float32)
    run_case(Case(lengths=lengths, alibi=True), backend, "cpu", torch.bfloat16)


@settings(max_examples=15)
@given(case=cases())
def test_flex_masks_and_scores_are_the_definition(case: Case) -> None:
    # FlexAttention has no backward on the CPU; test_cuda.py covers it.
    wide = Case(**{**case.__dict__, "width": 16})
    run_case(wide, "flex", "cpu", torch.float32, backward=False)


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
    bounds[1] = 6  # the same tensor, other segments
    varlen_attention(q, q, q, bounds, max_seqlen=6, backend="flex")
    assert len(made) == 5


def test_flex_stands_in_a_compiled_graph() -> None:
    @torch.compile(backend="eager", fullgraph=True)
    def layer(q: Tensor, bounds: Tensor) -> Tensor:
        return varlen_attention(q, q, q, bounds, max_seqlen=9, backend="flex", softcap=2.0)

    q = torch.randn(16, 2, 16)
    for lengths in ([7, 9], [16]):
        bounds = torch.tensor([0, *lengths, *[0] * (2 - len(lengths))]).cumsum(0).to(torch.int32)
        expected = reference_attention(*[q.double()] * 3, lengths, softcap=2.0)
        assert_close(layer(q, bounds), expected, 1e-5, "output")


def test_every_backend_is_asked_in_order_of_preference() -> None:
    needs = Case(lengths=(1,)).needs("cpu", torch.float32)
    assert list(refusals(needs)) == list(BACKENDS)


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

    torch.manual_seed(0)
    for lengths in ([7, 9], [16, 0], [3, 13]):
        x = torch.randn(16, 8, requires_grad=True)
        bounds = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
        total = layer(x, bounds, 16)
        (grad,) = torch.autograd.grad(total, x)
        q = (x * 2).view(16, 2, 4).double()
        expected = reference_attention(q, q, q, lengths, causal=causal).sum()
        (expected_grad,) = torch.autograd.grad(expected, x)
        assert torch.allclose(total.double(), expected, atol=1e-4)
        # float32 rounds by the size of the summands: of the largest element, not of each.
        assert torch.allclose(grad, expected_grad, atol=1e-5 * float(expected_grad.abs().max()))
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
