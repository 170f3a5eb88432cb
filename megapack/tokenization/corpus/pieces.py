"""What is read: files, the pieces of them that one worker reads, and how documents are found."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePath
from typing import Literal, NamedTuple

from megapack.errors import ConfigError

__all__ = [
    "DATA_SUFFIXES",
    "FORMATS",
    "TABLES",
    "Compression",
    "Format",
    "InputFile",
    "Piece",
    "ReadOptions",
    "format_of",
    "is_data",
    "require_utf8",
    "suffix_of",
]

Format = Literal["jsonl", "parquet", "arrow", "text"]
FORMATS: tuple[Format, ...] = ("jsonl", "parquet", "arrow", "text")
TABLES = ("parquet", "arrow")  # rows in groups; compressed inside, never as a whole
Compression = Literal["", "gz", "zst"]

# Public corpora name JSON Lines .json as often as .jsonl. Everything else is text.
_FORMAT_OF_SUFFIX: dict[str, Format] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".txt": "text",
    ".parquet": "parquet",
    ".arrow": "arrow",
}
_COMPRESSION_OF_SUFFIX: dict[str, Compression] = {".gz": "gz", ".zst": "zst", ".zstd": "zst"}
DATA_SUFFIXES = "{}, each also .gz and .zst, {}".format(
    *(
        ", ".join(s for s, format in _FORMAT_OF_SUFFIX.items() if (format in TABLES) == tables)
        for tables in (False, True)
    )
)  # for people
_NOT_READ = (".bz2", ".xz", ".zip", ".7z", ".lz4", ".tar", ".tgz")


@dataclass(frozen=True, slots=True)
class InputFile:
    """One file of the corpus, as it was when the build was planned."""

    path: str
    format: Format
    compression: Compression
    size: int  # bytes on disk
    mtime_ns: int


class Piece(NamedTuple):
    """Bytes (jsonl), row groups (parquet), record batches (arrow) or all (text, compressed) of a
    file: ``[begin, end)``.
    """

    file: InputFile
    begin: int
    end: int


@dataclass(frozen=True, kw_only=True)
class ReadOptions:
    """How documents are found in files."""

    # Also the column of a table. Where there is no key `a.b`, it is key b of the object at key a.
    json_key: str = "text"
    # lists: the JSON of a list of messages, or, where the document has other keys of ``beside``, of
    # an object with the list under "messages" and their values.
    values: Literal["strings", "lists"] = "strings"
    beside: tuple[tuple[str, str], ...] = ()  # of a conversation: (name in that object, key)
    split_key: str | None = None  # another key; documents carry its hash
    block_bytes: int = 4 << 20  # of text in one block; memory follows it
    max_document_bytes: int = 1 << 30  # a longer line or file is a fault ("too long")

    def keys(self) -> dict[str, str]:
        """The keys that a document must have, its text first -> the option that names each."""
        keys = {self.json_key: "--json-key" if self.values == "strings" else "--messages-key"}
        if self.split_key is not None:
            keys.setdefault(self.split_key, "--split-key")
        return keys

    def __post_init__(self) -> None:
        if not 1 << 10 <= self.block_bytes <= self.max_document_bytes:
            raise ConfigError(
                f"block_bytes {self.block_bytes} must lie between 1024 and max_document_bytes "
                f"{self.max_document_bytes}"
            )


def format_of(path: str) -> tuple[Format, Compression]:
    """What a file is by its name. Raises ConfigError for archives and unknown compressions."""
    suffix, compression = _ends(path)
    format = _FORMAT_OF_SUFFIX.get(suffix, "text")
    if suffix in _NOT_READ or (format in TABLES and compression):
        raise ConfigError(
            f"{path}: of compressed files .gz and .zst are read, no archives, no .parquet and no "
            ".arrow; decompress it first"
        )
    return format, compression


def is_data(path: str) -> bool:
    """Whether a name has a suffix that is taken from directories unless others are asked for."""
    suffix, compression = _ends(path)
    return suffix in _FORMAT_OF_SUFFIX and not (_FORMAT_OF_SUFFIX[suffix] in TABLES and compression)


def suffix_of(path: str) -> str:
    """The end of a file's name, with its compression (``.rst.gz``), lower case; "" for none."""
    suffix, compression = _ends(path)
    return f"{suffix}.{compression}" if compression else suffix


def _ends(path: str) -> tuple[str, Compression]:
    name = PurePath(path.lower())
    compression = _COMPRESSION_OF_SUFFIX.get(name.suffix, "")
    return (PurePath(name.stem).suffix if compression else name.suffix), compression


def require_utf8(name: str) -> None:
    """ConfigError for a name that is not UTF-8: metadata and manifests hold names as text."""
    try:
        name.encode()
    except UnicodeEncodeError:
        shown = name.encode(errors="surrogateescape").decode(errors="backslashreplace")
        raise ConfigError(
            f"the name {shown} is not UTF-8, and cannot be written into metadata: rename it, as "
            "with convmv -f latin1 -t utf8"
        ) from None
