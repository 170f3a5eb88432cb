"""Columns: data that belongs to the tokens of a dataset, such as advantages or teacher logits.

- ``ColumnSpec``: type of a column; ``column_entries``: columns that a meta file lists
- ``LABELS``, ``WEIGHTS``: columns that make the labels and the loss mask of a batch
- ``Column``: an open column; ``open_column`` maps its file
- ``ColumnWriter``: write ``<prefix>.<name>.col`` under a temporary name

A column is a file of fixed-width rows, one per token of .bin, little-endian, without a header. The
meta file describes it under ``columns``. A column refers to the token itself (an expert's number,
a mask of images) or, with ``of: target``, to predicting the token (an advantage, a teacher's
logits): a batch then stores its row at the position before, like a label.

Three documents of 3, 2 and 2 tokens, with a float32 per token::

    add_column("corpus", "advantages", [[0, .5, .5], [0, 1], [0, -1]],
               ColumnSpec(dtype="float32", of="target"))
    # -> corpus.advantages.col: 0 .5 .5 0 1 0 -1
    #    corpus.meta.json: {..., "columns": {"advantages": {"dtype": "float32", "shape": [],
    #                       "fill": 0, "of": "target", "bytes": 28, "xxh3_128": ["28 5f0c..."]}}}
"""

from __future__ import annotations

import io
import json
import math
import operator
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import xxhash
from numpy.typing import NDArray

from megapack.config import from_dict
from megapack.errors import ConfigError, DataError, FormatError
from megapack.storage.files import AtomicFile, file_identity, open_regular
from megapack.storage.index_file import map_file, path_of
from megapack.storage.metadata import (
    COLUMNS,
    Checksum,
    joined_range,
    sampled_checksum,
    stretches_of,
)

Range: TypeAlias = "tuple[int, int] | None"  # smallest and largest number; None: no numbers

MAX_ROW_BYTES = 1 << 16
STRETCH_BYTES = 1 << 24  # bytes of a column that one checksum covers
_BUFFER_BYTES = 1 << 19
# numpy has no bfloat16: its bits are stored and returned as uint16, and a batch has torch.bfloat16.
_NUMPY = {"bfloat16": "uint16"}
DTYPES = (
    *(f"{sign}int{bits}" for bits in (8, 16, 32, 64) for sign in ("", "u")),
    *("float16", "bfloat16", "float32"),
)
_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")
# Keys of batches, and names of other files: not for columns, except those of ``INTERPRETED``.
RESERVED = {
    *("tokens", "labels", "loss_mask", "position_ids", "cu_seqlens", "cu_seqlens_padded"),
    *("max_seqlen", "dataset_ids", "weights", "groups", "sample_ids", "source", "capacity"),
    *("bucket", "step", "micro_step", "num_micro_steps", "num_step_label_tokens", "imbalance"),
    *("imbalance_in_order", "attention_window", "step_label_weight", "input_ids"),
    *("attention_mask", "sequence_parallel_rank", "sequence_parallel_size", "row_tokens"),
    *("loss_weights", "token_mask", "mtp_labels", "mtp_loss_mask", "predecessors", "kv_index"),
    *("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"),
}


