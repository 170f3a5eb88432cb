"""Columns: builder, readers, merge, verify, repair and import against a plain definition."""

from __future__ import annotations

import itertools
import json
import math
import operator
import os
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import PYTHON, ended
from reference.columns import bfloat16, column_bytes, number_bytes

from megapack.errors import (
    ConfigError,
    DataError,
    FormatError,
    IndexMismatchError,
    LockedError,
)
from megapack.storage import IndexedDataset, IndexedDatasetBuilder, columns
from megapack.storage.column_edits import (
    add_column,
    export_column,
    export_dataset,
    remove_column,
    spec_of,
    values_of_dataset,
)
from megapack.storage.columns import (
    DTYPES,
    INTERPRETED,
    LABELS,
    WEIGHTS,
    ColumnSpec,
    column_path,
    column_spec,
)
from megapack.storage.dataset import check_converted
from megapack.storage.importing import import_dataset
from megapack.storage.index_writer import dataset_files
from megapack.storage.locks import WriterLock
from megapack.storage.merge import merge
from megapack.storage.repair import repair
from megapack.storage.verify import verify
from storage.strategies import errors, names, write_foreign

REWARDS = ColumnSpec(dtype="float32", of="target")
EXPERTS = ColumnSpec(dtype="uint8", shape=(2, 3), fill=255)
BOTH = {"rewards": REWARDS, "experts": EXPERTS}


def rows_of(spec: ColumnSpec, lengths: list[int], seed: int = 0) -> list[np.ndarray]:
    """Return random rows of each document."""
    random = np.random.default_rng(seed)
    sizes = [(length, *spec.shape) for length in lengths]
    return [random.integers(0, 200, size).astype(spec.numpy_dtype) for size in sizes]


def build(prefix: Path, lengths: list[int], seed: int = 0, specs: dict = BOTH) -> None:
    values = {name: rows_of(spec, lengths, seed) for name, spec in specs.items()}
    with IndexedDatasetBuilder(prefix, np.uint16, columns=specs, overwrite=True) as builder:
        for i, length in enumerate(lengths):
            rows = {name: value[i] for name, value in values.items()}
            builder.add_document(np.arange(length), columns=rows)


def contents(prefix: Path) -> dict[str, bytes] | None:
    """Return tokens and columns of a dataset; None without one. It must be valid."""
    if not IndexedDataset.exists(prefix):
        return None
    assert not errors(prefix)
    dataset = IndexedDataset(prefix)
    found = {"tokens": dataset.tokens.tobytes(), "lengths": dataset.document_lengths.tobytes()}
    return found | {name: column.rows.tobytes() for name, column in dataset.columns.items()}


