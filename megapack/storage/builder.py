"""``IndexedDatasetBuilder``: write documents to disk, byte for byte as megatron-core does.

Three documents, one by one and many at once::

    with IndexedDatasetBuilder("corpus", np.uint16) as builder:
        builder.add_document([7, 8, 0])
        builder.add_documents([9, 0, 5, 0], offsets=[0, 2, 4])
    # -> corpus.bin: 7 8 0 9 0 5 0; corpus.idx: lengths 3, 2, 2; corpus.meta.json

A column has one row per token::

    specs = {"rewards": ColumnSpec(dtype="float32")}
    with IndexedDatasetBuilder("b", np.uint16, columns=specs) as b:
        b.add_document([7, 8, 0], columns={"rewards": [0, 0.5, 1]})
    # -> also b.rewards.col: 0 0.5 1
"""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from megapack.calls import checked_call
from megapack.errors import DataError
from megapack.storage.columns import ColumnSpec, ColumnWriter
from megapack.storage.index_file import path_of, pick_dtype, prefix_of
from megapack.storage.index_writer import (
    MAX_SEQUENCE_LENGTH,
    ArrayLayout,
    DatasetContent,
    DocumentLog,
    check_prefix,
    publish_dataset,
)
from megapack.storage.locks import WriterLock
from megapack.storage.metadata import check_metadata
from megapack.storage.tokens import InputDataset, TokenLimits, TokenWriter, as_tokens


