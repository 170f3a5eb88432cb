"""Prefetching: pages of disks, ranges of object stores."""

from __future__ import annotations

import ctypes
import mmap
import os
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from training.processes import wait_for

from megapack.data import BucketBatchSampler, PackedDataset, Schedule, build_loader
from megapack.data import loader as read_ahead
from megapack.data.loader import prefetch_remote
from megapack.packing import pack
from megapack.storage import IndexedDataset, IndexedDatasetBuilder
from tests.data.corpora import (
    of_rank,
    packed_index,
    packed_lengths,
    random_documents,
    write_documents,
)

PAGE = mmap.PAGESIZE


def resident(tokens: NDArray[Any]) -> NDArray[np.bool_]:
    """Return which pages of a mapped file are in memory, without reading them (mincore)."""
    pages = -(-tokens.nbytes // PAGE)
    flags = np.zeros(pages, np.uint8)
    libc = ctypes.CDLL(None, use_errno=True)
    address, out = (ctypes.c_void_p(array.ctypes.data) for array in (tokens, flags))
    assert libc.mincore(address, ctypes.c_size_t(tokens.nbytes), out) == 0, ctypes.get_errno()
    return flags % 2 == 1


@pytest.fixture
def cold(tmp_path: Path) -> PackedDataset:
    """Return documents of 12,000 bytes each, 24 MB in total, none of them in the page cache."""
    with IndexedDatasetBuilder(tmp_path / "docs", dtype=np.dtype("int32")) as builder:
        for document in range(2000):
            builder.add_document(np.full(3000, document % 100))
        builder.finalize()
    file = os.open(tmp_path / "docs.bin", os.O_RDONLY)
    os.fsync(file)
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(file)
    documents = IndexedDataset(tmp_path / "docs")
    if resident(documents.tokens).mean() > 0.01:
        pytest.skip("this file system keeps files in memory")
    return PackedDataset(documents, pack(documents.document_lengths, "bucket", buckets=[4096]))


def test_prefetch_reads_exactly_the_pages_of_a_micro_batch(cold: PackedDataset) -> None:
    index, tokens = cold.samples.indices[0], cold.datasets[0].open(0).tokens
    samples = [3, 700, 701, 1500]
    wanted = np.zeros(len(resident(tokens)), np.bool_)
    for sample in samples:
        for document, begin, length in index.sample(sample)[1]:
            first = int(cold.datasets[0].open(0).document_offsets[document]) + begin
            wanted[first * 4 // PAGE : -(-(first + length) * 4 // PAGE)] = True
    assert cold.prefetch(samples) == wanted.sum() * PAGE
    wait_for(lambda: bool(resident(tokens)[wanted].all()), "the pages")
    assert resident(tokens).sum() < 3 * wanted.sum() < len(wanted)
    assert cold.prefetch([]) == 0
    with pytest.raises(IndexError):
        cold.prefetch([cold.samples.num_samples])


def test_ranges_include_the_token_after_a_segment(tmp_path: Path) -> None:
    """In every source, the range includes the next token, the label of a segment's last token."""
    lengths = packed_lengths(400, 64)
    documents = [
        write_documents(tmp_path / f"docs{i}", random_documents(lengths)) for i in range(2)
    ]
    data = PackedDataset(documents, [packed_index(), packed_index()])
    first = data.samples.indices[0].num_samples
    samples = np.random.default_rng(0).choice(len(data), 60, replace=False)
    wanted: set[tuple[int, int]] = set()
    for sample in samples.tolist():
        source = int(sample >= first)
        for document, begin, length in data.samples.indices[source].sample(sample % first)[1]:
            start = int(documents[source].document_offsets[document])
            end = min(begin + length + 1, int(documents[source].document_lengths[document]))
            wanted |= {(source, position) for position in range(start + begin, start + end)}
    ranges = list(zip(*data._gatherer.token_ranges(samples), strict=True))
    actual = [(s, position) for s, begin, end in ranges for position in range(begin, end)]
    assert len(wanted) > 1000 and actual == sorted(wanted)
    touching = [(a, b) for a, b in pairwise(ranges) if a[0] == b[0] and a[2] >= b[1]]
    assert len(ranges) > 50 and not touching


def test_loader_prefetches_documents_of_later_batches(cold: PackedDataset) -> None:
    """After the first batches, the documents of the next 16 are in memory or requested."""
    schedule = Schedule(cold, tokens_per_step=4096, seed=1)
    batches = iter(build_loader(cold, schedule, **of_rank(micro=4096)))
    for _ in range(6):
        next(batches)
    # Each has 3 or 4 pages; 6 are consumed, and at most 4 more are gathered.
    tokens = cold.datasets[0].open(0).tokens
    wait_for(lambda: resident(tokens).sum() >= (6 + 16) * 3, "more than what was gathered")


def micro_batches(count: int) -> list[Any]:
    """Return micro batches with the one field that prefetching reads."""
    return [SimpleNamespace(sample_ids=np.array([number])) for number in range(count)]


@pytest.mark.parametrize("depth", [0, 1, 16])
def test_requests_stop_when_disks_are_not_read(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    reads = 0

    monkeypatch.setattr(read_ahead, "_num_reads", lambda: reads)
    given = []

    def prefetch(ids: NDArray[np.int64]) -> int:
        asked.extend(ids.tolist())
        return 4096

    dataset: Any = SimpleNamespace(disable_readahead=lambda: None, prefetch=prefetch)
    for item in read_ahead.prefetch_local(micro_batches(1000), dataset, depth):
        number = int(item.sample_ids[0])
        reach = min(depth, 2**number - 1)
        if number < 256:
            assert asked == list(range(number + reach + 1))
        given.append(number)
        reads += number == 600
    assert given == list(range(1000))
    quiet = 256 + depth  # requests stop after 256 micro batches without a disk read
    again = range(601, min(1000, 601 + depth + 256))
    assert asked == [*range(quiet), *again]


def test_requests_continue_while_they_read_the_disk(cold: PackedDataset) -> None:
    """The gather never waits here; disk reads of the requests keep the requests going."""
    schedule = Schedule(cold, tokens_per_step=4096)
    sampler = BucketBatchSampler(schedule, **of_rank(micro=4096))
    before = read_ahead._num_reads()
    assert sum(1 for _ in read_ahead.prefetch_local(sampler, cold, 4)) == 2000
    assert read_ahead._num_reads() - before > 0.9 * cold.datasets[0].open(0).tokens.nbytes / 512
    wait_for(
        lambda: resident(cold.datasets[0].open(0).tokens).mean() >= 0.99, "documents asked for"
    )


EACH = 1 << 20  # bytes of a micro batch
MOST = 64 * EACH
PORTION = MOST // 8


class Reads:
    """Fake of ``RemoteReads`` that counts requests; data arrive always or never in time."""

    ahead_bytes, num_open = MOST, 1

    def __init__(self, in_time: bool) -> None:
        self.in_time, self.asked, self.times_asked = in_time, 0, 0

    def prefetch(self, sample_ids: NDArray[np.int64], *, whole_chunks: bool) -> int:
        assert not whole_chunks
        assert sample_ids.tolist() == list(range(self.asked, self.asked + len(sample_ids)))
        self.asked += len(sample_ids)
        self.times_asked += 1
        return EACH * len(sample_ids)

    def are_local(self, _sample_ids: NDArray[np.int64]) -> bool:
        return self.in_time


def asked_ahead(in_time: bool, count: int) -> list[int]:
    """Return the bytes requested ahead of every micro batch when it is yielded."""
    reads: Any = Reads(in_time)
    items = micro_batches(count)
    bytes_ahead = []
    for number, item in enumerate(prefetch_remote(items, reads)):
        assert item is items[number]
        bytes_ahead.append(EACH * (reads.asked - number))
    assert len(bytes_ahead) == reads.asked == count
    # One request per portion: neighboring ranges of a file are merged.
    assert reads.times_asked <= EACH * count / PORTION + 2
    return bytes_ahead


@pytest.mark.parametrize(("in_time", "share"), [(True, 0.25), (False, 1.0)])
def test_lookahead_grows_with_consumption(in_time: bool, share: float) -> None:
    """Too large a lookahead delays the next request, too small a one leaves the connection idle.
    Requests are at most two portions away from the allowance."""
    bytes_ahead = asked_ahead(in_time, 1000)[:900]  # the end of a run has nothing left to request
    for number, ahead in enumerate(bytes_ahead):
        room = min(PORTION + share * EACH * number, 7 * PORTION)
        assert room - PORTION <= ahead <= room + 2 * PORTION
    assert bytes_ahead[0] <= 2 * PORTION and max(bytes_ahead) <= MOST + PORTION
