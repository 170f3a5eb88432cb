"""Read batches through one cache in several processes and threads; compare with local ones.

  python tests/remote/stress.py --micro-batches 100000
  python tests/remote/stress.py --micro-batches 100000 --cache-size none

Every thread is a rank with its own loader; the threads of a process share the open
datasets. A round is an epoch in a new order. With a size the cache is too small for what is read,
and the same blocks come and go all the time; without one every round begins with an empty cache,
in which all ranks meet. What is printed is JSON: micro batches, differences, chunks that were
dropped, seconds. A process that does not end within --limit seconds prints where all its threads
are and is a hang.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import multiprocessing
import os
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from megapack.data import PackedDataset, Schedule, build_loader
from megapack.packing import pack
from megapack.storage import IndexedDataset, IndexedDatasetBuilder
from megapack.storage.remote import cache as remote_cache
from megapack.storage.remote.client import put_object
from megapack.storage.remote.copies import upload_dataset
from megapack.units import parse_size

MICRO_BATCH = 512
SOURCES = ("first", "second")
DOCUMENTS = 2000  # of each source, of 100 tokens on average: 25 blocks of 16 KiB


def write_sources(folder: Path) -> None:
    """Write each source locally and, for the cache, to the folder ``store``."""
    (folder / "store").mkdir()
    for number, name in enumerate(SOURCES):
        rng = np.random.default_rng(number)
        with IndexedDatasetBuilder(folder / name, np.dtype(np.uint16)) as builder:
            for length in rng.integers(1, 200, DOCUMENTS).tolist():
                builder.add_document(rng.integers(0, 60_000, length))
        documents = IndexedDataset(folder / name)
        index = pack(documents.document_lengths, "bucket", buckets=[64, 256])
        index.save(folder / f"{name}.samples", source=documents)
        upload_dataset(str(folder / name), f"file://{folder}/store/{name}")
        put_object(f"file://{folder}/store/{name}.samples", folder / f"{name}.samples")


def batches(data: PackedDataset, rank: int, size: int, seed: int, *, prefetch: int) -> Any:
    """Return the batches of a rank in one epoch, in the order of ``seed``."""
    schedule = Schedule(data, tokens_per_step=size * MICRO_BATCH, seed=seed)
    where = {"data_parallel_rank": rank, "data_parallel_size": size}
    sizes = {"micro_batch_tokens": MICRO_BATCH, "prefetch": prefetch}
    return build_loader(data, schedule, **where, **sizes)


def opened(folder: str) -> PackedDataset:
    """Open both sources."""
    prefixes = [f"{folder}/{name}" for name in SOURCES]
    return PackedDataset(prefixes, [f"{prefix}.samples" for prefix in prefixes])


def work(folder: Path, process: int, args: argparse.Namespace, start: Any, results: Any) -> None:
    """Run rounds in one process until enough micro batches were compared."""
    faulthandler.dump_traceback_later(args.limit, exit=True)
    remote_cache.SMALLEST_SIZE, remote_cache.CHUNK_BLOCKS = 1, 4
    size = args.processes * args.threads
    counts = {"micro_batches": 0, "differences": 0, "dropped": 0}
    counting = threading.Lock()
    errors: list[BaseException] = []
    near = opened(str(folder))

    def count_dropped(event: str, about: tuple[Any, ...]) -> None:
        counts["dropped"] += event == "os.remove" and ".bin." in str(about[0])

    sys.addaudithook(count_dropped)

    def compare(far: PackedDataset, rank: int, seed: int) -> None:
        try:
            pairs = (
                batches(data, rank, size, seed, prefetch=prefetch)
                for data, prefetch in ((far, 2), (near, 0))
            )
            for there, here in zip(*pairs, strict=True):
                same = all(
                    np.array_equal(np.asarray(there[name]), np.asarray(here[name]))
                    for name in ("tokens", "labels", "loss_mask", "cu_seqlens", "sample_ids")
                )
                with counting:
                    counts["micro_batches"] += 1
                    counts["differences"] += not same
        except BaseException as error:
            errors.append(error)
            raise

    number = 0
    while counts["micro_batches"] * args.processes < args.micro_batches and not errors:
        os.environ["MEGAPACK_CACHE"] = f"{folder}/cache{0 if args.cache_size else number}"
        start.wait()
        far = opened(f"file://{folder}/store")
        ranks = range(process * args.threads, (process + 1) * args.threads)
        threads = [threading.Thread(target=compare, args=(far, rank, number)) for rank in ranks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        number += 1
    results.put({**counts, "errors": [repr(error) for error in errors], "rounds": number})


def stress(args: argparse.Namespace) -> dict[str, Any]:
    """Run all processes; return the counts to print."""
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="megapack-stress-", dir=args.directory) as name:
        folder = Path(name)
        if args.cache_size:
            os.environ["MEGAPACK_CACHE_SIZE"] = str(args.cache_size)
        write_sources(folder)
        results, start = spawn.SimpleQueue(), spawn.Barrier(args.processes, timeout=args.limit)
        processes = [
            spawn.Process(target=work, args=(folder, process, args, start, results))
            for process in range(args.processes)
        ]
        begin = time.perf_counter()
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        seconds = time.perf_counter() - begin
        found = [results.get() for process in processes if process.exitcode == 0]
    return {
        "micro_batches": sum(each["micro_batches"] for each in found),
        "processes": args.processes,
        "threads": args.threads,
        "rounds": max((each["rounds"] for each in found), default=0),
        "dropped_chunks": sum(each["dropped"] for each in found),
        "differences": sum(each["differences"] for each in found),
        "errors": [error for each in found for error in each["errors"]],
        "hangs": sum(process.exitcode != 0 for process in processes),
        "seconds": round(seconds, 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--micro-batches", type=int, default=100_000, help="of all processes")
    parser.add_argument("--processes", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2, help="of each process")
    size = lambda text: None if text == "none" else parse_size(text)  # noqa: E731
    parser.add_argument("--cache-size", type=size, default="512K")
    parser.add_argument("--limit", type=float, default=3600, help="seconds, after which it hangs")
    parser.add_argument("--directory", default="/dev/shm" if Path("/dev/shm").is_dir() else None)
    found = stress(parser.parse_args())
    print(json.dumps(found))
    return int(bool(found["hangs"] or found["differences"] or found["errors"]))


if __name__ == "__main__":
    sys.exit(main())
