"""What megapack writes and what megatron-core writes is the same, and each reads the other's."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megapack.storage import IndexedDataset, IndexedDatasetBuilder

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from megatron.core.datasets import indexed_dataset as megatron

DTYPES = [np.uint16, np.int32, np.int64, np.uint8, np.int8, np.int16]

# A corpus is documents, each a list of sequences, each a list of ids that every dtype holds.
sequences = st.lists(st.integers(0, 127), max_size=20)
corpora = st.lists(st.lists(sequences, max_size=4), max_size=12)


def write_with_megatron(prefix: Path, corpus: list, dtype: type, modes: list | None) -> None:
    builder = megatron.IndexedDatasetBuilder(f"{prefix}.bin", dtype, multimodal=modes is not None)
    feed(builder, corpus, modes)
    builder.finalize(f"{prefix}.idx")


def write_with_megapack(prefix: Path, corpus: list, dtype: type, modes: list | None) -> None:
    """By Megatron's own calling convention."""
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype, multimodal=modes is not None)
    feed(builder, corpus, modes)
    builder.finalize(f"{prefix}.idx")


def feed(builder: object, corpus: list, modes: list | None) -> None:
    """The same calls to either builder."""
    for d, document in enumerate(corpus):
        flat = [token for sequence in document for token in sequence]
        lengths = [len(sequence) for sequence in document]
        if modes is None:
            builder.add_document(flat, lengths)
        else:
            builder.add_document(flat, lengths, modes[d])


def pair(prefix: Path) -> tuple[bytes, bytes]:
    return Path(f"{prefix}.bin").read_bytes(), Path(f"{prefix}.idx").read_bytes()


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.__name__)
@given(corpus=corpora, multimodal=st.booleans())
def test_the_same_calls_give_the_same_bytes(
    tmp_path_factory: pytest.TempPathFactory, dtype: type, corpus: list, multimodal: bool
) -> None:
    tmp = tmp_path_factory.mktemp("interop")
    modes = [[i % 3 for i in range(len(document))] for document in corpus] if multimodal else None
    write_with_megatron(tmp / "theirs", corpus, dtype, modes)
    write_with_megapack(tmp / "ours", corpus, dtype, modes)
    assert pair(tmp / "ours") == pair(tmp / "theirs")


@given(corpus=corpora.filter(lambda c: any(any(d) for d in c)), multimodal=st.booleans())
def test_each_reads_what_the_other_wrote(
    tmp_path_factory: pytest.TempPathFactory, corpus: list, multimodal: bool
) -> None:
    tmp = tmp_path_factory.mktemp("interop")
    modes = [[i % 3 for i in range(len(document))] for document in corpus] if multimodal else None
    write_with_megatron(tmp / "theirs", corpus, np.uint16, modes)
    write_with_megapack(tmp / "ours", corpus, np.uint16, modes)
    for a, b in [
        (IndexedDataset(tmp / "theirs", multimodal), IndexedDataset(tmp / "ours", multimodal)),
        (
            megatron.IndexedDataset(str(tmp / "ours"), multimodal),
            IndexedDataset(tmp / "theirs", multimodal),
        ),
    ]:
        assert len(a) == len(b) == sum(map(len, corpus))
        np.testing.assert_array_equal(a.document_indices, b.document_indices)
        np.testing.assert_array_equal(a.sequence_lengths, b.sequence_lengths)
        for i in range(len(a)):
            np.testing.assert_equal(a[i], b[i])
        np.testing.assert_equal(a[0 : len(a)], b[0 : len(b)])


def test_items_and_documents_may_be_mixed(tmp_path: Path) -> None:
    theirs = megatron.IndexedDatasetBuilder(f"{tmp_path}/theirs.bin", np.int32)
    ours = IndexedDatasetBuilder(f"{tmp_path}/ours.bin", np.int32)
    for builder in (theirs, ours):
        builder.add_document(np.arange(5), [5])
        builder.add_item(torch.arange(3))
        builder.add_item(torch.arange(0))
        builder.end_document()
        builder.end_document()
        builder.add_document(torch.arange(4), [1, 3])
        builder.add_document(["7", "8"], [2])
        name = "theirs" if builder is theirs else "ours"
        builder.finalize(f"{tmp_path}/{name}.idx")
    assert pair(tmp_path / "ours") == pair(tmp_path / "theirs")
    dataset = IndexedDataset(tmp_path / "ours")
    assert dataset.num_documents == 5
    np.testing.assert_array_equal(dataset.document_lengths, [5, 3, 0, 4, 2])
