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


@pytest.mark.parametrize("named", [["{}"], ["{}/docs.idx", "{}/docs.groups.idx"]])
def test_merge_leaves_out_groups(tmp_path: Path, named: list[str]) -> None:
    """Otherwise groups become documents of -1."""
    write(tmp_path / "in" / "docs", [1, 2], [3])
    write(tmp_path / "in" / "docs.groups", [-1], [4])
    names = [name.format(tmp_path / "in") for name in named]
    done = build("merge", *names, "--output-prefix", tmp_path / "all")
    assert IndexedDataset(tmp_path / "all").tokens.tolist() == [1, 2, 3]
    assert f"with --output-prefix {tmp_path}/all.groups" in done.stderr
    printed("merge", tmp_path / "in/docs.groups", "--output-prefix", tmp_path / "all.groups")
    assert IndexedDataset(tmp_path / "all.groups").tokens.tolist() == [-1, 4]


@pytest.mark.parametrize("named", [["{}"], ["{}/docs.idx", "{}/docs.labels.idx"]])
def test_old_labels_are_converted_before_the_dataset_is_used(
    tmp_path: Path, named: list[str]
) -> None:
    """The error names the command; the old files are then ignored, also in a directory."""
    peer("obstore")
    folder = tmp_path / "in"
    docs, labels = folder / "docs", folder / "docs.labels"
    write(docs, [1, 2], [3])
    write(labels, [-100, 2], [-100])
    names = [name.format(folder) for name in named]
    command = f"megapack-build column add {docs} labels {labels}"
    for words in (
        ("merge", *names, "--output-prefix", tmp_path / "all"),
        ("upload", *names, f"file://{tmp_path}/there"),
    ):
        assert command in printed(*words, status=2)
    printed(*command.split()[1:])
    printed("merge", *names, "--output-prefix", tmp_path / "all")
    merged = IndexedDataset(tmp_path / "all")
    assert merged.tokens.tolist() == [1, 2, 3]
    assert merged.columns["labels"].rows.tolist() == [-100, 2, -100]
    printed("upload", *names, f"file://{tmp_path}/there")
    found = set(names_in(f"file://{tmp_path}/there"))
    assert {"docs.idx", "docs.labels.col"} <= found and "docs.labels.idx" not in found


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
    write(tmp_path / "in" / "docs.groups", [-1], [4])
    folder = f"file://{tmp_path}/there"
    for named, found in (
        ([tmp_path / "in/rest.samples"], {"rest.samples"}),
        (sorted((tmp_path / "in").iterdir()), {"docs.samples", "docs.idx", "docs.groups.idx"}),
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
