"""Documents of parquet files: a column of strings, or of lists of messages."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from megapack.errors import DataError
from megapack.optional import require
from megapack.tokenization.corpus.blocks import TextBlock
from megapack.tokenization.corpus.faults import Faults, Place
from megapack.tokenization.corpus.pieces import InputFile, Piece, ReadOptions
from megapack.tokenization.corpus.streams import require_unchanged

__all__ = ["open_parquet", "read_parquet", "text_bytes"]

_TEXT_TYPES = ("string", "large_string", "string_view", "binary", "large_binary", "binary_view")
_LIST_TYPES = ("list<", "large_list<", "list_view<", "large_list_view<", "fixed_size_list<")
_SHOWN = 8  # columns, where the one that was asked for is not there


def read_parquet(piece: Piece, options: ReadOptions, faults: Faults) -> Iterator[TextBlock]:
    """The documents of a range of row groups, a block of rows at a time."""
    path = piece.file.path
    locate = functools.partial(Place, path, "row")
    keys = options.keys()
    with open_parquet(piece.file) as file:
        columns = [_find_column(file.schema_arrow, key, keys[key], path) for key in keys]
        beside = {name: _names(file.schema_arrow, key) for name, key in options.beside}
        present = {name: names for name, names in beside.items() if names is not None}
        rows_before = sum(file.metadata.row_group(i).num_rows for i in range(piece.begin))
        for batch in _batches(file, piece, options, [*columns, *present.values()]):
            more = {name: _column(batch, names).to_pylist() for name, names in present.items()}
            text, offsets, missing = _arrow_text(_column(batch, columns[0]), path, options, more)
            positions = np.arange(len(offsets) - 1) + rows_before
            rows_before += len(positions)
            block = TextBlock(text, offsets, positions, locate)
            if options.split_key is not None:
                hashes, no_key = _hashes(_column(batch, columns[-1]))
                block = dataclasses.replace(block, hashes=hashes)
                missing |= no_key
            block = block.drop(missing, "missing value", faults)
            too_long = np.diff(block.offsets) > options.max_document_bytes
            block = block.drop(too_long, "too long", faults)
            yield block.checked(faults, known_utf8=False)


def open_parquet(file: InputFile) -> Any:
    """A pyarrow ParquetFile. Damage is a DataError that names the file."""
    pyarrow = require("pyarrow", f"reading {file.path}")
    parquet = require("pyarrow.parquet", f"reading {file.path}")
    require_unchanged(file, Path(file.path).stat())
    try:
        return parquet.ParquetFile(file.path, page_checksum_verification=True)
    except pyarrow.ArrowInvalid as error:
        raise DataError(f"{file.path} is not a parquet file ({error})") from error


def text_bytes(group: Any, key: str) -> int:
    """Uncompressed bytes of a column (with all that is nested in it) of a row group."""
    columns = [group.column(i) for i in range(group.num_columns)]
    return sum(
        int(column.total_uncompressed_size)
        for column in columns
        if f"{column.path_in_schema}.".startswith(f"{key}.")
    )


def _batches(
    file: Any, piece: Piece, options: ReadOptions, columns: Sequence[Sequence[str]]
) -> Iterator[Any]:
    pyarrow = require("pyarrow", "reading parquet")
    groups = range(piece.begin, piece.end)
    metadata = [file.metadata.row_group(i) for i in groups]
    rows = sum(group.num_rows for group in metadata)
    size = sum(text_bytes(group, options.json_key) for group in metadata)
    try:
        yield from file.iter_batches(
            batch_size=max(1, min(rows, rows * options.block_bytes // max(size, 1))),
            row_groups=list(groups),
            columns=[".".join(column) for column in columns],
        )
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{piece.file.path} is damaged ({error}); fetch it again") from error


def _find_column(schema: Any, key: str, option: str, path: str) -> list[str]:
    """The column's name, behind those of the structs in which it lies."""
    names = _names(schema, key)
    if names is None:
        known = ", ".join(_leaves(schema)[:_SHOWN])
        raise DataError(f"{path}: there is no column {key!r} among: {known}; see {option}")
    if schema.names.count(names[0]) > 1:
        raise DataError(f"{path}: there is more than one column {names[0]!r}; name them apart")
    return names


def _names(fields: Any, key: str) -> list[str] | None:
    """As csrc/core/text/jsonl.cpp finds a key: all of it, else its first part and the rest."""
    first, dot, rest = key.partition(".")
    types = {field.name: field.type for field in fields}
    if key in types:
        return [key]
    if not dot or not _is_struct(types.get(first)):
        return None
    below = _names(types[first], rest)
    return None if below is None else [first, *below]


def _leaves(fields: Any) -> list[str]:
    leaves = []
    for field in fields:
        inner = _leaves(field.type) if _is_struct(field.type) else []
        leaves += [f"{field.name}.{name}" for name in inner] or [field.name]
    return leaves


def _is_struct(type: Any) -> bool:
    return str(type).startswith("struct<")


def _column(batch: Any, names: Sequence[str]) -> Any:
    compute = require("pyarrow.compute", "reading parquet")
    column = batch.column(names[0])
    return compute.struct_field(column, list(names[1:])) if names[1:] else column


def _arrow_text(
    array: Any, path: str, options: ReadOptions, beside: Mapping[str, list[Any]]
) -> tuple[NDArray[np.uint8], NDArray[np.int64], NDArray[np.bool_]]:
    """(text, offsets, missing) of an arrow array; text is a view where it can be.

    Lists of messages become JSON, the form in which .jsonl has them.
    """
    pyarrow = require("pyarrow", f"reading {path}")
    if pyarrow.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    kind, lists = str(array.type), options.values == "lists"
    if not kind.startswith(_LIST_TYPES) if lists else kind not in _TEXT_TYPES:
        wanted = "lists of messages" if lists else "strings"
        raise DataError(f"{path}: column {options.json_key!r} holds {kind}; it must hold {wanted}")
    if lists:
        rows = [
            None if row is None else json.dumps(_with_values_beside(row, i, beside), default=str)
            for i, row in enumerate(array.to_pylist())
        ]
        array = pyarrow.array(rows, pyarrow.large_string())
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


def _with_values_beside(messages: Any, row: int, beside: Mapping[str, list[Any]]) -> Any:
    """As jsonl.py has it: an object where the row has more to say."""
    more = {name: column[row] for name, column in beside.items() if column[row] is not None}
    return {"messages": messages, **more} if more else messages


def _hashes(column: Any) -> tuple[NDArray[np.uint64], NDArray[np.bool_]]:
    """Hashes of a column's values as text, and which rows have none."""
    values = column.to_pylist()
    missing = np.array([value is None for value in values], np.bool_)
    hashes = [xxhash.xxh3_64_intdigest(str(value).encode("utf-8")) for value in values]
    return np.array(hashes, np.uint64), missing
