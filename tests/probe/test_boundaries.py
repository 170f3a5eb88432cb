"""Documents are the same whatever form their boundaries have."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megapack.probe import LeakError, SegmentPlaces
from megapack.probe.boundaries import FORMS, alone, read_documents

ROW = 24


def forms(rows: list[list[int]]) -> dict[str, Any]:
    """Return all forms of documents with these lengths, which fill every row."""
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in rows])
    numbers = [torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in rows]
    ids = torch.stack(numbers)
    same = ids[:, None, :, None] == ids[:, None, None, :]
    seen = same & torch.ones(ROW, ROW).tril().bool()
    ends = torch.tensor([0, *accumulate(n for row in rows for n in row)], dtype=torch.int32)
    return {
        "cu_seqlens": ends,
        "position_ids": positions,
        "seq_idx": ids,
        "document_ids": ids * 3 + 7,
        "attention_mask": seen,
        "lengths": rows,
        "flat lengths": torch.tensor([n for row in rows for n in row]),
        "additive mask": torch.zeros(seen.shape).masked_fill(~seen, -1e9),
    }


@st.composite
def lengths_of_rows(draw: st.DrawFn) -> list[list[int]]:
    cuts = st.sets(st.integers(1, ROW - 1), max_size=6).map(lambda x: [0, *sorted(x), ROW])
    number = draw(st.integers(1, 3))
    rows = [draw(cuts) for _ in range(number)]
    rows = [[b - a for a, b in pairwise(row)] for row in rows]
    # Documents of one token have no position but 0, which also marks padding.
    return rows if all(n > 1 for row in rows for n in row) else [[2, ROW - 2]] * number


def starts(of_token: Tensor) -> list[int]:
    same = of_token.view(-1, ROW).diff() == 0
    return torch.nn.functional.pad(same, (1, 0)).logical_not().flatten().nonzero()[:, 0].tolist()


@given(rows=lengths_of_rows())
def test_every_form_gives_the_same_documents(rows: list[list[int]]) -> None:
    wanted = [i * ROW + n for i, row in enumerate(rows) for n in accumulate([0, *row[:-1]])]
    tokens = torch.zeros(len(rows), ROW, dtype=torch.int64)
    for name, value in forms(rows).items():
        of_batch = None if name in FORMS else name
        for batch, boundaries in (
            ({"input_ids": tokens, name: value}, value if " " in name else of_batch),
            ({"input_ids": tokens}, value),
        ):
            found = read_documents(batch, boundaries)
            assert starts(found.of_token) == wanted, (name, boundaries is None)
            assert (found.of_token >= 0).all()


def test_padding_is_no_document() -> None:
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    wanted = [0, 0, 0, 1, 1, -1, -1, -1]
    for batch in (
        {"position_ids": torch.tensor([[0, 1, 2, 0, 1, 0, 0, 0]])},
        {"segment_ids": torch.tensor([[1, 1, 1, 2, 2, 0, 0, 0]])},
        {"seq_idx": torch.tensor([[0, 0, 0, 1, 1, -1, -1, -1]])},
        {"attention_mask": torch.tensor([[1, 1, 1, 2, 2, 0, 0, 0]])},
        {"seqlens": torch.tensor([3, 2])},
    ):
        found = read_documents({"input_ids": tokens, **batch}).of_token
        assert [n - int(found[0]) if n >= 0 else n for n in found.tolist()] == wanted, batch


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({}, "no boundaries"),
        ({"attention_mask": torch.ones(1, 8)}, "no boundaries"),
        ({"cu_seqlens": torch.tensor([0, 9])}, "do not fit 1 x 8"),
        (
            {"cu_seqlens": torch.tensor([0, 3, 8]), "seqlens": torch.tensor([4, 4])},
            r"boundaries differ: cu_seqlens \(2 documents\), seqlens \(2 documents\)",
        ),
    ],
)
def test_missing_and_ambiguous_boundaries_are_refused(batch: dict[str, Any], message: str) -> None:
    with pytest.raises(LeakError, match=message):
        read_documents({"input_ids": torch.zeros(1, 8, dtype=torch.int64), **batch})


def test_positions_that_never_restart_do_not_contradict_boundaries() -> None:
    batch = {
        "input_ids": torch.zeros(1, 8, dtype=torch.int64),
        "position_ids": torch.arange(8)[None],
        "cu_seqlens": torch.tensor([0, 3, 8]),
    }
    assert len(read_documents(batch).numbers) == 2


@given(rows=lengths_of_rows())
def test_a_document_alone_has_its_own_boundaries(rows: list[list[int]]) -> None:
    batch = {
        "input_ids": torch.arange(len(rows) * ROW).view(len(rows), ROW),
        **{name: value for name, value in forms(rows).items() if isinstance(value, Tensor)},
        "max_seqlen": ROW,
        "max_length_q": torch.tensor(ROW),
    }
    del batch["flat lengths"], batch["additive mask"]
    documents = read_documents(batch, "cu_seqlens")
    for number in documents.numbers:
        places = documents.places(number)
        one = alone(batch, documents, places)
        size = len(places)
        assert one["input_ids"].tolist() == [places.tolist()]
        assert one["max_seqlen"] == size and int(one["max_length_q"]) == size
        assert torch.equal(one["attention_mask"][0, 0], torch.ones(size, size).tril().bool())
        names = ("cu_seqlens", "position_ids", "seq_idx", "attention_mask")
        for name in names:
            assert len(read_documents(one, name).numbers) == 1, name


def test_segments_of_a_padded_stream() -> None:
    batch = {
        "tokens": torch.zeros(1, 8),
        "cu_seqlens": torch.tensor([0, 3, 5]),
        "cu_seqlens_padded": torch.tensor([0, 4, 8]),
    }
    assert SegmentPlaces.of(batch).of_token(8).tolist() == [0, 0, 0, -1, 1, 1, -1, -1]
