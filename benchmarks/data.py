"""``make bench-data``: megatron-core's GPTDataset and ours on the same files, beside a memcpy.

One process, one thread, rows of 4,096 tokens, the .bin in the page cache. ``plain`` writes tokens,
labels, loss mask and one position count per row; ``positions`` resets positions and masks the loss
at every end of document, the nearest GPTDataset comes to documents. Ours writes tokens, labels,
loss mask, positions per document, cu_seqlens and max_seqlen: as single samples, and as micro
batches into reused buffers; of concatenated documents (as theirs), and of whole documents
(``bucket``), whose samples gather from many places. The samples come in random order out of a file
that no cache of a core holds. ``memcpy`` is the limit: as many bytes (28 per token) in the same
four arrays, copied into such buffers from others like them, every time the same. Source and target
of 4 samples (459 kB each) stay in the caches of a core, of 12 (1.4 MB each) they may not. It reads
no file, looks nothing up and makes no cu_seqlens.

Then torch's DataLoader over theirs with 0 and 2 workers beside our loader and its thread, and what
it takes to begin: seconds to the first batch and memory, with 2e7 documents (LARGE=1: 1e8). And
both inside Megatron, through its own builder (``data_megatron``).
"""

from __future__ import annotations

import ctypes
import importlib
import itertools
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import Units, in_child, large, quick, show, take_turns, timed, write_results
from data_corpus import ROW, megatron_train, write_corpus, write_large_corpus
from data_megatron import inside_megatron, next_of, rows_of
from torch.utils.data import DataLoader

from megapack.data import BatchLayout, PackedDataset, Schedule, allocate, build_loader
from megapack.packing import pack

BATCHES = (4, 12)  # samples per micro batch; 12 x 4,096 = 49,152 tokens (BucketLLM)
PLAIN, POSITIONS = "GPTDataset, plain", "GPTDataset, positions"

Sides = dict[str, Callable[[], Units]]


def gathering(packed: dict[str, PackedDataset], gpt: dict[str, Any]) -> Sides:
    """Samples out of datasets."""
    sides = {name: _ones(theirs, range(len(theirs))) for name, theirs in gpt.items()}
    for strategy, ours in packed.items():
        ids = np.random.default_rng(0).permutation(len(ours))
        sides[f"ours, {strategy}, one sample"] = _ones(ours, ids.tolist())
        for size in BATCHES:
            sides[f"ours, {strategy}, micro batch of {size}"] = _micro_batches(ours, ids, size)
    return sides | {f"memcpy, {size} samples": _copies(size) for size in BATCHES}


def _ones(dataset: Any, ids: Any) -> Callable[[], Units]:
    order = itertools.cycle(ids)

    def step() -> Units:
        dataset[next(order)]
        return Units(1)

    return step


