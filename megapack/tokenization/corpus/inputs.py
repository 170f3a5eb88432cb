"""Paths and patterns from the user -> the files of a corpus, ordered by their names only.

``find_inputs``: files, globs and folders -> input files; reports files that it does not take.

    files = find_inputs(["corpus/*.jsonl.zst", "src/"], suffixes=[".py"], note=print)
    # -> not taken from folders: 12 files (.md 10, .toml 2); choose with --suffix
    files[0].format, files[0].compression     # -> ("jsonl", "zst")
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
from pathlib import Path, PurePath
from typing import Any

from megapack.errors import ConfigError, DataError, check_name
from megapack.storage.foreign import detect
from megapack.storage.signatures import is_mds_shard
from megapack.tokenization.corpus.streams import (
    ARROW_FILE,
    ARROW_STREAM,
    HEAD_BYTES,
    TABLES,
    Compression,
    Format,
    InputFile,
    open_stream,
)
from megapack.units import counted

# Many public corpora use the suffix .json for JSON Lines. Files with other suffixes are text.
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
)  # for messages
_NOT_READ = (".bz2", ".xz", ".zip", ".7z", ".lz4", ".tar", ".tgz")
_TOKEN_SUFFIXES = (".npy", ".ds", ".bin", ".idx", ".index", ".loss")
_DELIMITERS = {"csv": ",", "tsv": "\\t"}  # escaped: for a command line
_SHOWN = 5


def _ends(path: str) -> tuple[str, Compression]:
    """Split a name's suffix: ``a.TXT.gz`` -> (".txt", "gz")."""
    name = path[path.rfind("/") + 1 :]
    suffix = _last_suffix(name).lower()
    if not (compression := _COMPRESSION_OF_SUFFIX.get(suffix, "")):
        return suffix, ""
    return _last_suffix(name[: -len(suffix)]).lower(), compression


def _last_suffix(name: str) -> str:
    """Return ``PurePath(name).suffix``, in a tenth of the time: a corpus may have many files."""
    at = name.rfind(".")
    return name[at:] if 0 < at < len(name) - 1 else ""


def _suffix_of(path: str) -> str:
    """Return a name's suffix with its compression (``.rst.gz``), in lower case; "" for none."""
    suffix, compression = _ends(path)
    return suffix + PurePath(path.lower()).suffix if compression else suffix


def _format_of(path: str) -> tuple[Format, Compression]:
    """Return format and compression by name. Raises ConfigError for archives."""
    suffix, compression = _ends(path)
    format = _FORMAT_OF_SUFFIX.get(suffix, "text")
    if suffix in (".tar", ".tgz"):
        raise ConfigError(
            f"{path} is a tar archive (perhaps a WebDataset shard); archives are not supported. "
            f"Unpack it and name the folder: mkdir -p {shlex.quote(_bare(path))} && "
            f"tar -xf {shlex.quote(path)} -C {shlex.quote(_bare(path))}"
        )
    is_shard = ".mds" in path.lower() and is_mds_shard(path)  # few names need a closer look
    if is_shard or (suffix == ".json" and PurePath(path).name == "index.json"):
        _refuse_mds(path)
    if suffix in _NOT_READ or (format in TABLES and compression):
        raise ConfigError(
            f"{path}: only .gz and .zst are supported, only of text and JSON Lines; decompress it"
        )
    return format, compression


def _bare(path: str) -> str:
    """Return a path without the suffixes of its name."""
    return str(PurePath(path).with_name(PurePath(path).name.partition(".")[0] or "unpacked"))


def _refuse_mds(path: str) -> None:
    """Raise ConfigError if a file belongs to a folder of MosaicML's streaming (MDS)."""
    folder = Path(path).parent
    if path.endswith(".json"):
        shards = _facts(Path(path)).get("shards")
        described = shards if isinstance(shards, list) else []
        if not any(isinstance(shard, dict) and "column_names" in shard for shard in described):
            return
    program = (
        "import json, sys, streaming; rows = streaming.StreamingDataset(local=sys.argv[1], "
        "shuffle=False, batch_size=1); [print(json.dumps({'text': row['text']})) for row in rows]"
    )
    raise ConfigError(
        f"{folder} is a folder of MosaicML streaming (MDS), which is not supported; convert it "
        f'(pip install mosaicml-streaming): python -c "{program}" {shlex.quote(str(folder))} > '
        "corpus.jsonl"
    )


