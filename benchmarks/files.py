"""``make bench-files``: many files as one source, from start to the first batch of one rank of 64.

Every file is a separately packed .idx with a sparse .bin; steps have 3 Mi tokens. Each side runs in
a separate process; imports do not count. ``shard manifest``: the files as one source, packed with
``pack --output NAME.shards.json``. ``blend of files``: each file is a source, all opened at the
start. ``GPTDataset``: megatron-core's builder over the same files with equal weights, to the first
row; the first start builds the indices of every file, a later start loads them from its cache.

``cold``: the pages of the files were dropped from the page cache (posix_fadvise); the kernel may
still cache names and inodes. ``private``: private memory of the process. ``opened``: number of
opened files; with a manifest, only those with samples of the step. With Megatron, the other ranks
wait at the start until rank 0 has built the indices; megapack has no such barrier.

The manifest has 10,000 files of 10,000 documents (4 GB of disk), the other sides 1,000 of them.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from common import in_child, quick, timed, write_results
from data import megatron_train
from lengths import BUCKETS, LAWS, RANKS, TOKENS_PER_RANK, write_index
from torch import distributed
from torch.distributed import HashStore

from megapack.cli.arguments import usable_cores
from megapack.data import PackedDataset, Schedule, build_loader
from megapack.packing.sharded import load_shards

MANIFEST = "web.shards.json"


def packed(folder: Path, prefixes: list[str]) -> dict[str, Any]:
    """Pack all shards but the last with the command, then add the last; return the row."""
    buckets = ",".join(map(str, BUCKETS))
    command = [sys.executable, "-m", "megapack.cli.main", "pack", "--buckets", buckets]
    command += ["--output", str(folder / MANIFEST)]

    def pack_them(those: list[str]) -> None:
        subprocess.run([*command, *those], check=True, stdout=subprocess.DEVNULL)

    first, _ = timed(lambda: pack_them(prefixes[:-1]))
    later, _ = timed(lambda: pack_them([str(folder / "*.idx")]))
    index = load_shards(folder / MANIFEST)
    assert len(index.shards) == len(prefixes)
    documents = index.num_documents
    return {
        "files": len(prefixes), "documents": documents, "processes": usable_cores(),
        "pack_seconds": first, "documents_per_second": documents / first,
        "add_one_file_seconds": later, "manifest_bytes": (folder / MANIFEST).stat().st_size,
    }  # fmt: skip


def first_batch(dataset: PackedDataset) -> dict[str, Any]:
    """Make the first batch of rank 0; return the samples of the step and the opened files."""
    schedule = Schedule(dataset, tokens_per_step=RANKS * TOKENS_PER_RANK, seed=1)
    rank = {"data_parallel_rank": 0, "data_parallel_size": RANKS}
    sizes = {"micro_batch_tokens": TOKENS_PER_RANK, "prefetch": 0}
    batch = next(iter(build_loader(dataset, schedule, **rank, **sizes)))
    assert batch["tokens"].shape == (1, TOKENS_PER_RANK)
    shards = dataset.samples.shards
    opened = sum(map(shards.is_open, range(len(shards))))
    return {"samples_of_step": len(schedule.step(0).sample_ids), "opened": opened}


def start_of_manifest(folder: Path, _: list[str]) -> dict[str, Any]:
    return first_batch(PackedDataset(None, folder / MANIFEST))


def start_of_blend(folder: Path, prefixes: list[str]) -> dict[str, Any]:
    shards = load_shards(folder / MANIFEST).shards[: len(prefixes)]
    return first_batch(PackedDataset(prefixes, [shard.samples for shard in shards]))


def start_of_megatron(folder: Path, prefixes: list[str]) -> dict[str, Any]:
    distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    paths = [Path(prefix) for prefix in prefixes]
    train = megatron_train(None, paths, folder / "cache", positions=False, num_samples=RANKS * 1000)
    assert len(train[0]["tokens"]) > 0
    return {"samples_of_step": 1, "opened": len(prefixes)}


def measured(
    side: Callable[[Path, list[str]], dict[str, Any]], folder: Path, prefixes: list[str], cold: bool
) -> dict[str, Any]:
    """Measure a start in a separate process."""
    if cold:  # except the sparse .bin files, of which only read pages are cached
        forget(*(path for path in folder.rglob("*") if path.is_file() and path.suffix != ".bin"))

    def run() -> dict[str, Any]:
        gc.collect()
        worked = time.process_time()
        seconds, about = timed(lambda: side(folder, prefixes))
        cpu = time.process_time() - worked
        return {"seconds_to_first_batch": seconds, "cpu_seconds": cpu, **about}

    found = in_child(run)
    del found["peak_bytes"]
    return found


def forget(*paths: Path) -> None:
    """Drop every page of files from the page cache."""
    os.sync()
    for path in paths:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def starts(folder: Path, prefixes: list[str], num_documents: int) -> list[dict[str, Any]]:
    """Measure cold and warm starts of every side; slow sides get at most 1,000 files."""
    some = prefixes[: min(len(prefixes), 100 if quick() else 1000)]
    sides: list[tuple[str, Callable[..., dict[str, Any]], list[str], list[str]]] = [
        ("shard manifest", start_of_manifest, prefixes, ["cold", "warm"]),
        ("blend of files", start_of_blend, some, ["cold", "warm"]),
        ("GPTDataset, first start", start_of_megatron, some, ["cold"]),
        ("GPTDataset, later start", start_of_megatron, some, ["warm"]),
    ]
    rows = []
    for name, side, own, all_pages in sides:
        for pages in all_pages:
            found = measured(side, folder, own, pages == "cold")
            documents = len(own) * num_documents
            about = {"side": name, "files": len(own), "documents": documents, "pages": pages}
            private = {"private_bytes_per_document": found["private_bytes"] / documents}
            rows.append(about | found | private)
    return rows


def main() -> None:
    num_files, num_documents = (200, 1_000) if quick() else (10_000, 10_000)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        lengths = LAWS["fineweb_edu_like"](num_documents, 1)
        prefixes = [str(folder / f"web{number:05d}") for number in range(num_files)]
        for number, prefix in enumerate(prefixes):  # the same lengths in different orders
            write_index(Path(prefix), np.roll(lengths, number))
        work = packed(folder, prefixes)
        # Import before the forks, so that the children do not measure imports.
        import megatron.core.datasets.blended_megatron_dataset_builder  # noqa: PLC0415
        import megatron.core.datasets.gpt_dataset  # noqa: F401, PLC0415

        rows = starts(folder, prefixes, num_documents)
    tables = {
        "packing many files as one source": [work],
        "from nothing to the first batch": rows,
    }
    write_results("files", {"pack": [work], "start": rows}, **tables)


if __name__ == "__main__":
    main()
