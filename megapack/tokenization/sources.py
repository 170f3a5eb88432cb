"""What the user named -> the files of a corpus, in one order that depends on nothing else."""

from __future__ import annotations

import fnmatch
import glob
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megapack.errors import ConfigError, DataError

__all__ = ["FORMATS", "Format", "InputFile", "find_inputs"]

Format = Literal["jsonl", "jsonl.gz", "jsonl.zst", "parquet", "text"]
FORMATS: tuple[Format, ...] = ("jsonl", "jsonl.gz", "jsonl.zst", "parquet", "text")

# Longest suffix first. Public corpora name JSON Lines .json as often as .jsonl.
_FORMAT_OF_SUFFIX: dict[str, Format] = {
    ".jsonl.gz": "jsonl.gz",
    ".json.gz": "jsonl.gz",
    ".jsonl.zst": "jsonl.zst",
    ".json.zst": "jsonl.zst",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".parquet": "parquet",
    ".txt": "text",
}
_COMPRESSED = (".gz", ".zst", ".zstd", ".bz2", ".xz", ".zip", ".7z", ".tar", ".lz4")


@dataclass(frozen=True, slots=True)
class InputFile:
    """One file of the corpus, as it was when the build was planned."""

    path: str
    format: Format
    size: int  # bytes on disk
    mtime_ns: int


def find_inputs(
    inputs: Sequence[str],
    *,
    suffixes: Sequence[str] = (),
    format: Format | None = None,
    max_bytes: int | None = None,
) -> list[InputFile]:
    """Expand files, globs and directories into input files.

    The order is the order of ``inputs``; within a glob or a directory, sorted by path. A file
    named twice is taken once, where it is named first. Hidden files and directories below a named
    directory are left out.

    Args:
        inputs: paths, glob patterns (``**`` crosses directories), directories.
        suffixes: what to take from directories (``.py``, or a pattern as ``train-*.jsonl``); by
            default every known data suffix (.jsonl, .jsonl.gz, .jsonl.zst, .json*, .parquet, .txt).
        format: read every file as this format instead of judging by its suffix.
        max_bytes: stop before the file that would make the sum of sizes exceed this.

    Raises:
        ConfigError: a pattern or directory gives nothing, or a compressed format is unknown.
        OSError: a named file does not exist.
    """
    files: dict[str, InputFile] = {}
    total = 0
    for path in _paths(inputs, suffixes):
        if path in files:
            continue
        stat = Path(path).stat()
        total += stat.st_size
        if max_bytes is not None and total > max_bytes and files:
            break
        files[path] = InputFile(path, format or _format_of(path), stat.st_size, stat.st_mtime_ns)
    if not files:
        raise DataError("there are no input files; name files, globs or directories with --input")
    return list(files.values())


def _paths(inputs: Sequence[str], suffixes: Sequence[str]) -> Iterator[str]:
    for name in inputs:
        path = Path(name)
        if path.is_dir():
            found = list(_walk(path, suffixes or tuple(_FORMAT_OF_SUFFIX)))
            wanted = ", ".join(suffixes) if suffixes else "known data suffixes"
            _require(found, f"directory {name} holds no files with {wanted}; see --suffix")
        elif path.exists() or not glob.has_magic(name):
            found = [name]  # a missing file is an OSError of the stat that follows
        else:
            matches = glob.glob(name, recursive=True)  # noqa: PTH207 (absolute patterns too)
            found = sorted(match for match in matches if Path(match).is_file())
            _require(found, f"no file matches {name!r}")
        yield from found


def _require(found: Sequence[str], message: str) -> None:
    if not found:
        raise ConfigError(message)


def _walk(root: Path, suffixes: Iterable[str]) -> Iterator[str]:
    patterns = [s if any(c in s for c in "*?[") else f"*{s}" for s in suffixes]
    for directory, names, files in os.walk(root):
        names[:] = sorted(name for name in names if not name.startswith("."))
        for name in sorted(files):
            if name.startswith(".") or not any(fnmatch.fnmatchcase(name, p) for p in patterns):
                continue
            path = Path(directory, name)
            if path.is_file():
                yield str(path)


def _format_of(path: str) -> Format:
    name = Path(path).name.lower()
    for suffix, format in _FORMAT_OF_SUFFIX.items():
        if name.endswith(suffix):
            return format
    if name.endswith(_COMPRESSED):
        raise ConfigError(
            f"{path}: only .jsonl.gz and .jsonl.zst are read compressed; decompress it first, or "
            "say what it is with --format"
        )
    return "text"