@dataclass(frozen=True, kw_only=True)
class ColumnSpec:
    """Type of a column.

    Attributes:
        dtype: one of ``DTYPES``.
        shape: shape of a token's row; () for one number. A row has at most 64 KiB.
        fill: number in rows of padding, of inserted tokens and, with ``of: target``, of tokens
            without a next token; finite.
        of: ``token``: the row describes the token; ``target``: it describes predicting the token.

    Raises:
        ConfigError: an unknown dtype, a shape that is not positive or too large, or a fill value
            that the dtype cannot represent.
    """

    dtype: str
    shape: tuple[int, ...] = ()
    fill: int | float = 0
    of: Literal["token", "target"] = "token"

    def __post_init__(self) -> None:
        with suppress(TypeError):  # refused below
            object.__setattr__(self, "shape", tuple(map(operator.index, self.shape)))
        if isinstance(self.fill, np.generic):
            object.__setattr__(self, "fill", self.fill.item())
        if self.dtype not in DTYPES:
            raise ConfigError(f"column dtype is {self.dtype!r}; choose from {', '.join(DTYPES)}")
        if self.of not in ("token", "target"):
            raise ConfigError(f"column of is {self.of!r}; it must be 'token' or 'target'")
        if not isinstance(self.shape, tuple) or any(type(n) is not int for n in self.shape):
            raise ConfigError(f"column shape is {self.shape!r}; give integers, as in (8,)")
        if min(self.shape, default=1) < 1 or self.row_bytes > MAX_ROW_BYTES:
            raise ConfigError(
                f"column shape {list(self.shape)} of {self.dtype} has {self.row_bytes} bytes per "
                f"token; sizes must be positive, and a row has at most {MAX_ROW_BYTES} bytes"
            )
        try:
            is_number = type(self.fill) in (int, float)  # types that JSON preserves
            exact = is_number and math.isfinite(self.fill) and _convert(self.fill, self).size == 1
        except (DataError, OverflowError):
            exact = False
        if not exact:
            raise ConfigError(f"column fill is {self.fill!r:.80}, not a finite {self.dtype}")

    def __str__(self) -> str:
        """Return ``float16[4], of token, fill 0``, for messages."""
        return f"{self.dtype}{list(self.shape) or ''}, of {self.of}, fill {self.fill}"

    @cached_property
    def numpy_dtype(self) -> np.dtype[Any]:
        """Dtype of the stored numbers, little-endian; uint16 for bfloat16."""
        dtype: np.dtype[Any] = np.dtype(_NUMPY.get(self.dtype, self.dtype)).newbyteorder("<")
        return dtype

    @cached_property
    def row_bytes(self) -> int:
        return math.prod(self.shape) * self.numpy_dtype.itemsize

    @property
    def fill_row(self) -> NDArray[np.uint8]:
        """A row of fill values as bytes, (row_bytes,)."""
        return np.full(math.prod(self.shape), _convert(self.fill, self)).view(np.uint8)

    def rows(self, values: Any) -> NDArray[Any]:
        """Return values (lists, arrays, tensors) as stored: ``numpy_dtype``, C-contiguous, (tokens,
        *shape). Floats are rounded to a narrower float dtype. For bfloat16, an array of uint16
        contains bits; other numbers are rounded to the nearest. Raises DataError for a wrong shape,
        a float for an integer column, or a number outside the dtype."""
        array = _convert(values, self)
        if array.size == 0 and array.ndim == 1:
            array = array.reshape(0, *self.shape)  # an empty list has no row shape
        if array.ndim != 1 + len(self.shape) or array.shape[1:] != self.shape:
            raise DataError(
                f"rows have shape {list(array.shape)}; the column has one row of shape "
                f"{list(self.shape)} per token"
            )
        return np.ascontiguousarray(array)

    def numbers(self, rows: NDArray[Any]) -> NDArray[Any]:
        """Return stored rows as numbers: float32 for bfloat16, else the same array."""
        if self.dtype != "bfloat16":
            return rows
        return (np.asarray(rows).astype(np.uint32) << 16).view(np.float32)

    @property
    def has_range(self) -> bool:
        """True for integers: meta files record their smallest and largest number."""
        return self.numpy_dtype.kind in "iu" and self.dtype != "bfloat16"

    def entry(self, checksums: list[Checksum], limits: Range) -> dict[str, Any]:
        """Return the entry of the meta file for a column with these stretches and limits."""
        return {
            "dtype": self.dtype,
            "shape": list(self.shape),
            "fill": self.fill,
            "of": self.of,
            "range": None if limits is None else list(limits),
            "bytes": sum(size for size, _ in checksums),
            "xxh3_128": [f"{size} {digest}" for size, digest in checksums],
        }


