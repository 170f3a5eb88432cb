"""megatron-core's own code on megapack's storage: the same files, the same samples."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.datasets import gpt_dataset
from megatron.core.datasets import indexed_dataset as stock
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset
from torch.utils.data import DataLoader

from megapack.errors import DataError, FormatError
from megapack.integrations.hosts.megatron.storage import (
    IndexedDataset,
    IndexedDatasetBuilder,
    rebind_storage,
)
from tests.integrations.test_megatron_dataset import config

Documents = list[list[list[int]]]  # documents of sequences of tokens

sequences = st.lists(st.lists(st.integers(0, 60000), min_size=1, max_size=7), max_size=3)
documents = st.lists(sequences, min_size=1, max_size=8).filter(any)
BUILDERS = {"theirs": stock.IndexedDatasetBuilder, "ours": IndexedDatasetBuilder}


def assert_same_files(
    folder: Path, fill: Callable[[Any], None], dtype: Any = np.uint16, modes: bool = False
) -> None:
    """``fill(builder)`` with megatron-core's builder and with ours: ``theirs`` and ``ours``."""
    for name, builder_class in BUILDERS.items():
        builder = builder_class(f"{folder / name}.bin", dtype=dtype, multimodal=modes)
        fill(builder)
        builder.finalize(f"{folder / name}.idx")
    for suffix in ("bin", "idx"):
        ours, theirs = (folder / f"{name}.{suffix}" for name in ("ours", "theirs"))
        assert ours.read_bytes() == theirs.read_bytes()


def add(builder: Any, content: Documents, modes: bool) -> None:
    for number, of_document in enumerate(content):
        flat = np.array([token for sequence in of_document for token in sequence], dtype=np.int64)
        if number % 2:
            lengths = [len(sequence) for sequence in of_document]
            builder.add_document(flat, lengths, [number % 3] * len(lengths) if modes else None)
        else:
            for sequence in of_document:
                builder.add_item(torch.tensor(sequence), number % 3)
            builder.end_document()


@given(
    content=documents, dtype=st.sampled_from([np.uint16, np.int32, np.int64]), modes=st.booleans()
)
def test_builders_write_the_same_bytes_and_readers_agree(
    tmp_path_factory: pytest.TempPathFactory, content: Documents, dtype: Any, modes: bool
) -> None:
    folder = tmp_path_factory.mktemp("pair")
    if modes:  # megatron-core 0.16.1 cannot add a multimodal document without modes
        content = [of_document or [[1]] for of_document in content]
    assert_same_files(folder, lambda builder: add(builder, content, modes), dtype, modes)
    theirs = stock.IndexedDataset(str(folder / "ours"), multimodal=modes)
    ours = IndexedDataset(str(folder / "theirs"), multimodal=modes)
    assert_same_dataset(ours, theirs)
    assert_same_dataset(pickle.loads(pickle.dumps(ours)), theirs)


def assert_same_dataset(ours: IndexedDataset, theirs: Any) -> None:
    assert isinstance(ours, stock.IndexedDataset)
    assert len(ours) == len(theirs)
    assert ours.index.dtype is theirs.index.dtype
    assert len(ours.index) == ours.index.sequence_count == theirs.index.sequence_count
    assert ours.index.document_count == theirs.index.document_count
    for name in ("sequence_lengths", "document_indices"):
        np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name))
        np.testing.assert_array_equal(getattr(ours.index, name), getattr(theirs.index, name))
    np.testing.assert_array_equal(ours.get_document_indices(), theirs.get_document_indices())
    np.testing.assert_array_equal(ours.index.sequence_pointers, theirs.index.sequence_pointers)
    for i in range(len(theirs)):
        assert_same_item(ours[i], theirs[i])
        assert_same_item(ours[np.int32(i)], theirs[i])
        assert ours.index[i] == theirs.index[i]
        assert_same_item(ours.get(i, offset=1), theirs.get(i, offset=1))
        assert_same_item(ours.get(i, 0, 1), theirs.get(i, 0, 1))
        pointer, length, _ = theirs.index[i]
        at = (theirs.index.dtype, length, pointer)
        np.testing.assert_array_equal(ours.bin_reader.read(*at), theirs.bin_reader.read(*at))
    whole = [of[0 : len(theirs)] for of in (ours, theirs)]
    if isinstance(whole[1], tuple):  # sequences and modes
        whole = [[*of[0], of[1]] for of in whole]
    for a, b in zip(*whole, strict=True):
        np.testing.assert_array_equal(a, b)


def assert_same_item(ours: Any, theirs: Any) -> None:
    if isinstance(theirs, tuple):
        assert isinstance(ours, tuple) and ours[1] == theirs[1]
        ours, theirs = ours[0], theirs[0]
    assert ours.dtype == theirs.dtype
    np.testing.assert_array_equal(ours, theirs)


def test_strings_and_negative_ids_are_stored_as_in_megatron(
    tmp_path: Path,
) -> None:
    def fill(builder: Any) -> None:
        builder.add_document(["12", "7", "300"], [3])
        builder.add_document([-100, 5], [2])

    assert_same_files(tmp_path, fill, np.int32)


def test_documents_without_tokens_keep_their_entry(tmp_path: Path) -> None:
    def fill(builder: Any) -> None:
        for tokens, lengths in (([], []), ([1, 2], [2]), ([], []), ([], [0]), ([3], [1])):
            builder.add_document(tokens, lengths)
        assert builder.sequence_lengths == [2, 0, 1]
        assert builder.document_indices == [0, 0, 1, 1, 2, 3]

    assert_same_files(tmp_path, fill)


