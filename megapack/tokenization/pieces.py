"""What one worker reads, and how documents are found in it.

A piece is a byte range of a .jsonl file, a range of row groups of a parquet file, or a whole file
where it cannot be entered in the middle.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from megapack.errors import ConfigError
from megapack.tokenization.sources import Format

__all__ = ["Piece", "ReadOptions"]


class Piece(NamedTuple):
    """Bytes (jsonl), row groups (parquet) or all (the others) of one file: ``[begin, end)``."""

    path: str
    format: Format
    begin: int
    end: int


@dataclass(frozen=True, kw_only=True)
class ReadOptions:
    """How documents are found in files."""

    json_key: str = "text"  # also the parquet column
    values: Literal["strings", "lists"] = "strings"  # lists: the JSON of a list of messages
    split_key: str | None = None  # another key; documents carry its hash
    block_bytes: int = 4 << 20  # of text in one block; memory follows it
    max_document_bytes: int = 1 << 30  # a longer line or file is a fault ("too long")

    def __post_init__(self) -> None:
        if not 1 << 10 <= self.block_bytes <= self.max_document_bytes:
            raise ConfigError(
                f"block_bytes {self.block_bytes} must lie between 1024 and max_document_bytes "
                f"{self.max_document_bytes}"
            )
