"""Corpora for property tests: documents of sequences of ids, and their expected files."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
from hypothesis import strategies as st

from megapack.storage import IndexedDatasetBuilder
from megapack.storage.verify import Finding, verify

# A corpus is documents, each a list of sequences, each a list of ids that every dtype holds.
Corpus = list[list[list[int]]]
sequences = st.lists(st.integers(0, 127), max_size=20)
corpora = st.lists(st.lists(sequences, max_size=4), max_size=12)


def flatten(document: list[list[int]]) -> list[int]:
    return [token for sequence in document for token in sequence]


def write(prefix: Path, corpus: Corpus, dtype: type = np.uint16, **options: object) -> None:
    with IndexedDatasetBuilder(prefix, dtype, durable=False, **options) as builder:
        for document in corpus:
            builder.add_document(flatten(document), [len(sequence) for sequence in document])


def write_foreign(prefix: Path, corpus: Corpus, dtype: type = np.uint16) -> None:
    """Write a dataset as other tools do: without a meta file (Megatron's bytes are the same, see
    test_megatron_interop), and keep an existing meta file.
    """
    staging = prefix.with_name(f"{prefix.name}-of-another-tool")
    write(staging, corpus, dtype)
    Path(f"{staging}.meta.json").unlink()
    for suffix in (".bin", ".idx"):
        Path(f"{staging}{suffix}").replace(f"{prefix}{suffix}")


def index_bytes(lengths: list, pointers: list, documents: list, *, code: int = 8) -> bytes:
    """Return an .idx, built from the description of the layout of Megatron's reader."""
    head = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, code, len(lengths), len(documents))
    arrays = np.array(lengths, "<i4"), np.array(pointers, "<i8"), np.array(documents, "<i8")
    return head + b"".join(array.tobytes() for array in arrays)


def by_hand(prefix: Path, *arrays: list, code: int = 8, bin_bytes: int = 0) -> Path:
    Path(f"{prefix}.idx").write_bytes(index_bytes(*arrays, code=code))
    Path(f"{prefix}.bin").write_bytes(bytes(bin_bytes))
    return prefix


def files(prefix: Path) -> dict[str, bytes]:
    """Return the bytes of a dataset's .bin and .idx."""
    return {suffix: Path(f"{prefix}{suffix}").read_bytes() for suffix in (".bin", ".idx")}


def errors(prefix: Path, **options: object) -> list[Finding]:
    """Return the findings about a dataset that are errors."""
    return [found for found in verify(prefix, **options) if found.severity == "error"]


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


SMALL: Corpus = [[[1, 2, 3]], [[4], [5, 6]], [], [[]], [[7, 8, 9, 10]]]