def find_inputs(
    inputs: Sequence[str],
    *,
    suffixes: Sequence[str] = (),
    format: Format | None = None,
    max_bytes: int | None = None,
    note: Callable[[str], object] = lambda _: None,
) -> list[InputFile]:
    """Expand files, globs and directories into input files.

    The order is that of ``inputs``; within a glob or a directory, by path. A file reached twice (by
    any name or link) is taken once, at its first position. Links to directories are followed.
    Hidden files and directories below a named directory are left out. A directory saved by
    ``datasets`` (``save_to_disk``) gives its Arrow files in its own order.

    Args:
        inputs: paths, glob patterns (``**`` crosses directories), directories.
        suffixes: files to take from directories (``.py``, or a pattern like ``train-*.jsonl``); by
            default ``DATA_SUFFIXES``. Case does not matter.
        format: format of all files; None: decided by suffix.
        max_bytes: stop before the file that would make the sum of sizes exceed this.
        note: called with one sentence, with a count, for every kind of file that is not read.

    Raises:
        ConfigError: a pattern or directory without files; a file that is not regular, or of an
            unsupported or unknown format or compression; a name that is not UTF-8.
        OSError: a named file does not exist; a directory cannot be read.
    """
    aside: _Aside = collections.defaultdict(list)
    files: list[InputFile] = []
    seen: dict[tuple[int, int], str] = {}
    total = 0
    for path in _paths(inputs, suffixes, aside):
        check_name(path)
        facts = os.stat(path)  # noqa: PTH116
        if not stat.S_ISREG(facts.st_mode):
            raise ConfigError(
                f"{path} is not a regular file; inputs must be regular, as each is read twice"
            )
        first = seen.get((facts.st_dev, facts.st_ino))
        # Some file systems give several files one inode number: without hard links, compare names.
        if first and (facts.st_nlink > 1 or os.path.realpath(first) == os.path.realpath(path)):
            aside[_REPEATED].append(f"{path} is {first}")
            continue
        seen[facts.st_dev, facts.st_ino] = path
        total += facts.st_size
        if max_bytes is not None and total > max_bytes and files:
            break
        kind, compression = _format_of(path)
        files.append(InputFile(path, format or kind, compression, facts.st_size, facts.st_mtime_ns))
    if not files:
        raise DataError("no input files; name files, globs or directories with --input")
    if format is None:
        _require_format(files)
    aside[_EMPTY] += [file.path for file in files if not file.size]
    for what, noun in _NOTED.items():
        if aside[what]:
            note(f"{what}: {counted(len(aside[what]), noun)} (first: {aside[what][0]})")
    if aside[_UNWANTED]:
        note(f"{_UNWANTED}: {_by_suffix(aside[_UNWANTED])}; choose with --suffix")
    if texts := [file.path for file in files if file.format == "text"]:
        note(f"one document each: {_by_suffix(texts)}")
    return files


# ---- Files of paths, globs and folders ----------------------------------------------------------

_Aside = dict[str, list[str]]  # paths that are left out or reported: sentence -> paths

_REPEATED = "named several times, but read once"
_AGAIN = "links to folders that are read already"
_FOLDERS = "matched by a pattern without ** and not read"
_ODD = "broken links or special files, left out"
_HIDDEN = "hidden, left out"
_EMPTY = "empty"
_NOTED = {
    **{_REPEATED: "file", _AGAIN: "folder", _FOLDERS: "folder"},
    **{_ODD: "file", _HIDDEN: "name", _EMPTY: "file"},
}  # sentence -> noun of its count, in the order of the report
_UNWANTED = "not taken from folders"


def _by_suffix(paths: Iterable[str]) -> str:
    counts = collections.Counter(map(_suffix_of, paths))
    shown = [f"{suffix or 'no suffix'} {n:,}" for suffix, n in counts.most_common(_SHOWN)]
    more = ["..."] if len(counts) > _SHOWN else []
    return f"{counted(counts.total(), 'file')} ({', '.join(shown + more)})"


