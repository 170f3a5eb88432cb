"""A plan keeps its laws for any step, balances it, and is the same for whoever computes it."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import FrozenInstanceError
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from reference.planning import broken_laws, costs

import megapack
from megapack.compare.cost import MODELS
from megapack.planning import StepPlan, plan_step

LINEAR_LENGTH = 49_152.0  # 12 x 4,096


def web_lengths(num_tokens: int, seed: int, longest: int) -> Any:
    """A log-normal body and a heavy tail, as of web pages, up to a number of tokens."""
    generator = np.random.default_rng(seed)
    body = np.exp(6.4 + 0.85 * generator.standard_normal(num_tokens // 300))
    tail = 6000 * (1 + generator.pareto(2.0, body.size))
    lengths = np.where(generator.random(body.size) < 0.014, tail, body).astype(np.int64)
    lengths = np.clip(lengths, 56, longest)
    return lengths[np.cumsum(lengths) <= num_tokens]


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[int], dict[str, int]]:
    num_ranks = draw(st.integers(1, 13))
    degrees = [d for d in (1, 2, 4, 8) if d <= num_ranks]
    max_degree = draw(st.sampled_from(degrees))
    max_tokens = draw(st.integers(1, 40))
    longest = draw(st.integers(1, max_degree * max_tokens))
    lengths = draw(st.lists(st.integers(1, longest), max_size=60))
    rules = {
        "num_ranks": num_ranks,
        "max_tokens_per_rank": max_tokens,
        "max_degree": max_degree,
        "max_documents_per_rank": draw(st.integers(1, 8)),
        "linear_length": draw(st.sampled_from([0, 10, 1 << 28])),
    }
    return lengths, rules


@given(step=steps())
def test_any_step_keeps_the_laws(step: tuple[list[int], dict[str, int]]) -> None:
    lengths, rules = step
    plan = plan_step(lengths, **rules)
    assert plan.lengths.tolist() == lengths
    assert not broken_laws(
        plan,
        rules["max_tokens_per_rank"],
        rules["max_degree"],
        rules["max_documents_per_rank"],
    )
    needed = -(-sum(lengths) // (rules["num_ranks"] * rules["max_tokens_per_rank"]))
    assert needed <= plan.num_micro_batches <= len(lengths)


@given(step=steps(), linear_length=st.sampled_from([0.0, 7.5, 1e6]))
def test_costs_and_ranks_are_those_of_the_definition(
    step: tuple[list[int], dict[str, int]], linear_length: float
) -> None:
    lengths, rules = step
    plan = plan_step(lengths, **rules)
    wanted = np.array(costs(plan, linear_length)).reshape(-1, plan.num_ranks)
    assert np.allclose(plan.cost(linear_length), wanted, rtol=1e-9, atol=1e-3)
    path = plan.critical_path(linear_length)
    if lengths:
        ideal = wanted.sum() / plan.num_ranks
        assert path.per_micro_batch == pytest.approx(wanted.max(axis=1).sum() / ideal)
        assert path.per_step == pytest.approx(wanted.sum(axis=0).max() / ideal)
    for rank in range(plan.num_ranks):
        batches = plan.of_rank(rank)
        assert len(batches) == plan.num_micro_batches
        for number, documents in enumerate(batches):
            held = [
                i
                for i in range(len(lengths))
                if plan.micro_batch[i] == number
                and plan.first_rank[i] <= rank < plan.first_rank[i] + plan.degree[i]
            ]
            assert documents.tolist() == held


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("num_ranks", [16, 64])
def test_web_documents_fill_the_fewest_micro_batches_and_balance(num_ranks: int, seed: int) -> None:
    """Steps full but for less than a document; documents up to 16 times a rank's budget."""
    lengths = web_lengths(num_ranks * 8 * 8192, seed, 131_072)
    assert lengths.sum() > 0.99 * num_ranks * 8 * 8192 and lengths.max() > 8192
    rules = {"num_ranks": num_ranks, "max_tokens_per_rank": 8192, "max_degree": num_ranks}
    plan = plan_step(lengths, **rules)
    assert not broken_laws(plan, 8192, num_ranks, len(lengths))
    assert plan.num_micro_batches == 8
    assert plan.critical_path(0.0).per_micro_batch < 1.15
    assert plan.critical_path(LINEAR_LENGTH).per_micro_batch < 1.015


