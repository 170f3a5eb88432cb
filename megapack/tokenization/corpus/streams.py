"""The bytes of input files, decompressed; files that are not what their names say are refused."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import zlib
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import BinaryIO, cast

from megapack.errors import DataError
from megapack.optional import require
from megapack.tokenization.corpus.pieces import Format, InputFile, suffix_of

__all__ = ["ARROW_FILE", "open_stream", "require_unchanged", "seems"]

_HEAD_BYTES = 1 << 16
_ZST_WINDOW_BYTES = 1 << 31
_ZST_REPEATED = 1  # kind of a block: one byte, many times

_NAMES = {"gz": "gzip", "zst": "zstd"}
_PLAIN = ("plain JSON", "plain text")
# How Arrow files begin: the file format, the stream format (no magic number, but a continuation).
ARROW_FILE = b"ARROW1"
_ARROW_STREAM = b"\xff\xff\xff\xff"
# How files begin that are not plain UTF-8.
_MAGIC = {
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"BZh": "bzip2",
    b"\xfd7zXZ\x00": "xz",
    b"PK\x03\x04": "a zip archive",
    b"PAR1": "parquet",
    ARROW_FILE: "Arrow",
    _ARROW_STREAM: "Arrow",
    b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
}
_ZST_SKIPPABLE = b"\x2a\x4d\x18"  # bytes 1 to 3 of a frame that holds no data


@contextlib.contextmanager
def open_stream(file: InputFile) -> Iterator[BinaryIO]:
    """The decompressed bytes of a file.

    Raises:
        DataError: it is damaged, truncated, not the file that was planned, or not what its name
            says. Damage may show only while it is read.
    """
    with Path(file.path).open("rb") as raw:
        require_unchanged(file, os.fstat(raw.fileno()))
        _require_compression(file, raw.read(_HEAD_BYTES))
        raw.seek(0)
        stream: BinaryIO = raw
        damage: tuple[type[Exception], ...] = ()
        if file.compression == "gz":
            stream = cast("BinaryIO", gzip.GzipFile(fileobj=raw))
            damage = (EOFError, zlib.error, gzip.BadGzipFile)
        elif file.compression == "zst":
            zstandard = require("zstandard", f"reading {file.path}")
            # Corpora are packed with --long, whose windows the library refuses unless told.
            decompressor = zstandard.ZstdDecompressor(max_window_size=_ZST_WINDOW_BYTES)
            frames = _WholeFrames(raw, file.path)
            stream = decompressor.stream_reader(frames, read_across_frames=True, closefd=False)
            damage = (zstandard.ZstdError,)
        try:
            yield stream
        except damage as error:
            raise DataError(f"{file.path} is truncated or damaged ({error}); fetch it again") from (
                error
            )


def require_unchanged(file: InputFile, facts: os.stat_result) -> None:
    """DataError unless a file is the one whose pieces were planned."""
    if (facts.st_size, facts.st_mtime_ns) != (file.size, file.mtime_ns):
        raise DataError(
            f"{file.path} changed after the build was planned ({file.size:,} bytes then, "
            f"{facts.st_size:,} now); run the command again when nothing writes to it"
        )


def seems(file: InputFile) -> Format | None:
    """What a file whose name does not say it seems to hold; None where it may well be text."""
    with open_stream(file) as stream:
        head = stream.read(_HEAD_BYTES)
    if head.startswith(b"PAR1"):
        return "parquet"
    if head.startswith((ARROW_FILE, _ARROW_STREAM)):
        return "arrow"
    first, newline, rest = head.partition(b"\n")
    # One object alone is a document of its own (a notebook, a source map) if its name ends so.
    if not _is_object(first, whole=bool(newline) or len(head) < _HEAD_BYTES):
        return None
    return "jsonl" if rest.startswith(b"{") or not suffix_of(file.path) else None


def _is_object(line: bytes, *, whole: bool) -> bool:
    if not line.startswith(b"{"):
        return False
    try:
        return not whole or isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def _require_compression(file: InputFile, head: bytes) -> None:
    """DataError where a file's first bytes deny its name."""
    found = _looks(head)
    wanted = _NAMES.get(file.compression)
    if found == wanted or (wanted is None and (file.format == "text" or found in _PLAIN)):
        return
    if wanted is not None and not head:
        raise DataError(f"{file.path} is empty, which no {wanted} file is; fetch it again")
    problem = f"{file.path} is not {wanted}" if wanted else f"{file.path} is not plain JSON Lines"
    if found is None:
        raise DataError(f"{problem}; fetch it again")
    bare = file.path.removesuffix(Path(file.path).suffix) if wanted else file.path
    remedy = {
        **dict.fromkeys(_PLAIN, f"rename it to {bare}"),
        "gzip": f"rename it to {bare}.gz",
        "zstd": f"rename it to {bare}.zst",
        "UTF-16": "convert it to UTF-8, as with iconv -f UTF-16 -t UTF-8",
    }.get(found, "decompress it, or give it the name of what it is")
    raise DataError(f"{problem}; it looks like {found}: {remedy}")


def _looks(head: bytes) -> str | None:
    """How bytes at the start of a file look; None where they look like nothing known."""
    for magic, name in _MAGIC.items():
        if head.startswith(magic):
            return name
    if head[1:4] == _ZST_SKIPPABLE and head[0] >> 4 == 5:
        return "zstd"
    if head.lstrip()[:1] in (b"{", b"["):
        return "plain JSON"
    try:
        head[:-4].decode("utf-8")  # a character may be cut at the end
    except UnicodeDecodeError:
        return None
    return "plain text"


class _WholeFrames:
    """The compressed bytes of a .zst, followed frame by frame and block by block as they are read.

    zstandard takes a file that ends inside a frame for a complete one; here that is a DataError.
    """

    def __init__(self, raw: BinaryIO, path: str) -> None:
        self._raw = raw
        self._path = path
        self._layout = _zst_layout()
        self._next = next(self._layout)  # bytes up to the next header, length of that header
        self._header = b""

    def read(self, size: int) -> bytes:
        data = self._raw.read(size)
        between_frames = self._next == _BETWEEN_FRAMES and not self._header
        if not data and size and not between_frames:
            raise DataError(f"{self._path} is truncated (it ends inside a frame); fetch it again")
        at = 0
        while at < len(data):
            skipped, length = self._next
            if skipped:
                step = min(skipped, len(data) - at)
                self._next = (skipped - step, length)
            else:
                step = min(length - len(self._header), len(data) - at)
                self._header += data[at : at + step]
                if len(self._header) == length:
                    header, self._header = self._header, b""
                    self._next = self._layout.send(header)
            at += step
        return data


_BETWEEN_FRAMES = (0, 5)


def _zst_layout() -> Generator[tuple[int, int], bytes, None]:
    """Where the headers of a .zst stand (RFC 8878): yields (bytes to skip, bytes of a header), and
    is sent that header. What is no frame at all is left to the decompressor to refuse.
    """
    skipped = 0
    while True:
        # Magic number, and the byte that says how long the rest of the header is.
        header = yield skipped, _BETWEEN_FRAMES[1]
        skipped = 0
        if header[1:4] == _ZST_SKIPPABLE:
            size = header[4:] + (yield 0, 3)
            skipped = int.from_bytes(size, "little")
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
