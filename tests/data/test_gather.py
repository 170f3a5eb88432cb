"""The gather equals its plain-Python definition; a damaged index raises an error."""

from __future__ import annotations

import logging
import os
import pickle
import re
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from megapack.cli.main import main
from megapack.data import (
    BatchLayout,
    PackedDataset,
    allocate,
    block_diagonal_mask,
    check_token_ids,
    flex_block_mask,
    segment_ids,
)
from megapack.data import documents as documents_module
from megapack.data.batch import column_names
from megapack.data.fim import Fim as CoreFim
from megapack.data.steps import StepView
from megapack.errors import ConfigError, FormatError
from megapack.packing import SampleIndex, pack
from megapack.storage import IndexedDataset, IndexedDatasetBuilder
from megapack.storage.columns import INTERPRETED, LABELS, WEIGHTS
from tests.data.corpora import (
    bytes_of,
    column_of,
    column_specs,
    index_of,
    packed_as,
    random_documents,
    random_rows,
    write_columns,
    write_documents,
    write_labels,
    write_weights,
)
from tests.reference import gather as reference
from tests.reference.fim import Fim, Parts, transformed

DTYPES = ["uint8", "int8", "int16", "uint16", "int32", "int64"]
TENSORS = ("tokens", "labels", "loss_mask", "position_ids")