def test_data_parallel_ranks_get_equal_work_under_a_strict_budget() -> None:
    """As RL and SFT need it: prompts and answers of any length, no document shared."""
    for num_ranks, max_tokens in ((8, 32_768), (8, 16_384)):
        lengths = np.random.default_rng(5).integers(200, 8000, 1024)
        plan = plan_step(lengths, num_ranks=num_ranks, max_tokens_per_rank=max_tokens)
        assert set(plan.degree.tolist()) == {1}
        assert plan.num_micro_batches == -(-int(lengths.sum()) // (num_ranks * max_tokens))
        assert plan.tokens.max() <= max_tokens
        assert plan.critical_path(LINEAR_LENGTH).per_micro_batch < 1.02


def test_long_documents_are_shared_by_the_fewest_ranks_that_hold_them() -> None:
    lengths = [100] * 16 + [801]
    plan = plan_step(lengths, num_ranks=8, max_tokens_per_rank=400, max_degree=8)
    assert plan.num_micro_batches == 1 and plan.degree[16] >= 4
    # Attention alone: a document that makes most of it is shared by all. A model whose linear
    # layers cost a thousand times as much gains nothing by that.
    rules = {"num_ranks": 16, "max_tokens_per_rank": 100, "max_degree": 16}
    lengths = [150] + [10] * 100
    assert plan_step(lengths, **rules).degree[0] == 16
    plan = plan_step(lengths, **rules, linear_length=150_000)
    assert plan.degree.tolist() == [2] + [1] * 100


def test_where_documents_do_not_fit_beside_each_other_more_micro_batches_are_taken() -> None:
    """Five of 5,000 tokens on four ranks of 8,192: one micro batch has the tokens, not the room."""
    plan = plan_step([5000] * 5, num_ranks=4, max_tokens_per_rank=8192)
    assert plan.num_micro_batches == 2
    # Shared, they fit.
    plan = plan_step([5000] * 5, num_ranks=4, max_tokens_per_rank=8192, max_degree=4)
    assert plan.num_micro_batches == 1


def test_the_cap_on_documents_makes_micro_batches() -> None:
    plan = plan_step([1] * 20, num_ranks=2, max_tokens_per_rank=100, max_documents_per_rank=2)
    assert plan.num_micro_batches == 5
    assert not broken_laws(plan, 100, 1, 2)


def test_order_of_documents_of_one_length_alone_decides_ties() -> None:
    """Another order of the documents gives the same groups of lengths."""
    lengths = web_lengths(16 * 2 * 4096, 1, 4096)
    rules: dict[str, Any] = {"num_ranks": 16, "max_tokens_per_rank": 4096}

    def contents(plan: StepPlan) -> list[list[int]]:
        return [
            sorted(plan.lengths[documents].tolist())
            for rank in range(16)
            for documents in plan.of_rank(rank)
        ]

    shuffled = np.random.default_rng(0).permutation(lengths)
    assert shuffled.tolist() != lengths.tolist()
    assert contents(plan_step(lengths, **rules)) == contents(plan_step(shuffled, **rules))


def digest(plan: StepPlan) -> str:
    arrays = (plan.first_rank, plan.degree, plan.micro_batch)
    return hashlib.sha256(b"".join(array.tobytes() for array in arrays)).hexdigest()


def test_threads_and_processes_compute_the_same_plan() -> None:
    rules = "num_ranks=16, max_tokens_per_rank=1024, max_degree=8"
    call = f"plan_step([37 * i % 1999 + 1 for i in range(500)], {rules})"
    wanted = digest(eval(call))
    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(lambda _: digest(eval(call)), range(8))) == {wanted}
    program = (
        "import hashlib; from megapack import plan_step; "
        f"p = {call}; "
        "print(hashlib.sha256(b''.join(a.tobytes() for a in "
        "(p.first_rank, p.degree, p.micro_batch))).hexdigest())"
    )
    for seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", program],
            check=True,
            capture_output=True,
            text=True,
            env={"PYTHONHASHSEED": seed},
        )
        assert done.stdout.strip() == wanted


def test_a_step_without_documents_has_no_micro_batches() -> None:
    plan = plan_step([], num_ranks=4, max_tokens_per_rank=10)
    assert plan.num_micro_batches == 0 and plan.of_rank(3) == []
    assert plan.critical_path(1.0).per_step == 1.0


@pytest.mark.parametrize(
    ("lengths", "rules", "message"),
    [
        ([3, 0], {}, "document 1 has 0 tokens; leave it out"),
        ([3, 21], {}, r"document 1 has 21 tokens; 2 ranks \(max_degree\) of 10 tokens .* hold 20"),
        ([1 << 60], {"max_tokens_per_rank": 1 << 40}, "document 0 has"),
        ([1 << 27] * 5, {"max_tokens_per_rank": 1 << 30}, "document 4: squared lengths sum"),
        ([3], {"max_degree": 3}, "max_degree is 3; it must be a power of two"),
        ([3], {"max_degree": 8}, r"max_degree is 8; .* at most num_ranks \(4\)"),
        ([3], {"num_ranks": 0}, "num_ranks is 0"),
        ([3], {"max_tokens_per_rank": True}, "max_tokens_per_rank is True"),
        ([3], {"max_documents_per_rank": 0}, "max_documents_per_rank is 0"),
        ([3], {"linear_length": -1}, "linear_length is -1"),
        ([3], {"linear_length": 1 << 29}, "linear_length is 536870912"),
        ([3.5], {}, "it must be one list of integers"),
        ([[3]], {}, r"lengths has shape \(1, 1\)"),
    ],
)
def test_errors_name_the_subject_the_value_and_the_limit(
    lengths: Any, rules: dict[str, Any], message: str
) -> None:
    sound = {"num_ranks": 4, "max_tokens_per_rank": 10, "max_degree": 2}
    with pytest.raises(ValueError, match=message):
        plan_step(lengths, **(sound | rules))


def test_a_plan_is_frozen_and_a_rank_out_of_range_is_refused() -> None:
    plan = megapack.plan_step([5, 6], num_ranks=2, max_tokens_per_rank=8)
    with pytest.raises(FrozenInstanceError):
        plan.num_ranks = 3
    with pytest.raises(ValueError, match="rank is 2; the plan is for 2 ranks"):
        plan.of_rank(2)


def test_the_length_where_attention_costs_as_much_as_all_else() -> None:
    model = MODELS["7b"]
    squares = model.flops_per_square * model.linear_length**2
    assert squares == pytest.approx(model.flops_per_token * model.linear_length)
