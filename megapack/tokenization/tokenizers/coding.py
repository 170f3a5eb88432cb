"""Blocks of documents -> tokens as they are stored. One coder for text, one for chats (chat.py)."""

from __future__ import annotations

import abc
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megapack import _core
from megapack.errors import DataError
from megapack.tokenization.corpus.documents import Faults, TextBlock, hashed_split
from megapack.tokenization.tokenizers.encoders import Encoder
from megapack.tokenization.tokenizers.probe import first_difference

__all__ = ["Coded", "Coder", "Frame", "TextCoder"]


class Coded(NamedTuple):
    """Documents ready to be stored."""

    tokens: NDArray[Any]  # of the stored dtype
    offsets: NDArray[np.int64]  # (documents + 1)
    labels: NDArray[np.int32] | None  # aligned with tokens; None where every token is learned


class Frame(NamedTuple):
    """What is made of a document's ids before they are stored."""

    dtype: str  # "uint16" or "int32"
    vocab_size: int
    prefix: tuple[int, ...]  # ids before every document
    suffix: tuple[int, ...]  # and behind it

    def put_around(
        self, ids: NDArray[Any], offsets: NDArray[np.int64], *, bare: bool = False
    ) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """Check, narrow and (unless ``bare``) frame ids. Raises DataError for an id outside."""
        narrow = self.dtype == "uint16"
        frame = _core.frame_documents_uint16 if narrow else _core.frame_documents_int32
        before, behind = ([], []) if bare else (list(self.prefix), list(self.suffix))
        tokens, framed, _ = frame(ids, offsets, before, behind, self.vocab_size)
        return tokens, framed


class Coder(abc.ABC):
    """Turns blocks of documents into tokens."""

    @abc.abstractmethod
    def code(self, block: TextBlock, faults: Faults) -> Coded:
        """Documents of which nothing is left are recorded and left out."""


class TextCoder(Coder):
    """Plain text.

    Args:
        reference: when given, ``verify_fraction`` of the documents is encoded by it as well, and a
            difference is a DataError.
    """

    def __init__(
        self,
        encoder: Encoder,
        frame: Frame,
        *,
        reference: Encoder | None = None,
        verify_fraction: float = 0.0,
    ) -> None:
        self._encoder = encoder
        self._frame = frame
        self._reference = reference
        self._verify_fraction = verify_fraction

    def code(self, block: TextBlock, faults: Faults) -> Coded:
        ids, offsets = self._encoder.encode(block)
        if self._reference is not None:
            self._verify(block, self._reference)
        empty = offsets[:-1] == offsets[1:]
        if empty.any():  # text of which a tokenizer's normalization leaves nothing
            faults.record_rows("empty document", np.flatnonzero(empty), block.place)
            offsets = offsets[np.concatenate([~empty, [True]])]
        tokens, framed = self._frame.put_around(ids, offsets)
        return Coded(tokens, framed, None)

    def _verify(self, block: TextBlock, reference: Encoder) -> None:
        # Chosen by their text, so that every run checks the same documents; by another hash than
        # the one that splits the corpus, or all of them would be training documents.
        hashes = block.text_hashes(seed=1)
        chosen = hashed_split((self._verify_fraction, 1 - self._verify_fraction), hashes)
        sample = block.select(chosen == 0)
        if not len(sample):
            return
        difference = first_difference(sample, reference, self._encoder)
        if difference is not None:
            raise DataError(
                f"{self._encoder.backend} is not what it was on the first sample: {difference}; "
                f"build with --backend {reference.backend}"
            )
