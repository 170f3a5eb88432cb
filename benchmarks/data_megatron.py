"""Inside Megatron: rows per second of BlendedMegatronDatasetBuilder + DataLoader, theirs and ours.

Both sides read the same .bin/.idx through megatron-core's own builder and torch's DataLoader with
default_collate, in one process. ``GPTDataset, positions`` is stock with reset_position_ids, the
nearest it comes to documents; it writes no boundaries. ``make bench-data`` prints these rows.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import Units, take_turns, timed
from data_corpus import ROW, megatron_train, write_corpus
from torch.utils.data import DataLoader

__all__ = ["inside_megatron", "next_of", "rows_of"]

GLOBAL_BATCH = 64
KINDS = ("GPTDataset", "GPTDataset, positions", "PackedGPTDataset")
LOADERS = ((1, 0), (4, 0), (1, 2), (4, 2))  # micro batch size, workers


def inside_megatron(folder: Path, *, quick: bool) -> list[dict[str, Any]]:
    """One dict per loader and dataset.

    Args:
        folder: for the corpus and Megatron's caches.
        quick: 10 instead of 50 million tokens, short windows.
    """
    importlib.import_module("megapack.integrations.megatron")  # not part of the first build
    folder.mkdir()
    write_corpus(folder / "text_document", 10_000_000 if quick else 50_000_000)
    (folder / "packed.json").write_text(
        '{"sources": [{"prefix": "text_document"}], '
        f'"buckets": [1024, 2048, 4096], "rows_per_block": {GLOBAL_BATCH}}}'
    )
    builds = {kind: [timed(lambda kind=kind: build(kind, folder)) for _ in range(2)]
              for kind in KINDS}  # fmt: skip
    rows = []
    for size, workers in LOADERS:
        sides = {kind: next_of(rows_of(built[-1][1], size, workers), size)
                 for kind, built in builds.items()}  # fmt: skip
        found = take_turns(sides, seconds=0.2 if quick else 1.0)
        for kind, timing in found.items():
            rows.append(
                {
                    "dataset": kind,
                    "loader": f"mbs {size}, workers {workers}",
                    "rows_per_second": timing.rate,
                    "spread_%": 100 * timing.spread,
                    "tokens_per_second": timing.rate * ROW,
                    "ratio": timing.rate / found[KINDS[0]].rate,
                    "build_cold_seconds": builds[kind][0][0],
                    "build_warm_seconds": builds[kind][1][0],
                }
            )
    return rows


def build(kind: str, folder: Path) -> Any:
    """The train split, through megatron-core's builder."""
    from megapack.integrations.megatron import PackedGPTDataset  # noqa: PLC0415

    ours = kind == "PackedGPTDataset"
    return megatron_train(
        PackedGPTDataset if ours else None,
        folder / ("packed.json" if ours else "text_document"),
        folder / "cache" / kind.replace(", ", "-"),
        positions="positions" in kind,
        num_samples=GLOBAL_BATCH * 1000,
    )


def rows_of(dataset: Any, size: int, workers: int) -> Any:
    """Micro batches of successive rows, without end."""
    begins = range(0, len(dataset) - size, size)
    batches = [list(range(begin, begin + size)) for begin in begins]
    return DataLoader(dataset, batch_sampler=itertools.cycle(batches), num_workers=workers)


def next_of(loader: Any, size: int) -> Callable[[], Units]:
    """Take the next micro batch of ``size`` rows; a loader begins with its first call."""
    iterator: Any = None

    def step() -> Units:
        nonlocal iterator
        iterator = iter(loader) if iterator is None else iterator
        next(iterator)
        return Units(size)

    return step
