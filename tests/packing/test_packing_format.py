"""The .samples file: old ones and broken ones are refused in words."""

from __future__ import annotations

import runpy
from pathlib import Path

import numpy as np
import pytest
import xxhash
from packing_inputs import PREAMBLE, header_of, same_arrays

from megapack.errors import ConfigError, FormatError
from megapack.packing import SampleIndex, pack

GOLDEN = Path(__file__).parents[1] / "golden" / "samples"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    pack([5, 9, 1, 30, 0, 7], buckets=[8, 16], seed=1).save(tmp_path / "x.samples")
    return tmp_path / "x.samples"


def test_the_golden_file_of_version_2_reads_as_it_was_written() -> None:
    made = runpy.run_path(str(GOLDEN / "make_golden.py"))
    index = SampleIndex.load(GOLDEN / "version_2.samples", verify=True)
    assert index.strategy == "bucket_llm" and index.seed == 11
    assert index.parameters["pool_size"] == 6 and index.buckets == [8, 16]
    assert index.source == made["SOURCE"]
    assert same_arrays(index, made["golden_index"]())
    assert index.metrics() == made["golden_index"]().metrics()
    assert index.fingerprint == made["golden_index"]().fingerprint


def test_a_file_of_version_1_is_refused_with_the_command_that_packs_it_again() -> None:
    path = GOLDEN / "version_1.samples"
    with pytest.raises(FormatError, match=r"format version 1; .* reads version 2: pack again: "):
        SampleIndex.load(path)
    with pytest.raises(FormatError, match=rf"megapack-build pack PREFIX --output {path} --over"):
        SampleIndex.load(path)


def test_the_same_packing_is_written_with_the_same_bytes(tmp_path: Path) -> None:
    made = runpy.run_path(str(GOLDEN / "make_golden.py"))
    made["golden_index"]().save(tmp_path / "x.samples", source=made["SOURCE"])
    old, new = (p.read_bytes() for p in (GOLDEN / "version_2.samples", tmp_path / "x.samples"))
    for header in (old_header := header_of(old), new_header := header_of(new)):
        assert header.pop("created_by").startswith("megapack ")
    if len(old) == len(new):  # the version string has the same length
        assert old_header == new_header
    begin = old_header["arrays"]["bucket_capacity"]["offset"]
    assert old[begin:] == new[new_header["arrays"]["bucket_capacity"]["offset"] :]


def test_checksums_are_xxh64_of_64_kib_of_an_array_each(tmp_path: Path) -> None:
    pack(np.full(40_000, 3), "next_fit", buckets=8).save(tmp_path / "x.samples")
    data = (tmp_path / "x.samples").read_bytes()
    for name, entry in header_of(data)["arrays"].items():
        begin = entry["offset"]
        array = data[begin : begin + entry["shape"][0] * int(entry["dtype"][2])]
        blocks = [array[i : i + (1 << 16)] for i in range(0, len(array), 1 << 16)]
        assert entry["xxh64"] == "".join(map(xxhash.xxh64_hexdigest, blocks)), name
    assert len(blocks) == 3, "arrays of several blocks are compared"


def test_arrays_are_aligned_and_mapped_not_read(path: Path) -> None:
    for entry in header_of(path.read_bytes())["arrays"].values():
        assert entry["offset"] % 64 == 0
    index = SampleIndex.load(path)
    address = index.segment_document.unchecked.ctypes.data
    mappings = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    (mapped,) = [
        fields[5:]
        for fields in mappings
        if int(fields[0].split("-")[0], 16) <= address < int(fields[0].split("-")[1], 16)
    ]
    assert mapped == [str(path.resolve())]


def test_every_cut_of_a_file_is_refused(path: Path) -> None:
    data = path.read_bytes()
    for size in [*range(0, 40), *range(40, len(data), 97), len(data) - 1]:
        path.write_bytes(data[:size])
        with pytest.raises(FormatError, match=r"truncated|not a .samples file"):
            SampleIndex.load(path)
    path.write_bytes(data + b"x")
    with pytest.raises(FormatError, match=f"{len(data) + 1} bytes instead of {len(data)}"):
        SampleIndex.load(path)


def test_every_changed_byte_is_noticed(path: Path) -> None:
    data = path.read_bytes()
    entries = header_of(data)["arrays"].values()
    used = [(e["offset"], e["offset"] + e["shape"][0] * int(e["dtype"][2])) for e in entries]
    first = min(begin for begin, _ in used)
    header_size = PREAMBLE.size + PREAMBLE.unpack_from(data)[3]
    for i in [
        *range(PREAMBLE.size),
        *range(PREAMBLE.size, header_size, 11),
        *range(first, len(data)),
    ]:
        if i >= first and not any(begin <= i < end for begin, end in used):
            continue  # the zeros between arrays
        if 12 <= i < 16:
            continue  # reserved
        broken = bytearray(data)
        broken[i] ^= 0x40
        path.write_bytes(broken)
        with pytest.raises(FormatError):
            SampleIndex.load(path).verify()


def test_a_newer_version_asks_for_a_newer_megapack(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[8] = 3
    path.write_bytes(data)
    with pytest.raises(FormatError, match=r"format version 3; .* reads version 2: install a newer"):
        SampleIndex.load(path)


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


def test_nothing_is_left_behind_when_the_disk_refuses(tmp_path: Path) -> None:
    index = pack([1, 2, 3], buckets=8)
    with pytest.raises(ConfigError, match="there is no directory"):
        index.save(tmp_path / "no such directory" / "x.samples")
    (tmp_path / "dir.samples").mkdir()
    with pytest.raises(ConfigError, match="is a directory"):
        index.save(tmp_path / "dir.samples")
    assert [p.name for p in tmp_path.iterdir()] == ["dir.samples"]