@st.composite
def corpora(draw: st.DrawFn, with_fim: bool = False) -> dict[str, Any]:
    """Draw documents, a bucket of samples with arbitrary pieces of them, options and a layout.

    With fill-in-the-middle most pieces are whole documents, since only these are transformed.
    """
    lengths = draw(st.lists(st.integers(0, 40), min_size=1, max_size=8).filter(any))
    capacity = draw(st.integers(40 if with_fim else 1, 48))
    pieces = [(d, n) for d, n in enumerate(lengths) if n]
    samples = []
    for _ in range(draw(st.integers(1, 6))):
        sample, remaining = [], capacity
        while remaining > 0 and len(sample) < 5 and (not sample or draw(st.booleans())):
            document, n = draw(st.sampled_from(pieces))
            begin, length = 0, n
            if n > remaining or not with_fim or draw(st.integers(0, 3)) == 3:
                begin = draw(st.integers(0, n - 1))
                length = draw(st.integers(1, min(remaining, n - begin)))
            sample.append((document, begin, length))
            remaining -= length
        samples.append(sample)
    fim = draw(fims()) if with_fim else None
    if fim is not None:
        capacity += 5 * 10
    places = [(i, s) for i, one in enumerate(samples) for s in range(len(one))]
    joined = draw(st.sets(st.sampled_from(places)))
    attention = draw(st.sampled_from(["document", "group", "sample"]))
    positions = ["segment", "sample", *(["document"] if attention != "group" else [])]
    alignment = draw(st.sampled_from([1, 1, 2, 8]))
    if alignment > 1:  # enough to align every segment
        capacity = -(-(capacity + 5 * alignment) // alignment) * alignment
    slots = draw(st.integers(1, 3))
    spare = draw(st.integers(0, capacity - 1)) // alignment * alignment
    row_tokens = capacity * slots + spare
    rows = -(-len(samples) // slots) + draw(st.integers(0, 1))
    return {
        "documents": random_documents(lengths, draw(st.integers(0, 99))),
        "samples": samples,
        "capacity": capacity,
        "rows": rows,
        "row_tokens": row_tokens,
        "dtype": draw(st.sampled_from(DTYPES)),
        "index_dtype": draw(st.sampled_from(["int32", "int64"])),
        "fim": fim,
        "chosen": fim is None and draw(st.booleans()),
        "joined": {(i, s) for i, s in joined if s},
        "weighed": draw(st.booleans()),
        "columns": draw(st.lists(column_specs(), max_size=4)),
        "factors": draw(st.none() | st.permutations([0.0, 0.5, 2.0, 3.0, 1.25, 0.3])),
        "loss": draw(st.sampled_from(["token_mean", "sequence_mean"])),
        "window": draw(st.sampled_from([None, None, alignment, 3 * alignment, 16 * alignment])),
        "options": {
            "positions": draw(st.sampled_from(positions)),
            "attention": attention,
            "label_boundary": draw(st.sampled_from(["document", "sample"])),
            "alignment": alignment,
            "pad_token": draw(st.sampled_from([0, 3])),
        },
    }


# Words (one is likely to be cut twice), halves of characters, whole characters, and no text, like
# special tokens.
_TEXTS = [b"a", b" the", b"", b" fill-in-the-middle", b"\xc3", b"\xa9x"]
_TEXTS += ["\u00e9".encode(), "\u65e5\u672c".encode()]


@st.composite
def fims(draw: st.DrawFn) -> dict[str, Any]:
    """Draw fill-in-the-middle of documents of up to ``longest`` tokens, with epochs and rates."""
    longest = draw(st.sampled_from([40, 40, 20, 5]))
    end, eod = draw(st.sampled_from([None, 1003])), draw(st.none() | st.integers(1, 119))
    spm_rate, seed = draw(st.sampled_from([0.0, 0.5, 1.0])), draw(st.integers(0, 2**64 - 1))
    fim = Fim(1000, 1001, 1002, end, eod, spm_rate, seed)
    if draw(st.booleans()):
        rng = np.random.default_rng(draw(st.integers(0, 99)))
        fim = replace(fim, text=[_TEXTS[i] for i in rng.integers(0, len(_TEXTS), 110)], parts={})
        for token, text in enumerate(fim.text):
            for at in range(1, len(text)):
                if text[at] & 0xC0 != 0x80 and rng.random() < 0.8:
                    left_part, right_part = (
                        rng.integers(0, 300, rng.integers(1, 3)).tolist() for _ in "LR"
                    )
                    fim.parts[token, at] = Parts(left_part, right_part)
    return {
        "fim": fim,
        "longest": longest,
        "epochs": draw(st.lists(st.integers(0, 3), min_size=6, max_size=6)),
        "rates": draw(st.lists(st.sampled_from([1.0, 1.0, 0.5, 0.0]), min_size=6, max_size=6)),
    }


def core_fim(fim: Fim) -> CoreFim:
    names = ("prefix", "suffix", "middle", "spm_rate", "end", "eod")
    given = {name: -1 if getattr(fim, name) is None else getattr(fim, name) for name in names}
    if fim.text is None:
        return CoreFim(**given)
    characters = [sum(byte & 0xC0 != 0x80 for byte in text) for text in fim.text]
    first_cut, first_part, parts = [0], [0], []
    for token, text in enumerate(fim.text):
        inner = [at for at in range(1, len(text)) if text[at] & 0xC0 != 0x80]
        for side in (one for at in inner for one in fim.parts.get((token, at), ([], []))):
            parts += side
            first_part.append(len(parts))
        first_cut.append(first_cut[-1] + len(inner))
    tables = [np.array(table, np.int64) for table in (characters, first_cut, first_part, parts)]
    return CoreFim(**given, tables=tuple(tables))


def _choose(documents: list[list[int]]) -> list[list[int]]:
    """Draw chosen labels, 0 among them: an id like any other."""
    return [[t % 5 if t % 3 else -100 for t in document] for document in documents]


def _weigh(documents: list[list[int]]) -> list[list[float]]:
    """Draw float16 weights of all sizes, 0 among them."""
    sizes = [0.0, 1.0, 0.5, 3.25, 2.0**-24, 65504.0, 2.0**-14, float(np.float16(0.1))]
    return [[sizes[(t + i) % 8] for i, t in enumerate(document)] for document in documents]


def _columns(case: dict[str, Any]) -> dict[str, Any]:
    """Return type and random rows of every column by name."""
    size = sum(map(len, case["documents"]))
    return {f"c{i}": (spec, random_rows(spec, size, i)) for i, spec in enumerate(case["columns"])}


def write_case(folder: Path, case: dict[str, Any]) -> IndexedDataset:
    """Write the documents of a case with their labels and weights."""
    documents = case["documents"]
    dataset = write_documents(folder / "docs", documents, case["dtype"])
    if case["chosen"]:
        write_labels(folder / "docs", _choose(documents))
    if case["weighed"]:
        write_weights(folder / "docs", _weigh(documents))
    return dataset


def _open(folder: Path, case: dict[str, Any]) -> PackedDataset:
    dataset = write_case(folder, case)
    columns = _columns(case)
    if columns:
        write_columns(folder / "docs", columns)
        dataset = IndexedDataset(folder / "docs")
    index = samples_of(case)
    options = {"loss": case["loss"], "columns": list(columns), **case["options"]}
    packed = PackedDataset(dataset, index, **options)
    if case["fim"] is not None:  # without tokenizer and manifest
        fim = core_fim(case["fim"]["fim"])
        packed._connect([index], packed.samples.mixture, fim=fim)
    return packed


def samples_of(case: dict[str, Any]) -> SampleIndex:
    lengths = [len(document) for document in case["documents"]]
    samples = {case["capacity"]: case["samples"]}
    index = index_of(samples, lengths, begin_dtype=case["index_dtype"])
    if case["fim"] is not None:
        room = case["capacity"] - case["fim"]["longest"]
        index = replace(index, parameters={"fim_room": room})
    if case["options"]["attention"] != "group":
        return index
    places = [(i, s) for i, sample in enumerate(case["samples"]) for s in range(len(sample))]
    joined = np.array([place in case["joined"] for place in places], np.uint8)
    return replace(index, segment_joined=joined, groups={"ids": "by hand"})


# MEGAPACK_GATHER_CASES sets the number of random batches.
@settings(max_examples=int(os.environ.get("MEGAPACK_GATHER_CASES", 4 * settings().max_examples)))
@pytest.mark.parametrize("with_fim", [False, True])
@given(
    data=st.data(),
    kind=st.sampled_from(["stream", "rows", "per row"]),
    extra=st.sampled_from([None, 0, 7]),
)
def test_micro_batch_is_as_defined(
    with_fim: bool, data: st.DataObject, kind: str, extra: int | None
) -> None:
    """cu_seqlens per row are always padded, by default to the longest row."""
    case = data.draw(corpora(with_fim=with_fim))
    rows, row_tokens = case["rows"], case["row_tokens"]
    ids = np.arange(len(case["samples"]))
    documents, samples = case["documents"], case["samples"]
    options = {name: case[name] for name in ("factors", "loss", "joined", "window")}
    options["chosen"] = _choose(documents) if case["chosen"] else None
    options["weights"] = _weigh(documents) if case["weighed"] else None
    columns = _columns(case)
    lengths = [len(document) for document in documents]
    options["columns"] = {n: column_of(*column, lengths) for n, column in columns.items()}
    draws = {}
    if case["fim"] is not None:
        given = {**case["fim"], **{n: options[n] for n in ("weights", "columns")}}
        documents, options["weights"], samples, which = transformed(documents, samples, **given)
        epochs, rates = (np.array(given[name])[ids] for name in ("epochs", "rates"))
        draws = {"epochs": epochs, "fim_rates": rates, "seed": given["fim"].seed}
    sizes = {"num_rows": rows, "row_tokens": row_tokens, "capacity": case["capacity"]}
    expected = reference.gather(documents, samples, **sizes, **options, **case["options"])
    per_row = kind == "per row"
    lists = expected.cu_seqlens_of_rows(row_tokens) if per_row else [expected.cu_seqlens()]
    num_cu_seqlens = None if extra is None else max(map(len, lists)) + extra
    bounds = {"num_cu_seqlens": num_cu_seqlens, "cu_seqlens_per_row": per_row}
    bounds["cu_seqlens"] = "exact" if extra is None and not per_row else "padded"
    bounds["kind"] = "stream" if kind == "stream" else "rows"
    layout = BatchLayout(micro_batch_tokens=rows * row_tokens, row_tokens=row_tokens, **bounds)
    with tempfile.TemporaryDirectory() as folder:
        dataset = _open(Path(folder), case)
        factors = case["factors"] and case["factors"][: len(ids)]
        weights = factors and np.array(factors, np.float32)
        view = StepView(loss_weight=weights, window=case["window"], **draws)
        batch = dataset.micro_batch(ids, layout=layout, capacity=case["capacity"], view=view)
        totals = dataset.samples.label_totals(ids, view)
        if draws:
            drawn = dataset._gatherer.fim_draws(ids, view.core)
            assert list(zip(drawn[0], drawn[1], strict=True)) == which
    if per_row and extra is None:
        num_cu_seqlens = dataset.max_cu_seqlens(layout, case["capacity"], case["window"])
    assert totals.labels.sum() == sum(label >= 0 for label in expected.labels)
    of_samples = totals.weight if case["loss"] == "token_mean" else totals.sequences
    weighed = np.dot(factors or np.ones(len(ids)), of_samples)
    assert weighed == pytest.approx(sum(expected.loss_mask))
    shape = (1, rows * row_tokens) if kind == "stream" else (rows, row_tokens)
    for name in TENSORS:
        assert batch[name].shape == shape
        assert batch[name].flatten().tolist() == getattr(expected, name), name
    assert sorted(column_names(batch)) == list(columns)
    for name, (spec, _) in columns.items():
        assert batch[name].shape == (*shape, *spec.shape)
        assert batch[name].dtype == getattr(torch, spec.dtype)
        assert bytes_of(batch[name]) == b"".join(expected.columns[name]), name
    assert batch["cu_seqlens"].dtype == torch.int32
    assert batch["max_seqlen"] == max(expected.rooms)
    for name, source_name in (("cu_seqlens", "lengths"), ("cu_seqlens_padded", "rooms")):
        if source_name == "rooms" and case["options"]["alignment"] == 1:
            assert name not in batch
            continue
        lists = (
            expected.cu_seqlens_of_rows(row_tokens, source_name)
            if per_row
            else [expected.cu_seqlens(source_name)]
        )
        for actual, wanted in zip(torch.atleast_2d(batch[name]).tolist(), lists, strict=True):
            size = num_cu_seqlens or len(wanted)
            assert actual == wanted + wanted[-1:] * (size - len(wanted))


def test_max_seqlen_includes_alignment_padding(tmp_path: Path) -> None:
    """Kernels need the end of aligned segments including their padding."""
    packed = packed_as(tmp_path, [[1, 2, 3, 4, 5]], {8: [[(0, 0, 5)]]}, alignment=8)
    layout = BatchLayout(micro_batch_tokens=8)
    batch = packed.micro_batch(np.array([0]), layout=layout, capacity=8)
    assert batch["cu_seqlens"].tolist() == [0, 5]
    assert batch["max_seqlen"] == 8


def test_a_bare_micro_batch_is_one_stream_and_a_sample_one_row(tmp_path: Path) -> None:
    documents = random_documents([4, 8, 3])
    packed = packed_as(tmp_path, documents, {8: [[(0, 0, 4), (2, 0, 3)], [(1, 0, 8)]]})
    batch = packed.micro_batch([1, 0])
    assert batch["tokens"].tolist() == [documents[1] + documents[0] + documents[2] + [0]]
    sample = packed[-1]
    assert sample["tokens"].tolist() == documents[1]
    with pytest.raises(IndexError):
        packed[2]


def test_an_empty_micro_batch_is_padding_without_a_label(tmp_path: Path) -> None:
    packed = packed_as(tmp_path, [[1] * 8], {8: [[(0, 0, 8)]]})
    layout = BatchLayout(micro_batch_tokens=24)
    batch = packed.micro_batch([], layout=layout, capacity=8)
    assert batch["cu_seqlens"].tolist() == [0, 8, 16, 24]  # more than one segment
    assert batch["loss_mask"].sum() == 0 and (batch["labels"] == -100).all()
    with pytest.raises(ValueError, match="needs the capacity of its bucket"):
        packed.micro_batch([])


def test_buffers_are_filled_in_place_and_must_fit(tmp_path: Path) -> None:
    packed = packed_as(tmp_path, [range(1, 9)], {8: [[(0, 0, 8)]]})
    out = allocate(8)
    batch = packed.micro_batch([0], out=out)
    for name in TENSORS:
        assert batch[name].data_ptr() == out[name].data_ptr()
    assert out["tokens"].tolist() == list(range(1, 9))
    with pytest.raises(ValueError, match="elements"):
        packed.micro_batch([0], out=allocate(9))


DAMAGES = [
    ("segment_document", 3, "names document 3 of 3"),
    ("segment_document", -1, "names document -1"),
    ("segment_document", 2**31 - 1, "names document"),
    ("segment_begin", -1, "tokens \\[-1"),
    ("segment_begin", 4, "of a document of 4"),
    ("segment_begin", 2**31 - 1, "of a document of 4"),
    ("segment_length", 5, "of a document of 4"),
    ("segment_length", 0, "of a document of 4"),
    ("segment_length", -4, "of a document of 4"),
    ("segment_length", 2**31 - 1, "of a document of 4"),
    ("sample_segment_offsets", 2**40, "claims segments"),
    ("sample_segment_offsets", -5, "claims segments"),
]


@pytest.mark.parametrize(("array", "value", "message"), DAMAGES)
def test_index_beyond_the_documents_raises(
    tmp_path: Path, array: str, value: int, message: str
) -> None:
    dataset = write_documents(tmp_path / "d", random_documents([4, 8, 3]))
    index = index_of({8: [[(0, 0, 4), (2, 0, 3)], [(1, 0, 8)]]}, [4, 8, 3])
    values = getattr(index, array).copy()
    values[0] = value
    packed = PackedDataset(dataset, replace(index, **{array: values}))
    with pytest.raises(FormatError, match=message):
        packed.micro_batch([0])
    with pytest.raises(FormatError):
        packed.count_labels([0])
    with pytest.raises(FormatError):
        packed.samples.attention_cost(np.array([0]), 8) if "offset" in array else packed[0]


def test_missing_and_unfitting_samples_are_refused(tmp_path: Path) -> None:
    documents = random_documents([4, 8])
    packed = packed_as(tmp_path, documents, {4: [[(0, 0, 4)]], 8: [[(1, 0, 8)]]})
    few = BatchLayout(micro_batch_tokens=8, cu_seqlens="padded", num_cu_seqlens=1)
    not_finite = StepView(loss_weight=np.array([np.nan], np.float32))
    for ids, options, kind, message in (
        *(([bad], {"capacity": 8}, IndexError, "2 samples") for bad in (2, -1, 2**40)),
        *((wrong, {}, TypeError, "give integers") for wrong in ([1.7], [True], ["1"])),
        ([1], {"view": not_finite}, ValueError, r"loss_weight is \[nan\]"),
        ([1], {"capacity": 4}, FormatError, "more than 4 tokens"),
        ([0, 0], {"layout": BatchLayout(micro_batch_tokens=4)}, ValueError, "for 1 slots"),
        ([1], {"layout": few}, ValueError, "raise num_cu_seqlens"),
        ([1], {"layout": BatchLayout(micro_batch_tokens=12)}, ConfigError, "in rows of 8 cannot"),
    ):
        with pytest.raises(kind, match=message):
            packed.micro_batch(ids, **options)
    with pytest.raises(ConfigError, match="row_tokens is 0; it must be above 0"):
        BatchLayout(micro_batch_tokens=8, row_tokens=0)


def test_segments_that_do_not_fit_when_aligned_are_refused_with_the_remedy(tmp_path: Path) -> None:
    sample = [(0, 0, 3), (1, 0, 3), (2, 0, 2)]
    packed = packed_as(tmp_path, random_documents([3, 3, 2]), {8: [sample]}, alignment=4)
    remedy = r"pack with alignment=4 .*--alignment 4\), or make the row"
    with pytest.raises(ValueError, match=remedy):
        packed[0]
    batch = packed.micro_batch([0], layout=BatchLayout(micro_batch_tokens=12, row_tokens=12))
    assert batch["cu_seqlens_padded"].tolist() == [0, 4, 8, 12]


@pytest.mark.parametrize("name", INTERPRETED)
def test_labels_and_weights_of_earlier_versions_are_refused(tmp_path: Path, name: str) -> None:
    """They were datasets. The command in the message makes columns of them."""
    dataset = write_documents(tmp_path / "d", random_documents([4, 4]))
    index = pack(dataset.document_lengths, "concat", buckets=[4])
    old = {LABELS: [[-100, 0, -100, 0]] * 2, WEIGHTS: [[0x4000] * 4] * 2}[name]  # 2.0 as float16
    metadata = {} if name == LABELS else {"loss_weights": "float16"}
    dtype = np.int32 if name == LABELS else np.uint16
    with IndexedDatasetBuilder(
        tmp_path / f"d.{name}", dtype, allow_negative=name == LABELS, metadata=metadata
    ) as builder:
        for rows in old:
            builder.add_document(rows)
    with pytest.raises(ConfigError, match=f"d.{name} is a dataset, .*`(megapack-build .*)`") as e:
        PackedDataset(dataset, index)
    option = {LABELS: "labels", WEIGHTS: "token_weights"}[name]
    assert PackedDataset(dataset, index, **{option: None})[0]["loss_mask"].sum() == 3
    command = re.search(r"`megapack-build (.*)`", str(e.value))
    assert command is not None
    assert main(command[1].split()) == 0
    data = PackedDataset(str(tmp_path / "d"), index)
    assert data[0]["loss_mask"].tolist() == {LABELS: [1, 0, 1, 0], WEIGHTS: [2, 2, 2, 0]}[name]


def test_damaged_idx_block_is_refused_by_its_first_reader(tmp_path: Path) -> None:
    lengths = np.full(200_000, 2)
    with IndexedDatasetBuilder(tmp_path / "d", np.uint16) as builder:
        builder.add_documents(np.arange(400_000) % 9, np.cumsum([0, *lengths]))
    dataset = IndexedDataset(tmp_path / "d")
    index = pack(lengths, "next_fit", buckets=2, shuffle=False)  # sample i is document i
    index.save(tmp_path / "d.samples", source=dataset)
    fingerprint = dataset.fingerprint
    data = bytearray((tmp_path / "d.idx").read_bytes())
    # In a block that the fingerprint does not cover.
    sequence = ((22 << 16) - 34 - 4 * 200_000) // 8 + 100
    at = 34 + 4 * 200_000 + 8 * sequence
    data[at : at + 16] = data[at + 8 : at + 16] + data[at : at + 8]
    (tmp_path / "d.idx").write_bytes(data)
    assert IndexedDataset(tmp_path / "d").fingerprint == fingerprint
    packed = PackedDataset(tmp_path / "d", tmp_path / "d.samples")
    for each in (packed, pickle.loads(pickle.dumps(packed))):
        assert each[sequence - 30_000]["tokens"].numel() == 2
        for number in (sequence, sequence + 7_000):  # the second document is intact
            with pytest.raises(FormatError, match=r"d\.idx is damaged: bytes 1441792 to 1507328"):
                each.micro_batch([number])
        with pytest.raises(FormatError, match=r"d\.idx is damaged"):
            each.count_labels([sequence])


# ---- Masks from cu_seqlens equal the segments


rows = st.lists(st.integers(1, 9), min_size=1, max_size=6)


@given(lengths=rows, fill=st.integers(0, 3))
def test_segment_ids_ignore_repeated_last_values(lengths: list[int], fill: int) -> None:
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    cu_seqlens = torch.cat([cu_seqlens, cu_seqlens[-1:].repeat(fill)]).int()
    expected = [i for i, length in enumerate(lengths) for _ in range(length)]
    assert segment_ids(cu_seqlens, sum(lengths)).tolist() == expected


def test_segment_ids_of_rows_start_over_in_every_row() -> None:
    cu_seqlens = torch.tensor([[0, 2, 6, 6], [0, 1, 3, 6]], dtype=torch.int32)
    assert segment_ids(cu_seqlens, 6).tolist() == [[0, 0, 1, 1, 1, 1], [0, 1, 1, 2, 2, 2]]


@given(lengths=rows, causal=st.booleans())
def test_dense_mask_limits_attention_to_segments(lengths: list[int], causal: bool) -> None:
    cu_seqlens = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    owner = [i for i, length in enumerate(lengths) for _ in range(length)]
    mask = block_diagonal_mask(segment_ids(cu_seqlens, sum(lengths)), causal=causal)
    assert mask.shape == (1, 1, sum(lengths), sum(lengths))
    for q, segment in enumerate(owner):
        for k, other in enumerate(owner):
            assert mask[0, 0, q, k] == (segment == other and (k <= q or not causal))


def test_flex_attention_equals_the_dense_mask() -> None:
    from torch.nn.attention.flex_attention import flex_attention  # noqa: PLC0415

    torch.manual_seed(0)
    cu_seqlens = torch.tensor([[0, 40, 128, 128], [0, 7, 100, 128]], dtype=torch.int32)
    segments = segment_ids(cu_seqlens, 128)
    q, k, v = (torch.randn(2, 2, 128, 16) for _ in range(3))
    mask = block_diagonal_mask(segments)
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    flex = flex_attention(q, k, v, block_mask=flex_block_mask(segments))
    assert torch.allclose(flex, expected, atol=1e-5)


# ---- Token ids beyond the vocabulary are found before training, with and without metadata


def packed(dataset: IndexedDataset) -> PackedDataset:
    return PackedDataset(dataset, pack(dataset.document_lengths, buckets=[4]))


def forget(dataset: IndexedDataset) -> IndexedDataset:
    Path(f"{dataset.prefix}.meta.json").unlink()
    return IndexedDataset(dataset.prefix)


@pytest.mark.parametrize("with_meta", [True, False])
def test_an_id_as_large_as_the_vocabulary_is_refused(tmp_path: Path, with_meta: bool) -> None:
    dataset = write_documents(tmp_path / "text", [[1, 2, 3], [7, 99, 4, 5]])
    data = packed(dataset if with_meta else forget(dataset))
    check_token_ids(data, 100)
    with pytest.raises(ConfigError, match=r"text holds token id 99, and the model has ids below"):
        check_token_ids(data, 99)


def test_chosen_labels_are_checked_too(tmp_path: Path) -> None:
    text = write_documents(tmp_path / "text", [[1, 2, 3], [4, 5]])
    write_labels(tmp_path / "text", [[-100, 9, -100], [-100, 5]])
    data = packed(text)
    check_token_ids(data, 10)
    with pytest.raises(ConfigError, match=r"column labels of .*text holds token id 9"):
        check_token_ids(data, 9)


def test_large_file_without_metadata_is_sampled_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(documents_module, "_BLOCKS", 4)
    monkeypatch.setattr(documents_module, "_BLOCK_TOKENS", 8)
    tokens = [1] * 400
    tokens[-400 // 4 :] = [50] * 100
    data = packed(forget(write_documents(tmp_path / "text", [tokens])))
    logging.getLogger("megapack").propagate = True
    with caplog.at_level(logging.WARNING), pytest.raises(ConfigError, match="token id 50"):
        check_token_ids(data, 50)
    assert "no .meta.json" in caplog.text and "of it" in caplog.text


def test_narrow_dtypes_are_not_searched(tmp_path: Path) -> None:
    data = packed(forget(write_documents(tmp_path / "text", [[65535]])))
    check_token_ids(data, 65536)
    with pytest.raises(ConfigError, match="65535"):
        check_token_ids(data, 65535)