# ---- Types and numbers ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_stored_bytes_equal_the_definition(dtype: str, data: st.DataObject) -> None:
    if "int" in dtype:
        info = np.iinfo(dtype)
        number = st.integers(int(info.min), int(info.max))
    else:
        limit = {"float16": 65504.0, "bfloat16": 3.3e38, "float32": 3.4e38}[dtype]
        number = st.floats(-limit, limit) | st.integers(-5, 5).map(float)
    if dtype == "bfloat16":  # also ties between two neighbors
        halves = st.integers(0, 0x7F7E).map(lambda half: (bfloat16(half) + bfloat16(half + 1)) / 2)
        near = st.sampled_from([-(2.0**-40), 2.0**-40]).map(lambda share: 1 + share)
        number |= halves.map(float) | st.builds(operator.mul, halves.map(float), near)
    values = data.draw(st.lists(number, max_size=6))
    stored = ColumnSpec(dtype=dtype).rows(values)
    expected = b"".join(number_bytes(dtype, value) for value in values)
    if "float" in dtype:  # the sign of zero: -0.0 is kept, and small numbers may round to it
        zeros = stored.view("<u2" if stored.itemsize == 2 else "<u4").copy()
        expected_bits = np.frombuffer(expected, zeros.dtype).copy()
        for bits in (zeros, expected_bits):
            bits[bits == 1 << (8 * bits.itemsize - 1)] = 0
        assert zeros.tolist() == expected_bits.tolist()
    else:
        assert stored.tobytes() == expected


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"dtype": "float64"}, "column dtype is 'float64'; it is one of int8"),
        ({"dtype": "int8", "shape": (0,)}, r"column shape \[0\]"),
        ({"dtype": "float32", "shape": (16385,)}, "65540 bytes per token"),
        ({"dtype": "uint8", "fill": -1}, "column fill is -1, which is not a finite uint8"),
        ({"dtype": "float16", "fill": 1e9}, "column fill is 1000000000.0"),
        ({"dtype": "float32", "fill": math.nan}, "column fill is nan"),
        ({"dtype": "float32", "fill": 10**400}, "column fill is 1000"),
        ({"dtype": "float32", "fill": "0"}, "column fill is '0', which is not a finite float32"),
        ({"dtype": "uint8", "fill": True}, "column fill is True"),  # JSON's true is no number
        ({"dtype": "uint8", "shape": 2}, r"column shape is 2; give integers, as in \(8,\)"),
        ({"dtype": "int8", "of": "labels"}, "a column is of 'labels'"),
    ],
)
def test_wrong_types_are_refused(spec: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ColumnSpec(**spec)


def test_numbers_of_numpy_and_lists_are_exact() -> None:
    spec = ColumnSpec(dtype="uint64", shape=[np.int64(2)], fill=np.uint64(2**64 - 1))  # type: ignore[arg-type]
    assert spec == ColumnSpec(dtype="uint64", shape=(2,), fill=2**64 - 1)
    assert spec.rows([[np.uint64(2**63), 1]]).tolist() == [[2**63, 1]]
    assert ColumnSpec(dtype="float32").rows([2**70, 0.5]).tolist() == [2.0**70, 0.5]
    bits = np.array([0x3F80], ">u2")
    assert ColumnSpec(dtype="bfloat16").rows(bits).tolist() == [0x3F80]


@pytest.mark.parametrize("fill", [2**64 - 1, 2**63 + 1, 2**53 + 1])
def test_large_fill_values_are_read_back(tmp_path: Path, fill: int) -> None:
    spec = ColumnSpec(dtype="uint64", fill=fill)
    with IndexedDatasetBuilder(tmp_path / "d", np.uint16) as builder:
        builder.add_document([1])
    add_column(tmp_path / "d", "u", np.array([5], np.uint64), spec)
    assert IndexedDataset(tmp_path / "d").columns["u"].spec == spec
    assert spec.fill_row.view(np.uint64).tolist() == [fill]


def test_a_damaged_meta_file_of_columns_is_not_optional(tmp_path: Path) -> None:
    columns = {"b": ColumnSpec(dtype="int8"), "a": ColumnSpec(dtype="int8")}
    for name, specs in (("d", columns), ("d.x", {"c": columns["a"]}), ("e", {})):
        with IndexedDatasetBuilder(tmp_path / name, np.uint16, columns=specs) as builder:
            builder.add_document([1], columns={key: [1] for key in specs} or None)
        os.truncate(tmp_path / f"{name}.meta.json", 99)
    for name, remedy in (
        ("d", "restore it from a copy, or delete it and add the columns a, b again"),
        ("d.x", "restore it from a copy, or delete it and add the columns c again"),
        ("e", "it is optional, delete it"),
    ):
        with pytest.raises(FormatError, match=remedy):
            IndexedDataset(tmp_path / name).columns  # noqa: B018
        assert any(finding.message.endswith(remedy) for finding in verify(tmp_path / name))


def test_a_npy_of_one_number_has_no_rows(tmp_path: Path) -> None:
    with IndexedDatasetBuilder(tmp_path / "d", np.uint16) as builder:
        builder.add_document([1])
    with pytest.raises(DataError, match="column a: no rows for 1 tokens"):
        add_column(tmp_path / "d", "a", np.array(3), ColumnSpec(dtype="int64"))


@pytest.mark.parametrize(
    ("dtype", "values", "message"),
    [
        ("int8", [128], "column value 128 is outside int8"),
        ("uint64", [-1], "column value -1 is outside uint64"),
        ("int64", np.array([2**63], np.uint64), "is outside int64"),
        ("int32", [0.5], "column values are float64, and the column is int32"),
        ("float16", [70000.0], "column value 70000.0 is outside float16"),
        ("bfloat16", [3.4e38], r"column value 3.4e\+38 is outside bfloat16"),
        ("int32", [None], "column values are object; give numbers"),
        ("int64", [2**64], "column value 18446744073709551616 is outside int64"),
        ("float32", ["x"], "column values are <U1; give numbers"),
        ("float32", [2**130], "is outside float32"),
        ("float32", [10**400, 0.5], "a column value is outside float32"),
        ("bfloat16", [1e300], r"column value 1e\+300 is outside bfloat16"),
        ("float32", [[1], [1, 2]], "rows of different shapes"),
        ("float32", [[1], [2]], r"rows have shape \[2, 1\]; the column has one row of shape \[\]"),
    ],
)
def test_values_that_do_not_fit_are_refused(dtype: str, values: object, message: str) -> None:
    with pytest.raises(DataError, match=message):
        ColumnSpec(dtype=dtype).rows(values)


# ---- Builder and reader --------------------------------------------------------------------------

shapes = st.sampled_from([(), (1,), (3,), (2, 2)])
specs = st.builds(
    ColumnSpec,
    dtype=st.sampled_from(DTYPES),
    shape=shapes,
    fill=st.integers(0, 9),
    of=st.sampled_from(["token", "target"]),
)


@given(
    lengths=st.lists(st.integers(0, 5), max_size=8),
    types=st.dictionaries(st.sampled_from(["a", "b2", "c_c"]), specs, max_size=3),
    how=st.sampled_from(["documents", "items", "flat", "index", "added"]),
    stretch=st.sampled_from([7, 64, 1 << 24]),
    buffer=st.sampled_from([0, 16, 1 << 19]),
)
@settings(max_examples=120, deadline=None)
def test_columns_equal_the_definition(
    tmp_path_factory: pytest.TempPathFactory,
    lengths: list[int],
    types: dict[str, ColumnSpec],
    how: str,
    stretch: int,
    buffer: int,
) -> None:
    root = tmp_path_factory.mktemp("columns")
    numbers = {
        name: [
            np.random.default_rng(len(name) + i).integers(0, 99, (length, *spec.shape))
            for i, length in enumerate(lengths)
        ]
        for name, spec in types.items()
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(columns, "STRETCH_BYTES", stretch)
        patch.setattr(columns, "_BUFFER_BYTES", buffer)
        _write_as(how, root, lengths, types, numbers)
    dataset = IndexedDataset(root / "out")
    assert list(dataset.columns) == sorted(types)
    for name, spec in types.items():
        rows = [[row.reshape(-1).tolist() for row in each] for each in numbers[name]]
        expected = column_bytes(spec.dtype, rows)
        assert column_path(root / "out", name).read_bytes() == expected
        column = dataset.columns[name]
        assert (column.spec, column.name) == (spec, name)
        assert column.rows.shape == (sum(lengths), *spec.shape)
        assert column.rows.tobytes() == column.mapped_bytes.tobytes() == expected
        assert not column.rows.flags.writeable
    assert not errors(root / "out")


def _write_as(
    how: str, root: Path, lengths: list[int], types: dict[str, ColumnSpec], numbers: dict
) -> None:
    flat = {
        name: np.concatenate([np.zeros((0, *types[name].shape)), *n]) for name, n in numbers.items()
    }
    flat = {
        name: each.astype(np.int64)
        if "int" in types[name].dtype or types[name].dtype == "bfloat16"
        else each
        for name, each in flat.items()
    }
    tokens = np.arange(sum(lengths)) % 99
    offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    if how == "added":
        write_foreign(
            root / "out",
            [[tokens[a:b].tolist()] for a, b in itertools.pairwise(offsets)],
        )
        for i, (name, spec) in enumerate(types.items()):
            values = numbers[name] if i % 2 else flat[name]
            assert add_column(root / "out", name, values, spec)
        return
    path = root / ("part" if how == "index" else "out")
    with IndexedDatasetBuilder(path, np.uint16, columns=types) as builder:
        if how in ("flat", "index"):
            builder.add_documents(tokens, offsets, columns=flat)
        for i, length in enumerate(lengths if how in ("documents", "items") else []):
            ids = tokens[offsets[i] : offsets[i + 1]]
            rows = {name: each[i] for name, each in numbers.items()}
            if how == "documents":
                cut = [length // 2, length - length // 2]
                builder.add_document(ids, cut, columns=rows)
                continue
            for part in (slice(0, length // 2), slice(length // 2, None)):
                builder.add_item(ids[part], columns={n: r[part] for n, r in rows.items()})
            builder.end_document()
    if how == "index":
        with IndexedDatasetBuilder(root / "out", np.uint16, columns=types) as builder:
            builder.add_index(path)


def test_a_refused_document_adds_nothing(tmp_path: Path) -> None:
    good = {"rewards": [1.0, 2.0], "experts": np.ones((2, 2, 3), np.uint8)}
    with IndexedDatasetBuilder(tmp_path / "a", np.uint16, columns=BOTH) as builder:
        builder.add_document([1, 2], columns=good)
        for tokens, given_columns, message in (
            ([1, 2], None, "document 1 has the columns none, this dataset experts, rewards"),
            ([1, 2], good | {"x": [1, 2]}, "has the columns experts, rewards, x"),
            ([1, 2, 3], good, "document 1, column rewards: 2 rows for 3 tokens"),
            ([1, 2], good | {"rewards": [1, 1e39]}, "column rewards: column value 1e[+]39"),
            ([1, -2], good | {"rewards": [8, 9]}, "token id -2"),
            ([3, 4], good, None),
            # larger than every buffer, and refused by its last token
            (
                [1] * 400_000 + [-3],
                {n: np.repeat(v[:1], 400_001, 0) for n, v in good.items()},
                "-3",
            ),
        ):
            if message is None:
                builder.add_document(tokens, columns=given_columns)
                continue
            with pytest.raises(DataError, match=message):
                builder.add_document(tokens, columns=given_columns)
        builder.add_document([3, 4], columns=good)
    dataset = IndexedDataset(tmp_path / "a")
    assert dataset.tokens.tolist() == [1, 2, 3, 4, 3, 4]
    assert dataset.columns["rewards"].rows.tolist() == [1, 2] * 3
    assert not errors(tmp_path / "a")


def test_datasets_without_columns_keep_their_meta_file(tmp_path: Path) -> None:
    build(tmp_path / "a", [3], specs={})
    assert "columns" not in json.loads((tmp_path / "a.meta.json").read_text())
    assert IndexedDataset(tmp_path / "a").columns == {}


@pytest.mark.parametrize("name", ["loss_mask", "Rewards", "1a", "a.b", "a" * 65, "", "tokens"])
def test_invalid_names_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="column name"):
        IndexedDatasetBuilder(tmp_path / "a", columns={name: REWARDS})
    assert names(tmp_path) == []


def test_reader_refuses_files_that_do_not_fit(tmp_path: Path) -> None:
    build(tmp_path / "a", [3, 2])
    path = column_path(tmp_path / "a", "rewards")
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    with pytest.raises(FormatError, match="has 19 bytes; its meta file says 20"):
        IndexedDataset(tmp_path / "a").columns  # noqa: B018
    path.unlink()
    with pytest.raises(FormatError, match=r"a\.rewards\.col does not exist.*column remove"):
        IndexedDataset(tmp_path / "a").columns  # noqa: B018
    path.write_bytes(whole)
    dataset = IndexedDataset(tmp_path / "a")
    assert dataset.meta is not None
    add_column(tmp_path / "a", "rewards", [[5, 5, 5], [5, 5]], REWARDS, overwrite=True)
    with pytest.raises(FormatError, match="was replaced after it was opened"):
        dataset.columns  # noqa: B018


def test_content_digest_follows_the_bytes(tmp_path: Path) -> None:
    build(tmp_path / "a", [3, 2])
    digests = {n: c.content_digest for n, c in IndexedDataset(tmp_path / "a").columns.items()}
    build(tmp_path / "b", [3, 2])
    again = {n: c.content_digest for n, c in IndexedDataset(tmp_path / "b").columns.items()}
    assert digests == again
    path = column_path(tmp_path / "a", "rewards")
    path.write_bytes(path.read_bytes()[:-1] + b"\1")
    changed = IndexedDataset(tmp_path / "a").columns["rewards"].content_digest
    assert changed[0] != digests["rewards"][0] and changed[1] == digests["rewards"][1]
    add_column(tmp_path / "b", "rewards", np.zeros(5), REWARDS, overwrite=True)
    changed = IndexedDataset(tmp_path / "b").columns["rewards"].content_digest
    assert changed[0] != digests["rewards"][0] and changed[1] != digests["rewards"][1]


# ---- Add, remove, export -------------------------------------------------------------------------


def test_columns_are_added_once_and_removed(tmp_path: Path) -> None:
    write_foreign(tmp_path / "a", [[[1, 2, 3]], [[4, 5]]])
    values = [[0, 0.5, 1], [0, -1]]
    assert add_column(tmp_path / "a", "rewards", values, REWARDS, metadata={"teacher": "x"})
    assert IndexedDataset(tmp_path / "a").meta["teacher"] == "x"
    assert not add_column(tmp_path / "a", "rewards", values, REWARDS)
    with pytest.raises(ConfigError, match=r"a\.rewards\.col exists .* it has another xxh3"):
        add_column(tmp_path / "a", "rewards", np.zeros(5), REWARDS)
    with pytest.raises(ConfigError, match="it has another of"):
        add_column(tmp_path / "a", "rewards", values, ColumnSpec(dtype="float32"))
    assert add_column(tmp_path / "a", "rewards", np.zeros(5), REWARDS, overwrite=True)
    with pytest.raises(ConfigError, match="has no column 'nothing'; it has rewards"):
        remove_column(tmp_path / "a", "nothing")
    with WriterLock(tmp_path / "a", what="test"), pytest.raises(LockedError):
        remove_column(tmp_path / "a", "rewards")
    remove_column(tmp_path / "a", "rewards")
    assert names(tmp_path) == ["a.bin", "a.idx", "a.meta.json"]
    assert IndexedDataset(tmp_path / "a").columns == {} and not errors(tmp_path / "a")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([[1, 2, 3]], "rows of 1 documents, and the dataset has 2"),
        ([[1, 2, 3], [4, 5], [6]], "1 rows for document 2, which does not exist"),
        ([[1, 2], [4, 5]], "2 rows for document 0, which has 3 tokens"),
        (np.zeros(6), "6 rows for 5 tokens"),
        (np.zeros((5, 2)), r"rows from 0: rows have shape \[5, 2\]"),
    ],
)
def test_rows_that_do_not_fit_change_nothing(tmp_path: Path, values: object, message: str) -> None:
    build(tmp_path / "a", [3, 2], specs={})
    with pytest.raises(DataError, match=message):
        add_column(tmp_path / "a", "rewards", values, REWARDS)
    assert names(tmp_path) == ["a.bin", "a.idx", "a.meta.json"]


def test_files_that_megapack_did_not_write_stay(tmp_path: Path) -> None:
    build(tmp_path / "a", [3, 2], specs={})
    column_path(tmp_path / "a", "rewards").write_text("somebody's")
    with pytest.raises(ConfigError, match=r"exists already: a\.meta\.json does not list it"):
        add_column(tmp_path / "a", "rewards", np.zeros(5), REWARDS)
    with pytest.raises(ConfigError, match="exists already"):
        IndexedDatasetBuilder(tmp_path / "a", columns={"rewards": REWARDS})
    assert [each.code for each in verify(tmp_path / "a")] == ["unlisted-column"]
    build(tmp_path / "a", [2], specs={})
    assert column_path(tmp_path / "a", "rewards").read_text() == "somebody's"


def test_exported_columns_are_added_again(tmp_path: Path) -> None:
    spec = ColumnSpec(dtype="bfloat16", shape=(2,))
    build(tmp_path / "a", [3, 2], specs={"logits": spec})
    build(tmp_path / "b", [3, 2], specs={})
    column = IndexedDataset(tmp_path / "a").columns["logits"]
    export_column(column, tmp_path / "logits.npy")
    array = np.load(tmp_path / "logits.npy")
    assert (array.dtype, array.shape) == (np.float32, (5, 2))
    bits = array.view(np.uint32) >> 16
    assert bits.astype(np.uint16).tobytes() == column.rows.tobytes()
    with pytest.raises(ConfigError, match="exists already"):
        export_column(column, tmp_path / "logits.npy")
    mapped = np.load(tmp_path / "logits.npy", mmap_mode="r")
    assert spec_of("logits", mapped, dtype="bfloat16") == spec
    add_column(tmp_path / "b", "logits", mapped, spec)
    assert contents(tmp_path / "b") == contents(tmp_path / "a")
    with pytest.raises(ConfigError, match="the values are float64; a column has one of"):
        spec_of("logits", np.zeros(3))


# ---- Labels and loss weights ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "spec"),
    [
        ("labels", {"dtype": "uint16", "of": "target"}),
        ("labels", {"dtype": "int32", "of": "token", "fill": -100}),
        ("labels", {"dtype": "int32", "of": "target", "fill": 0}),
        ("labels", {"dtype": "int64", "of": "target", "fill": -100, "shape": (2,)}),
        ("weights", {"dtype": "float32", "of": "target"}),
        ("weights", {"dtype": "float16", "of": "target", "fill": 1}),
        ("weights", {"dtype": "float16"}),
    ],
)
def test_labels_and_weights_have_one_type(tmp_path: Path, name: str, spec: dict) -> None:
    wrong = ColumnSpec(**spec)
    message = f"column {name} is .*; megapack makes {name} of batches of it"
    with pytest.raises(ConfigError, match=message):
        IndexedDatasetBuilder(tmp_path / "a", columns={name: wrong})
    build(tmp_path / "a", [3, 2], specs={})
    with pytest.raises(ConfigError, match=message):
        add_column(tmp_path / "a", name, np.zeros(5, wrong.numpy_dtype), wrong)
    build(tmp_path / "b", [3, 2], specs={"other": wrong})
    meta = tmp_path / "b.meta.json"
    meta.write_text(meta.read_text().replace('"other"', f'"{name}"'))
    with pytest.raises(FormatError, match=f"column {name} is damaged: {message}"):
        IndexedDataset(tmp_path / "b").columns  # noqa: B018


def test_defaults_of_labels_and_weights_are_their_type() -> None:
    for dtype in ("int8", "int16", "int32", "int64"):
        spec = ColumnSpec(dtype=dtype, of="target", fill=-100)
        assert column_spec(LABELS, dtype) == spec == spec_of(LABELS, np.zeros(1, dtype))
    assert spec_of(LABELS, np.zeros(1, np.uint16)) == INTERPRETED[LABELS]
    assert spec_of(WEIGHTS, np.zeros(1)) == INTERPRETED[WEIGHTS] == column_spec(WEIGHTS, "float16")
    assert column_spec("rewards", "float32") == ColumnSpec(dtype="float32")


def test_loss_weights_are_checked(tmp_path: Path) -> None:
    build(tmp_path / "d", [2, 3], specs={})

    def write(weights: object) -> list[float]:
        add_column(tmp_path / "d", WEIGHTS, weights, INTERPRETED[WEIGHTS], overwrite=True)
        assert not errors(tmp_path / "d")
        return IndexedDataset(tmp_path / "d").columns[WEIGHTS].rows

    expected = np.array([1, 0.1, 0, 65504, 6e-8], np.float16)
    assert np.array_equal(write([[1, 0.1], np.array([0.0, 65504, 6e-8])]), expected)
    assert np.array_equal(write(np.array([1, 0.1, 0, 65504, 6e-8])), expected)
    rows = write([[1, -0.0], [0, 0, -0.0]])
    assert not rows.view(np.uint16)[1:].any(), "a zero has no sign"
    for wrong, message in (
        ([[1, 2], [1, 2]], "2 rows for document 1, which has 3 tokens"),
        ([[1, 2]], "rows of 1 documents, and .* has 2"),
        ([[1, 2], [1, 2, 3], [1]], "document 2, which does not exist"),
        ([[1, -1], [1, 2, 3]], "loss weight 1 is -1; weights are 0, or from 6e-08 to 65504"),
        ([[1, 1], [1, np.nan, 3]], "loss weight 1 is nan"),
        ([[1, 1e5], [1, 2, 3]], "column value 100000.0 is outside float16"),
        ([[1e-9, 1], [1, 2, 3]], "loss weight 0 is 1e-09"),
        ([["a", 1], [1, 2, 3]], "column values are <U.*; give numbers"),
        ([[[1], [2]], [1, 2, 3]], r"rows have shape \[2, 1\]"),
    ):
        with pytest.raises(DataError, match=message):
            write(wrong)
    builder = IndexedDatasetBuilder(tmp_path / "e", columns=INTERPRETED)
    with builder, pytest.raises(DataError, match="column weights: loss weight 0 is -2"):
        builder.add_document([1], columns={"labels": [-100], "weights": [-2]})


def old_companions(prefix: Path, labels: np.ndarray, weights: np.ndarray, ends: list[int]) -> None:
    """Write labels and loss weights as versions before columns did."""
    for name, values, options in (
        ("labels", labels, {"dtype": labels.dtype, "allow_negative": labels.dtype.kind == "i"}),
        (
            "weights",
            weights.astype(np.float16).view(np.uint16),
            {"dtype": np.uint16, "metadata": {"loss_weights": "float16"}},
        ),
    ):
        with IndexedDatasetBuilder(f"{prefix}.{name}", **options) as builder:
            builder.add_documents(values, [0, *ends])


@given(
    lengths=st.lists(st.integers(0, 5), max_size=6),
    dtype=st.sampled_from([np.uint16, np.int32, np.int64]),
    seed=st.integers(0, 99),
)
@settings(max_examples=20, deadline=None)
def test_old_labels_and_weights_become_columns(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], dtype: type, seed: int
) -> None:
    folder = tmp_path_factory.mktemp("old")
    random, total = np.random.default_rng(seed), sum(lengths)
    labels = random.integers(0 if dtype == np.uint16 else -100, 9, total).astype(dtype)
    weights = random.integers(0, 9, total) / 8
    build(folder / "a", lengths, specs={})
    old_companions(folder / "a", labels, weights, np.cumsum(lengths).tolist())
    for name in INTERPRETED:
        old = f"{folder}/a.{name}"
        with pytest.raises(ConfigError, match=f"column add {folder}/a {name} {old}"):
            check_converted(str(folder / "a"), IndexedDataset(folder / "a").columns)
        values = values_of_dataset(name, old, folder / "a")
        add_column(folder / "a", name, values, spec_of(name, values))
    dataset = IndexedDataset(folder / "a")
    check_converted(str(folder / "a"), dataset.columns)
    assert dataset.columns["labels"].rows.tolist() == labels.tolist()
    assert dataset.columns["weights"].rows.tolist() == weights.tolist()
    with IndexedDatasetBuilder(
        folder / "b", np.uint16, columns={n: c.spec for n, c in dataset.columns.items()}
    ) as builder:
        rows = {"labels": labels, "weights": weights}
        tokens = np.concatenate([np.zeros(0, np.int64), *map(np.arange, lengths)])
        builder.add_documents(tokens, np.cumsum([0, *lengths]), columns=rows)
    assert contents(folder / "b") == contents(folder / "a")


