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
both inside Megatron: the same .bin/.idx through its own builder and DataLoader, in one process.
"""

from __future__ import annotations

import ctypes
import importlib
import itertools
import tempfile
import warnings
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import Units, in_child, large, quick, show, take_turns, timed, write_results
from lengths import LAWS
from numpy.typing import NDArray
from torch.utils.data import DataLoader

from megapack.data import BatchLayout, PackedDataset, Schedule, allocate, build_loader
from megapack.packing import pack
from megapack.storage import IndexedDataset, IndexedDatasetBuilder

warnings.filterwarnings("ignore", module="megatron")

ROW = 4096
BUCKETS = [1024, 2048, 4096, 8192, 16384]
VOCABULARY, EOD = 50_000, 0
BATCHES = (4, 12)  # samples per micro batch; 12 x 4,096 = 49,152 tokens (BucketLLM)
PLAIN, POSITIONS = "GPTDataset, plain", "GPTDataset, positions"

GLOBAL_BATCH = 64  # inside Megatron
KINDS = ("GPTDataset", "GPTDataset, positions", "PackedGPTDataset")
LOADERS = ((1, 0), (4, 0), (1, 2), (4, 2))  # micro batch size, workers

Sides = dict[str, Callable[[], Units]]


# --- corpora, and megatron-core's dataset over them ---------------------------------------------


class Tokenizer:
    """What megatron-core's datasets read of one."""

    vocab_size, eod, pad = VOCABULARY, EOD, -1
    unique_identifiers = ("Tokenizer",)


