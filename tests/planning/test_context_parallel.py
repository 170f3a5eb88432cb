"""Ranks of a step hold every token once, in groups that agree, padded as promised, no further."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megapack.planning import plan_step, rank_micro_batches


@st.composite
def padded_steps(draw: st.DrawFn) -> tuple[list[int], int, dict[str, int]]:
    """True lengths, what they are aligned to, and the rules of a plan of lengths rounded up."""
    num_ranks = draw(st.integers(1, 13))
    max_degree = draw(st.sampled_from([d for d in (1, 2, 4, 8) if d <= num_ranks]))
    align = draw(st.sampled_from([1, 3, 8]))
    max_tokens = math.lcm(align, 2 * max_degree) * draw(st.integers(1, 4))
    lengths = draw(st.lists(st.integers(1, max_degree * max_tokens), max_size=40))
    rules = {
        "num_ranks": num_ranks,
        "max_degree": max_degree,
        "max_tokens_per_rank": max_tokens,
        "linear_length": draw(st.sampled_from([0, 100])),
    }
    return lengths, align, rules


def chunks(length: int, size: int, rank: int) -> list[int]:
    """Positions of a padded document, in the words of the definition."""
    if size == 1:
        return list(range(length))
    part = length // (2 * size)
    early, late = rank * part, (2 * size - 1 - rank) * part
    return [*range(early, early + part), *range(late, late + part)]


@given(step=padded_steps())
def test_tokens_are_held_once_by_groups(
    step: tuple[list[int], int, dict[str, int]],
) -> None:
    lengths, align, rules = step
    multiple = math.lcm(align, 2 * rules["max_degree"])
    plan = plan_step([-(-n // multiple) * multiple for n in lengths], **rules)
    ranks = [
        rank_micro_batches(plan, rank, lengths=np.array(lengths, int), align=align)
        for rank in range(rules["num_ranks"])
    ]
    held: list[list[int]] = [[] for _ in lengths]
    for rank, batches in enumerate(ranks):
        assert len(batches) == plan.num_micro_batches
        for number, batch in enumerate(batches):
            size, documents = batch.local_cp_size, batch.documents.tolist()
            assert documents == plan.of_rank(rank)[number].tolist()
            first = rank - batch.cp_rank
            assert 0 <= batch.cp_rank < size <= rules["max_degree"] and first % size == 0
            for partner in range(first, first + size):
                other = ranks[partner][number]
                assert (other.local_cp_size, other.cp_rank) == (size, partner - first)
                assert other.documents.tolist() == documents
                assert other.cu_seqlens_padded.tolist() == batch.cu_seqlens_padded.tolist()
            unit = math.lcm(align, 2 * size if size > 1 else 1)
            padded = [-(-lengths[i] // unit) * unit for i in documents]
            assert (
                batch.cu_seqlens.tolist()
                == np.cumsum([0, *(lengths[i] for i in documents)]).tolist()
            )
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


def test_a_document_on_two_ranks_by_hand() -> None:
    plan = plan_step([10], num_ranks=2, max_tokens_per_rank=6, max_degree=2)
    early_and_late, middle = (rank_micro_batches(plan, rank)[0] for rank in range(2))
    for cp_rank, batch in enumerate((early_and_late, middle)):
        assert (batch.local_cp_size, batch.cp_rank, batch.max_seqlen) == (2, cp_rank, 12)
        assert (batch.cu_seqlens.tolist(), batch.cu_seqlens_padded.tolist()) == ([0, 10], [0, 12])
    assert early_and_late.indices.tolist() == [0, 1, 2, 9, 10, 11]
    assert middle.indices.tolist() == [3, 4, 5, 6, 7, 8]


def test_a_rank_without_documents_has_an_empty_row() -> None:
    plan = plan_step([5], num_ranks=3, max_tokens_per_rank=8)
    (empty,) = rank_micro_batches(plan, (int(plan.first_rank[0]) + 1) % 3)
    assert empty.cu_seqlens.tolist() == empty.cu_seqlens_padded.tolist() == [0]
    assert (empty.local_cp_size, empty.cp_rank, empty.max_seqlen) == (1, 0, 0)
    assert empty.documents.size == empty.indices.size == 0
    assert rank_micro_batches(plan_step([], num_ranks=1, max_tokens_per_rank=1), 0) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 2}, "rank is 2; the plan is for 2 ranks"),
        ({"align": 0}, "align is 0; it must be at least 1"),
        ({"lengths": [5]}, r"lengths has shape \(1,\) and dtype int64, and the plan 2 documents"),
        ({"lengths": [5, 7]}, "document 1 has 7 tokens and was planned with 6"),
        ({"lengths": [0, 6]}, "at least 1"),
        ({"lengths": [4.5, 6]}, "a whole number of tokens"),
        ({"align": 1 << 31}, "a row of 2147483648 tokens; boundaries are int32"),
    ],
)
def test_what_is_not_of_the_plan_is_refused(options: dict[str, Any], message: str) -> None:
    plan = plan_step([5, 6], num_ranks=2, max_tokens_per_rank=8)
    with pytest.raises(ValueError, match=message):
        rank_micro_batches(plan, **{"rank": 0, **options})
