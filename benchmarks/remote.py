"""``make bench-remote``: batches from an object store with 50 ms latency and 200 MB/s bandwidth.

A server on this machine implements S3. A proxy (``object_store.py``) adds this latency and limits
the bandwidth of all requests together. ``bare ranges`` is the client alone: it reads the whole .bin
in ranges of 4 MiB, 64 at a time. All other cases make batches:

- ``local file``: from the .bin on this machine's disk, the reference for waiting: at this speed the
  trainer also waits for the CPU if both cores are busy;
- ``shuffled``: the default, a source that was not arranged: documents in the schedule's order, at
  random places, with an empty cache; the first steps, and ``an epoch``, in which the loader also
  copies the whole file;
- ``arranged``: the same after ``megapack-build arrange``: samples are drawn in the order in which
  their documents are stored;
- ``whole file, then``: the .bin is downloaded first, then read from disk;
- ``Megatron``: megatron-core's S3 reader, which keeps one chunk of 256 MiB in memory and reads the
  documents of the same samples in the same order (without making batches).

``of_the_line_%``: tokens per second divided by ``bare``. ``tokens_per_s``: speed of a trainer that
takes batches as fast as it can, after the first (``whole file``: from the start). ``data_wait_%``:
waiting time of a trainer that takes them at 80 % of ``bare``, after the first tenth. Both are
medians of three runs (shuffled: one run). ``most_wait_%``: the run that waited longest.
``read_over_useful``: bytes received divided by bytes of the samples' tokens. The cache is in
memory, so the disk does not matter. Server, proxy and client share the cores of one machine;
``bare`` shows whether these suffice for the bandwidth.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from operator import itemgetter
from pathlib import Path
from statistics import median
from typing import Any

import boto3
import numpy as np
from common import in_child, quick, show, write_results
from megatron.core.datasets.indexed_dataset import _S3BinReader
from megatron.core.datasets.object_storage_utils import ObjectStorageConfig
from object_store import BUCKET, Line, serve_files, use_store

from megapack.data import PackedDataset, Schedule, build_loader
from megapack.packing import SampleIndex, pack
from megapack.storage import IndexedDataset, IndexedDatasetBuilder
from megapack.storage.remote.client import find_object
from megapack.storage.remote.copies import upload_dataset
from megapack.training.command import free_port

ADDRESS = f"s3://{BUCKET}/docs"
LATENCY, BANDWIDTH = 0.05, 200e6
TOKENS = 131_072  # per micro batch
REQUEST = 1 << 22
TOKEN = np.dtype(np.int32)  # for vocabularies of more than 65,500 ids
MEGATRON_CHUNK = 1 << 28


def write(prefix: Path, num_tokens: int) -> int:
    """Write documents of up to 2,048 tokens, samples and a bucket; return the bytes of the .bin."""
    rng = np.random.default_rng(0)
    with IndexedDatasetBuilder(prefix, TOKEN) as builder:
        while builder.num_tokens < num_tokens:
            lengths = np.minimum(rng.lognormal(6.4, 1.0, 4096).astype(np.int64) + 1, 2048)
            offsets = np.concatenate([[0], np.cumsum(lengths)])
            builder.add_documents(rng.integers(0, 128_000, offsets[-1]), offsets)
        builder.finalize()
    documents = IndexedDataset(prefix)
    index = pack(documents.document_lengths, "concat", buckets=[2048], shuffle=False)
    index.save(f"{prefix}.samples", source=documents)
    bucket = prefix.parent / BUCKET
    bucket.mkdir()
    upload_dataset(str(prefix), f"file://{bucket}/docs")
    return Path(f"{prefix}.bin").stat().st_size


def schedule_of(index: Any, shuffled: bool) -> Schedule:
    """Return a schedule with one micro batch per step, shuffled or in file order."""
    order = "proportional" if shuffled else "sequential"
    return Schedule(index, tokens_per_step=TOKENS, order=order, seed=1)


def batches(prefix: str, samples: str, *, shuffled: bool, count: int) -> Iterator[Any]:
    data = PackedDataset(prefix, samples)
    how = {"data_parallel_rank": 0, "data_parallel_size": 1, "dealing": "in_order"}
    schedule = schedule_of(data, shuffled)
    return iter(build_loader(data, schedule, micro_batch_tokens=TOKENS, num_steps=count, **how))


def whole_file(samples: str, *, shuffled: bool, count: int) -> Iterator[Any]:
    """Download the dataset, then yield batches from the copy."""
    with tempfile.TemporaryDirectory() as folder:
        for suffix in (".bin", ".idx"):
            boto3.client("s3").download_file(BUCKET, f"docs{suffix}", f"{folder}/docs{suffix}")
        yield from batches(f"{folder}/docs", samples, shuffled=shuffled, count=count)


def megatron(prefix: str, samples: str, *, shuffled: bool, count: int) -> Iterator[Any]:
    """Yield the documents of the same samples, read with megatron-core's reader."""
    config = ObjectStorageConfig(path_to_idx_cache="", bin_chunk_nbytes=MEGATRON_CHUNK)
    reader = _S3BinReader(f"{ADDRESS}.bin", config)
    index = SampleIndex.load(samples)
    offsets = IndexedDataset(prefix).document_offsets
    schedule = schedule_of(index, shuffled)
    for step in range(count):
        yield [
            reader.read(TOKEN.type, length, TOKEN.itemsize * int(offsets[document] + begin))
            for sample in schedule.step(step).sample_ids.tolist()
            for document, begin, length in index.sample(sample)[1]
        ]


