"""SampleIndex: saving, loading, checks against its dataset, and damaged files."""

from __future__ import annotations

import dataclasses
import pickle
import runpy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from packing_inputs import PREAMBLE, header_of, same_arrays, with_header, write_dataset

from megapack import _core
from megapack.errors import ConfigError, FormatError, IndexMismatchError
from megapack.packing import STRATEGIES, SampleIndex, pack
from megapack.packing.sample_index import describe_source

LENGTHS = np.array([5, 0, 12, 3, 40, 8, 8, 1, 16, 2], np.int32)


@pytest.mark.parametrize(
    ("lengths", "strategy", "options"),
    [
        (LENGTHS, "bucket", {"buckets": [8, 16]}),
        (LENGTHS, "decompose", {"buckets": [4, 8, 16]}),  # drops tokens
        (LENGTHS, "seamless", {"buckets": 8, "r_max": 0.75}),  # repeats tokens
        ([0, 0], "concat", {"buckets": 8}),
        ([], "concat", {"buckets": 8}),
    ],
)
def test_saved_index_equals_original(
    tmp_path: Path, lengths: Any, strategy: str, options: dict[str, Any]
) -> None:
    index = pack(lengths, strategy, **options, seed=3)
    assert (index.dropped_tokens > 0) == (strategy == "decompose")
    assert (index.repeated_tokens > 0) == (strategy == "seamless")
    index.save(tmp_path / "x.samples")
    loaded = SampleIndex.load(tmp_path / "x.samples", verify=True)
    assert loaded.fingerprint == index.fingerprint
    assert loaded.metrics() == index.metrics()
    assert (loaded.strategy, loaded.parameters, loaded.seed) == (strategy, index.parameters, 3)
    for i in range(index.num_samples):
        assert loaded.sample(i) == index.sample(i)
    for array in loaded.segment_arrays():
        assert not array.flags.writeable and not array.flags.owndata


