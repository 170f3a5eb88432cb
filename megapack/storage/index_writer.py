"""Writing an .idx from parts, block by block, so that memory does not grow with the corpus.

A builder has one part in memory; a merge has one per input, read from its .idx again for every
array; repair and import bring arrays of their own. All of them come out of ``write_index``.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import xxhash
from numpy.typing import NDArray

from megapack import _core
from megapack.errors import FormatError
from megapack.storage.atomic import Buffer
from megapack.storage.meta import Checksum
from megapack.storage.mmididx import CODE_OF_DTYPE, MAGIC, read_header
from megapack.storage.opening import BLOCK, identity_of, is_at, open_regular, read_blocks

__all__ = ["ArrayIndexPart", "FileIndexPart", "IndexPart", "write_index"]


class IndexPart(Protocol):
    """Consecutive sequences and documents of one source, in blocks of any size."""

    num_sequences: int
    num_documents: int

    def lengths(self) -> Iterator[NDArray[np.int32]]:
        """Tokens per sequence."""
        ...

    def document_ends(self) -> Iterator[NDArray[np.int64]]:
        """For every document the sequence behind its last one, counted within the part."""
        ...

    def modes(self) -> Iterator[NDArray[np.int8]]:
        """Mode per sequence; asked only of multimodal parts."""
        ...


class ArrayIndexPart:
    """A part in memory. Without ``document_ends`` every sequence is one document."""

    def __init__(
        self,
        lengths: NDArray[np.int32],
        document_ends: NDArray[np.int64] | None = None,
        modes: NDArray[np.int8] | None = None,
    ) -> None:
        self._lengths, self._ends, self._modes = lengths, document_ends, modes
        self.num_sequences = lengths.size
        self.num_documents = lengths.size if document_ends is None else document_ends.size

    def lengths(self) -> Iterator[NDArray[np.int32]]:
        return _blocks(self._lengths)

    def document_ends(self) -> Iterator[NDArray[np.int64]]:
        return _identity_ends(self.num_sequences) if self._ends is None else _blocks(self._ends)

    def modes(self) -> Iterator[NDArray[np.int8]]:
        if self._modes is None:
            raise ValueError("this part has no modes; it cannot be part of a multimodal dataset")
        return _blocks(self._modes)


class FileIndexPart:
    """An .idx on disk, opened only while it is read, so that thousands can be merged."""

    def __init__(self, path: str | os.PathLike[str], multimodal: bool = False) -> None:
        self.path = Path(path)
        self.header = read_header(path)
        if multimodal and not self.header.has_modes:
            raise FormatError(f"{path} has no modes; it was not built with multimodal=True")
        self.num_sequences = self.header.num_sequences
        self.num_documents = self.header.num_documents

    def lengths(self) -> Iterator[NDArray[np.int32]]:
        return self._read(np.int32, self.header.lengths_at, self.num_sequences)

    def pointers(self) -> Iterator[NDArray[np.int64]]:
        """Byte of .bin at which each sequence begins, as the file has it."""
        return self._read(np.int64, self.header.pointers_at, self.num_sequences)

    def first_document_index(self) -> int:
        """The sequence at which document 0 begins, as the file has it; 0 in a sound one."""
        if self.header.lacks_document_indices:
            return 0
        (first,) = self._read(np.int64, self.header.document_indices_at, 1)
        return int(first[0])

    def document_ends(self) -> Iterator[NDArray[np.int64]]:
        if self.header.lacks_document_indices:
            return _identity_ends(self.num_sequences)
        at = self.header.document_indices_at + 8
        return self._read(np.int64, at, self.num_documents)

    def modes(self) -> Iterator[NDArray[np.int8]]:
        return self._read(np.int8, self.header.modes_at, self.num_sequences)

    def has_its_name(self) -> bool:
        """Whether the file at its name is still the one whose header was read."""
        return is_at(self.header.identity, self.path)

    def _read(self, dtype: type[Any], offset: int, count: int) -> Iterator[NDArray[Any]]:
        with open_regular(self.path) as file:
            if identity_of(file) != self.header.identity:
                raise FormatError(f"{self.path} was replaced while it was read; start again")
            file.seek(offset)
            yield from read_blocks(file, dtype, count)


def write_index(
    write: Callable[[Buffer], object],
    dtype: np.dtype[Any],
    parts: Sequence[IndexPart],
    *,
    multimodal: bool = False,
) -> Checksum:
    """Write a whole .idx, byte for byte as megatron-core does.

    Args:
        write: takes the bytes in order.
        dtype: of the tokens; one of ``CODE_OF_DTYPE``.
        parts: sources, in the order of their tokens in .bin. Pointers are recomputed.
        multimodal: append a mode per sequence.

    Returns:
        Its size and checksum.

    Raises:
        FormatError: a part has a negative length, or documents that do not end at its last
            sequence.
    """
    hasher, num_bytes = xxhash.xxh3_128(), 0
    for block in _index_blocks(dtype, parts, multimodal):
        data = memoryview(block).cast("B")
        write(data)
        hasher.update(data)
        num_bytes += data.nbytes
    return Checksum(num_bytes, hasher.hexdigest())


def _index_blocks(
    dtype: np.dtype[Any], parts: Sequence[IndexPart], multimodal: bool
) -> Iterator[Buffer]:
    num_sequences = sum(part.num_sequences for part in parts)
    num_documents = sum(part.num_documents for part in parts)
    code = CODE_OF_DTYPE[dtype.name]
    yield MAGIC + struct.pack("<QBQQ", 1, code, num_sequences, num_documents + 1)
    for part in parts:
        yield from part.lengths()
    begin = 0
    for part in parts:
        for lengths in part.lengths():
            pointers, begin = _core.scan_lengths(lengths, dtype.itemsize, begin)
            yield pointers
    yield np.zeros(1, np.int64)
    begin = 0
    for part in parts:
        yield from shifted_ends(part, begin)
        begin += part.num_sequences
    if multimodal:
        for part in parts:
            yield from part.modes()


def shifted_ends(part: IndexPart, begin: int) -> Iterator[NDArray[np.int64]]:
    """Document ends of a part whose first sequence has number ``begin``.

    Raises:
        FormatError: they go back, go beyond the part's sequences or stop before their end.
    """
    end = 0
    for ends in part.document_ends():
        shifted, end = _core.shift_document_ends(ends, part.num_sequences, end, begin)
        yield shifted
    if end != part.num_sequences:
        raise FormatError(
            f"documents end at sequence {end} of {part.num_sequences}; "
            "`megapack-build repair` mends files that lost them in a merge"
        )


def _blocks(array: NDArray[Any]) -> Iterator[NDArray[Any]]:
    for begin in range(0, array.size, BLOCK):
        yield array[begin : begin + BLOCK]


def _identity_ends(num_sequences: int) -> Iterator[NDArray[np.int64]]:
    for begin in range(0, num_sequences, BLOCK):
        yield np.arange(begin + 1, min(begin + BLOCK, num_sequences) + 1, dtype=np.int64)