def write_corpus(prefix: Path, num_tokens: int) -> IndexedDataset:
    """Documents of calibrated lengths, each ending with EOD."""
    lengths = LAWS["fineweb_edu_like"](num_tokens // 900, 1)
    lengths = lengths[: int(np.searchsorted(np.cumsum(lengths), num_tokens)) + 1]
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    tokens = np.random.default_rng(0).integers(1, VOCABULARY, offsets[-1]).astype(np.uint16)
    tokens[offsets[1:] - 1] = EOD
    with IndexedDatasetBuilder(prefix, np.uint16, vocab_size=VOCABULARY) as builder:
        builder.add_documents(tokens, offsets)
    return IndexedDataset(prefix)


def write_large_corpus(prefix: Path, num_documents: int) -> None:
    """A whole .idx, packed, and a .bin of holes."""
    lengths = LAWS["fineweb_edu_like"](num_documents, 1)
    write_index(prefix, lengths)
    index = pack(lengths, "bucket", buckets=BUCKETS)
    index.save(f"{prefix}.samples", source=IndexedDataset(prefix), overwrite=True)


def write_index(prefix: Path, lengths: NDArray[np.int32]) -> None:
    """The .idx of documents, and a .bin of holes: of the right size, without taking the space."""
    num_documents = len(lengths)
    pointers = np.zeros(num_documents + 1, np.int64)
    np.cumsum(2 * lengths.astype(np.int64), out=pointers[1:])
    with Path(f"{prefix}.idx").open("wb") as file:
        file.write(b"MMIDIDX\x00\x00" + (1).to_bytes(8, "little") + bytes([8]))
        file.write(np.array([num_documents, num_documents + 1], np.int64).tobytes())
        for array in (lengths, pointers[:-1], np.arange(num_documents + 1, dtype=np.int64)):
            array.tofile(file)
    with Path(f"{prefix}.bin").open("wb") as file:
        file.truncate(int(pointers[-1]))


def megatron_train(
    dataset: type | None,
    blend: Path | Sequence[Path],
    cache: Path,
    *,
    positions: bool,
    num_samples: int,
) -> Any:
    """The train split of ``dataset`` (None: GPTDataset), through megatron-core's own builder: of
    one prefix (or what ``dataset`` takes for one), or of several of equal weights.
    """
    from megatron.core.datasets.blended_megatron_dataset_builder import (  # noqa: PLC0415
        BlendedMegatronDatasetBuilder,
    )
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig  # noqa: PLC0415

    paths = [blend] if isinstance(blend, Path) else blend
    config = GPTDatasetConfig(
        random_seed=1234,
        sequence_length=ROW,
        blend=([str(path) for path in paths], [1.0] * len(paths) if len(paths) > 1 else None),
        split="100,0,0",
        path_to_cache=str(cache),
        tokenizer=Tokenizer(),
        reset_position_ids=positions,
        reset_attention_mask=False,
        eod_mask_loss=positions,
        create_attention_mask=False,
    )
    train, _, _ = BlendedMegatronDatasetBuilder(
        dataset or GPTDataset, [num_samples, 0, 0], lambda: True, config
    ).build()
    return train


# --- samples and loaders ------------------------------------------------------------------------


def gathering(packed: dict[str, PackedDataset], gpt: dict[str, Any]) -> Sides:
    """Samples out of datasets."""
    sides = {name: _ones(theirs, range(len(theirs))) for name, theirs in gpt.items()}
    for strategy, ours in packed.items():
        ids = np.random.default_rng(0).permutation(len(ours))
        sides[f"ours, {strategy}, one sample"] = _ones(ours, ids.tolist())
        for size in BATCHES:
            sides[f"ours, {strategy}, micro batch of {size}"] = _micro_batches(ours, ids, size)
    return sides | {f"memcpy, {size} samples": _copies(size) for size in BATCHES}


def _counted(take: Callable[[], Any], units: int = 1) -> Callable[[], Units]:
    def step() -> Units:
        take()
        return Units(units)

    return step


def _ones(dataset: Any, ids: Any) -> Callable[[], Units]:
    order = itertools.cycle(ids)
    return _counted(lambda: dataset[next(order)])


def _micro_batches(packed: PackedDataset, ids: Any, size: int) -> Callable[[], Units]:
    how = {"layout": BatchLayout(micro_batch_tokens=size * ROW), "out": allocate(size * ROW)}
    batches = itertools.cycle(ids[: len(ids) // size * size].reshape(-1, size))
    return _counted(lambda: packed.micro_batch(next(batches), capacity=ROW, **how), size)


def _copies(size: int) -> Callable[[], Units]:
    out, source = allocate(size * ROW), allocate(size * ROW)
    for buffer in source.values():
        buffer.fill_(1)
    pairs = [(out[name].data_ptr(), own.data_ptr(), own.nbytes) for name, own in source.items()]
    held = (out, source)  # as long as they are copied
    return _counted(lambda: held and [ctypes.memmove(*pair) for pair in pairs], size)


def loading(packed: PackedDataset, gpt: dict[str, Any], workers: int) -> Sides:
    """Micro batches of 4 rows out of data loaders; ours has a thread, always."""
    size = BATCHES[0]
    schedule = Schedule(packed, tokens_per_step=16 * size * ROW)
    sides = {name: next_of(rows_of(of, size, workers), size) for name, of in gpt.items()}
    rank = {"data_parallel_rank": 0, "data_parallel_size": 1, "micro_batch_tokens": size * ROW}
    for name, reuse in (("ours (thread)", False), ("ours (thread), reused buffers", True)):
        loader = build_loader(packed, schedule, num_steps=10**9, reuse_buffers=reuse, **rank)
        sides[name] = next_of(loader, size)
    return sides


def rows_of(dataset: Any, size: int, workers: int) -> Any:
    """Micro batches of successive rows, without end."""
    begins = range(0, len(dataset) - size, size)
    batches = [list(range(begin, begin + size)) for begin in begins]
    return DataLoader(dataset, batch_sampler=itertools.cycle(batches), num_workers=workers)


def next_of(loader: Any, size: int) -> Callable[[], Units]:
    """Take the next micro batch of ``size`` rows; a loader begins with its first call."""
    begun = cache(lambda: iter(loader))
    return _counted(lambda: next(begun()), size)


def rates(sides: Sides, *, windows: int, seconds: float, suffix: str = "") -> list[dict[str, Any]]:
    """Samples per second of each, in turns, and over theirs and over a memcpy."""
    found = take_turns(sides, windows=windows, seconds=seconds)
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
        "ours, first batch": our_first,
        "GPTDataset, first batch, building its cache": their_first,
        "GPTDataset, first batch, cached": their_first,
    }
    return [
        {
            "case": name,
            **in_child(lambda first=first: {"seconds": timed(partial(first, prefix))[0]}),
        }
        for name, first in sides.items()
    ]


def our_first(prefix: Path) -> Any:
    packed = PackedDataset(prefix, f"{prefix}.samples")
    schedule = Schedule(packed, tokens_per_step=64 * 12 * ROW)
    sizes = {"data_parallel_rank": 0, "data_parallel_size": 64, "micro_batch_tokens": 12 * ROW}
    return next(iter(build_loader(packed, schedule, **sizes)))


def their_first(prefix: Path) -> Any:
    options: dict[str, Any] = {"positions": True, "num_samples": 1_000_000}
    train = megatron_train(None, prefix, prefix.parent / "cache", **options)
    return next(iter(DataLoader(train, batch_size=12)))


# --- inside Megatron ----------------------------------------------------------------------------


def inside_megatron(folder: Path) -> list[dict[str, Any]]:
    """One dict per loader and dataset."""
    importlib.import_module("megapack.integrations.megatron")  # not part of the first build
    folder.mkdir()
    write_corpus(folder / "text_document", 10_000_000 if quick() else 50_000_000)
    (folder / "packed.json").write_text(
        '{"sources": [{"prefix": "text_document"}], '
        f'"buckets": [1024, 2048, 4096], "rows_per_block": {GLOBAL_BATCH}}}'
    )
    builds = {kind: [timed(lambda kind=kind: build(kind, folder)) for _ in range(2)]
              for kind in KINDS}  # fmt: skip
    rows = []
    for size, workers in LOADERS:
        sides = {kind: next_of(rows_of(built[-1][1], size, workers), size)
                 for kind, built in builds.items()}  # fmt: skip
        found = take_turns(sides, seconds=0.2 if quick() else 1.0)
        for kind, timing in found.items():
            rows.append(
                {
                    "dataset": kind,
                    "loader": f"mbs {size}, workers {workers}",
                    "rows_per_second": timing.rate,
                    "spread_%": 100 * timing.spread,
                    "tokens_per_second": timing.rate * ROW,
                    "ratio": timing.rate / found[KINDS[0]].rate,
                    "build_cold_seconds": builds[kind][0][0],
                    "build_warm_seconds": builds[kind][1][0],
                }
            )
    return rows


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
        inside = inside_megatron(folder / "inside")
    write_results("data", [*gathered, *loaded, *begun, *inside])
    show("inside Megatron: builder and DataLoader", inside)
    show("the first batch", begun)
    show(f"data loaders, micro batches of {BATCHES[0]} rows", loaded)
    show(f"rows of {ROW}, one process", gathered)


if __name__ == "__main__":
    main()
