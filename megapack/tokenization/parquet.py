"""Documents of parquet files: a column of strings, or of lists of messages."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from megapack.errors import DataError
from megapack.tokenization.blocks import TextBlock
from megapack.tokenization.faults import Faults, Place
from megapack.tokenization.optional import require
from megapack.tokenization.pieces import InputFile, Piece, ReadOptions
from megapack.tokenization.streams import require_unchanged

__all__ = ["open_parquet", "read_parquet", "text_bytes"]

_TEXT_TYPES = ("string", "large_string", "string_view", "binary", "large_binary", "binary_view")


def read_parquet(piece: Piece, options: ReadOptions, faults: Faults) -> Iterator[TextBlock]:
    """The documents of a range of row groups, a block of rows at a time."""
    locate = functools.partial(Place, piece.file.path, "row")
    columns = [options.json_key]
    if options.split_key is not None and options.split_key not in columns:
        columns.append(options.split_key)
    with open_parquet(piece.file) as file:
        for name in columns:
            _require_column(file, piece.file.path, name)
        rows_before = sum(file.metadata.row_group(i).num_rows for i in range(piece.begin))
        for batch in file.iter_batches(
            batch_size=_rows_per_block(file, piece, options),
            row_groups=list(range(piece.begin, piece.end)),
            columns=columns,
        ):
            column = batch.column(columns[0])
            strings = _as_json(column) if options.values == "lists" else column
            text, offsets, missing = _arrow_text(strings, piece.file.path, options.json_key)
            positions = np.arange(len(offsets) - 1) + rows_before
            rows_before += len(positions)
            block = TextBlock(text, offsets, positions, locate)
            if options.split_key is not None:
                hashes, no_key = _hashes(batch.column(columns[-1]))
                block = dataclasses.replace(block, hashes=hashes)
                missing |= no_key
            block = block.drop(missing, "missing value", faults)
            yield block.checked(faults, known_utf8=False)


def open_parquet(file: InputFile) -> Any:
    """A pyarrow ParquetFile. Damage is a DataError that names the file."""
    pyarrow = require("pyarrow", "parquet", f"reading {file.path}")
    parquet = require("pyarrow.parquet", "parquet", f"reading {file.path}")
    require_unchanged(file, Path(file.path).stat().st_size)
    try:
        return parquet.ParquetFile(file.path)
    except pyarrow.ArrowInvalid as error:
        raise DataError(f"{file.path} is not a parquet file ({error})") from error


def _require_column(file: Any, path: str, name: str) -> None:
    names = file.schema_arrow.names
    if name not in names:
        raise DataError(
            f"{path}: there is no column {name!r} among: {', '.join(names)}; see --json-key"
        )


def _rows_per_block(file: Any, piece: Piece, options: ReadOptions) -> int:
    rows = size = 0
    for i in range(piece.begin, piece.end):
        group = file.metadata.row_group(i)
        rows += group.num_rows
        size += text_bytes(group, options.json_key)
    return max(1, min(rows, rows * options.block_bytes // max(size, 1)))


def text_bytes(group: Any, name: str) -> int:
    """Uncompressed bytes of a column (with all that is nested in it) of a row group."""
    columns = [group.column(i) for i in range(group.num_columns)]
    return sum(
        int(column.total_uncompressed_size)
        for column in columns
        if column.path_in_schema.partition(".")[0] == name
    )


def _as_json(column: Any) -> Any:
    """Lists of messages as JSON, the form in which .jsonl has them."""
    pyarrow = require("pyarrow", "parquet", "reading parquet")
    rows = [None if row is None else json.dumps(row) for row in column.to_pylist()]
    return pyarrow.array(rows, pyarrow.large_string())


def _arrow_text(
    array: Any, path: str, name: str
) -> tuple[NDArray[np.uint8], NDArray[np.int64], NDArray[np.bool_]]:
    """(text, offsets, missing) of an arrow array of strings; text is a view where it can be."""
    pyarrow = require("pyarrow", "parquet", f"reading {path}")
    if pyarrow.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    kind = str(array.type)
    if kind not in _TEXT_TYPES:
        raise DataError(f"{path}: column {name!r} holds {kind}; it must hold strings")
    array = array.cast(pyarrow.large_binary())
    missing = np.array(array.is_null())
    if missing.any():
        array = array.fill_null(b"")
    _, bounds, data = array.buffers()
    if bounds is None:  # an array without rows
        return np.zeros(0, np.uint8), np.zeros(1, np.int64), missing
    offsets = np.frombuffer(bounds, np.int64)[array.offset : array.offset + len(array) + 1]
    text = np.frombuffer(data, np.uint8) if data is not None else np.zeros(0, np.uint8)
    return text[offsets[0] : offsets[-1]], offsets - offsets[0], missing


def _hashes(column: Any) -> tuple[NDArray[np.uint64], NDArray[np.bool_]]:
    """Hashes of a column's values as text, and which rows have none."""
    values = column.to_pylist()
    missing = np.array([value is None for value in values], np.bool_)
    hashes = [xxhash.xxh3_64_intdigest(str(value).encode("utf-8")) for value in values]
    return np.array(hashes, np.uint64), missing
