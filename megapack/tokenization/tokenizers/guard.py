"""Documents on which gigatoken is known to differ from the reference, sent to the reference.

Two differences were found (docs/tokenization.md tells how); both are decided by the text alone:

- Letters and digits that Unicode 17 added: gigatoken's tables know them, those of `tokenizers`
  take them for unassigned characters, and the pre-tokenizer splits around them differently.
- Control symbols of a sentencepiece model (``<s>``) written out in a text: sentencepiece reads them
  as characters, gigatoken as the symbol.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from megapack import _core
from megapack.tokenization.corpus.blocks import TextBlock
from megapack.tokenization.tokenizers.encoders import (
    BACKENDS,
    Encoder,
    Ids,
    Limits,
    open_encoder,
    open_reference,
)
from megapack.tokenization.tokenizers.tokenizer import TokenizerFiles

__all__ = ["GuardedEncoder", "guarded_name", "open_any"]

# (first, last) of every range of letters and numbers new in Unicode 17.0.
_UNICODE_17 = (
    (0x088F, 0x088F),
    (0x0C5C, 0x0C5C),
    (0x0CDC, 0x0CDC),
    (0xA7CE, 0xA7CF),
    (0xA7D2, 0xA7D2),
    (0xA7D4, 0xA7D4),
    (0xA7F1, 0xA7F1),
    (0x10940, 0x10959),
    (0x10EC5, 0x10EC7),
    (0x11DB0, 0x11DDB),
    (0x11DE0, 0x11DE9),
    (0x16EA0, 0x16EB8),
    (0x16EBB, 0x16ED3),
    (0x16FF2, 0x16FF6),
    (0x187F8, 0x187FF),
    (0x18D09, 0x18D1E),
    (0x18D80, 0x18DF2),
    (0x1E6C0, 0x1E6FF),
    (0x2B73A, 0x2B73F),
    (0x2CEA2, 0x2CEAD),
    (0x323B0, 0x33479),
)
_RANGES = np.array(_UNICODE_17, np.int64).reshape(-1)


def guarded_name(files: TokenizerFiles) -> str:
    """What the guarded pair is called in reports: ``gigatoken+tokenizers``."""
    return f"gigatoken+{BACKENDS[files.kind][0]}"


def open_any(files: TokenizerFiles, backend: str, limits: Limits = Limits()) -> Encoder:  # noqa: B008
    """A backend by its name, or the guarded pair by the name of ``guarded_name``."""
    if backend == guarded_name(files):
        return GuardedEncoder(files, limits)
    return open_encoder(files, backend, limits)


class GuardedEncoder(Encoder):
    """gigatoken, and the reference for the documents on which gigatoken is known to differ."""

    def __init__(self, files: TokenizerFiles, limits: Limits = Limits()) -> None:  # noqa: B008
        self.backend = guarded_name(files)
        self._files = files
        self._limits = limits
        self._fast = open_encoder(files, "gigatoken", limits)
        self._loaded_reference: Encoder | None = None
        control = files.special if files.kind == "sentencepiece" else {}
        self._control = [text.encode("utf-8") for text in control]

    @property
    def _reference(self) -> Encoder:
        """Loaded when the first document needs it; most corpora have none."""
        if self._loaded_reference is None:
            self._loaded_reference = open_reference(self._files, self._limits)
        return self._loaded_reference

    def decode(self, ids: Sequence[int]) -> str:
        return self._reference.decode(ids)

    def encode(self, block: TextBlock) -> tuple[Ids, NDArray[np.int64]]:
        guarded = self._guarded(block)
        if not guarded.any():
            return self._fast.encode(block)
        return _woven(
            guarded,
            self._fast.encode(block.select(~guarded)),
            self._reference.encode(block.select(guarded)),
        )

    def _guarded(self, block: TextBlock) -> NDArray[np.bool_]:
        """The documents that must go to the reference."""
        if self._files.kind == "hf":
            return _core.has_characters(block.text, block.offsets, _RANGES).astype(np.bool_)
        result = np.zeros(len(block), np.bool_)
        data = block.text.tobytes()
        for symbol in self._control:
            at = data.find(symbol)
            while at >= 0:
                document = int(np.searchsorted(block.offsets, at, "right")) - 1
                # Also where it only seems to be one, across the border of two documents.
                result[document] = True
                at = data.find(symbol, int(block.offsets[document + 1]))
        return result


def _woven(
    guarded: NDArray[np.bool_],
    fast: tuple[Ids, NDArray[np.int64]],
    reference: tuple[Ids, NDArray[np.int64]],
) -> tuple[Ids, NDArray[np.int64]]:
    """Both results, documents in the order of the block."""
    lengths = np.empty(len(guarded), np.int64)
    lengths[~guarded], lengths[guarded] = np.diff(fast[1]), np.diff(reference[1])
    offsets = np.zeros(len(guarded) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    from_reference = np.repeat(guarded, lengths)
    ids = np.empty(int(offsets[-1]), np.int32)
    ids[~from_reference], ids[from_reference] = fast[0], reference[0]
    return ids, offsets
