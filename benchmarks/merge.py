"""Many shards into one dataset: megapack's merge and megatron-core's add_index/finalize.

    make bench-merge            # 5 million documents in 100 shards; QUICK=1: half a million in 20
    python benchmarks/merge.py --directory /fast/disk

Every side runs in a process of its own over the same shards in a warm page cache. Time is that of
the merge alone (megapack's includes bringing the result to disk, which megatron-core leaves to
the kernel); memory is the peak above what the process had before the merge. Both results are
compared byte by byte.
"""

from __future__ import annotations

import argparse
import filecmp
import importlib
import json
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
from common import quick, write_results

from megapack.cli.report import print_table
from megapack.storage import IndexedDatasetBuilder
from megapack.storage.merge import merge
from megapack.words import count

MEAN_TOKENS = 64  # short documents: the index, not the copying of tokens, is what differs
VOCABULARY = 60_000
SIDES = {
    "megatron-core": "megatron-core 0.16.1, add_index + finalize",
    "megapack": "megapack, merge",
    "unknown": "megapack, merge of shards without meta files",
    "tokens": "copying the .bin files alone",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--directory", help="where the shards and results go (default: temporary)")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    args = parser.parse_args()
    num_documents, num_shards = (500_000, 20) if quick() else (5_000_000, 100)
    if args.side:
        print(json.dumps(run_side(args.side, Path(args.directory), num_shards)))
        return
    with tempfile.TemporaryDirectory(dir=args.directory) as name:
        directory = Path(name)
        write_shards(directory, num_documents, num_shards)
        rows = [measure(side, directory) for side in SIDES]
        for suffix in (".bin", ".idx"):
            same = filecmp.cmp(
                directory / f"megapack{suffix}", directory / f"megatron-core{suffix}", False
            )
            assert same, f"the two {suffix} files differ"
    report(rows, num_documents, num_shards)


def write_shards(directory: Path, num_documents: int, num_shards: int) -> None:
    rng = np.random.default_rng(0)
    for i in range(num_shards):
        lengths = rng.integers(1, 2 * MEAN_TOKENS, num_documents // num_shards)
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        prefix = directory / f"shard{i}"
        with IndexedDatasetBuilder(prefix, np.uint16, vocab_size=VOCABULARY) as builder:
            builder.add_documents(
                rng.integers(0, VOCABULARY, offsets[-1], dtype=np.uint16), offsets
            )
        for suffix in (".bin", ".idx"):
            Path(f"{directory}/unknown{i}{suffix}").hardlink_to(f"{prefix}{suffix}")


def measure(side: str, directory: Path) -> dict[str, Any]:
    command = [sys.executable, __file__, "--side", side, "--directory", str(directory)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    result: dict[str, Any] = json.loads(done.stdout)
    return {"side": side, **result}


def run_side(side: str, directory: Path, num_shards: int) -> dict[str, float]:
    name = "unknown" if side == "unknown" else "shard"
    shards = [f"{directory}/{name}{i}" for i in range(num_shards)]
    sides = {
        "megatron-core": merge_with_megatron,
        "megapack": merge,
        "unknown": merge,
        "tokens": copy_tokens,
    }
    if side == "megatron-core":
        import_megatron()
    before = reset_peak()
    begin = time.perf_counter()
    sides[side](shards, f"{directory}/{side}")
    seconds = time.perf_counter() - begin
    return {"seconds": seconds, "peak_bytes": float(peak_bytes() - before)}


def reset_peak() -> int:
    """Forget the peak of the imports (Linux); bytes in use now."""
    Path("/proc/self/clear_refs").write_text("5")
    return peak_bytes()


def peak_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split("VmHWM:")[1].split()[0])


def import_megatron() -> Any:
    warnings.simplefilter("ignore")
    return importlib.import_module("megatron.core.datasets.indexed_dataset").IndexedDatasetBuilder


def merge_with_megatron(shards: list[str], output: str) -> None:
    builder = import_megatron()(f"{output}.bin", np.uint16)
    for shard in shards:
        builder.add_index(shard)
    builder.finalize(f"{output}.idx")


def copy_tokens(shards: list[str], output: str) -> None:
    with Path(f"{output}.bin").open("wb") as file:
        subprocess.run(["cat", *(f"{shard}.bin" for shard in shards)], stdout=file, check=True)


def report(rows: list[dict[str, Any]], num_documents: int, num_shards: int) -> None:
    base = rows[0]
    for row in rows:
        row["num_documents"], row["num_shards"] = num_documents, num_shards
        row["times_faster"] = base["seconds"] / row["seconds"]
        row["share_of_memory"] = row["peak_bytes"] / base["peak_bytes"]
    write_results("merge", rows)
    print_table(
        ["", "seconds", "times faster", "peak MB", "bytes/document", "of the memory"],
        [
            [
                SIDES[row["side"]],
                f"{row['seconds']:.2f}",
                f"{row['times_faster']:.1f}",
                f"{row['peak_bytes'] / 1e6:.1f}",
                f"{row['peak_bytes'] / num_documents:.1f}",
                f"{row['share_of_memory']:.3f}",
            ]
            for row in rows
        ],
        title=f"{count(num_documents)} documents in {num_shards} shards",
    )


if __name__ == "__main__":
    main()
