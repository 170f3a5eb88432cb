"""Write the .idx and the meta file, and rename the files of a dataset.

- ``ArrayLayout``, ``FileLayout``: lengths of sequences and ends of documents
- ``write_index``: write an .idx from layouts; ``DocumentLog``: the layout of a builder
- ``DatasetContent``, ``check_prefix``, ``publish_dataset``: the final step of every writer
- ``write_meta``: replace a meta file; ``dataset_files``: paths of a dataset's files

The .idx is written block by block. Builder, repair and import have one layout in memory; a merge
reads the .idx of each input once per array, so its memory does not grow with the corpus. Two
documents in uint16, one of two sequences (3 and 1 tokens), and one of one sequence (2 tokens)::

    ArrayLayout(lengths=[3, 1, 2], ends=[2, 3])     # -> pointers 0, 6, 8; document indices 0, 2, 3
"""

from __future__ import annotations

import json
import os
import struct
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import xxhash
from numpy.typing import NDArray

from megapack import _core
from megapack.errors import ConfigError, DataError, FormatError
from megapack.storage.columns import column_entries, column_path
from megapack.storage.files import (
    BLOCK,
    AtomicFile,
    Buffer,
    Publishable,
    check_target,
    file_identity,
    is_at,
    open_regular,
    publish,
    read_array_blocks,
    target_of,
)
from megapack.storage.index_file import CODE_OF_DTYPE, MAGIC, path_of, read_header
from megapack.storage.metadata import (
    COLUMNS,
    FORMAT,
    VERSION,
    Checksum,
    TokenFacts,
    file_checksum,
    meta_path,
    read_meta,
)

SUFFIXES = (".bin", ".idx", ".meta.json")
MAX_SEQUENCE_LENGTH = 2**31 - 1


@dataclass(frozen=True)
class ArrayLayout:
    lengths: NDArray[np.int32]  # tokens per sequence
    ends: NDArray[np.int64] | None = None  # sequence after each document; None: 1, 2, 3, ...
    modes: NDArray[np.int8] | None = None  # per sequence; None: not multimodal

    @property
    def num_sequences(self) -> int:
        return self.lengths.size

    @property
    def num_documents(self) -> int:
        return self.lengths.size if self.ends is None else self.ends.size

    @property
    def num_tokens(self) -> int:
        return int(self.lengths.sum(dtype=np.int64))

    def length_blocks(self) -> Iterator[NDArray[np.int32]]:
        return _blocks(self.lengths)

    def end_blocks(self) -> Iterator[NDArray[np.int64]]:
        return _identity_ends(self.num_sequences) if self.ends is None else _blocks(self.ends)

    def mode_blocks(self) -> Iterator[NDArray[np.int8]]:
        assert self.modes is not None
        return _blocks(self.modes)


class FileLayout:
    """Layout in an .idx, which is open only while it is read, so that thousands can be merged."""

    def __init__(self, path: str | os.PathLike[str], multimodal: bool = False) -> None:
        self.path = Path(path)
        self.header = read_header(path)
        if multimodal and not self.header.has_modes:
            raise FormatError(f"{path} has no modes; it was not built with multimodal=True")
        self.num_sequences = self.header.num_sequences
        self.num_documents = self.header.num_documents

    def length_blocks(self) -> Iterator[NDArray[np.int32]]:
        return self._read(np.int32, self.header.lengths_at, self.num_sequences)

    def pointer_blocks(self) -> Iterator[NDArray[np.int64]]:
        """Yield the stored pointers (the byte of .bin at which each sequence begins) in blocks."""
        return self._read(np.int64, self.header.pointers_at, self.num_sequences)

    def first_document_index(self) -> int:
        """Return the first document index in the file; in a valid file it is 0."""
        if self.header.lacks_document_indices:
            return 0
        (first,) = self._read(np.int64, self.header.document_indices_at, 1)
        return int(first[0])

    def end_blocks(self) -> Iterator[NDArray[np.int64]]:
        if self.header.lacks_document_indices:
            return _identity_ends(self.num_sequences)
        at = self.header.document_indices_at + 8
        return self._read(np.int64, at, self.num_documents)

    def mode_blocks(self) -> Iterator[NDArray[np.int8]]:
        return self._read(np.int8, self.header.modes_at, self.num_sequences)

    # All of an array in memory.
    def lengths(self) -> NDArray[np.int32]:
        return np.concatenate([np.zeros(0, np.int32), *self.length_blocks()])

    def ends(self) -> NDArray[np.int64]:
        return np.concatenate([np.zeros(0, np.int64), *self.end_blocks()])

    def pointers(self) -> NDArray[np.int64]:
        return np.concatenate([np.zeros(0, np.int64), *self.pointer_blocks()])

    def has_its_name(self) -> bool:
        return is_at(self.header.identity, self.path)

    def _read(self, dtype: type[Any], offset: int, count: int) -> Iterator[NDArray[Any]]:
        with open_regular(self.path) as file:
            if file_identity(file) != self.header.identity:
                raise FormatError(f"{self.path} was replaced while it was read; start again")
            file.seek(offset)
            yield from read_array_blocks(file, dtype, count)


