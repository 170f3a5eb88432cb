"""CUDA backends compute the definition, forward and backward, in bfloat16."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megapack.attention import flex, refusals, varlen_attention

from .cases import Case, cases, run_case
from .tree_cases import Rule, as_batch, forest, run_tree_case

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

BACKENDS = ["flash3", "flash2", "torch", "flex"]
# GQA, a padding segment, repeated entries, and every rule. FlexAttention compiles each pair of
# shape and rule, seconds long, so there are few of them.
FIXED = {
    "plain": Case(lengths=(130, 1, 61, 64), width=64, repeats=3),
    "one segment": Case(lengths=(256,), width=64, repeats=3),
    "not causal": Case(lengths=(100, 28, 128), width=64, causal=False),
    "single tokens": Case(lengths=(1,) * 256, width=64, causal=False, repeats=5),
    "window": Case(lengths=(200, 56), width=64, window=33),
    "soft cap and window": Case(lengths=(90, 166), width=256, softcap=5.0, window=40),
    "ALiBi": Case(lengths=(250, 6), width=64, key_heads=3, group=1, alibi=True),
}


def _run_if_able(case: Case, backend: str, dtype: torch.dtype = torch.bfloat16) -> None:
    problem = refusals(case.needs("cuda", dtype))[backend]
    if problem is not None:
        pytest.skip(problem)
    run_case(case, backend, "cuda", dtype)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", FIXED)
def test_cuda_backends_compute_the_definition(backend: str, name: str) -> None:
    _run_if_able(FIXED[name], backend)


def test_flex_serves_float32_at_the_widest_head() -> None:
    _run_if_able(FIXED["soft cap and window"], "flex", torch.float32)


# Not flex: every shape is a compilation.
@pytest.mark.parametrize("backend", ["flash3", "flash2", "torch"])
@settings(max_examples=60, deadline=None)
@given(case=cases(), width=st.sampled_from([64, 80, 128, 256]))
def test_kernels_compute_the_definition(backend: str, case: Case, width: int) -> None:
    wide = Case(**{**case.__dict__, "width": width})
    needs = wide.needs("cuda", torch.bfloat16)
    if refusals(needs)[backend] is None:
        run_case(wide, backend, "cuda", torch.bfloat16)


TREE_RULES = [Rule(), Rule(window=5), Rule(softcap=5.0, window=9), Rule(alibi=True)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rule", TREE_RULES)
def test_cuda_backends_compute_trees(backend: str, rule: Rule) -> None:
    case = Case(lengths=(1,), width=64, window=rule.window, softcap=rule.softcap, alibi=rule.alibi)
    problem = refusals(case.needs("cuda", torch.bfloat16))[backend]
    if problem is not None:
        pytest.skip(problem)
    large = forest(1)  # nodes and paths beyond one block of a kernel
    large = {n: [*range(7)] * 60 + tokens * 30 for n, tokens in large.items()}
    for seed in (0, 1) if backend == "flex" else range(24):
        batch = as_batch(large if seed == 0 else forest(seed), seed)
        how = {"device": "cuda", "shape": (4, 2, 64)}
        run_tree_case(batch, rule, backend, torch.bfloat16, **how)


def test_every_model_has_a_backend() -> None:
    for case in (
        Case(lengths=(1,), width=64),
        Case(lengths=(1,), width=256, softcap=50.0, window=4096),
        Case(lengths=(1,), width=64, alibi=True),
    ):
        served = refusals(case.needs("cuda", torch.bfloat16))
        assert any(served[name] is None for name in BACKENDS), served


def test_flex_never_holds_all_scores_of_any_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond torch's limit of graphs it would run uncompiled, with 4 bytes per head and pair."""
    monkeypatch.setattr(torch._dynamo.config, "recompile_limit", 2)
    flex._compiled.cache_clear()
    for length in (8192, 8320, 8448):
        q = torch.randn(length, 2, 64, device="cuda", dtype=torch.bfloat16)
        bounds = torch.tensor([0, length // 3, length], dtype=torch.int32, device="cuda")
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with torch.no_grad():
            varlen_attention(q, q, q, bounds, max_seqlen=length, backend="flex")
        used = torch.cuda.max_memory_allocated() - before
        assert used < 2 * length**2, f"{used} bytes for {length} tokens"
