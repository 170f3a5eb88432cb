"""The builder stores its input exactly, or raises and stays unchanged."""

from __future__ import annotations

import gc
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from peers import peer

from megapack.errors import DataError
from megapack.storage import IndexedDataset, IndexedDatasetBuilder
from storage.strategies import SMALL, corpora, files, flatten, names, write


@given(
    lengths=st.lists(st.integers(0, 9), max_size=30),
    chunks=st.integers(1, 5),
    source=st.sampled_from([np.uint16, np.int32, np.int64, np.uint64, np.int8]),
)
def test_add_documents_equals_single_documents(
    tmp_path_factory: pytest.TempPathFactory, lengths: list, chunks: int, source: type
) -> None:
    tmp = tmp_path_factory.mktemp("build")
    documents = [np.arange(n, dtype=source) for n in lengths]
    with IndexedDatasetBuilder(tmp / "one", np.uint16, durable=False) as one:
        for document in documents:
            one.add_document(document)
    with IndexedDatasetBuilder(tmp / "many", np.uint16, durable=False) as many:
        for part in np.array_split(np.arange(len(documents)), chunks):
            chosen = [documents[i] for i in part]
            flat = np.concatenate([np.zeros(0, source), *chosen])
            many.add_documents(flat, np.cumsum([0, *map(len, chosen)]))
    assert files(tmp / "one") == files(tmp / "many")


def test_large_arrays_bypass_the_buffer(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 60_000, 3_000_000)
    bounds = np.sort(rng.integers(0, tokens.size, 999))
    offsets = np.concatenate([[0], bounds, [tokens.size]])
    for name, dtype in (("narrowed", np.int32), ("same", np.uint16)):
        with IndexedDatasetBuilder(tmp_path / name, np.uint16) as builder:
            builder.add_document([1, 2, 3])
            builder.add_documents(tokens.astype(dtype), offsets)
            builder.add_document([4])
    dataset = IndexedDataset(tmp_path / "narrowed")
    np.testing.assert_array_equal(dataset.tokens[3:-1], tokens)
    assert files(tmp_path / "narrowed") == files(tmp_path / "same")
    assert dataset.meta == IndexedDataset(tmp_path / "same").meta


torch = peer("torch")
FORMS = {
    "list": [3, 1, 2],
    "tuple": (3, 1, 2),
    "strings": ["3", "1", "2"],
    "int16": np.array([3, 1, 2], np.int16),
    "big endian": np.array([3, 1, 2], ">i4"),
    "strided": np.array([3, 0, 1, 0, 2, 0])[::2],
    "matrix": np.array([[3], [1], [2]]),
    "read only": np.frombuffer(b"\3\1\2", np.uint8),
    "unaligned": np.frombuffer(b"\0\3\0\1\0\2\0", np.uint16, offset=1),
    "tensor": torch.tensor([3, 1, 2]),
    "strided tensor": torch.tensor([[3, 9], [1, 9], [2, 9]])[:, 0],
}


@pytest.mark.parametrize("tokens", FORMS.values(), ids=FORMS.keys())
def test_tokens_may_be_any_integers(tmp_path: Path, tokens: object) -> None:
    with IndexedDatasetBuilder(tmp_path / "data", np.uint16) as builder:
        builder.add_document(tokens)
    np.testing.assert_array_equal(IndexedDataset(tmp_path / "data")[0], [3, 1, 2])


@pytest.mark.parametrize("tokens", [[0.5], ["x"], [None], [2**70], np.zeros(3), np.zeros(3, bool)])
def test_non_integers_are_refused(tmp_path: Path, tokens: object) -> None:
    builder = IndexedDatasetBuilder(tmp_path / "data")
    with pytest.raises(TypeError, match="tokens"):
        builder.add_document(tokens)


