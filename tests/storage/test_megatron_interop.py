"""What megapack writes and what megatron-core writes is the same, and each reads the other's."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from peers import peer

from megapack.storage import IndexedDataset, IndexedDatasetBuilder
from megapack.storage.merge import merge
from storage.strategies import SMALL, corpora, files, flatten, write

torch = peer("torch")
gpt_dataset = peer("megatron.core.datasets.gpt_dataset")
megatron = peer("megatron.core.datasets.indexed_dataset")
BlendedMegatronDatasetBuilder = peer(
    "megatron.core.datasets.blended_megatron_dataset_builder"
).BlendedMegatronDatasetBuilder

DTYPES = [np.uint16, np.int32, np.int64, np.uint8, np.int8, np.int16]


def written(builder_class: Any, prefix: Path, corpus: list, dtype: type, modes: Any) -> None:
    """By the same calls to either builder, Megatron's own."""
    builder = builder_class(f"{prefix}.bin", dtype, multimodal=modes is not None)
    for d, document in enumerate(corpus):
        lengths = [len(sequence) for sequence in document]
        builder.add_document(flatten(document), lengths, *([] if modes is None else [modes[d]]))
    builder.finalize(f"{prefix}.idx")


def both_written(tmp: Path, corpus: list, dtype: type, multimodal: bool) -> None:
    modes = [[i % 3 for i in range(len(document))] for document in corpus] if multimodal else None
    written(megatron.IndexedDatasetBuilder, tmp / "theirs", corpus, dtype, modes)
    written(IndexedDatasetBuilder, tmp / "ours", corpus, dtype, modes)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.__name__)
@given(corpus=corpora, multimodal=st.booleans())
def test_the_same_calls_give_the_same_bytes(
    tmp_path_factory: pytest.TempPathFactory, dtype: type, corpus: list, multimodal: bool
) -> None:
    tmp = tmp_path_factory.mktemp("interop")
    both_written(tmp, corpus, dtype, multimodal)
    assert files(tmp / "ours") == files(tmp / "theirs")


@given(corpus=corpora.filter(lambda c: any(any(d) for d in c)), multimodal=st.booleans())
def test_each_reads_what_the_other_wrote(
    tmp_path_factory: pytest.TempPathFactory, corpus: list, multimodal: bool
) -> None:
    tmp = tmp_path_factory.mktemp("interop")
    both_written(tmp, corpus, np.uint16, multimodal)
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
    assert files(tmp_path / "ours") == files(tmp_path / "theirs")
    dataset = IndexedDataset(tmp_path / "ours")
    assert dataset.num_documents == 5
    np.testing.assert_array_equal(dataset.document_lengths, [5, 3, 0, 4, 2])


def gpt_samples(prefix: Path, cache: Path, dataset_class: type, monkeypatch: object) -> list:
    """All samples of megatron-core's GPTDataset over a low-level dataset class."""
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
    build = BlendedMegatronDatasetBuilder(
        gpt_dataset.GPTDataset, [100, 10, 0], lambda: True, config
    ).build
    samples = []
    for split in build()[:2]:
        assert type(split.dataset) is dataset_class
        samples += [{k: v.numpy() for k, v in split[i].items()} for i in range(len(split))]
    return samples


def test_gpt_dataset_runs_on_our_reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    with IndexedDatasetBuilder(tmp_path / "data", np.uint16) as builder:
        for _ in range(300):
            builder.add_document(rng.integers(0, 127, rng.integers(1, 90)))
    theirs = gpt_samples(
        tmp_path / "data", tmp_path / "cache1", megatron.IndexedDataset, monkeypatch
    )
    ours = gpt_samples(tmp_path / "data", tmp_path / "cache2", IndexedDataset, monkeypatch)
    assert len(ours) >= 110
    np.testing.assert_equal(ours, theirs)


def test_the_names_other_hosts_call_are_there(tmp_path: Path) -> None:
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
    with pytest.raises(ValueError, match="object storage"):
        IndexedDataset(str(tmp_path / "data"), object_storage_config=object())


@settings(max_examples=15)
@given(corpora_of_shards=st.lists(corpora, min_size=1, max_size=4), data=st.data())
def test_a_merge_of_megatrons_and_our_shards_equals_one_build(
    tmp_path_factory: pytest.TempPathFactory, corpora_of_shards: list, data: st.DataObject
) -> None:
    tmp = tmp_path_factory.mktemp("merge")
    prefixes = [tmp / f"shard{i}" for i in range(len(corpora_of_shards))]
    for prefix, corpus in zip(prefixes, corpora_of_shards, strict=True):
        if data.draw(st.booleans()):
            write(prefix, corpus)
        else:
            written(megatron.IndexedDatasetBuilder, prefix, corpus, np.uint16, None)
    write(tmp / "whole", [document for corpus in corpora_of_shards for document in corpus])
    merge(prefixes, tmp / "merged")
    assert files(tmp / "merged") == files(tmp / "whole")


def test_megatron_merges_our_shards_to_the_same_bytes(tmp_path: Path) -> None:
    for name, corpus in (("a", SMALL), ("b", SMALL[2:]), ("c", [])):
        write(tmp_path / name, corpus)
    builder = megatron.IndexedDatasetBuilder(f"{tmp_path}/theirs.bin", np.uint16)
    for name in "ab":  # megatron-core cannot map an empty .bin, so c stays out of its merge
        builder.add_index(f"{tmp_path}/{name}")
    builder.finalize(f"{tmp_path}/theirs.idx")
    merge([tmp_path / "a", tmp_path / "b", tmp_path / "c"], tmp_path / "ours")
    assert files(tmp_path / "ours") == files(tmp_path / "theirs")
