"""Pieces of input files -> blocks of documents."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any, BinaryIO, Protocol

import numpy as np
import xxhash
from numpy.typing import NDArray

from megapack import _core
from megapack.errors import DataError, require
from megapack.tokenization.corpus.documents import Faults, Place, TextBlock, json_kind
from megapack.tokenization.corpus.inputs import ARROW_FILE, open_stream, require_unchanged
from megapack.tokenization.corpus.pieces import TABLES, InputFile, Piece, ReadOptions

# ---- Blocks of whole lines from streams that may be large, or entered in the middle -------------

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


# ---- Documents of JSON Lines, plain, .gz or .zst ------------------------------------------------

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

_NOTHING = object()
_WANTED = "one object per line is wanted, as jq -c '.[]' writes an array"
_SHOWN = 8  # keys, where the one that was asked for is not there


def read_jsonl(piece: Piece, options: ReadOptions, faults: Faults) -> Iterator[TextBlock]:
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
            text, offsets, status, line_begin = _core.extract_jsonl(
                lines, options.json_key, options.values
            )
            positions = line_begin + position
            if counts_lines:
                positions = np.arange(1, len(status) + 1) + lines_before
                lines_before += len(status)
            block = TextBlock(text, offsets, positions, locate)
            if options.beside:
                block = _with_values_beside(block, lines, options.beside)
            if options.split_key is not None:
                block, no_key = _with_hashes(block, lines, options.split_key)
                status[(status == 0) & no_key] = len(_LINE_FAULTS)

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


def _with_hashes(
    block: TextBlock, lines: NDArray[np.uint8], key: str
) -> tuple[TextBlock, NDArray[np.bool_]]:
    """The block with hashes of ``key``, and which documents do not have it."""
    text, offsets, status, _ = _core.extract_jsonl(lines, key, "scalars")
    keys = dataclasses.replace(block, text=text, offsets=offsets)
    return dataclasses.replace(block, hashes=keys.text_hashes()), status != 0


def _with_values_beside(
    block: TextBlock, lines: NDArray[np.uint8], beside: tuple[tuple[str, str], ...]
) -> TextBlock:
    """The block, conversations as objects where their lines have more to say; null says nothing."""
    values: list[list[str]] = [[] for _ in range(len(block))]
    for name, key in beside:
        text, offsets, _, _ = _core.extract_jsonl(lines, key, "any")
        found = dataclasses.replace(block, text=text, offsets=offsets).strings()
        for i, value in enumerate(found):
            if value not in ("", "null"):
                values[i].append(f"{json.dumps(name)}: {value}")
    if not any(values):
        return block
    pairs = zip(block.strings(), values, strict=True)
    texts = [
        f'{{"messages": {messages}, {", ".join(more)}}}' if messages and more else messages
        for messages, more in pairs
    ]
    composed = TextBlock.of_strings(texts)
    return dataclasses.replace(block, text=composed.text, offsets=composed.offsets)


def _line_detail(line: bytes, options: ReadOptions) -> str:
    """What Python's own parser says about a line that was refused."""
    try:
        record = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        return f"{error}; {_WANTED}" if line.strip() in (b"[", b"{") else str(error)
    if not isinstance(record, dict):
        return f"the line holds {json_kind(record)}; {_WANTED}"
    for key, option in options.keys().items():
        if _value_at(record, key) is _NOTHING:
            names = ", ".join(_names(record)[:_SHOWN]) or "none"
            return f"there is no key {key!r} among: {names}; see {option}"
    found, wanted = _value_at(record, options.json_key), list if options.values == "lists" else str
    if not isinstance(found, wanted):
        return f"{options.json_key!r} holds {json_kind(found)}, not {json_kind(wanted())}"
    return "a string holds half of a surrogate pair, or the split key is no string or number"


def _value_at(record: object, key: str) -> object:
    """As csrc/core/text/jsonl.cpp finds a key: all of it, else its first part and the rest."""
    first, dot, rest = key.partition(".")
    if not isinstance(record, dict):
        return _NOTHING
    return record.get(key, _value_at(record.get(first), rest) if dot else _NOTHING)


def _names(record: dict[str, object]) -> list[str]:
    """The keys of an object, those of objects in it behind a dot."""
    names = []
    for name, value in sorted(record.items()):
        inner = _names(value) if isinstance(value, dict) else []
        names += [f"{name}.{below}" for below in inner] or [name]
    return names


# ---- Documents of parquet and Arrow files: a column of strings, or of lists of messages ---------
# Both are tables in consecutive groups of rows, of which a piece holds some: the row groups of
# parquet, the record batches of Arrow (its file format and its stream format alike).

_TEXT_TYPES = ("string", "large_string", "string_view", "binary", "large_binary", "binary_view")
_LIST_TYPES = ("list<", "large_list<", "list_view<", "large_list_view<", "fixed_size_list<")
_END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"


class Table(Protocol):
    """A file of rows in groups."""

    schema: Any  # of pyarrow

    def group_bytes(self, key: str) -> list[int]:
        """Of every group about the bytes of a column, uncompressed."""

    def batches(
        self, begin: int, end: int, columns: Sequence[str], block_bytes: int
    ) -> Iterator[tuple[int, Any]]:
        """The rows of groups ``[begin, end)``, about ``block_bytes`` at a time: the number of the
        first row in the file, and a record batch of the columns (``a.b`` is field b of a struct).
        """


