"""The C++ reader of JSON Lines accepts what Python's parser accepts, and gives equal text."""

from __future__ import annotations

import bz2
import gzip
import io
import itertools
import json
import os
import re
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import zstandard
from fuzz.fuzz_jsonl import MISSING, OK, SEEDS, WRONG_TYPE, extract, python_says
from hypothesis import given
from hypothesis import strategies as st

from megapack.errors import DataError
from megapack.tokenization.corpus.documents import Faults, ReadOptions
from megapack.tokenization.corpus.inputs import find_inputs
from megapack.tokenization.corpus.readers import line_blocks, read_blocks
from megapack.tokenization.corpus.streams import Piece, open_stream

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


class Members(list[tuple[str, object]]):
    """A JSON object that may contain a name twice."""


def spelled(value: object) -> str:
    if not isinstance(value, Members):
        return json.dumps(value)
    return "{" + ", ".join(f"{json.dumps(k)}: {spelled(v)}" for k, v in value) + "}"


@given(
    records=st.lists(
        st.dictionaries(
            st.sampled_from(["text", "te\nxt", "\u00e9", "url"]) | st.text(), json_values
        )
        | json_values,
        max_size=6,
    ),
    ascii_only=st.booleans(),
    indent=st.sampled_from([None, " ", "\t"]),
)
def test_values_equal_pythons(records: list[object], ascii_only: bool, indent: str | None) -> None:
    separators = None if indent is None else (f"{indent},{indent}", f"{indent}:{indent}")
    how = {"ensure_ascii": ascii_only, "separators": separators}
    lines = [json.dumps(record, **how).encode("utf-8", "surrogatepass") for record in records]
    assert extract(b"".join(line + b"\n" for line in lines)) == [python_says(ln) for ln in lines]


names = st.sampled_from(["a", "b", "c", "a.b", "b.c", "a.b.c", ""])


@given(
    records=st.lists(
        st.recursive(
            st.text(max_size=3) | st.integers(0, 9),
            lambda inner: st.lists(st.tuples(names, inner), max_size=4).map(Members),
            max_leaves=20,
        ),
        max_size=5,
    ),
    key=st.sampled_from(["a.b.c", "a.b", "a", ".a", "a.", "a..b", "."]),
)
def test_dotted_key_is_found_whole_or_nested(records: list[object], key: str) -> None:
    """An object may repeat a name; Python keeps the last."""
    lines = [spelled(record).encode("utf-8") for record in records]
    found = extract(b"".join(line + b"\n" for line in lines), key)
    assert found == [python_says(line, key) for line in lines]


@pytest.mark.parametrize("seed", range(len(SEEDS)))
def test_reader_never_reads_beyond_a_line(seed: int) -> None:
    whole = SEEDS[seed].replace(b"\n", b" ")
    for cut in range(len(whole)):
        data = whole[:cut] + b"\n" + whole
        assert extract(data) == [python_says(whole[:cut]), python_says(whole)], cut


def test_any_byte_at_any_position_is_handled() -> None:
    for seed in SEEDS:
        line = bytearray(seed.replace(b"\n", b" "))
        for at, kept in enumerate(line):
            for byte in (0, 0x1F, 0x22, 0x2C, 0x5C, 0x7B, 0x7D, 0x80, 0xC3, 0xED, 0xF4, 0xFF):
                line[at] = byte
                assert extract(bytes(line)) == [python_says(bytes(line))], bytes(line)
            line[at] = kept


def test_scalars_give_their_spelling_and_lists_their_json() -> None:
    data = b'{"k": 17}\n{"k": "x"}\n{"k": [1, {"a": "\\n"}]}\n{"k": null}\n{}'
    assert extract(data, "k", "scalars") == [
        *((OK, b"17"), (OK, b"x"), (WRONG_TYPE, b"")),
        *((WRONG_TYPE, b""), (MISSING, b"")),  # null is no value
    ]
    assert extract(data, "k", "lists")[2] == (OK, b'[1, {"a": "\\n"}]')
    with pytest.raises(ValueError, match="one of strings, scalars, lists"):
        extract(data, "k", "everything")


# ---- Reading may start anywhere; every line is read exactly once