def test_datasets_that_are_not_the_values_of_another_are_refused(tmp_path: Path) -> None:
    build(tmp_path / "a", [3, 2], specs={})
    old_companions(tmp_path / "a", np.zeros(5, np.int32), np.ones(5), [2, 5])
    for name in INTERPRETED:
        with pytest.raises(IndexMismatchError, match="have different lengths"):
            values_of_dataset(name, tmp_path / f"a.{name}", tmp_path / "a")
    with pytest.raises(ConfigError, match=r"a\.labels is a dataset, as earlier versions"):
        merge([tmp_path / "a"], tmp_path / "b")
    (tmp_path / "a.weights.meta.json").unlink()
    build(tmp_path / "c", [2, 3], specs={})
    with pytest.raises(FormatError, match="does not contain loss_weights: float16"):
        values_of_dataset("weights", tmp_path / "a.weights", tmp_path / "c")
    with pytest.raises(ConfigError, match="is an address"):
        values_of_dataset("labels", "s3://bucket/a.labels", tmp_path / "a")


@pytest.mark.parametrize("name", [LABELS, WEIGHTS])
def test_merge_does_not_take_tokens_out_of_the_loss(tmp_path: Path, name: str) -> None:
    """Their fill values mean no loss; a dataset without labels has loss on every token."""
    build(tmp_path / "a", [3, 2], specs={name: INTERPRETED[name]})
    build(tmp_path / "b", [1, 2], specs={})
    both = [tmp_path / "a", tmp_path / "b"]
    with pytest.raises(DataError, match=f"b has no column {name}, .* gives all tokens loss"):
        merge(both, tmp_path / "c", missing_columns="fill")
    merge(both, tmp_path / "c", missing_columns="drop")
    assert not IndexedDataset(tmp_path / "c").columns
    ones = np.ones(3) if name == WEIGHTS else values_of_dataset(name, both[1], both[1])
    add_column(both[1], name, ones, spec_of(name, ones))
    merge(both, tmp_path / "d")
    rows = IndexedDataset(tmp_path / "d").columns[name].rows[5:].tolist()
    assert rows == ([1, 1, 1] if name == WEIGHTS else [0, 0, 1])


