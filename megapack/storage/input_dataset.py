"""One dataset as the input of another: checked, never mapped, so that thousands can take part."""

from __future__ import annotations

import io
import os
from typing import Any

import numpy as np

from megapack import _core
from megapack.errors import FormatError
from megapack.storage.layout import FileLayout, shifted_ends
from megapack.storage.meta import TokenFacts, checksum, difference_from_files, read_meta
from megapack.storage.mmididx import IndexFile, dtype_of_code, path_of, prefix_of
from megapack.storage.opening import identity_of, open_regular

__all__ = ["InputDataset"]


class InputDataset:
    """A dataset whose index was read once from end to end and found sound.

    Args:
        prefix: with or without ``.idx``.
        multimodal: the modes of its sequences are wanted.

    Raises:
        FormatError: negative lengths, pointers that do not follow from them, documents that do
            not end with the sequences, a .bin that is too short, an unknown dtype code.
        OSError: a file is missing or cannot be read.
    """

    def __init__(self, prefix: str | os.PathLike[str], multimodal: bool = False) -> None:
        self.prefix = prefix_of(prefix)
        self.idx_path, self.bin_path = path_of(self.prefix, ".idx"), path_of(self.prefix, ".bin")
        self.layout = FileLayout(self.idx_path, multimodal)
        self.dtype: np.dtype[Any] = dtype_of_code(self.layout.header.dtype_code, self.idx_path)
        try:
            self.num_bytes = self._check_sequences()
            for _ in shifted_ends(self.layout, 0):  # documents end with the sequences
                pass
            if first := self.layout.first_document_index():
                raise FormatError(f"document 0 begins at sequence {first} instead of 0")
        except FormatError as error:
            raise FormatError(f"{self.idx_path}: {error}") from error
        self.num_tokens = self.num_bytes // self.dtype.itemsize
        self._check_bin()
        self.meta = self._trusted_meta()

    @property
    def facts(self) -> TokenFacts | None:
        """What .bin holds, None when nobody vouches for it."""
        return None if self.meta is None else TokenFacts.of_meta(self.meta)

    def open_tokens(self) -> io.FileIO:
        """The .bin that belongs to the index.

        Raises:
            FormatError: a writer replaced the dataset since its index was read.
        """
        file = open_regular(self.bin_path)
        if not self.layout.has_its_name():
            file.close()
            raise FormatError(f"{self.prefix} was replaced while it was read; start again")
        return file

    def document_at(self, position: int) -> tuple[int, int]:
        """The document that holds the token at a position of .bin, and the position inside."""
        offsets = IndexFile(self.idx_path).document_offsets(self.dtype.itemsize)
        document = int(np.searchsorted(offsets, position, side="right")) - 1
        return document, position - int(offsets[document])

    def _check_sequences(self) -> int:
        """Bytes of .bin that the index speaks of."""
        begin, sequence = 0, 0
        blocks = zip(self.layout.length_blocks(), self.layout.pointer_blocks(), strict=True)
        for lengths, pointers in blocks:
            expected, begin = _core.scan_lengths(lengths, self.dtype.itemsize, begin)
            if not np.array_equal(expected, pointers):
                wrong = int((expected != pointers).argmax())
                raise FormatError(
                    f"sequence {sequence + wrong} points at byte {pointers[wrong]}, but the "
                    f"sequences before it end at {expected[wrong]}; "
                    "`megapack-build repair` recomputes pointers"
                )
            sequence += lengths.size
        return begin

    def _check_bin(self) -> None:
        with self.open_tokens() as file:
            size = identity_of(file).num_bytes
        if size < self.num_bytes:
            raise FormatError(
                f"{self.bin_path} has {size} bytes, but its .idx ends at byte {self.num_bytes}: "
                "it is truncated, or the .idx belongs to another file"
            )

    def _trusted_meta(self) -> dict[str, Any] | None:
        """The meta file, unless the .idx it describes is not the one that stands beside it."""
        meta = read_meta(self.prefix)
        if meta is None or difference_from_files(
            meta, self.dtype.name, self.layout.header, self.num_tokens
        ):
            return None
        return meta if checksum(self.idx_path) == meta["idx"]["xxh3_128"] else None
