"""Datasets named on a command line: prefixes, files, directories, patterns."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from commands import build, printed
from peers import peer

from megapack import IndexedDataset, IndexedDatasetBuilder, pack
from megapack.storage.remote.client import names_in


def write(prefix: Path, *documents: list[int]) -> Path:
    prefix.parent.mkdir(exist_ok=True)
    with IndexedDatasetBuilder(prefix, dtype=np.int32, allow_negative=True) as builder:
        for document in documents:
            builder.add_document(document)
    return prefix


@pytest.mark.parametrize("named", [["{}"], ["{}/docs.idx", "{}/docs.labels.idx"]])
def test_merge_leaves_out_labels(tmp_path: Path, named: list[str]) -> None:
    """Otherwise labels become documents of -100."""
    write(tmp_path / "in" / "docs", [1, 2], [3])
    write(tmp_path / "in" / "docs.labels", [-100, 2], [-100])
    names = [name.format(tmp_path / "in") for name in named]
    done = build("merge", *names, "--output-prefix", tmp_path / "all")
    assert IndexedDataset(tmp_path / "all").tokens.tolist() == [1, 2, 3]
    assert f"with --output-prefix {tmp_path}/all.labels" in done.stderr
    printed("merge", tmp_path / "in/docs.labels", "--output-prefix", tmp_path / "all.labels")
    assert IndexedDataset(tmp_path / "all.labels").tokens.tolist() == [-100, 2, -100]


def test_uploads_with_equal_names_are_refused(tmp_path: Path) -> None:
    """Otherwise the second upload replaces the first."""
    names = [write(tmp_path / folder / "docs", [1]) for folder in "ab"]
    folder = f"file://{tmp_path}/there"
    said = printed("upload", *names, folder, status=2)
    assert f"{names[0]} and {names[1]} would both be {folder}/docs" in said
    assert not Path(tmp_path, "there").exists()


def test_upload_copies_named_samples(tmp_path: Path) -> None:
    """Samples are uploaded with their dataset, or alone (as after `pack --documents`)."""
    peer("obstore")
    prefix = write(tmp_path / "in" / "docs", [1, 2], [3])
    for name in ("docs", "rest"):
        index = pack([2, 1], buckets=[4])
        index.save(tmp_path / f"in/{name}.samples", source=IndexedDataset(prefix))
    write(tmp_path / "in" / "docs.labels", [-100, 2], [-100])
    folder = f"file://{tmp_path}/there"
    for named, found in (
        ([tmp_path / "in/rest.samples"], {"rest.samples"}),
        (sorted((tmp_path / "in").iterdir()), {"docs.samples", "docs.idx", "docs.labels.idx"}),
    ):
        printed("upload", *named, folder)
        assert found <= set(names_in(folder))


def test_name_with_brackets_is_not_a_pattern(tmp_path: Path) -> None:
    """Brackets are neither a shell pattern nor terminal markup."""
    names = [write(tmp_path / name, [1, 2]) for name in ("web[en]", "web[bold]")]
    manifest = tmp_path / "web.shards.json"
    printed("pack", *names, "--buckets", 8, "--output", manifest, "--workers", 1)
    shown = printed("inspect", manifest, "--shards")
    assert all(str(name) in shown for name in names)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("verify {}.meta.json", "names no dataset"),  # no dataset: must not succeed silently
        ("repair {}.samples", "names no dataset"),
        ("merge {} --output-prefix {}/", "is a directory: give the path"),  # a hidden .bin
        ("compare .", "prefix '.' is a directory"),
        ("pack {} --buckets 4 --output {}.bin --overwrite", "is an input and would be replaced"),
        ("simulate {} --max-tokens 4 --context 3", "context_parallel is 3"),
        ("train-tokenizer --input {}.idx --output {}.json", "--type sentencepiece writes NAME.mod"),
        ("arrange {} --output {}.shards.json", "is not a shard manifest"),
    ],
)
def test_wrong_name_is_refused(tmp_path: Path, command: str, message: str) -> None:
    """The message names the cause, and nothing is written."""
    if command.startswith("arrange"):
        peer("torch")  # which megapack.data needs
    docs = write(tmp_path / "docs", [1, 2], [3])
    before = (tmp_path / "docs.bin").read_bytes()
    assert message in printed(*command.replace("{}", str(docs)).split(), status=2)
    assert (tmp_path / "docs.bin").read_bytes() == before
    assert {path.suffix for path in tmp_path.iterdir()} <= {".bin", ".idx", ".json", ".lock"}


def test_companion_files_next_to_samples_are_ignored(tmp_path: Path) -> None:
    prefix = write(tmp_path / "docs", [1, 2])
    pack([2], buckets=[4]).save(f"{prefix}.samples", source=IndexedDataset(prefix))
    assert "sound" in printed("verify", f"{prefix}.samples", f"{prefix}.meta.json")


def test_missing_prefix_error_explains_prefixes(tmp_path: Path) -> None:
    said = printed("compare", tmp_path / "docs.jsonl", status=1)
    assert "(give the prefix of a dataset, which has an .idx)" in said
    assert "docs.jsonl.idx" in said