def lines_of(
    data: bytes, begin: int = 0, end: int | None = None, *, block: int = 16, longest: int = 1 << 20
) -> tuple[list[tuple[int, bytes]], list[int]]:
    """Return (position, line) of every line, and the positions of lines that are too long."""
    long_lines: list[int] = []
    result = []
    limits = {"block_bytes": block, "max_line_bytes": longest}
    where = {"begin": begin, "end": end}
    for position, chunk in line_blocks(
        io.BytesIO(data), on_long_line=long_lines.append, **where, **limits
    ):
        at = position
        for line in chunk.splitlines(keepends=True):
            result.append((at, line))
            at += len(line)
    return result, long_lines


@given(
    lines=st.lists(st.binary(max_size=40).map(lambda b: re.sub(rb"[\n\r\v\f\xef]", b".", b))),
    last_ends=st.booleans(),
    cuts=st.lists(st.integers(0, 400), max_size=4),
    block=st.integers(1, 50),
)
def test_ranges_divide_a_file_at_any_byte(
    lines: list[bytes], last_ends: bool, cuts: list[int], block: int
) -> None:
    data = b"\n".join(lines) + (b"\n" if last_ends else b"")
    bounds = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    found = []
    for begin, end in itertools.pairwise(bounds):
        found += lines_of(data, begin, end, block=block)[0]
    starts = [0, *itertools.accumulate(len(line) for line in data.splitlines(keepends=True))]
    assert found == list(zip(starts, data.splitlines(keepends=True), strict=False))


def test_too_long_line_is_dropped_and_reported() -> None:
    data = b"one\n" + b"x" * 100 + b"\ntwo\n" + b"y" * 100
    found, long_lines = lines_of(data, block=8, longest=50)
    assert found == [(0, b"one\n"), (105, b"two\n")]
    assert long_lines == [4, 109]


def test_byte_order_mark_is_dropped_at_the_file_start_only() -> None:
    bom = b"\xef\xbb\xbf"
    data = bom + b"a\n" + bom + b"b\n"
    for cut in range(len(data) + 1):
        parts = lines_of(data, 0, cut)[0] + lines_of(data, cut, len(data))[0]
        assert [line for _, line in parts] == [b"a\n", bom + b"b\n"], cut


# ---- Decompression: whole files, or an error


TEXT = b"".join(b"line %d of a file that compresses\n" % i for i in range(5000))
SKIPPABLE = (0x184D2A50).to_bytes(4, "little") + (5).to_bytes(4, "little") + b"notes"

Compress = Callable[[bytes], bytes]
COMPRESSED: list[tuple[str, Compress]] = [
    ("gz", gzip.compress),
    ("zst", lambda data: zstandard.ZstdCompressor().compress(data)),
]


def read_all(path: Path) -> bytes:
    [file] = find_inputs([str(path)])
    with open_stream(file) as stream:
        return b"".join(iter(lambda: stream.read(1000), b""))


def test_all_members_of_a_gz_are_read(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl.gz"
    data = gzip.compress(TEXT)
    path.write_bytes(data + gzip.compress(b"") + data + bytes(512))  # padded, as tapes are
    assert read_all(path) == TEXT + TEXT
    for members in (b"", data):
        for keep in (0.5, 0.9, 0.999):
            path.write_bytes(members + data[: int(len(data) * keep)])
            with pytest.raises(DataError, match=r"x\.jsonl.* truncated"):
                read_all(path)


def test_zst_with_long_window_and_skippable_frames_is_read(tmp_path: Path) -> None:
    parameters = zstandard.ZstdCompressionParameters(window_log=30, enable_ldm=True)
    long = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    path = tmp_path / "x.jsonl.zst"
    path.write_bytes(SKIPPABLE + long.compress(TEXT) + long.flush() + SKIPPABLE)
    assert read_all(path) == TEXT


@given(
    frames=st.lists(
        st.tuples(
            st.binary(max_size=30) | st.just(bytes(1 << 18)),
            st.booleans(),  # a checksum
            st.booleans(),  # the size of the content in the header
            st.integers(0, 3),  # flushes: blocks of any size
            st.booleans(),  # a skippable frame behind it
        ),
        min_size=1,
        max_size=2,
    )
)
def test_zst_may_end_only_after_a_frame(
    tmp_path_factory: pytest.TempPathFactory, frames: list[tuple[bytes, bool, bool, int, bool]]
) -> None:
    path = tmp_path_factory.mktemp("zst") / "x.txt.zst"
    data, ends = b"", {}
    text = b""
    for content, checksum, sized, flushes, skippable in frames:
        packer = zstandard.ZstdCompressor(write_checksum=checksum, write_content_size=sized)
        stream = packer.compressobj(size=len(content) if sized else -1)
        for part in np.array_split(np.frombuffer(content, np.uint8), flushes + 1):
            data += stream.compress(part.tobytes())
            data += stream.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)
        data += stream.flush()
        text += content
        ends[len(data)] = text
        if skippable:
            data += SKIPPABLE
            ends[len(data)] = text
    for end in range(1, len(data) + 1):
        path.write_bytes(data[:end])
        if end in ends:
            assert read_all(path) == ends[end]
        else:
            with pytest.raises(DataError, match=r"x\.txt\.zst"):
                read_all(path)


