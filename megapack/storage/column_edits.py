"""Add, remove and export columns of datasets that exist already.

- ``add_column``, ``remove_column``: change the columns of a local dataset
- ``spec_of``: type of a column that holds an array; ``values_of_dataset``: values from a dataset
- ``write_rows``: append the rows of a whole dataset to a ``ColumnWriter``, block by block
- ``export_column``, ``export_dataset``: write a column to a .npy file, or as a dataset

Two documents of 3 and 2 tokens::

    add_column("corpus", "rewards", [[0, 0.5, 1], [0, -1]], ColumnSpec(dtype="float32"))
    export_column(IndexedDataset("corpus").columns["rewards"], "rewards.npy")
    numpy.load("rewards.npy")      # -> [0, 0.5, 1, 0, -1], float32
    remove_column("corpus", "rewards")
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from functools import partial
from itertools import islice, pairwise
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from megapack.calls import checked_call
from megapack.errors import ConfigError, DataError, FormatError, IndexMismatchError
from megapack.storage.address import is_remote
from megapack.storage.builder import IndexedDatasetBuilder
from megapack.storage.columns import (
    DTYPES,
    INTERPRETED,
    LABELS,
    WEIGHTS,
    Column,
    ColumnSpec,
    ColumnWriter,
    check_column,
    column_path,
    column_spec,
)
from megapack.storage.dataset import IndexedDataset, read_document_lengths
from megapack.storage.files import atomic_write, check_target, file_identity, open_regular
from megapack.storage.index_file import CODE_OF_DTYPE, prefix_of
from megapack.storage.index_writer import DatasetContent, write_meta
from megapack.storage.locks import WriterLock
from megapack.storage.metadata import (
    COLUMNS,
    check_metadata,
    file_checksum,
    meta_path,
    read_meta,
    stretch_checksum,
    stretches_of,
)
from megapack.storage.tokens import InputDataset, scan_tokens

T = TypeVar("T")
_BLOCK_BYTES = 1 << 22


def spec_of(
    name: str,
    values: NDArray[Any],
    *,
    dtype: str | None = None,
    fill: float | None = None,
    of: Literal["token", "target"] | None = None,
) -> ColumnSpec:
    """Return the type of a column with one row per token, (num_tokens, *shape).

    ``dtype`` is by default that of the array; labels and weights that cannot have it get their
    usual dtype. Arrays of ml_dtypes.bfloat16 in .npy files need ``bfloat16``. ``fill`` and ``of``
    are as in ``column_spec``. Raises ConfigError if no column can have the dtype or the shape.
    """
    if dtype is None and name in INTERPRETED and not (name == LABELS and values.dtype.kind == "i"):
        dtype = INTERPRETED[name].dtype
    if dtype is None and values.dtype.name not in DTYPES:
        raise ConfigError(
            f"the values are {values.dtype.name}; a column has one of {', '.join(DTYPES)}: name "
            "one (--dtype, dtype=)"
        )
    return column_spec(name, dtype or values.dtype.name, values.shape[1:], fill=fill, of=of)


def values_of_dataset(
    name: str, source: str | os.PathLike[str], prefix: str | os.PathLike[str]
) -> NDArray[Any]:
    """Return the tokens of a local dataset as values of a column of the dataset at ``prefix``.

    GPT-NeoX and earlier versions of megapack store labels as such a dataset. Earlier versions also
    store loss weights as one: the bits of float16, with ``loss_weights`` in the meta file. Raises
    IndexMismatchError if the documents of the two have different lengths, FormatError if a dataset
    is damaged or weights are not marked as such, and ConfigError if ``source`` is an address.
    """
    dataset = IndexedDataset(_local_prefix(source))
    if not np.array_equal(dataset.document_lengths, read_document_lengths(prefix)):
        raise IndexMismatchError(
            f"the documents of {dataset.prefix} and {prefix} have different lengths: give the "
            f"dataset that was written with {prefix}"
        )
    is_float16 = (dataset.meta or {}).get("loss_weights") == "float16"
    if name == WEIGHTS and not is_float16:
        raise FormatError(
            f"{dataset.prefix}.meta.json does not contain loss_weights: float16: copy the original "
            "meta file, or give the weights as FILE.npy"
        )
    tokens: NDArray[Any] = dataset.tokens
    return tokens.view(np.float16) if is_float16 else tokens


def write_rows(writer: ColumnWriter, values: Any, lengths: Iterable[int] | int) -> None:
    """Append the rows of a whole dataset to a column.

    ``values`` are an array, a tensor or a memory map of one row per token, (num_tokens, *shape), or
    an iterable of the rows of each document. ``lengths`` are the tokens per document; for an array,
    the number of all tokens is enough. Raises DataError if rows do not fit the tokens or the type.
    """
    if isinstance(values, np.ndarray) or hasattr(values, "detach"):
        num_tokens = lengths if isinstance(lengths, int) else sum(lengths)
        num_rows = values.shape[0] if values.ndim else "no"
        if num_rows != num_tokens:
            raise DataError(
                f"column {writer.name}: {num_rows} rows for {num_tokens} tokens; give one per token"
            )
        if isinstance(values, np.ndarray) and values.dtype == "V2":  # bfloat16 of ml_dtypes
            values = values.view(np.uint16)
        step = max(1, _BLOCK_BYTES // writer.spec.row_bytes)
        for begin in range(0, num_tokens, step):
            writer.append(_rows(writer, values[begin : begin + step], f"rows from {begin}"))
        return
    expected = [lengths] if isinstance(lengths, int) else list(lengths)
    document = -1
    for document, rows_of_document in enumerate(values):
        rows = _rows(writer, rows_of_document, f"document {document}")
        if document >= len(expected) or len(rows) != expected[document]:
            known = document < len(expected)
            limit = f"has {expected[document]} tokens" if known else "does not exist"
            raise DataError(
                f"column {writer.name}: {len(rows)} rows for document {document}, which {limit}; "
                "give one row per token of each document"
            )
        writer.append(rows)
    if document + 1 < len(expected):
        raise DataError(
            f"column {writer.name}: rows of {document + 1} documents, and the dataset has "
            f"{len(expected)}; give one array per document"
        )


def _rows(writer: ColumnWriter, values: Any, where: str) -> NDArray[Any]:
    try:
        return writer.rows(values)
    except DataError as error:
        raise DataError(f"column {writer.name}, {where}: {error}") from error


@checked_call
def add_column(
    prefix: str | os.PathLike[str],
    name: str,
    values: Any,
    spec: ColumnSpec,
    *,
    overwrite: bool = False,
    metadata: Mapping[str, Any] | None = None,
) -> bool:
    """Add a column to a local dataset; return False if an equal column exists.

    At any moment, readers find the dataset without the column or with all of it. If the dataset has
    no meta file, one is written, which requires reading all tokens. ``name`` has lower-case
    letters, digits and ``_``; ``values`` are one row per token: an array, or an iterable of arrays
    per document (``write_rows``). ``overwrite`` replaces a different column of this name;
    ``metadata`` are entries to add to the meta file.

    Raises ConfigError if a different column or file of this name exists, the name is not valid, or
    the prefix is an address; DataError if the values do not fit the tokens or ``spec``; FormatError
    if the dataset or its meta file is damaged; LockedError if another process writes the dataset.
    """
    prefix = _local_prefix(prefix)
    check_column(name, spec)
    check_metadata(metadata or {})
    with WriterLock(prefix, what="adding a column"):
        meta = _meta_of(prefix)
        writer = ColumnWriter(prefix, name, spec)
        try:
            write_rows(writer, values, read_document_lengths(prefix).tolist())
            entry = writer.finish()
            difference = partial(_difference, prefix, name, entry, meta)
            columns = dict(meta.get(COLUMNS, {}))
            is_new = check_target(writer.target.path, overwrite=overwrite, difference=difference)
            if not is_new and columns.get(name) == entry:
                return False
            if name in columns:  # no meta file may describe another file of this name
                del columns[name]
                write_meta(prefix, _with_columns(meta, columns))
            columns[name] = entry
            write_meta(prefix, {**_with_columns(meta, columns), **(metadata or {})}, writer.target)
        finally:
            writer.target.discard()
    return True


def remove_column(prefix: str | os.PathLike[str], name: str) -> None:
    """Remove a column of a local dataset. Raises ConfigError if it has no such column."""
    prefix = _local_prefix(prefix)
    with WriterLock(prefix, what="removing a column"):
        meta = read_meta(prefix) or {}
        columns = dict(meta.get(COLUMNS, {}))
        find_column(columns, name, prefix)
        del columns[name]
        write_meta(prefix, _with_columns(meta, columns))
        column_path(prefix, name).unlink(missing_ok=True)


def _local_prefix(prefix: str | os.PathLike[str]) -> str:
    prefix = prefix_of(prefix)
    if is_remote(prefix):
        raise ConfigError(
            f"{prefix} is an address; columns are added and removed locally: change a local copy "
            f"(`megapack-build merge {prefix} --output LOCAL`), then `megapack-build upload` it"
        )
    return prefix


def _with_columns(meta: Mapping[str, Any], columns: Mapping[str, Any]) -> dict[str, Any]:
    """Return a meta file with these columns, its keys in the order of ``DatasetContent.meta``."""
    changed = {}
    for key, value in meta.items():
        if key != COLUMNS:
            changed[key] = value
        if key == "idx" and columns:
            changed[COLUMNS] = dict(sorted(columns.items()))
    return changed


def _meta_of(prefix: str) -> dict[str, Any]:
    """Return the meta file of a dataset or, without one, what it would contain."""
    dataset = InputDataset(prefix)
    if dataset.meta is not None:
        return dataset.meta
    if read_meta(prefix) is not None:
        raise FormatError(
            f"{meta_path(prefix)} does not describe {dataset.idx_path}: restore the files from a "
            "copy, or delete the meta file if another tool rewrote the dataset"
        )
    content = DatasetContent(
        dtype=dataset.dtype,
        layouts=[dataset.layout],
        tokens=scan_tokens(dataset.bin_path, dataset.dtype, dataset.num_tokens),
        vocab_size=None,
        metadata={},
    )
    meta = content.meta(lambda _: None)
    # Other tools' .idx may have modes, or bytes that megapack would not write.
    meta["idx"] = {
        "bytes": dataset.layout.header.file_bytes,
        "xxh3_128": file_checksum(dataset.idx_path),
    }
    return meta


def _difference(
    prefix: str, name: str, entry: Mapping[str, Any], meta: Mapping[str, Any]
) -> str | None:
    """Return how an existing .col differs from a new column; None if it is equal, or was left by a
    killed ``add_column`` with the same values."""
    existing = meta.get(COLUMNS, {}).get(name)
    if existing is not None:
        differing = [key for key in entry if existing.get(key) != entry[key]]
        return None if not differing else f"it has another {', '.join(differing)}"
    with open_regular(column_path(prefix, name)) as file:
        if file_identity(file).num_bytes == entry["bytes"] and all(
            stretch_checksum(file, size) == digest for size, digest in stretches_of(entry)
        ):
            return None
    return f"{meta_path(prefix).name} does not list it"


def find_column(columns: Mapping[str, T], name: str, prefix: str) -> T:
    """Return a column by name. Raises ConfigError, which lists the columns, if it is missing."""
    if name not in columns:
        names = ", ".join(columns) or "no columns"
        raise ConfigError(f"{prefix} has no column {name!r}; it has {names}")
    return columns[name]


def export_dataset(
    prefix: str | os.PathLike[str],
    name: str,
    output: str | os.PathLike[str],
    *,
    overwrite: bool = False,
) -> None:
    """Write a column of integers as a local dataset with the same sequences and documents, which
    GPT-NeoX reads as labels. ``prefix`` may be an address. Raises ConfigError if the column
    is missing, ``output`` exists, or a dataset cannot have the column's type."""
    dataset = IndexedDataset(prefix)
    column = find_column(dataset.columns, name, dataset.prefix)
    dtype = column.spec.dtype
    if column.spec.shape or dtype not in CODE_OF_DTYPE:
        raise ConfigError(
            f"column {name} is {column.spec}, and a dataset has one of {', '.join(CODE_OF_DTYPE)} "
            "per token: write it to a FILE.npy"
        )
    ends = np.cumsum(dataset.sequence_lengths, dtype=np.int64)
    sequences = pairwise([0, *ends.tolist()])
    with IndexedDatasetBuilder(
        output, dtype, allow_negative=dtype.startswith("int"), overwrite=overwrite
    ) as builder:
        for num_sequences in np.diff(dataset.document_indices).tolist():
            for begin, end in islice(sequences, num_sequences):
                builder.add_item(column.rows[begin:end])
            builder.end_document()


def export_column(column: Column, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
    """Write a column to a .npy file, (num_tokens, *shape); bfloat16 becomes float32, which is
    exact. Raises ConfigError if the file exists, unless ``overwrite``."""
    check_target(path, overwrite=overwrite, difference="files are not compared")
    spec, num_rows = column.spec, column.rows.shape[0]
    header = {
        "descr": np.lib.format.dtype_to_descr(spec.numbers(column.rows[:0]).dtype),
        "fortran_order": False,
        "shape": (num_rows, *spec.shape),
    }
    step = max(1, _BLOCK_BYTES // spec.row_bytes)
    with atomic_write(path) as file:
        np.lib.format.write_array_header_1_0(file, header)
        for begin in range(0, num_rows, step):
            file.write(np.ascontiguousarray(spec.numbers(column.rows[begin : begin + step])).data)