def read_table(piece: Piece, options: ReadOptions, faults: Faults) -> Iterator[TextBlock]:
    """The documents of a range of groups, a block of rows at a time."""
    path = piece.file.path
    locate = functools.partial(Place, path, "row")
    keys = options.keys()
    with open_table(piece.file) as table:
        columns = [_find_column(table.schema, key, keys[key], path) for key in keys]
        beside = {name: _column_names(table.schema, key) for name, key in options.beside}
        present = {name: column for name, column in beside.items() if column is not None}
        names = [".".join(column) for column in [*columns, *present.values()]]
        for row, batch in table.batches(piece.begin, piece.end, names, options.block_bytes):
            more = {name: _column(batch, column).to_pylist() for name, column in present.items()}
            text, offsets, missing = _arrow_text(_column(batch, columns[0]), path, options, more)
            block = TextBlock(text, offsets, np.arange(len(offsets) - 1) + row, locate)
            if options.split_key is not None:
                hashes, no_key = _hashes(_column(batch, columns[-1]))
                block = dataclasses.replace(block, hashes=hashes)
                missing |= no_key
            block = block.drop(missing, "missing value", faults)
            too_long = np.diff(block.offsets) > options.max_document_bytes
            block = block.drop(too_long, "too long", faults)
            yield block.checked(faults, known_utf8=False)


@contextlib.contextmanager
def open_table(file: InputFile) -> Iterator[Table]:
    """The table in a parquet or Arrow file. Damage is a DataError that names the file."""
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
            raise DataError(f"{file.path} is damaged ({error}); fetch it again") from error


class _Parquet:
    def __init__(self, path: str) -> None:
        parquet = require("pyarrow.parquet", f"reading {path}")
        self._file = parquet.ParquetFile(path, page_checksum_verification=True)
        self._groups = [
            self._file.metadata.row_group(i) for i in range(self._file.metadata.num_row_groups)
        ]
        self.schema = self._file.schema_arrow
        self.close = self._file.close

    def group_bytes(self, key: str) -> list[int]:
        # With all that is nested in the column.
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
            if end != _END_OF_STREAM:  # a reader would take what is there for everything
                raise pyarrow.ArrowInvalid("it is truncated: its stream has no end")
        self.schema = self._open().schema

    def _open(self, **options: Any) -> Any:
        self._data.seek(0)
        how = self._ipc.IpcReadOptions(**options)
        opener = self._ipc.open_file if self._is_file else self._ipc.open_stream
        return opener(self._data, options=how)

    def _groups(self, columns: Sequence[str]) -> Iterator[tuple[int, Any]]:
        """Every record batch, with the number of its first row."""
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


def _find_column(schema: Any, key: str, option: str, path: str) -> list[str]:
    """The column's name, behind those of the structs in which it lies."""
    names = _column_names(schema, key)
    if names is None:
        known = ", ".join(_leaves(schema)[:_SHOWN])
        for folder in PurePath(path).parts[:-1]:
            if folder.startswith(f"{key}="):
                raise DataError(
                    f"{path}: {key!r} is a folder of the path ({folder}) and no column of the "
                    f"file; give {option} one of: {known}"
                )
        raise DataError(f"{path}: there is no column {key!r} among: {known}; see {option}")
    if schema.names.count(names[0]) > 1:
        raise DataError(f"{path}: there is more than one column {names[0]!r}; name them apart")
    return names


def _column_names(fields: Any, key: str) -> list[str] | None:
    """As csrc/core/text/jsonl.cpp finds a key: all of it, else its first part and the rest."""
    first, dot, rest = key.partition(".")
    types = {field.name: field.type for field in fields}
    if key in types:
        return [key]
    if not dot or not _is_struct(types.get(first)):
        return None
    below = _column_names(types[first], rest)
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
    compute = require("pyarrow.compute", "reading a table")
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
            None
            if row is None
            else json.dumps(_row_with_values_beside(row, i, beside), default=str)
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


def _row_with_values_beside(messages: Any, row: int, beside: Mapping[str, list[Any]]) -> Any:
    """As jsonl.py has it: an object where the row has more to say."""
    more = {name: column[row] for name, column in beside.items() if column[row] is not None}
    return {"messages": messages, **more} if more else messages


def _hashes(column: Any) -> tuple[NDArray[np.uint64], NDArray[np.bool_]]:
    """Hashes of a column's values as text, and which rows have none."""
    values = column.to_pylist()
    missing = np.array([value is None for value in values], np.bool_)
    hashes = [xxhash.xxh3_64_intdigest(str(value).encode("utf-8")) for value in values]
    return np.array(hashes, np.uint64), missing


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
            read = read_table if piece.file.format in TABLES else read_jsonl
            yield from read(piece, options, faults)


def _read_texts(
    files: Iterable[InputFile], options: ReadOptions, faults: Faults
) -> Iterator[TextBlock]:
    names: list[str] = []
    texts: list[bytes] = []
    size = 0
    for file in files:
        text = _read_text(file, options, faults)
        if text is None:
            continue
        names.append(file.path)
        texts.append(text)
        size += len(text)
        if size >= options.block_bytes:
            yield _text_block(names, texts).checked(faults, known_utf8=False)
            names, texts, size = [], [], 0
    if names:
        yield _text_block(names, texts).checked(faults, known_utf8=False)


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
    return text.removeprefix(b"\xef\xbb\xbf")


def _text_block(names: list[str], texts: list[bytes]) -> TextBlock:
    offsets = np.zeros(len(texts) + 1, np.int64)
    np.cumsum([len(text) for text in texts], out=offsets[1:])
    flat = np.frombuffer(b"".join(texts), np.uint8)
    return TextBlock(flat, offsets, np.arange(len(texts)), lambda i: Place(names[i], "file"))
