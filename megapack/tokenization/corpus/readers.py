"""Input files -> shards of pieces -> blocks of documents.

- plan_shards: divides files into shards; one worker reads a shard and writes it as one dataset. The
  bounds depend on the files and ``shard_bytes``, never on the number of workers or machines
- read_blocks: the documents of pieces of any format (tables.py reads tables)
- line_blocks: whole lines of a range of bytes of a stream

A file of 3 lines of 40 bytes, in shards of 50 bytes: the pieces are bytes [0, 50), [50, 100) and
[100, 120). A line belongs to the piece in which it begins, at byte 0, 40 or 80:

    [block.strings() for shard in shards for block in read_blocks(shard.pieces, options, faults)]
    # -> [["first", "second"], ["third"]]; no line begins in the last piece
"""

from __future__ import annotations

import contextlib
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
from megapack.errors import ConfigError, DataError
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
from megapack.tokenization.corpus.streams import TABLES, InputFile, Piece, open_stream
from megapack.tokenization.corpus.tables import open_table, read_table

# Approximate growth of text by decompression. It only affects the balance of shards.
_EXPANSION = {"": 1, "gz": 3, "zst": 3}

MIN_SHARD_BYTES = 1 << 20
_MAX_SHARD_BYTES = 256 << 20
_WANTED_SHARDS = 64


@dataclass(frozen=True, slots=True)
class Shard:
    """Consecutive pieces of the corpus with about ``num_bytes`` of text."""

    pieces: tuple[Piece, ...]
    num_bytes: int