Layout: TypeAlias = ArrayLayout | FileLayout


def write_index(
    write: Callable[[Buffer], object],
    dtype: np.dtype[Any],
    layouts: Sequence[Layout],
    *,
    multimodal: bool = False,
) -> Checksum:
    """Write a whole .idx, byte for byte as megatron-core does; return its size and checksum.
    ``write`` receives the bytes in order; ``layouts`` have the order of their tokens in .bin, and
    pointers are recomputed. Raises FormatError if a layout has a negative length, or if its
    documents do not end at its last sequence."""
    hasher, num_bytes = xxhash.xxh3_128(), 0
    for block in _index_blocks(dtype, layouts, multimodal):
        data = memoryview(block).cast("B")
        write(data)
        hasher.update(data)
        num_bytes += data.nbytes
    return Checksum(num_bytes, hasher.hexdigest())


def _index_blocks(
    dtype: np.dtype[Any], layouts: Sequence[Layout], multimodal: bool
) -> Iterator[Buffer]:
    num_sequences = sum(layout.num_sequences for layout in layouts)
    num_documents = sum(layout.num_documents for layout in layouts)
    code = CODE_OF_DTYPE[dtype.name]
    yield MAGIC + struct.pack("<QBQQ", 1, code, num_sequences, num_documents + 1)
    for layout in layouts:
        yield from layout.length_blocks()
    begin = 0
    for layout in layouts:
        for lengths in layout.length_blocks():
            pointers, begin = _core.scan_lengths(lengths, dtype.itemsize, begin)
            yield pointers
    yield np.zeros(1, np.int64)
    begin = 0
    for layout in layouts:
        end = 0
        for ends in layout.end_blocks():
            shifted, end = _core.shift_document_ends(ends, layout.num_sequences, end, begin)
            yield shifted
        if end != layout.num_sequences:
            raise FormatError(
                f"documents end at sequence {end} of {layout.num_sequences}; "
                "`megapack-build repair` repairs files that lost them in a merge"
            )
        begin += layout.num_sequences
    if multimodal:
        for layout in layouts:
            yield from layout.mode_blocks()


def _blocks(array: NDArray[Any]) -> Iterator[NDArray[Any]]:
    for begin in range(0, array.size, BLOCK):
        yield array[begin : begin + BLOCK]


def _identity_ends(num_sequences: int) -> Iterator[NDArray[np.int64]]:
    for begin in range(0, num_sequences, BLOCK):
        yield np.arange(begin + 1, min(begin + BLOCK, num_sequences) + 1, dtype=np.int64)


