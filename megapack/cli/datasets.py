"""Datasets named on a command line: prefixes, their files, shell globs, directories."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

__all__ = ["dataset_prefixes", "progress_bar"]


def dataset_prefixes(names: Iterable[str]) -> list[str]:
    """Prefixes in the order given, each once.

    ``shards/*`` names .bin, .idx and .meta.json of the same dataset; a directory stands for every
    .idx in it, sorted by name.

    Raises:
        ValueError: a directory without any .idx.
    """
    prefixes: dict[str, None] = {}
    for name in names:
        if Path(name).is_dir():
            found = sorted(str(path)[: -len(".idx")] for path in Path(name).glob("*.idx"))
            if not found:
                raise ValueError(f"{name} is a directory without any .idx")
            prefixes |= dict.fromkeys(found)
        elif not name.endswith((".bin", ".meta.json", ".idx.orig")):
            prefixes[name.removesuffix(".idx")] = None
        elif name.endswith(".bin") and not Path(name.removesuffix(".bin") + ".idx").exists():
            prefixes[name.removesuffix(".bin")] = None  # verify says that its .idx is missing
    return list(prefixes)


@contextmanager
def progress_bar(label: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on a terminal's stderr, fed with (done, total); silent elsewhere."""
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task(label, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