def default_shard_bytes(files: Sequence[InputFile]) -> int:
    """Return a power of two that gives about 64 shards, between 1 MiB and 256 MiB."""
    total = sum(file.size * _EXPANSION[file.compression] for file in files)
    wanted = 1 << max(0, (total // _WANTED_SHARDS)).bit_length()
    return min(max(wanted, MIN_SHARD_BYTES), _MAX_SHARD_BYTES)


def plan_shards(files: Sequence[InputFile], *, shard_bytes: int, json_key: str) -> list[Shard]:
    """Divide ``files``, in order, into shards of about ``shard_bytes``.

    Plain JSON Lines files are cut at any byte (readers skip to the next line), parquet files
    between row groups, Arrow files between record batches. Other files are not cut, so a shard may
    be larger than ``shard_bytes``. Raises ConfigError if ``shard_bytes`` is not positive, and
    DataError if a parquet or Arrow file is damaged.
    """
    if shard_bytes < 1:
        raise ConfigError(f"the shard size is {shard_bytes} bytes; it must be at least 1")
    shards: list[Shard] = []
    pieces: list[Piece] = []
    filled = 0
    for file in files:
        remaining = _parts(file, json_key)
        while remaining:
            piece, weight = remaining.pop()
            if file.format == "jsonl" and not file.compression:
                cut = min(piece.end, piece.begin + shard_bytes - filled)
                if cut < piece.end:
                    remaining.append((piece._replace(begin=cut), piece.end - cut))
                piece, weight = piece._replace(end=cut), cut - piece.begin
            last = pieces[-1] if pieces else None
            if last is not None and (last.file, last.end) == (file, piece.begin):
                pieces[-1] = last._replace(end=piece.end)  # consecutive groups of rows
            else:
                pieces.append(piece)
            filled += weight
            if filled >= shard_bytes:
                shards.append(Shard(tuple(pieces), filled))
                pieces, filled = [], 0
    return [*shards, Shard(tuple(pieces), filled)] if pieces else shards


def _parts(file: InputFile, json_key: str) -> list[tuple[Piece, int]]:
    """Return the indivisible parts of a file and their bytes of text, the last part first."""
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
    """Yield the documents of ``pieces``, in order, as blocks without empty or invalid documents.
    Raises DataError for a damaged file, or a faulty document that ``faults`` does not skip, and
    OSError for a file that cannot be read."""
    for is_text, group in itertools.groupby(pieces, lambda piece: piece.file.format == "text"):
        if is_text:
            yield from _read_texts([piece.file for piece in group], options, faults)
            continue
        for piece in group:
            read = read_table if piece.file.format in TABLES else read_jsonl_blocks
            yield from read(piece, options, faults)


# ---- Text files: one document each --------------------------------------------------------------

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
    # A read of more bytes than a small file has costs more than the file.
    num_bytes = options.block_bytes if file.compression else min(options.block_bytes, file.size + 1)
    with open_stream(file) as stream:
        while size <= options.max_document_bytes and (part := stream.read(num_bytes)):
            parts.append(part)
            size += len(part)
            if not file.compression and len(part) < num_bytes:
                break
    place = Place(file.path, "file")
    if size > options.max_document_bytes:
        limit = f"a file of more than {options.max_document_bytes:,} bytes"
        faults.record("too long", place, f"{limit}; see --max-document-bytes")
        return None
    text = b"".join(parts)
    if b"\0" in text:
        faults.record("NUL bytes", place, "it is binary, or UTF-16: convert it with iconv -t UTF-8")
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

_WANTED = "each line must be an object: convert an array with jq -c '.[]'"
_SHOWN = 8  # keys in a message about a missing key


def read_jsonl_blocks(piece: Piece, options: ReadOptions, faults: Faults) -> Iterator[TextBlock]:
    """Yield the documents of a piece, one block of lines at a time. Raises as ``read_blocks``."""
    # A byte position is useless in a compressed file: count lines.
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
            if options.extra_keys:
                block = _with_extra_values(block, lines, options.extra_keys)
            values = {
                name: _values(block, lines, key, "any")[0].strings()
                for name, key in options.value_keys
            }
            block = dataclasses.replace(block, values=values)
            if options.split_key is not None:
                keys, no_key = _values(block, lines, options.split_key, "scalars")
                block = dataclasses.replace(block, hashes=keys.text_hashes())
                status[(status == 0) & no_key] = len(_LINE_FAULTS)
            if options.group_key is not None:
                keys, no_key = _values(block, lines, options.group_key, "scalars")
                block = block.in_groups(keys.text_hashes(), no_key)

            def detail(row: int) -> str:
                line = data[int(line_begin[row]) :].partition(b"\n")[0]  # noqa: B023 (called now)
                if name := _chat_key(line, options):
                    raise DataError(
                        f"{block.place(row)}: {name!r} is a list of messages, and --json-key "  # noqa: B023
                        f"{options.json_key} reads text: `tokenize` reads chats with "
                        f"--messages-key {name}"
                    )
                return _line_detail(line, options)

            rows_of = {f: np.flatnonzero(status == i) for i, f in enumerate(_LINE_FAULTS, 1)}
            first_rows = [(int(rows[0]), fault) for fault, rows in rows_of.items() if len(rows)]
            for _, fault in sorted(first_rows):  # report the first faulty line
                faults.record_rows(fault, rows_of[fault], block.place, detail)
            yield block.select(status == 0).checked(faults, known_utf8=True)


def _values(
    block: TextBlock, lines: NDArray[np.uint8], key: str, kind: str
) -> tuple[TextBlock, NDArray[np.bool_]]:
    """Return the values of another key of the block's lines, and a mask of lines without it."""
    text, offsets, status, _ = _core.extract_jsonl(lines, key, kind)
    return dataclasses.replace(block, text=text, offsets=offsets), status != 0


def _with_extra_values(
    block: TextBlock, lines: NDArray[np.uint8], extra_keys: tuple[tuple[str, str], ...]
) -> TextBlock:
    """Return the block with conversations as objects if a line has one of ``extra_keys``."""
    values = {name: _values(block, lines, key, "any")[0].strings() for name, key in extra_keys}
    if not {"", "null"}.issuperset(itertools.chain(*values.values())):
        chats = TextBlock.of_texts(chats_of(block.strings(), values))
        block = dataclasses.replace(block, text=chats.text, offsets=chats.offsets)
    return block


def _chat_key(line: bytes, options: ReadOptions) -> str | None:
    """Return the key of a list of messages in a line without text under ``json_key``, or None."""
    with contextlib.suppress(ValueError, RecursionError):
        record = json.loads(line)
        if not isinstance(record, dict) or options.values != "strings":
            return None
        missing = key_path(record, options.json_key) is None
        for name in record if missing else record.keys() & {options.json_key}:
            items = record[name]
            first = items[0] if isinstance(items, list) and items else None
            if isinstance(first, dict) and {"role", "from"} & first.keys():
                return str(name)
    return None


def _value(record: object, key: str) -> object:
    for name in key_path(record, key) or ():
        record = record[name]  # type: ignore[index]
    return record


def _line_detail(line: bytes, options: ReadOptions) -> str:
    """Explain why a line was refused; for malformed JSON, with the message of Python's parser."""
    try:
        record = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        return f"{error}; {_WANTED}" if line.strip() in (b"[", b"{") else str(error)
    if not isinstance(record, dict):
        return f"the line is {json_kind(record)}; {_WANTED}"
    wanted = list if options.values == "lists" else str
    for key, option in options.keys().items():
        if key_path(record, key) is None:
            names = ", ".join(sorted(key_names(record))[:_SHOWN]) or "none"
            fitting = [n for n in key_names(record) if isinstance(_value(record, n), wanted)]
            is_clear = key == options.json_key and len(fitting) == 1
            remedy = f"for this one give {option} {fitting[0]}" if is_clear else f"see {option}"
            return f"key {key!r} is missing among: {names}; {remedy}"
    value = _value(record, options.json_key)
    if not isinstance(value, wanted):
        return f"{options.json_key!r} is {json_kind(value)}, not {json_kind(wanted())}"
    return "it has half a surrogate pair, over 900 nested values, or a non-scalar split key"


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
    """Yield blocks ``(position, data)`` of whole lines; ``position`` is that of data's first byte.

    Yields the lines that start in bytes ``[begin, end)`` (None: to the end of the file), so
    consecutive ranges of a file yield each line once. A byte order mark at the start of the file is
    dropped. ``stream`` is seekable if ``begin`` is above 0. ``block_bytes`` is the approximate size
    of a block; a longer line makes its block longer. A line above ``max_line_bytes`` is dropped;
    ``on_long_line(position)`` is called.
    """
    position = _line_start(stream, begin)  # of the pending line
    parts: list[bytes] = []  # of the pending line, joined when its end is read
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


def _whole_lines(chunk: bytes, limit: int | None) -> int:
    """Return the length of the whole lines of ``chunk`` that start in its first ``limit`` bytes."""
    if limit is not None and len(chunk) >= limit:
        if limit <= 0:
            return 0
        last = chunk.find(b"\n", limit - 1)
        if last >= 0:
            return last + 1
    return chunk.rfind(b"\n") + 1


def _without_bom(position: int, data: bytes) -> tuple[int, bytes]:
    if position == 0 and data.startswith(_BOM):
        return len(_BOM), data[len(_BOM) :]
    return position, data


def _line_start(stream: BinaryIO, begin: int) -> int:
    """Move the stream to the first line that starts at ``begin`` or later; return its position."""
    if begin == 0:
        return 0
    position = stream.seek(begin - 1)
    while block := stream.read(_SEARCH_BYTES):
        newline = block.find(b"\n")
        if newline >= 0:
            return stream.seek(position + newline + 1)
        position += len(block)
    return position
