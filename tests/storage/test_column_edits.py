"""Columns of finished datasets: add, remove, export, convert, merge, verify, repair, import."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import PYTHON, ended

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
from storage.column_cases import BOTH, REWARDS, build, contents, rows_of
from storage.strategies import errors, names, write_foreign

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
    message = f"column {name} is .*; it becomes the {name} of batches"
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
    with pytest.raises(
        DataError, match=f"b has no column {name}, .* counts all tokens in the loss"
    ):
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
