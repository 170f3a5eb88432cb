"""``make bench-cold``: batches from a disk, with no page of the documents in memory.

In every case a thread prepares the same micro batches in the same order, from a .bin whose pages
were dropped from the page cache (posix_fadvise). A trainer takes one every 4 ms. ``page faults``
reads a mapped file as usual: a missing page blocks the gather, and the kernel also reads its
neighbors, up to the disk's read_ahead_kb. ``page faults, exactly`` switches that off (madvise), as
if memory were too small for the neighbors. ``read ahead`` is ``build_loader``: it requests the
pages of the next micro batches.

``tokens_per_s``: tokens that the trainer received, at most TOKENS / TRAINER_SECONDS.
``waits``: pages for which a gather waited; a disk with latency t adds waits x t.
``read over useful``: bytes read from the disk, divided by bytes of the samples' tokens.
"""

from __future__ import annotations

import resource
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import median_high
from typing import Any

from common import in_child, in_turns, quick, show, write_results
from data import write_corpus
from files import forget
from lengths import BUCKETS

from megapack.data import BatchLayout, BucketBatchSampler, PackedDataset, Schedule
from megapack.data.loader import ThreadPrefetcher, prefetch_local
from megapack.packing import pack
from megapack.storage import IndexedDataset

TOKENS = 32_768  # per micro batch
TRAINER_SECONDS = 0.004  # per micro batch, without waiting
FAULTS, EXACTLY = "page faults", "page faults, exactly"


def read(prefix: Path, depth: int | None, how: str, num_batches: int) -> dict[str, Any]:
    """Run one pass with ``depth`` micro batches of read-ahead; without read-ahead if None."""
    forget(Path(f"{prefix}.bin"))  # works because no process maps the file now
    documents = IndexedDataset(prefix)
    dataset = PackedDataset(documents, f"{prefix}.samples")
    schedule = Schedule(dataset, tokens_per_step=TOKENS, seed=1)
    rank = {"data_parallel_rank": 0, "data_parallel_size": 1, "num_steps": num_batches}
    sampler = BucketBatchSampler(schedule, micro_batch_tokens=TOKENS, **rank)
    layout = BatchLayout(micro_batch_tokens=TOKENS)
    waits = 0

    def batches() -> Iterator[Any]:  # runs in the thread whose page faults are counted
        nonlocal waits
        if how == EXACTLY:
            dataset.disable_readahead()
        for item in sampler if depth is None else prefetch_local(sampler, dataset, depth):
            yield dataset.micro_batch(item.sample_ids, layout=layout, capacity=item.capacity)
            waits = resource.getrusage(resource.RUSAGE_THREAD).ru_majflt

    before, begin, waited = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter(), 0.0
    ahead = ThreadPrefetcher(batches(), 2)
    for _ in range(num_batches):
        asked = time.perf_counter()
        next(ahead)
        waited += time.perf_counter() - asked
        time.sleep(TRAINER_SECONDS)
    seconds = time.perf_counter() - begin
    ahead.close()
    blocks = resource.getrusage(resource.RUSAGE_SELF).ru_inblock - before.ru_inblock
    return {
        "tokens_per_s": num_batches * TOKENS / seconds,
        "waits": waits,
        "data_wait_%": 100 * waited / seconds,
        "read_over_useful": blocks * 512 / (num_batches * TOKENS * documents.tokens.itemsize),
    }


def main() -> None:
    sides = {FAULTS: None, EXACTLY: None, "read ahead, 0": 0, "read ahead, 4": 4}
    sides |= {"read ahead, 16": 16, "read ahead, 64": 64}
    with tempfile.TemporaryDirectory() as name:
        prefix = Path(name) / "docs"
        documents = write_corpus(prefix, 50_000_000 if quick() else 400_000_000)
        index = pack(documents.document_lengths, "bucket", buckets=BUCKETS)
        index.save(f"{prefix}.samples", source=documents)
        del documents
        num_batches = 50 if quick() else 400
        reads = {
            how: partial(in_child, partial(read, prefix, depth, how, num_batches))
            for how, depth in sides.items()
        }
        found = in_turns(reads, 1 if quick() else 5)
    rows = [
        {"case": how} | {key: median_high(one[key] for one in runs) for key in runs[0]}
        for how, runs in found.items()
    ]
    write_results("cold", rows)
    title = f"{num_batches} micro batches of {TOKENS:,} tokens, nothing in memory"
    show(title, rows, "case", "tokens_per_s", "waits", "data_wait_%", "read_over_useful")


if __name__ == "__main__":
    main()
