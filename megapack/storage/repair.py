"""Repair a damaged .idx, as far as the other files prove its content.

The new .idx gets its name when it is complete; the old one is kept as ``<prefix>.idx.orig``. Tokens
and columns are never changed; they are at most truncated or dropped, and only on request.

    repair("corpus")
    # -> a sentence per change, such as "recomputed the pointers of 3 sequences"; [] for a valid
    #    dataset; FormatError, which names the argument to pass, if the repair would lose data
"""

from __future__ import annotations

import contextlib
import math
import os
import struct
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megapack.errors import FormatError
from megapack.storage.columns import ColumnEntry, ColumnWriter, column_entries, column_path
from megapack.storage.files import (
    BLOCK,
    AtomicFile,
    atomic_write,
    file_identity,
    open_regular,
    publish,
    read_array_blocks,
    target_of,
)
from megapack.storage.index_file import DTYPE_OF_CODE, HEADER_BYTES, MAGIC, path_of, prefix_of
from megapack.storage.index_writer import ArrayLayout, DatasetContent, publish_dataset, write_index
from megapack.storage.locks import WriterLock
from megapack.storage.metadata import (
    COLUMNS,
    TokenFacts,
    file_checksum,
    meta_path,
    meta_remedy,
    own_metadata,
    read_meta,
)
from megapack.storage.survey import Survey, survey
from megapack.storage.tokens import scan_tokens


class _Index(NamedTuple):
    dtype: np.dtype[Any]
    layout: ArrayLayout

    @property
    def num_bytes(self) -> int:
        return self.layout.num_tokens * self.dtype.itemsize


def repair(
    prefix: str | os.PathLike[str],
    *,
    drop_truncated: bool = False,
    drop_trailing: bool = False,
    drop_columns: bool = False,
    one_document_per_sequence: bool = False,
    dry_run: bool = False,
) -> list[str]:
    """Repair a dataset's .idx in place; return what was (or would be) done, one sentence each.

    By default, repairs a dtype code of another tool's table (proven by the pointers and the size
    of .bin), pointers that overflowed or do not follow from the lengths, documents that are missing
    at the end or lost in a GPT-NeoX merge (each sequence becomes one), an .idx that was truncated
    after its lengths, and bytes after the end of the .idx.

    Args:
        prefix: the dataset's prefix, with or without ``.idx``.
        drop_truncated: if .bin is too short, keep the documents that are complete.
        drop_trailing: remove bytes of .bin that belong to no sequence, and bytes of columns that
            belong to no token.
        drop_columns: remove columns whose file is missing or too short.
        one_document_per_sequence: if document indices are invalid, make each sequence a document.
        dry_run: change nothing.

    Raises:
        FormatError: the dataset cannot be repaired, or only with one of the arguments above.
        LockedError: another process writes this dataset.
        OSError: a file cannot be read or written; the old .idx is unchanged.
    """
    prefix = prefix_of(prefix)
    idx_path, bin_path = path_of(prefix, ".idx"), path_of(prefix, ".bin")
    done: list[str] = []
    with contextlib.nullcontext() if dry_run else WriterLock(prefix, what="repair"):
        try:
            facts = survey(idx_path, bin_path)
        except FormatError:
            index = _salvage(idx_path, bin_path, done)
            if index is None:
                raise
        else:
            index = _repair_index(facts, one_document_per_sequence, done)
        index, cut = _fit(index, bin_path, drop_truncated, drop_trailing, done)
        notes: list[str] = []
        meta = _meta_of(prefix, notes)
        columns = column_entries(meta, meta_path(prefix))
        options = {"drop_trailing": drop_trailing, "drop_columns": drop_columns}
        kept = _fit_columns(prefix, columns, index, done, **options)
        if done and not dry_run:
            done += notes
            _replace(prefix, index, cut, meta, kept)
    return done


def _repair_index(facts: Survey, one_document_per_sequence: bool, done: list[str]) -> _Index:
    header, name = facts.layout.header, facts.layout.path
    dtype, text = facts.meaning()
    if dtype is None:
        raise FormatError(f"{name} cannot be repaired: dtype code {header.dtype_code} means {text}")
    if dtype != facts.declared_dtype:
        done.append(f"dtype code {header.dtype_code} means {text}: now {dtype.name}")
    if not facts.widths:
        if facts.names_another_order(dtype.itemsize):  # recomputing would mix up the sequences
            raise FormatError(
                f"{name} is not damaged: its sequences are in another order in .bin; "
                "`megapack-build import` rewrites them in order"
            )
        done.append(f"recomputed the pointers of {header.num_sequences} sequences")
    modes = None
    if facts.is_multimodal:
        modes = np.concatenate([*facts.layout.mode_blocks()])
    elif facts.num_trailing:
        done.append(f"dropped {facts.num_trailing} bytes after the end of the index")
    ends = _repair_documents(facts, one_document_per_sequence, done)
    return _Index(dtype, ArrayLayout(facts.layout.lengths(), ends, modes))


