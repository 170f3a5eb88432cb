"""The bytes of input files, decompressed; files that are not what their names say are refused."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

from megapack.errors import DataError
from megapack.optional import require
from megapack.tokenization.corpus.pieces import Format, InputFile, suffix_of

__all__ = ["open_stream", "require_unchanged", "seems"]

_HEAD_BYTES = 1 << 16
_ZST_INPUT_BYTES = 1 << 14
_ZST_WINDOW_BYTES = 1 << 31

_NAMES = {"gz": "gzip", "zst": "zstd"}
_PLAIN = ("plain JSON", "plain text")
# How files begin that are not plain UTF-8.
_MAGIC = {
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"BZh": "bzip2",
    b"\xfd7zXZ\x00": "xz",
    b"PK\x03\x04": "a zip archive",
    b"PAR1": "parquet",
    b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
}
_ZST_SKIPPABLE = b"\x2a\x4d\x18"  # bytes 1 to 3 of a frame that holds no data


@contextlib.contextmanager
def open_stream(file: InputFile) -> Iterator[BinaryIO]:
    """The decompressed bytes of a file.

    Raises:
        DataError: it is damaged, truncated, not the file that was planned, or not what its name
            says. Damage may show only while it is read.
    """
    with Path(file.path).open("rb") as raw:
        require_unchanged(file, os.fstat(raw.fileno()))
        _require_compression(file, raw.read(_HEAD_BYTES))
        raw.seek(0)
        stream: BinaryIO = raw
        if file.compression == "gz":
            stream = cast("BinaryIO", gzip.GzipFile(fileobj=raw))
        elif file.compression == "zst":
            stream = cast("BinaryIO", _ZstReader(raw, file.path))
        try:
            yield stream
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise DataError(f"{file.path} is truncated or damaged ({error}); fetch it again") from (
                error
            )


def require_unchanged(file: InputFile, facts: os.stat_result) -> None:
    """DataError unless a file is the one whose pieces were planned."""
    if (facts.st_size, facts.st_mtime_ns) != (file.size, file.mtime_ns):
        raise DataError(
            f"{file.path} changed after the build was planned ({file.size:,} bytes then, "
            f"{facts.st_size:,} now); run the command again when nothing writes to it"
        )


def seems(file: InputFile) -> Format | None:
    """What a file whose name does not say it seems to hold; None where it may well be text."""
    with open_stream(file) as stream:
        head = stream.read(_HEAD_BYTES)
    if head.startswith(b"PAR1"):
        return "parquet"
    first, newline, rest = head.partition(b"\n")
    # One object alone is a document of its own (a notebook, a source map) if its name ends so.
    if not _is_object(first, whole=bool(newline) or len(head) < _HEAD_BYTES):
        return None
    return "jsonl" if rest.startswith(b"{") or not suffix_of(file.path) else None


def _is_object(line: bytes, *, whole: bool) -> bool:
    if not line.startswith(b"{"):
        return False
    try:
        return not whole or isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def _require_compression(file: InputFile, head: bytes) -> None:
    """DataError where a file's first bytes deny its name."""
    found = _looks(head)
    wanted = _NAMES.get(file.compression)
    if found == wanted or (wanted is None and (file.format == "text" or found in _PLAIN)):
        return
    if wanted is not None and not head:
        raise DataError(f"{file.path} is empty, which no {wanted} file is; fetch it again")
    problem = f"{file.path} is not {wanted}" if wanted else f"{file.path} is not plain JSON Lines"
    if found is None:
        raise DataError(f"{problem}; fetch it again")
    bare = file.path.removesuffix(Path(file.path).suffix) if wanted else file.path
    remedy = {
        **dict.fromkeys(_PLAIN, f"rename it to {bare}"),
        "gzip": f"rename it to {bare}.gz",
        "zstd": f"rename it to {bare}.zst",
        "UTF-16": "convert it to UTF-8, as with iconv -f UTF-16 -t UTF-8",
    }.get(found, "decompress it, or give it the name of what it is")
    raise DataError(f"{problem}; it looks like {found}: {remedy}")


def _looks(head: bytes) -> str | None:
    """How bytes at the start of a file look; None where they look like nothing known."""
    for magic, name in _MAGIC.items():
        if head.startswith(magic):
            return name
    if head[1:4] == _ZST_SKIPPABLE and head[0] >> 4 == 5:
        return "zstd"
    if head.lstrip()[:1] in (b"{", b"["):
        return "plain JSON"
    try:
        head[:-4].decode("utf-8")  # a character may be cut at the end
    except UnicodeDecodeError:
        return None
    return "plain text"


class _ZstReader:
    """zstandard's stream reader, which takes a file cut inside a frame for a complete one."""

    def __init__(self, raw: BinaryIO, path: str) -> None:
        zstandard = require("zstandard", f"reading {path}")
        self._error: type[Exception] = zstandard.ZstdError
        # Corpora are packed with --long, whose windows the library refuses unless told.
        decompressor = zstandard.ZstdDecompressor(max_window_size=_ZST_WINDOW_BYTES)
        self._new: Callable[[], Any] = decompressor.decompressobj
        self._raw = raw
        self._path = path
        self._frame = self._new()
        self._inside_frame = False
        self._input = b""
        self._output = b""

    def read(self, size: int) -> bytes:
        """``size`` bytes, fewer only at the end of the file."""
        parts = [self._output]
        total = len(self._output)
        while total < size and self._more_input():
            parts.append(self._decompress())
            total += len(parts[-1])
        data = b"".join(parts)
        self._output = data[size:]
        return data[:size]

    def _more_input(self) -> bool:
        # Little at a time: what comes out may be thousands of times as much.
        self._input = self._input or self._raw.read(_ZST_INPUT_BYTES)
        if not self._input and self._inside_frame:
            raise DataError(f"{self._path} is truncated (it ends inside a frame); fetch it again")
        return bool(self._input)

    def _decompress(self) -> bytes:
        try:
            part: bytes = self._frame.decompress(self._input)
        except self._error as error:
            raise DataError(f"{self._path} is damaged ({error}); fetch it again") from error
        self._inside_frame = not self._frame.eof
        self._input = b""
        if self._frame.eof:  # files of several frames are ordinary (zstd -T, cat)
            self._input = self._frame.unused_data
            self._frame = self._new()
        return part
