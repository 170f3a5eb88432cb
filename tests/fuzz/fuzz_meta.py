"""Random bytes as a .meta.json: refused or read; the documents do not change."""

from __future__ import annotations

import json
import random
import tempfile
from pathlib import Path

import numpy as np

from fuzz.mutate import change_value, mutate
from megapack.errors import MegapackError
from megapack.storage import IndexedDataset, IndexedDatasetBuilder
from megapack.storage.merge import merge
from megapack.storage.tokens import InputDataset
from megapack.storage.verify import verify

_TOKENS = np.array([5, 7, 0, 9, 0, 0, 19, 1, 0], np.uint16)


def _dataset() -> dict[str, bytes]:
    metadata = {"tokenizer": {"digest": "d", "source": "tokenizer.json"}, "document_end_token": 0}
    metadata["command"] = ["tokenize", "--input", "x.jsonl"]
    with tempfile.TemporaryDirectory() as directory:
        prefix = f"{directory}/data"
        with IndexedDatasetBuilder(prefix, np.uint16, vocab_size=20, metadata=metadata) as builder:
            builder.add_documents(_TOKENS, [0, 3, 5, 6, 9])
        suffixes = (".bin", ".idx", ".meta.json")
        return {suffix: Path(prefix + suffix).read_bytes() for suffix in suffixes}


FILES = _dataset()
SEEDS = [FILES[".meta.json"], json.dumps(json.loads(FILES[".meta.json"])).encode()]


def change(rng: random.Random) -> bytes:
    """Return a meta file with one value or a few bytes changed."""
    if rng.random() < 0.5:
        return mutate(rng, SEEDS)
    content = json.loads(SEEDS[0])
    change_value(rng, content)
    return json.dumps(content).encode()


def run(data: bytes, directory: Path) -> str:
    prefix = directory / "data"
    for suffix, content in (FILES | {".meta.json": data}).items():
        Path(f"{prefix}{suffix}").write_bytes(content)
    dataset = IndexedDataset(prefix)
    assert np.array_equal(dataset.tokens, _TOKENS)
    assert dataset.document_lengths.tolist() == [3, 2, 1, 3]
    valid = not any(finding.severity == "error" for finding in verify(prefix))
    try:
        meta = dataset.meta
        assert dataset.vocab_size is None or dataset.vocab_size > _TOKENS.max()
    except MegapackError:
        assert not valid, "verify finds no error, but a reader raises"
        return "refused at load"
    try:
        InputDataset(prefix)
        merge([prefix], directory / "merged")
        merged = IndexedDataset(directory / "merged")
        assert np.array_equal(merged.tokens, _TOKENS)
        merged_valid = not any(f.severity == "error" for f in verify(merged.prefix))
        assert merged_valid or not valid, "the merge of a valid dataset is damaged"
    except MegapackError as error:
        assert not valid, f"verify finds no error, but: {error}"
    if meta == json.loads(FILES[".meta.json"]):
        return "equal"
    return "another, and consistent" if valid else "found by verify"