@pytest.mark.parametrize("name", ["x.txt.zst", "x.jsonl.zst", "x.txt.gz", "x.jsonl.gz"])
def test_decompression_bomb_is_refused_in_little_memory(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    part = bytes(1 << 24).replace(b"\0", b"a")
    if name.endswith("zst"):
        stream = zstandard.ZstdCompressor().compressobj()
        path.write_bytes(b"".join(stream.compress(part) for _ in range(16)) + stream.flush())
    else:
        path.write_bytes(gzip.compress(part) * 16)
    [file] = find_inputs([str(path)])
    options = ReadOptions(block_bytes=1 << 20, max_document_bytes=4 << 20)
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match="too long"):
            list(read_blocks([Piece(file, 0, file.size)], options, Faults()))
        assert tracemalloc.get_traced_memory()[1] < 12 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(("suffix", "compress"), COMPRESSED, ids=["gz", "zst"])
def test_damaged_file_is_an_error(tmp_path: Path, suffix: str, compress: Compress) -> None:
    path = tmp_path / f"x.jsonl.{suffix}"
    data = compress(TEXT)
    half = len(data) // 2
    for damaged in (data[:half] + b"\xff" * half, data + b"what a broken copy left here"):
        path.write_bytes(damaged)
        with pytest.raises(DataError, match=r"x\.jsonl.*damaged"):
            read_all(path)


JSON = b'{"text": "not compressed at all"}\n'
MISNAMED: list[tuple[str, bytes, str]] = [
    ("x.jsonl.gz", JSON, r"is not gzip; it looks like plain JSON: rename it to .*/x\.jsonl$"),
    ("x.jsonl.zst", JSON, r"is not zstd; it looks like plain JSON: rename it to .*/x\.jsonl$"),
    ("x.txt.gz", b"words", r"is not gzip; it looks like plain text: rename it to .*/x\.txt$"),
    ("x.jsonl.zst", gzip.compress(JSON), r"not zstd; it looks like gzip: rename .*x\.jsonl\.gz$"),
    ("x.jsonl.gz", b"", r"is empty: not a gzip file; download it again$"),
    ("x.jsonl.gz", b"\x00\xff\x13\x80\x81\x82", r"is not gzip; download it again$"),
    ("x.jsonl", gzip.compress(JSON), r"not plain JSON Lines; it looks like gzip: .*x\.jsonl\.gz$"),
    ("x.json", bz2.compress(JSON), r"not plain JSON Lines; it looks like bzip2: decompress it"),
    ("x.jsonl", JSON.decode().encode("utf-16"), r"looks like UTF-16: convert it .*iconv"),
]


@pytest.mark.parametrize(("name", "data", "message"), MISNAMED, ids=range(len(MISNAMED)))
def test_misnamed_file_is_refused(tmp_path: Path, name: str, data: bytes, message: str) -> None:
    path = tmp_path / name
    path.write_bytes(data)
    with pytest.raises(DataError, match=message):
        read_all(path)


@pytest.mark.parametrize("name", ["x.jsonl", "x.txt", "x.jsonl.gz", "x.parquet"])
def test_file_changed_since_the_plan_is_refused(tmp_path: Path, name: str) -> None:
    """Its pieces would end in the middle of a line, or miss new lines."""
    path = tmp_path / name
    path.write_bytes(JSON)
    [file] = find_inputs([str(path)])
    pieces = [Piece(file, 0, file.size)]
    path.write_bytes(JSON * 2)
    with pytest.raises(DataError, match=rf"{name} changed .* \(34 bytes then, 68 now\)"):
        list(read_blocks(pieces, ReadOptions(), Faults()))
    path.write_bytes(JSON)
    os.utime(path, ns=(0, 0))
    with pytest.raises(DataError, match=rf"{name} changed after the build was planned"):
        list(read_blocks(pieces, ReadOptions(), Faults()))
