"""SampleIndex: what is saved comes back, belongs to its dataset, and says so when it does not."""

from __future__ import annotations

import dataclasses
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

from megapack import _core
from megapack.errors import FormatError, IndexMismatchError
from megapack.packing import STRATEGIES, SampleIndex, pack
from megapack.packing.sample_index import describe_source
from megapack.storage import IndexedDataset, IndexedDatasetBuilder

LENGTHS = np.array([5, 0, 12, 3, 40, 8, 8, 1, 16, 2], np.int32)


def _dataset(prefix: Path, lengths: np.ndarray) -> IndexedDataset:
    with IndexedDatasetBuilder(prefix, dtype=np.uint16) as builder:
        for length in lengths:
            builder.add_document(np.arange(length, dtype=np.uint16))
        builder.finalize()
    return IndexedDataset(prefix)


def test_a_saved_index_comes_back_whole(tmp_path: Path) -> None:
    index = pack(LENGTHS, "bucket", buckets=[8, 16], seed=3)
    index.save(tmp_path / "x.samples")
    loaded = SampleIndex.load(tmp_path / "x.samples")
    loaded.verify()
    assert loaded.fingerprint == index.fingerprint
    assert loaded.metrics() == index.metrics()
    assert (loaded.strategy, loaded.parameters, loaded.seed) == ("bucket", index.parameters, 3)
    for i in range(index.num_samples):
        assert loaded.sample(i) == index.sample(i)
    for array in loaded.segment_arrays():
        assert not array.flags.writeable and not array.flags.owndata


@pytest.mark.parametrize("saved", [True, False])
def test_an_index_travels_to_worker_processes(tmp_path: Path, saved: bool) -> None:
    index = pack(LENGTHS, "concat", buckets=8)
    if saved:
        index.save(tmp_path / "x.samples")
        index = SampleIndex.load(tmp_path / "x.samples")
    twin = pickle.loads(pickle.dumps(index))
    assert twin.fingerprint == index.fingerprint
    assert twin.metrics() == index.metrics()


def test_an_index_refuses_another_dataset(tmp_path: Path) -> None:
    dataset = _dataset(tmp_path / "a", LENGTHS)
    index = pack(dataset.document_lengths, buckets=[8, 16])
    index.check_source(dataset)  # by its lengths
    index.save(tmp_path / "x.samples", source=dataset)
    loaded = SampleIndex.load(tmp_path / "x.samples")
    loaded.check_source(dataset)  # by the fingerprint
    assert loaded.source == describe_source(dataset, dataset.prefix)
    assert loaded.source["idx_xxh64"] == xxhash.xxh64_hexdigest((tmp_path / "a.idx").read_bytes())

    fewer = _dataset(tmp_path / "b", LENGTHS[:-1])
    other = _dataset(tmp_path / "c", LENGTHS[::-1])
    for refusing in (index, loaded):
        with pytest.raises(IndexMismatchError, match="packed from 10 documents, the dataset has 9"):
            refusing.check_source(fewer)
    with pytest.raises(IndexMismatchError, match="of other lengths"):
        index.check_source(other)
    with pytest.raises(IndexMismatchError, match="fingerprint"):
        loaded.check_source(other)
    with pytest.raises(IndexMismatchError):
        index.save(tmp_path / "y.samples", source=other)


@pytest.mark.parametrize("name", STRATEGIES)
def test_an_index_does_not_change_when_its_lengths_do(name: str) -> None:
    for dtype in (np.int32, np.int64):
        lengths = LENGTHS.astype(dtype)
        expected = pack(lengths, name, buckets=8)
        expected_facts = (expected.metrics(), expected.fingerprint, expected.num_tokens)
        index = pack(lengths, name, buckets=8)
        lengths[:] = 1
        assert (index.metrics(), index.fingerprint, index.num_tokens) == expected_facts
        assert index.documents == expected.documents
        for values in ([1, 2, 3], np.arange(5, dtype=np.int32)):
            pack(values, name, buckets=8)  # and the lengths do not change by packing them
        assert (lengths == 1).all() and lengths.flags.writeable