class IndexedDatasetBuilder:
    """Writer of ``<prefix>.bin``, ``<prefix>.idx`` and ``<prefix>.meta.json``.

    ``finalize()`` gives the files their names, so an exception in a ``with`` block, ``abort()``,
    deleting the builder or killing the process leaves nothing that looks like a dataset. A method
    that raises adds nothing. Memory grows by 4 bytes per sequence, and by 8 more per document if
    some document has several sequences.

    Megatron's calling convention works as well: a first argument ending in ``.bin`` and
    ``finalize(idx_path)``.

    Args:
        prefix: the files' common name.
        dtype: token type on disk: int32 or uint16 (for every host), or int8, uint8, int16, int64.
        multimodal: store a mode (int8) per sequence.
        vocab_size: number of token ids; ids must be smaller. Recorded in the meta file.
        allow_negative: accept negative values.
        metadata: facts for the meta file that JSON can represent (tokenizer, command, ...).
        durable: if False, do not wait for the disk. After a crash of the machine (not the process)
            files with final names may be damaged, so readers must check their checksums.
        overwrite: replace a dataset at ``prefix``.
        columns: types of the dataset's columns by name. Each call that adds tokens then needs
            ``columns``: name -> rows (see ``ColumnSpec.rows``), one per token, for every column.
            Columns named labels and weights make the labels and the loss mask of batches; their
            types are ``storage.columns.INTERPRETED``.

    Raises:
        ConfigError: a column cannot have its name.
        ValueError: token files cannot have the dtype, or it is too small for vocab_size.
        OSError: the directory does not exist or is not writable.
    """

    @checked_call
    def __init__(
        self,
        prefix: str | os.PathLike[str],
        dtype: DTypeLike = np.int32,
        multimodal: bool = False,
        *,
        vocab_size: int | None = None,
        allow_negative: bool = False,
        metadata: Mapping[str, Any] | None = None,
        durable: bool = True,
        overwrite: bool = False,
        columns: Mapping[str, ColumnSpec] | None = None,
    ) -> None:
        self.prefix = prefix_of(prefix)
        self.multimodal = multimodal
        self._durable = durable
        self.metadata = dict(metadata or {})
        self.dtype = pick_dtype(dtype)
        check_metadata(self.metadata)
        limits = TokenLimits(self.dtype, vocab_size, allow_negative)
        self._log = DocumentLog(multimodal)
        self._columns: list[ColumnWriter] = []
        self._lock = WriterLock(self.prefix, what="a builder")
        try:
            check_prefix(
                self.prefix,
                overwrite=overwrite,
                difference="files are not compared",
                columns=columns or (),
            )
            for name, spec in (columns or {}).items():
                self._columns.append(ColumnWriter(self.prefix, name, spec))
            self._tokens = TokenWriter(path_of(self.prefix, ".bin"), limits)
        except BaseException:
            for writer in self._columns:
                writer.target.discard()
            self._lock.release()
            raise
        self._open = True

    @property
    def num_documents(self) -> int:
        """Number of documents added so far, without the one that is not ended yet."""
        return self._log.num_documents

    @property
    def num_sequences(self) -> int:
        return self._log.num_sequences

    @property
    def num_tokens(self) -> int:
        return self._tokens.num_tokens

    def add_item(
        self, tokens: Any, mode: int = 0, *, columns: Mapping[str, Any] | None = None
    ) -> None:
        """Add one sequence (integers: an array, a tensor, a list, or a list of numeric strings) to
        the current document; ``end_document()`` ends it. ``mode`` is the sequence's mode if the
        dataset is multimodal. Raises DataError if an id is outside the dtype or the vocabulary, or
        if a column does not have one row of its type per token."""
        self._add_sequences(tokens, None, [mode] if self.multimodal else None, columns)

    def add_document(
        self,
        tokens: Any,
        lengths: Sequence[int] | None = None,
        modes: Sequence[int] | None = None,
        *,
        columns: Mapping[str, Any] | None = None,
    ) -> None:
        """Add one document with all its ``tokens`` (see ``add_item``), ``lengths`` (tokens per
        sequence; by default one sequence), ``modes`` (per sequence, zeros by default) and the rows
        of every column. Raises DataError as ``add_item``, or if the lengths have another sum."""
        self._add_sequences(tokens, lengths, modes, columns)
        self._log.end_document()

    def _add_sequences(
        self,
        tokens: Any,
        lengths: Sequence[int] | None,
        modes: Sequence[int] | None,
        columns: Mapping[str, Any] | None,
    ) -> None:
        self._require_open()
        ids = as_tokens(tokens)
        lengths = [ids.size] if lengths is None else [operator.index(n) for n in lengths]
        if any(length < 0 for length in lengths) or sum(lengths) != ids.size:
            raise DataError(
                f"document {self.num_documents} has {ids.size} tokens; lengths sum to "
                f"{sum(lengths)}"
            )
        _check_length(max(lengths, default=0))
        if modes is not None:
            _check_modes(modes)
            if len(modes) != len(lengths):
                raise DataError(
                    f"document {self.num_documents} has {len(lengths)} sequences, {len(modes)} "
                    "modes"
                )
        append_tokens = partial(self._tokens.append, ids, first_document=self.num_documents)
        self._append(columns, ids.size, append_tokens)
        self._log.add_sequences(lengths, modes)

    def add_documents(
        self, flat_tokens: Any, offsets: Any, *, columns: Mapping[str, Any] | None = None
    ) -> None:
        """Add many documents of one sequence each, at the speed of a copy: document d is
        ``flat_tokens[offsets[d]:offsets[d + 1]]``. ``offsets`` are (num_documents + 1,) integers;
        the first is 0, the last ``len(flat_tokens)``. ``columns`` has the rows of all tokens.
        Raises DataError if an id is outside the dtype or the vocabulary, the offsets are wrong, or
        columns do not fit."""
        self._require_open()
        self._log.require_closed()
        ids, bounds = as_tokens(flat_tokens), np.asarray(offsets)
        lengths = _lengths_between(bounds, ids.size)
        append = partial(self._tokens.append, ids, bounds, first_document=self.num_documents)
        self._append(columns, ids.size, append)
        modes = np.zeros(lengths.size, np.int8) if self.multimodal else None
        self._log.add_layout(ArrayLayout(lengths, None, modes))

    def add_index(self, prefix: str | os.PathLike[str]) -> None:
        """Add all documents of another dataset of the same dtype and columns. If its meta file has
        checksums of its tokens, the kernel copies them. (``merge`` joins many datasets in constant
        memory, and converts dtypes.) Raises DataError if dtype or columns differ or an id is
        outside the limits, and FormatError if the other dataset is damaged."""
        self._require_open()
        self._log.require_closed()
        dataset = InputDataset(prefix, self.multimodal)
        if dataset.dtype != self.dtype:
            raise DataError(
                f"{dataset.prefix} has {dataset.dtype.name} tokens, this dataset "
                f"{self.dtype.name}; merge(..., dtype=...) converts"
            )
        specs = {name: entry.spec for name, entry in dataset.columns.items()}
        if specs != {writer.name: writer.spec for writer in self._columns}:
            raise DataError(
                f"{dataset.prefix} has the columns {_named(specs)}, this dataset "
                f"{_named(writer.name for writer in self._columns)} or others of these types; "
                "merge(..., missing_columns=...) fills or drops columns"
            )

        def append_all() -> None:
            for writer in self._columns:
                dataset.copy_column(writer)
            self._tokens.append_dataset(dataset)

        self._all_or_nothing(append_all)
        self._log.add_layout(dataset.layout)

    def end_document(self) -> None:
        """End a document: all sequences added since the previous one ended (possibly none)."""
        self._require_open()
        self._log.end_document()

    def finalize(self, idx_path: str | os.PathLike[str] | None = None) -> None:
        """Write the index and rename all files to their final names; ``idx_path`` is the path of
        the .idx, as Megatron's callers pass it, by default ``<prefix>.idx``. Raises DataError if
        sequences were added after the last ``end_document()``, and OSError if the disk is full, for
        example; nothing is left behind."""
        self._require_open()
        self._log.require_closed()
        try:
            content = DatasetContent(
                dtype=self.dtype,
                layouts=[self._log.layout()],
                tokens=self._tokens.finish(),
                vocab_size=self._tokens.limits.vocab_size,
                metadata=self.metadata,
                multimodal=self.multimodal,
                columns={writer.name: writer.finish() for writer in self._columns},
            )
            publish_dataset(
                self.prefix,
                content,
                self._tokens.target,
                columns=[writer.target for writer in self._columns],
                idx_path=idx_path,
                durable=self._durable,
            )
        finally:
            self.abort()

    def abort(self) -> None:
        """Remove the temporary files and release the lock; a finalized dataset stays."""
        self._open = False
        for target in (self._tokens.target, *(writer.target for writer in self._columns)):
            target.discard()
        self._lock.release()

    def _append(
        self, columns: Mapping[str, Any] | None, num_tokens: int, append_tokens: Callable[[], None]
    ) -> None:
        """Append tokens and the rows of all columns, or nothing."""
        if not (self._columns or columns):
            append_tokens()
            return
        given = columns or {}
        if given.keys() != {writer.name for writer in self._columns}:
            raise DataError(
                f"document {self.num_documents} has the columns {_named(given)}, this dataset "
                f"{_named(writer.name for writer in self._columns)}; give rows of each of them"
            )
        all_rows = []
        for writer in self._columns:
            try:
                rows = writer.rows(given[writer.name])
                if len(rows) != num_tokens:
                    raise DataError(f"{len(rows)} rows for {num_tokens} tokens; give one per token")
            except DataError as error:
                where = f"document {self.num_documents}, column {writer.name}"
                raise DataError(f"{where}: {error}") from error
            all_rows.append(rows)

        def append_all() -> None:
            for writer, rows in zip(self._columns, all_rows, strict=True):
                writer.append(rows)
            append_tokens()

        self._all_or_nothing(append_all)

    def _all_or_nothing(self, append: Callable[[], None]) -> None:
        """Append to the columns, then to the tokens; undo the former if it raises."""
        marks = [writer.mark() for writer in self._columns]
        try:
            append()
        except BaseException:
            for writer, mark in zip(self._columns, marks, strict=True):
                writer.reset(mark)
            raise

    def __enter__(self) -> IndexedDatasetBuilder:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None and self._open:
            self.finalize()
        self.abort()

    def _require_open(self) -> None:
        if not self._open:
            raise ValueError(
                f"the builder of {self.prefix} was finalized or aborted; create a new one"
            )


