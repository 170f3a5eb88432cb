"""Files are decompressed whole, or refused for what they are."""

from __future__ import annotations

import bz2
import gzip
import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from megapack.errors import DataError
from megapack.tokenization.corpus.documents import Faults, ReadOptions
from megapack.tokenization.corpus.inputs import Piece, find_inputs, open_stream
from megapack.tokenization.corpus.readers import read_blocks

TEXT = b"".join(b"line %d of a file that compresses\n" % i for i in range(5000))
SKIPPABLE = (0x184D2A50).to_bytes(4, "little") + (5).to_bytes(4, "little") + b"notes"

Compress = Callable[[bytes], bytes]
COMPRESSED: list[tuple[str, Compress]] = [
    ("gz", gzip.compress),
    ("zst", lambda data: zstandard.ZstdCompressor().compress(data)),
]
each_compression = pytest.mark.parametrize(
    ("suffix", "compress"), COMPRESSED, ids=[suffix for suffix, _ in COMPRESSED]
)


def read_all(path: Path) -> bytes:
    [file] = find_inputs([str(path)])
    with open_stream(file) as stream:
        return b"".join(iter(lambda: stream.read(1000), b""))


@each_compression
def test_members_are_all_read(tmp_path: Path, suffix: str, compress: Compress) -> None:
    path = tmp_path / f"x.jsonl.{suffix}"
    path.write_bytes(compress(TEXT) + compress(b"") + compress(TEXT))
    assert read_all(path) == TEXT + TEXT


def test_zst_files_with_long_windows_and_skippable_frames_are_read(tmp_path: Path) -> None:
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
def test_a_zst_may_end_behind_every_frame_and_nowhere_else(
    tmp_path_factory: pytest.TempPathFactory, frames: list[tuple[bytes, bool, bool, int, bool]]
) -> None:
    path = tmp_path_factory.mktemp("zst") / "x.txt.zst"
    data, ends = b"", {}
    text = b""
    for content, checksum, sized, flushes, skippable in frames:
        packer = zstandard.ZstdCompressor(write_checksum=checksum, write_content_size=sized)
        stream = packer.compressobj(size=len(content) if sized else -1)
        for part in np.array_split(np.frombuffer(content, np.uint8), flushes + 1):
            data += stream.compress(part.tobytes()) + stream.flush(
                zstandard.COMPRESSOBJ_FLUSH_BLOCK
            )
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
def test_endless_expansion_is_refused_in_little_memory(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    part = bytes(1 << 24).replace(b"\0", b"a")
    if name.endswith("zst"):
        stream = zstandard.ZstdCompressor().compressobj()
        path.write_bytes(b"".join(stream.compress(part) for _ in range(16)) + stream.flush())
    else:
        path.write_bytes(b"".join(gzip.compress(part) for _ in range(16)))
    [file] = find_inputs([str(path)])
    options = ReadOptions(block_bytes=1 << 20, max_document_bytes=4 << 20)
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match="too long"):
            list(read_blocks([Piece(file, 0, file.size)], options, Faults()))
        assert tracemalloc.get_traced_memory()[1] < 12 << 20
    finally:
        tracemalloc.stop()


@each_compression
@pytest.mark.parametrize("keep", [0.5, 0.9, 0.999])
def test_truncated_file_is_error(
    tmp_path: Path, suffix: str, compress: Compress, keep: float
) -> None:
    data = compress(TEXT)
    path = tmp_path / f"x.jsonl.{suffix}"
    for members in (b"", data):
        path.write_bytes(members + data[: int(len(data) * keep)])
        with pytest.raises(DataError, match=r"x\.jsonl.* truncated"):
            read_all(path)


@each_compression
def test_damaged_file_is_an_error(tmp_path: Path, suffix: str, compress: Compress) -> None:
    path = tmp_path / f"x.jsonl.{suffix}"
    data = bytearray(compress(TEXT))
    data[len(data) // 2 :] = b"\xff" * (len(data) - len(data) // 2)
    path.write_bytes(bytes(data))
    with pytest.raises(DataError, match=r"x\.jsonl.*damaged"):
        read_all(path)
    path.write_bytes(compress(TEXT) + b"what a broken copy left here")
    with pytest.raises(DataError, match=r"x\.jsonl.*damaged"):
        read_all(path)


JSON = b'{"text": "not compressed at all"}\n'
MISNAMED: list[tuple[str, bytes, str]] = [
    ("x.jsonl.gz", JSON, r"is not gzip; it looks like plain JSON: rename it to .*/x\.jsonl$"),
    ("x.jsonl.zst", JSON, r"is not zstd; it looks like plain JSON: rename it to .*/x\.jsonl$"),
    ("x.txt.gz", b"words", r"is not gzip; it looks like plain text: rename it to .*/x\.txt$"),
    (
        "x.jsonl.zst",
        gzip.compress(JSON),
        r"is not zstd; it looks like gzip: rename .*x\.jsonl\.gz$",
    ),
    ("x.jsonl.gz", b"", r"is empty, which no gzip file is; fetch it again$"),
    ("x.jsonl.gz", b"\x00\xff\x13\x80\x81\x82", r"is not gzip; fetch it again$"),
    ("x.jsonl", gzip.compress(JSON), r"not plain JSON Lines; it looks like gzip: .*x\.jsonl\.gz$"),
    ("x.json", bz2.compress(JSON), r"not plain JSON Lines; it looks like bzip2: decompress it"),
    ("x.jsonl", JSON.decode().encode("utf-16"), r"looks like UTF-16: convert it .*iconv"),
]


@pytest.mark.parametrize(("name", "data", "message"), MISNAMED, ids=range(len(MISNAMED)))
def test_misnamed_file_is_named(tmp_path: Path, name: str, data: bytes, message: str) -> None:
    path = tmp_path / name
    path.write_bytes(data)
    with pytest.raises(DataError, match=message):
        read_all(path)


@pytest.mark.parametrize("name", ["x.jsonl", "x.txt", "x.jsonl.gz", "x.parquet"])
def test_file_changed_since_the_plan_is_refused(tmp_path: Path, name: str) -> None:
    """Its pieces would end in the middle of a line, or leave the new ones out."""
    path = tmp_path / name
    path.write_bytes(JSON)
    [file] = find_inputs([str(path)])
    options = ReadOptions()

    def read() -> None:
        for _ in read_blocks([Piece(file, 0, file.size)], options, Faults()):
            pass

    path.write_bytes(JSON * 2)
    with pytest.raises(DataError, match=rf"{name} changed .* \(34 bytes then, 68 now\)"):
        read()
    path.write_bytes(JSON)
    os.utime(path, ns=(0, 0))
    with pytest.raises(DataError, match=rf"{name} changed after the build was planned"):
        read()
