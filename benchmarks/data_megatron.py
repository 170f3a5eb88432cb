"""Inside Megatron: rows per second of BlendedMegatronDatasetBuilder + DataLoader, theirs and ours.

Both sides read the same .bin/.idx through megatron-core's own builder and torch's DataLoader with
default_collate, in one process. ``GPTDataset, positions`` is stock with reset_position_ids, the
nearest it comes to documents; it writes no boundaries. ``make bench-data`` prints these rows.
"""

from __future__ import annotations

import importlib
import itertools
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from data_corpus import ROW, megatron_train, write_corpus
from torch.utils.data import DataLoader

GLOBAL_BATCH = 64


def measure(*, quick: bool = False) -> list[dict[str, Any]]:
    """One dict per setting: name, build seconds (cold, warm), rows and tokens per second, ratio.

    Args:
        quick: 10 instead of 50 million tokens, one repetition.
    """
    importlib.import_module("megapack.integrations.megatron")  # not part of the first build
    num_tokens, seconds = (10_000_000, 0.5) if quick else (50_000_000, 2.0)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_corpus(folder / "text_document", num_tokens)
        (folder / "packed.json").write_text(
            '{"sources": [{"prefix": "text_document"}], '
            f'"buckets": [1024, 2048, 4096], "rows_per_block": {GLOBAL_BATCH}}}'
        )
        rows = [row for kind in KINDS for row in measure_kind(kind, folder, seconds)]
    base = {row["loader"]: row["rows_per_second"] for row in rows if row["dataset"] == KINDS[0]}
    for row in rows:
        row["ratio"] = row["rows_per_second"] / base[row["loader"]]
    return rows


KINDS = ("GPTDataset", "GPTDataset, positions", "PackedGPTDataset")
LOADERS = ((1, 0), (4, 0), (1, 2), (4, 2))  # micro batch size, workers


def measure_kind(kind: str, folder: Path, seconds: float) -> list[dict[str, Any]]:
    """All loaders of one dataset, built cold and warm."""
    cold, dataset = timed(lambda: build(kind, folder))
    warm, dataset = timed(lambda: build(kind, folder))
    result = []
    for micro_batch_size, workers in LOADERS:
        rate = rows_per_second(dataset, micro_batch_size, workers, seconds)
        result.append(
            {
                "dataset": kind,
                "loader": f"mbs {micro_batch_size}, workers {workers}",
                "build_cold_seconds": cold,
                "build_warm_seconds": warm,
                "rows_per_second": rate,
                "tokens_per_second": rate * ROW,
            }
        )
    return result


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


def rows_per_second(dataset: Any, micro_batch_size: int, workers: int, seconds: float) -> float:
    """Best of three runs of ``seconds``, after a first tenth of a second."""
    batches = [
        list(range(begin, begin + micro_batch_size))
        for begin in range(0, len(dataset) - micro_batch_size, micro_batch_size)
    ]
    best = 0.0
    for _ in range(3):
        iterator = iter(
            DataLoader(dataset, batch_sampler=itertools.cycle(batches), num_workers=workers)
        )
        begin = time.perf_counter()
        while time.perf_counter() - begin < 0.1:
            next(iterator)
        begin, count = time.perf_counter(), 0
        while time.perf_counter() - begin < seconds:
            next(iterator)
            count += micro_batch_size
        best = max(best, count / (time.perf_counter() - begin))
        del iterator
    return best


def timed(function: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds and result of one call."""
    begin = time.perf_counter()
    result = function()
    return time.perf_counter() - begin, result


def print_rows(rows: list[dict[str, Any]]) -> None:
    """The table, last in the output."""
    print(f"{'dataset':24} {'loader':18} {'rows/s':>9} {'Mtok/s':>8} {'ratio':>6} {'build s':>14}")
    for row in rows:
        builds = f"{row['build_cold_seconds']:.3f} / {row['build_warm_seconds']:.3f}"
        print(
            f"{row['dataset']:24} {row['loader']:18} {row['rows_per_second']:9.0f} "
            f"{row['tokens_per_second'] / 1e6:8.1f} {row['ratio']:6.2f} {builds:>14}"
        )


if __name__ == "__main__":
    print_rows(measure(quick=os.environ.get("QUICK") == "1"))
