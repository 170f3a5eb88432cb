"""The format does not drift: files that megatron-core wrote once are written and read today."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from megapack.storage import IndexedDataset, IndexedDatasetBuilder
from megapack.storage.verify import verify
from storage.strategies import files, flatten

GOLDEN = Path(__file__).parents[1] / "golden" / "mmididx"
CORPUS = [[[1, 2, 3]], [[40_000], [5, 6]], [], [[]], [[7, 8, 9, 10], [11]]]
MODES = [[0], [1, 2], [], [3], [-1, 0]]


@pytest.mark.parametrize("name", ["uint16", "int32", "multimodal"])
def test_golden_files_are_written_and_read(tmp_path: Path, name: str) -> None:
    assert sys.byteorder == "little", "the format is little endian and so is this package"
    multimodal = name == "multimodal"
    dtype = np.uint16 if name == "uint16" else np.int32
    with IndexedDatasetBuilder(tmp_path / name, dtype, multimodal) as builder:
        for document, modes in zip(CORPUS, MODES, strict=True):
            lengths = [len(sequence) for sequence in document]
            builder.add_document(flatten(document), lengths, modes if multimodal else None)
    assert files(tmp_path / name) == files(GOLDEN / name)
    dataset = IndexedDataset(GOLDEN / name, multimodal)
    assert list(dataset.document_lengths) == [3, 3, 0, 0, 5]
    assert list(dataset.tokens) == [token for document in CORPUS for token in flatten(document)]
    if multimodal:
        assert list(dataset.sequence_modes) == [mode for modes in MODES for mode in modes]
    assert not [f for f in verify(GOLDEN / name) if f.severity != "note"]
