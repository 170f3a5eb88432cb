"""rank_micro_batches, simulate_step and the assignments."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megapack.planning import (
    ASSIGNMENTS,
    AssignedStep,
    Cluster,
    StepPlan,
    plan_step,
    rank_micro_batches,
    simulate_step,
)
from megapack.planning.assignments import cut_documents, largest_differencing


@st.composite
def padded_steps(draw: st.DrawFn) -> tuple[list[int], int, dict[str, int]]:
    """Draw true lengths, their alignment, and a plan of rounded lengths."""
    num_ranks = draw(st.integers(1, 13))
    max_context_parallel_size = draw(st.sampled_from([d for d in (1, 2, 4, 8) if d <= num_ranks]))
    align = draw(st.sampled_from([1, 3, 8]))
    max_tokens = math.lcm(align, 2 * max_context_parallel_size) * draw(st.integers(1, 4))
    lengths = draw(st.lists(st.integers(1, max_context_parallel_size * max_tokens), max_size=40))
    rules = {
        "num_ranks": num_ranks,
        "max_context_parallel_size": max_context_parallel_size,
        "max_tokens_per_rank": max_tokens,
    }
    return lengths, align, {**rules, "linear_cost_tokens": draw(st.sampled_from([0, 100]))}


def chunks(length: int, size: int, rank: int) -> list[int]:
    """Return positions of a padded document by the definition."""
    if size == 1:
        return list(range(length))
    part = length // (2 * size)
    early, late = rank * part, (2 * size - 1 - rank) * part
    return [*range(early, early + part), *range(late, late + part)]


@given(step=padded_steps())
def test_groups_hold_every_token_once(step: tuple[list[int], int, dict[str, int]]) -> None:
    lengths, align, rules = step
    multiple = math.lcm(align, 2 * rules["max_context_parallel_size"])
    plan = plan_step([-(-n // multiple) * multiple for n in lengths], **rules)
    how = {"lengths": np.array(lengths, int), "align": align}
    ranks = [rank_micro_batches(plan, rank, **how) for rank in range(rules["num_ranks"])]
    held: list[list[int]] = [[] for _ in lengths]
    for rank, batches in enumerate(ranks):
        assert len(batches) == plan.num_micro_batches
        for number, batch in enumerate(batches):
            size, documents = batch.local_cp_size, batch.documents.tolist()
            assert documents == plan.of_rank(rank)[number].tolist()
            first = rank - batch.cp_rank
            assert (
                0 <= batch.cp_rank < size <= rules["max_context_parallel_size"]
                and first % size == 0
            )
            for partner in range(first, first + size):
                other = ranks[partner][number]
                assert (other.local_cp_size, other.cp_rank) == (size, partner - first)
                assert other.documents.tolist() == documents
                assert other.cu_seqlens_padded.tolist() == batch.cu_seqlens_padded.tolist()
            unit = math.lcm(align, 2 * size if size > 1 else 1)
            padded = [-(-lengths[i] // unit) * unit for i in documents]
            own = [lengths[i] for i in documents]
            assert batch.cu_seqlens.tolist() == np.cumsum([0, *own]).tolist()
            assert batch.cu_seqlens_padded.tolist() == np.cumsum([0, *padded]).tolist()
            assert batch.cu_seqlens.dtype == batch.cu_seqlens_padded.dtype == np.int32
            assert batch.max_seqlen == max(padded, default=0)
            mine = [chunks(n, size, batch.cp_rank) for n in padded]
            begins = batch.cu_seqlens_padded[:-1].tolist()
            expected = [b + p for b, ps in zip(begins, mine, strict=True) for p in ps]
            assert batch.indices.tolist() == expected and batch.indices.dtype == np.int64
            assert len(expected) * size == sum(padded), "equal parts"
            assert len(expected) <= rules["max_tokens_per_rank"], "the budget, padding included"
            for i, positions in zip(documents, mine, strict=True):
                held[i] += [p for p in positions if p < lengths[i]]
    assert [sorted(positions) for positions in held] == [list(range(n)) for n in lengths]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 2}, "rank is 2; the plan is for 2 ranks"),
        ({"align": 0}, "align is 0; it must be at least 1"),
        ({"lengths": [5]}, r"lengths has shape \(1,\) and dtype int64; the plan has 2 documents"),
        ({"lengths": [5, 7]}, "document 1 has 7 tokens but was planned with 6"),
        ({"lengths": [0, 6]}, "at least 1"),
        ({"lengths": [4.5, 6]}, "give an integer of at least 1"),
        ({"align": 1 << 31}, "a row has 2147483648 tokens; int32"),
    ],
)
def test_arguments_that_do_not_match_the_plan_are_refused(
    options: dict[str, Any], message: str
) -> None:
    plan = plan_step([5, 6], num_ranks=2, max_tokens_per_rank=8)
    with pytest.raises(ValueError, match=message):
        rank_micro_batches(plan, **{"rank": 0, **options})


# ---- Simulated times and shares against closed forms


LINEAR_COST_TOKENS = 24_576.0


def lognormal(count: int, seed: int = 0) -> Any:
    values = np.random.default_rng(seed).lognormal(np.log(4000), 0.9, count)
    return np.clip(values, 50, 32_768).astype(np.int64)


def plan_of(num_ranks: int, *documents: tuple[int, int, int, int]) -> StepPlan:
    """Return a plan of (length, first rank, degree, micro batch)."""
    columns = np.array(documents, np.int64).T
    given = dict(zip(("lengths", "first_rank", "degree", "micro_batch"), columns, strict=True))
    return StepPlan(num_ranks=num_ranks, num_micro_batches=int(columns[3].max()) + 1, **given)


@pytest.mark.parametrize(
    ("stages", "parts", "count"),
    [
        *((1, 1, 3), (2, 1, 1), (2, 1, 5), (4, 1, 4), (4, 1, 7), (8, 1, 64)),
        *((2, 2, 4), (4, 2, 4), (4, 2, 8), (4, 3, 12), (3, 4, 9)),
    ],
)
def test_pipelines_have_the_bubble_of_1f1b(stages: int, parts: int, count: int) -> None:
    """With equal micro batches; virtual stages divide it."""
    dealt = AssignedStep.of_attention(np.full((count, 3), 6.0))
    for barrier in ("micro_batch", "step"):
        sizes = {"data_parallel": 3, "pipeline_parallel": stages, "virtual_stages": parts}
        found = simulate_step(dealt, Cluster(**sizes, barrier=barrier))
        assert found.bubble == pytest.approx((stages - 1) / (parts * count + stages - 1))
        assert found.over_ideal == pytest.approx(1 + (stages - 1) / (parts * count))
        assert found.waiting == pytest.approx(0)
        assert found.num_micro_batches == count and found.empty == 0


def test_virtual_pipeline_is_padded_with_empty_micro_batches() -> None:
    cluster = Cluster(data_parallel=2, pipeline_parallel=4, virtual_stages=2)
    found = simulate_step(AssignedStep.of_attention(np.full((5, 2), 6.0)), cluster)
    assert (found.num_micro_batches, found.empty) == (8, 6)


def test_pipeline_of_unequal_micro_batches_by_hand() -> None:
    """Two stages; forwards of 1, 3, 2 and backwards of 2, 6, 4.

    Stage 0: F0 0-1, F1 1-4, B0 4-6, F2 6-8, B1 13-19, B2 19-23.
    Stage 1: F0 1-2, B0 2-4, F1 4-7, B1 7-13, F2 13-15, B2 15-19.
    """
    dealt = AssignedStep.of_attention(2 * np.array([[3.0], [9.0], [6.0]]))
    found = simulate_step(dealt, Cluster(pipeline_parallel=2))
    assert found.time == pytest.approx(23)
    assert found.bubble == pytest.approx((2 * 23 - 36) / (2 * 23))


def test_unequal_ranks_wait_per_micro_batch_or_step() -> None:
    """Two ranks with one unit and three, then reversed."""
    dealt = AssignedStep.of_attention([[1.0, 3.0], [3.0, 1.0]])
    found = simulate_step(dealt, Cluster(data_parallel=2))
    assert found.time == pytest.approx(6) and found.over_ideal == pytest.approx(1.5)
    assert found.waiting == pytest.approx(1 / 3)
    found = simulate_step(dealt, Cluster(data_parallel=2, barrier="step"))
    assert found.time == pytest.approx(4) and found.over_ideal == pytest.approx(1)
    assert found.waiting == pytest.approx(0)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("balance", ["micro_batches", "step"])
def test_time_without_pipeline_is_the_critical_path(balance: Any, seed: int) -> None:
    lengths = lognormal(300, seed)
    plan = plan_step(lengths, num_ranks=8, max_tokens_per_rank=40_000, balance=balance)
    path = plan.critical_path(LINEAR_COST_TOKENS)
    dealt = AssignedStep.of_plan(plan)
    for barrier, wanted in (("micro_batch", path.per_micro_batch), ("step", path.per_step)):
        cluster = Cluster(data_parallel=8, barrier=barrier)
        found = simulate_step(dealt, cluster, linear_cost_tokens=LINEAR_COST_TOKENS)
        assert found.over_ideal == pytest.approx(wanted)


@given(
    cost=st.lists(
        st.lists(st.floats(0, 100), min_size=4, max_size=4), min_size=1, max_size=9
    ).filter(lambda rows: np.sum(rows) > 1),
    stages=st.integers(1, 5),
    parts=st.integers(1, 3),
    barrier=st.sampled_from(["micro_batch", "step"]),
    padding=st.floats(0, 50),
)
def test_shares_of_time_sum_to_one(
    cost: Any, stages: int, parts: int, barrier: Any, padding: float
) -> None:
    virtual = parts if stages > 1 else 1
    sizes = {"data_parallel": 4, "pipeline_parallel": stages, "virtual_stages": virtual}
    cluster = Cluster(**sizes, barrier=barrier)
    dealt = AssignedStep.of_attention(cost, tokens=padding, documents=np.zeros(0, np.int64))
    object.__setattr__(dealt, "useful_attention", float(np.sum(cost)))
    found = simulate_step(dealt, cluster, linear_cost_tokens=1)
    useful = 1 / found.over_ideal
    assert useful + found.extra + found.bubble + found.waiting == pytest.approx(1)
    busiest = (np.asarray(cost) + padding).sum(axis=0).max()
    assert found.time >= busiest / stages * (1 - 1e-9)
    assert min(found.bubble, found.waiting) >= -1e-12


def test_exchange_is_free_without_shared_documents() -> None:
    plan = plan_step(lognormal(100), num_ranks=4, max_tokens_per_rank=40_000)
    dealt = AssignedStep.of_plan(plan)
    cluster = Cluster(data_parallel=4)
    plain, exchanged = (simulate_step(dealt, cluster, exchange_cost_tokens=n) for n in (0.0, 1e6))
    assert not dealt.exchanged.any() and exchanged == plain


@pytest.mark.parametrize("degree", [2, 4, 8])
def test_exchange_overlaps_with_attention(degree: int) -> None:
    n = 1000
    dealt = AssignedStep.of_plan(plan_of(8, (n, 0, degree, 0)))
    cluster = Cluster(data_parallel=8 // degree, context_parallel=degree)
    for exchange in (0.0, n / (degree - 1) * 0.99, n / (degree - 1) * 2):
        found = simulate_step(dealt, cluster, linear_cost_tokens=7, exchange_cost_tokens=exchange)
        own = max(n * n / degree, exchange * n * (degree - 1) / degree)
        assert found.time == pytest.approx(7 * n / degree + own)


def test_shared_rows_exchange_like_documents() -> None:
    """A row of 2 x 500 tokens on two ranks costs as much as a document of 1,000 on two."""
    row = AssignedStep.of_attention([[5e5, 5e5]], tokens=500, degree=np.array([2]))
    document = AssignedStep.of_plan(plan_of(2, (1000, 0, 2, 0)))
    for field in ("tokens", "attention", "exchanged", "first_rank"):
        assert np.array_equal(getattr(row, field), getattr(document, field)), field


def test_ranks_of_a_group_wait_for_each_other() -> None:
    """Attention of 36 and 4, then a document of 8 tokens on both: 32 each, starting at 36."""
    dealt = AssignedStep.of_plan(plan_of(2, (6, 0, 1, 0), (2, 1, 1, 0), (8, 0, 2, 1)))
    found = simulate_step(dealt, Cluster(context_parallel=2, barrier="step"))
    assert found.time == pytest.approx(36 + 32)
    assert found.waiting == pytest.approx(32 / (2 * 68))


def test_empty_micro_batches_do_not_delay_other_ranks() -> None:
    """The fourth micro batch is padding; it behaves like an empty one of the plan."""
    attention = np.array([[12.0, 4.0], [4.0, 12.0], [4.0, 4.0], [0.0, 0.0]])
    whole = AssignedStep(
        tokens=np.zeros((4, 2)),
        attention=attention,
        exchanged=np.zeros((4, 2)),
        first_rank=np.array([[0, 1], [0, 1], [0, 0], [0, 1]]),
        useful_tokens=0.0,
        useful_attention=float(attention.sum()),
    )
    rows = ("tokens", "attention", "exchanged", "first_rank")
    filled_up = replace(whole, **{name: getattr(whole, name)[:3] for name in rows})
    cluster = Cluster(context_parallel=2, pipeline_parallel=2, virtual_stages=2, barrier="step")
    assert simulate_step(filled_up, cluster) == simulate_step(whole, cluster)


def test_padding_is_not_useful_work() -> None:
    plan = plan_of(1, (8, 0, 1, 0), (4, 0, 1, 0))
    dealt = AssignedStep.of_plan(plan, documents=np.array([6, 3]))
    assert (dealt.useful_tokens, dealt.useful_attention) == (9, 45)
    found = simulate_step(dealt, Cluster(), linear_cost_tokens=10)
    assert found.extra == pytest.approx(1 - (10 * 9 + 45) / (10 * 12 + 80))


CUT = ("padded rows", "concatenate and chunk")


@pytest.mark.parametrize("degree", [1, 4])
@pytest.mark.parametrize("name", ASSIGNMENTS)
def test_assignments_hold_every_document_once_within_the_limit(name: str, degree: int) -> None:
    lengths = lognormal(400)
    cluster = Cluster(data_parallel=4, context_parallel=degree)
    plan = ASSIGNMENTS[name](lengths, cluster, 33_000, LINEAR_COST_TOKENS)
    assert plan.num_ranks == 4 * degree
    held, cap = np.sort(plan.lengths).tolist(), 33_000
    if name not in CUT:
        assert held == np.sort(lengths).tolist()
    elif name == "padded rows":  # plus padding
        assert not Counter(lengths.tolist()) - Counter(held)
        rows = plan.tokens[plan.tokens > 0]
        assert (rows == cap).all()
    else:
        assert held == [cap * degree] * -(-int(lengths.sum()) // (cap * degree))
    if name != "Karmarkar-Karp":
        assert plan.tokens.max() <= cap
    if not name.startswith("plan_step"):
        assert set(plan.degree.tolist()) == {degree}


def test_karmarkar_karp_exceeds_the_limit_and_plan_step_does_not() -> None:
    lengths, cluster = lognormal(512), Cluster(data_parallel=8)
    theirs = ASSIGNMENTS["Karmarkar-Karp"](lengths, cluster, 33_000, LINEAR_COST_TOKENS)
    assert (theirs.tokens > 33_000).any()
    assert theirs.critical_path(LINEAR_COST_TOKENS).per_step < 1.001


def test_padded_rows_of_the_module_example() -> None:
    lengths = np.array([5, 2, 3, 4, 1, 1])
    plan = ASSIGNMENTS["padded rows"](lengths, Cluster(data_parallel=2), 8, 0.0)
    assert plan.lengths.tolist() == [5, 2, 1, 3, 4, 1, 1, 7]
    assert plan.first_rank.tolist() == [0, 0, 0, 1, 1, 1, 0, 0]
    assert plan.micro_batch.tolist() == [0] * 6 + [1] * 2


def test_token_budget_takes_the_least_loaded_rank_with_space() -> None:
    lengths, cluster = np.array([6, 3, 3, 3, 2, 7]), Cluster(data_parallel=2)
    plan = ASSIGNMENTS["token budget"](lengths, cluster, 9, LINEAR_COST_TOKENS)
    assert plan.lengths.tolist() == [6, 2, 3, 3, 3, 7]
    assert plan.first_rank.tolist() == [0, 0, 1, 1, 1, 0]
    assert plan.micro_batch.tolist() == [0, 0, 0, 0, 0, 1]


def test_largest_differencing_of_a_known_example() -> None:
    """8 7 6 5 4 differ by 2 at the end, the optimum by 0."""
    parts = largest_differencing([8, 7, 6, 5, 4], 2)
    assert sorted(sum(8 - i for i in part) for part in parts) == [14, 16]
    assert sorted(i for part in parts for i in part) == list(range(5))
    assert largest_differencing([], 3) == [[], [], []]


def test_documents_are_cut_at_the_limit() -> None:
    assert cut_documents(np.array([3, 8, 20]), 8).tolist() == [3, 8, 8, 8, 4]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"data_parallel": 0}, "data_parallel is 0"),
        ({"context_parallel": 3}, "context_parallel is 3; .* power of two"),
        ({"virtual_stages": 2}, "virtual_stages is 2, which needs pipeline_parallel"),
        ({"barrier": "never"}, "barrier is 'never'"),
    ],
)
def test_cluster_errors_name_the_size(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Cluster(**wrong)


def test_step_of_other_ranks_is_refused() -> None:
    with pytest.raises(ValueError, match="the step has 2 ranks"):
        simulate_step(AssignedStep.of_attention([[1.0, 2.0]]), Cluster(data_parallel=3))
