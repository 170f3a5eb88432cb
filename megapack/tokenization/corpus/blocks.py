"""Many documents as one flat UTF-8 buffer: what readers give and tokenizers take."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import xxhash
from numpy.typing import NDArray

from megapack import _core
from megapack.tokenization.corpus.faults import Faults, Place

__all__ = ["TextBlock"]


@dataclass(frozen=True, slots=True)
class TextBlock:
    """Documents in the order of the corpus.

    ``text`` is uint8; document ``i`` is ``text[offsets[i]:offsets[i + 1]]``; ``offsets`` is int64
    of ``len(block) + 1``. ``positions`` (int64, one per document) is what ``locate`` turns into a
    place to show. ``hashes`` (uint64, one per document) are of the key that splits the corpus,
    where one was asked for.
    """

    text: NDArray[np.uint8]
    offsets: NDArray[np.int64]
    positions: NDArray[np.int64]
    locate: Callable[[int], Place]
    hashes: NDArray[np.uint64] | None = None

    @staticmethod
    def of_strings(texts: Sequence[str]) -> TextBlock:
        """A block of texts that come from no file."""
        data = [text.encode("utf-8") for text in texts]
        offsets = np.zeros(len(data) + 1, np.int64)
        np.cumsum([len(item) for item in data], out=offsets[1:])
        flat = np.frombuffer(b"".join(data), np.uint8)
        return TextBlock(flat, offsets, np.arange(len(data)), lambda i: Place(f"text {i}", "file"))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def place(self, i: int) -> Place:
        return self.locate(int(self.positions[i]))

    def strings(self, rows: Sequence[int] | range | None = None) -> list[str]:
        """The documents as Python strings (all of them, or some)."""
        data = self.text.data
        bounds = self.offsets.tolist()
        chosen = range(len(self)) if rows is None else rows
        return [str(data[bounds[i] : bounds[i + 1]], "utf-8") for i in chosen]

    def select(self, keep: NDArray[np.bool_]) -> TextBlock:
        """The documents where ``keep`` is true; copies text only if some of it goes."""
        if keep.all():
            return self
        lengths = np.diff(self.offsets)
        text = self.text
        if lengths[~keep].any():
            text = text[np.repeat(keep, lengths)]
        offsets = np.zeros(int(keep.sum()) + 1, np.int64)
        np.cumsum(lengths[keep], out=offsets[1:])
        hashes = None if self.hashes is None else self.hashes[keep]
        return TextBlock(text, offsets, self.positions[keep], self.locate, hashes)

    def text_hashes(self, *, seed: int = 0) -> NDArray[np.uint64]:
        """xxh3-64 of every document's text; independent for different seeds."""
        data, bounds = self.text.data, self.offsets.tolist()
        pairs = itertools.pairwise(bounds)
        return np.array([xxhash.xxh3_64_intdigest(data[a:b], seed) for a, b in pairs], np.uint64)

    def drop(self, bad: NDArray[np.bool_], kind: str, faults: Faults) -> TextBlock:
        """Without the documents where ``bad`` is true; each is recorded as ``kind``."""
        if not bad.any():
            return self
        faults.record_rows(kind, np.flatnonzero(bad), self.place)
        return self.select(~bad)

    def checked(self, faults: Faults, *, known_utf8: bool) -> TextBlock:
        """Without empty documents and, unless known to have none, without invalid UTF-8."""
        block = self
        if not known_utf8:
            invalid = _core.valid_utf8(block.text, block.offsets) == 0
            block = block.drop(invalid, "invalid UTF-8", faults)
        return block.drop(np.diff(block.offsets) == 0, "empty document", faults)
