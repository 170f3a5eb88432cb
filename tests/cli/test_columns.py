"""megapack-build column, and the options for columns of other commands."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from commands import printed
from programs import PYTHON, ended

from megapack import IndexedDataset, IndexedDatasetBuilder, pack
from megapack.storage.columns import ColumnSpec, column_path


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    """Write documents of 3, 20 and 2 tokens; token i of .bin is 97 + i."""
    with IndexedDatasetBuilder(tmp_path / "corpus", np.uint16, vocab_size=259) as builder:
        builder.add_documents(np.arange(97, 122), [0, 3, 23, 25])
    return tmp_path / "corpus"


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    np.save(tmp_path / "rows.npy", np.arange(25, dtype=np.float32))
    return tmp_path / "rows.npy"


def test_column_is_added_listed_exported_and_removed(prefix: Path, rows: Path) -> None:
    add = ["column", "add", prefix, "rewards", rows, "--of", "target", "--fill", "-0.5"]
    assert "column rewards, float32, of target, fill -0.5, 25 rows" in printed(*add)
    assert printed(*add).startswith("nothing to do")
    facts = json.loads(printed(*add, "--json"))
    assert facts == {
        **{"prefix": str(prefix), "name": "rewards", "dtype": "float32", "shape": []},
        **{"fill": -0.5, "of": "target", "bytes": 100, "is_new": False},
    }
    error = printed(*add[:-1], 3, status=2)
    assert "corpus.rewards.col exists already: it has another fill. Replace it with --ov" in error
    printed(*add[:-1], 3, "--overwrite")
    printed("column", "add", prefix, "half", rows, "--dtype", "bfloat16")
    listed = json.loads(printed("column", "list", prefix, "--json"))
    assert [(each["name"], each["dtype"], each["fill"]) for each in listed] == [
        ("half", "bfloat16", 0),
        ("rewards", "float32", 3),
    ]
    table = printed("column", "list", f"{prefix}.idx")
    assert "rewards" in table and "bfloat16" in table
    output = rows.with_name("out.npy")
    printed("column", "export", prefix, "half", output)
    assert np.load(output).tolist() == list(range(25))
    assert "exists already" in printed("column", "export", prefix, "half", output, status=2)
    printed("column", "remove", prefix, "half")
    assert "no column 'half'; it has rewards" in printed(
        "column", "export", prefix, "half", output, "--overwrite", status=2
    )
    printed("column", "remove", prefix, "rewards")
    assert printed("column", "list", prefix) == "no columns\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["add", "corpus", "rewards"], "column add takes PREFIX NAME SOURCE, not corpus rewards"),
        (["list", "corpus", "--of", "token"], "--of token works only with column add"),
        (["add", "corpus", "Rewards", "rows.npy"], "column name 'Rewards' is not valid"),
        (["add", "corpus", "r", "wide.npy"], "the values are float64; a column has one of"),
        (["add", "corpus", "r", "rows.npy", "--dtype", "int8"], "values are float32, and"),
        (["add", "corpus", "r", "short.npy"], "column r: 3 rows for 25 tokens"),
    ],
)
def test_wrong_commands_are_refused(
    prefix: Path, rows: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], message: str
) -> None:
    monkeypatch.chdir(prefix.parent)
    np.save("wide.npy", np.zeros((25, 2)))
    np.save("short.npy", np.zeros(3, np.int8))
    status = 1 if message.startswith(("values", "column r")) else 2
    assert message in printed("column", *words, status=status)
    assert not list(prefix.parent.glob("*.col")) and rows.exists()


def test_labels_and_weights_need_no_type(prefix: Path, rows: Path) -> None:
    """Labels go to a dataset, as GPT-NeoX reads them, and back."""
    labels = np.where(np.arange(25) % 3, np.arange(97, 122), -100)
    np.save(rows.with_name("labels.npy"), labels)
    assert "column labels, int64, of target, fill -100" in printed(
        "column", "add", prefix, "labels", rows.with_name("labels.npy")
    )
    np.save(rows, np.full(25, 0.5))
    assert "column weights, float16, of target" in printed("column", "add", prefix, "weights", rows)
    output = prefix.with_name("out_label_document")
    printed("column", "export", prefix, "labels", output)
    exported = IndexedDataset(output)
    assert exported.tokens.tolist() == labels.tolist()
    assert exported.document_lengths.tolist() == [3, 20, 2]
    assert "give the weights as FILE.npy" in printed(
        "column", "add", prefix, "weights", output, status=1
    )
    printed("column", "remove", prefix, "labels")
    printed("column", "add", prefix, "labels", f"{output}.idx")
    assert IndexedDataset(prefix).columns["labels"].rows.tolist() == labels.tolist()


def test_inspect_shows_columns_next_to_the_tokens(prefix: Path, rows: Path) -> None:
    dataset = IndexedDataset(prefix)
    index = pack(dataset.document_lengths, "bucket", buckets=[8, 16])
    index.save(f"{prefix}.samples", source=dataset)
    np.save(rows.with_name("wide.npy"), np.arange(250, dtype=np.int32).reshape(25, 2, 5))
    printed("column", "add", prefix, "own", rows)
    printed("column", "add", prefix, "next", rows, "--of", "target", "--fill", "-7")
    printed("column", "add", prefix, "wide", rows.with_name("wide.npy"), "--of", "target")
    text = printed("inspect", prefix)
    assert "column wide: int32[2, 5], of target, fill 0, 1,000 bytes" in text
    assert len(json.loads(printed("inspect", prefix, "--json"))["columns"]) == 3
    seen = set()
    for sample in range(index.num_samples):
        shown = printed("inspect", f"{prefix}.samples", "--sample", sample, "--full")
        for line in shown.splitlines():
            words = line.split()
            if "[2, 5]" not in line:
                continue
            at = int(words[1]) - 97  # position in .bin
            seen.add(at)
            is_last = at in (2, 22, 24)
            expected_wide = [0] * 8 if is_last else list(range(10 * (at + 1), 10 * (at + 1) + 8))
            names = [word for word in words[2:] if "[" not in word and "]" not in word]
            assert words[2] == ("-7" if is_last else str(at + 1)), line  # alphabetical: next, own
            assert words[3] == str(at) and "[2, 5]" in line and names[-1] == "..."
            assert [int(word) for word in words[6:-1]] == expected_wide
    assert seen == set(range(25))
    long = printed("inspect", f"{prefix}.samples", "--sample", 0, "--tokenizer", "bytes")
    assert "(--full shows them)" in long or index.num_samples > 1


def test_merge_repair_import_and_export_know_columns(prefix: Path, rows: Path) -> None:
    folder = prefix.parent
    printed("column", "add", prefix, "rewards", rows)
    with IndexedDatasetBuilder(folder / "bare", np.uint16, vocab_size=259) as builder:
        builder.add_document([97])
    merge = ["merge", prefix, folder / "bare", "--output-prefix", folder / "both"]
    assert "bare has no column rewards" in printed(*merge, status=1)
    printed(*merge, "--missing-columns", "fill")
    assert IndexedDataset(folder / "both").columns["rewards"].rows.tolist() == [*range(25), 0]
    facts = json.loads(printed(*merge, "--missing-columns", "drop", "--overwrite", "--json"))
    assert facts["columns"] == [] and not column_path(folder / "both", "rewards").exists()

    dataset = IndexedDataset(prefix)
    pack(dataset.document_lengths, "bucket", buckets=[32]).save(f"{prefix}.samples", source=dataset)
    export = ["export", f"{prefix}.samples", "--format", "bridge", "--output", folder / "a.parquet"]
    assert "has the columns rewards, and Bridge's parquet" in printed(*export, status=2)

    column_path(prefix, "rewards").unlink()
    assert "DAMAGED" in ended(*PYTHON, VERIFY, prefix, status=1).stdout
    printed("repair", prefix, status=1)
    printed("repair", prefix, "--drop-columns")
    printed("verify", prefix)

    np.array([5, 6, 0, 7, 0], np.uint16).tofile(folder / "flat.bin")
    np.save(folder / "dump.npy", np.arange(10, dtype=np.float32).reshape(5, 2))
    words = ["import", folder / "flat.bin", "--dtype", "uint16", "--eod-token", 0]
    words += ["--output-prefix", folder / "dumped", "--column"]
    printed(*words, f"logits={folder}/dump.npy:bfloat16[2],target,fill=-1")
    spec = IndexedDataset(folder / "dumped").columns["logits"].spec
    assert spec == ColumnSpec(dtype="bfloat16", shape=(2,), fill=-1, of="target")
    error = printed(*words, f"logits={folder}/dump.npy:bfloat16[3]", status=2)
    assert "has rows of shape [2], not [3]" in error


VERIFY = """
import sys
from megapack.cli.main import main
sys.exit(main(["verify", sys.argv[1]]))
"""


def test_a_glob_over_a_folder_names_each_dataset_once(prefix: Path, rows: Path) -> None:
    printed("column", "add", prefix, "rewards", rows)
    printed("verify", *sorted(prefix.parent.glob("corpus.*")))
    facts = json.loads(
        printed("merge", f"{prefix}.*", "--output-prefix", prefix.with_name("all"), "--json")
    )
    assert (facts["num_datasets"], facts["columns"]) == (1, ["rewards"])
