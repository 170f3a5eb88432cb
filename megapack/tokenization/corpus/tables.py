"""Documents of parquet and Arrow files: a column of strings, or of lists of messages.

Both formats divide a table into consecutive groups of rows: parquet into row groups, Arrow (file
format and stream format) into record batches. A piece is a range of groups.

- open_table: open a file as a table, which returns the sizes and the rows of its groups
- read_table: yield the documents of a piece, block by block
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from megapack.errors import DataError, require
from megapack.tokenization.corpus.documents import (
    Faults,
    Place,
    ReadOptions,
    TextBlock,
    chats_of,
    key_names,
    key_path,
)
from megapack.tokenization.corpus.streams import ARROW_FILE, InputFile, Piece, require_unchanged

_TEXT_TYPES = ("string", "large_string", "string_view", "binary", "large_binary", "binary_view")
_LIST_TYPES = ("list<", "large_list<", "list_view<", "large_list_view<", "fixed_size_list<", "null")
_END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"
_SHOWN = 8  # columns that a message about a missing column lists


def read_table(piece: Piece, options: ReadOptions, faults: Faults) -> Iterator[TextBlock]:
    path = piece.file.path
    locate = functools.partial(Place, path, "row")
    with open_table(piece.file) as table:
        fields = _fields(table.schema)
        columns = [_column_path(table.schema, fields, *key, path) for key in options.keys().items()]
        paths = {name: key_path(fields, key) for name, key in options.extra_keys}
        extra = {name: column for name, column in paths.items() if column is not None}
        paths = {name: key_path(fields, key) for name, key in options.value_keys}
        valued = {name: column for name, column in paths.items() if column is not None}
        group = None
        if options.group_key is not None:
            group = _column_path(table.schema, fields, options.group_key, "--group-key", path)
        read = [*columns, *extra.values(), *valued.values(), *filter(None, [group])]
        names = [".".join(column) for column in read]
        for row, batch in table.batches(piece.begin, piece.end, names, options.block_bytes):
            column = _column(batch, columns[0])
            if options.values == "lists":
                values = {name: _as_json(_column(batch, at)) for name, at in extra.items()}
                column = _chats(column, values, options.json_key, path)
            text, offsets, missing = _arrow_text(column, options.json_key, path)
            block = TextBlock(text, offsets, np.arange(len(offsets) - 1) + row, locate)
            json_values = {name: _as_json(_column(batch, path)) for name, path in valued.items()}
            block = dataclasses.replace(block, values=json_values)
            if options.split_key is not None:
                hashes, no_key = _hashes(_column(batch, columns[-1]))
                block = dataclasses.replace(block, hashes=hashes)
                missing |= no_key
            if group is not None:
                block = block.in_groups(*_hashes(_column(batch, group)))
            block = block.drop(missing, "missing value", faults)
            too_long = np.diff(block.offsets) > options.max_document_bytes
            block = block.drop(too_long, "too long", faults)
            yield block.checked(faults, known_utf8=False)


@contextlib.contextmanager
def open_table(file: InputFile) -> Iterator[_Parquet | _Arrow]:
    """Open a parquet or Arrow file as a table. Raises DataError if it is damaged."""
    pyarrow = require("pyarrow", f"reading {file.path}")
    require_unchanged(file, Path(file.path).stat())
    is_parquet = file.format == "parquet"
    try:
        opened = (_Parquet if is_parquet else _Arrow)(file.path)
    except pyarrow.ArrowInvalid as error:
        name = "a parquet" if is_parquet else "an Arrow"
        raise DataError(f"{file.path} is not {name} file ({error})") from error
    with contextlib.closing(opened):
        try:
            yield opened
        except (pyarrow.ArrowException, OSError) as error:
            raise DataError(f"{file.path} is damaged ({error}); download it again") from error


# A table of either format has a schema (pyarrow.Schema) and these methods:
#   group_bytes: approximate uncompressed bytes of a column, one number per group
#   batches: the rows of groups [begin, end) in parts of about block_bytes: the index of the part's
#       first row in the file, and a record batch of the columns (a.b is field b of struct a)


class _Parquet:
    def __init__(self, path: str) -> None:
        parquet = require("pyarrow.parquet", f"reading {path}")
        self._file = parquet.ParquetFile(path, page_checksum_verification=True)
        metadata = self._file.metadata
        self._groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
        self.schema = self._file.schema_arrow
        self.close = self._file.close

    def group_bytes(self, key: str) -> list[int]:
        # Include columns nested in this one.
        return [
            sum(
                int(column.total_uncompressed_size)
                for column in map(group.column, range(group.num_columns))
                if f"{column.path_in_schema}.".startswith(f"{key}.")
            )
            for group in self._groups
        ]

    def batches(
        self, begin: int, end: int, columns: Sequence[str], block_bytes: int
    ) -> Iterator[tuple[int, Any]]:
        row = sum(group.num_rows for group in self._groups[:begin])
        rows = sum(group.num_rows for group in self._groups[begin:end])
        size = sum(self.group_bytes(columns[0])[begin:end])
        for batch in self._file.iter_batches(
            batch_size=max(1, min(rows, rows * block_bytes // max(size, 1))),
            row_groups=list(range(begin, end)),
            columns=list(columns),
        ):
            yield row, batch
            row += batch.num_rows


class _Arrow:
    def __init__(self, path: str) -> None:
        self._ipc = require("pyarrow.ipc", f"reading {path}")
        pyarrow = require("pyarrow", f"reading {path}")
        self._data = pyarrow.memory_map(path)
        self.close = self._data.close
        self._is_file = self._data.read_at(len(ARROW_FILE), 0) == ARROW_FILE
        if not self._is_file:
            size = self._data.size()
            end = self._data.read_at(len(_END_OF_STREAM), max(0, size - len(_END_OF_STREAM)))
            if end != _END_OF_STREAM:  # pyarrow would accept the truncated file
                raise pyarrow.ArrowInvalid("it is truncated: its stream has no end")
        self.schema = self._open().schema

    def _open(self, **options: Any) -> Any:
        self._data.seek(0)
        how = self._ipc.IpcReadOptions(**options)
        opener = self._ipc.open_file if self._is_file else self._ipc.open_stream
        return opener(self._data, options=how)

    def _groups(self, columns: Sequence[str]) -> Iterator[tuple[int, Any]]:
        """Yield every record batch with the index of its first row."""
        whole = {name if name in self.schema.names else name.partition(".")[0] for name in columns}
        fields = [i for i, name in enumerate(self.schema.names) if name in whole]
        reader = self._open(included_fields=fields)
        if self._is_file:
            reader = map(reader.get_batch, range(reader.num_record_batches))
        row = 0
        for batch in reader:
            yield row, batch
            row += batch.num_rows

    def group_bytes(self, key: str) -> list[int]:
        return [batch.nbytes for _, batch in self._groups([key])]

    def batches(
        self, begin: int, end: int, columns: Sequence[str], block_bytes: int
    ) -> Iterator[tuple[int, Any]]:
        for row, batch in itertools.islice(self._groups(columns), begin, end):
            step = max(1, batch.num_rows * block_bytes // max(batch.nbytes, 1))
            for first in range(0, batch.num_rows, step):
                yield row + first, batch.slice(first, step)


def _fields(schema: Any) -> dict[str, Any]:
    """Return the columns by name: None, or for a struct its fields in the same form."""
    is_struct = require("pyarrow", "reading a table").types.is_struct
    return {f.name: _fields(f.type) if is_struct(f.type) else None for f in schema}


def _column_path(
    schema: Any, fields: dict[str, Any], key: str, option: str, path: str
) -> list[str]:
    """Return the path of a column: the names of the structs that contain it, then its own name."""
    names = key_path(fields, key)
    if names is None:
        known = ", ".join(key_names(fields)[:_SHOWN])
        for folder in PurePath(path).parts[:-1]:
            if folder.startswith(f"{key}="):
                raise DataError(
                    f"{path}: {key!r} is a folder of the path ({folder}), not a column of the "
                    f"file; give {option} one of: {known}"
                )
        types = _TEXT_TYPES if option == "--json-key" else _LIST_TYPES
        fitting = [field.name for field in schema if str(field.type).startswith(types)]
        is_clear = option in ("--json-key", "--messages-key") and len(fitting) == 1
        remedy = f"give {option} {fitting[0]}" if is_clear else f"see {option}"
        raise DataError(f"{path}: column {key!r} is missing among: {known}; {remedy}")
    if schema.names.count(names[0]) > 1:
        raise DataError(f"{path}: there are several columns {names[0]!r}; rename all but one")
    return names


def _column(batch: Any, names: Sequence[str]) -> Any:
    pyarrow = require("pyarrow", "reading a table")
    column = batch.column(names[0])
    if names[1:]:
        compute = require("pyarrow.compute", "reading a table")
        column = compute.struct_field(column, list(names[1:]))
    return column.dictionary_decode() if pyarrow.types.is_dictionary(column.type) else column


def _as_json(column: Any) -> list[str]:
    """Return each value as JSON; values without a JSON type (times, bytes) as strings."""

    def text(value: object) -> str:  # invalid UTF-8 becomes surrogates, which readers report
        return value.decode(errors="surrogateescape") if isinstance(value, bytes) else str(value)

    return [json.dumps(value, default=text) for value in column.to_pylist()]


def _chats(column: Any, extra: dict[str, list[str]], key: str, path: str) -> Any:
    """Return conversations as JSON, as .jsonl files contain it; null for rows without one."""
    pyarrow = require("pyarrow", f"reading {path}")
    if not str(column.type).startswith(_LIST_TYPES):
        raise DataError(f"{path}: column {key!r} has type {column.type}, not lists of messages")
    messages = ["" if row == "null" else row for row in _as_json(column)]
    chats = [chat or None for chat in chats_of(messages, extra)]
    return pyarrow.array(chats, pyarrow.large_string())


def _arrow_text(
    array: Any, key: str, path: str
) -> tuple[NDArray[np.uint8], NDArray[np.int64], NDArray[np.bool_]]:
    """Return (text, offsets, missing) of an Arrow array; text shares its memory if possible."""
    pyarrow = require("pyarrow", f"reading {path}")
    if str(array.type) not in (*_TEXT_TYPES, "null"):  # null: no row has a value
        raise DataError(f"{path}: column {key!r} has type {array.type}; it must have strings")
    array = array.cast(pyarrow.large_binary())
    missing = np.array(array.is_null())
    if missing.any():
        array = array.fill_null(b"")
    _, bounds, data = array.buffers()
    if bounds is None:  # no rows
        return np.zeros(0, np.uint8), np.zeros(1, np.int64), missing
    offsets = np.frombuffer(bounds, np.int64)[array.offset : array.offset + len(array) + 1]
    text = np.frombuffer(data, np.uint8) if data is not None else np.zeros(0, np.uint8)
    return text[offsets[0] : offsets[-1]], offsets - offsets[0], missing


def _hashes(column: Any) -> tuple[NDArray[np.uint64], NDArray[np.bool_]]:
    """Return the hash of each value, equal to .jsonl's, and a mask of rows without a scalar."""
    values = column.to_pylist()
    missing = np.array([v is None or isinstance(v, list | dict) for v in values], np.bool_)
    texts = [str(v).lower() if isinstance(v, bool) else v for v in values]
    data = [v if isinstance(v, bytes) else str(v).encode("utf-8") for v in texts]
    return np.array([*map(xxhash.xxh3_64_intdigest, data)], np.uint64), missing
