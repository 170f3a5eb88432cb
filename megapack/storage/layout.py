"""Layouts (lengths of sequences, ends of documents) and the .idx that is written of them.

It is written block by block, so that memory does not grow with the corpus: a builder has one layout
in memory; a merge has one per input, read from its .idx again for every array; repair and import
bring arrays of their own.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import xxhash
from numpy.typing import NDArray

from megapack import _core
from megapack.errors import FormatError
from megapack.storage.atomic import Buffer
from megapack.storage.meta import Checksum
from megapack.storage.mmididx import CODE_OF_DTYPE, MAGIC, read_header
from megapack.storage.opening import BLOCK, identity_of, is_at, open_regular, read_blocks

__all__ = ["ArrayLayout", "FileLayout", "Layout", "shifted_ends", "write_index"]


@dataclass(frozen=True)
class ArrayLayout:
    """In memory. The blocks may be of any size."""

    lengths: NDArray[np.int32]  # tokens per sequence
    ends: NDArray[np.int64] | None = None  # of documents, in sequences; None: one each
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
        """Tokens per sequence."""
        return _blocks(self.lengths)

    def end_blocks(self) -> Iterator[NDArray[np.int64]]:
        """For every document the sequence behind its last one."""
        return _identity_ends(self.num_sequences) if self.ends is None else _blocks(self.ends)

    def mode_blocks(self) -> Iterator[NDArray[np.int8]]:
        """Mode per sequence; asked only of multimodal layouts."""
        if self.modes is None:
            raise ValueError("these sequences have no modes; a multimodal dataset needs them")
        return _blocks(self.modes)


class FileLayout:
    """Of an .idx on disk, opened only while it is read, so that thousands can be merged."""

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
        """Byte of .bin at which each sequence begins, as the file has it."""
        return self._read(np.int64, self.header.pointers_at, self.num_sequences)

    def first_document_index(self) -> int:
        """The sequence at which document 0 begins, as the file has it; 0 in a sound one."""
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

    def lengths(self) -> NDArray[np.int32]:
        """All of them, in memory; so are the next two."""
        return np.concatenate([np.zeros(0, np.int32), *self.length_blocks()])

    def ends(self) -> NDArray[np.int64]:
        return np.concatenate([np.zeros(0, np.int64), *self.end_blocks()])

    def pointers(self) -> NDArray[np.int64]:
        return np.concatenate([np.zeros(0, np.int64), *self.pointer_blocks()])

    def has_its_name(self) -> bool:
        """Whether the file at its name is still the one whose header was read."""
        return is_at(self.header.identity, self.path)

    def _read(self, dtype: type[Any], offset: int, count: int) -> Iterator[NDArray[Any]]:
        with open_regular(self.path) as file:
            if identity_of(file) != self.header.identity:
                raise FormatError(f"{self.path} was replaced while it was read; start again")
            file.seek(offset)
            yield from read_blocks(file, dtype, count)


Layout: TypeAlias = ArrayLayout | FileLayout


def write_index(
    write: Callable[[Buffer], object],
    dtype: np.dtype[Any],
    layouts: Sequence[Layout],
    *,
    multimodal: bool = False,
) -> Checksum:
    """Write a whole .idx, byte for byte as megatron-core does.

    Args:
        write: takes the bytes in order.
        dtype: of the tokens; one of ``CODE_OF_DTYPE``.
        layouts: in the order of their tokens in .bin. Pointers are recomputed.
        multimodal: append a mode per sequence.

    Returns:
        Its size and checksum.

    Raises:
        FormatError: a layout has a negative length, or documents that do not end at its last
            sequence.
    """
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
        yield from shifted_ends(layout, begin)
        begin += layout.num_sequences
    if multimodal:
        for layout in layouts:
            yield from layout.mode_blocks()


def shifted_ends(layout: Layout, begin: int) -> Iterator[NDArray[np.int64]]:
    """Document ends of a layout whose first sequence has number ``begin``.

    Raises:
        FormatError: they go back, go beyond its sequences or stop before their end.
    """
    end = 0
    for ends in layout.end_blocks():
        shifted, end = _core.shift_document_ends(ends, layout.num_sequences, end, begin)
        yield shifted
    if end != layout.num_sequences:
        raise FormatError(
            f"documents end at sequence {end} of {layout.num_sequences}; "
            "`megapack-build repair` mends files that lost them in a merge"
        )


def _blocks(array: NDArray[Any]) -> Iterator[NDArray[Any]]:
    for begin in range(0, array.size, BLOCK):
        yield array[begin : begin + BLOCK]


def _identity_ends(num_sequences: int) -> Iterator[NDArray[np.int64]]:
    for begin in range(0, num_sequences, BLOCK):
        yield np.arange(begin + 1, min(begin + BLOCK, num_sequences) + 1, dtype=np.int64)
