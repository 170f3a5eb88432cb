"""Group ids stand beside their documents, whatever splits, leaves out or reads them."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from commands import build

from megapack.storage import IndexedDataset

NAMES = [None, "x", "y", "x", 7, None, "y", "x", "z", 7, "z", "x"] * 40
TEXTS = ["" if i % 11 == 5 else f"{i} {name}" for i, name in enumerate(NAMES)]
STREAMS = {"whole": [""], "order": ["_train", "_valid"], "hash": ["_train", "_valid"]}


def write(folder: Path, kind: str) -> Path:
    path = folder / f"corpus.{kind}"
    if kind == "parquet":
        names = [None if name is None else str(name) for name in NAMES]
        pq.write_table(pa.table({"text": TEXTS, "of": pa.array(names)}), path, row_group_size=70)
        return path
    rows = [
        {"text": text, **({} if name is None else {"of": name})}
        for text, name in zip(TEXTS, NAMES, strict=True)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("split", STREAMS)
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_group_ids_stand_beside_their_documents(kind: str, split: str, tmp_path: Path) -> None:
    how = [] if split == "whole" else ["--split", "60,40", "--split-by", split]
    prefix = tmp_path / "out"
    done = build(
        *("tokenize", "--input", write(tmp_path, kind), "--tokenizer", "bytes", "--workers", 2),
        *("--output-prefix", prefix, "--group-key", "of", "--shard-bytes", "4K", *how),
    )
    assert done.returncode == 0, done.stderr
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


def test_files_without_keys_have_no_groups(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    options = ("--tokenizer", "bytes", "--output-prefix", tmp_path / "out", "--group-key", "of")
    done = build("tokenize", "--input", tmp_path / "a.txt", "--format", "text", *options)
    assert done.returncode == 2 and "files of text have no keys" in done.stderr
