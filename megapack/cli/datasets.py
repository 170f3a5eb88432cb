"""Datasets named on a command line: prefixes, their files, shell globs, directories."""

from __future__ import annotations

import glob
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from megapack.errors import ConfigError
from megapack.packing.sharded import SUFFIX, is_shard_manifest
from megapack.storage.address import is_remote, split_address
from megapack.storage.index_file import BESIDE
from megapack.storage.remote.client import names_in

_NAMELESS = (".meta.json", ".idx.orig", ".lock", ".manifest.json", ".checksums")
COMPANIONS = (".bin", ".samples", SUFFIX, *_NAMELESS)


def dataset_prefixes(names: Iterable[str]) -> list[str]:
    """Prefixes in the order given, each as often as it is named.

    A prefix, its .idx, a directory (every .idx in it, sorted by name) and a quoted pattern (what it
    matches, sorted by name; at an address, too) name a dataset. Its other files, as ``shards/*``
    has them, do not name it once more; a .bin names one that nothing else names.

    Raises:
        ConfigError: a directory without any .idx, a pattern that matches nothing, or nothing but
            files that name no dataset.
    """
    names = list(names)
    prefixes: list[str] = []
    token_files: dict[str, int] = {}  # prefix of a .bin -> how many prefixes came before it
    for name in _expanded(names):
        if not is_remote(name) and Path(name).is_dir():
            found = sorted(str(path)[: -len(".idx")] for path in Path(name).glob("*.idx"))
            if not found:
                raise ConfigError(f"{name} is a directory without any .idx")
            prefixes += found
        elif not name.endswith(COMPANIONS):
            prefixes.append(name.removesuffix(".idx"))
        elif name.endswith(".bin"):
            token_files.setdefault(name.removesuffix(".bin"), len(prefixes))
    known = set(prefixes)
    alone = {prefix: at for prefix, at in token_files.items() if prefix not in known}
    for prefix, at in reversed(alone.items()):
        prefixes.insert(at, prefix)
    if names and not prefixes:
        raise ConfigError(f"{', '.join(names)} names no dataset: give its prefix, or its .idx")
    return prefixes


def named_files(names: Sequence[str]) -> tuple[list[str], list[str], list[str]]:
    """Prefixes of datasets (each once), .samples files and shard manifests, as they were named.

    Raises:
        ConfigError: as of ``dataset_prefixes``.
    """
    samples = [name for name in names if name.endswith(".samples")]
    manifests = [name for name in names if is_shard_manifest(name)]
    known = {*samples, *manifests}
    if known:  # files that name nothing may stand beside those that do
        names = [name for name in names if not name.endswith(_NAMELESS)]
    others = [name for name in names if name not in known]
    return list(dict.fromkeys(dataset_prefixes(others))), samples, manifests


def documents_of(prefixes: Sequence[str]) -> list[str]:
    """Those that are not the labels, loss weights or groups of another one."""
    beside = {prefix + end for prefix in prefixes for end in BESIDE}
    return [prefix for prefix in prefixes if prefix not in beside]


def local_file(name: str, option: str) -> Path:
    """The path of a file to be written. Raises ConfigError: it is an address."""
    if is_remote(name):
        raise ConfigError(
            f"{name} cannot be written from here: give {option} a local name, and copy the result "
            "with `megapack-build upload`"
        )
    return Path(name)


def _expanded(names: Iterable[str]) -> Iterator[str]:
    """Quoted patterns as the files that they match."""
    for name in names:
        # Of a dataset whose own name has brackets, the prefix is the name of no file.
        if not glob.has_magic(name) or any(Path(name + end).exists() for end in ("", ".idx")):
            yield name
            continue
        if is_remote(name):
            found = _matching_objects(name)
        else:
            matched = glob.glob(name, recursive=True)  # noqa: PTH207 (as the shell, with its dots)
            found = sorted(path for path in matched if not Path(path).is_dir())
        if not found:
            raise ConfigError(f"{name} matches no file")
        yield from found


def _matching_objects(pattern: str) -> list[str]:
    folder, last = split_address(pattern)
    if glob.has_magic(folder) or folder.startswith("http"):
        raise ConfigError(
            f"{pattern}: at an address a pattern may stand behind the last / only, and web servers "
            "do not list their files; name each dataset"
        )
    names = [name for name in names_in(folder) if fnmatchcase(name, last)]
    return [f"{folder}/{name}" for name in names if last[0] == "." or name[0] != "."]
