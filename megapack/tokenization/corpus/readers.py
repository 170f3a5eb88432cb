"""Input files -> shards of pieces -> blocks of documents.

- plan_shards: what one worker reads from start to end and writes as one dataset. Bounds depend on
  the files and on ``shard_bytes``, never on the number of workers or machines
- read_blocks: the documents of pieces, of whatever format; tables are read by tables.py
- line_blocks: whole lines from streams that may be large, or entered in the middle

A file of 3 lines of 40 bytes, in shards of 50 bytes: the pieces are bytes [0, 50), [50, 100) and
[100, 120), and a line belongs to the piece in which it begins, at byte 0, 40 or 80:

    [block.strings() for shard in shards for block in read_blocks(shard.pieces, options, faults)]
    # -> [["first", "second"], ["third"]]; no line begins in the last piece
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from megapack import _core
from megapack.errors import ConfigError
from megapack.tokenization.corpus.documents import (
    Faults,
    Place,
    ReadOptions,
    TextBlock,
    chats_of,
    json_kind,
    key_names,
    key_path,
)
from megapack.tokenization.corpus.inputs import TABLES, InputFile, Piece, open_stream
from megapack.tokenization.corpus.tables import open_table, read_table

# Text grows by about this much when it is decompressed; only the balance of shards rests on it.
_EXPANSION = {"": 1, "gz": 3, "zst": 3}

MIN_SHARD_BYTES = 1 << 20
_MAX_SHARD_BYTES = 256 << 20
_WANTED_SHARDS = 64


@dataclass(frozen=True, slots=True)
class Shard:
    """Consecutive pieces of the corpus, of about ``num_bytes`` of text."""

    pieces: tuple[Piece, ...]
    num_bytes: int


def default_shard_bytes(files: Sequence[InputFile]) -> int:
    """A power of two that gives about 64 shards, between 1 MiB and 256 MiB."""
    total = sum(file.size * _EXPANSION[file.compression] for file in files)
    wanted = 1 << max(0, (total // _WANTED_SHARDS)).bit_length()
    return min(max(wanted, MIN_SHARD_BYTES), _MAX_SHARD_BYTES)


def plan_shards(files: Sequence[InputFile], *, shard_bytes: int, json_key: str) -> list[Shard]:
    """Share out ``files``, in order, into shards of about ``shard_bytes``.

    Plain JSON Lines are cut at any byte (readers go on to the next line), parquet between row
    groups, Arrow between record batches; other files are not cut, so a shard may be larger than
    asked for.

    Raises:
        ConfigError: ``shard_bytes`` is not positive.
        DataError: a parquet or Arrow file is damaged.
    """
    if shard_bytes < 1:
        raise ConfigError(f"shard size {shard_bytes} must be at least 1 byte")
    shards: list[Shard] = []
    pieces: list[Piece] = []
    filled = 0
    for file in files:
        left = _parts(file, json_key)
        while left:
            piece, weight = left.pop()
            if file.format == "jsonl" and not file.compression:
                cut = min(piece.end, piece.begin + shard_bytes - filled)
                if cut < piece.end:
                    left.append((piece._replace(begin=cut), piece.end - cut))
                piece, weight = piece._replace(end=cut), cut - piece.begin
            last = pieces[-1] if pieces else None
            if last is not None and (last.file, last.end) == (file, piece.begin):
                pieces[-1] = last._replace(end=piece.end)  # groups of rows that follow each other
            else:
                pieces.append(piece)
            filled += weight
            if filled >= shard_bytes:
                shards.append(Shard(tuple(pieces), filled))
                pieces, filled = [], 0
    return [*shards, Shard(tuple(pieces), filled)] if pieces else shards


def _parts(file: InputFile, json_key: str) -> list[tuple[Piece, int]]:
    """The parts of a file that stay whole, with their bytes of text; the last one first."""
    if file.format in TABLES:
        with open_table(file) as table:
            weights = table.group_bytes(json_key)
        return [(Piece(file, i, i + 1), weight) for i, weight in enumerate(weights)][::-1]
    weight = file.size * _EXPANSION[file.compression]
    is_empty = file.format == "jsonl" and not file.compression and not file.size
    return [] if is_empty else [(Piece(file, 0, file.size), weight)]


def read_blocks(
    pieces: Iterable[Piece], options: ReadOptions, faults: Faults
) -> Iterator[TextBlock]:
    """The documents of ``pieces``, in order, as blocks without empty or invalid documents.

    Raises:
        DataError: a fault, where ``faults`` does not skip; a damaged file.
        OSError: a file cannot be read.
    """
    for is_text, group in itertools.groupby(pieces, lambda piece: piece.file.format == "text"):
        if is_text:
            yield from _read_texts([piece.file for piece in group], options, faults)
            continue
        for piece in group:
            read = read_table if piece.file.format in TABLES else read_jsonl_blocks
            yield from read(piece, options, faults)


# ---- Files of which each is one document --------------------------------------------------------

_BOM = b"\xef\xbb\xbf"


def _read_texts(
    files: Iterable[InputFile], options: ReadOptions, faults: Faults
) -> Iterator[TextBlock]:
    texts: dict[str, bytes] = {}
    size = 0
    for file in files:
        text = _read_text(file, options, faults)
        if text is not None:
            texts[file.path] = text
            size += len(text)
        if size >= options.block_bytes:
            yield _text_block(texts).checked(faults, known_utf8=False)
            texts, size = {}, 0
    if texts:
        yield _text_block(texts).checked(faults, known_utf8=False)


def _text_block(texts: dict[str, bytes]) -> TextBlock:
    names = list(texts)
    return TextBlock.of_texts(texts.values(), lambda i: Place(names[i], "file"))


def _read_text(file: InputFile, options: ReadOptions, faults: Faults) -> bytes | None:
    parts: list[bytes] = []
    size = 0
    with open_stream(file) as stream:
        while size <= options.max_document_bytes and (part := stream.read(options.block_bytes)):
            parts.append(part)
            size += len(part)
    place = Place(file.path, "file")
    if size > options.max_document_bytes:
        limit = f"a file of more than {options.max_document_bytes:,} bytes"
        faults.record("too long", place, f"{limit}; see --max-document-bytes")
        return None
    text = b"".join(parts)
    if b"\0" in text:
        faults.record("NUL bytes", place, "it is binary, or UTF-16 and wants iconv -t UTF-8")
        return None
    return text.removeprefix(_BOM)


# ---- JSON Lines, plain, .gz or .zst -------------------------------------------------------------

# LineStatus of csrc/core/text/jsonl.hpp, from 1 on.
_LINE_FAULTS = (
    "blank line",
    "malformed JSON",
    "not a JSON object",
    "missing key",
    "wrong type",
    "invalid UTF-8",
    "no split key",
)

_WANTED = "one object per line is wanted, as jq -c '.[]' writes an array"
_SHOWN = 8  # keys, where the one that was asked for is not there


def read_jsonl_blocks(piece: Piece, options: ReadOptions, faults: Faults) -> Iterator[TextBlock]:
    """The documents of a piece, a block of lines at a time. Raises as ``read_blocks``."""
    # Inside a compressed file a byte position leads nowhere; count lines there instead.
    counts_lines = bool(piece.file.compression)
    locate = functools.partial(Place, piece.file.path, "line" if counts_lines else "byte")
    lines_before = 0

    def on_long_line(position: int) -> None:
        nonlocal lines_before
        lines_before += 1
        faults.record(
            "too long",
            locate(lines_before if counts_lines else position),
            f"a line of more than {options.max_document_bytes:,} bytes; see --max-document-bytes",
        )

    with open_stream(piece.file) as stream:
        for position, data in line_blocks(
            stream,
            begin=piece.begin,
            end=None if counts_lines else piece.end,
            block_bytes=options.block_bytes,
            max_line_bytes=options.max_document_bytes,
            on_long_line=on_long_line,
        ):
            lines = np.frombuffer(data, np.uint8)
            extracted = _core.extract_jsonl(lines, options.json_key, options.values)
            text, offsets, status, line_begin = extracted
            positions = line_begin + position
            if counts_lines:
                positions = np.arange(1, len(status) + 1) + lines_before
                lines_before += len(status)
            block = TextBlock(text, offsets, positions, locate)
            if options.beside:
                block = _with_values_beside(block, lines, options.beside)
            if options.weights_key is not None:
                said = _values(block, lines, options.weights_key, "any")[0].strings()
                block = dataclasses.replace(block, weights=said)
            if options.split_key is not None:
                keys, no_key = _values(block, lines, options.split_key, "scalars")
                block = dataclasses.replace(block, hashes=keys.text_hashes())
                status[(status == 0) & no_key] = len(_LINE_FAULTS)
            if options.group_key is not None:
                keys, no_key = _values(block, lines, options.group_key, "scalars")
                block = block.in_groups(keys.text_hashes(), no_key)

            def detail(row: int) -> str:
                line = data[int(line_begin[row]) :].partition(b"\n")[0]  # noqa: B023 (called now)
                return _line_detail(line, options)

            rows_of = {
                fault: np.flatnonzero(status == i) for i, fault in enumerate(_LINE_FAULTS, 1)
            }
            found = [(int(rows[0]), fault) for fault, rows in rows_of.items() if len(rows)]
            for _, fault in sorted(found):  # the first line that stops the build comes first
                faults.record_rows(fault, rows_of[fault], block.place, detail)
            yield block.select(status == 0).checked(faults, known_utf8=True)


def _values(
    block: TextBlock, lines: NDArray[np.uint8], key: str, kind: str
) -> tuple[TextBlock, NDArray[np.bool_]]:
    """The values of another key of the block's lines, and which lines have none."""
    text, offsets, status, _ = _core.extract_jsonl(lines, key, kind)
    return dataclasses.replace(block, text=text, offsets=offsets), status != 0


