"""Damaged .samples files: what is wrong is refused before a batch is wrong.

The small arrays and the header are held to their checksums and to each other when a file is opened;
the large ones, and the .idx that was packed, block by block when something of a block is read.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from packing_inputs import PREAMBLE, header_of, with_header

from megapack import _core
from megapack.errors import FormatError
from megapack.packing import SampleIndex, pack

LENGTHS = [5, 9, 1, 30, 0, 7, 2, 11]
SMALL = ("bucket_capacity", "bucket_sample_offsets")
LARGE = ("sample_segment_offsets", "segment_document", "segment_begin", "segment_length")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    pack(LENGTHS, buckets=[8, 16, 32], seed=1).save(tmp_path / "x.samples")
    return tmp_path / "x.samples"


def with_value(data: bytes, name: str, position: int, value: int, *, hidden: bool = False) -> bytes:
    """One number of an array changed; ``hidden``: its checksum is made to agree."""
    header = header_of(data)
    entry = header["arrays"][name]
    dtype, begin = np.dtype(entry["dtype"]), entry["offset"]
    end = begin + entry["shape"][0] * dtype.itemsize
    array = np.frombuffer(data[begin:end], dtype).copy()
    assert array[position] != value
    array[position] = value
    entry["xxh64"] = xxhash.xxh64_hexdigest(array.tobytes())
    changed = data[:begin] + array.tobytes() + data[end:]
    return with_header(changed, header) if hidden else changed


@pytest.mark.parametrize("name", SMALL)
def test_a_changed_number_of_a_small_array_is_refused_at_load(path: Path, name: str) -> None:
    data = path.read_bytes()
    for position in range(header_of(data)["arrays"][name]["shape"][0]):
        for value in (-1, 1 << 40, 7):
            path.write_bytes(with_value(data, name, position, value))
            with pytest.raises(FormatError, match=f"array {name} is damaged"):
                SampleIndex.load(path)


@pytest.mark.parametrize(
    ("name", "position", "value", "message"),
    [
        ("bucket_capacity", 0, 0, "bucket_capacity is 0, 16, 32"),
        ("bucket_capacity", 0, -8, "bucket_capacity is -8, 16, 32"),
        ("bucket_capacity", 0, 16, "bucket_capacity is 16, 16, 32"),
        ("bucket_capacity", 1, 64, "bucket_capacity is 8, 64, 32"),
        ("bucket_capacity", 2, 1 << 40, "bucket_capacity is 8, 16, 1099511627776"),
        ("bucket_sample_offsets", 0, 1, "bucket_sample_offsets is 1, "),
        ("bucket_sample_offsets", 1, 99, "bucket_sample_offsets is 0, 99"),
        ("bucket_sample_offsets", 3, 2, "do not belong together"),
        ("sample_segment_offsets", 0, 1, "sample_segment_offsets begins with 1"),
        ("sample_segment_offsets", -1, 3, "do not belong together"),
    ],
)
def test_small_arrays_are_held_to_their_order_even_where_checksums_agree(
    path: Path, name: str, position: int, value: int, message: str
) -> None:
    path.write_bytes(with_value(path.read_bytes(), name, position, value, hidden=True))
    with pytest.raises(FormatError, match=message):
        SampleIndex.load(path)


READERS: dict[str, Callable[[SampleIndex], Any]] = {
    "verify": lambda index: index.verify(),
    "sample": lambda index: [index.sample(i) for i in range(len(index))],
    "numpy": lambda index: [np.asarray(array) for array in index.segment_arrays()],
    "sum": lambda index: [array.sum() for array in index.segment_arrays()],
    "arithmetic": lambda index: [1 + array for array in index.segment_arrays()],
    "comparison": lambda index: [array == 1 for array in index.segment_arrays()],
    "labels": lambda index: index.label_tokens(LENGTHS),
    "measure": lambda index: _core.measure_samples(*index.segment_arrays(), len(LENGTHS)),
    "whole": lambda index: _core.whole_documents(*index.segment_arrays(), np.array(LENGTHS)),
}
# Of these arrays the others do not read all.
READ = {"whole": ("segment_document", "segment_length")}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("name", LARGE)
def test_changed_number_is_refused_when_it_is_read(path: Path, name: str, reader: str) -> None:
    data = path.read_bytes()
    for position in range(1, header_of(data)["arrays"][name]["shape"][0] - 1):
        path.write_bytes(with_value(data, name, position, 100))
        with pytest.raises(FormatError, match=f"array {name} is damaged: bytes 0 to "):
            SampleIndex.load(path, verify=True)
        if name in READ.get(reader, LARGE):
            with pytest.raises(FormatError, match=f"array {name} is damaged"):
                READERS[reader](SampleIndex.load(path))


def test_damage_is_found_by_whoever_reads_its_block_and_by_nobody_else(tmp_path: Path) -> None:
    lengths = np.full(100_000, 3)  # 2 segments per sample; 16,384 numbers per block
    pack(lengths, "next_fit", buckets=6, shuffle=False).save(tmp_path / "x.samples")
    data = (tmp_path / "x.samples").read_bytes()
    (tmp_path / "x.samples").write_bytes(with_value(data, "segment_length", 40_000, 4))
    index = SampleIndex.load(tmp_path / "x.samples")
    offsets, column = index.sample_segment_offsets, index.segment_length
    good, bad = np.arange(16_000), np.arange(16_000, 24_000)
    expected = np.full(16_000, 18)
    assert (_core.attention_cost_of(offsets, column, good, 6, False) == expected).all()
    assert (column[:32_768] == 3).all() and column[np.array([5, -1, -30_000])].tolist() == [3] * 3
    assert index.sample(0) == (0, [(0, 0, 3), (1, 0, 3)]) and column[99_999] == 3
    message = "array segment_length is damaged: bytes 131072 to 196608 do not have their checksum"
    for _ in range(2):  # however often
        for read in (
            lambda: _core.attention_cost_of(offsets, column, bad, 6, False),
            lambda: column[32_768],
            lambda: column[::-9_999],
            lambda: column[np.array([1, -60_000])],
            lambda: column[np.ones(100_000, np.bool_)],
            lambda: np.max(column),
            lambda: list(column),
            index.attention_cost,
        ):
            with pytest.raises(FormatError, match=message):
                read()


def test_an_index_of_a_file_is_read_by_threads_at_once(tmp_path: Path) -> None:
    lengths = np.arange(200_000) % 7 + 1
    made = pack(lengths, "next_fit", buckets=64)
    made.save(tmp_path / "x.samples")
    index = SampleIndex.load(tmp_path / "x.samples")
    with ThreadPoolExecutor(8) as pool:
        costs = list(pool.map(lambda _: index.attention_cost(), range(16)))
    assert all((cost == made.attention_cost()).all() for cost in costs)


def test_a_sound_file_loads_with_its_checksums(path: Path) -> None:
    assert SampleIndex.load(path, verify=True).num_samples == SampleIndex.load(path).num_samples


# Changes of a header whose checksum is right: what no reader may stumble over later.
Change = Callable[[dict[str, Any]], Any]
HEADERS: dict[str, Change] = {
    "no mapping": lambda h: [1, 2],
    "no strategy": lambda h: h.pop("strategy"),
    "strategy is a number": lambda h: h.update(strategy=3),
    "parameters are a list": lambda h: h.update(parameters=[]),
    "a parameter is a list": lambda h: h["parameters"].update(pool_size=[1]),
    "alignment is a word": lambda h: h["parameters"].update(alignment="x"),
    "alignment is 0": lambda h: h["parameters"].update(alignment=0),
    "buckets hold a word": lambda h: h.update(buckets=["8"]),
    "buckets are none": lambda h: h.update(buckets=[]),
    "seed is a fraction": lambda h: h.update(seed=1.5),
    "seed is true": lambda h: h.update(seed=True),
    "decisions are numbers": lambda h: h.update(decisions={"a": 1}),
    "documents below 0": lambda h: h.update(num_documents=-1),
    "other documents": lambda h: h.update(num_documents=9),
    "source is a word": lambda h: h.update(source="x"),
    "fingerprint of the source is a number": lambda h: h.update(source={"fingerprint": 3}),
    "no metrics": lambda h: h.pop("metrics"),
    "a metric is missing": lambda h: h["metrics"].pop("num_tokens"),
    "a metric is a word": lambda h: h["metrics"].update(num_tokens="x"),
    "a metric is below 0": lambda h: h["metrics"].update(num_tokens=-1),
    "a ratio is no number": lambda h: h["metrics"].update(padding_ratio=float("nan")),
    "a list is too short": lambda h: h["metrics"].update(tokens_per_bucket=[1]),
    "samples per bucket differ": lambda h: h["metrics"].update(samples_per_bucket=[1, 1, 1]),
    "other samples": lambda h: h["metrics"].update(num_samples=7),
    "other segments": lambda h: h["metrics"].update(num_segments=1),
    "tokens that are nowhere": lambda h: h["metrics"].update(num_tokens=1),
    "fingerprint is a number": lambda h: h.update(lengths_fingerprint=3),
    "file size is a word": lambda h: h.update(file_size="x"),
    "arrays are a list": lambda h: h.update(arrays=[]),
    "shape is a number": lambda h: h["arrays"]["segment_length"].update(shape=3),
    "shape has two": lambda h: h["arrays"]["segment_length"].update(shape=[1, 1]),
    "shape is a fraction": lambda h: h["arrays"]["segment_length"].update(shape=[1.5]),
    "offset is a word": lambda h: h["arrays"]["segment_length"].update(offset="x"),
    "two arrays in one place": lambda h: h["arrays"]["segment_begin"].update(
        offset=h["arrays"]["segment_document"]["offset"]
    ),
    "checksum is a number": lambda h: h["arrays"]["segment_length"].update(xxh64=3),
}


@pytest.mark.parametrize("name", HEADERS)
def test_a_header_that_lies_is_refused_at_load(path: Path, name: str) -> None:
    data = path.read_bytes()
    header = header_of(data)
    replaced = HEADERS[name](header)
    path.write_bytes(with_header(data, replaced if name == "no mapping" else header))
    with pytest.raises(FormatError, match=r"x\.samples"):
        SampleIndex.load(path)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (None, "no array segment_length of dtype <i4"),
        ("x", "no array segment_length of dtype <i4"),
        ({"dtype": 4, "shape": [1], "offset": 64, "xxh64": ""}, "no array segment_length"),
        ({"dtype": "<i4", "shape": [-1], "offset": 64, "xxh64": ""}, "outside of the file"),
        ({"dtype": "<f8", "shape": [1], "offset": 64, "xxh64": ""}, "no array segment_length"),
        ({"dtype": "<i4", "shape": [1 << 40], "offset": 64, "xxh64": ""}, "outside of the file"),
        ({"dtype": "<i4", "shape": [1], "offset": -64, "xxh64": ""}, "outside of the file"),
        ({"dtype": "<i4", "shape": [1], "offset": 65, "xxh64": ""}, "outside of the file"),
        ({"dtype": "<i4", "shape": [1], "offset": 64, "xxh64": ""}, "or of its place in it"),
    ],
)
def test_a_table_that_lies_is_refused(path: Path, entry: Any, message: str) -> None:
    header = header_of(path.read_bytes())
    header["arrays"]["segment_length"] = entry
    path.write_bytes(with_header(path.read_bytes(), header))
    with pytest.raises(FormatError, match=message):
        SampleIndex.load(path)


@pytest.mark.parametrize("content", [b"{", b"\xff\xfe", b"", b"[" * 100_000])
def test_a_header_that_is_no_json_is_refused(path: Path, content: bytes) -> None:
    digest = xxhash.xxh3_64_intdigest(content)
    path.write_bytes(PREAMBLE.pack(b"MEGASAMP", 2, 0, len(content), digest) + content)
    with pytest.raises(FormatError, match=r"x\.samples"):
        SampleIndex.load(path)


def test_an_index_of_no_document_loads(tmp_path: Path) -> None:
    for lengths in ([], [0, 0]):
        index = pack(lengths, "concat", buckets=8)
        index.save(tmp_path / f"{len(lengths)}.samples")
        assert SampleIndex.load(tmp_path / f"{len(lengths)}.samples", verify=True).num_samples == 0
