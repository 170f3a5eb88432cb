"""Facts about an .idx/.bin pair, computed from its contents instead of read from its header.

- ``survey``: the facts of one pair, a ``Survey``, for merge, import, verify and repair
- ``Finding``: a fact that users should know; ``Survey.findings``: findings about the index

Three tools write the same magic number with three tables of dtype codes; the merge of one tool
loses documents, and old releases wrote pointers that overflowed. Correct pointers are the running
sum of lengths times the token width, and .bin ends with the last sequence. So pointers prove the
token width, and with it the meaning of the dtype code.

    lengths 3, 2; pointers 0, 6; .bin of 10 bytes    # -> 2 bytes per token, for any dtype code
    lengths 3, 2; pointers 0, 6; .bin of 12 bytes    # -> the same, and a finding: 2 extra bytes
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from megapack import _core
from megapack.errors import FormatError
from megapack.storage.files import file_identity, open_regular, read_array_blocks
from megapack.storage.index_file import DTYPE_OF_CODE
from megapack.storage.index_writer import FileLayout

REPAIR = "megapack-build repair"
WIDTHS = (1, 2, 4, 8)  # possible bytes per token

# Meaning of the dtype codes on which tools disagree; 1 to 5 are common.
_TABLES = {
    "Megatron": {6: "float64", 7: "float32", 8: "uint16"},
    "GPT-NeoX": {6: "float32", 7: "float64", 8: "uint16"},
    "DeepSpeed": {6: "uint16", 7: "uint32", 8: "uint64"},
}
_BY_WIDTH = {1: "uint8", 2: "uint16", 4: "int32", 8: "int64"}
# Read as integers, float32 numbers from 1e-19 on are larger than this; vocabularies are smaller.
_LARGEST_TOKEN_ID = 1 << 29


@dataclass(frozen=True)
class Finding:
    """Fact about a dataset that users should know.

    ``error``: the dataset cannot be read or trusted; ``warning``: check it; ``note``: it is usable.
    """

    severity: Literal["error", "warning", "note"]
    code: str  # stable, for scripts
    message: str
    remedy: str = ""


def remedy_for(finding: Finding, prefix: str) -> str:
    """Return the remedy of a finding, in which the command names the dataset: it can be pasted."""
    command = re.compile(f"{REPAIR}((?: --[a-z-]+)*)")
    name = shlex.quote(prefix)
    return command.sub(lambda match: f"`{REPAIR} {name}{match[1]}`", finding.remedy)


def has_errors(findings: Iterable[Finding]) -> bool:
    return any(finding.severity == "error" for finding in findings)


@dataclass
class Survey:
    """Facts about one pair, all computed from the files."""

    layout: FileLayout
    bin_path: Path
    bin_bytes: int
    num_tokens: int = 0
    # widths: those for which every pointer is the sum of the preceding lengths times the width.
    # wrapped_widths: those for which this is true only modulo 2^32 (pointers that overflowed).
    widths: set[int] = field(default_factory=set)
    wrapped_widths: set[int] = field(default_factory=set)
    first_wrong_pointer: str = ""  # described for the width of the dtype code
    num_empty_sequences: int = 0
    # First document that ends before it begins or after the last sequence; None: all are valid.
    first_bad_document: int | None = None
    first_document_index: int = 0
    last_document_end: int = 0

    @property
    def declared_dtype(self) -> np.dtype[Any] | None:
        """Meaning of the dtype code in Megatron's table, None if that is not a token type."""
        return DTYPE_OF_CODE.get(self.layout.header.dtype_code)

    @property
    def num_trailing(self) -> int:
        """Bytes after the document indices; a multimodal .idx has its modes there."""
        return self.layout.header.file_bytes - self.layout.header.modes_at

    @property
    def is_multimodal(self) -> bool:
        """True if there is exactly one trailing byte per sequence."""
        return 0 < self.num_trailing == self.layout.num_sequences

    @property
    def width(self) -> int | None:
        """Bytes per token, by the pointers, else by the dtype code, else by the size of .bin."""
        for widths in (self.widths, self.wrapped_widths):
            if len(widths) == 1:
                return next(iter(widths))
        declared = self.declared_dtype
        if declared is not None and declared.itemsize in self.widths:
            return declared.itemsize
        fits = [width for width in WIDTHS if width * self.num_tokens == self.bin_bytes]
        return fits[0] if len(fits) == 1 else None

    def meaning(self) -> tuple[np.dtype[Any] | None, str]:
        """Return the token type of .bin (None if the tokens are floats or their width is unknown),
        and the meaning of the dtype code in words."""
        code, width, declared = self.layout.header.dtype_code, self.width, self.declared_dtype
        if width is None:
            return None, "no type that fits the size of .bin"
        if declared is not None and declared.itemsize == width:
            return declared, declared.name
        matches = {
            tool: table[code]
            for tool, table in _TABLES.items()
            if code in table and np.dtype(table[code]).itemsize == width
        }
        if not matches:
            name = _BY_WIDTH[width]
            return np.dtype(name), f"no type of {width} bytes; the width suggests {name}"
        text = ", ".join(f"{name} in {tool}'s table" for tool, name in matches.items())
        names = set(matches.values())
        if "uint32" in names:
            with open_regular(self.bin_path) as file:
                blocks = read_array_blocks(file, np.uint32, self.bin_bytes // 4)
                if max((int(block.max()) for block in blocks), default=0) >= _LARGEST_TOKEN_ID:
                    return None, text
        same_bytes = {"uint16": "uint16", "uint64": "int64", "uint32": "int32"}  # floats have none
        return next((np.dtype(same_bytes[n]) for n in same_bytes if n in names), None), text

    def names_another_order(self, width: int) -> bool:
        """Return whether the pointers cover every byte of .bin once, but in a different order."""
        lengths, pointers = self.layout.lengths().astype(np.int64), self.layout.pointers()
        order = np.lexsort((lengths, pointers))  # an empty sequence comes before its neighbour
        expected = np.cumsum(lengths[order]) - lengths[order]
        return np.array_equal(pointers[order], expected * width)

    def findings(self) -> Iterator[Finding]:
        name, header = self.layout.path, self.layout.header
        if header.lacks_document_indices:
            text = f"{name} has no documents (GPT-NeoX's merge loses them)"
            yield Finding(
                "error", "documents-lost", text, f"{REPAIR} makes each sequence a document"
            )
        elif self.first_bad_document is not None:
            text = f"{name}: document {self.first_bad_document} begins or ends out of order"
            yield Finding("error", "documents", text, REPAIR)
        elif self.last_document_end != header.num_sequences:
            last = f"sequence {self.last_document_end} of {header.num_sequences}"
            yield Finding("error", "documents", f"{name}: documents end at {last}", REPAIR)
        if self.first_document_index:
            text = f"{name}: document 0 begins at sequence {self.first_document_index} instead of 0"
            yield Finding("error", "documents", text, REPAIR)
        if self.num_empty_sequences:
            text = f"{self.num_empty_sequences} of {header.num_sequences} sequences are empty"
            yield Finding("note", "empty-sequences", text)
        if self.is_multimodal:
            yield Finding("note", "multimodal", f"{name} has a mode for every sequence")
        elif self.num_trailing:
            text = f"{name} has {self.num_trailing} bytes after its end"
            yield Finding("warning", "trailing-idx", text, REPAIR)
        if not self.widths:
            overflowed = " (they overflowed 32 bits)" if self.wrapped_widths else ""
            text = f"{name}: pointers do not follow from the lengths{overflowed}"
            text += self.first_wrong_pointer and f": {self.first_wrong_pointer}"
            yield Finding("error", "pointers", text, f"{REPAIR} recomputes them")
        dtype, text = self.meaning()
        if dtype is None or dtype != self.declared_dtype:
            remedy = REPAIR if dtype is not None else "import a file of token ids"
            text = f"{name}: dtype code {header.dtype_code} means {text}"
            yield Finding("error", "dtype", text, remedy)
        needed = self.num_tokens * (self.width or 0)
        num_extra = self.bin_bytes - needed
        if self.width is not None and num_extra < 0:
            text = f"{self.bin_path} has {self.bin_bytes} bytes; {name} describes {needed}"
            yield Finding("error", "bin-truncated", text, f"{REPAIR} --drop-truncated")
        elif self.width is not None and num_extra > 0:
            text = f"{self.bin_path} has {num_extra} bytes after the last sequence"
            yield Finding("warning", "trailing-bin", text, f"{REPAIR} --drop-trailing")


def survey(
    idx_path: str | os.PathLike[str], bin_path: str | os.PathLike[str], *, multimodal: bool = False
) -> Survey:
    """Read an .idx once from end to end, block by block. Raises FormatError if it is not an .idx,
    is truncated, contains a negative length, or lacks modes although ``multimodal`` is set."""
    layout = FileLayout(idx_path, multimodal)
    with open_regular(bin_path) as file:
        result = Survey(layout, Path(bin_path), file_identity(file).num_bytes)
    declared = result.declared_dtype
    begin = sequence = 0
    result.widths = set(WIDTHS)
    for lengths, pointers in zip(layout.length_blocks(), layout.pointer_blocks(), strict=True):
        try:
            positions, begin = _core.scan_lengths(lengths, 1, begin)
        except FormatError as error:
            bad = sequence + int((lengths < 0).argmax())
            raise FormatError(f"{layout.path}: sequence {bad}: {error}") from error
        fits = {k for k in result.widths if np.array_equal(positions * k, pointers)}
        if declared is not None and declared.itemsize in result.widths - fits:
            expected = positions * declared.itemsize
            at = int((expected != pointers).argmax())
            result.first_wrong_pointer = (
                f"sequence {sequence + at} points at byte {pointers[at]} instead of {expected[at]}"
            )
        result.widths = fits
        result.num_empty_sequences += lengths.size - int(np.count_nonzero(lengths))
        sequence += lengths.size
    result.num_tokens = begin
    if not result.widths:
        result.wrapped_widths = _wrapped_widths(layout)
    count, result.first_document_index = 0, layout.first_document_index()
    for ends in layout.end_blocks():
        before = np.concatenate([[result.last_document_end], ends[:-1]])
        wrong = (ends < before) | (ends > layout.num_sequences)
        if result.first_bad_document is None and wrong.any():
            result.first_bad_document = count + int(wrong.argmax())
        count += ends.size
        result.last_document_end = int(ends[-1])
    return result


def _wrapped_widths(layout: FileLayout) -> set[int]:
    widths, begin = set(WIDTHS), 0
    for lengths, pointers in zip(layout.length_blocks(), layout.pointer_blocks(), strict=True):
        positions, begin = _core.scan_lengths(lengths, 1, begin)
        widths = {k for k in widths if np.array_equal((positions * k).astype(np.int32), pointers)}
    return widths
