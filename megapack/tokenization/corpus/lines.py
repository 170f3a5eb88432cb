"""Blocks of whole lines from streams that may be large, or entered in the middle."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import BinaryIO

__all__ = ["line_blocks"]

_BOM = b"\xef\xbb\xbf"
_SEARCH_BYTES = 1 << 16


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
