"""SampleIndex: what is saved comes back, belongs to its dataset, and says so when it does not."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest

from megapack.errors import FormatError, IndexMismatchError
from megapack.packing import SampleIndex, pack
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
    assert loaded.source == {"fingerprint": dataset.fingerprint, "prefix": str(dataset.prefix)}

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


def test_a_damaged_index_is_refused_before_memory_is_read_out_of_place() -> None:
    index = pack(LENGTHS, "concat", buckets=8)
    for name, value, message in (
        ("segment_document", 99, "names document 99 of 10"),
        ("segment_document", -1, "names document -1 of 10"),
        ("sample_segment_offsets", 1 << 40, "claims segments"),
    ):
        arrays = {n: getattr(index, n).copy() for n in index.__annotations__}
        arrays[name][1] = value
        damaged = SampleIndex(arrays, {"num_documents": len(LENGTHS)})
        with pytest.raises(FormatError, match=message):
            damaged.label_tokens(LENGTHS)
        if name == "sample_segment_offsets":
            with pytest.raises(FormatError, match=message):
                damaged.attention_cost()
