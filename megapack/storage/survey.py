"""What an .idx/.bin pair really is, found by arithmetic instead of belief.

Three tools write the same magic with three dtype tables, one of them loses documents in a merge,
and old releases overflowed pointers. But pointers are the running sum of lengths times the token
width, and .bin is their end: so the width can be proven, and with it what the dtype code meant.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from megapack import _core
from megapack.errors import FormatError
from megapack.storage.files import identity_of, open_regular, read_blocks
from megapack.storage.index_file import DTYPE_OF_CODE
from megapack.storage.index_writer import FileLayout

__all__ = ["LEGACY_MAGIC", "Survey", "meaning_of", "survey"]

LEGACY_MAGIC = b"TNTIDX\x00\x00"  # the format before MMIDIDX

WIDTHS = (1, 2, 4, 8)  # bytes per token that exist

# What other tools mean by the codes on which they disagree; 1 to 5 are common to all.
_TABLES = {
    "Megatron": {6: "float64", 7: "float32", 8: "uint16"},
    "GPT-NeoX": {6: "float32", 7: "float64", 8: "uint16"},
    "DeepSpeed": {6: "uint16", 7: "uint32", 8: "uint64"},
}
_BY_WIDTH = {1: "uint8", 2: "uint16", 4: "int32", 8: "int64"}
# float32 numbers from 1e-19 on have bit patterns above this, and no vocabulary is so large.
_LARGEST_TOKEN_ID = 1 << 29


@dataclass
class Survey:
    """Facts about one pair; nothing here is believed that was not counted."""

    layout: FileLayout
    bin_path: Path
    bin_bytes: int
    num_tokens: int = 0
    # Widths for which every pointer is the sum of the lengths before it times the width, and
    # those for which that holds modulo 2^32 only.
    widths: set[int] = field(default_factory=set)
    wrapped_widths: set[int] = field(default_factory=set)
    num_empty_sequences: int = 0
    # The first document index that goes back or beyond (None: none does) and the last one.
    first_bad_document: int | None = None
    first_document_index: int = 0
    last_document_end: int = 0

    @property
    def declared_dtype(self) -> np.dtype[Any] | None:
        """What the dtype code means in Megatron's table, None when that is no token type."""
        return DTYPE_OF_CODE.get(self.layout.header.dtype_code)

    @property
    def width(self) -> int | None:
        """Bytes per token: by the pointers, by the code where they leave it open, by .bin."""
        for widths in (self.widths, self.wrapped_widths):
            if len(widths) == 1:
                return next(iter(widths))
        declared = self.declared_dtype
        if declared is not None and declared.itemsize in self.widths:
            return declared.itemsize
        fits = [width for width in WIDTHS if width * self.num_tokens == self.bin_bytes]
        return fits[0] if len(fits) == 1 else None

    def meaning(self) -> tuple[np.dtype[Any] | None, str]:
        """The token type under which these bytes can be read, and what the code means to whom.

        None when they are floats, or when nothing tells how wide they are.
        """
        code, width = self.layout.header.dtype_code, self.width
        if width is None:
            return None, "nothing that the size of .bin agrees with"
        return meaning_of(code, width, self.bin_path)


def meaning_of(code: int, width: int, bin_path: Path) -> tuple[np.dtype[Any] | None, str]:
    """``Survey.meaning`` of a code whose tokens were proven to be ``width`` bytes wide."""
    declared = DTYPE_OF_CODE.get(code)
    if declared is not None and declared.itemsize == width:
        return declared, declared.name
    matches = {
        tool: table[code]
        for tool, table in _TABLES.items()
        if code in table and np.dtype(table[code]).itemsize == width
    }
    if not matches:
        name = _BY_WIDTH[width]
        return np.dtype(name), f"nothing {width} bytes wide; by width alone it is {name}"
    text = ", ".join(f"{name} in {tool}'s table" for tool, name in matches.items())
    return _readable(set(matches.values()), bin_path), text


def _readable(names: set[str], bin_path: Path) -> np.dtype[Any] | None:
    """The type with the same bytes that token files can have; None for floats."""
    if "uint16" in names:
        return np.dtype(np.uint16)
    if "uint64" in names:
        return np.dtype(np.int64)
    if "uint32" in names and _largest(bin_path) < _LARGEST_TOKEN_ID:
        return np.dtype(np.int32)
    return None


def survey(idx_path: str | os.PathLike[str], bin_path: str | os.PathLike[str]) -> Survey:
    """Read an .idx once from end to end, block by block.

    Raises:
        FormatError: not an .idx, truncated, or a negative length.
        OSError: a file cannot be read.
    """
    layout = FileLayout(idx_path)
    with open_regular(bin_path) as file:
        result = Survey(layout, Path(bin_path), identity_of(file).num_bytes)
    _survey_sequences(result)
    _survey_documents(result)
    return result


def _survey_sequences(result: Survey) -> None:
    begin = sequence = 0
    widths, wrapped = set(WIDTHS), set(WIDTHS)
    blocks = zip(result.layout.length_blocks(), result.layout.pointer_blocks(), strict=True)
    for lengths, pointers in blocks:
        try:
            positions, begin = _core.scan_lengths(lengths, 1, begin)
        except FormatError as error:
            bad = sequence + int((lengths < 0).argmax())
            raise FormatError(f"{result.layout.path}: sequence {bad}: {error}") from error
        widths = {k for k in widths if np.array_equal(positions * k, pointers)}
        wrapped = {k for k in wrapped if np.array_equal((positions * k).astype(np.int32), pointers)}
        result.num_empty_sequences += int((lengths == 0).sum())
        sequence += lengths.size
    result.num_tokens, result.widths = begin, widths
    result.wrapped_widths = wrapped - widths


def _survey_documents(result: Survey) -> None:
    count, result.first_document_index = 0, result.layout.first_document_index()
    for ends in result.layout.end_blocks():
        before = np.concatenate([[result.last_document_end], ends[:-1]])
        bad = (ends < before) | (ends > result.layout.num_sequences)
        if result.first_bad_document is None and bad.any():
            result.first_bad_document = count + int(bad.argmax())
        count += ends.size
        result.last_document_end = int(ends[-1])


def _largest(path: Path) -> int:
    """The largest 32-bit number of a file."""
    with open_regular(path) as file:
        blocks = read_blocks(file, np.uint32, identity_of(file).num_bytes // 4)
        return max((int(block.max()) for block in blocks), default=0)