def _micro_batches(packed: PackedDataset, ids: Any, size: int) -> Callable[[], Units]:
    layout, out = BatchLayout(micro_batch_tokens=size * ROW), allocate(size * ROW)
    batches = itertools.cycle(ids[: len(ids) // size * size].reshape(-1, size))

    def step() -> Units:
        packed.micro_batch(next(batches), layout=layout, capacity=ROW, out=out)
        return Units(size)

    return step


def _copies(size: int) -> Callable[[], Units]:
    out, source = allocate(size * ROW), allocate(size * ROW)
    for buffer in source.values():
        buffer.fill_(1)

    def step() -> Units:
        for name, buffer in source.items():
            ctypes.memmove(out[name].data_ptr(), buffer.data_ptr(), buffer.nbytes)
        return Units(size)

    return step


def loading(packed: PackedDataset, gpt: dict[str, Any], workers: int) -> Sides:
    """Micro batches of 4 rows out of data loaders; ours has a thread, always."""
    size = BATCHES[0]
    schedule = Schedule(packed, tokens_per_step=16 * size * ROW)
    sides = {name: next_of(rows_of(of, size, workers), size) for name, of in gpt.items()}
    for name, reuse in (("ours (thread)", False), ("ours (thread), reused buffers", True)):
        loader = build_loader(
            packed,
            schedule,
            data_parallel_rank=0,
            data_parallel_size=1,
            micro_batch_tokens=size * ROW,
            num_steps=10**9,
            reuse_buffers=reuse,
        )
        sides[name] = next_of(loader, size)
    return sides


def rates(sides: Sides, *, windows: int, seconds: float, suffix: str = "") -> list[dict[str, Any]]:
    """Samples per second of each, in turns, and over theirs and over a memcpy."""
    found = {name: timing for name, timing in take_turns(sides, windows=windows,
                                                         seconds=seconds).items()}  # fmt: skip
    rows = []
    for name, timing in found.items():
        limit = found.get(f"memcpy, {name.rpartition('batch of ')[2]} samples")
        rows.append(
            {
                "case": name + suffix,
                "samples_per_second": timing.rate,
                "spread_%": 100 * timing.spread,
                "tokens_per_second": timing.rate * ROW,
                "over_positions": timing.rate / found[POSITIONS].rate,
                "over_plain": timing.rate / found[PLAIN].rate,
                "over_memcpy": timing.rate / limit.rate if limit else None,
            }
        )
    return rows


# --- beginning ----------------------------------------------------------------------------------


def beginnings(folder: Path, num_documents: int) -> list[dict[str, Any]]:
    """Seconds to the first batch and memory; Megatron twice, without its cache and with it."""
    prefix = folder / "large"
    seconds, _ = timed(partial(write_large_corpus, prefix, num_documents))
    print(f"{num_documents:,} documents written and packed: {seconds:.0f} s")
    importlib.import_module("megatron.core.datasets.gpt_dataset")  # not to be counted
    sides = {
        "ours, first batch": begin_ours,
        "GPTDataset, first batch, building its cache": begin_megatron,
        "GPTDataset, first batch, cached": begin_megatron,
    }
    return [{"case": name, **in_child(partial(side, prefix))} for name, side in sides.items()]


def begin_ours(prefix: Path) -> dict[str, float]:
    def first() -> Any:
        packed = PackedDataset(prefix, f"{prefix}.samples")
        schedule = Schedule(packed, tokens_per_step=64 * 12 * ROW)
        sizes = {"data_parallel_rank": 0, "data_parallel_size": 64, "micro_batch_tokens": 12 * ROW}
        return next(iter(build_loader(packed, schedule, **sizes)))

    return {"seconds": timed(first)[0]}


def begin_megatron(prefix: Path) -> dict[str, float]:
    def first() -> Any:
        cache = prefix.parent / "cache"
        train = megatron_train(None, prefix, cache, positions=True, num_samples=1_000_000)
        return next(iter(DataLoader(train, batch_size=12)))

    return {"seconds": timed(first)[0]}


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # First, in a process that has nothing yet.
        begun = beginnings(folder, 10**8 if large() else 2 * 10 ** (6 if quick() else 7))
        dataset = write_corpus(folder / "text", 10_000_000 if quick() else 60_000_000)
        packed = {
            strategy: PackedDataset(dataset, pack(dataset.document_lengths, strategy, buckets=ROW))
            for strategy in ("concat", "bucket")
        }
        gpt = {
            kind: megatron_train(
                None, folder / "text", folder / kind, positions=kind == POSITIONS,
                num_samples=2 * len(packed["concat"]),
            )
            for kind in (PLAIN, POSITIONS)
        }  # fmt: skip
        gathered = rates(gathering(packed, gpt), windows=5 if quick() else 30, seconds=0.05)
        loaded = [
            row
            for workers in (0, 2)
            for row in rates(
                loading(packed["bucket"], gpt, workers),
                windows=3 if quick() else 9,
                seconds=0.3,
                suffix=f", {workers} workers",
            )
        ]
        inside = inside_megatron(folder / "inside", quick=quick())
    write_results("data", [*gathered, *loaded, *begun, *inside])
    show("inside Megatron: builder and DataLoader", inside)
    show("the first batch", begun)
    show(f"data loaders, micro batches of {BATCHES[0]} rows", loaded)
    show(f"rows of {ROW}, one process", gathered)


if __name__ == "__main__":
    main()
