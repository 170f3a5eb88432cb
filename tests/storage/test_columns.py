"""Columns: types, builder, readers and golden files against a plain definition."""

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
from programs import ended
from reference.columns import bfloat16, column_bytes, number_bytes

from megapack.errors import (
    ConfigError,
    DataError,
    FormatError,
)
from megapack.storage import IndexedDataset, IndexedDatasetBuilder, columns
from megapack.storage.column_edits import (
    add_column,
)
from megapack.storage.columns import (
    DTYPES,
    ColumnSpec,
    column_path,
)
from megapack.storage.verify import verify
from storage.column_cases import BOTH, REWARDS, build
from storage.strategies import errors, names, write_foreign

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
        ({"dtype": "float64"}, "column dtype is 'float64'; choose from int8"),
        ({"dtype": "int8", "shape": (0,)}, r"column shape \[0\]"),
        ({"dtype": "float32", "shape": (16385,)}, "65540 bytes per token"),
        ({"dtype": "uint8", "fill": -1}, "column fill is -1, not a finite uint8"),
        ({"dtype": "float16", "fill": 1e9}, "column fill is 1000000000.0"),
        ({"dtype": "float32", "fill": math.nan}, "column fill is nan"),
        ({"dtype": "float32", "fill": 10**400}, "column fill is 1000"),
        ({"dtype": "float32", "fill": "0"}, "column fill is '0', not a finite float32"),
        ({"dtype": "uint8", "fill": True}, "column fill is True"),  # JSON's true is no number
        ({"dtype": "uint8", "shape": 2}, r"column shape is 2; give integers, as in \(8,\)"),
        ({"dtype": "int8", "of": "labels"}, "column of is 'labels'"),
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
        ("e", "delete it: it is optional"),
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
