"""Pieces of input files -> blocks of documents, each format in its own function.

A piece is what one worker reads: a byte range of a .jsonl file, a range of row groups of a parquet
file, or a whole file where it cannot be entered in the middle.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megapack import _core
from megapack.errors import ConfigError, DataError
from megapack.tokenization.blocks import TextBlock
from megapack.tokenization.faults import Faults, Place
from megapack.tokenization.lines import line_blocks, open_stream
from megapack.tokenization.optional import require
from megapack.tokenization.sources import Format

__all__ = ["Piece", "ReadOptions", "open_parquet", "read_blocks"]

# LineStatus of csrc/core/jsonl.hpp, from 1 on.
_LINE_FAULTS = (
    "blank line",
    "malformed JSON",
    "not a JSON object",
    "missing key",
    "wrong type",
    "invalid UTF-8",
)


class Piece(NamedTuple):
    """Bytes (jsonl), row groups (parquet) or all (the others) of one file: ``[begin, end)``."""

    path: str
    format: Format
    begin: int
    end: int


@dataclass(frozen=True, kw_only=True)
class ReadOptions:
    """How documents are found in files."""

    json_key: str = "text"  # also the parquet column
    block_bytes: int = 4 << 20  # of text in one block; memory follows it
    max_document_bytes: int = 1 << 30  # a longer line or file is a fault ("too long")

    def __post_init__(self) -> None:
        if not 1 << 10 <= self.block_bytes <= self.max_document_bytes:
            raise ConfigError(
                f"block_bytes {self.block_bytes} must lie between 1024 and max_document_bytes "
                f"{self.max_document_bytes}"
            )


def read_blocks(
    pieces: Iterable[Piece], options: ReadOptions, faults: Faults
) -> Iterator[TextBlock]:
    """The documents of ``pieces``, in order, as blocks without empty or invalid documents.

    Raises:
        DataError: a fault, where ``faults`` does not skip; a damaged file.
        OSError: a file cannot be read.
    """
    for is_text, group in itertools.groupby(pieces, lambda piece: piece.format == "text"):
        if is_text:
            yield from _read_texts([piece.path for piece in group], options, faults)
            continue
        for piece in group:
            read = _read_parquet if piece.format == "parquet" else _read_jsonl
            yield from read(piece, options, faults)


def _read_jsonl(piece: Piece, options: ReadOptions, faults: Faults) -> Iterator[TextBlock]:
    # Inside a compressed file a byte position leads nowhere; count lines there instead.
    counts_lines = piece.format != "jsonl"
    locate = functools.partial(Place, piece.path, "line" if counts_lines else "byte")
    lines_before = 0

    def on_long_line(position: int) -> None:
        nonlocal lines_before
        lines_before += 1
        faults.record(
            "too long",
            locate(lines_before if counts_lines else position),
            f"a line of more than {options.max_document_bytes:,} bytes; see --max-document-bytes",
        )

    with open_stream(piece.path, piece.format) as stream:
        for position, data in line_blocks(
            stream,
            begin=piece.begin,
            end=None if counts_lines else piece.end,
            block_bytes=options.block_bytes,
            max_line_bytes=options.max_document_bytes,
            on_long_line=on_long_line,
        ):
            lines = np.frombuffer(data, np.uint8)
            text, offsets, status, line_begin = _core.extract_jsonl(lines, options.json_key)
            positions = line_begin + position
            if counts_lines:
                positions = np.arange(1, len(status) + 1) + lines_before
                lines_before += len(status)
            block = TextBlock(text, offsets, positions, locate)
            if status.any():
                for i in np.flatnonzero(status):
                    line = data[int(line_begin[i]) :].partition(b"\n")[0]
                    _record_line(block.place(int(i)), status[i], line, options.json_key, faults)
                block = block.select(status == 0)
            yield block.checked(faults, known_utf8=True)


def _record_line(place: Place, status: int, line: bytes, key: str, faults: Faults) -> None:
    detail = _line_detail(line, key) if faults.on_error == "fail" else ""
    faults.record(_LINE_FAULTS[status - 1], place, detail)


def _line_detail(line: bytes, key: str) -> str:
    """What Python's own parser says about a line that was refused."""
    try:
        record = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        return str(error)
    if not isinstance(record, dict):
        return f"the line holds a {type(record).__name__}"
    if key not in record:
        keys = ", ".join(sorted(record)[:8])
        return f"there is no key {key!r} among: {keys or 'none'}; see --json-key"
    value = record[key]
    if isinstance(value, str):
        return f"{key!r} holds half of a surrogate pair"
    return f"{key!r} holds a {type(value).__name__}, not a string"