class DocumentLog:
    """Layout of a dataset under construction: 4 bytes per sequence and, as soon as a document does
    not have exactly one sequence, 8 bytes per document."""

    def __init__(self, multimodal: bool) -> None:
        self.multimodal = multimodal
        self.num_documents = 0
        self._lengths = array("i")  # grows by reallocation, without a second copy
        self._ends: array[int] | None = None  # None: every sequence is one document
        self._modes = array("b")

    @property
    def num_sequences(self) -> int:
        return len(self._lengths)

    def add_sequences(self, lengths: Sequence[int], modes: Sequence[int] | None) -> None:
        self._lengths.extend(lengths)
        if self.multimodal:
            self._modes.extend(modes if modes is not None else bytes(len(lengths)))

    def end_document(self) -> None:
        self.num_documents += 1
        if self._ends is None:
            if self.num_documents == len(self._lengths):
                return
            self._ends = array("q", np.arange(1, self.num_documents, dtype=np.int64).tobytes())
        self._ends.append(len(self._lengths))

    def add_layout(self, layout: Layout) -> None:
        before = len(self._lengths)
        for lengths in layout.length_blocks():
            self._lengths.frombytes(lengths.tobytes())
        for ends in layout.end_blocks():
            self._add_ends(before + ends)
        if self.multimodal:
            for modes in layout.mode_blocks():
                self._modes.frombytes(modes.tobytes())

    def _add_ends(self, ends: NDArray[np.int64]) -> None:
        first = self.num_documents + 1
        self.num_documents += ends.size
        if self._ends is None:
            if np.array_equal(ends, np.arange(first, first + ends.size)):
                return
            self._ends = array("q", np.arange(1, first, dtype=np.int64).tobytes())
        self._ends.frombytes(ends.tobytes())

    def require_closed(self) -> None:
        """Raise DataError if sequences were added after the last ``end_document()``."""
        last_end = self.num_documents if self._ends is None else self._ends[-1]
        if num_open := len(self._lengths) - last_end:
            raise DataError(
                f"{num_open} sequences were added after document {self.num_documents - 1} ended; "
                "call end_document() first"
            )

    def layout(self) -> ArrayLayout:
        """Return everything added so far as views; nothing may be added while they exist."""
        ends = None if self._ends is None else np.frombuffer(self._ends, np.int64)
        lengths = np.frombuffer(self._lengths, np.int32) if self._lengths else np.zeros(0, np.int32)
        modes = np.frombuffer(self._modes, np.int8) if self._modes else np.zeros(0, np.int8)
        return ArrayLayout(lengths, ends, modes if self.multimodal else None)


@dataclass(frozen=True, kw_only=True)
class DatasetContent:
    """Contents of a new dataset: facts about its .bin, and all of its .idx and meta file."""

    dtype: np.dtype[Any]
    layouts: Sequence[Layout]
    tokens: TokenFacts
    vocab_size: int | None
    metadata: Mapping[str, Any]
    multimodal: bool = False
    columns: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # entries by name

    def meta(self, write: Callable[[Buffer], object]) -> dict[str, Any]:
        """Write the .idx, then return the content of the meta file (see ``metadata.py``)."""
        idx = write_index(write, self.dtype, self.layouts, multimodal=self.multimodal)
        tokens = self.tokens
        low, high = tokens.token_range or (None, None)
        return {
            "format": FORMAT,
            "version": VERSION,
            "dtype": self.dtype.name,
            "num_sequences": sum(layout.num_sequences for layout in self.layouts),
            "num_documents": sum(layout.num_documents for layout in self.layouts),
            "num_tokens": tokens.num_tokens,
            "min_token_id": low,
            "max_token_id": high,
            "vocab_size": self.vocab_size,
            "bin": {
                "bytes": sum(size for size, _ in tokens.checksums),
                "xxh3_128": [f"{size} {digest}" for size, digest in tokens.checksums],
            },
            "idx": {"bytes": idx.num_bytes, "xxh3_128": idx.xxh3_128},
            **({COLUMNS: dict(sorted(self.columns.items()))} if self.columns else {}),
            **self.metadata,
        }

    def difference_from(self, prefix: str) -> str | None:
        """Return how the dataset at a prefix differs: meta files, checksum of .idx, sizes of .bin
        and columns. None if it equals this one, or is a part of it that a killed process left."""
        idx_path, bin_path = path_of(prefix, ".idx"), path_of(prefix, ".bin")
        try:
            existing = read_meta(prefix)
        except FormatError as error:
            return str(error)
        if existing is None:
            whole = idx_path.exists() and bin_path.exists()
            return "it has no meta file to compare" if whole else "it is not complete"
        meta = json.loads(json.dumps(self.meta(lambda _: None)))
        for key in meta | existing:
            old, new = existing.get(key), meta.get(key)
            if old != new:
                short = not isinstance(old, dict | list) and not isinstance(new, dict | list)
                return f"its {key} is {old!r}, not {new!r}" if short else f"its {key} differs"
        if idx_path.exists() and file_checksum(idx_path) != meta["idx"]["xxh3_128"]:
            return "its .idx does not match its meta file"
        sizes = {bin_path: meta["bin"]["bytes"]}
        sizes |= {column_path(prefix, name): e["bytes"] for name, e in self.columns.items()}
        for path, num_bytes in sizes.items():
            if path.exists() and path.stat().st_size != num_bytes:
                return f"its {path.name[len(Path(prefix).name) :]} does not match its meta file"
        return None