def test_truncated_documents_are_counted_alike_with_and_without_dropped_tokens() -> None:
    kept = pack([3, 12, 0, 8, 20], "decompose", buckets=8, min_bucket=1)
    assert kept.metrics()["dropped_tokens"] == 0 and kept.documents.num_whole is None
    assert kept.metrics()["num_truncated_documents"] == 3  # 3 = 2 + 1, 12 = 8 + 4, 20 = 16 + 4
    lost = pack([3, 12, 0, 8, 20, 17], "decompose", buckets=8, min_bucket=4)
    assert lost.metrics()["dropped_tokens"] == 4
    assert lost.metrics()["num_truncated_documents"] == 4  # 3 and a token of 17 are in no sample


def test_ratios_are_of_documents_that_have_a_token() -> None:
    few, many = ([9, 4, 20], [0, 9, 0, 0, 4, 20, 0])
    metrics = [pack(lengths, "bucket", buckets=[8, 16]).metrics() for lengths in (few, many)]
    assert metrics[1]["num_empty_documents"] == 4
    for name in ("concatenation_ratio", "truncation_ratio", "truncation_floor"):
        assert metrics[0][name] == metrics[1][name] > 0


def test_label_tokens_and_attention_cost_are_counted_per_sample() -> None:
    index = pack(LENGTHS, "concat", buckets=8, seed=1)
    labels, cost = index.label_tokens(LENGTHS), index.attention_cost()
    assert labels.dtype == cost.dtype == np.int64
    for i in range(index.num_samples):
        _, segments = index.sample(i)
        assert labels[i] == sum(n - (begin + n == LENGTHS[d]) for d, begin, n in segments)
        assert cost[i] == sum(n * n for _, _, n in segments)
    with pytest.raises(IndexMismatchError):
        index.label_tokens(LENGTHS[:-1])


def test_verify_holds_every_sample_to_the_laws() -> None:
    index = pack(LENGTHS, "bucket_llm", buckets=[8, 16], seed=1)
    index.verify(LENGTHS)
    shorter = LENGTHS.copy()
    shorter[4] = 39
    with pytest.raises(FormatError, match=r"of document 4, which has 39 tokens"):
        index.verify(shorter)
    with pytest.raises(IndexMismatchError):
        index.verify(LENGTHS[:-1])
    empty = index.segment_length.copy()
    empty[1] = 0
    arrays = [index.bucket_capacity, *index.segment_arrays()]
    arrays = [empty if array is index.segment_length else array for array in arrays]
    with pytest.raises(FormatError, match=r"segment 1 is \[\d+, \+0\) of document"):
        _core.check_laws(*arrays, LENGTHS)


@pytest.mark.parametrize(
    ("strategy", "options"),
    [("decompose", {"buckets": [4, 8, 16]}), ("seamless", {"buckets": 8, "r_max": 0.75})],
)
def test_lossy_index_comes_back(tmp_path: Path, strategy: str, options: dict[str, Any]) -> None:
    index = pack(LENGTHS, strategy, **options)
    assert index.dropped_tokens or index.repeated_tokens
    index.save(tmp_path / "x.samples")
    assert SampleIndex.load(tmp_path / "x.samples").metrics() == index.metrics()


def test_a_damaged_index_is_refused_before_memory_is_read_out_of_place() -> None:
    index = pack(LENGTHS, "concat", buckets=8)
    for name, value, message in (
        ("segment_document", 99, "names document 99 of 10"),
        ("segment_document", -1, "names document -1 of 10"),
        ("sample_segment_offsets", 1 << 40, "claims segments"),
    ):
        changed = getattr(index, name).copy()
        changed[1] = value
        damaged = dataclasses.replace(index, **{name: changed})
        with pytest.raises(FormatError, match=message):
            damaged.label_tokens(LENGTHS)
        if name == "sample_segment_offsets":
            with pytest.raises(FormatError, match=message):
                damaged.attention_cost()


def test_a_repr_is_one_short_line_for_any_number_of_buckets() -> None:
    many = pack(LENGTHS, "bucket", buckets=range(1, 2000))
    assert repr(many) == (
        f"SampleIndex(bucket, 1,999 buckets of 1 to 1,999 tokens, {many.num_samples} samples, "
        "10 documents)"
    )
    assert "bucket of 8 tokens, " in repr(pack(LENGTHS, "concat", buckets=8))
