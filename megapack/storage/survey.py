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
        code, width, declared = self.layout.header.dtype_code, self.width, self.declared_dtype
        if width is None:
            return None, "nothing that the size of .bin agrees with"
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
        names = set(matches.values())
        if "uint32" in names and self._largest_uint32() >= _LARGEST_TOKEN_ID:
            return None, text
        same_bytes = {"uint16": "uint16", "uint64": "int64", "uint32": "int32"}  # not of floats
        return next((np.dtype(same_bytes[n]) for n in same_bytes if n in names), None), text

    def _largest_uint32(self) -> int:
        with open_regular(self.bin_path) as file:
            blocks = read_blocks(file, np.uint32, self.bin_bytes // 4)
            return max((int(block.max()) for block in blocks), default=0)


def survey(idx_path: str | os.PathLike[str], bin_path: str | os.PathLike[str]) -> Survey:
    """Read an .idx once from end to end, block by block.

    Raises:
        FormatError: not an .idx, truncated, or a negative length.
        OSError: a file cannot be read.
    """
    layout = FileLayout(idx_path)
    with open_regular(bin_path) as file:
        result = Survey(layout, Path(bin_path), identity_of(file).num_bytes)
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
    count, result.first_document_index = 0, result.layout.first_document_index()
    for ends in result.layout.end_blocks():
        before = np.concatenate([[result.last_document_end], ends[:-1]])
        bad = (ends < before) | (ends > result.layout.num_sequences)
        if result.first_bad_document is None and bad.any():
            result.first_bad_document = count + int(bad.argmax())
        count += ends.size
        result.last_document_end = int(ends[-1])
    return result
