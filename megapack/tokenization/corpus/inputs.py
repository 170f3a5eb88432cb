"""What the user named -> the files of a corpus, in one order that depends on nothing else.

What is left out, or read otherwise than one may expect, is said with counts.
"""

from __future__ import annotations

import collections
import fnmatch
import glob
import json
import os
import shlex
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megapack.errors import ConfigError, DataError
from megapack.tokenization.corpus.pieces import (
    DATA_SUFFIXES,
    Format,
    InputFile,
    format_of,
    is_data,
    require_utf8,
    suffix_of,
)
from megapack.tokenization.corpus.streams import seems
from megapack.units import counted

__all__ = ["find_inputs"]

_SHOWN = 5
_DELIMITERS = {"csv": ",", "tsv": "\\t"}  # as Python spells them


def find_inputs(
    inputs: Sequence[str],
    *,
    suffixes: Sequence[str] = (),
    format: Format | None = None,
    max_bytes: int | None = None,
    note: Callable[[str], object] | None = None,
) -> list[InputFile]:
    """Expand files, globs and directories into input files.

    The order is the order of ``inputs``; within a glob or a directory, sorted by path. A file
    reached twice, by whatever names, is taken once, where it comes first. Links to directories are
    followed. Hidden files and directories below a named directory are left out.

    A directory that ``datasets`` saved (``save_to_disk``) gives its Arrow files, in its own order.

    Args:
        inputs: paths, glob patterns (``**`` crosses directories), directories.
        suffixes: what to take from directories (``.py``, or a pattern as ``train-*.jsonl``); by
            default ``DATA_SUFFIXES``.
        format: read every file as this format instead of judging by its suffix.
        max_bytes: stop before the file that would make the sum of sizes exceed this.
        note: is told what was left out or taken once, a sentence each, with counts.

    Raises:
        ConfigError: a pattern or directory gives nothing; a file that is no regular one, of a
            compression or format that is not read, whose format its name does not say, or whose
            name is not UTF-8.
        OSError: a named file does not exist; a directory cannot be read.
    """
    aside = _Aside()
    files: list[InputFile] = []
    seen: dict[tuple[int, int], str] = {}
    total = 0
    for path in _paths(inputs, suffixes, aside):
        require_utf8(path)
        facts = Path(path).stat()
        if not stat.S_ISREG(facts.st_mode):
            raise ConfigError(f"{path} is no regular file; inputs are read more than once")
        first = seen.get((facts.st_dev, facts.st_ino))
        # Some file systems give one number to several files: names decide, but for hard links.
        if first and (facts.st_nlink > 1 or os.path.realpath(first) == os.path.realpath(path)):
            aside.repeated.append(f"{path} is {first}")
            continue
        seen[facts.st_dev, facts.st_ino] = path
        total += facts.st_size
        if max_bytes is not None and total > max_bytes and files:
            break
        kind, compression = format_of(path)
        file = InputFile(path, format or kind, compression, facts.st_size, facts.st_mtime_ns)
        files.append(file)
    if not files:
        raise DataError("there are no input files; name files, globs or directories with --input")
    if format is None:
        _require_format(files)
    if note is not None:
        for text in aside.notes(files):
            note(text)
    return files


@dataclass
class _Aside:
    """What was met and not taken."""

    repeated: list[str] = field(default_factory=list)
    unwanted: list[str] = field(default_factory=list)  # in directories, of another suffix
    hidden: list[str] = field(default_factory=list)
    odd: list[str] = field(default_factory=list)  # in directories: broken links, pipes, devices
    again: list[str] = field(default_factory=list)  # links to directories entered already
    folders: list[str] = field(default_factory=list)  # matched by a pattern

    def notes(self, files: Sequence[InputFile]) -> Iterator[str]:
        """A sentence for everything that may surprise, with ``files``, which are taken."""
        empty = [file.path for file in files if not file.size]
        texts = [file.path for file in files if file.format == "text"]
        for what, paths, noun in (
            ("named again and read once", self.repeated, "file"),
            ("linked to, but entered already", self.again, "folder"),
            ("matched by a pattern without ** and not entered", self.folders, "folder"),
            ("broken links or special files, left out", self.odd, "file"),
            ("hidden, left out", self.hidden, "name"),
            ("empty", empty, "file"),
        ):
            if paths:
                yield f"{what}: {counted(len(paths), noun)} (first: {paths[0]})"
        if self.unwanted:
            yield f"not taken from folders: {_by_suffix(self.unwanted)}; choose with --suffix"
        if texts:
            yield f"one document each: {_by_suffix(texts)}"


def _by_suffix(paths: Iterable[str]) -> str:
    counts = collections.Counter(map(suffix_of, paths))
    shown = [f"{suffix or 'no suffix'} {n:,}" for suffix, n in counts.most_common(_SHOWN)]
    more = ["..."] if len(counts) > _SHOWN else []
    return f"{counted(counts.total(), 'file')} ({', '.join(shown + more)})"