@pytest.mark.parametrize(
    ("dtype", "options", "token", "limit"),
    [
        (np.uint16, {}, 65_536, r"\[0, 65535\] \(uint16\)"),
        (np.uint16, {}, -1, r"\[0, 65535\]"),
        (np.uint16, {"vocab_size": 100}, 100, r"\[0, 99\] \(uint16, vocab_size 100\)"),
        (np.int32, {}, 2**31, r"\[0, 2147483647\]"),
        (np.int32, {}, -100, r"\[0, 2147483647\]"),
        (np.int32, {"allow_negative": True}, -(2**31) - 1, r"\[-2147483648, 2147483647\]"),
        (np.int64, {}, 2**63, r"\[0, 9223372036854775807\]"),
        (np.uint8, {}, 256, r"\[0, 255\]"),
    ],
)
@pytest.mark.parametrize("size", [10, 700_000], ids=["buffered", "unbuffered"])
def test_ids_outside_the_limits_are_refused(
    tmp_path: Path, dtype: type, options: dict, token: int, limit: str, size: int
) -> None:
    array = np.zeros(size, np.uint64 if token >= 2**63 else np.int64)
    array[size - 3] = token
    builder = IndexedDatasetBuilder(tmp_path / "data", dtype, **options)
    builder.add_document([1, 2])
    message = rf"document 2, position {size - 8}: token id {token} is outside {limit}"
    with pytest.raises(DataError, match=message):
        builder.add_documents(array, [0, 5, size])
    with pytest.raises(DataError, match=f"document 1, position {size - 3}: token id {token} "):
        builder.add_document(array)
    builder.add_document([3])
    builder.finalize()
    dataset = IndexedDataset(tmp_path / "data")
    assert [list(document) for document in dataset[:]] == [[1, 2], [3]]
    write(tmp_path / "clean", [[[1, 2]], [[3]]], dtype, **options)
    assert IndexedDataset(tmp_path / "clean").meta == dataset.meta


def test_datasets_with_allow_negative_accept_minus_100(tmp_path: Path) -> None:
    write(tmp_path / "labels", [[[-100, -100, 7]]], np.int32, allow_negative=True)
    assert list(IndexedDataset(tmp_path / "labels")[0]) == [-100, -100, 7]
    with pytest.raises(ValueError, match="uint16 has no negative values"):
        IndexedDatasetBuilder(tmp_path / "no", np.uint16, allow_negative=True)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda b: b.add_document([1, 2, 3], [1, 1]), "lengths sum to 2"),
        (lambda b: b.add_document([1, 2, 3], [4, -1]), "lengths"),
        (lambda b: b.add_documents([1, 2, 3], [0, 2]), "offsets are int64 from 0 to 2"),
        (lambda b: b.add_documents([1, 2, 3], [1, 3]), "offsets"),
        (lambda b: b.add_documents([1, 2, 3], [0, 2, 1, 3]), "offsets decrease"),
        (lambda b: b.add_documents([1, 2, 3], []), "offsets"),
        (lambda b: b.add_documents([1, 2, 3], [0.0, 3.0]), "offsets"),
    ],
)
def test_wrong_lengths_and_offsets_are_refused(tmp_path: Path, call: object, message: str) -> None:
    builder = IndexedDatasetBuilder(tmp_path / "data")
    with pytest.raises(DataError, match=message):
        call(builder)
    with pytest.raises(TypeError, match="'float' object"):
        builder.add_document([1, 2], [1.5, 1.5])
    builder.finalize()
    assert len(IndexedDataset(tmp_path / "data")) == 0


def test_modes_are_checked_before_anything_is_added(tmp_path: Path) -> None:
    builder = IndexedDatasetBuilder(tmp_path / "data", multimodal=True)
    with pytest.raises(DataError, match="mode 200"):
        builder.add_item([1], mode=200)
    for add in (builder.add_item, lambda tokens, mode: builder.add_document(tokens, [1], [mode])):
        with pytest.raises(TypeError, match="'float' object cannot be interpreted as an integer"):
            add([1], 0.5)
    with pytest.raises(DataError, match="2 sequences, 1 modes"):
        builder.add_document([1, 2], [1, 1], [0])
    builder.add_document([1, 2], [1, 1], [-1, 3])
    builder.add_documents([5], [0, 1])
    builder.finalize()
    dataset = IndexedDataset(tmp_path / "data", multimodal=True)
    found = [(list(tokens), int(mode)) for tokens, mode in map(dataset.__getitem__, range(3))]
    assert found == [([1], -1), ([2], 3), ([5], 0)]


def test_open_document_is_an_error(tmp_path: Path) -> None:
    builder = IndexedDatasetBuilder(tmp_path / "data")
    builder.add_item([1])
    builder.add_item([2])
    with pytest.raises(DataError, match=r"2 sequences .* end_document"):
        builder.finalize()
    with pytest.raises(DataError, match="end_document"):
        builder.add_documents([1], [0, 1])
    builder.end_document()
    builder.finalize()
    assert IndexedDataset(tmp_path / "data").num_documents == 1