def _paths(inputs: Sequence[str], suffixes: Sequence[str], aside: _Aside) -> Iterator[str]:
    for name in inputs:
        path = Path(name)
        if not name:
            raise ConfigError(
                "an input is '' (an empty variable?); to read the current directory, give ."
            )
        if path.is_dir():
            num_unwanted = len(aside[_UNWANTED])
            paths = list(_walk(path, suffixes, aside))
            if not paths:
                wanted = ", ".join(suffixes) or DATA_SUFFIXES
                others = aside[_UNWANTED][num_unwanted:]
                contents = f"; it has {_by_suffix(others)}" if others else ""
                raise ConfigError(
                    f"directory {name} has no files with {wanted}{contents}; see --suffix"
                )
            if not suffixes:
                _refuse_if_most_are_skipped(name, paths, aside[_UNWANTED][num_unwanted:])
        elif path.exists() or not glob.has_magic(name):
            paths = [name]  # the caller's stat raises OSError if it is missing
        else:
            matches = glob.glob(name, recursive=True)  # noqa: PTH207 (absolute patterns too)
            folders = [match for match in matches if Path(match).is_dir()]
            paths = sorted(set(matches).difference(folders))
            if not paths:
                only = f", only {counted(len(folders), 'folder')}; name them" if folders else ""
                raise ConfigError(f"no file matches {name!r}{only}")
            aside[_FOLDERS] += [] if "**" in name else folders
        yield from paths


def _refuse_if_most_are_skipped(name: str, paths: list[str], others: list[str]) -> None:
    """Raise ConfigError if the default suffixes skip most files and most bytes of a directory."""
    if len(others) <= len(paths):
        return
    skipped, taken = (
        sum(path.stat().st_size for path in map(Path, part) if path.is_file())  # no broken links
        for part in (others, paths)
    )
    if skipped > taken:
        read = " ".join(dict.fromkeys(map(_suffix_of, paths)))
        most = collections.Counter(map(_suffix_of, others)).most_common(1)[0][0]
        is_plain = most.replace(".", "").isalnum()
        raise ConfigError(
            f"directory {name}: only {_by_suffix(paths)} would be read, and "
            f"{_by_suffix(others)} skipped; give --suffix {read} to read only these"
            # A name like "v1.5 (copy)" has no suffix that a shell and a pattern would accept.
            + (f", or --suffix {most}, or --suffix {read} {most}" if is_plain else "")
        )


def _walk(root: Path, suffixes: Sequence[str], aside: _Aside) -> Iterator[str]:
    patterns = [s if any(c in s for c in "*?[") else f"*{s}" for s in map(str.lower, suffixes)]

    def wanted(name: str) -> bool:
        if patterns:
            return any(fnmatch.fnmatchcase(name.lower(), pattern) for pattern in patterns)
        suffix, compression = _ends(name)
        format = _FORMAT_OF_SUFFIX.get(suffix)
        return format is not None and not (format in TABLES and compression)

    def refuse(error: OSError) -> None:
        raise error

    def inode(directory: Path) -> tuple[int, int]:
        facts = directory.stat()
        return facts.st_dev, facts.st_ino

    entered = {inode(root)}
    for directory, names, files in os.walk(root, followlinks=True, onerror=refuse):
        folders = []
        for name in sorted(names):
            path = Path(directory, name)
            if name.startswith("."):
                aside[_HIDDEN].append(str(path))
            elif (number := inode(path)) in entered:
                aside[_AGAIN].append(str(path))
            else:
                entered.add(number)
                folders.append(name)
        names[:] = folders
        begin = str(Path(directory, "x"))[:-1]
        for name in _in_order(Path(directory), files):
            file = begin + name
            if name.startswith("."):
                aside[_HIDDEN].append(file)
            elif not wanted(name):
                aside[_UNWANTED].append(file)
            elif os.path.isfile(file):  # noqa: PTH113 (faster than Path.is_file)
                yield file
            else:
                aside[_ODD].append(file)


def _in_order(directory: Path, files: Sequence[str]) -> list[str]:
    """Return a directory's files by name; of a saved dataset, the files of its rows in order.
    Raises ConfigError if the dataset has several splits, or lacks a file."""
    if "dataset_dict.json" in files:
        splits = _facts(directory / "dataset_dict.json").get("splits", [])
        if len(splits) > 1:
            raise ConfigError(
                f"{directory} is a saved dataset with the splits {', '.join(splits)}: name one or "
                f"several of them, for example {directory / splits[0]}"
            )
        return []  # the split is a directory
    if "dataset_info.json" not in files or not any(name.endswith(".arrow") for name in files):
        return sorted(files)
    if "state.json" not in files:  # a folder of the cache of ``datasets``
        return sorted({*files} - {"dataset_info.json"})
    state = _facts(directory / "state.json")
    rows = [entry["filename"] for entry in state.get("_data_files", ())]
    missing = [name for name in rows if name not in files]
    if missing or state.get("_indices_data_files"):
        problem = f"{missing[0]} is missing" if missing else "an indices file selects its rows"
        raise ConfigError(f"{directory} is a saved dataset, but {problem}: save it again")
    return rows


