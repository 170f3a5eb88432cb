"""tokenize --column: rows of tokens from lists, spans and .npy files."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megapack import IndexedDataset
from megapack.errors import ConfigError, DataError
from megapack.storage.columns import ColumnSpec, column_path
from megapack.storage.verify import has_errors, verify
from megapack.tokenization.corpus.token_values import ColumnOption, TokenValues, are_spans

from ..helpers import Build, Silence, files_of, write_jsonl

EOD = 256
LOGITS = "logits=meta.logits:float16[2],target,fill=-1"
EXPERTS = "experts=e:uint8,fill=9"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a=b", ColumnOption("a", "b")),
        ("a=b.c:int64", ColumnOption("a", "b.c", "int64", ())),
        ("a=b:c:uint8[2,3]", ColumnOption("a", "b:c", "uint8", (2, 3))),
        ("a=b:target", ColumnOption("a", "b", of="target")),
        (LOGITS, ColumnOption("logits", "meta.logits", "float16", (2,), "target", -1)),
        ("a=b:fill=0.5,float32", ColumnOption("a", "b", "float32", (), None, 0.5)),
    ],
)
def test_options_are_parsed(text: str, expected: ColumnOption) -> None:
    assert ColumnOption.parse(text) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rewards", "--column is 'rewards'; it must be NAME=KEY"),
        ("rewards=", "it must be NAME=KEY"),
        ("Rewards=r", "column name 'Rewards' is not valid"),
        ("tokens=r", "is a name of megapack's batches"),
        ("rewards=r:float64", "'float64' is not a dtype"),
        ("rewards=r:float32[x]", "is not a dtype"),
        ("rewards=r:fill=x", "fill is 'x'; it must be a number"),
        ("labels=r:uint16", "column fill is -100, not a finite uint16"),
        ("rewards=r:uint8,fill=-1", "column fill is -1, not a finite uint8"),
    ],
)
def test_other_options_are_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("[", r"\[")):
        ColumnOption.parse(text)


def _spans(text: str) -> np.ndarray:
    assert text == "ab cd ef"
    return np.array([[0, 2], [2, 5], [5, 6], [6, 8]])


def test_rows_are_read_from_lists_spans_and_files(tmp_path: Path) -> None:
    np.save(tmp_path / "r.npy", np.arange(8, dtype=np.float64).reshape(4, 2))
    np.save(tmp_path / "one.npy", np.arange(4))
    bits = np.array([0x3F80, 0x4000, 0, 0x4040], np.uint16)  # as ml_dtypes.bfloat16 is saved
    np.save(tmp_path / "bits.npy", bits.view("V2"))
    one, two = ColumnSpec(dtype="float32", fill=-1), ColumnSpec(dtype="int32", shape=(2,), fill=7)
    three, half = ColumnSpec(dtype="int8", shape=(3,)), ColumnSpec(dtype="bfloat16")
    wide = ColumnSpec(dtype="float32", shape=(2,))
    for spec, value, expected in (
        (one, "", [-1] * 4),
        (one, "null", [-1] * 4),
        (one, "[]", [-1] * 4),
        (one, "[1, 2.5, 0, -3]", [1, 2.5, 0, -3]),
        (one, "[[2, 5, 0.5]]", [-1, 0.5, -1, -1]),
        (one, "[[1, 3, 0], [2, 6, 3]]", [0, 3, 3, -1]),
        (one, '"one.npy"', [0, 1, 2, 3]),
        (two, "[[1, 2], [3, 4], [5, 6], [7, 8]]", [[1, 2], [3, 4], [5, 6], [7, 8]]),
        (two, "[[5, 8, [1, 2]]]", [[7, 7], [7, 7], [1, 2], [1, 2]]),
        (three, "[[0, 1, 2], [0, 1, 3], [0, 1, 4], [0, 1, 5]]", [[0, 1, i] for i in (2, 3, 4, 5)]),
        (wide, '"r.npy"', [[0, 1], [2, 3], [4, 5], [6, 7]]),
        (half, '"bits.npy"', bits.tolist()),
    ):
        reader = TokenValues("column x", spec)
        rows = reader.read(value, 4, "ab cd ef", _spans, tmp_path)
        assert rows.dtype == spec.numpy_dtype and rows.tolist() == expected, (spec, value)
        framed = reader.framed(rows, 1, 2)
        assert framed[1:-2].tolist() == expected
        assert framed[:1].tobytes() + framed[-2:].tobytes() == spec.fill_row.tobytes() * 3
    for spec, value, message in (
        (one, "[1, 2]", "2 rows, but the document has 4 tokens"),
        (one, "[[2, 2, 1]]", "span .2, 2., which is empty or outside"),
        (one, "[[8, 9, 1]]", "outside the 8 characters"),
        (one, "[1, 1, 1, 1e39]", "outside float32"),
        (one, "true", "they are true; give a list"),
        (one, '["1", "1", "1", "1"]', "give numbers"),
        (one, '"nowhere.npy"', "nowhere.npy"),
        (two, "[[1, 2], [3], [5, 6], [7, 8]]", "rows of different shapes"),
        (two, "[1, 2, 3, 4]", r"rows have shape \[4\]"),
        (two, "[[0.5, 2], [3, 4], [5, 6], [7, 8]]", "float64, and the column is int32"),
        (three, "[[0, 2, 300]]", "outside int8"),
    ):
        with pytest.raises(DataError, match=message):
            TokenValues("column x", spec).read(value, 4, "ab cd ef", _spans, tmp_path)
    assert not are_spans([[0, True, 1]])


def _corpus(folder: Path, num: int) -> tuple[list[dict[str, Any]], dict[str, list[list[Any]]]]:
    """Return documents with every form of values, and the rows of each token."""
    draw = random.Random(0)
    rows: list[dict[str, Any]] = []
    expected: dict[str, list[list[Any]]] = {"logits": [], "experts": []}
    for i in range(num):
        n = draw.randint(1, 30)
        logits = [[draw.randint(-9, 9), draw.randint(0, 4) / 4] for _ in range(n)]
        experts = [9] * n
        row: dict[str, Any] = {"text": "".join(draw.choices("abc ", k=n - 1)) + "x"}
        form = draw.randrange(4)
        if form == 0:
            logits = [[-1, -1]] * n
        elif form == 1:
            (folder / "dump").mkdir(exist_ok=True)
            np.save(folder / "dump" / f"{i}.npy", np.array(logits, np.float32))
            row["meta"] = {"logits": f"dump/{i}.npy"}
        else:
            row["meta"] = {"logits": logits}
        if n > 2 and form < 3:
            begin, end = sorted(draw.sample(range(n), 2))
            row["e"] = [[begin, end, 3]]
            experts[begin:end] = [3] * (end - begin)
        rows.append(row)
        expected["logits"].append([*logits, [-1, -1]])
        expected["experts"].append([*experts, 9])
    return rows, expected


@pytest.mark.multiprocess
def test_columns_follow_their_tokens_for_any_workers(tmp_path: Path, run_build: Build) -> None:
    rows, expected = _corpus(tmp_path, 400)
    rows.insert(7, {"text": "too short", "e": [1]})
    corpus = write_jsonl(tmp_path / "x.jsonl", rows)
    options: dict[str, Any] = {"append_eod": True, "on_error": "skip"}
    options |= {"columns": (LOGITS, EXPERTS), "shard_bytes": 5000}

    def run(name: str, **more: Any) -> tuple[bytes, ...]:
        run_build(corpus, output_prefix=name, **{**options, **more})
        files = [column_path(tmp_path / name, column) for column in expected]
        return (*files_of(tmp_path / name), *(path.read_bytes() for path in files))

    alone = run("w1")
    dataset = IndexedDataset(tmp_path / "w1")
    assert dataset.num_documents == 400
    for name, documents in expected.items():
        flat = [row for document in documents for row in document]
        assert dataset.columns[name].rows.tolist() == flat
    assert dataset.columns["logits"].spec == ColumnSpec(
        dtype="float16", shape=(2,), fill=-1, of="target"
    )
    assert run("w2", workers=2) == run("one", shard_bytes=1 << 20, block_bytes=2000) == alone
    for i in range(2):
        run_build(corpus, output_prefix="parts", part=(i, 2), **options)
    assert run("parts", finish=True) == alone
    assert not has_errors(verify(tmp_path / "w1"))
    result = run_build(corpus, output_prefix="w1", **options)
    assert result.state == "complete"
    assert result.totals.skipped == {"unusable column experts": 1}
    with pytest.raises(DataError, match=r"x\.jsonl:8: unusable column experts .there are 1 rows"):
        run_build(corpus, output_prefix="fail", **options | {"on_error": "fail"})


@pytest.mark.parametrize("split_by", ["order", "hash"])
def test_splits_keep_the_rows_of_their_documents(
    tmp_path: Path, run_build: Build, split_by: str
) -> None:
    rows = [{"text": "a" * n, "r": [n / 2] * n} for n in range(1, 40)]
    options = {"split": "60,40,0", "split_by": split_by, "columns": ("r=r:bfloat16,fill=7",)}
    result = run_build(rows, append_eod=True, prepend_bos=True, bos_token=257, **options)
    seen = 0
    for stream in ("_train", "_valid"):
        dataset = IndexedDataset(result.prefixes[stream])
        column = dataset.columns["r"]
        for i, tokens in enumerate(dataset[:]):
            begin = int(dataset.document_offsets[i])
            rows_of_document = column.spec.numbers(column.rows[begin : begin + len(tokens)])
            n = len(tokens) - 2
            assert rows_of_document.tolist() == [7, *[n / 2] * n, 7]
            seen += 1
    assert seen == 39


def test_the_first_document_decides_the_type(tmp_path: Path, run_build: Build) -> None:
    np.save(tmp_path / "r.npy", np.ones((2, 3), np.float16))
    for value, expected in (
        ([1, 2], ColumnSpec(dtype="int64")),
        ([1, 0.5], ColumnSpec(dtype="float32")),
        ([[0, 1, 5]], ColumnSpec(dtype="int64")),
        ([[0, 1, [0.5, 1]]], ColumnSpec(dtype="float32", shape=(2,))),
        ([[[1], [2]], [[3], [4]]], ColumnSpec(dtype="int64", shape=(2, 1))),
        ("r.npy", ColumnSpec(dtype="float16", shape=(3,))),
    ):
        progress = Silence()
        rows = [{"text": "x"}, {"text": "y", "r": []}, {"text": "ab", "r": value}]
        run_build(rows, columns=("r=r",), overwrite=True, progress=progress)
        assert IndexedDataset(tmp_path / "out").columns["r"].spec == expected
        assert "x.jsonl:3; --column r=r:TYPE gives another type" in progress.notes[-1]
    with pytest.raises(ConfigError, match="no document of a sample has 'q', which would give"):
        run_build(rows, columns=("r=q",), output_prefix="b")
    progress = Silence()
    run_build(rows, columns=("r=q:int8",), output_prefix="b", progress=progress)
    assert "no document of a sample has 'q'; see --column" in progress.notes
    with pytest.raises(DataError, match=r"x\.jsonl:1: --column r=r: they are"):
        run_build([{"text": "ab", "r": ["x", "y"]}], columns=("r=r",), output_prefix="c")


def test_tables_and_refusals(tmp_path: Path, run_build: Build) -> None:
    table = {"text": ["ab", "c"], "r": [[1.5, 2], None]}
    pq.write_table(pa.table(table), tmp_path / "a.parquet")
    pq.write_table(pa.table({"text": ["d"]}), tmp_path / "b.parquet")
    files = [tmp_path / "a.parquet", tmp_path / "b.parquet"]
    run_build(*files, columns=("r=r:float32,fill=4",), append_eod=True)
    rows = IndexedDataset(tmp_path / "out").columns["r"].rows
    assert rows.tolist() == [1.5, 2, 4, 4, 4, 4, 4]
    for options, message in (
        ({"messages_key": "m"}, "--column is for text"),
        ({"backend": "gigatoken"}, "--column is for text, and needs a backend"),
        ({"columns": ("r=r", "r=s")}, "--column names r twice"),
        ({"columns": ("weights=w",)}, "or weights, which --weights-key reads"),
    ):
        with pytest.raises(ConfigError, match=message):
            run_build(*files, **{"columns": ("r=r",), **options})
    (tmp_path / "x.txt").write_text("text")
    with pytest.raises(ConfigError, match="one document and has no key for --column: write"):
        run_build(tmp_path / "x.txt", columns=("r=r",))


def test_changed_columns_are_another_plan(tmp_path: Path, run_build: Build) -> None:
    rows = [{"text": "ab", "r": [1, 2]}]
    run_build(rows, columns=("r=r:int8",))
    with pytest.raises(ConfigError, match=r"columns: r was .*'int8'.* is .*'int16'"):
        run_build(rows, columns=("r=r:int16",))
    path = column_path(tmp_path / "out", "r")
    path.unlink()
    assert run_build(rows, columns=("r=r:int8",)).state == "built"
    assert path.read_bytes() == b"\1\2"
    meta = json.loads((tmp_path / "out.meta.json").read_text())
    assert list(meta["columns"]) == ["r"]