@pytest.mark.parametrize("name", [LABELS, WEIGHTS])
def test_columns_that_are_not_listed_are_not_ignored(tmp_path: Path, name: str) -> None:
    """A copy without the meta file would train on every token."""
    build(tmp_path / "a", [3, 2], specs={name: INTERPRETED[name]})
    (tmp_path / "a.meta.json").unlink()
    with pytest.raises(FormatError, match=f"a.{name}.col exists, but the meta file does not list"):
        merge([tmp_path / "a"], tmp_path / "b")


def test_labels_are_exported_as_a_dataset_of_the_same_sequences(tmp_path: Path) -> None:
    spec = INTERPRETED[LABELS]
    specs = {"labels": spec, "weights": INTERPRETED[WEIGHTS]}
    with IndexedDatasetBuilder(tmp_path / "a", np.uint16, columns=specs) as builder:
        rows = {"labels": [-100, 6, 7], "weights": [1, 1, 1]}
        builder.add_document([5, 6, 7], lengths=[1, 2], columns=rows)
        builder.add_document([8], columns={"labels": [8], "weights": [1]})
    export_dataset(tmp_path / "a", "labels", tmp_path / "out")
    dataset = IndexedDataset(tmp_path / "out")
    assert [each.tolist() for each in dataset[:]] == [[-100], [6, 7], [8]]
    assert dataset.document_lengths.tolist() == [3, 1] and dataset.dtype == np.int32
    assert not errors(tmp_path / "out")
    with pytest.raises(ConfigError, match="exists already"):
        export_dataset(tmp_path / "a", "labels", tmp_path / "out")
    with pytest.raises(ConfigError, match=r"column weights is float16, .* a FILE\.npy"):
        export_dataset(tmp_path / "a", "weights", tmp_path / "no")
    values = values_of_dataset("labels", tmp_path / "out", tmp_path / "a")
    assert not add_column(tmp_path / "a", "labels", values, spec_of("labels", values))