def _with_values_beside(
    block: TextBlock, lines: NDArray[np.uint8], beside: tuple[tuple[str, str], ...]
) -> TextBlock:
    """The block, conversations as objects where their lines have more to say."""
    values = {name: _values(block, lines, key, "any")[0].strings() for name, key in beside}
    if not {"", "null"}.issuperset(itertools.chain(*values.values())):
        chats = TextBlock.of_texts(chats_of(block.strings(), values))
        block = dataclasses.replace(block, text=chats.text, offsets=chats.offsets)
    return block


def _line_detail(line: bytes, options: ReadOptions) -> str:
    """Message of Python's own parser about a line that was refused."""
    try:
        record = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        return f"{error}; {_WANTED}" if line.strip() in (b"[", b"{") else str(error)
    if not isinstance(record, dict):
        return f"the line holds {json_kind(record)}; {_WANTED}"
    for key, option in options.keys().items():
        if key_path(record, key) is None:
            names = ", ".join(sorted(key_names(record))[:_SHOWN]) or "none"
            return f"there is no key {key!r} among: {names}; see {option}"
    found: object = record
    for name in key_path(record, options.json_key) or ():
        found = found[name]  # type: ignore[index]
    wanted = list if options.values == "lists" else str
    if not isinstance(found, wanted):
        return f"{options.json_key!r} holds {json_kind(found)}, not {json_kind(wanted())}"
    return "it holds half of a surrogate pair, values over 900 deep, or no scalar as split key"


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