def dataset_files(prefix: str) -> list[Path]:
    """Return the paths of a dataset's files in the order in which to remove them: .idx, .bin, the
    columns that the meta file lists, .meta.json; they need not exist. Raises FormatError if the
    meta file is damaged."""
    names = column_entries(read_meta(prefix), meta_path(prefix))
    columns = [column_path(prefix, name) for name in names]
    return [path_of(prefix, ".idx"), path_of(prefix, ".bin"), *columns, meta_path(prefix)]


def check_prefix_names(
    prefix: str, *, keeps_bin: bool = False, columns: Iterable[str] = ()
) -> list[Path]:
    """Return the paths of a new dataset's files, without .bin if ``keeps_bin`` (the existing .bin
    becomes the dataset's). Raises ConfigError if a file cannot be written (see ``target_of``), or
    if .bin is a link (import creates links): its target may belong to someone else."""
    bin_path = path_of(prefix, ".bin")
    if not keeps_bin and bin_path.is_symlink() and bin_path.exists():
        raise ConfigError(
            f"{bin_path} is a link to {bin_path.resolve()}, which would be replaced: remove the "
            "link, or choose another prefix"
        )
    paths = [path_of(prefix, s) for s in SUFFIXES if s != ".bin" or not keeps_bin]
    return [target_of(path) for path in (*paths, *(column_path(prefix, n) for n in columns))]


def check_prefix(
    prefix: str,
    *,
    overwrite: bool,
    difference: str | Callable[[], str | None],
    keeps_bin: bool = False,
    columns: Iterable[str] = (),
) -> bool:
    """Return what ``check_target`` returns for a dataset with these columns, but True for an equal
    dataset without .idx, .bin or a column's file. Raises the ConfigErrors of ``check_target`` and
    ``check_prefix_names``."""
    columns = list(columns)
    paths = check_prefix_names(prefix, keeps_bin=keeps_bin, columns=columns)
    existing = [path for path in paths if path.exists()]
    is_new = not existing or check_target(existing[0], overwrite=overwrite, difference=difference)
    needed = [path_of(prefix, ".bin"), path_of(prefix, ".idx")]
    return is_new or not all(
        path.exists() for path in (*needed, *(column_path(prefix, name) for name in columns))
    )


def publish_dataset(
    prefix: str,
    content: DatasetContent,
    bin_file: Publishable | None,
    *,
    columns: Sequence[Publishable] = (),
    idx_path: str | os.PathLike[str] | None = None,
    durable: bool = True,
) -> None:
    """Write the .idx and the meta file, and rename all files. After an OSError no new file exists.

    Readers find the old dataset, none, or the new one at any moment: the old .idx is removed before
    the new .bin is renamed, and the new .idx is renamed last (see ``open_pair``). The meta file is
    renamed first: a repeated run compares it to recognize what a killed process left. Columns of
    the old dataset are removed while its meta file still lists them.

    ``bin_file`` contains the unpublished tokens; it is None if .bin exists already. ``columns`` are
    the unpublished columns of ``content``. If ``durable``, wait until everything is on the disk.
    """
    idx = AtomicFile(path_of(prefix, ".idx") if idx_path is None else idx_path)
    meta = AtomicFile(meta_path(prefix))
    try:
        _write_meta(meta, content.meta(idx.write))
        files = [meta, *columns, *([] if bin_file is None else [bin_file]), idx]
        if durable:
            for file in files:  # do the slowest part while the old dataset still exists
                file.sync()
        stale = _stale_columns(prefix, content.columns)
        idx.path.unlink(missing_ok=True)
        for path in stale:
            path.unlink(missing_ok=True)
        publish(*files, durable=durable)
    finally:
        idx.discard()
        meta.discard()


def _stale_columns(prefix: str, new: Iterable[str]) -> list[Path]:
    """Return the columns' files of the dataset at a prefix that a new one does not replace."""
    try:
        old = column_entries(read_meta(prefix), meta_path(prefix))
    except FormatError:
        return []  # it is not known which files megapack created
    return [column_path(prefix, name) for name in old.keys() - set(new)]


def write_meta(prefix: str, meta: Mapping[str, Any], *files: Publishable) -> None:
    """Replace the meta file of a dataset; rename ``files`` before it."""
    target = AtomicFile(meta_path(prefix))
    try:
        _write_meta(target, meta)
        publish(*files, target)
    finally:
        target.discard()


def _write_meta(file: AtomicFile, meta: Mapping[str, Any]) -> None:
    file.write(f"{json.dumps(meta, indent=1, ensure_ascii=False)}\n".encode())
