"""Every backend that can run here computes the definition, forward and backward."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from megapack.attention import (
    BACKENDS,
    AttentionNeeds,
    alibi_slopes,
    choose_backend,
    flex,
    refusals,
    varlen_attention,
)
from megapack.attention.flash import FLASH2
from megapack.attention.problem import ScoreRule
from megapack.errors import ConfigError

from .cases import Case, assert_close, cases, reference_attention, run_case


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
    lengths = (530, 1, 20)  # longer than one block of rows
    run_case(Case(lengths=lengths, width=16), backend, "cpu", torch.bfloat16)
    run_case(Case(lengths=lengths, window=33, alibi=True), backend, "cpu", torch.float32)
    run_case(Case(lengths=lengths, alibi=True), backend, "cpu", torch.bfloat16)


@settings(max_examples=10)
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


def test_flex_works_inside_a_compiled_graph() -> None:
    @torch.compile(backend="eager", fullgraph=True)
    def layer(q: Tensor, bounds: Tensor) -> Tensor:
        return varlen_attention(q, q, q, bounds, max_seqlen=9, backend="flex", softcap=2.0)

    q = torch.randn(16, 2, 16)
    for lengths in ([7, 9], [16]):
        bounds = torch.tensor([0, *lengths, *[0] * (2 - len(lengths))]).cumsum(0).to(torch.int32)
        expected = reference_attention(*[q.double()] * 3, lengths, softcap=2.0)
        assert_close(layer(q, bounds), expected, 1e-5, "output")


def test_backends_are_tried_in_order_of_preference() -> None:
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
        how = {"max_seqlen": longest, "backend": "sdpa", "causal": causal}
        return varlen_attention(q, q, q, bounds, **how).sum()

    torch.manual_seed(0)
    for lengths in ([7, 9], [16, 0], [3, 13]):
        x = torch.randn(16, 8, requires_grad=True)
        bounds = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
        total = layer(x, bounds, max(lengths))
        (grad,) = torch.autograd.grad(total, x)
        q = (x * 2).view(16, 2, 4).double()
        expected = reference_attention(q, q, q, lengths, causal=causal).sum()
        (expected_grad,) = torch.autograd.grad(expected, x)
        assert torch.allclose(total.double(), expected, atol=1e-4)
        # float32 rounds by the size of the summands: of the largest element, not of each.
        assert torch.allclose(grad, expected_grad, atol=1e-5 * float(expected_grad.abs().max()))
    assert len(graphs) <= 2  # the second for any longest segment


def test_operator_passes_opcheck() -> None:
    q = torch.randn(9, 4, 8, requires_grad=True)
    k = torch.randn(9, 2, 8, requires_grad=True)
    bounds = torch.tensor([0, 4, 9], dtype=torch.int32)
    v = k.detach().clone().requires_grad_()
    paths, index = torch.IntTensor([0, 4, 12]), torch.IntTensor([0, 1, 2, 3, 0, 1, 2, *range(4, 9)])
    rule = {"scale": 0.3, "causal": True, "window": 0, "softcap": 0.0}
    how = {"max_seqlen_q": 5, "max_seqlen_k": 8, "backend": "eager", **rule}
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    for segments in ((bounds, bounds, None), (bounds, paths, index)):
        given = (q, k, v, *segments, None)
        torch.library.opcheck(torch.ops.megapack.varlen_attn.default, given, how, test_utils=tests)


# ---- A backend is chosen once, with a reason; what it cannot honour is refused, never ignored


def _needs(**changes: object) -> AttentionNeeds:
    values: dict[str, Any] = {"device": torch.device("cpu"), "dtype": torch.float32}
    values |= {"head_dim": 64, "num_heads": 4, "num_key_value_heads": 2}
    return AttentionNeeds(**{**values, **changes})


def test_a_backend_is_chosen_with_the_reason() -> None:
    choice = choose_backend(_needs())
    assert choice.name == "sdpa"
    assert "flash2: it runs on CUDA devices, not on cpu" in choice.reason
    assert "eager" not in choice.reason  # only what would have been preferred
    choice = choose_backend(_needs(softcap=True))
    assert choice.name == "eager" and "no soft cap" in choice.reason
    assert choose_backend(_needs(), "eager").name == "eager"


@pytest.mark.parametrize(
    ("name", "needs", "message"),
    [
        ("flash2", {}, r"flash2.*not on cpu; available: sdpa, eager"),
        ("sdpa", {"softcap": True}, r"'sdpa' cannot serve .*softcap.*available: eager"),
        ("flash3", {"alibi": True}, "flash-attn 3 has no ALiBi"),
        ("flush", {}, r"'flush' is unknown; choose one of auto, flash3"),
    ],
)
def test_a_backend_that_cannot_serve_is_refused(name: str, needs: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        choose_backend(_needs(**needs), name)


def test_old_flash_attn_is_refused_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package, about = tmp_path / "flash_attn", tmp_path / "flash_attn-2.6.3.dist-info"
    package.mkdir()
    about.mkdir()
    (package / "__init__.py").touch()
    (package / "flash_attn_interface.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    needs = _needs(device=torch.device("cuda"), dtype=torch.bfloat16)
    old = "flash-attn 2.6.3 is older than 2.8"
    for version, refusal in (("2.6.3", old), ("2.8.3.post1", None), ("3.0.0b1", None)):
        (about / "METADATA").write_text(f"Name: flash-attn\nVersion: {version}\n")
        assert FLASH2.refusal(needs) == refusal


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_seqlen": 4, "backend": "nope"}, "'nope' is unknown"),
        ({"softcap": 1.0}, "cannot apply a soft cap"),
        ({"cu_seqlens": torch.tensor([0, 4])}, "int32"),
        *(
            ({"cu_seqlens": torch.IntTensor(ends), "backend": backend}, "ascend from 0")
            for ends in ([0, 3], [1, 4], [0, 5], [0, 3, 2, 4], [])
            for backend in ("sdpa", "eager")
        ),
        ({"key": torch.zeros(4, 3, 8), "value": torch.zeros(4, 3, 8)}, "cannot share"),
        ({"value": torch.zeros(4, 1, 8)}, "must be"),
        ({"alibi_slopes": torch.ones(3)}, "one slope per head"),
        ({"causal": False, "window": 2}, "sliding window without causal"),
        ({"window": -1}, "0 \\(off\\) or more"),
    ],
)
def test_invalid_calls_are_refused(changes: dict[str, object], message: str) -> None:
    arguments: dict[str, Any] = {name: torch.zeros(4, 2, 8) for name in ("key", "value")}
    arguments |= {"query": torch.zeros(4, 4, 8), "cu_seqlens": torch.IntTensor([0, 4])}
    with pytest.raises(ValueError, match=message):
        varlen_attention(**{**arguments, "max_seqlen": 4, "backend": "sdpa", **changes})


def test_heads_that_cannot_be_grouped_are_refused() -> None:
    with pytest.raises(ValueError, match="cannot share"):
        _needs(num_heads=5)
    with pytest.raises(ValueError, match="0 \\(off\\) or more"):
        ScoreRule(scale=1.0, softcap=-1.0)


def test_alibi_slopes_equal_the_published_ones() -> None:
    assert torch.allclose(alibi_slopes(8), torch.tensor([2.0**-i for i in range(1, 9)]))
    twelve = alibi_slopes(12)  # eight of the power below, then every other of sixteen
    assert torch.allclose(twelve[:8], alibi_slopes(8))
    assert torch.allclose(twelve[8:], alibi_slopes(16)[0:8:2])
    with pytest.raises(ValueError, match="at least 1"):
        alibi_slopes(0)