def _require_format(files: Sequence[InputFile]) -> None:
    """ConfigError for files that would be one document each and hold many, or seem to.

    The first file of every suffix of every directory is looked at.
    """
    looked: set[tuple[str, str]] = set()
    for file in files:
        suffix = suffix_of(file.path)
        key = (str(Path(file.path).parent), suffix)
        if file.format != "text" or suffix.startswith(".txt") or not file.size or key in looked:
            continue
        looked.add(key)
        kind = suffix.removeprefix(".").partition(".")[0]
        if kind in _DELIMITERS:
            raise ConfigError(
                f"{file.path} would be one document (--format text), with all of its rows and the "
                f"names of its columns; convert it: {_convert(file.path, _DELIMITERS[kind])}"
            )
        found = seems(file)
        if found is not None:
            raise ConfigError(
                f"{file.path} would be one document, but looks like {found}: say --format {found}, "
                "or --format text to take every file as one document"
            )


def _convert(path: str, delimiter: str) -> str:
    """A command line that makes parquet of comma- or tab-separated values."""
    how = f"c.ParseOptions(delimiter='{delimiter}', newlines_in_values=True)"
    program = (
        "import sys, pyarrow.csv as c, pyarrow.parquet as p; name = sys.argv[1]; "
        f"p.write_table(c.read_csv(name, parse_options={how}), name + '.parquet')"
    )
    return f'python -c "{program}" {shlex.quote(path)}'


def _paths(inputs: Sequence[str], suffixes: Sequence[str], aside: _Aside) -> Iterator[str]:
    for name in inputs:
        path = Path(name)
        if path.is_dir():
            met = len(aside.unwanted)
            found = list(_walk(path, suffixes, aside))
            if not found:
                wanted = ", ".join(suffixes) or DATA_SUFFIXES
                others = aside.unwanted[met:]
                there = f"; it holds {_by_suffix(others)}" if others else ""
                raise ConfigError(
                    f"directory {name} holds no files with {wanted}{there}; see --suffix"
                )
        elif path.exists() or not glob.has_magic(name):
            found = [name]  # a missing file is an OSError of the stat that follows
        else:
            matches = glob.glob(name, recursive=True)  # noqa: PTH207 (absolute patterns too)
            folders = [match for match in matches if Path(match).is_dir()]
            found = sorted(set(matches).difference(folders))
            if not found:
                only = f", but {counted(len(folders), 'folder')}; name them" if folders else ""
                raise ConfigError(f"no file matches {name!r}{only}")
            aside.folders += [] if "**" in name else folders
        yield from found


def _walk(root: Path, suffixes: Sequence[str], aside: _Aside) -> Iterator[str]:
    patterns = [s if any(c in s for c in "*?[") else f"*{s}" for s in suffixes]

    def wanted(name: str) -> bool:
        if not patterns:
            return is_data(name)
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)

    def refuse(error: OSError) -> None:
        raise error

    entered = {_inode(root)}
    for directory, names, files in os.walk(root, followlinks=True, onerror=refuse):
        folders = []
        for name in sorted(names):
            path = Path(directory, name)
            if name.startswith("."):
                aside.hidden.append(str(path))
            elif (inode := _inode(path)) in entered:
                aside.again.append(str(path))
            else:
                entered.add(inode)
                folders.append(name)
        names[:] = folders
        for name in _in_order(Path(directory), files):
            path = Path(directory, name)
            if name.startswith("."):
                aside.hidden.append(str(path))
            elif not wanted(name):
                aside.unwanted.append(str(path))
            elif path.is_file():
                yield str(path)
            else:
                aside.odd.append(str(path))


def _in_order(directory: Path, files: Sequence[str]) -> list[str]:
    """The files of a directory by name; of one that ``datasets`` wrote those of its rows.

    Raises:
        ConfigError: several splits were saved there, or not all files of the rows are there.
    """
    if "dataset_dict.json" in files:
        splits = _facts(directory / "dataset_dict.json").get("splits", [])
        if len(splits) > 1:
            raise ConfigError(
                f"{directory} holds the splits {', '.join(splits)} of a saved dataset: name those "
                f"that are wanted, as {directory / splits[0]}"
            )
        return []  # the split is a directory
    if "dataset_info.json" not in files or not any(name.endswith(".arrow") for name in files):
        return sorted(files)
    if "state.json" not in files:  # its cache
        return sorted({*files} - {"dataset_info.json"})
    state = _facts(directory / "state.json")
    rows = [entry["filename"] for entry in state.get("_data_files", ())]
    gone = [name for name in rows if name not in files]
    if gone or state.get("_indices_data_files"):
        problem = f"{gone[0]} is missing" if gone else "its rows are chosen by a file of indices"
        raise ConfigError(f"{directory} is a saved dataset, and {problem}: save it again")
    return rows


def _facts(path: Path) -> dict[str, Any]:
    """A JSON file's object; {} where it holds something else."""
    try:
        content = json.loads(path.read_bytes())
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}


def _inode(directory: Path) -> tuple[int, int]:
    facts = directory.stat()
    return facts.st_dev, facts.st_ino
