"""A file of the corpus, and its bytes, decompressed.

- InputFile, Piece: a file with its size and time when the build was planned; a part of it
- open_stream: the decompressed bytes of a file; checks that the content matches the name
- require_unchanged, input_digest: whether a file is still the one that was planned

    with open_stream(InputFile("a.jsonl.gz", "jsonl", "gz", size, mtime_ns)) as stream:
        stream.read(6)                        # -> b'{"text'; DataError unless it is gzip
"""

from __future__ import annotations

import contextlib
import gzip
import os
import zlib
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal, NamedTuple, cast

import xxhash

from megapack.errors import DataError, require

Format = Literal["jsonl", "parquet", "arrow", "text"]
TABLES = ("parquet", "arrow")  # rows in groups; compression is inside the file
Compression = Literal["", "gz", "zst"]

HEAD_BYTES = 1 << 16
_NAMES = {"gz": "gzip", "zst": "zstd"}
_PLAIN = ("plain JSON", "plain text")
# First bytes of Arrow files: of the file format; of the stream format (it has no magic number).
ARROW_FILE = b"ARROW1"
ARROW_STREAM = b"\xff\xff\xff\xff"
# First bytes of files that are not plain UTF-8.
_MAGIC = {
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"BZh": "bzip2",
    b"\xfd7zXZ\x00": "xz",
    b"PK\x03\x04": "a zip archive",
    b"PAR1": "parquet",
    ARROW_FILE: "Arrow",
    ARROW_STREAM: "Arrow",
    b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
}
_ZST_SKIPPABLE = b"\x2a\x4d\x18"  # bytes 1 to 3 of a frame without data
_ZST_WINDOW_BYTES = 1 << 31
_ZST_REPEATED = 1  # kind of a block: one repeated byte


@dataclass(frozen=True, slots=True)
class InputFile:
    """A file of the corpus, with its size and time when the build was planned."""

    path: str
    format: Format
    compression: Compression
    size: int  # bytes on disk
    mtime_ns: int


class Piece(NamedTuple):
    """Part ``[begin, end)`` of a file: bytes (jsonl), row groups (parquet), record batches (arrow);
    text and compressed files are one piece."""

    file: InputFile
    begin: int
    end: int


@contextlib.contextmanager
def open_stream(file: InputFile) -> Iterator[BinaryIO]:
    """Open a file; yield a stream of its decompressed bytes. Raises DataError if the file is
    damaged or truncated (perhaps only while it is read), was changed since it was planned, or has
    another format than its name says."""
    with open(file.path, "rb") as raw:  # noqa: PTH123 (faster than Path.open)
        require_unchanged(file, os.fstat(raw.fileno()))
        if file.compression or file.format != "text":  # a text may begin with any bytes
            _require_compression(file, raw.read(HEAD_BYTES))
            raw.seek(0)
        stream: BinaryIO = raw
        damage: tuple[type[Exception], ...] = ()
        if file.compression == "gz":
            stream = cast("BinaryIO", gzip.GzipFile(fileobj=raw))
            damage = (EOFError, zlib.error, gzip.BadGzipFile)
        elif file.compression == "zst":
            zstandard = require("zstandard", f"reading {file.path}")
            # By default, the library refuses the large windows of zstd --long.
            decompressor = zstandard.ZstdDecompressor(max_window_size=_ZST_WINDOW_BYTES)
            frames = _WholeFrames(raw, file.path)
            stream = decompressor.stream_reader(frames, read_across_frames=True, closefd=False)
            damage = (zstandard.ZstdError,)
        try:
            yield stream
        except damage as error:
            problem = f"{file.path} is truncated or damaged ({error}); download it again"
            raise DataError(problem) from error


def require_unchanged(file: InputFile, facts: os.stat_result) -> None:
    """Raise DataError if a file changed since its pieces were planned."""
    if (facts.st_size, facts.st_mtime_ns) != (file.size, file.mtime_ns):
        raise DataError(
            f"{file.path} changed after the build was planned ({file.size:,} bytes then, "
            f"{facts.st_size:,} now); run the command again once no program writes to it"
        )