def test_index_can_be_pickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An index of a file is mapped again, from any directory; a replaced file is refused."""
    made = pack(LENGTHS, "concat", buckets=8)
    made.save(tmp_path / "x.samples")
    monkeypatch.chdir(tmp_path)
    index = SampleIndex.load("x.samples")
    carried = [pickle.dumps(one) for one in (made, index)]
    monkeypatch.chdir("/")
    for twin in map(pickle.loads, carried):
        assert twin.fingerprint == index.fingerprint and twin.metrics() == index.metrics()
    pack(LENGTHS, "concat", buckets=8, seed=1).save(tmp_path / "x.samples", overwrite=True)
    with pytest.raises(IndexMismatchError, match=r"x\.samples holds other samples than when it"):
        pickle.loads(carried[1])


def test_sample_out_of_range_is_refused() -> None:
    index = pack(LENGTHS, "concat", buckets=8)
    assert index.sample(-1) == index.sample(len(index) - 1)
    assert index.groups_of(-1) == list(range(len(index.sample(-1)[1])))
    for number in (len(index), -len(index) - 1):
        for read in (index.sample, index.groups_of):
            with pytest.raises(IndexError, match=f"sample {number} of an index with {len(index)}"):
                read(number)


def test_index_refuses_another_dataset(tmp_path: Path) -> None:
    dataset = write_dataset(tmp_path / "a", LENGTHS)
    index = pack(dataset.document_lengths, buckets=[8, 16])
    index.check_source(dataset)  # by its lengths
    index.save(tmp_path / "x.samples", source=dataset)
    loaded = SampleIndex.load(tmp_path / "x.samples")
    loaded.check_source(dataset)  # by the fingerprint
    assert loaded.source == describe_source(dataset, dataset.prefix)
    assert loaded.source["idx_xxh64"] == xxhash.xxh64_hexdigest((tmp_path / "a.idx").read_bytes())

    fewer = write_dataset(tmp_path / "b", LENGTHS[:-1])
    other = write_dataset(tmp_path / "c", LENGTHS[::-1])
    for refusing in (index, loaded):
        with pytest.raises(IndexMismatchError, match="packed from 10 documents, the dataset has 9"):
            refusing.check_source(fewer)
    with pytest.raises(IndexMismatchError, match="their lengths differ"):
        index.check_source(other)
    with pytest.raises(IndexMismatchError, match="fingerprint"):
        loaded.check_source(other)
    with pytest.raises(IndexMismatchError):
        index.save(tmp_path / "y.samples", source=other)


@pytest.mark.parametrize("name", STRATEGIES)
def test_index_does_not_change_with_the_callers_lengths(name: str) -> None:
    for dtype in (np.int32, np.int64):
        lengths = LENGTHS.astype(dtype)
        expected = pack(lengths, name, buckets=8)
        expected_facts = (expected.metrics(), expected.fingerprint, expected.num_tokens)
        index = pack(lengths, name, buckets=8)
        lengths[:] = 1
        assert (index.metrics(), index.fingerprint, index.num_tokens) == expected_facts
        assert index.documents == expected.documents
        for values in ([1, 2, 3], np.arange(5, dtype=np.int32)):
            pack(values, name, buckets=8)  # pack does not change the caller's lengths
        assert (lengths == 1).all() and lengths.flags.writeable


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


def test_verify_checks_the_laws_of_every_sample() -> None:
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


def test_damaged_index_is_refused_before_out_of_bounds_reads() -> None:
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


def test_repr_is_one_short_line() -> None:
    many = pack(LENGTHS, "bucket", buckets=range(1, 2000))
    holds = f"{many.num_samples} samples, 10 documents"
    assert repr(many) == f"SampleIndex(bucket, 1,999 buckets of 1 to 1,999 tokens, {holds})"
    assert "bucket of 8 tokens, " in repr(pack(LENGTHS, "concat", buckets=8))


# ---- The .samples file: errors for old and broken files


GOLDEN = Path(__file__).parents[1] / "golden" / "samples"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    pack([5, 9, 1, 30, 0, 7], buckets=[8, 16], seed=1).save(tmp_path / "x.samples")
    return tmp_path / "x.samples"


@pytest.mark.parametrize(
    ("version", "made"),
    [(2, "golden_index"), (3, "golden_groups"), (4, "golden_trees"), (5, "golden_second")],
)
def test_golden_file_is_read_and_written_identically(
    version: int, made: str, tmp_path: Path
) -> None:
    script = runpy.run_path(str(GOLDEN / "make_golden.py"))
    path, again = GOLDEN / f"version_{version}.samples", script[made]()
    index = SampleIndex.load(path, verify=True)
    assert same_arrays(index, again) and index.fingerprint == again.fingerprint
    for name in ("strategy", "parameters", "buckets", "seed", "groups", "second"):
        assert getattr(index, name) == getattr(again, name), name
    assert index.metrics() == again.metrics() and index.source == script["SOURCE"]
    if version == 3:
        assert index.segment_joined.tolist() == again.segment_joined.tolist()
        assert index.segment_joined.any() and index.metrics()["num_groups"] == 4
    if version == 5:
        assert index.segment_second.tolist() == again.segment_second.tolist()
        assert index.segment_second.any() and index.parameters["second_capacity"] == [4, 6]

    again.save(tmp_path / "x.samples", source=script["SOURCE"])
    old, new = (p.read_bytes() for p in (path, tmp_path / "x.samples"))
    for header in (old_header := header_of(old), new_header := header_of(new)):
        assert header.pop("created_by").startswith("megapack ")
    if len(old) == len(new):  # the version string has the same length
        assert old_header == new_header
    begin = old_header["arrays"]["bucket_capacity"]["offset"]
    assert old[begin:] == new[new_header["arrays"]["bucket_capacity"]["offset"] :]


def test_file_of_another_version_is_refused_with_remedy(path: Path) -> None:
    old = GOLDEN / "version_1.samples"
    remedy = rf"pack again: megapack-build pack PREFIX --output {old} --over"
    with pytest.raises(FormatError, match=f"format version 1; .* reads versions 2 to 5: {remedy}"):
        SampleIndex.load(old)
    data = bytearray(path.read_bytes())
    for version, message in (
        (3, "groups do not match its version, 3"),
        (4, "no array segment_parent"),
        (5, "second sizes do not match its version, 5"),
        (6, "version 6; .* reads versions 2 to 5: install a newer"),
    ):
        data[8] = version
        path.write_bytes(data)
        with pytest.raises(FormatError, match=message):
            SampleIndex.load(path)


def test_checksums_are_xxh64_of_blocks_of_64_kib(tmp_path: Path) -> None:
    pack(np.full(40_000, 3), "next_fit", buckets=8).save(tmp_path / "x.samples")
    data = (tmp_path / "x.samples").read_bytes()
    for name, entry in header_of(data)["arrays"].items():
        begin = entry["offset"]
        array = data[begin : begin + entry["shape"][0] * int(entry["dtype"][2])]
        blocks = [array[i : i + (1 << 16)] for i in range(0, len(array), 1 << 16)]
        assert entry["xxh64"] == "".join(map(xxhash.xxh64_hexdigest, blocks)), name
    assert len(blocks) == 3, "arrays of several blocks are compared"


def test_arrays_are_aligned_and_mapped(path: Path) -> None:
    for entry in header_of(path.read_bytes())["arrays"].values():
        assert entry["offset"] % 64 == 0
    index = SampleIndex.load(path)
    address = index.segment_document.unchecked.ctypes.data
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(word, 16) for word in line.split()[0].split("-"))
        if begin <= address < end:
            assert line.split()[5:] == [str(path.resolve())]
            return
    pytest.fail("its memory is mapped from nowhere")


def test_truncated_file_is_refused(path: Path) -> None:
    data = path.read_bytes()
    for size in [*range(0, 40), *range(40, len(data), 97), len(data) - 1]:
        path.write_bytes(data[:size])
        with pytest.raises(FormatError, match=r"truncated|not a .samples file"):
            SampleIndex.load(path)
    path.write_bytes(data + b"x")
    with pytest.raises(FormatError, match=f"{len(data) + 1} bytes instead of {len(data)}"):
        SampleIndex.load(path)


def test_every_changed_byte_is_detected(path: Path) -> None:
    data = path.read_bytes()
    arrays = header_of(data)["arrays"]
    header_size = PREAMBLE.size + PREAMBLE.unpack_from(data)[3]
    header = range(PREAMBLE.size, header_size, 11)
    large = arrays["sample_segment_offsets"]["offset"]
    for i in (*range(PREAMBLE.size), *header, *range(header_size, len(data))):
        broken = bytearray(data)
        broken[i] ^= 0x40
        path.write_bytes(broken)
        with pytest.raises(FormatError):
            SampleIndex.load(path, verify=i >= large)  # the small arrays are compared at once


@pytest.mark.parametrize(
    ("name", "content"),
    [("empty", b""), ("text", b"{}" * 100), ("idx", b"MMIDIDX\x00\x00" + bytes(100))],
)
def test_foreign_files_are_refused(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(FormatError, match=r"not a \.samples file"):
        SampleIndex.load(tmp_path / name)
    with pytest.raises(FileNotFoundError):
        SampleIndex.load(tmp_path / "nothing")


def test_no_temporary_file_remains_after_a_failed_write(tmp_path: Path) -> None:
    (tmp_path / "dir.samples").mkdir()
    for name, message in (("none/x", "none does not exist; create it"), ("dir", "is a directory")):
        with pytest.raises(ConfigError, match=message):
            pack([1, 2, 3], buckets=8).save(tmp_path / f"{name}.samples")
    assert [p.name for p in tmp_path.iterdir()] == ["dir.samples"]


# ---- Damaged .samples files are refused before they affect a batch
#
# Opening a file checks header and small arrays. Blocks of large arrays, and of the packed .idx, are
# compared with their checksums when they are read.


MIXED = [5, 9, 1, 30, 0, 7, 2, 11]
LARGE = ("sample_segment_offsets", "segment_document", "segment_begin", "segment_length")


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    pack(MIXED, buckets=[8, 16, 32], seed=1).save(tmp_path / "x.samples")
    return tmp_path / "x.samples"


def with_value(data: bytes, name: str, position: int, value: int, *, hidden: bool = False) -> bytes:
    """Return the file with one number changed; ``hidden``: with a matching checksum."""
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
        ("bucket_sample_offsets", 3, 2, "the sizes of its arrays do not match"),
        ("sample_segment_offsets", 0, 1, "sample_segment_offsets starts with 1"),
        ("sample_segment_offsets", -1, 3, "the sizes of its arrays do not match"),
    ],
)
def test_order_of_small_arrays_is_checked_despite_checksums(
    stored: Path, name: str, position: int, value: int, message: str
) -> None:
    stored.write_bytes(with_value(stored.read_bytes(), name, position, value, hidden=True))
    with pytest.raises(FormatError, match=message):
        SampleIndex.load(stored)


READERS: dict[str, Callable[[SampleIndex], Any]] = {
    "verify": lambda index: index.verify(),
    "sample": lambda index: [index.sample(i) for i in range(len(index))],
    "numpy": lambda index: [np.asarray(array) for array in index.segment_arrays()],
    "sum": lambda index: [array.sum() for array in index.segment_arrays()],
    "arithmetic": lambda index: [1 + array for array in index.segment_arrays()],
    "comparison": lambda index: [array == 1 for array in index.segment_arrays()],
    "labels": lambda index: index.label_tokens(MIXED),
    "measure": lambda index: _core.measure_samples(*index.segment_arrays(), len(MIXED)),
    "whole": lambda index: _core.whole_documents(*index.segment_arrays(), np.array(MIXED)),
}
# The others do not read all of these arrays.
READ = {"whole": ("segment_document", "segment_length")}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("name", LARGE)
def test_changed_number_is_refused_when_read(stored: Path, name: str, reader: str) -> None:
    data = stored.read_bytes()
    for position in range(1, header_of(data)["arrays"][name]["shape"][0] - 1):
        stored.write_bytes(with_value(data, name, position, 100))
        with pytest.raises(FormatError, match=f"array {name} is damaged: bytes 0 to "):
            SampleIndex.load(stored, verify=True)
        if name in READ.get(reader, LARGE):
            with pytest.raises(FormatError, match=f"array {name} is damaged"):
                READERS[reader](SampleIndex.load(stored))


def test_damage_is_detected_only_when_its_block_is_read(tmp_path: Path) -> None:
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
    for _ in range(2):  # any number of times
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


def test_index_is_read_by_threads_at_once(tmp_path: Path) -> None:
    lengths = np.arange(200_000) % 7 + 1
    made = pack(lengths, "next_fit", buckets=64)
    made.save(tmp_path / "x.samples")
    index = SampleIndex.load(tmp_path / "x.samples")
    with ThreadPoolExecutor(8) as pool:
        costs = list(pool.map(lambda _: index.attention_cost(), range(16)))
    assert all((cost == made.attention_cost()).all() for cost in costs)


# Changes of a header with a matching checksum, which later code does not check again.
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
}


@pytest.mark.parametrize("name", HEADERS)
def test_wrong_header_is_refused_at_load(stored: Path, name: str) -> None:
    data = stored.read_bytes()
    header = header_of(data)
    replaced = HEADERS[name](header)
    stored.write_bytes(with_header(data, replaced if name == "no mapping" else header))
    with pytest.raises(FormatError, match=r"x\.samples"):
        SampleIndex.load(stored)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        *((change, "no array segment_length of dtype <i4") for change in (
            None, "x", {"dtype": 4}, {"dtype": "<f8"}, {"shape": 3}, {"shape": [1, 1]},
            {"shape": [1.5]}, {"offset": "x"}, {"xxh64": 3},
        )),
        *((change, "outside the file, unaligned") for change in (
            {"shape": [-1]}, {"shape": [1 << 40]}, {"offset": -64}, {"offset": 65}, {},
        )),
    ],
)  # fmt: skip
def test_wrong_array_table_is_refused(stored: Path, changes: Any, message: str) -> None:
    header = header_of(stored.read_bytes())
    entry = {"dtype": "<i4", "shape": [1], "offset": 64, "xxh64": ""}  # overlaps the previous array
    is_entry = isinstance(changes, dict)
    header["arrays"]["segment_length"] = entry | changes if is_entry else changes
    stored.write_bytes(with_header(stored.read_bytes(), header))
    with pytest.raises(FormatError, match=message):
        SampleIndex.load(stored)


@pytest.mark.parametrize("content", [b"{", b"\xff\xfe", b"", b"[" * 100_000])
def test_header_that_is_not_json_is_refused(stored: Path, content: bytes) -> None:
    digest = xxhash.xxh3_64_intdigest(content)
    stored.write_bytes(PREAMBLE.pack(b"MEGASAMP", 2, 0, len(content), digest) + content)
    with pytest.raises(FormatError, match=r"x\.samples"):
        SampleIndex.load(stored)