def _convert(values: Any, spec: ColumnSpec) -> NDArray[Any]:
    if hasattr(values, "detach"):  # torch.Tensor, without importing torch
        tensor = values.detach().cpu()
        if str(tensor.dtype) == "torch.bfloat16":
            tensor = tensor.float()  # exact; rounding back below is exact, too
        values = tensor.numpy()
    try:
        array = np.asarray(values)
    except ValueError as error:
        raise DataError(f"column values have rows of different shapes: {error}") from error
    except TypeError as error:  # for example, for a list of bfloat16 tensors
        raise DataError(f"column values cannot become an array ({error}); stack them") from error
    stored = spec.numpy_dtype
    if array.dtype.newbyteorder("<") == stored:
        return array.astype(stored, copy=False)
    if array.dtype.kind in "fO" and not isinstance(values, np.ndarray):
        array = _exact(values, array, spec)
    if array.dtype.kind not in "iufbO" and array.size:
        raise DataError(f"column values are {array.dtype}; give numbers")
    if spec.dtype == "bfloat16":
        return _bfloat16_bits(array)
    if stored.kind == "f":
        with np.errstate(over="ignore"):
            rounded = array.astype(stored)
        _check_each(np.isfinite(rounded) | ~np.isfinite(array), array, spec)
        return rounded
    if array.dtype.kind == "f" and array.size:
        raise DataError(f"column values are {array.dtype}, and the column is {spec.dtype}")
    if array.size:
        limits = np.iinfo(stored)
        # Python compares integers of any width and sign exactly; numpy would convert first.
        low, high = int(array.min()), int(array.max())
        if low < limits.min or high > limits.max:
            extreme = low if low < limits.min else high
            raise DataError(f"column value {extreme} is outside {spec.dtype}")
    return array.astype(stored)


def _exact(values: Any, array: NDArray[Any], spec: ColumnSpec) -> NDArray[Any]:
    """Convert a list from which numpy made floats (as from [0, 2**63]) or objects: to Python's
    integers for a column of integers, else to float64."""
    exact = np.asarray(values, object)
    if "int" in spec.dtype and all(isinstance(n, int | np.integer) for n in exact.flat):
        return exact
    if array.dtype.kind == "O":
        if not all(isinstance(n, int | float | np.number) for n in exact.flat):
            raise DataError(f"column values are {array.dtype}; give numbers")
        try:
            return exact.astype(np.float64)
        except OverflowError as error:
            raise DataError(f"a column value is outside {spec.dtype}") from error
    return array


