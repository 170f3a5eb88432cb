"""Every dialect says what the batch says: emitted, and read back by the host's own rule."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megapack.attention.transformers_interface import ENDS, LONGEST
from megapack.data import BatchLayout, PackedDataset
from megapack.data.steps import StepView
from megapack.errors import ConfigError
from megapack.integrations.dialects import DIALECTS, Dialect, LossTerms, check_columns, emit
from megapack.packing import pack
from megapack.storage.columns import RESERVED
from tests.integrations.samples import make_dataset

NAMES = sorted(DIALECTS)


# ---- What a host makes of a batch, by its own rule


class Told(NamedTuple):
    """Content of a batch in a dialect."""

    tokens: Tensor
    """int64 (tokens,), of all rows one behind the other."""
    segments: list[tuple[int, int]]
    """(first token, length) of every segment."""
    terms: LossTerms
    """(tokens,) each."""


def read_back(told: dict[str, Any], dialect: Dialect) -> Told:
    """Read a batch by the rule of its host.

    Args:
        told: batch of ``emit``, or of a host's loader, on the CPU.
        dialect: dialect of the host.
    """
    text = told[dialect.tokens]
    text = text if text.dim() == 2 else text[None]  # rows one behind the other
    tokens = text[:, :-1] if dialect.one_more else text
    if dialect.labels is not None:
        targets = told[dialect.labels]
    else:
        source = told[dialect.target_labels] if dialect.target_labels else text
        targets = source[:, 1:] if dialect.one_more else source.roll(-1, dims=1)
    if dialect.segmentation is not None:
        weights = (told[dialect.segmentation[1]] != 0).float()
    elif dialect.mask is None:
        weights = (targets != dialect.ignored).float()
    else:
        weights = told[dialect.mask].float()
        weights = weights.roll(-1, dims=1) if dialect.mask_of_target else weights
    terms = LossTerms(targets.reshape(-1), weights.reshape(-1))
    return Told(tokens.reshape(-1), _segments(told, dialect, tokens.shape), terms)


def _segments(told: dict[str, Any], dialect: Dialect, shape: torch.Size) -> list[tuple[int, int]]:
    rows, row = shape
    if dialect.lengths is not None:
        return spans([[n for n in line if n] for line in told[dialect.lengths[0]].tolist()], row)
    if dialect.segmentation is not None:
        numbers = [line.tolist() for line in told[dialect.segmentation[0]]]
        return spans([[len([*same]) for _, same in groupby(line)] for line in numbers], row)
    if dialect.restart:
        starts = (told[dialect.positions or ""] == 0).view(rows, row).tolist()
        begins = [[i for i, first in enumerate(line) if first] + [row] for line in starts]
        return spans([[b - a for a, b in pairwise(line)] for line in begins], row)
    ends = told[dialect.ends[0]]
    padded = told.get(dialect.padded_ends[0], ends) if dialect.padded_ends else ends
    width = ends.shape[-1]
    lengths, rooms = (bounds.view(-1, width).diff().tolist() for bounds in (ends, padded))
    begins = padded.view(-1, width).tolist()
    return [
        (i * row + begin, length)
        for i, line in enumerate(zip(begins, lengths, rooms, strict=True))
        for begin, length, room in zip(*line, strict=False)
        if room
    ]


# ---- Batches, written down token by token


@dataclass
class Piece:
    """A segment of a row."""

    length: int
    cut: bool  # the document continues after it, with a token that is not in the row
    masked: bool  # it has no labels: padding, or a document that is excluded


Made = tuple[dict[str, Any], list[list[int]]]
pieces = st.builds(Piece, length=st.integers(1, 5), cut=st.booleans(), masked=st.booleans())


def spans(lengths: list[list[int]], row: int) -> list[tuple[int, int]]:
    """(first token, length) of segments, which fill rows one behind the other."""
    return [
        (i * row + at, length)
        for i, line in enumerate(lengths)
        for at, length in zip(accumulate(line, initial=0), line, strict=False)
    ]


@st.composite
def batches(draw: Any) -> Made:
    """A batch written down token by token, in rows or as one stream, and its segments by row."""
    row = draw(st.integers(4, 12))
    rows = []
    for _ in range(draw(st.integers(1, 3))):
        line: list[Piece] = []
        while (left := row - sum(piece.length for piece in line)) > 0:
            piece = draw(pieces)
            line.append(Piece(min(piece.length, left), piece.cut, piece.masked))
        rows.append(line)
    size = row * len(rows)
    drawn = draw(st.lists(st.integers(1, 3), min_size=size, max_size=size))
    tokens = torch.tensor(drawn).view(len(rows), row)
    labels, positions = torch.full_like(tokens, -100), torch.zeros_like(tokens)
    for i, line in enumerate(rows):
        at = 0
        for piece in line:
            for k in range(piece.length):
                last = k == piece.length - 1
                positions[i, at + k] = k
                if not piece.masked and (piece.cut or not last):
                    labels[i, at + k] = 2 if last else tokens[i, at + k + 1]
            at += piece.length
    batch: dict[str, Any] = {"tokens": tokens, "labels": labels, "position_ids": positions}
    batch["loss_mask"] = (labels >= 0).float()
    lengths = [[piece.length for piece in line] for line in rows]
    if draw(st.booleans()):
        width = max(map(len, lengths)) + 1 + draw(st.integers(0, 2))
        ends = [np.cumsum([0, *line, *[0] * (width - len(line) - 1)]) for line in lengths]
        batch["cu_seqlens"] = torch.tensor(np.array(ends), dtype=torch.int32)
        batch["max_seqlen"] = torch.tensor([max(line) for line in lengths], dtype=torch.int32)
    else:
        whole = [length for line in lengths for length in line]
        batch["cu_seqlens"] = torch.tensor([0, *whole], dtype=torch.int32).cumsum(0).int()
        batch["max_seqlen"] = max(whole)
    return batch, lengths


def expected_terms(batch: dict[str, Any], dialect: Dialect) -> dict[int, int]:
    """Return {position: target} of every loss that the host can represent."""
    told: list[int] = batch["labels"].flatten().tolist()
    text, row = batch["tokens"].flatten().tolist(), batch["tokens"].shape[1]
    found = {}
    for i, target in enumerate(told):
        is_last = i % row == row - 1
        if dialect.labels is None and is_last and not dialect.one_more:
            continue
        of_text = dialect.labels is None and dialect.target_labels is None
        if of_text and not is_last and target != text[i + 1]:
            continue
        if target >= 0:
            found[i] = target
    return found


@pytest.mark.parametrize("name", NAMES)
@given(made=batches())
def test_dialects_read_back_equal_the_batch(name: str, made: Made) -> None:
    batch, lengths = made
    dialect = DIALECTS[name]
    before = {key: torch.as_tensor(value).clone() for key, value in batch.items()}
    told = read_back(emit(batch, dialect), dialect)
    assert told.tokens.tolist() == batch["tokens"].flatten().tolist()
    assert told.segments == spans(lengths, batch["tokens"].shape[1])
    targets, weights = told.terms
    found = {i: int(targets[i]) for i in weights.nonzero().flatten().tolist()}
    assert found == expected_terms(batch, dialect)
    assert all(torch.equal(torch.as_tensor(batch[key]), value) for key, value in before.items())


@pytest.mark.parametrize("name", NAMES)
@given(made=batches())
def test_arrays_of_numpy_give_the_same_batch_as_tensors(name: str, made: Made) -> None:
    batch, _ = made
    dialect = DIALECTS[name]
    arrays = {k: v.numpy() if isinstance(v, Tensor) else v for k, v in batch.items()}
    of_tensors, of_arrays = emit(batch, dialect), emit(arrays, dialect)
    assert [*of_tensors] == [*of_arrays]
    for key, value in of_tensors.items():
        assert isinstance(value, Tensor) == isinstance(of_arrays[key], np.ndarray)
        assert not isinstance(value, Tensor) or value.numpy().dtype == of_arrays[key].dtype
        assert np.array_equal(value, of_arrays[key])


@pytest.mark.parametrize("name", ["maxtext", "grain"])
def test_segments_are_numbered_from_1_in_every_row_and_padding_is_0(name: str) -> None:
    dialect = DIALECTS[name]
    tokens = np.array([[5, 6, 8, 9, 0], [3, 4, 5, 6, 7]])
    labels = np.array([[6, 7, 9, -100, -100], [4, 5, 6, 7, -100]])
    batch = {
        "tokens": tokens,
        "labels": labels,
        "loss_mask": (labels >= 0).astype(np.float32),
        "position_ids": np.array([[0, 1, 0, 1, 0], [0, 1, 2, 3, 4]]),
        "cu_seqlens": np.array([[0, 2, 4, 5], [0, 5, 5, 5]], np.int32),
        "dataset_ids": np.array([0, 0, -1, 0], np.int32),
        "max_seqlen": 5,
    }
    told = emit(batch, dialect)
    assert dialect.segmentation is not None
    of_inputs, of_targets = (told[key] for key in dialect.segmentation)
    assert of_inputs.tolist() == [[1, 1, 2, 2, 0], [1, 1, 1, 1, 1]]
    assert of_targets.tolist() == [[1, 1, 2, 0, 0], [1, 1, 1, 1, 0]]
    assert told["targets"].tolist() == [[6, 7, 9, 0, 0], [4, 5, 6, 7, 0]]
    assert {value.dtype for value in told.values()} == {np.dtype(np.int32)}
    assert told[dialect.positions] is told[dialect.target_positions], "converted and copied once"


def test_transformers_names_are_those_of_its_attention() -> None:
    assert (DIALECTS["transformers"].ends, DIALECTS["transformers"].longest) == (ENDS, LONGEST)


@given(made=batches(), weight=st.sampled_from([0.25, 2.0]))
def test_loss_weights_need_a_float_mask(made: Made, weight: float) -> None:
    batch, _ = made
    batch["loss_mask"] *= weight
    for dialect in DIALECTS.values():
        if not expected_terms(batch, dialect):
            continue
        if dialect.mask is None or dialect.mask_dtype != "float32":
            with pytest.raises(ConfigError, match=dialect.name):
                emit(batch, dialect)
        else:
            weights = read_back(emit(batch, dialect), dialect).terms.weights
            assert set(weights.tolist()) <= {0.0, weight}
            assert weights.sum() == weight * len(expected_terms(batch, dialect))


@pytest.mark.parametrize("name", NAMES)
def test_dialects_support_or_refuse_attention_windows(name: str, tmp_path: Any) -> None:
    dialect = DIALECTS[name]
    documents = make_dataset(tmp_path, [5, 9, 16, 3, 40, 1, 1, 7])
    lengths = np.array(documents.document_lengths)
    packed = PackedDataset(documents, pack(lengths, "decompose", buckets=(4, 8, 16), seed=0))
    layout = BatchLayout(micro_batch_tokens=32, kind="rows", row_tokens=16, cu_seqlens_per_row=True)
    ids = [i for i in range(len(packed)) if packed.samples.capacity_of(i) == 8]
    for window in (None, 4):
        batch = packed.micro_batch(ids[:4], layout=layout, view=StepView(window=window))
        del batch["dataset_ids"]  # else segmentation joins pieces of padding, all 0
        if window and dialect.restart:
            with pytest.raises(ConfigError, match="attention windows"):
                emit(batch, dialect)
            continue
        told = read_back(emit(batch, dialect), dialect)
        cut = batch["cu_seqlens"].diff().flatten()
        assert [length for _, length in told.segments] == cut[cut > 0].tolist()
        assert max(length for _, length in told.segments) <= (window or 8)


def test_dialects_support_or_refuse_aligned_segments(tmp_path: Any) -> None:
    documents = make_dataset(tmp_path, [5, 9, 3, 7])
    index = pack(np.array(documents.document_lengths), "bucket", buckets=(16,), seed=0, alignment=4)
    packed = PackedDataset(documents, index, alignment=4)
    layout = BatchLayout(micro_batch_tokens=32, kind="rows", row_tokens=16, cu_seqlens_per_row=True)
    batch = packed.micro_batch(range(2), layout=layout)
    for dialect in DIALECTS.values():
        if not dialect.padded_ends:
            with pytest.raises(ConfigError, match="aligned"):
                emit(batch, dialect)
            continue
        segments = read_back(emit(batch, dialect), dialect).segments
        assert all(begin % 4 == 0 for begin, _ in segments)
        whole = {length for _, length in segments}
        assert {5, 9, 3, 7} <= whole


@pytest.mark.parametrize("name", NAMES)
@given(made=batches())
def test_dialects_carry_or_refuse_columns(name: str, made: Made) -> None:
    dialect, (batch, _) = DIALECTS[name], made
    experts = torch.arange(batch["tokens"].numel() * 3).view(*batch["tokens"].shape, 3)
    with_column = {**batch, "experts": experts}
    if not dialect.columns:
        with pytest.raises(ConfigError, match=f"{dialect.name} passes only .* column experts"):
            emit(with_column, dialect)
        return
    told = emit(with_column, dialect)
    assert torch.equal(told.pop("experts"), experts) and told.keys() == emit(batch, dialect).keys()
    check_columns(["experts"], dialect)
    if dialect.ends[0] not in RESERVED:
        with pytest.raises(ConfigError, match=f"column {dialect.ends[0]} has a name of"):
            emit({**batch, dialect.ends[0]: experts}, dialect)