def input_digest(file: InputFile) -> str | None:
    """Return xxh3-128 of the bytes of an input; None if the file changed since it was planned. A
    later run compares it to recognize a finished build, because a path may be written in several
    ways, and copying or touching a file changes its modification time."""
    digest = xxhash.xxh3_128()
    try:
        with open(file.path, "rb", buffering=0) as stream:  # noqa: PTH123
            while block := stream.read(1 << 22):
                digest.update(block)
            require_unchanged(file, os.fstat(stream.fileno()))
    except (OSError, DataError):
        return None
    return digest.hexdigest()


# ---- Content that contradicts the name ----------------------------------------------------------


def _require_compression(file: InputFile, head: bytes) -> None:
    """Raise DataError if a file's first bytes contradict its name."""
    actual = _looks(head)
    wanted = _NAMES.get(file.compression)
    if actual == wanted or (wanted is None and actual in _PLAIN):
        return
    if wanted is not None and not head:
        raise DataError(f"{file.path} is empty: not a {wanted} file; download it again")
    problem = f"{file.path} is not {wanted}" if wanted else f"{file.path} is not plain JSON Lines"
    if actual is None:
        raise DataError(f"{problem}; download it again")
    bare = file.path.removesuffix(Path(file.path).suffix) if wanted else file.path
    remedy = {
        **dict.fromkeys(_PLAIN, f"rename it to {bare}"),
        "gzip": f"rename it to {bare}.gz",
        "zstd": f"rename it to {bare}.zst",
        "UTF-16": "convert it to UTF-8 with iconv -f UTF-16 -t UTF-8",
    }.get(actual, "decompress it, or rename it")
    raise DataError(f"{problem}; it looks like {actual}: {remedy}")


def _looks(head: bytes) -> str | None:
    """Return what the first bytes of a file look like; None if unknown."""
    for magic, name in _MAGIC.items():
        if head.startswith(magic):
            return name
    if head[1:4] == _ZST_SKIPPABLE and head[0] >> 4 == 5:
        return "zstd"
    if head.lstrip()[:1] in (b"{", b"["):
        return "plain JSON"
    try:
        head[:-4].decode("utf-8")  # its last character may be cut
    except UnicodeDecodeError:
        return None
    return "plain text"


# ---- Frames of .zst files ------------------------------------------------------------------------


class _WholeFrames:
    """Raw stream of a .zst that follows its frames and blocks while they are read: zstandard
    accepts a file that ends inside a frame as complete; this stream raises DataError."""

    def __init__(self, raw: BinaryIO, path: str) -> None:
        self._raw = raw
        self._path = path
        self._layout = _zst_layout()
        # Bytes up to the next header, and the length of that header.
        self._next = next(self._layout)
        self._header = b""

    def read(self, size: int) -> bytes:
        data = self._raw.read(size)
        between_frames = self._next == _BETWEEN_FRAMES and not self._header
        if not data and size and not between_frames:
            raise DataError(f"{self._path} is truncated (it ends in a frame); download it again")
        position = 0
        while position < len(data):
            skipped, length = self._next
            if skipped:
                step = min(skipped, len(data) - position)
                self._next = (skipped - step, length)
            else:
                step = min(length - len(self._header), len(data) - position)
                self._header += data[position : position + step]
                if len(self._header) == length:
                    self._next, self._header = self._layout.send(self._header), b""
            position += step
        return data


_BETWEEN_FRAMES = (0, 5)


def _zst_layout() -> Generator[tuple[int, int], bytes, None]:
    """Locate the headers of a .zst (RFC 8878): yield (bytes to skip, bytes of a header); receive
    the header. The decompressor reports invalid frames."""
    skipped = 0
    while True:
        # Magic number, and the byte that determines the length of the remaining header.
        header = yield skipped, _BETWEEN_FRAMES[1]
        if header[1:4] == _ZST_SKIPPABLE:
            skipped = int.from_bytes(header[4:] + (yield 0, 3), "little")
            continue
        descriptor = header[4]
        single_segment, content_size = descriptor >> 5 & 1, descriptor >> 6
        skipped = (0 if single_segment else 1) + (0, 1, 2, 4)[descriptor & 3]
        skipped += (single_segment, 2, 4, 8)[content_size]
        last = 0
        while not last:
            block = int.from_bytes((yield skipped, 3), "little")
            last, kind, num_bytes = block & 1, block >> 1 & 3, block >> 3
            skipped = 1 if kind == _ZST_REPEATED else num_bytes
        skipped += 4 if descriptor & 4 else 0  # checksum