def _named(columns: Iterable[str]) -> str:
    return ", ".join(sorted(columns)) or "none"


def _check_length(length: int) -> None:
    if length > MAX_SEQUENCE_LENGTH:
        raise DataError(
            f"a sequence has {length} tokens; the format's limit is {MAX_SEQUENCE_LENGTH}: pass "
            "the lengths of several sequences to add_document()"
        )


def _check_modes(modes: Sequence[int]) -> None:
    for mode in modes:
        if not -128 <= operator.index(mode) <= 127:
            raise DataError(f"a sequence has mode {mode}; modes are int8, -128 to 127")


def _lengths_between(offsets: NDArray[Any], num_tokens: int) -> NDArray[np.int32]:
    fits = offsets.ndim == 1 and offsets.size > 0 and offsets.dtype.kind in "iu"
    if not fits or offsets[0] != 0 or offsets[-1] != num_tokens:
        description = f"an array of shape {offsets.shape}"
        if offsets.ndim == 1 and offsets.size > 0:
            description = f"{offsets.dtype.name} from {offsets[0]} to {offsets[-1]}"
        raise DataError(
            f"offsets are {description}; they must be num_documents + 1 integers, from 0 to the "
            f"number of tokens ({num_tokens})"
        )
    lengths = np.diff(offsets.astype(np.int64, copy=False))
    if lengths.size and lengths.min() < 0:
        raise DataError(f"offsets decrease after document {int(lengths.argmin())}")
    _check_length(int(lengths.max(initial=0)))
    return lengths.astype(np.int32)