def test_the_builder_shows_what_was_added_so_far(tmp_path: Path) -> None:
    for name, builder_class in BUILDERS.items():
        builder = builder_class(f"{tmp_path / name}.bin", dtype=np.int32, multimodal=True)
        builder.add_document([1, 2, 3], [1, 2], [0, 4])
        builder.add_item(torch.tensor([5, 6]), 2)
        assert builder.sequence_lengths == [1, 2, 2]
        assert builder.sequence_modes == [0, 4, 2]
        assert builder.document_indices == [0, 2], "the item is part of no document yet"
        builder.end_document()
        assert builder.document_indices == [0, 2, 3]
    plain = IndexedDatasetBuilder(str(tmp_path / "plain.bin"))
    plain.add_item([1])
    assert plain.sequence_modes is None and plain.document_indices == [0]


@pytest.mark.parametrize("chunk_size", [1, 2, 100])
@pytest.mark.parametrize("eod_token", [None, 9])
@pytest.mark.parametrize("modes", [None, [0, 4, 1, 2]])
def test_add_documents_equals_adding_them_one_by_one(
    tmp_path: Path, chunk_size: int, eod_token: int | None, modes: list[int] | None
) -> None:
    documents = [[1, 2, 3], [], [4], [5, 6]]

    def fill(builder: Any) -> None:
        if isinstance(builder, IndexedDatasetBuilder):
            builder.add_documents(documents, modes, eod_token, chunk_size)
            return
        for i, document in enumerate(documents):
            tokens = document if eod_token is None else [*document, eod_token]
            builder.add_document(tokens, [len(tokens)], modes and [modes[i]])

    assert_same_files(tmp_path, fill, modes=modes is not None)


def test_add_documents_needs_a_mode_per_document(tmp_path: Path) -> None:
    builder = IndexedDatasetBuilder(f"{tmp_path}/short.bin", np.uint16, multimodal=True)
    with pytest.raises(DataError, match="3 documents have 2 modes"):
        builder.add_documents([[1, 2], [3], [4]], modes=[1, 0])


def test_merging_reads_what_megatron_wrote(tmp_path: Path) -> None:
    part = stock.IndexedDatasetBuilder(f"{tmp_path}/part.bin", dtype=np.uint16)
    add(part, [[[1, 2], [3]], [[4]], [[5, 6, 7]]], modes=False)
    part.finalize(f"{tmp_path}/part.idx")

    def fill(builder: Any) -> None:
        builder.add_index(str(tmp_path / "part"))
        builder.add_index(str(tmp_path / "part"))

    assert_same_files(tmp_path, fill)


def test_input_that_megatron_accepts_silently_is_an_error(tmp_path: Path) -> None:
    builder = IndexedDatasetBuilder(str(tmp_path / "a.bin"), dtype=np.uint16)
    with pytest.raises(DataError, match="70000"):
        builder.add_item(torch.tensor([1, 70000]))
    with pytest.raises(DataError, match="lengths sum to 5"):
        builder.add_document([1, 2, 3], [2, 3])
    builder.add_document([1, 2, 3], [3])
    builder.finalize(str(tmp_path / "a.idx"))
    assert IndexedDataset.exists(str(tmp_path / "a"))
    assert not IndexedDataset.exists(str(tmp_path / "b"))
    with pytest.raises(FormatError, match="sequences_per_dataset says"):
        IndexedDataset(str(tmp_path / "a"), sequences_per_dataset=(5, 6), dtype_code=4)
    same = IndexedDataset(str(tmp_path / "a"), sequences_per_dataset=(1, 2), dtype_code=4)
    assert same[0].dtype == np.uint16, "the header decides, not the guessed dtype code"
    (tmp_path / "a.bin").write_bytes(b"\x00\x00")
    with pytest.raises(FormatError, match="truncated"):
        IndexedDataset(str(tmp_path / "a"))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    rng = np.random.default_rng(3)
    prefix = tmp_path_factory.mktemp("corpus") / "text_document"
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    for length in rng.integers(1, 200, 300):
        builder.add_document(rng.integers(0, 1000, length), [int(length)])
    builder.finalize(f"{prefix}.idx")
    return str(prefix)


@pytest.fixture
def rebound() -> Iterator[None]:
    rebinding = rebind_storage()
    yield
    rebinding.undo()
    assert gpt_dataset.IndexedDataset is stock.IndexedDataset


def build(prefix: str, cache: Path) -> list[Any]:
    settings = config(prefix, cache, eod_mask_loss=True)
    builder = BlendedMegatronDatasetBuilder(GPTDataset, [400, 20, 0], lambda: True, settings)
    built: list[Any] = builder.build()
    return built


def test_gpt_dataset_returns_the_same_samples_on_our_storage(
    corpus: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    theirs = build(corpus, tmp_path / "theirs")
    assert type(theirs[0].dataset) is stock.IndexedDataset
    request.getfixturevalue("rebound")
    ours = build(corpus, tmp_path / "ours")
    assert type(ours[0].dataset) is IndexedDataset is gpt_dataset.IndexedDataset
    for split in (0, 1):
        assert len(ours[split]) == len(theirs[split]) > 0
        for i in range(len(theirs[split])):
            for key, value in theirs[split][i].items():
                assert torch.equal(ours[split][i][key], value), (split, i, key)
    batches = DataLoader(ours[0], batch_size=8, num_workers=2)
    for a, b in zip(batches, DataLoader(theirs[0], batch_size=8), strict=True):
        assert torch.equal(a["tokens"], b["tokens"])