def _bfloat16_bits(array: NDArray[Any]) -> NDArray[np.uint16]:
    """Round numbers to bfloat16, ties to even; return the bits."""
    with np.errstate(over="ignore"):
        single = array.astype(np.float32)
    bits = single.view(np.uint32)
    ties = (bits & 0xFFFF == 0x8000) & np.isfinite(array)
    if array.dtype == np.float64 and ties.any():  # float32 may have rounded to the tie
        bits[ties] += np.sign(abs(array[ties]) - abs(single[ties])).astype(np.int32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    is_nan = np.isnan(single)
    result = np.where(is_nan, (bits >> 16) | 0x40, rounded).astype("<u2")
    overflows = ((result & 0x7FFF) == 0x7F80) & np.isfinite(array)
    if overflows.any():
        raise DataError(f"column value {array[overflows].flat[0]} is outside bfloat16")
    return result


def _check_each(fits: NDArray[np.bool_], array: NDArray[Any], spec: ColumnSpec) -> None:
    if not fits.all():
        raise DataError(f"column value {array[~fits].flat[0]} is outside {spec.dtype}")


# ---- Labels and loss weights ---------------------------------------------------------------------

LABELS, WEIGHTS = "labels", "weights"
# Their types; labels may have any signed integer dtype. Labels are not shifted; negative: no loss.
INTERPRETED = {
    LABELS: ColumnSpec(dtype="int32", of="target", fill=-100),
    WEIGHTS: ColumnSpec(dtype="float16", of="target"),
}


def check_column(name: str, spec: ColumnSpec) -> None:
    """Raise ConfigError unless a column can have this name and, if it makes the labels or the loss
    mask of batches, this type."""
    check_column_name(name)
    needed = INTERPRETED.get(name, spec)
    if name == LABELS and spec.dtype.startswith("int"):
        needed = replace(needed, dtype=spec.dtype)
    if spec != needed:
        raise ConfigError(
            f"column {name} is {spec}; it becomes the {name} of batches, so it must be {needed}: "
            "give it this type, or another name"
        )


def column_spec(
    name: str,
    dtype: str,
    shape: tuple[int, ...] = (),
    *,
    fill: float | None = None,
    of: Literal["token", "target"] | None = None,
) -> ColumnSpec:
    """Return a column's type. ``fill`` is 0 and ``of`` is ``token`` by default, except for labels
    and weights. Raises ConfigError if the column cannot have this type."""
    usual = INTERPRETED.get(name, ColumnSpec(dtype=dtype, shape=shape))
    fill = usual.fill if fill is None else fill
    spec = ColumnSpec(dtype=dtype, shape=shape, fill=fill, of=of or usual.of)
    check_column(name, spec)
    return spec


def rows_of(name: str, spec: ColumnSpec, values: Any) -> NDArray[Any]:
    """Return ``spec.rows(values)`` for a column of this name. Also raises DataError for a loss
    weight that is negative, not finite, or so small that it would be stored as 0 (below 3e-8)."""
    rows = spec.rows(values)
    if name != WEIGHTS:
        return rows
    given = np.asarray(values.detach().cpu().float() if hasattr(values, "detach") else values)
    fits = np.isfinite(rows) & (rows >= 0) & ((rows > 0) == (given > 0))
    if not fits.all():
        at = int(np.flatnonzero(~fits)[0])
        raise DataError(
            f"loss weight {at} is {given[at]}; weights are 0, or from 6e-08 to 65504 (float16)"
        )
    unsigned: NDArray[Any] = np.abs(rows)  # -0 has a sign bit
    return unsigned


# ---- Entries of the meta file --------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ColumnEntry:
    """Entry of the meta file: a column, its size and the checksums of its stretches. ``range``
    is the range of integers; None for floats, or without tokens."""

    dtype: str
    shape: tuple[int, ...]
    fill: int | float
    of: Literal["token", "target"]
    range: tuple[Any, ...] | None  # two integers; Any: uint64 exceeds the integers of records
    bytes: int
    xxh3_128: tuple[str, ...]

    @property
    def spec(self) -> ColumnSpec:
        """Type of the column. Raises ConfigError if it is not valid."""
        return ColumnSpec(dtype=self.dtype, shape=self.shape, fill=self.fill, of=self.of)

    @property
    def limits(self) -> Range:
        return None if self.range is None else (int(self.range[0]), int(self.range[1]))

    @property
    def identity(self) -> str:
        return xxhash.xxh3_64_hexdigest(json.dumps(asdict(self)).encode())

    @property
    def checksums(self) -> list[Checksum]:
        return stretches_of(asdict(self))


def column_entries(meta: Mapping[str, Any] | None, where: object) -> dict[str, ColumnEntry]:
    """Return the columns that a meta file lists, in alphabetical order; none without a meta file.
    ``where`` is its path, for messages. Raises FormatError for a damaged entry, or a wrong size."""
    entries: dict[str, ColumnEntry] = {}
    for name, content in sorted((meta or {}).get(COLUMNS, {}).items()):
        try:
            entry = from_dict(ColumnEntry, content, where=f"{where}: column {name}")
            check_column(name, entry.spec)
            sizes = [size for size, _ in entry.checksums]
            expected = (meta or {})["num_tokens"] * entry.spec.row_bytes
            if sum(sizes) != entry.bytes or entry.bytes != expected or min(sizes, default=1) < 1:
                raise ConfigError(f"{entry.bytes} bytes; one row per token needs {expected}")
            if not _is_range(entry.range, entry.spec.has_range and expected > 0):
                raise ConfigError(f"range {entry.range}; columns of integers have two integers")
        except (ConfigError, ValueError) as error:
            raise FormatError(
                f"{where}: column {name} is damaged: {error}; restore the meta file from a copy"
            ) from error
        entries[name] = entry
    return entries


def _is_range(limits: tuple[Any, ...] | None, has_numbers: bool) -> bool:
    if limits is None or not has_numbers:
        return limits is None and not has_numbers
    return [type(limit) for limit in limits] == [int, int] and limits[0] <= limits[1]


def check_column_name(name: str) -> None:
    """Raise ConfigError unless a column can have this name."""
    if _NAME.fullmatch(name) is None:
        raise ConfigError(
            f"column name {name!r} is not valid: use up to 64 lower-case letters, digits and _, "
            "beginning with a letter"
        )
    if name in RESERVED - INTERPRETED.keys():
        raise ConfigError(f"column name {name!r} is a name of megapack's batches; choose another")


def column_path(prefix: str | os.PathLike[str], name: str) -> Path:
    """Return ``<prefix>.<name>.col``."""
    return path_of(prefix, f".{name}.col")


# ---- Files ---------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Column:
    """Column of an open dataset, with its entry of the meta file. ``rows`` are (num_tokens,
    *shape), ``spec.numpy_dtype``, mapped and read-only; in a remote dataset, slices are fetched.
    ``mapped_bytes`` are uint8 (num_tokens * row_bytes,), for C++; in a remote dataset, only blocks
    that are being read have values."""

    name: str
    entry: ColumnEntry
    rows: Any
    mapped_bytes: NDArray[np.uint8]

    @cached_property
    def spec(self) -> ColumnSpec:
        return self.entry.spec

    @property
    def largest(self) -> int:
        """The largest number of a column of integers according to its entry, -1 without tokens."""
        return -1 if self.entry.limits is None else self.entry.limits[1]

    @cached_property
    def content_digest(self) -> list[str | None]:
        """Two digests of the values, like ``IndexedDataset.content_digest``: the
        ``sampled_checksum`` of the file (None if it is remote), and a checksum of the entry of the
        meta file. Reads at most 1 MiB."""
        if not isinstance(self.rows, np.ndarray):
            return [None, self.entry.identity]
        data = self.mapped_bytes
        sampled = sampled_checksum(data.size, lambda begin, end: data[begin:end].tobytes())
        return [sampled, self.entry.identity]


def open_column(prefix: str | os.PathLike[str], name: str, entry: ColumnEntry) -> Column:
    """Map a column of a local dataset. Raises FormatError if its file is missing or has another
    size than the meta file says."""
    path = column_path(prefix, name)
    try:
        file = open_regular(path)
    except FileNotFoundError as error:
        raise FormatError(
            f"{path} does not exist, but the meta file lists column {name}: restore it from a "
            f"copy, or run `megapack-build column remove {os.fspath(prefix)} {name}`"
        ) from error
    with file:
        num_bytes = file_identity(file).num_bytes
        if num_bytes != entry.bytes:
            raise FormatError(
                f"{path} has {num_bytes} bytes; its meta file says {entry.bytes}: restore it "
                f"from a copy, or write column {name} again"
            )
        mapped = map_file(file)
    mapped.flags.writeable = False
    spec = entry.spec
    return Column(name, entry, mapped.view(spec.numpy_dtype).reshape(-1, *spec.shape), mapped)


class _Stretches:
    """Checksums of consecutive stretches of bytes."""

    def __init__(self) -> None:
        self.checksums: list[Checksum] = []
        self._hasher, self._num_bytes = xxhash.xxh3_128(), 0  # of the unfinished stretch

    def update(self, data: memoryview) -> None:
        while data:
            part = data[: STRETCH_BYTES - self._num_bytes]
            self._hasher.update(part)
            self._num_bytes += len(part)
            if self._num_bytes == STRETCH_BYTES:
                self.end()
            data = data[len(part) :]

    def end(self) -> None:
        if self._num_bytes:
            self.checksums.append(Checksum(self._num_bytes, self._hasher.hexdigest()))
            self._hasher, self._num_bytes = xxhash.xxh3_128(), 0

    def mark(self) -> tuple[int, xxhash.xxh3_128, int]:
        return len(self.checksums), self._hasher.copy(), self._num_bytes

    def reset(self, mark: tuple[int, xxhash.xxh3_128, int]) -> None:
        num_checksums, self._hasher, self._num_bytes = mark
        del self.checksums[num_checksums:]


def fill_facts(spec: ColumnSpec, num_rows: int) -> tuple[list[Checksum], Range]:
    """Return checksums and limits of ``ColumnWriter.append_fill``."""
    stretches = _Stretches()
    for block in _fill_blocks(spec, num_rows):
        stretches.update(block.reshape(-1).data)
    stretches.end()
    limits = (int(spec.fill), int(spec.fill)) if num_rows and spec.has_range else None
    return stretches.checksums, limits


def _fill_blocks(spec: ColumnSpec, num_rows: int) -> Iterator[NDArray[np.uint8]]:
    block_rows = max(1, (1 << 20) // spec.row_bytes)
    block = np.tile(spec.fill_row, (min(block_rows, num_rows), 1))
    for begin in range(0, num_rows, block_rows):
        yield block[: num_rows - begin]


class ColumnWriter:
    """Writer of ``target``, a .col file. A method that raises writes nothing."""

    def __init__(self, prefix: str | os.PathLike[str], name: str, spec: ColumnSpec) -> None:
        check_column(name, spec)
        self.name, self.spec, self.num_rows = name, spec, 0
        self.target = AtomicFile(column_path(prefix, name))
        self._buffer = bytearray()  # rows that are not in the file yet
        self._stretches = _Stretches()
        self._range: Range = None

    def rows(self, values: Any) -> NDArray[Any]:
        return rows_of(self.name, self.spec, values)

    def append(self, rows: NDArray[Any]) -> None:
        data = rows.reshape(-1).view(np.uint8).data
        if len(self._buffer) + len(data) > _BUFFER_BYTES:
            self._flush()
        if len(data) > _BUFFER_BYTES:
            self.target.write(data)
        else:
            self._buffer += data
        self.num_rows += len(rows)
        self._stretches.update(data)
        if self.spec.has_range and rows.size:
            self._range = joined_range([self._range, (int(rows.min()), int(rows.max()))])

    def append_fill(self, num_rows: int) -> None:
        """Write rows of fill values as separate stretches (``fill_facts``)."""
        mark = self.mark()
        try:
            self._stretches.end()
            for block in _fill_blocks(self.spec, num_rows):
                self.append(block.view(self.spec.numpy_dtype))
            self._stretches.end()
        except BaseException:
            self.reset(mark)
            raise

    def append_file(self, file: io.FileIO, entry: ColumnEntry) -> None:
        """Append a whole .col file of the same type, with its recorded facts; not read here."""
        self._flush()
        self.target.copy_from(file, entry.bytes)
        self._stretches.end()
        self._stretches.checksums += entry.checksums
        self._range = joined_range([self._range, entry.limits])
        self.num_rows += entry.bytes // self.spec.row_bytes

    def mark(self) -> tuple[int, Range, Any]:
        return self.num_rows, self._range, self._stretches.mark()

    def reset(self, mark: tuple[int, Range, Any]) -> None:
        self.num_rows, self._range, stretches = mark
        self._stretches.reset(stretches)
        file, num_bytes = self.target.file, self.num_rows * self.spec.row_bytes
        num_written = min(file.tell(), num_bytes)
        file.truncate(num_written)
        file.seek(num_written)
        del self._buffer[num_bytes - num_written :]

    def finish(self) -> dict[str, Any]:
        """Return the entry of the meta file; ``target`` is then complete."""
        self._flush()
        self._stretches.end()
        return self.spec.entry(self._stretches.checksums, self._range)

    def _flush(self) -> None:
        self.target.write(self._buffer)
        self._buffer = bytearray()
