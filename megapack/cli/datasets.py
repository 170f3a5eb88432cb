"""Datasets named on a command line: prefixes, their files, shell globs, directories."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from megapack.errors import ConfigError
from megapack.packing import SampleIndex
from megapack.storage import IndexedDataset

__all__ = ["dataset_prefixes", "prefix_of_samples"]

COMPANIONS = (".bin", ".meta.json", ".idx.orig", ".lock", ".manifest.json")


def dataset_prefixes(names: Iterable[str]) -> list[str]:
    """Prefixes in the order given, each once.

    ``shards/*`` names all files of the same dataset; a directory stands for every
    .idx in it, sorted by name.

    Raises:
        ConfigError: a directory without any .idx.
    """
    prefixes: dict[str, None] = {}
    for name in names:
        if Path(name).is_dir():
            found = sorted(str(path)[: -len(".idx")] for path in Path(name).glob("*.idx"))
            if not found:
                raise ConfigError(f"{name} is a directory without any .idx")
            prefixes |= dict.fromkeys(found)
        elif not name.endswith(COMPANIONS):
            prefixes[name.removesuffix(".idx")] = None
        elif name.endswith(".bin") and not Path(name.removesuffix(".bin") + ".idx").exists():
            prefixes[name.removesuffix(".bin")] = None  # verify says that its .idx is missing
    return list(prefixes)


def prefix_of_samples(path: str, index: SampleIndex) -> str:
    """Where the dataset of a .samples file lies: where it was packed, or beside the file.

    Raises:
        ConfigError: the file does not say.
    """
    prefix = (index.source or {}).get("prefix")
    if prefix is None:
        raise ConfigError(f"{path} does not say which dataset it is of; give --data-prefix")
    # A dataset and its index often travel together.
    return prefix if IndexedDataset.exists(prefix) else str(Path(path).with_name(Path(prefix).name))
