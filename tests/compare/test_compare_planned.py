"""Steps planned by documents: their figures are those of the documents that each rank holds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from reference.planning import broken_laws, costs

from megapack.compare.comparison import draw_steps, measure_plans
from megapack.compare.cost import MODELS
from megapack.errors import ConfigError, DataError
from megapack.planning import plan_step

LINEAR_LENGTH = MODELS["125m"].linear_length
RULES: dict[str, Any] = {
    "num_ranks": 6,
    "tokens_per_rank": 4096,
    "micro_batch_tokens": 512,
    "linear_length": LINEAR_LENGTH,
    "num_steps": 3,
}


def web_lengths() -> np.ndarray:
    """A heavy tail, some empty documents, the longest beyond what four ranks hold together."""
    generator = np.random.default_rng(4)
    return np.append(generator.lognormal(4.5, 1.2, 5000).astype(np.int32), [0, 0, 3000])


def cut(lengths: list[int], limit: int) -> list[int]:
    pieces = []
    for length in lengths:
        pieces += [limit] * (length // limit) + [length % limit] * (length % limit > 0)
    return pieces


def test_figures_are_those_of_a_recomputation_document_by_document() -> None:
    lengths = web_lengths()
    steps = draw_steps(lengths, tokens=6 * 4096, longest=4 * 512, num_steps=3)
    works = measure_plans(lengths, **RULES)
    assert [work.max_degree for work in works] == [1, 4]
    for work in works:
        limit = 512 * work.max_degree
        rows = []
        for step in steps:
            pieces = cut(step.tolist(), limit)
            plan = plan_step(
                pieces,
                num_ranks=6,
                max_tokens_per_rank=512,
                max_degree=work.max_degree,
                linear_length=LINEAR_LENGTH,
            )
            assert not broken_laws(plan, 512, work.max_degree, len(pieces))
            row = [sum(n for n, d in zip(pieces, plan.degree, strict=True) if d > 1) / sum(pieces)]
            row += [plan.num_micro_batches, plan.num_micro_batches - -(-sum(pieces) // (6 * 512))]
            for spent in (costs(plan, 0), costs(plan, LINEAR_LENGTH)):
                ideal = sum(map(sum, spent)) / 6
                busiest = max(sum(micro[rank] for micro in spent) for rank in range(6))
                row += [sum(map(max, spent)) / ideal, busiest / ideal]
            rows.append(row)
        shared, micro, extra, *paths = np.mean(rows, axis=0)
        assert work.num_steps == 3 and work.micro_batch_tokens == 512
        assert work.split_ratio == sum(n > limit for n in lengths.tolist()) / len(lengths)
        assert work.shared_ratio == pytest.approx(shared)
        assert (work.micro_batches, work.extra_micro_batches) == pytest.approx((micro, extra))
        found = [
            path
            for which in (work.attention, work.model)
            for path in (which.per_micro_batch, which.per_step)
        ]
        assert found == pytest.approx(paths) and min(found) >= 1
    assert works[0].shared_ratio == 0 < works[1].shared_ratio, "the case must share documents"
    assert works[0].split_ratio > works[1].split_ratio > 0


def test_documents_of_one_length_leave_nothing_to_balance() -> None:
    one, all_ranks = measure_plans(
        np.full(9, 5), num_ranks=2, tokens_per_rank=20, micro_batch_tokens=10, linear_length=7
    )
    for work in (one, all_ranks):
        assert (work.micro_batches, work.extra_micro_batches) == (2, 0)
        assert work.model.per_step == work.attention.per_micro_batch == 1.0
    assert one.split_ratio == one.shared_ratio == 0


def test_documents_that_one_rank_holds_but_not_beside_each_other_cost_micro_batches() -> None:
    (work,) = measure_plans(
        np.full(9, 5), num_ranks=1, tokens_per_rank=24, micro_batch_tokens=8, linear_length=0
    )
    assert (work.max_degree, work.micro_batches, work.extra_micro_batches) == (1, 4, 1)


def test_the_fewest_ranks_that_hold_the_longest_document_have_a_row() -> None:
    rules = {**RULES, "num_ranks": 64, "num_steps": 1}
    for longest, degrees in ((512, [1, 64]), (513, [1, 2, 64]), (2048, [1, 4, 64])):
        works = measure_plans(np.array([3, longest]), **rules)
        assert [work.max_degree for work in works] == degrees
        assert works[-1].split_ratio == 0


@given(
    lengths=st.lists(st.integers(0, 60), min_size=1, max_size=20).filter(any),
    longest=st.integers(1, 40),
    spare=st.integers(0, 80),
)
def test_step_is_as_full_as_documents_allow(lengths: list[int], longest: int, spare: int) -> None:
    tokens = longest + spare
    pieces = {piece for length in lengths for piece in cut([length], longest)}
    steps = draw_steps(np.array(lengths), tokens=tokens, longest=longest, num_steps=4)
    assert len(steps) == 4
    for step in steps:
        assert set(step.tolist()) <= pieces and tokens - longest < step.sum() <= tokens
    again = draw_steps(np.array(lengths), tokens=tokens, longest=longest, num_steps=4)
    assert [s.tolist() for s in steps] == [s.tolist() for s in again]


def test_steps_of_very_many_documents_are_few() -> None:
    assert len(draw_steps(np.ones(9, int), tokens=1 << 19, longest=1, num_steps=32)) == 2
    assert len(draw_steps(np.ones(9, int), tokens=1 << 21, longest=1, num_steps=32)) == 1


def test_what_cannot_be_planned_is_refused() -> None:
    for name, value in (("num_ranks", 0), ("micro_batch_tokens", 0), ("micro_batch_tokens", 4097)):
        with pytest.raises(ConfigError, match=f"{name} (is )?{value}"):
            measure_plans(np.array([3]), **{**RULES, name: value})
    for nothing in ([], [0, 0]):
        with pytest.raises(DataError, match="no document has a token"):
            measure_plans(np.array(nothing, np.int64), **RULES)
