"""``make bench-data``: megatron-core's GPTDataset and ours on the same files, beside a memcpy.

One process, one thread, rows of 4,096 tokens, the .bin in the page cache. ``plain`` writes tokens,
labels, loss mask and one position count per row; ``positions`` resets positions and masks the loss
at every end of document, the nearest GPTDataset comes to documents. Ours writes tokens, labels,
loss mask, positions per document, cu_seqlens and max_seqlen: as single samples, and as micro
batches into reused buffers. The samples come in random order out of a file that no cache of a core
holds. ``memcpy`` is the limit: as many bytes (28 per token) in the same four arrays, copied into
such buffers from others like them, every time the same. Source and target of 4 samples (459 kB
each) stay in the caches of a core, of 12 (1.4 MB each) they may not. It reads no file, looks
nothing up and makes no cu_seqlens.

The contenders take turns in short windows, and the best window of each counts: the machine may be
busy, and what it was busy with is nobody's speed.

Then torch's DataLoader over theirs with 0 and 2 workers beside our loader and its thread, and what
it takes to begin: seconds to the first batch and memory, with 2e7 documents (LARGE=1: 1e8). And
both inside Megatron, through its own builder (data_megatron.py).
"""

from __future__ import annotations

import ctypes
import itertools
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import data_megatron
import numpy as np
import torch
from common import Table, large, quick, write_results
from data_begin import beginnings
from data_corpus import ROW, megatron_train, write_corpus
from torch.utils.data import DataLoader

from megapack.data import BatchLayout, PackedDataset, Schedule, allocate, build_loader
from megapack.packing import SampleIndex, pack
from megapack.storage import IndexedDataset

BATCHES = (4, 12)  # samples per micro batch; 12 x 4,096 = 49,152 tokens (BucketLLM)
PLAIN, POSITIONS = "GPTDataset, plain", "GPTDataset, positions"


# --- rates --------------------------------------------------------------------------------------


def best_rates(
    contenders: dict[str, Callable[[], int]], seconds: float, windows: int
) -> dict[str, float]:
    """Samples per second of each contender in its best window; they take turns."""
    best = dict.fromkeys(contenders, 0.0)
    for _ in range(windows):
        for name, step in contenders.items():
            count, begin = 0, time.perf_counter()
            while (elapsed := time.perf_counter() - begin) < seconds:
                count += step()
            best[name] = max(best[name], count / elapsed)
    return best


def gather_contenders(
    dataset: IndexedDataset, index: SampleIndex, gpt: dict[str, Any]
) -> dict[str, Callable[[], int]]:
    packed = PackedDataset(dataset, index)
    ids = np.random.default_rng(0).permutation(len(packed))
    contenders: dict[str, Callable[[], int]] = {}
    for name, theirs in gpt.items():
        contenders[name] = _ones(theirs, itertools.cycle(range(len(theirs))))
    contenders["ours, one sample"] = _ones(packed, itertools.cycle(ids.tolist()))
    for size in BATCHES:
        contenders[f"ours, micro batch of {size}"] = _micro_batches(packed, ids, size)
        contenders[f"memcpy, {size} samples"] = _copies(size)
    return contenders


def _ones(dataset: Any, order: Iterator[int]) -> Callable[[], int]:
    def step() -> int:
        dataset[next(order)]
        return 1

    return step


