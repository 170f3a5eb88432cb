"""The index of a dataset under construction, in as few bytes as it can have."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from megapack.errors import DataError
from megapack.storage.layout import ArrayLayout, Layout

__all__ = ["MAX_SEQUENCE_LENGTH", "DocumentLog"]

MAX_SEQUENCE_LENGTH = 2**31 - 1


class DocumentLog:
    """Lengths of sequences (4 bytes each) and, only where documents are not one sequence each,
    the ends of documents (8 bytes each). ``array`` grows by reallocation, without a second copy.
    """

    def __init__(self, multimodal: bool) -> None:
        self.multimodal = multimodal
        self.num_documents = 0
        self._lengths = array("i")
        self._ends: array[int] | None = None  # None: every sequence is one document
        self._modes = array("b")

    @property
    def num_sequences(self) -> int:
        return len(self._lengths)

    @property
    def num_open_sequences(self) -> int:
        """Sequences behind the last document's end."""
        last = self.num_documents if self._ends is None else self._ends[-1]
        return len(self._lengths) - last

    def add_sequence(self, length: int, mode: int = 0) -> None:
        self._lengths.append(length)
        if self.multimodal:
            self._modes.append(mode)

    def add_sequences(self, lengths: Sequence[int], modes: Sequence[int] | None) -> None:
        self._lengths.extend(lengths)
        if self.multimodal:
            self._modes.extend(modes if modes is not None else bytes(len(lengths)))

    def end_document(self) -> None:
        """What came after the last end is one document."""
        self.num_documents += 1
        if self._ends is None:
            if self.num_documents == len(self._lengths):
                return
            self._ends = _counted(self.num_documents - 1)
        self._ends.append(len(self._lengths))

    def add_documents(self, lengths: NDArray[np.int32]) -> None:
        """Documents of one sequence each."""
        before = len(self._lengths)
        self._lengths.frombytes(lengths.tobytes())
        self._add_ends(np.arange(before + 1, before + lengths.size + 1))
        if self.multimodal:
            self._modes.frombytes(bytes(lengths.size))

    def _add_ends(self, ends: NDArray[np.int64]) -> None:
        first = self.num_documents + 1
        self.num_documents += ends.size
        if self._ends is None:
            if np.array_equal(ends, np.arange(first, first + ends.size)):
                return
            self._ends = _counted(first - 1)
        self._ends.frombytes(ends.tobytes())

    def add_layout(self, layout: Layout) -> None:
        """All sequences and documents of another index, found sound before."""
        before = len(self._lengths)
        for lengths in layout.length_blocks():
            self._lengths.frombytes(lengths.tobytes())
        for ends in layout.end_blocks():
            self._add_ends(before + ends)
        if self.multimodal:
            for modes in layout.mode_blocks():
                self._modes.frombytes(modes.tobytes())

    def require_closed(self) -> None:
        """DataError when sequences wait for ``end_document()``."""
        if self.num_open_sequences:
            raise DataError(
                f"{self.num_open_sequences} sequences were added after document "
                f"{self.num_documents - 1} ended; call end_document() first"
            )

    def layout(self) -> ArrayLayout:
        """Views of everything logged; log nothing while they live."""
        ends = None if self._ends is None else np.frombuffer(self._ends, np.int64)
        lengths = np.frombuffer(self._lengths, np.int32) if self._lengths else np.zeros(0, np.int32)
        modes = np.frombuffer(self._modes, np.int8) if self._modes else np.zeros(0, np.int8)
        return ArrayLayout(lengths, ends, modes if self.multimodal else None)


def _counted(num_documents: int) -> array[int]:
    ends = array("q")
    ends.frombytes(np.arange(1, num_documents + 1, dtype=np.int64).tobytes())
    return ends
