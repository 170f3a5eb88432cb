"""The sample index of a source, built once and found again by content.

The name of a cached file holds a digest of everything that decides what is in it: the layout of
the documents (not their path or date), the range of documents, strategy, parameters, capacities,
seed and alignment. A changed dataset or option is another file; a stale one is never opened.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
import xxhash

from megapack.errors import ConfigError
from megapack.packing import SampleIndex, find_strategy, pack
from megapack.packing.stored import describe_source
from megapack.storage import IndexedDataset

__all__ = ["Recipe", "build_index", "cached_index", "is_first_rank"]

logger = logging.getLogger(__name__)

# Part of every digest: raise it when the same recipe gives other samples.
VERSION = 2
BUILD_TIMEOUT = 3600.0  # seconds that ranks wait for the one that builds
MAX_THREADS = 8


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything beside the documents that decides an index."""

    begin: int
    """First document."""
    end: int
    """Behind the last document."""
    strategy: str
    parameters: dict[str, Any]
    buckets: tuple[int, ...]
    seed: int
    align: int = 1
    """Segments are given room in multiples of this many tokens."""

    def digest(self, fingerprint: str) -> str:
        """Identity of the index of a dataset with this fingerprint: 32 hexadecimal digits."""
        strategy = find_strategy(self.strategy)
        content = asdict(self) | {"parameters": strategy.resolve(self.parameters)}
        content |= {"version": VERSION, "documents": fingerprint}
        return xxhash.xxh3_128_hexdigest(json.dumps(content, sort_keys=True).encode())


def cached_index(
    dataset: IndexedDataset, recipe: Recipe, directory: Path, *, node_local: bool = False
) -> SampleIndex:
    """The index of a recipe, memory-mapped from ``directory``; built there if it is missing.

    Global rank 0 builds and the others wait for the file; with ``node_local`` the first process of
    a node to come builds, under a lock, and the others of that node wait. Files appear under their
    name only when they are complete.

    Args:
        dataset: the documents.
        recipe: how they are packed.
        directory: where index files lie; created if missing.
        node_local: the directory is a disk of each node and not shared between nodes.

    Raises:
        ConfigError: the file did not appear in an hour; the message says what to try.
        OSError: the directory cannot be written.
    """
    name = f"{Path(dataset.prefix).name}-{recipe.strategy}-{recipe.digest(dataset.fingerprint)}"
    path = directory / f"{name}.samples"
    if not path.exists():
        if node_local or is_first_rank():
            directory.mkdir(parents=True, exist_ok=True)
            with _locked(directory) if node_local else nullcontext():
                if not path.exists():
                    _build_and_save(dataset, recipe, path)
        else:
            _wait_for(path)
    return SampleIndex.load(path)


def is_first_rank() -> bool:
    """Whether this is global rank 0. Without a process group every process is its own first."""
    return not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Alone among the processes of this node; the lock ends with the process, whatever happens."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _build_and_save(dataset: IndexedDataset, recipe: Recipe, path: Path) -> None:
    started = time.perf_counter()
    index = build_index(dataset, recipe)
    # Given as a mapping: the index knows the lengths of its range, not those of all documents.
    index.save(path, source=describe_source(dataset, dataset.prefix))
    metrics = index.metrics()
    logger.info(
        "packed %s documents [%d, %d) in %.1f s: %d samples, padding %.3f %%, cut documents "
        "%.3f %% -> %s",
        dataset.prefix,
        recipe.begin,
        recipe.end,
        time.perf_counter() - started,
        metrics["num_samples"],
        100 * metrics["padding_ratio"],
        100 * metrics["num_truncated_documents"] / max(1, recipe.end - recipe.begin),
        path,
    )


def _wait_for(path: Path) -> None:
    deadline = time.monotonic() + BUILD_TIMEOUT
    pause = 0.05
    while not path.exists():
        if time.monotonic() > deadline:
            raise ConfigError(
                f"{path} did not appear in {BUILD_TIMEOUT:.0f} s; rank 0 builds it. If the "
                'directory is not shared between nodes set "node_local" in the manifest; to build '
                "before the job starts run `python -m megapack.integrations.index`"
            )
        time.sleep(pause)
        pause = min(1.0, 2 * pause)


def build_index(dataset: IndexedDataset, recipe: Recipe) -> SampleIndex:
    """Pack the documents of a recipe; ids and positions are those of the whole dataset.

    Raises:
        ConfigError: capacities that are no multiples of ``align``.
        ValueError: what else ``pack`` refuses.
    """
    unaligned = [capacity for capacity in recipe.buckets if capacity % recipe.align]
    if unaligned:
        raise ConfigError(
            f"bucket {unaligned[0]} is no multiple of align {recipe.align}; choose capacities that "
            "are (2 x context_parallel_size x tensor_parallel_size always works)"
        )
    lengths = np.array(dataset.document_lengths)  # a copy: the others are hidden below
    lengths[: recipe.begin] = 0
    lengths[recipe.end :] = 0
    return pack(
        lengths,
        recipe.strategy,
        buckets=recipe.buckets,
        seed=recipe.seed,
        threads=min(MAX_THREADS, os.cpu_count() or 1),
        alignment=recipe.align,
        **recipe.parameters,
    )