def _micro_batches(packed: PackedDataset, ids: Any, size: int) -> Callable[[], int]:
    layout, out = BatchLayout(micro_batch_tokens=size * ROW), allocate(size * ROW)
    batches = itertools.cycle(ids[: len(ids) // size * size].reshape(-1, size))

    def step() -> int:
        packed.micro_batch(next(batches), layout=layout, capacity=ROW, out=out)
        return size

    return step


def _copies(size: int) -> Callable[[], int]:
    out, source = allocate(size * ROW), allocate(size * ROW)
    for buffer in source.values():
        buffer.fill_(1)
    pairs = [
        (out[name].data_ptr(), buffer.data_ptr(), buffer.nbytes) for name, buffer in source.items()
    ]

    def step() -> int:
        for to, begin, count in pairs:
            ctypes.memmove(to, begin, count)
        return size

    step.buffers = (out, source)  # type: ignore[attr-defined]  (keeps them alive)
    return step


def loader_rates(
    dataset: IndexedDataset, index: SampleIndex, gpt: dict[str, Any], windows: int
) -> list[dict[str, Any]]:
    """Rows per second out of data loaders, micro batches of 4 rows; ours has a thread, always."""
    packed, size = PackedDataset(dataset, index), BATCHES[0]
    schedule = Schedule(packed, tokens_per_step=16 * size * ROW)
    rows = []
    for workers in (0, 2):
        batches: dict[str, Iterator[Any]] = {
            name: iter(DataLoader(theirs, batch_sampler=_rows(theirs, size), num_workers=workers))
            for name, theirs in gpt.items()
        }
        for name, reuse in (("ours (thread)", False), ("ours (thread), reused buffers", True)):
            batches[name] = iter(
                build_loader(
                    packed,
                    schedule,
                    data_parallel_rank=0,
                    data_parallel_size=1,
                    micro_batch_tokens=size * ROW,
                    num_steps=10**9,
                    reuse_buffers=reuse,
                )
            )
        if workers:  # all at once would share the cores: one after the other instead
            rates: dict[str, float] = {}
            for name in list(batches):
                rates |= best_rates({name: _next(batches.pop(name), size)}, 0.5, windows)
        else:
            rates = best_rates(
                {name: _next(it, size) for name, it in batches.items()}, 0.1, 3 * windows
            )
        rows += [
            {"case": f"{name}, {workers} workers", "samples_per_second": rate}
            | {"over_positions": rate / rates[POSITIONS], "over_plain": rate / rates[PLAIN]}
            for name, rate in rates.items()
        ]
    return rows


def _rows(dataset: Any, size: int) -> Iterator[list[int]]:
    return itertools.cycle(
        list(range(begin, begin + size)) for begin in range(0, len(dataset) - size, size)
    )


def _next(batches: Iterator[Any], size: int) -> Callable[[], int]:
    def step() -> int:
        next(batches)
        return size

    return step


# --- the tables ---------------------------------------------------------------------------------


def main() -> None:
    torch.set_num_threads(1)
    num_tokens = 10_000_000 if quick() else 60_000_000
    num_documents = 10**8 if large() else 2 * 10 ** (6 if quick() else 7)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        dataset = write_corpus(folder / "text", num_tokens)
        index = pack(dataset.document_lengths, "concat", buckets=[ROW])
        gpt = {
            kind: megatron_train(
                None, folder / "text", folder / kind, positions=kind == POSITIONS,
                num_samples=index.num_samples * 2,
            )
            for kind in (PLAIN, POSITIONS)
        }  # fmt: skip
        contenders = gather_contenders(dataset, index, gpt)
        rates = best_rates(contenders, 0.05, 12 if quick() else 60)
        loaders = loader_rates(dataset, index, gpt, 4 if quick() else 20)
        begun = beginnings(folder, num_documents)
    inside = data_megatron.measure(quick=quick())
    gathers = [_gather_row(name, rate, rates) for name, rate in rates.items()]
    write_results("data", [*gathers, *loaders, *begun, *inside])
    data_megatron.print_rows(inside)
    print_tables(gathers, loaders, begun, num_documents)


def _gather_row(name: str, rate: float, rates: dict[str, float]) -> dict[str, Any]:
    size = next((size for size in BATCHES if name.endswith(f"batch of {size}")), None)
    return {
        "case": name,
        "samples_per_second": rate,
        "tokens_per_second": rate * ROW,
        "over_positions": rate / rates[POSITIONS],
        "over_plain": rate / rates[PLAIN],
        "over_memcpy": rate / rates[f"memcpy, {size} samples"] if size else None,
    }


def print_tables(
    gathers: list[dict[str, Any]],
    loaders: list[dict[str, Any]],
    begun: list[dict[str, Any]],
    num_documents: int,
) -> None:
    table = Table(
        f"to begin with {num_documents:,} documents",
        ["case", "seconds", "private MB", "resident MB"],
    )
    for row in begun:
        table.add(
            row["case"], f"{row['seconds']:.2f}", f"{row['private_bytes'] / 1e6:,.0f}",
            f"{row['resident_bytes'] / 1e6:,.0f}",
        )  # fmt: skip
    table.print()
    table = Table(
        f"data loaders, micro batches of {BATCHES[0]} rows",
        ["case", "samples/s", "Mtok/s", "x positions", "x plain"],
    )
    for row in loaders:
        table.add(
            row["case"], f"{row['samples_per_second']:,.0f}",
            f"{row['samples_per_second'] * ROW / 1e6:,.0f}", f"{row['over_positions']:.2f}",
            f"{row['over_plain']:.2f}",
        )  # fmt: skip
    table.print()
    table = Table(
        f"rows of {ROW}, one process (targets: 8 x positions, 3 x plain, 0.5 of memcpy)",
        ["case", "samples/s", "Mtok/s", "x positions", "x plain", "of memcpy"],
    )
    for row in gathers:
        table.add(
            row["case"], f"{row['samples_per_second']:,.0f}",
            f"{row['tokens_per_second'] / 1e6:,.0f}", f"{row['over_positions']:.2f}",
            f"{row['over_plain']:.2f}",
            f"{row['over_memcpy']:.2f}" if row["over_memcpy"] else "",
        )  # fmt: skip
    table.print()


if __name__ == "__main__":
    main()