def bare(num_bytes: int) -> dict[str, float]:
    """Read the whole file with the client, in parallel ranges; return bytes per second."""
    found = find_object(f"{ADDRESS}.bin")
    assert found is not None
    begins = range(0, num_bytes, REQUEST)
    with ThreadPoolExecutor(64) as pool:
        began = time.perf_counter()
        list(pool.map(lambda b: len(found.read(b, min(b + REQUEST, num_bytes))), begins))
        return {"bytes_per_s": num_bytes / (time.perf_counter() - began)}


def consume(
    make: Callable[[], Iterator[Any]], count: int, skip: int, pace: float | None
) -> dict[str, float]:
    """Take ``count`` batches; return speed and waiting time.

    Waiting in the first ``skip`` batches does not count; if 0, everything counts from the start.
    ``pace``: seconds that a trainer needs per batch; None if it needs none.
    """
    began = begin = begin_waiting = time.perf_counter()
    items, waited = iter(make()), 0.0
    held: list[Any] = []
    for number in range(count):
        held.clear()  # freeing the previous batch does not count as waiting
        asked = time.perf_counter()
        if number == skip:
            begin_waiting, waited = asked, 0.0
        held.append(next(items))
        waited += time.perf_counter() - asked
        if number == 0:
            first = time.perf_counter()
            begin = first if skip else began
        if pace is not None:
            time.sleep(pace)
    end = time.perf_counter()
    return {
        "first_batch_s": first - began,
        "tokens_per_s": (count - bool(skip)) * TOKENS / (end - begin),
        "data_wait_%": 100 * waited / (end - begin_waiting),
    }


def measured(line: Line, fn: Callable[[], dict[str, float]], useful: int) -> dict[str, Any]:
    """Run ``fn`` in a separate process with an empty cache; add the proxy's requests and bytes."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as cache:
        os.environ["MEGAPACK_CACHE"] = cache
        line.counts.clear()
        began = time.perf_counter()
        found = in_child(fn)
        seconds = time.perf_counter() - began
    return {
        **found,
        "requests_per_s": line.counts["requests"] / seconds,
        "read_over_useful": line.counts["bytes"] / useful,
    }


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        prefix, samples = f"{name}/docs", f"{name}/docs.samples"
        size = in_child(partial(write, Path(prefix), 15_000_000 if quick() else 150_000_000))
        with (
            serve_files(free_port(), Path(name)) as server,
            Line(free_port(), server, LATENCY, BANDWIDTH).open() as line,
        ):
            use_store(line.url)
            count = len(SampleIndex.load(samples)) * 2048 // TOKENS
            reading = (measured(line, partial(bare, size), size) for _ in range(3))
            rate = median(found["bytes_per_s"] for found in reading)
            pace = TOKEN.itemsize * TOKENS / (0.8 * rate)
            bare_row = {"case": "bare ranges", "tokens_per_s": rate / TOKEN.itemsize}
            rows = [{**bare_row, "read_over_useful": 1.0, "of_the_line_%": 100.0}]
            ours, copied = partial(batches, ADDRESS, samples), partial(whole_file, samples)
            theirs = partial(megatron, prefix, samples)
            sides: dict[str, tuple[Callable[..., Any], bool, int]] = {
                "local file": (partial(batches, prefix, samples), False, count),
                "shuffled": (ours, True, count // 40),  # documents at random places
                "shuffled, an epoch": (ours, True, count),
                "arranged": (ours, False, count),
                "whole file, then arranged": (copied, False, count),
                "Megatron, arranged": (theirs, False, count),
                "Megatron, shuffled": (theirs, True, 1),
            }
            for case, (make, shuffled, number) in sides.items():
                skip = 0 if make is copied else number // 10
                making = partial(make, shuffled=shuffled, count=number)
                useful = TOKEN.itemsize * number * TOKENS
                free, paced = (
                    [
                        measured(line, partial(consume, making, number, skip, of), useful)
                        for _ in range(1 if shuffled else 3)
                    ]
                    for of in (None, pace)
                )
                middle = sorted(free, key=itemgetter("tokens_per_s"))[len(free) // 2]
                waits = [found["data_wait_%"] for found in paced]
                wait = {"data_wait_%": median(waits), "most_wait_%": max(waits)}
                share = 100 * middle["tokens_per_s"] / bare_row["tokens_per_s"]
                rows.append({"case": case, "of_the_line_%": share} | middle | wait)
    setup = {"latency_s": LATENCY, "bytes_per_s": BANDWIDTH, "tokens_per_micro_batch": TOKENS}
    write_results("remote", {"setup": setup, "cases": rows})
    title = f"{LATENCY * 1e3:.0f} ms, {BANDWIDTH / 1e6:.0f} MB/s; {size / 1e6:.0f} MB of tokens"
    columns = ("case", "of_the_line_%", "tokens_per_s", "data_wait_%", "most_wait_%")
    show(title, rows, *columns, "first_batch_s", "requests_per_s", "read_over_useful")


if __name__ == "__main__":
    main()