def _repair_documents(
    facts: Survey, one_document_per_sequence: bool, done: list[str]
) -> NDArray[np.int64] | None:
    header, name = facts.layout.header, facts.layout.path
    if header.lacks_document_indices:
        done.append(f"made each of the {header.num_sequences} sequences a document")
        return None
    if facts.first_bad_document is not None:
        if not one_document_per_sequence:
            raise FormatError(
                f"{name}: document {facts.first_bad_document} ends before it begins or too late; "
                "pass one_document_per_sequence (--one-document-per-sequence) to discard documents"
            )
        done.append(f"discarded the documents: now each of {header.num_sequences} sequences is one")
        return None
    if facts.first_document_index:
        done.append(f"document 0 began at sequence {facts.first_document_index}: now at 0")
    return _complete(facts.layout.ends(), header.num_sequences, done)


def _complete(ends: NDArray[np.int64], num_sequences: int, done: list[str]) -> NDArray[np.int64]:
    """Return document ends up to the last sequence; a sequence without one becomes a document."""
    last = int(ends[-1]) if ends.size else 0
    if last == num_sequences:
        return ends
    done.append(f"made sequences {last} to {num_sequences} a document each")
    return np.concatenate([ends, np.arange(last + 1, num_sequences + 1)])


def _salvage(idx_path: Path, bin_path: Path, done: list[str]) -> _Index | None:
    """Return the index of an .idx that was truncated after its lengths (disk full), else None."""
    with open_regular(idx_path) as file:
        size = file_identity(file).num_bytes
        head = file.read(HEADER_BYTES)
        if len(head) < HEADER_BYTES or head[: len(MAGIC)] != MAGIC:
            return None
        _, code, num_sequences, num_indices = struct.unpack_from("<QBQQ", head, len(MAGIC))
        documents_at = HEADER_BYTES + 12 * num_sequences
        if size < HEADER_BYTES + 4 * num_sequences or size >= documents_at + 8 * num_indices:
            return None
        lengths = np.fromfile(file, np.int32, num_sequences)
        file.seek(documents_at)
        indices = np.fromfile(file, np.int64, min(num_indices, max(0, size - documents_at) // 8))
    dtype = DTYPE_OF_CODE.get(code)
    num_tokens = int(lengths.sum(dtype=np.int64))
    is_plausible = lengths.min(initial=0) >= 0 and (np.diff(indices, prepend=0) >= 0).all()
    # The size of .bin proves that the lengths are complete and correct.
    if dtype is None or not is_plausible or num_tokens * dtype.itemsize != bin_path.stat().st_size:
        return None
    done.append(f"completed an .idx that ended after {size} bytes")
    return _Index(dtype, ArrayLayout(lengths, _complete(indices[1:], num_sequences, done)))


def _fit(
    index: _Index, bin_path: Path, drop_truncated: bool, drop_trailing: bool, done: list[str]
) -> tuple[_Index, int | None]:
    """Return the index of the documents in .bin, and the size to cut .bin to (None: keep it)."""
    size, needed = bin_path.stat().st_size, index.num_bytes
    if size < needed:
        documents, sequences = _whole(index, size)
        if not drop_truncated:
            raise FormatError(
                f"{bin_path} has {size} of {needed} bytes; pass drop_truncated "
                f"(--drop-truncated) to keep the {documents} complete documents"
            )
        lengths, ends, modes = index.layout.lengths, index.layout.ends, index.layout.modes
        dropped = index.layout.num_documents - documents
        done.append(f"dropped {dropped} documents that .bin no longer has, kept {documents}")
        kept = ArrayLayout(
            lengths[:sequences],
            None if ends is None else ends[:documents],
            None if modes is None else modes[:sequences],
        )
        index = index._replace(layout=kept)
        needed = index.num_bytes
    elif size > needed and drop_trailing:
        done.append(f"removed {size - needed} bytes of .bin that belong to no sequence")
    elif size > needed:
        return index, None
    if needed == size:
        return index, None
    if bin_path.is_symlink() or bin_path.stat().st_nlink > 1:
        raise FormatError(
            f"{bin_path} is a link or has hard links; truncating it would change all its names: "
            "replace it with a copy"
        )
    return index, needed


def _whole(index: _Index, num_bytes: int) -> tuple[int, int]:
    """Return how many documents and sequences the first ``num_bytes`` of .bin contain."""
    bytes_before = np.cumsum(index.layout.lengths, dtype=np.int64) * index.dtype.itemsize
    sequences = int(np.searchsorted(bytes_before, num_bytes, side="right"))
    ends = index.layout.ends
    if ends is None:
        return sequences, sequences
    documents = int(np.searchsorted(ends, sequences, side="right"))
    return documents, int(ends[documents - 1]) if documents else 0


def _fit_columns(
    prefix: str,
    columns: Mapping[str, ColumnEntry],
    index: _Index,
    done: list[str],
    *,
    drop_trailing: bool,
    drop_columns: bool,
) -> dict[str, ColumnEntry]:
    kept = {}
    for name, entry in columns.items():
        path = column_path(prefix, name)
        size = path.stat().st_size if path.exists() else 0
        needed = index.layout.num_tokens * entry.spec.row_bytes
        if not path.exists() or size < needed:
            if not drop_columns:
                raise FormatError(
                    f"{path} has {size} of {needed} bytes: restore it from a copy, or pass "
                    f"drop_columns (--drop-columns) to remove the column"
                )
            done.append(f"removed column {name}, whose file has {size} of {needed} bytes")
            continue
        if size > needed:
            if size > entry.bytes and not drop_trailing:
                raise FormatError(
                    f"{path} has {size - entry.bytes} bytes after its last row; pass drop_trailing "
                    "(--drop-trailing) to remove them"
                )
            done.append(f"removed {size - needed} bytes of column {name} that belong to no token")
        kept[name] = entry
    return kept


def _replace(
    prefix: str,
    index: _Index,
    cut: int | None,
    meta: Mapping[str, Any] | None,
    columns: Mapping[str, ColumnEntry],
) -> None:
    idx_path, bin_path = path_of(prefix, ".idx"), path_of(prefix, ".bin")
    dtype, layout = index
    _keep_original(idx_path)
    multimodal = layout.modes is not None
    if meta is None:
        with atomic_write(idx_path) as file:
            write_index(file.write, dtype, [layout], multimodal=multimodal)
    else:
        # The recorded facts stay valid if neither the size of .bin nor the dtype changed.
        is_known = meta["bin"]["bytes"] == index.num_bytes and meta["dtype"] == dtype.name
        scan = partial(scan_tokens, bin_path, dtype, layout.num_tokens)
        with contextlib.ExitStack() as unpublished:
            entries: dict[str, Any] = {}
            files = []
            for name, entry in columns.items():
                path = column_path(prefix, name)
                num_bytes = layout.num_tokens * entry.spec.row_bytes
                if path.stat().st_size == num_bytes == entry.bytes:
                    entries[name] = meta[COLUMNS][name]
                    continue
                writer = ColumnWriter(prefix, name, entry.spec)
                unpublished.callback(writer.target.discard)
                _copy_rows(writer, path, layout.num_tokens)
                entries[name] = writer.finish()
                files.append(writer.target)
            content = DatasetContent(
                dtype=dtype,
                layouts=[layout],
                tokens=TokenFacts.of_meta(meta) if is_known else scan(),
                vocab_size=meta["vocab_size"],
                metadata=own_metadata(meta),
                multimodal=multimodal,
                columns=entries,
            )
            publish_dataset(prefix, content, None, columns=files)
    if cut is not None:
        os.truncate(bin_path, cut)


def _copy_rows(writer: ColumnWriter, path: Path, num_rows: int) -> None:
    with open_regular(path) as file:
        width = math.prod(writer.spec.shape)
        block_size = width * max(1, BLOCK // width)
        numbers = writer.spec.numpy_dtype, num_rows * width
        for block in read_array_blocks(file, *numbers, block_size):
            writer.append(block.reshape(-1, *writer.spec.shape))


def _meta_of(prefix: str, done: list[str]) -> dict[str, Any] | None:
    """Return the meta file if it describes the .idx before the repair, else None."""
    try:
        meta = read_meta(prefix)
    except FormatError:
        done.append(f"did not change the damaged meta file; {meta_remedy(prefix)}")
        return None
    if meta is None or file_checksum(path_of(prefix, ".idx")) == meta["idx"]["xxh3_128"]:
        return meta
    remedy = meta_remedy(prefix)
    done.append(f"did not change the meta file: it describes another .idx; {remedy}")
    return None


def _keep_original(idx_path: Path) -> None:
    """Give the old .idx the second name ``<prefix>.idx.orig``, atomically, if that name is free."""
    original, old = idx_path.with_name(idx_path.name + ".orig"), target_of(idx_path)
    if original.exists():
        return
    try:
        os.link(old, original)
    except OSError:  # another file system, or one without links
        copy = AtomicFile(original)
        with open_regular(old) as file:
            copy.copy_from(file, file_identity(file).num_bytes)
        publish(copy)
