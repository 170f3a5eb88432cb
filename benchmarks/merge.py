"""Merge of many shards into one dataset, by megapack and by megatron-core (add_index, finalize).

    make bench-merge            # 2 million short documents, 128,000 of usual length

All sides merge the same shards in turns, from a warm page cache. The time covers the merge alone
(megapack's includes fsync; megatron-core leaves the writing to the kernel); memory is the growth of
the peak in a process that merges once. Both results are compared byte by byte. With short documents
the index dominates the time, with documents of usual length the copying of tokens.
"""

from __future__ import annotations

import filecmp
import importlib
import subprocess
import tempfile
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from common import in_child, quick, take_turns, write_results
from lengths import write_documents

from megapack.storage.merge import merge

VOCABULARY = 60_000
MEGATRON, OURS = "megatron-core, add_index + finalize", "megapack, merge"
UNKNOWN, COPY = "megapack, merge of shards without meta files", "copying the .bin files alone"


def main() -> None:
    num_tokens, num_shards = (16_000_000, 20) if quick() else (128_000_000, 100)
    rows = []
    for mean_tokens in (64, 1000):
        with tempfile.TemporaryDirectory() as name:
            rows += measure(Path(name), num_tokens // mean_tokens, mean_tokens, num_shards)
    write_results("merge", rows, **{f"{num_shards} shards": rows})


def measure(
    directory: Path, num_documents: int, mean_tokens: int, num_shards: int
) -> list[dict[str, Any]]:
    rng = np.random.default_rng(0)
    for i in range(num_shards):
        lengths = rng.integers(1, 2 * mean_tokens, num_documents // num_shards)
        write_documents(directory / f"shard{i}", lengths, vocabulary=VOCABULARY, seed=i)
        for suffix in (".bin", ".idx"):
            (directory / f"unknown{i}{suffix}").hardlink_to(directory / f"shard{i}{suffix}")
    warnings.simplefilter("ignore")
    theirs = importlib.import_module("megatron.core.datasets.indexed_dataset")
    known = [f"{directory}/shard{i}" for i in range(num_shards)]
    unknown = [f"{directory}/unknown{i}" for i in range(num_shards)]
    sides = {
        MEGATRON: partial(merge_with_megatron, theirs, known, directory / "theirs"),
        OURS: partial(merge, known, directory / "ours"),
        UNKNOWN: partial(merge, unknown, directory / "of-unknown"),
        COPY: partial(copy_tokens, known, directory / "copied"),
    }
    # Remove the result first: an existing one would not be merged again.
    fresh = {name: partial(removed_first, side) for name, side in sides.items()}
    memory = {name: in_child(side) for name, side in fresh.items()}
    found = take_turns(fresh)
    for suffix in (".bin", ".idx"):
        same = filecmp.cmp(directory / f"ours{suffix}", directory / f"theirs{suffix}", False)
        assert same, f"the two {suffix} files differ"
    peak = {name: of["peak_bytes"] for name, of in memory.items()}
    return [
        {"side": name, "num_documents": num_documents, "mean_tokens": mean_tokens, **timing.row()}
        | {"times_faster": found[MEGATRON].seconds / timing.seconds, "peak_mb": peak[name] / 1e6}
        | {"bytes_per_document": peak[name] / num_documents}
        | {"share_of_memory": peak[name] / peak[MEGATRON]}
        for name, timing in found.items()
    ]


def removed_first(side: partial[Any]) -> dict[str, Any]:
    """Remove the output, then run the side."""
    output: Path = side.args[-1]
    for path in output.parent.glob(f"{output.name}.*"):
        path.unlink()
    side()
    return {}


def merge_with_megatron(module: Any, shards: list[str], output: Path) -> None:
    builder = module.IndexedDatasetBuilder(f"{output}.bin", np.uint16)
    for shard in shards:
        builder.add_index(shard)
    builder.finalize(f"{output}.idx")


def copy_tokens(shards: list[str], output: Path) -> None:
    with Path(f"{output}.bin").open("wb") as file:
        subprocess.run(["cat", *(f"{shard}.bin" for shard in shards)], stdout=file, check=True)


if __name__ == "__main__":
    main()