def _read_texts(paths: Iterable[str], options: ReadOptions, faults: Faults) -> Iterator[TextBlock]:
    names: list[str] = []
    texts: list[bytes] = []
    size = 0
    for path in paths:
        text = _read_text(path, options, faults)
        if text is None:
            continue
        names.append(path)
        texts.append(text)
        size += len(text)
        if size >= options.block_bytes:
            yield _text_block(names, texts).checked(faults, known_utf8=False)
            names, texts, size = [], [], 0
    if names:
        yield _text_block(names, texts).checked(faults, known_utf8=False)


def _read_text(path: str, options: ReadOptions, faults: Faults) -> bytes | None:
    with Path(path).open("rb") as file:
        text = file.read(options.max_document_bytes + 1)
    if len(text) > options.max_document_bytes:
        limit = f"a file of more than {options.max_document_bytes:,} bytes"
        faults.record("too long", Place(path, "file"), f"{limit}; see --max-document-bytes")
        return None
    return text.removeprefix(b"\xef\xbb\xbf")


def _text_block(names: list[str], texts: list[bytes]) -> TextBlock:
    offsets = np.zeros(len(texts) + 1, np.int64)
    np.cumsum([len(text) for text in texts], out=offsets[1:])
    flat = np.frombuffer(b"".join(texts), np.uint8)
    return TextBlock(flat, offsets, np.arange(len(texts)), lambda i: Place(names[i], "file"))


def _read_parquet(piece: Piece, options: ReadOptions, faults: Faults) -> Iterator[TextBlock]:
    locate = functools.partial(Place, piece.path, "row")
    with open_parquet(piece.path) as file:
        column = _parquet_column(file, piece.path, options.json_key)
        rows_before = sum(file.metadata.row_group(i).num_rows for i in range(piece.begin))
        for batch in file.iter_batches(
            batch_size=_rows_per_block(file, piece, column, options.block_bytes),
            row_groups=list(range(piece.begin, piece.end)),
            columns=[options.json_key],
        ):
            text, offsets, missing = _arrow_text(batch.column(0))
            positions = np.arange(len(offsets) - 1) + rows_before
            rows_before += len(positions)
            block = TextBlock(text, offsets, positions, locate)
            block = block.drop(missing, "missing value", faults)
            yield block.checked(faults, known_utf8=False)


def open_parquet(path: str) -> Any:
    """A pyarrow ParquetFile. Damage is a DataError that names the file."""
    pyarrow = require("pyarrow", "parquet", f"reading {path}")
    parquet = require("pyarrow.parquet", "parquet", f"reading {path}")
    try:
        return parquet.ParquetFile(path)
    except pyarrow.ArrowInvalid as error:
        raise DataError(f"{path} is not a parquet file ({error})") from error


def _parquet_column(file: Any, path: str, name: str) -> int:
    schema = file.schema_arrow
    if name not in schema.names:
        raise DataError(
            f"{path}: there is no column {name!r} among: {', '.join(schema.names)}; see --json-key"
        )
    kind = str(schema.field(name).type)
    if not any(word in kind for word in ("string", "binary")) or "list" in kind:
        raise DataError(f"{path}: column {name!r} holds {kind}; it must hold strings")
    columns = [file.schema.column(i).path for i in range(len(file.schema))]
    return int(columns.index(name))


def _rows_per_block(file: Any, piece: Piece, column: int, block_bytes: int) -> int:
    groups = [file.metadata.row_group(i) for i in range(piece.begin, piece.end)]
    rows = sum(group.num_rows for group in groups)
    size = sum(group.column(column).total_uncompressed_size for group in groups)
    return int(max(1, min(rows, rows * block_bytes // max(size, 1))))


def _arrow_text(
    array: Any,
) -> tuple[NDArray[np.uint8], NDArray[np.int64], NDArray[np.bool_]]:
    """(text, offsets, missing) of an arrow array of strings; text is a view where it can be."""
    pyarrow = require("pyarrow", "parquet", "reading parquet")
    if array.type not in (pyarrow.large_string(), pyarrow.large_binary()):
        array = array.cast(pyarrow.large_binary())
    missing = np.asarray(array.is_null())
    if missing.any():
        array = array.fill_null(b"" if pyarrow.types.is_large_binary(array.type) else "")
    _, bounds, data = array.buffers()
    offsets = np.frombuffer(bounds, np.int64)[array.offset : array.offset + len(array) + 1]
    text = np.frombuffer(data, np.uint8) if data is not None else np.zeros(0, np.uint8)
    return text[offsets[0] : offsets[-1]], offsets - offsets[0], missing
