"""Datasets named on a command line: each is what its name says, and none is lost on the way."""

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
def test_labels_are_no_documents_of_a_merge(tmp_path: Path, named: list[str]) -> None:
    """They once became documents of -100."""
    write(tmp_path / "in" / "docs", [1, 2], [3])
    write(tmp_path / "in" / "docs.labels", [-100, 2], [-100])
    names = [name.format(tmp_path / "in") for name in named]
    done = build("merge", *names, "--output-prefix", tmp_path / "all")
    assert IndexedDataset(tmp_path / "all").tokens.tolist() == [1, 2, 3]
    assert f"with --output-prefix {tmp_path}/all.labels" in done.stderr
    printed("merge", tmp_path / "in/docs.labels", "--output-prefix", tmp_path / "all.labels")
    assert IndexedDataset(tmp_path / "all.labels").tokens.tolist() == [-100, 2, -100]


def test_uploads_to_one_name_are_refused(tmp_path: Path) -> None:
    """The second once took the place of the first."""
    names = [write(tmp_path / folder / "docs", [1]) for folder in "ab"]
    folder = f"file://{tmp_path}/there"
    said = printed("upload", *names, folder, status=2)
    assert f"{names[0]} and {names[1]} would both be {folder}/docs" in said
    assert not Path(tmp_path, "there").exists()


def test_samples_are_uploaded_where_they_are_named(tmp_path: Path) -> None:
    """With their dataset, and alone, as those of `pack --documents`."""
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


def test_name_with_brackets_is_a_name(tmp_path: Path) -> None:
    """Neither a pattern of the shell nor markup of the terminal."""
    names = [write(tmp_path / name, [1, 2]) for name in ("web[en]", "web[bold]")]
    manifest = tmp_path / "web.shards.json"
    printed("pack", *names, "--buckets", 8, "--output", manifest, "--workers", 1)
    shown = printed("inspect", manifest, "--shards")
    assert all(str(name) in shown for name in names)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("verify {}.meta.json", "names no dataset"),  # it once said nothing, and all was well
        ("repair {}.samples", "names no dataset"),
        ("merge {} --output-prefix {}/", "is a directory, and names no files"),  # a hidden .bin
        ("compare .", "prefix '.' is a directory"),
        ("pack {} --buckets 4 --output {}.bin --overwrite", "is read here, and would be replaced"),
        ("simulate {} --max-tokens 4 --context 3", "context_parallel is 3"),
        ("train-tokenizer --input {}.idx --output {}.json", "--type sentencepiece writes NAME.mod"),
        ("arrange {} --output {}.shards.json", "is not a shard manifest"),
    ],
)
def test_wrong_name_is_refused(tmp_path: Path, command: str, message: str) -> None:
    """Each once passed, or was told another cause; a corpus was replaced, or had a hidden name."""
    if command.startswith("arrange"):
        peer("torch")  # which megapack.data needs
    docs = write(tmp_path / "docs", [1, 2], [3])
    before = (tmp_path / "docs.bin").read_bytes()
    assert message in printed(*command.replace("{}", str(docs)).split(), status=2)
    assert (tmp_path / "docs.bin").read_bytes() == before
    assert {path.suffix for path in tmp_path.iterdir()} <= {".bin", ".idx", ".json", ".lock"}


def test_files_that_name_nothing_may_stand_beside_samples(tmp_path: Path) -> None:
    prefix = write(tmp_path / "docs", [1, 2])
    pack([2], buckets=[4]).save(f"{prefix}.samples", source=IndexedDataset(prefix))
    assert "sound" in printed("verify", f"{prefix}.samples", f"{prefix}.meta.json")


def test_a_prefix_without_files_says_what_a_prefix_is(tmp_path: Path) -> None:
    said = printed("compare", tmp_path / "docs.jsonl", status=1)
    assert "(a dataset is named by its prefix, and has an .idx)" in said
    assert "docs.jsonl.idx" in said
