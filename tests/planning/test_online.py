"""StepPlanner: every document once, limits kept, independent of calls and restarts."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megapack.errors import ResumeError
from megapack.planning import PlannedMicroBatch, StepPlanner, plan_step
from tests.planning.test_plan_step import answers

Planned = list[PlannedMicroBatch]


def contents(given: Planned) -> list[Any]:
    """Return micro batches as lists."""
    columns = [(m.documents, [m.degree], m.lengths) for m in given]
    return [[[array.tolist() for array in of] for of in column] for column in columns]


@st.composite
def streams(draw: st.DrawFn) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    num_ranks, max_tokens = draw(st.integers(1, 5)), draw(st.integers(4, 30))
    degree = draw(st.sampled_from([d for d in (1, 2, 4) if d <= num_ranks]))
    count = draw(st.integers(1, 80))
    many: dict[str, Any] = {"min_size": count, "max_size": count}
    stream: dict[str, list[Any]] = {
        "document_id": draw(st.permutations(range(1000, 1000 + count))),
        "length": draw(st.lists(st.integers(1, max_tokens), **many)),
    }
    options: dict[str, Any] = {
        "num_ranks": num_ranks,
        "max_tokens_per_rank": max_tokens,
        "max_context_parallel_size": degree,
        "window": draw(st.integers(1, 40)),
        "max_documents_per_rank": draw(st.sampled_from([None, 3, 9])),
        "micro_batch_multiple": draw(st.sampled_from([1, 1, 2])),
    }
    if draw(st.booleans()):
        stream["cost"] = draw(st.lists(st.tuples(*[st.integers(0, 9)] * 2), **many))
        options["max_costs_per_rank"] = draw(st.sampled_from([None, [9, 20]]))
    if degree == 1 and draw(st.booleans()):
        starts = draw(st.lists(st.booleans(), **many))
        stream["group"] = np.cumsum(starts).tolist()
    return options, stream


def check(options: dict[str, Any], stream: dict[str, list[Any]], given: Planned) -> None:
    """Check: every document once, equal groups of ranks, limits kept, groups on one rank."""
    seen: dict[int, list[tuple[int, int]]] = {}
    costs = dict(zip(stream["document_id"], stream.get("cost", [()] * 80), strict=False))
    lengths = dict(zip(stream["document_id"], stream["length"], strict=True))
    for number, micro_batch in enumerate(given):
        for rank, ids in enumerate(micro_batch.documents):
            degree = int(micro_batch.degree[rank])
            for i in ids.tolist():
                seen.setdefault(i, []).append((number, rank))
            assert micro_batch.lengths[rank].tolist() == [lengths[i] for i in ids.tolist()]
            assert micro_batch.lengths[rank].sum() <= degree * options["max_tokens_per_rank"]
            assert len(ids) <= (options["max_documents_per_rank"] or len(lengths))
            for k, cap in enumerate(options.get("max_costs_per_rank") or ()):
                assert sum(costs[i][k] for i in ids.tolist()) <= degree * cap
    assert sorted(seen) == sorted(stream["document_id"])
    rank_of: dict[int, int] = {}
    for i, group in zip(stream["document_id"], stream.get("group", ()), strict=False):
        [(_, rank)] = seen[i]
        assert rank_of.setdefault(group, rank) == rank
    for places in seen.values():
        number, first = places[0]
        degree = int(given[number].degree[first])
        assert places == [(number, first + r) for r in range(degree)]
    assert len(given) % options["micro_batch_multiple"] == 0


@given(of=streams(), data=st.data())
def test_every_document_is_returned_once_for_any_calls_and_resumes(
    of: tuple[dict[str, Any], dict[str, list[Any]]], data: st.DataObject
) -> None:
    options, stream = of
    size = len(stream["length"])
    whole = StepPlanner(**options)
    given = whole.add(**stream) + whole.finish()
    check(options, stream, given)

    cuts = data.draw(st.lists(st.integers(0, size), max_size=6).map(sorted), label="cuts")
    planner, parts = StepPlanner(**options), []
    for begin, end in zip([0, *cuts], [*cuts, size], strict=True):
        parts += planner.add(**{name: values[begin:end] for name, values in stream.items()})
        state = json.loads(json.dumps(planner.state_dict()))
        planner = StepPlanner(**options)
        planner.load_state_dict(state)
    parts += planner.finish()
    assert contents(parts) == contents(given)
    assert planner.finish() == []


def test_micro_batches_of_a_stream_are_full_and_balanced() -> None:
    """4,096 answers in windows of 1,024; their tokens need 46.9 micro batches."""
    lengths = answers(1, 4096)
    rules = {"num_ranks": 16, "max_tokens_per_rank": 33_792, "linear_cost_tokens": 24_576}
    planner = StepPlanner(window=1024, **rules)
    full = planner.add(np.arange(4096), lengths)
    given = full + planner.finish()
    assert len(given) == 48
    tokens = np.array([[of.sum() for of in m.lengths] for m in given])
    assert tokens.max() <= 33_792
    assert tokens[: len(full)].sum() > 0.985 * len(full) * 16 * 33_792
    cost = np.array([[(of * (24_576.0 + of)).sum() for of in m.lengths] for m in given])
    assert cost.max(axis=1).sum() * 16 / cost.sum() < 1.034
    assert cost.sum(axis=0).max() * 16 / cost.sum() < 1.02


@pytest.mark.parametrize("in_group", [1, 3])
def test_documents_that_fit_together_poorly_do_not_wait_forever(in_group: int) -> None:
    """5,000 tokens of 8,192: ranks are never full, but micro batches are returned."""
    planner = StepPlanner(num_ranks=4, max_tokens_per_rank=8192, window=8)
    given: Planned = []
    for i in range(40):
        given += planner.add(i, 5000, group=None if in_group == 1 else i // in_group)
        assert len(planner.state_dict()["ids"]) < 12
    ids = [i for m in given for of in m.documents for i in of.tolist()]
    assert sorted(ids) == list(range(len(ids)))


SOUND: dict[str, Any] = {"num_ranks": 2, "max_tokens_per_rank": 10, "window": 4}


@pytest.mark.parametrize(
    ("options", "added", "message"),
    [
        ({}, (7, 11), "document 7 has 11 tokens; 1 ranks"),
        ({}, (7, 0), "document 7 has the length 0; lengths are at least 1"),
        ({}, ([7, 8], [1]), r"length has shape \(1,\)"),
        ({}, ("a", 1), "document_id has shape"),
        ({}, (np.uint64(1 << 63), 1), "document_id is 9223372036854775808"),
        ({}, ([7], [1], [[]]), r"cost has shape \(1, 0\)"),
        ({}, (7, 1, -1.0), r"document 7 has the cost \[-1.0\]"),
        ({}, (7, 1, "1"), "cost has dtype <U1; it must be real numbers"),
        ({"max_costs_per_rank": [3]}, (7, 1, 4), r"document 7 has 4 of cost \(kind 0\); .* hold 3"),
        ({"max_costs_per_rank": [3, 4]}, (7, 1, 4), "max_costs_per_rank has 2 numbers"),
        (
            {"max_context_parallel_size": 2},
            ([1, 2, 3], [9, 9, 9], None, [5, 5, 5]),
            "group 5 has 27 tokens; 2 ranks .* hold 20",
        ),
    ],
)
def test_invalid_document_adds_nothing(
    options: dict[str, Any], added: tuple[Any, ...], message: str
) -> None:
    """Invalid ids, lengths, costs and groups."""
    planner = StepPlanner(**(SOUND | options))
    with pytest.raises(ValueError, match=message):
        planner.add(**dict(zip(("document_id", "length", "cost", "group"), added, strict=False)))
    assert planner.state_dict()["ids"] == []


def test_group_that_grows_too_large_is_refused() -> None:
    planner = StepPlanner(**(SOUND | {"max_context_parallel_size": 2}))
    planner.add([1, 2], [9, 9], group=[5, 5])
    with pytest.raises(ValueError, match="group 5 has 21 tokens"):
        planner.add(3, 3, group=5)
    planner.add(3, 3, group=6)
    with pytest.raises(ValueError, match="waiting documents 0 and a group"):
        planner.add(4, 3)
    assert planner.state_dict()["ids"] == [1, 2, 3]


@pytest.mark.parametrize(("name", "value"), [("window", 0), ("window", True), ("num_ranks", 0)])
def test_invalid_options_are_refused(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{name} is {value}"):
        StepPlanner(**(SOUND | {name: value}))


def test_state_of_other_options_is_refused() -> None:
    state = StepPlanner(**SOUND).state_dict()
    numpys = StepPlanner(**{name: np.int64(number) for name, number in SOUND.items()})
    numpys.load_state_dict(json.loads(json.dumps(numpys.state_dict())))
    assert numpys.state_dict() == state
    with pytest.raises(ResumeError, match=r"num_ranks=2, this one has 4"):
        StepPlanner(**(SOUND | {"num_ranks": 4})).load_state_dict(state)


PLANS = int(os.environ.get("MEGAPACK_PLANS", "200"))


def float_costs(random: np.random.Generator, count: int) -> np.ndarray:
    """Draw numbers >= 0 of one kind of float (subnormal, huge, ...)."""
    kinds: list[Callable[[], np.ndarray]] = [
        lambda: random.random(count),
        lambda: random.integers(1, 1 << 40, count) * 5e-324,  # subnormal
        lambda: random.random(count) * 1.7e308,
        lambda: 2.0 ** random.integers(-1074, 1023, count),
        lambda: random.integers(1 << 53, 1 << 63, count).astype(float),
        lambda: random.integers(0, 3, count) * 0.1,
        lambda: np.exp(random.normal(0, 30, count)),
    ]
    return kinds[random.integers(len(kinds))]()


def test_cost_equal_to_the_limit_fits() -> None:
    """For any floats, the most expensive document fits, and no rank exceeds the limit."""
    for seed in range(PLANS):
        random = np.random.default_rng(seed)
        costs = float_costs(random, int(random.integers(1, 12)))
        degree, num_ranks = int(random.choice([1, 2])), int(random.integers(2, 5))
        options: dict[str, Any] = {
            "num_ranks": num_ranks,
            "max_tokens_per_rank": 100,
            "max_context_parallel_size": degree,
            "max_costs_per_rank": costs.max() / degree,
        }
        if costs.max() / degree * degree != costs.max():
            continue  # half of a subnormal number is rounded
        lengths = random.integers(1, 9, len(costs))
        plan = plan_step(lengths, costs=costs, **options)
        for held in (held for rank in plan.index_lists() for held in rank if len(held)):
            own = int(plan.degree[held[0]])
            total = sum(Fraction(costs[i]) for i in held)
            assert total <= own * Fraction(options["max_costs_per_rank"]), seed
        planner = StepPlanner(window=4, **options)
        given = planner.add(np.arange(len(costs)), lengths, costs) + planner.finish()
        ids = {i for m in given for rank in m.documents for i in rank.tolist()}
        assert ids == set(range(len(costs))), seed


def test_planner_refuses_what_a_plan_refuses_and_continues() -> None:
    refused = Counter[bool]()
    for seed in range(PLANS):
        random = np.random.default_rng(seed)
        count = int(random.integers(1, 9))
        costs = float_costs(random, count)
        with np.errstate(over="ignore"):  # an infinite limit is no limit
            cap = float(random.choice([costs.max(), np.nextafter(costs.max(), 0), costs.sum()]))
        options: dict[str, Any] = {
            "num_ranks": 4,
            "max_tokens_per_rank": 100,
            "max_context_parallel_size": int(random.choice([1, 2])),
            "max_costs_per_rank": cap / 2,
        }
        groups = np.sort(random.integers(0, 3, count)) if random.random() < 0.5 else None
        lengths = random.integers(1, 120, count)
        planner = StepPlanner(window=3, **options)
        first = None if groups is None else -1
        planner.add(100, 5, 0.0, first)
        before = planner.state_dict()
        try:
            plan_step(lengths, costs=costs, groups=groups, **options)
            fits = True
        except ValueError:
            fits = False
        refused[not fits] += 1
        given = []
        try:
            given = planner.add(np.arange(count), lengths, costs, groups)
            assert fits, seed
        except ValueError:
            assert not fits, seed
            assert planner.state_dict() == before
        given += planner.add(101, 7, 0.0, None if groups is None else 7) + planner.finish()
        ids = sorted(i for m in given for rank in m.documents for i in set(rank.tolist()))
        assert set(ids) == {100, 101, *(range(count) if fits else ())}
    assert min(refused.values()) > PLANS // 10, refused


def test_default_costs_equal_those_of_a_plan() -> None:
    """With limits but without costs: length x (length + linear_cost_tokens)."""
    options: dict[str, Any] = {"num_ranks": 2, "max_tokens_per_rank": 100, "linear_cost_tokens": 50}
    planner = StepPlanner(window=2, max_costs_per_rank=600, **options)
    assert planner.add(0, 10) == []
    with pytest.raises(ValueError, match="document 1 has 671 of cost"):
        planner.add(1, 11)


def test_squares_above_the_limit_of_one_plan_are_refused() -> None:
    """In the middle of a call of ``add``: earlier documents of the call are not added either."""
    longest = (1 << 28) - 1
    planner = StepPlanner(num_ranks=2, max_tokens_per_rank=1 << 29, window=5)
    planner.add(0, 10)
    before = planner.state_dict()
    with pytest.raises(ValueError, match=r"squared lengths .* one plan allows 2\^56: lower the"):
        planner.add([1, 2], [longest, longest])
    assert planner.state_dict() == before
    with pytest.raises(ValueError, match=r"document 1 has 268435456 tokens"):
        planner.add(1, longest + 1)
    planner.add(1, longest)
    [micro_batch] = planner.finish()
    assert sorted(i for held in micro_batch.documents for i in held.tolist()) == [0, 1]