def test_ambiguous_and_narrow_dtypes_are_refused(tmp_path: Path) -> None:
    for dtype in (np.float32, np.uint32, np.uint64, bool, ">u2"):
        with pytest.raises(ValueError, match="token files have one of"):
            IndexedDatasetBuilder(tmp_path / "data", dtype)
        assert names(tmp_path) == []
    IndexedDatasetBuilder(tmp_path / "data", np.uint16, vocab_size=65_536).abort()
    with pytest.raises(ValueError, match="choose int32"):
        IndexedDatasetBuilder(tmp_path / "data", np.uint16, vocab_size=65_537)


def test_finalize_names_the_files_and_closes_the_builder(tmp_path: Path) -> None:
    builder = IndexedDatasetBuilder(tmp_path / "data")
    builder.add_documents(np.arange(500_000), [0, 500_000])
    assert [name for name in names(tmp_path) if ".tmp-" not in name] == ["data.lock"]
    builder.finalize()
    assert names(tmp_path) == ["data.bin", "data.idx", "data.meta.json"]
    for call in (builder.finalize, builder.end_document, lambda: builder.add_document([1])):
        with pytest.raises(ValueError, match="finalized or aborted"):
            call()


def test_errors_aborts_and_deleted_builders_leave_no_files(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), IndexedDatasetBuilder(tmp_path / "a") as builder:
        builder.add_document([1])
        raise RuntimeError
    IndexedDatasetBuilder(tmp_path / "b").abort()
    forgotten = IndexedDatasetBuilder(tmp_path / "c")
    forgotten.add_document([1])
    del forgotten
    gc.collect()
    assert names(tmp_path) == []


def test_files_have_the_permissions_of_the_umask(tmp_path: Path) -> None:
    old = os.umask(0o027)
    try:
        write(tmp_path / "data", SMALL)
    finally:
        os.umask(old)
    for suffix in (".bin", ".idx", ".meta.json"):
        assert (tmp_path / f"data{suffix}").stat().st_mode & 0o777 == 0o640


def test_meta_file_has_metadata_and_counts(tmp_path: Path) -> None:
    write(tmp_path / "data", SMALL, vocab_size=50, metadata={"tokenizer": {"digest": "d"}})
    meta = json.loads((tmp_path / "data.meta.json").read_text())
    assert meta["tokenizer"] == {"digest": "d"}
    assert (meta["min_token_id"], meta["max_token_id"], meta["vocab_size"]) == (1, 10, 50)
    assert (meta["num_documents"], meta["num_sequences"], meta["num_tokens"]) == (5, 5, 10)
    with pytest.raises(ValueError, match="num_tokens"):
        IndexedDatasetBuilder(tmp_path / "other", metadata={"num_tokens": 3})
    with pytest.raises(TypeError):
        IndexedDatasetBuilder(tmp_path / "other", metadata={"tokenizer": object()})
    assert not list(tmp_path.glob("other*"))


# ---- megapack and megatron-core write the same bytes and read each other's files ---------------


gpt_dataset = peer("megatron.core.datasets.gpt_dataset")
megatron = peer("megatron.core.datasets.indexed_dataset")
blended = peer("megatron.core.datasets.blended_megatron_dataset_builder")

DTYPES = [np.uint16, np.int32, np.int64, np.uint8, np.int8, np.int16]


def written(builder_class: Any, prefix: Path, corpus: list, dtype: type, modes: Any) -> None:
    """Make the same calls of either builder, Megatron's or ours."""
    builder = builder_class(f"{prefix}.bin", dtype, multimodal=modes is not None)
    for d, document in enumerate(corpus):
        lengths = [len(sequence) for sequence in document]
        builder.add_document(flatten(document), lengths, *([] if modes is None else [modes[d]]))
    builder.finalize(f"{prefix}.idx")


@settings(max_examples=100)
@given(dtype=st.sampled_from(DTYPES), corpus=corpora, multimodal=st.booleans())
def test_bytes_and_reading_equal_megatron(
    tmp_path_factory: pytest.TempPathFactory, dtype: type, corpus: list, multimodal: bool
) -> None:
    tmp = tmp_path_factory.mktemp("interop")
    modes = [[i % 3 for i in range(len(document))] for document in corpus] if multimodal else None
    written(megatron.IndexedDatasetBuilder, tmp / "theirs", corpus, dtype, modes)
    written(IndexedDatasetBuilder, tmp / "ours", corpus, dtype, modes)
    assert files(tmp / "ours") == files(tmp / "theirs")
    if not any(map(flatten, corpus)):
        return  # megatron-core does not map an empty file
    ours = IndexedDataset(tmp / "theirs", multimodal)
    theirs = megatron.IndexedDataset(str(tmp / "ours"), multimodal)
    assert len(ours) == len(theirs) == sum(map(len, corpus))
    np.testing.assert_array_equal(ours.document_indices, theirs.document_indices)
    np.testing.assert_array_equal(ours.sequence_lengths, theirs.sequence_lengths)
    for i in range(len(ours)):
        np.testing.assert_equal(ours[i], theirs[i])
    np.testing.assert_equal(ours[0 : len(ours)], theirs[0 : len(theirs)])