# ---- Merge ---------------------------------------------------------------------------------------


@given(
    parts=st.lists(st.lists(st.integers(0, 4), max_size=4), min_size=1, max_size=4),
    lacking=st.sets(st.integers(0, 3)),
    missing=st.sampled_from([None, "fill", "drop"]),
)
@settings(max_examples=30, deadline=None)
def test_merge_equals_the_definition(
    tmp_path_factory: pytest.TempPathFactory,
    parts: list[list[int]],
    lacking: set[int],
    missing: str | None,
) -> None:
    root = tmp_path_factory.mktemp("merge")
    inputs, expected = [], {name: b"" for name in BOTH}
    lacking &= set(range(len(parts)))
    for i, lengths in enumerate(parts):
        specs = {"rewards": REWARDS} if i in lacking else BOTH
        build(root / f"{i}", lengths, i, specs)
        inputs.append(root / f"{i}")
        for name, spec in BOTH.items():
            rows = b"".join(each.tobytes() for each in rows_of(spec, lengths, i))
            expected[name] += rows if name in specs else spec.fill_row.tobytes() * sum(lengths)
    is_mixed = 0 < len(lacking) < len(parts)
    if is_mixed and missing is None:
        with pytest.raises(DataError, match=r"has no column experts, which .*--missing-columns"):
            merge(inputs, root / "out")
        assert not list(root.glob("out*"))
        return
    if lacking and not (is_mixed and missing == "fill"):
        del expected["experts"]
    assert merge(inputs, root / "out", missing_columns=missing)
    found = contents(root / "out")
    assert {name: found[name] for name in found if name not in ("tokens", "lengths")} == expected
    before = {path.name: path.stat().st_mtime_ns for path in root.iterdir()}
    assert not merge(inputs, root / "out", missing_columns=missing)
    assert before == {path.name: path.stat().st_mtime_ns for path in root.iterdir()}