def _facts(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; {} for other content."""
    try:
        content = json.loads(path.read_bytes())
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}


# ---- Content that contradicts the name ----------------------------------------------------------


def _require_format(files: Sequence[InputFile]) -> None:
    """Raise ConfigError for files that would be one document each but seem to contain many. Checks
    the first file of every suffix of every directory."""
    checked: set[tuple[str, str]] = set()
    for file in files:
        suffix = _suffix_of(file.path)
        key = (file.path.rpartition("/")[0], suffix)
        if file.format != "text" or suffix.startswith(".txt") or not file.size or key in checked:
            continue
        checked.add(key)
        kind = suffix.removeprefix(".").partition(".")[0]
        if kind in _DELIMITERS:
            raise ConfigError(
                f"{file.path} would be one document (--format text), with all rows and column "
                f"names; convert it: {_convert(file.path, _DELIMITERS[kind])}"
            )
        with open_stream(file) as stream:
            head = stream.read(HEAD_BYTES)
        _refuse_token_ids(file, head)
        likely = _seems(head, suffix)
        if likely is not None:
            raise ConfigError(
                f"{file.path} would be one document, but looks like {likely}: give --format "
                f"{likely}, or --format text to make every file one document"
            )


def _refuse_token_ids(file: InputFile, head: bytes) -> None:
    """Raise ConfigError if a file holds token ids of another tool instead of text."""
    path, (suffix, compression) = file.path, _ends(file.path)
    if suffix not in _TOKEN_SUFFIXES or _is_text(head):
        return
    if compression:
        path = path.removesuffix(Path(path).suffix)
        tool = "gunzip -k" if compression == "gz" else "zstd -d"
        name, unpack, needed = "", f"unpack it ({tool}), then ", ""  # import detects the kind
    else:
        for ending in (".index", ".loss", ".idx"):  # side files
            path = path.removesuffix(ending)
        kind = detect(path) if suffix == ".idx" or Path(path).exists() else "flat"
        name, unpack = " without a header" if kind == "flat" else f" (kind {kind})", ""
        needed = " --dtype uint16" if kind == "flat" else ""
        needed += "" if kind in ("mmididx", "datatrove", "dolma") else " --eod-token ID"
    raise ConfigError(
        f"{file.path} is binary, probably token ids{name}; tokenize reads text: {unpack}"
        f"megapack-build import {shlex.quote(path)} --output-prefix PREFIX{needed}"
    )


def _is_text(head: bytes) -> bool:
    """Return whether the first bytes of a file can be UTF-8 text."""
    try:
        head[: -4 if len(head) == HEAD_BYTES else None].decode()  # the last character may be cut
    except UnicodeDecodeError:
        return False
    return b"\0" not in head


def _convert(path: str, delimiter: str) -> str:
    """Return a command line that converts comma- or tab-separated values to parquet."""
    how = f"c.ParseOptions(delimiter='{delimiter}', newlines_in_values=True)"
    program = (
        "import sys, pyarrow.csv as c, pyarrow.parquet as p; name = sys.argv[1]; "
        f"p.write_table(c.read_csv(name, parse_options={how}), name + '.parquet')"
    )
    return f'python -c "{program}" {shlex.quote(path)}'


def _seems(head: bytes, suffix: str) -> Format | None:
    """Return the likely format of a file from its first bytes; None: probably text."""
    if head.startswith(b"PAR1"):
        return "parquet"
    if head.startswith((ARROW_FILE, ARROW_STREAM)):
        return "arrow"
    first, newline, second = head.partition(b"\n")
    if not first.startswith(b"{"):
        return None
    if newline or len(head) < HEAD_BYTES:  # a whole line
        try:
            json.loads(first)
        except (ValueError, RecursionError):
            return None
    # A single object in a file with a suffix is one document (a notebook, a source map).
    return "jsonl" if second.startswith(b"{") or not suffix else None