def test_items_and_documents_may_be_mixed(tmp_path: Path) -> None:
    theirs = megatron.IndexedDatasetBuilder(f"{tmp_path}/theirs.bin", np.int32)
    ours = IndexedDatasetBuilder(f"{tmp_path}/ours.bin", np.int32)
    for name, builder in (("theirs", theirs), ("ours", ours)):
        builder.add_document(np.arange(5), [5])
        builder.add_item(torch.arange(3))
        builder.add_item(torch.arange(0))
        builder.end_document()
        builder.end_document()
        builder.add_document(torch.arange(4), [1, 3])
        builder.add_document(["7", "8"], [2])
        builder.finalize(f"{tmp_path}/{name}.idx")
    assert files(tmp_path / "ours") == files(tmp_path / "theirs")
    dataset = IndexedDataset(tmp_path / "ours")
    assert dataset.num_documents == 5
    np.testing.assert_array_equal(dataset.document_lengths, [5, 3, 0, 4, 2])


def gpt_samples(prefix: Path, cache: Path, dataset_class: type, monkeypatch: object) -> list:
    """Return all samples of megatron-core's GPTDataset over a low-level dataset class."""
    monkeypatch.setattr(gpt_dataset, "IndexedDataset", dataset_class)
    config = gpt_dataset.GPTDatasetConfig(
        random_seed=7,
        sequence_length=32,
        blend=([str(prefix)], None),
        split="90,10,0",
        path_to_cache=str(cache),
        tokenizer=SimpleNamespace(vocab_size=128, eod=0, pad=127, unique_identifiers={}),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    sizes, samples = [100, 10, 0], []
    builder = blended.BlendedMegatronDatasetBuilder(
        gpt_dataset.GPTDataset, sizes, lambda: True, config
    )
    for split in builder.build()[:2]:
        assert type(split.dataset) is dataset_class
        samples += [{k: v.numpy() for k, v in split[i].items()} for i in range(len(split))]
    return samples


def test_megatron_gpt_dataset_runs_on_indexed_dataset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(0)
    with IndexedDatasetBuilder(tmp_path / "data", np.uint16) as builder:
        for _ in range(300):
            builder.add_document(rng.integers(0, 127, rng.integers(1, 90)))
    ours, theirs = (
        gpt_samples(tmp_path / "data", tmp_path / reader.__module__, reader, monkeypatch)
        for reader in (IndexedDataset, megatron.IndexedDataset)
    )
    assert len(ours) >= 110
    np.testing.assert_equal(ours, theirs)


def test_names_of_other_hosts_exist(tmp_path: Path) -> None:
    write(tmp_path / "data", [[[1, 2], [3]], [[4]]])
    ours = IndexedDataset(str(tmp_path / "data"), multimodal=False, mmap=True)
    theirs = megatron.IndexedDataset(str(tmp_path / "data"), multimodal=False, mmap=True)
    assert ours.path_prefix == theirs.path_prefix
    assert ours.index.dtype == theirs.index.dtype
    assert ours.index.sequence_count == theirs.index.sequence_count
    assert ours.index.document_count == theirs.index.document_count
    np.testing.assert_array_equal(ours.get_document_indices(), theirs.get_document_indices())
    np.testing.assert_array_equal(
        ours.bin_reader.read(np.uint16, 2, 2), theirs.bin_reader.read(np.uint16, 2, 2)
    )
    np.testing.assert_array_equal(ours.sizes, theirs.sequence_lengths)
    np.testing.assert_array_equal(ours.doc_idx, ours.get_doc_idx())
    assert not ours.supports_prefetch
    ours.set_document_indices(np.array([0, 3]))
    assert list(ours.document_indices) == [0, 3]
    with pytest.raises(ValueError, match="s3_config are not supported"):
        IndexedDataset(str(tmp_path / "data"), object_storage_config=object())