def test_merge_refuses_columns_of_other_types(tmp_path: Path) -> None:
    build(tmp_path / "a", [2], specs={"rewards": REWARDS})
    build(tmp_path / "b", [2], specs={"rewards": ColumnSpec(dtype="float16", shape=(2,))})
    for missing in (None, "fill", "drop"):
        with pytest.raises(DataError, match=r"column rewards has different types: float32, of ta"):
            merge([tmp_path / "a", tmp_path / "b"], tmp_path / "out", missing_columns=missing)


def test_merge_reuses_checksums_so_verify_finds_earlier_damage(tmp_path: Path) -> None:
    build(tmp_path / "a", [3, 2])
    build(tmp_path / "b", [4], 1)
    path = column_path(tmp_path / "a", "experts")
    path.write_bytes(b"\xee" + path.read_bytes()[1:])
    merge([tmp_path / "a", tmp_path / "b"], tmp_path / "out")
    (finding,) = errors(tmp_path / "out")
    assert finding.code == "column-checksum"
    assert "bytes 0 to 30 of" in finding.message and "(documents 0 to 1)" in finding.message
    path.write_bytes(b"")
    with pytest.raises(FormatError, match="has 0 bytes, not 30: restore it"):
        merge([tmp_path / "a", tmp_path / "b"], tmp_path / "other")
    assert not list(tmp_path.glob("other*"))


