"""What it takes to begin: seconds to the first batch, and memory, with many documents.

Each side in a process of its own; ``make bench-data`` prints these rows.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from data_corpus import ROW, megatron_train, write_large_corpus
from torch.utils.data import DataLoader

from megapack.data import PackedDataset, Schedule, build_loader

__all__ = ["beginnings"]


def begin_ours(prefix: Path) -> dict[str, float]:
    begin, before = time.perf_counter(), memory()
    packed = PackedDataset(prefix, f"{prefix}.samples")
    schedule = Schedule(packed, tokens_per_step=64 * 12 * ROW)
    loader = build_loader(
        packed, schedule, data_parallel_rank=0, data_parallel_size=64, micro_batch_tokens=12 * ROW
    )
    batches = iter(loader)
    next(batches)
    return _begun(begin, before)


def begin_megatron(prefix: Path) -> dict[str, float]:
    import megatron.core.datasets.gpt_dataset  # noqa: F401, PLC0415  (not to be counted)

    begin, before = time.perf_counter(), memory()
    train = megatron_train(
        None, prefix, prefix.parent / "cache", positions=True, num_samples=1_000_000
    )
    next(iter(DataLoader(train, batch_size=12)))
    return _begun(begin, before)


def _begun(begin: float, before: dict[str, int]) -> dict[str, float]:
    seconds, after = time.perf_counter() - begin, memory()
    return {
        "seconds": seconds,
        "private_bytes": after["Anonymous"] - before["Anonymous"],
        "resident_bytes": after["Rss"] - before["Rss"],
    }


def memory() -> dict[str, int]:
    """Bytes of this process: Anonymous are its own, the others of Rss are shared by a node."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
    return {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}


def beginnings(folder: Path, num_documents: int) -> list[dict[str, Any]]:
    """Each in a process of its own; Megatron twice, without its cache and with it."""
    prefix = folder / "large"
    begin = time.perf_counter()
    write_large_corpus(prefix, num_documents)
    rows: list[dict[str, Any]] = []
    runs = (
        ("ours, first batch", "ours"),
        ("GPTDataset, first batch, building its cache", "megatron"),
        ("GPTDataset, first batch, cached", "megatron"),
    )
    print(f"{num_documents:,} documents written and packed", time.perf_counter() - begin, "s")
    for name, who in runs:
        done = subprocess.run(
            [sys.executable, __file__, who, str(prefix)], check=True, capture_output=True, text=True
        )
        rows.append({"case": name, **json.loads(done.stdout.splitlines()[-1])})
    return rows


if __name__ == "__main__":
    begin_of = {"ours": begin_ours, "megatron": begin_megatron}[sys.argv[1]]
    print(json.dumps(begin_of(Path(sys.argv[2]))))
