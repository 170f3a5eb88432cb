"""Datasets named on a command line: prefixes, their files, shell globs, directories.

dataset_prefixes(["web", "code.idx", "shards/"])  # -> ["web", "code", "shards/0", "shards/1"]
"""

from __future__ import annotations

import glob
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from megapack.errors import ConfigError
from megapack.packing.sharded import SUFFIX, is_shard_manifest
from megapack.storage.address import is_remote, split_address
from megapack.storage.index_file import COMPANIONS
from megapack.storage.remote.client import names_in

_NAMELESS = (".meta.json", ".idx.orig", ".lock", ".manifest.json", ".checksums", ".col")
_SUFFIXES = (".bin", ".samples", SUFFIX, *_NAMELESS)


def dataset_prefixes(names: Iterable[str]) -> list[str]:
    """Return prefixes in the order given, with repetitions.

    A dataset is named by its prefix, its .idx, a directory (every .idx in it, sorted by name) or a
    quoted pattern (its matches, sorted by name; also at an address). Other files of a dataset, as
    in ``shards/*``, do not name it again; a .bin names one that nothing else names. Raises
    ConfigError for a directory without any .idx, a pattern without matches, or only files that name
    no dataset.
    """
    names = list(names)
    prefixes: list[str] = []
    token_files: dict[str, int] = {}  # prefix of a .bin -> number of prefixes before it
    for name in _expand_patterns(names):
        if not is_remote(name) and Path(name).is_dir():
            indices = sorted(str(path)[: -len(".idx")] for path in Path(name).glob("*.idx"))
            if not indices:
                raise ConfigError(f"{name} is a directory without any .idx; name another one")
            prefixes += indices
        elif not name.endswith(_SUFFIXES):
            prefixes.append(name.removesuffix(".idx"))
        elif name.endswith(".bin"):
            token_files.setdefault(name.removesuffix(".bin"), len(prefixes))
    known = set(prefixes)
    for prefix, position in reversed(token_files.items()):
        if prefix not in known:
            prefixes.insert(position, prefix)
    if names and not prefixes:
        raise ConfigError(f"{', '.join(names)} names no dataset: give its prefix, or its .idx")
    return prefixes


def named_files(names: Sequence[str]) -> tuple[list[str], list[str], list[str]]:
    """Return the prefixes (each once), .samples files and shard manifests among names. Raises
    ConfigError as ``dataset_prefixes``."""
    samples = [name for name in names if name.endswith(".samples")]
    manifests = [name for name in names if is_shard_manifest(name)]
    known = {*samples, *manifests}
    if known:  # a shell glob may add files that name no dataset
        names = [name for name in names if not name.endswith(_NAMELESS)]
    others = [name for name in names if name not in known]
    return list(dict.fromkeys(dataset_prefixes(others))), samples, manifests


def documents_of(prefixes: Sequence[str]) -> list[str]:
    """Return the prefixes that are not labels, loss weights or groups of another one."""
    companions = {prefix + end for prefix in prefixes for end in COMPANIONS}
    return [prefix for prefix in prefixes if prefix not in companions]


def local_file(name: str, option: str) -> Path:
    """Return the path of an output file. Raises ConfigError if it is an address."""
    if is_remote(name):
        raise ConfigError(
            f"{name} is an address, which this command cannot write: give {option} a local name, "
            "and copy the result with `megapack-build upload`"
        )
    return Path(name)


def _expand_patterns(names: Iterable[str]) -> Iterator[str]:
    for name in names:
        # The name of a dataset may contain brackets; no file has its prefix as name.
        if not glob.has_magic(name) or any(Path(name + end).exists() for end in ("", ".idx")):
            yield name
            continue
        if is_remote(name):
            matches = _matching_objects(name)
        else:
            paths = glob.glob(name, recursive=True)  # noqa: PTH207 (dot files as in the shell)
            matches = sorted(path for path in paths if not Path(path).is_dir())
        if not matches:
            raise ConfigError(f"{name} matches no file")
        yield from matches


def _matching_objects(pattern: str) -> list[str]:
    folder, last = split_address(pattern)
    if glob.has_magic(folder) or folder.startswith("http"):
        raise ConfigError(
            f"{pattern}: in an address only the part after the last / may be a pattern, and web "
            "servers do not list their files; name each dataset"
        )
    names = [name for name in names_in(folder) if fnmatchcase(name, last)]
    return [f"{folder}/{name}" for name in names if last[0] == "." or name[0] != "."]