def test_removed_inputs_lose_their_columns(tmp_path: Path) -> None:
    build(tmp_path / "a", [3, 2])
    build(tmp_path / "b", [4], 1)
    merge([tmp_path / "a", tmp_path / "b"], tmp_path / "out", remove_inputs=True)
    assert names(tmp_path) == sorted(path.name for path in dataset_files(str(tmp_path / "out")))
    assert len(names(tmp_path)) == 5


# ---- Verify, repair, import ----------------------------------------------------------------------


def test_damage_is_found_and_repaired(tmp_path: Path) -> None:
    build(tmp_path / "a", [3, 2, 4])
    path = column_path(tmp_path / "a", "rewards")
    whole, before = path.read_bytes(), contents(tmp_path / "a")
    assert repair(tmp_path / "a") == []
    path.write_bytes(whole + b"more")
    assert [each.code for each in errors(tmp_path / "a")] == ["column"]
    with pytest.raises(FormatError, match=r"4 bytes after its last row.*--drop-trailing"):
        repair(tmp_path / "a")
    assert "4 bytes of column rewards" in repair(tmp_path / "a", drop_trailing=True)[0]
    assert contents(tmp_path / "a") == before
    path.write_bytes(whole[:9])
    with pytest.raises(FormatError, match=r"has 9 of 36 bytes: restore it.*--drop-columns"):
        repair(tmp_path / "a")
    assert repair(tmp_path / "a", drop_columns=True, dry_run=True)
    assert path.exists()
    assert "removed column rewards" in repair(tmp_path / "a", drop_columns=True)[0]
    assert list(IndexedDataset(tmp_path / "a").columns) == ["experts"]
    assert not path.exists() and not errors(tmp_path / "a")


def test_columns_are_cut_with_the_tokens(tmp_path: Path) -> None:
    build(tmp_path / "a", [3, 2, 4])
    build(tmp_path / "b", [3, 2, 4])
    tokens = (tmp_path / "a.bin").read_bytes()
    (tmp_path / "a.bin").write_bytes(tokens[:13])  # 6 tokens: two documents
    repair(tmp_path / "a", drop_truncated=True)
    dataset, whole = IndexedDataset(tmp_path / "a"), IndexedDataset(tmp_path / "b")
    assert dataset.document_lengths.tolist() == [3, 2] and not errors(tmp_path / "a")
    for name in BOTH:
        assert (dataset.columns[name].rows == whole.columns[name].rows[:5]).all()


def test_verify_names_the_documents_of_a_damaged_stretch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(columns, "STRETCH_BYTES", 24)
    build(tmp_path / "a", [3, 2, 4])
    path = column_path(tmp_path / "a", "experts")
    damaged = bytearray(path.read_bytes())
    damaged[25] ^= 1
    damaged[50] ^= 1
    path.write_bytes(damaged)
    reports = []
    findings = verify(tmp_path / "a", progress=lambda done, total: reports.append((done, total)))
    (finding,) = (each for each in findings if each.severity == "error")
    assert "bytes 24 to 48 of" in finding.message and "(documents 1 to 2)" in finding.message
    assert "(and 1 more)" in finding.message
    assert {total for _, total in reports} == {9 * 2 + 9 * 4 + 9 * 6}
    assert reports == sorted(reports) and reports[-1][0] == reports[-1][1]
    assert not errors(tmp_path / "a", tokens=False)


def test_a_flat_dump_is_imported_with_its_columns(tmp_path: Path) -> None:
    np.array([1, 2, 0, 3, 0], np.uint16).tofile(tmp_path / "flat")
    logits = np.arange(10, dtype=np.float32).reshape(5, 2)
    options = {"dtype": "uint16", "eod_token": 0}
    given_columns = {"logits": (logits, ColumnSpec(dtype="bfloat16", shape=(2,)))}
    import_dataset(tmp_path / "flat", tmp_path / "a", columns=given_columns, **options)
    dataset = IndexedDataset(tmp_path / "a")
    bits = dataset.columns["logits"].rows.astype(np.uint32) << 16
    assert (bits.view(np.float32) == logits).all() and not errors(tmp_path / "a")
    said = import_dataset(tmp_path / "flat", tmp_path / "a", columns=given_columns, **options)
    assert said.startswith("nothing to do")
    with pytest.raises(ConfigError, match="its columns differs"):
        import_dataset(tmp_path / "flat", tmp_path / "a", **options)
    with pytest.raises(DataError, match="column logits: 4 rows for 5 tokens"):
        short = {"logits": (logits[:4], given_columns["logits"][1])}
        import_dataset(tmp_path / "flat", tmp_path / "b", columns=short, **options)
    with pytest.raises(ConfigError, match=r"a\.logits\.col belongs to .*a, and import"):
        import_dataset(tmp_path / "a", tmp_path / "b")


