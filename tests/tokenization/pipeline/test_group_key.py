"""Group ids follow their documents through splits, dropped documents and all formats."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megapack.errors import ConfigError
from megapack.storage import IndexedDataset

from ..helpers import Build, write_jsonl

NAMES = [None, "x", "y", "x", 7, None, "y", "x", "z", 7, "z", "x"] * 40
TEXTS = ["" if i % 11 == 5 else f"{i} {name}" for i, name in enumerate(NAMES)]
STREAMS = {"whole": [""], "order": ["_train", "_valid"], "hash": ["_train", "_valid"]}


def write(folder: Path, kind: str) -> Path:
    path = folder / f"corpus.{kind}"
    if kind == "parquet":
        names = [None if name is None else str(name) for name in NAMES]
        pq.write_table(pa.table({"text": TEXTS, "of": pa.array(names)}), path, row_group_size=70)
        return path
    rows = [{"text": text, "of": name} for text, name in zip(TEXTS, NAMES, strict=True)]
    for row in rows[::24]:  # half of those without one: null, and no key at all
        del row["of"]
    return write_jsonl(path, rows)


@pytest.mark.parametrize("split", STREAMS)
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_group_ids_follow_documents(
    kind: str, split: str, tmp_path: Path, run_build: Build
) -> None:
    how = {} if split == "whole" else {"split": "60,40", "split_by": split}
    run_build(write(tmp_path, kind), group_key="of", shard_bytes=4096, **how)
    prefix = tmp_path / "out"
    seen: dict[str, set[int]] = {}
    num_documents = 0
    for stream in STREAMS[split]:
        documents, ids = (IndexedDataset(f"{prefix}{stream}{end}") for end in ("", ".groups"))
        assert ids.num_documents == ids.num_tokens == documents.num_documents > 0
        num_documents += documents.num_documents
        for i, group in enumerate(ids.tokens.tolist()):
            begin, end = documents.document_offsets[i : i + 2].tolist()
            name = bytes(documents.tokens[begin:end].tolist()).decode().split()[1]
            seen.setdefault(name, set()).add(group)
    assert num_documents == sum(map(bool, TEXTS))  # empty ones are left out, with their ids
    assert seen.pop("None") == {-1}
    assert all(len(groups) == 1 for groups in seen.values())
    assert len(set.union(*seen.values())) == len(seen) == 4 and min(map(min, seen.values())) >= 0


def test_lists_and_objects_are_not_group_keys(tmp_path: Path, run_build: Build) -> None:
    values = pa.array([[1], [2], None]), pa.array([{"a": 1}, {"a": 1}, None])
    for of in values:
        pq.write_table(pa.table({"text": ["a", "b", "c"], "of": of}), tmp_path / "x.parquet")
        run_build(tmp_path / "x.parquet", group_key="of", overwrite=True)
        assert IndexedDataset(tmp_path / "out.groups").tokens.tolist() == [-1, -1, -1]


def test_files_without_keys_are_refused(tmp_path: Path, run_build: Build) -> None:
    (tmp_path / "a.txt").write_text("text")
    split: dict[str, Any] = {"split": "1,1", "split_by": "hash"}
    for name, more in (
        ("group", {}),
        ("weights", {}),
        ("split", split),
        ("messages", {"chat_format": "headers"}),
    ):
        with pytest.raises(ConfigError, match=f"a.txt is one document and has no .*--{name}-key"):
            run_build(tmp_path / "a.txt", **{f"{name}_key": "of"}, **more)
