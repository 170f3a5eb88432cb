"""Blocks of whole lines from files that may be large, compressed, or entered in the middle."""

from __future__ import annotations

import contextlib
import gzip
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

from megapack.errors import DataError
from megapack.tokenization.optional import require

__all__ = ["line_blocks", "open_stream"]

_BOM = b"\xef\xbb\xbf"
_SEARCH_BYTES = 1 << 16
_ZST_INPUT_BYTES = 1 << 14
_ZST_WINDOW_BYTES = 1 << 31


@contextlib.contextmanager
def open_stream(path: str, format: str) -> Iterator[BinaryIO]:
    """The decompressed bytes of a file. Damage is a DataError that names the file."""
    with Path(path).open("rb") as raw:
        if format == "jsonl.gz":
            stream = cast("BinaryIO", gzip.GzipFile(fileobj=raw))
        elif format == "jsonl.zst":
            stream = _ZstReader(raw, path)  # type: ignore[assignment]
        else:
            stream = raw
        try:
            yield stream
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise DataError(f"{path} is truncated or damaged ({error}); fetch it again") from error


class _ZstReader:
    """zstandard's stream reader, which takes a file cut inside a frame for a complete one."""

    def __init__(self, raw: BinaryIO, path: str) -> None:
        zstandard = require("zstandard", "zst", f"reading {path}")
        self._error: type[Exception] = zstandard.ZstdError
        # Corpora are packed with --long, whose windows the library refuses unless told.
        decompressor = zstandard.ZstdDecompressor(max_window_size=_ZST_WINDOW_BYTES)
        self._new: Callable[[], Any] = decompressor.decompressobj
        self._raw = raw
        self._path = path
        self._frame = self._new()
        self._inside_frame = False
        self._input = b""
        self._output = b""

    def read(self, size: int) -> bytes:
        """``size`` bytes, fewer only at the end of the file."""
        parts = [self._output]
        total = len(self._output)
        while total < size and self._more_input():
            parts.append(self._decompress())
            total += len(parts[-1])
        data = b"".join(parts)
        self._output = data[size:]
        return data[:size]

    def _more_input(self) -> bool:
        # Little at a time: what comes out may be thousands of times as much.
        self._input = self._input or self._raw.read(_ZST_INPUT_BYTES)
        if not self._input and self._inside_frame:
            raise DataError(f"{self._path} is truncated (it ends inside a frame); fetch it again")
        return bool(self._input)

    def _decompress(self) -> bytes:
        try:
            part: bytes = self._frame.decompress(self._input)
        except self._error as error:
            raise DataError(f"{self._path} is damaged ({error}); fetch it again") from error
        self._inside_frame = not self._frame.eof
        self._input = b""
        if self._frame.eof:  # files of several frames are ordinary (zstd -T, cat)
            self._input = self._frame.unused_data
            self._frame = self._new()
        return part


def line_blocks(
    stream: BinaryIO,
    *,
    begin: int = 0,
    end: int | None = None,
    block_bytes: int,
    max_line_bytes: int,
    on_long_line: Callable[[int], None],
) -> Iterator[tuple[int, bytes]]:
    """Blocks ``(position, data)`` of whole lines, in order; ``position`` is data's first byte.

    The lines given are those that start in bytes ``[begin, end)``, so that consecutive ranges
    share out a file whatever their bounds. A byte order mark at the start of the file is dropped.

    Args:
        stream: positioned anywhere; a ``begin`` above 0 needs it seekable.
        end: None is the end of the file.
        block_bytes: about the size of a block; a line that is longer makes its block longer.
        max_line_bytes: a longer line is left out, and ``on_long_line(position)`` is called.
    """
    position = _line_start(stream, begin)  # of the line that is pending
    parts: list[bytes] = []  # of the pending line; joined once, when its end is seen
    pending = 0
    while end is None or position < end:
        chunk = stream.read(block_bytes)
        if not chunk:
            break
        newline = chunk.find(b"\n")
        if newline < 0:
            pending += len(chunk)
            parts = [*parts, chunk] if pending <= max_line_bytes else []
            continue
        if pending + newline > max_line_bytes:
            on_long_line(position)
            position += pending + newline + 1
            chunk = chunk[newline + 1 :]
        elif parts:
            chunk = b"".join([*parts, chunk])
        parts, pending = [], 0
        cut = _whole_lines(chunk, None if end is None else end - position)
        if cut > 0:
            yield _without_bom(position, chunk[:cut])
        position += cut
        if cut < len(chunk):
            parts, pending = [chunk[cut:]], len(chunk) - cut
    if pending > max_line_bytes:
        on_long_line(position)
    elif pending and (end is None or position < end):
        yield _without_bom(position, b"".join(parts))


def _whole_lines(chunk: bytes, room: int | None) -> int:
    """The length of the whole lines of ``chunk`` that start in its first ``room`` bytes."""
    if room is not None and len(chunk) >= room:
        if room <= 0:
            return 0
        last = chunk.find(b"\n", room - 1)
        if last >= 0:
            return last + 1
    return chunk.rfind(b"\n") + 1


def _without_bom(position: int, data: bytes) -> tuple[int, bytes]:
    if position == 0 and data.startswith(_BOM):
        return len(_BOM), data[len(_BOM) :]
    return position, data


def _line_start(stream: BinaryIO, begin: int) -> int:
    """Where the first line at or behind ``begin`` starts; the stream is left there."""
    if begin == 0:
        return 0
    position = stream.seek(begin - 1)
    while block := stream.read(_SEARCH_BYTES):
        newline = block.find(b"\n")
        if newline >= 0:
            return stream.seek(position + newline + 1)
        position += len(block)
    return position