def test_rows_are_reordered_with_the_sequences(tmp_path: Path) -> None:
    from storage.strategies import index_bytes  # noqa: PLC0415

    (tmp_path / "x.idx").write_bytes(index_bytes([2, 1], [2, 0], [0, 1, 2]))
    np.array([9, 7, 8], np.uint16).tofile(tmp_path / "x.bin")
    rows = {"rewards": (np.array([3.0, 1.0, 2.0]), REWARDS)}
    import_dataset(tmp_path / "x", tmp_path / "a", columns=rows)
    dataset = IndexedDataset(tmp_path / "a")
    assert dataset.tokens.tolist() == [7, 8, 9]
    assert dataset.columns["rewards"].rows.tolist() == [1, 2, 3]


# ---- A process that dies at any moment -----------------------------------------------------------

PROGRAM = """
import os, shutil, sys
import numpy as np
from pathlib import Path
from megapack.storage import IndexedDatasetBuilder
from megapack.storage.column_edits import add_column, remove_column
from megapack.storage.columns import ColumnSpec
from megapack.storage.importing import import_dataset
from megapack.storage.merge import merge
folder = Path(sys.argv[1])
float32 = ColumnSpec(dtype="float32", of="target")
steps = 0
def dying(call):
    def step(*args, **options):
        global steps
        name = str(args[-1]).rpartition("/")[2]
        if name.startswith("data.") and ".tmp-" not in name and not name.endswith(".lock"):
            steps -= 1
            if steps < 0:
                os._exit(9)
        return call(*args, **options)
    return step
os.replace, os.unlink, os.truncate = map(dying, (os.replace, os.unlink, os.truncate))
def run(name, start, num_steps):
    root = folder / name
    shutil.copytree(folder / start, root)
    pid = os.fork()
    if pid == 0:
        global steps
        steps = num_steps
        call(root)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
def main():
    assert run("done", "start", 1000) == 0
    for num_steps in range(20):
        status = run(str(num_steps), "start", num_steps)
        if status == 0:
            break
        assert status == 9, status
        assert run(f"{num_steps} again", str(num_steps), 1000) == 0
    print(num_steps)
def call(root):
"""
CALLS = {
    "builder": """
    columns = {"rewards": float32, "other": ColumnSpec(dtype="int8")}
    options = {"columns": columns, "overwrite": True}
    with IndexedDatasetBuilder(root / "data", np.uint16, **options) as builder:
        builder.add_document([5, 6], columns={"rewards": [1, 2], "other": [3, 4]})
""",
    "builder without columns": """
    with IndexedDatasetBuilder(root / "data", np.uint16, overwrite=True) as builder:
        builder.add_document([5, 6])
""",
    "merge": """
    merge([root / "a", root / "b"], root / "data", overwrite=True)
""",
    "import": """
    import_dataset(root / "flat", root / "data", dtype="uint16", eod_token=0, overwrite=True,
        columns={"rewards": (np.array([1., 2.]), float32)}, link="copy")
""",
    "add": """
    add_column(root / "data", "other", [[1, 2, 3], [4, 5]], float32)
""",
    "replace": """
    add_column(root / "data", "rewards", np.ones(5), float32, overwrite=True)
""",
    "remove": """
    if "rewards" in root.joinpath("data.meta.json").read_text():
        remove_column(root / "data", "rewards")
""",
}


@pytest.mark.parametrize("call", CALLS)
def test_a_process_that_dies_leaves_the_old_dataset_none_or_the_new_one(
    tmp_path: Path, call: str
) -> None:
    for name, lengths in (("data", [3, 2]), ("a", [2]), ("b", [1, 1])):
        (tmp_path / "start").mkdir(exist_ok=True)
        build(tmp_path / "start" / name, lengths)
    np.array([4, 0], np.uint16).tofile(tmp_path / "start" / "flat")
    num_steps = int(ended(*PYTHON, f"{PROGRAM}{CALLS[call]}main()", tmp_path).stdout)
    old, new = contents(tmp_path / "start" / "data"), contents(tmp_path / "done" / "data")
    assert new != old and num_steps >= 2
    without = {key: value for key, value in old.items() if key != "rewards"}
    allowed = [None, old, new, *([without] if call == "replace" else [])]
    columns_after = {f"data.{name}.col" for name in new.keys() - {"tokens", "lengths"}}
    assert {path.name for path in (tmp_path / "done").glob("data.*.col")} == columns_after
    for steps in range(num_steps):
        assert contents(tmp_path / str(steps) / "data") in allowed
        again = tmp_path / f"{steps} again"
        assert contents(again / "data") == new, steps
        strays = {path.name for path in again.glob("data.*.col")} - columns_after
        assert not strays or call == "remove", steps  # verify names them
    assert contents(tmp_path / "0" / "data") == old


# ---- The format does not change ------------------------------------------------------------------

GOLDEN = Path(__file__).parents[1] / "golden" / "columns"


def test_golden_files_are_written_and_read(tmp_path: Path) -> None:
    ended(sys.executable, GOLDEN / "make_golden.py", tmp_path / "data")
    written = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert written == {path.name: path.read_bytes() for path in GOLDEN.glob("data.*")}
    assert len(written) == 6
    dataset = IndexedDataset(GOLDEN / "data")
    assert list(dataset.columns) == ["advantages", "experts", "logits"]
    assert dataset.columns["advantages"].rows.tolist() == [0, 0.5, -1.25, 2, 3]
    assert dataset.columns["experts"].rows[-1].tolist() == [8, 254]
    logits = dataset.columns["logits"]
    assert logits.spec.numbers(logits.rows)[[0, 1, 4], 0].tolist() == [
        [1, 2],
        [0.10009765625, -3],
        [6, 7],
    ]
    assert not errors(GOLDEN / "data")
