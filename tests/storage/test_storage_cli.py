"""Commands merge, verify, repair and import."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from commands import build, printed

from megapack import pack
from megapack.cli.datasets import dataset_prefixes
from megapack.storage import IndexedDataset
from storage.strategies import SMALL, files, write, write_foreign


def test_merge_then_verify(tmp_path: Path) -> None:
    (tmp_path / "shards").mkdir()
    for name in ("b", "a"):
        write(tmp_path / "shards" / name, SMALL)
    whole = ("merge", tmp_path / "shards", "--output-prefix", tmp_path / "all")
    part = ("merge", tmp_path / "shards" / "a", "--output-prefix", tmp_path / "all")
    assert printed(*whole) == f"{tmp_path}/all: 2 datasets, 10 documents, 20 uint16 tokens\n"
    said = printed(*part, status=2)
    assert "its num_sequences is 10, not 5" in said and "Replace it with --overwrite" in said
    assert printed(*whole) == f"nothing to do: {tmp_path}/all exists already\n"
    said = printed("verify", tmp_path / "all.idx", tmp_path / "shards" / "a")
    assert said.startswith(f"{tmp_path}/all: sound\n")


def test_verify_reports_damage_and_repair_repairs_it(tmp_path: Path) -> None:
    write(tmp_path / "data", SMALL)
    whole = files(tmp_path / "data")
    (tmp_path / "data.meta.json").unlink()
    with (tmp_path / "data.idx").open("r+b") as file:
        file.seek(17)
        file.write(b"\6")
    said = build("verify", tmp_path / "data")
    assert said.returncode == 1
    assert (
        "data: DAMAGED" in said.stdout
        and f"-> `megapack-build repair {tmp_path}/data" in said.stdout
    )
    found = json.loads(build("verify", "--json", tmp_path / "data").stdout)[str(tmp_path / "data")]
    assert "dtype" in [finding["code"] for finding in found]
    assert "would be done:" in printed("repair", "--dry-run", tmp_path / "data")
    assert files(tmp_path / "data") != whole
    printed("repair", tmp_path / "data")
    assert files(tmp_path / "data") == whole
    assert "nothing to repair" in printed("repair", tmp_path / "data")


def test_import_then_verify(tmp_path: Path) -> None:
    np.array([1, 2, 0, 3, 0], np.uint16).tofile(tmp_path / "train.bin")
    arguments = [tmp_path / "train.bin", "--output-prefix", tmp_path / "data"]
    assert "--dtype uint16" in printed("import", *arguments, status=2)
    arguments += ["--dtype", "uint16", "--eod-token"]
    assert "2 documents, 5 uint16 tokens" in printed("import", *arguments, 0)
    printed("verify", tmp_path / "data")
    there = f"nothing to do: {tmp_path}/data exists already\n"
    assert printed("import", *arguments, 0) == there
    assert "give --eod-at start" in printed("import", *arguments, 1, status=2)
    said = printed("import", *arguments, 1, "--eod-at", "start", status=2)
    assert "exists already: its num_sequences is 2, not 1" in said
    printed("import", *arguments, 1, "--eod-at", "start", "--overwrite")
    said = printed("import", *arguments, "</s>", status=2)
    assert "is a name: add --tokenizer, or give its id" in said
    said = printed("import", *arguments, "<eod>", "--tokenizer", "bytes", status=1)
    assert "never occurs" in said


def test_repair_reports_remaining_damage(tmp_path: Path) -> None:
    """Regression: repair printed "nothing to repair" and exited with 0, but verify found damage."""
    write(tmp_path / "data", SMALL)
    with (tmp_path / "data.bin").open("r+b") as file:
        file.write(b"\xff")
    assert build("verify", tmp_path / "data").returncode == 1
    done = build("repair", tmp_path / "data")
    assert done.returncode == 1 and "nothing to repair" not in done.stdout
    assert "data: still DAMAGED" in done.stdout and "restore .bin from a copy" in done.stdout
    done = build("repair", "--dry-run", tmp_path / "data")
    assert done.returncode == 1 and "still DAMAGED" in done.stdout
    said = printed("repair", "--no-tokens", tmp_path / "data")
    assert "nothing to repair (.bin was not read)" in said


def test_repair_continues_after_an_unrepairable_dataset(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_foreign(tmp_path / name, SMALL)
    os.truncate(tmp_path / "a.bin", 3)
    whole = (tmp_path / "b.idx").read_bytes()
    with (tmp_path / "b.idx").open("ab") as file:
        file.write(b"more")
    done = build("repair", tmp_path / "a", tmp_path / "b")
    assert done.returncode == 1
    assert "a: cannot be repaired: " in done.stdout and "--drop-truncated" in done.stdout
    assert (tmp_path / "b.idx").read_bytes() == whole


def test_verify_reads_samples_files(tmp_path: Path) -> None:
    write(tmp_path / "data", SMALL)
    dataset, path = IndexedDataset(tmp_path / "data"), tmp_path / "data.samples"
    pack(dataset.document_lengths, "concat", buckets=4).save(path, source=dataset)
    assert f"{path}: sound" in printed("verify", path, tmp_path / "data")
    write(tmp_path / "other", SMALL[:2])
    note = f"was packed from {tmp_path}/data and compared with it, not with {tmp_path}/other"
    assert note in printed("verify", path, tmp_path / "other")
    assert "was packed from" not in printed("verify", path, tmp_path / "data")
    (tmp_path / "elsewhere").mkdir()
    moved = shutil.copy(path, tmp_path / "elsewhere" / "x.samples")
    (tmp_path / "data.idx").unlink()
    for command in (("verify", moved), ("inspect", moved, "--sample", 0)):
        done = build(*command)
        said = f"no dataset at {tmp_path}/data nor at {tmp_path}/elsewhere/data: put it there"
        assert said in done.stdout + done.stderr
    write(tmp_path / "data", SMALL[:2], overwrite=True)
    done = build("verify", path)
    assert done.returncode == 1 and "do not belong together" in done.stdout
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    done = build("verify", "--json", path)
    assert done.returncode == 1
    assert [f["code"] for f in json.loads(done.stdout)[str(path)]] == ["samples"]


def test_dataset_is_merged_as_often_as_it_is_named(tmp_path: Path) -> None:
    """Regression: merge used a dataset that was named twice only once, without a message."""
    (tmp_path / "shards").mkdir()
    for name in ("a", "b"):
        write(tmp_path / "shards" / name, SMALL)
    a, b = tmp_path / "shards" / "a", tmp_path / "shards" / "b"
    all_files = sorted((tmp_path / "shards").iterdir())
    for names, expected in (
        ([a, a], [a, a]),
        ([a, f"{a}.idx", tmp_path / "shards" / "."], [a, a, a, b]),
        (all_files, [a, b]),
        ([*all_files, *all_files], [a, b, a, b]),
        ([f"{b}.bin", a, f"{b}.bin"], [b, a]),
        ([tmp_path / "shards" / "*.idx", a], [a, b, a]),
    ):
        command = ("merge", *names, "--output-prefix", tmp_path / "out", "--json")
        facts = json.loads(printed(*command, "--overwrite"))
        assert facts == {
            "prefix": str(tmp_path / "out"),
            "num_datasets": len(expected),
            "num_documents": len(expected) * len(SMALL),
            "num_tokens": facts["num_tokens"],
            "dtype": "uint16",
            "columns": [],
            "is_new": True,
        }
        merged = (tmp_path / "out.bin").read_bytes()
        assert merged == b"".join(Path(f"{prefix}.bin").read_bytes() for prefix in expected)
        assert facts["num_tokens"] * 2 == len(merged)
        assert json.loads(printed(*command)) == {**facts, "is_new": False}


def test_globs_and_directories_name_each_dataset_once(tmp_path: Path) -> None:
    for name in ("b", "a"):
        write(tmp_path / name, SMALL)
    (tmp_path / "alone.bin").touch()
    everything = sorted(str(path) for path in tmp_path.iterdir())
    assert dataset_prefixes(everything) == [str(tmp_path / name) for name in ("a", "alone", "b")]
    assert dataset_prefixes([str(tmp_path)]) == [str(tmp_path / name) for name in ("a", "b")]
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="without any"):
        dataset_prefixes([str(tmp_path / "empty")])
