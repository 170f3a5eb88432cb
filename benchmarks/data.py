"""``make bench-data``: megatron-core's GPTDataset and ours on the same files, compared with memcpy.

One process, one thread, rows of 4,096 tokens in random order, the .bin in the page cache but not in
a core's cache. ``plain`` writes tokens, labels, loss mask and one position count per row;
``positions`` resets positions and masks the loss at every end of document, GPTDataset's closest
mode to documents. Ours writes tokens, labels, loss mask, positions per document, cu_seqlens and
max_seqlen, as single samples and as micro batches into reused buffers: of concatenated documents
(like GPTDataset), of whole documents (``bucket``), which gather from many places, and of these with
a loss weight per token. Another table has fill-in-the-middle for half of the documents (cut between
tokens, or characters) and without, on the same samples with room for sentinels. A third has a
column, compared with batches without it and with copying the column's bytes from one place, both
from a file larger than a core's caches. ``memcpy`` is the
limit: as many bytes (28 per token) in the same four arrays, copied between such buffers, which for
4 samples (459 kB each) stay in a core's caches.

Then loaders, micro batches of 4 rows of a shuffled epoch, each in a separate process with its best
setting: each is measured with 0, 1 and 2 workers (OLMo-core also with its 4 threads), ours with and
without its thread. Content of a batch:

* megatron-core (torch's DataLoader over GPTDataset): the five arrays above, documents cut;
* OLMo-core, packed (best fit; OLMO_CORE: its checkout, it needs bettermap, cached-path and
  dataclass-extensions): tokens and document lengths; variable length: tokens of one bucket;
* mosaicml/streaming (``mosaicml-streaming`` and its dependencies): tokens, in prepared rows;
* megapack, ``bucket``: all inputs of a model.

Install dependencies of peers by hand (``pip install --no-deps --target FOLDER ...``; FOLDER on
PYTHONPATH); a missing peer is reported and skipped.

Finally startup (seconds to the first batch, and memory, with 2e7 documents), and both datasets
inside Megatron: the same .bin/.idx through its builder and DataLoader, in one process.
``ratio_to_best`` compares with GPTDataset at its best number of workers.
"""

from __future__ import annotations

import ctypes
import importlib
import itertools
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any

import common
import numpy as np
import torch
from common import Timing, Units, quick
from lengths import BUCKETS, LAWS, write_documents, write_index
from numpy.typing import NDArray
from torch.utils.data import DataLoader

from megapack.data import BatchLayout, PackedDataset, Schedule, allocate, build_loader
from megapack.data.fim import Fim, character_tables
from megapack.data.steps import StepView
from megapack.packing import pack
from megapack.storage import IndexedDataset
from megapack.storage.column_edits import add_column
from megapack.storage.columns import INTERPRETED, ColumnSpec

warnings.filterwarnings("ignore", module="megatron")
warnings.filterwarnings("ignore", message="The given NumPy array is not writable")  # streaming's

ROW = 4096
VOCABULARY, EOD = 50_000, 0
WORKERS = (0, 1, 2)
BATCHES = (4, 12)  # samples per micro batch; 12 x 4,096 = 49,152 tokens (BucketLLM)
PLAIN, POSITIONS = "GPTDataset, plain", "GPTDataset, positions"

GLOBAL_BATCH = 64  # inside Megatron
KINDS = ("GPTDataset", "GPTDataset, positions", "PackedGPTDataset")

Sides = dict[str, Callable[[], Units]]


class Tokenizer:
    """The attributes of a tokenizer that megatron-core's datasets read."""

    vocab_size, eod, pad = VOCABULARY, EOD, -1
    unique_identifiers = ("Tokenizer",)


def write_corpus(prefix: Path, num_tokens: int) -> IndexedDataset:
    """Write documents whose lengths follow ``fineweb_edu_like``, each ending with EOD."""
    lengths = LAWS["fineweb_edu_like"](num_tokens // 900, 1)
    lengths = lengths[: int(np.searchsorted(np.cumsum(lengths), num_tokens)) + 1]
    return write_documents(prefix, lengths, vocabulary=VOCABULARY, end=EOD)


def megatron_train(
    dataset: type | None,
    blend: Path | Sequence[Path],
    cache: Path,
    *,
    positions: bool,
    num_samples: int,
) -> Any:
    """Return the train split of ``dataset`` (None: GPTDataset) from megatron-core's own builder.

    ``blend`` is one prefix (or a path that ``dataset`` accepts), or several of equal weights.
    """
    from megatron.core.datasets.blended_megatron_dataset_builder import (  # noqa: PLC0415
        BlendedMegatronDatasetBuilder,
    )
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig  # noqa: PLC0415

    paths = [blend] if isinstance(blend, Path) else blend
    config = GPTDatasetConfig(
        random_seed=1234, sequence_length=ROW,
        blend=([str(path) for path in paths], [1.0] * len(paths) if len(paths) > 1 else None),
        split="100,0,0", path_to_cache=str(cache), tokenizer=Tokenizer(),
        reset_position_ids=positions, reset_attention_mask=False, eod_mask_loss=positions,
        create_attention_mask=False,
    )  # fmt: skip
    train, _, _ = BlendedMegatronDatasetBuilder(
        dataset or GPTDataset, [num_samples, 0, 0], lambda: True, config
    ).build()
    return train


# --- samples and loaders ------------------------------------------------------------------------


def gathering(packed: dict[str, PackedDataset], gpt: dict[str, Any]) -> Sides:
    """Return name -> a function that gathers the next samples."""
    sides = {name: _ones(theirs, range(len(theirs))) for name, theirs in gpt.items()}
    for strategy, ours in packed.items():
        ids = _shuffled(ours)
        sides[f"ours, {strategy}, one sample"] = _ones(ours, ids.tolist())
        for size in BATCHES:
            sides[f"ours, {strategy}, micro batch of {size}"] = _micro_batches(ours, ids, size)
    return sides | {f"memcpy, {size} samples": _copies(size) for size in BATCHES}


def in_the_middle(dataset: IndexedDataset) -> list[dict[str, Any]]:
    """Measure the gather of whole documents without fill-in-the-middle, and with it at rate 0.5."""
    rule = {"prefix": VOCABULARY, "suffix": VOCABULARY + 1, "middle": VOCABULARY + 2, "eod": EOD}
    cuts = {"none": None, "tokens": Fim(**rule), "characters": Fim(**rule, tables=word_tables())}
    room = max(fim.room for fim in cuts.values() if fim)
    index = pack(dataset.document_lengths, "bucket", buckets=ROW, fim_room=room)
    rows = []
    for weights, title in ((None, ""), ("auto", ", weights")):
        for size in BATCHES:
            sides = {}
            for name, fim in cuts.items():
                packed = PackedDataset(dataset, index, token_weights=weights)
                packed._connect([index], packed.samples.mixture, fim=fim)
                sides[name] = _micro_batches(packed, _shuffled(packed), size, transformed=bool(fim))
            found = common.take_turns(sides, windows=5 if quick() else 30, seconds=0.05)
            rows += [
                speed(f"cuts: {name}, micro batch of {size}{title}", timing)
                | {"seconds_over_none": timing.seconds / found["none"].seconds}
                | {"least_over_none": min(timing.windows) / min(found["none"].windows)}
                for name, timing in found.items()
            ]
    return rows


def carrying(folder: Path) -> list[dict[str, Any]]:
    """Measure the gather with a column of 1 to 384 bytes per token, without it, and a copy."""
    dataset = write_corpus(folder / "columns", 500_000 if quick() else 3_000_000)
    index = pack(dataset.document_lengths, "bucket", buckets=ROW)
    size, rows = BATCHES[-1], []
    for name, dtype, shape in (("a", "uint8", ()), ("b", "float32", ()), ("c", "int16", (6, 32))):
        spec = ColumnSpec(dtype=dtype, shape=shape)
        values = np.ones((dataset.num_tokens, *shape), spec.numpy_dtype)
        add_column(dataset.prefix, name, values, spec)
        packed = PackedDataset(dataset.prefix, index, columns=[name])
        source = packed.documents(0).columns[name].mapped_bytes
        out = np.empty(size * ROW * spec.row_bytes, np.uint8)
        begins = itertools.cycle(range(0, source.size - out.size, out.size))

        def copy(
            out: NDArray[Any] = out, source: NDArray[Any] = source, begins: Any = begins
        ) -> None:
            begin = next(begins)
            np.copyto(out, source[begin : begin + out.size])

        sides = {
            "none": _micro_batches(PackedDataset(dataset, index), _shuffled(packed), size),
            "column": _micro_batches(packed, _shuffled(packed), size),
            "memcpy": _counted(copy, size),
        }
        found = common.take_turns(sides, windows=5 if quick() else 30, seconds=0.05)
        case = f"a column of {spec.row_bytes} bytes per token, micro batch of {size}"
        row = {"seconds_over_none": found["column"].seconds / found["none"].seconds}
        if spec.row_bytes > 28:  # most of what a batch holds
            row["of_memcpy"] = found["memcpy"].seconds / found["column"].seconds
        rows.append(speed(case, found["column"]) | row)
    return rows


def word_tables() -> Any:
    """Return the character tables of a vocabulary of words of one to four letters."""
    letters = [bytes([letter]) for letter in range(97, 123)]
    words = (b"".join(w) for n in range(1, 5) for w in itertools.product(letters, repeat=n))
    return character_tables([None, *itertools.islice(words, VOCABULARY - 1)])


def _counted(take: Callable[[], Any], units: int = 1) -> Callable[[], Units]:
    def step() -> Units:
        take()
        return Units(units)

    return step


def _ones(dataset: Any, ids: Any) -> Callable[[], Units]:
    order = itertools.cycle(ids)
    return _counted(lambda: dataset[next(order)])


def _shuffled(packed: PackedDataset) -> NDArray[np.int64]:
    return np.random.default_rng(0).permutation(len(packed))


def _micro_batches(
    packed: PackedDataset, ids: Any, size: int, *, transformed: bool = False
) -> Callable[[], Units]:
    how = {"layout": BatchLayout(micro_batch_tokens=size * ROW), "out": packed.allocate(size * ROW)}
    if transformed:
        how["view"] = StepView(epochs=np.zeros(size, np.int64), fim_rates=np.full(size, 0.5))
    batches = itertools.cycle(ids[: len(ids) // size * size].reshape(-1, size))
    return _counted(lambda: packed.micro_batch(next(batches), capacity=ROW, **how), size)


def _copies(size: int) -> Callable[[], Units]:
    out, source = allocate(size * ROW), allocate(size * ROW)
    for buffer in source.values():
        buffer.fill_(1)
    pairs = [(out[name].data_ptr(), own.data_ptr(), own.nbytes) for name, own in source.items()]
    held = (out, source)  # keeps the buffers alive
    return _counted(lambda: held and [ctypes.memmove(*pair) for pair in pairs], size)


Loader = Callable[[], Iterator[Any]]  # micro batches without end, from the first


def loaders(folder: Path, packed: PackedDataset, gpt: dict[str, Any]) -> dict[str, Loader]:
    """Return (name, setting) -> a loader, opened when called."""
    size = BATCHES[0]
    rank = {"data_parallel_rank": 0, "data_parallel_size": 1, "micro_batch_tokens": size * ROW}

    def ours(**how: Any) -> Iterator[Any]:
        schedule = Schedule(packed, tokens_per_step=16 * size * ROW)
        return iter(build_loader(packed, schedule, num_steps=10**9, **how, **rank))

    sides: dict[str, Loader] = {
        "ours; a thread": ours,
        "ours; no thread": partial(ours, prefetch=0),
        "ours, reused buffers; a thread": partial(ours, reuse_buffers=True),
    }
    for name, dataset in gpt.items():
        for workers in WORKERS:
            make = partial(rows_of, dataset, size, workers)
            sides[f"{name}; {workers} workers"] = lambda make=make: iter(make())
    sides |= common.peer_of("OLMo-core", partial(olmo_core, folder, size), "OLMO_CORE", "src") or {}
    return sides | (common.peer_of("mosaicml/streaming", partial(streaming, folder, packed)) or {})


def olmo_core(folder: Path, size: int) -> dict[str, Loader]:
    """Return OLMo-core's two loaders over the same .bin, which it can read (uint16)."""
    theirs = {name: importlib.import_module(f"olmo_core.data.{name}")
              for name in ("collator", "data_loader", "numpy_dataset", "types")}  # fmt: skip
    vocabulary = {"pad_token_id": EOD, "eos_token_id": EOD, "vocab_size": VOCABULARY}
    text, fragment = str(folder / "text.bin"), theirs["types"].LongDocStrategy.fragment
    how = {"sequence_length": ROW, "generate_doc_lengths": True, "long_doc_strategy": fragment}
    packed = theirs["numpy_dataset"].NumpyPackedFSLDataset(text, **how, **vocabulary)
    variable = theirs["numpy_dataset"].NumpyVSLDataset(
        text, min_sequence_length=256, max_sequence_length=ROW, **vocabulary
    )

    def batches(kind: str, dataset: Any, workers: int, threads: int) -> Iterator[Any]:
        dataset.work_dir = folder / kind
        dataset.prepare()
        loader = getattr(theirs["data_loader"], f"Numpy{kind}DataLoader")(
            dataset, collator=theirs["collator"].DataCollator(EOD), global_batch_size=size * ROW,
            work_dir=folder / kind, num_workers=workers, num_threads=threads,
        )  # fmt: skip
        for epoch in itertools.count(1):
            loader.reshuffle(epoch)
            yield from loader
            loader.reset()

    kinds = ("packed", "FSL", packed), ("variable length", "VSL", variable)
    return {
        f"OLMo-core, {name}; {n} workers, {m} threads": partial(batches, kind, dataset, n, m)
        for name, kind, dataset in kinds
        for n, m in ((0, 0), (0, 4), (1, 0), (2, 0))
    }


def streaming(folder: Path, packed: PackedDataset) -> dict[str, Loader]:
    """Return loaders of mosaicml/streaming over shuffled rows of tokens in local shards."""
    vision = "streaming.vision"  # images, which need torchvision
    sys.modules.setdefault(vision, ModuleType(vision))
    theirs, home = importlib.import_module("streaming"), str(folder / "mds")
    with theirs.MDSWriter(out=home, columns={"tokens": f"ndarray:uint16:{ROW}"}) as writer:
        for row in range(len(packed)):
            tokens = packed[row]["tokens"].numpy().astype(np.uint16)
            writer.write({"tokens": np.pad(tokens, (0, ROW - len(tokens)))})

    def batches(workers: int) -> Iterator[Any]:
        theirs.base.util.clean_stale_shared_memory()
        dataset = theirs.StreamingDataset(local=home, batch_size=BATCHES[0], shuffle=True)
        loader = theirs.StreamingDataLoader(dataset, batch_size=BATCHES[0], num_workers=workers)
        while True:
            yield from loader

    return {f"mosaicml/streaming; {n} workers": partial(batches, n) for n in WORKERS}


def loaded(sides: dict[str, Loader], rounds: int, seconds: float) -> list[dict[str, Any]]:
    """Measure every loader at all of its settings; return the best ones, relative to GPTDataset."""

    def taken(make: Loader) -> dict[str, float]:
        batches, tokens = make(), 0
        for _ in range(8):
            next(batches)  # do not count batches that the loader has prefetched
        begin = time.perf_counter()
        while time.perf_counter() - begin < seconds:
            batch = next(batches)
            tokens += next(batch[k] for k in ("tokens", "input_ids") if k in batch).numel()
        return {"seconds": (time.perf_counter() - begin) / tokens * ROW}

    found = common.in_turns(
        {n: partial(common.in_child, partial(taken, m)) for n, m in sides.items()}, rounds
    )
    times = {n: Timing(tuple(f["seconds"] for f in each)) for n, each in found.items()}
    best: dict[str, tuple[str, Timing]] = {}
    for name in sorted(times, key=lambda name: times[name].seconds):
        case, _, setting = name.partition("; ")
        best.setdefault(case, (setting, times[name]))
    rate = {case: timing.rate for case, (_, timing) in best.items()}
    best_peer = max(own for case, own in rate.items() if not case.startswith("ours"))
    rows = []
    for case, (setting, timing) in best.items():
        commit = common.checkout_commit("OLMO_CORE") if case.startswith("OLMo") else None
        row = speed(f"{case}, loader", timing) | {"commit": commit, "best_setting": setting}
        row |= {"over_plain": rate[case] / rate[PLAIN], "over_best_peer": rate[case] / best_peer}
        own = (name for name in times if name.partition("; ")[0] == case)
        rates = (f"{name.partition('; ')[2]} {times[name].rate:,.0f}" for name in own)
        rows.append(row | {"settings": "; ".join(rates)})
    return rows


def rows_of(dataset: Any, size: int, workers: int) -> Any:
    """Return a loader of endless micro batches of successive rows."""
    begins = range(0, len(dataset) - size, size)
    batches = [list(range(begin, begin + size)) for begin in begins]
    return DataLoader(dataset, batch_sampler=itertools.cycle(batches), num_workers=workers)


def next_of(loader: Any, size: int) -> Callable[[], Units]:
    """Return a function that takes the next micro batch of ``size`` rows; its first call starts the
    loader."""
    begun = cache(lambda: iter(loader))
    return _counted(lambda: next(begun()), size)


def speed(case: str, timing: Timing) -> dict[str, Any]:
    about = {"case": case, "samples_per_second": timing.rate, "spread_%": 100 * timing.spread}
    return about | {"tokens_per_second": timing.rate * ROW}


def rates(sides: Sides, *, windows: int, seconds: float) -> list[dict[str, Any]]:
    """Measure all sides in turns: samples per second, relative to GPTDataset and to memcpy."""
    found = common.take_turns(sides, windows=windows, seconds=seconds)
    rows = []
    for name, timing in found.items():
        limit = found.get(f"memcpy, {name.rpartition('batch of ')[2]} samples")
        row = speed(name, timing) | {"over_positions": timing.rate / found[POSITIONS].rate}
        row |= {"over_plain": timing.rate / found[PLAIN].rate}
        rows.append(row | {"over_memcpy": timing.rate / limit.rate if limit else None})
    return rows


# --- startup ------------------------------------------------------------------------------------


def beginnings(folder: Path, num_documents: int) -> list[dict[str, Any]]:
    """Measure seconds to the first batch, and memory; Megatron without and with its cache."""
    prefix, lengths = folder / "large", LAWS["fineweb_edu_like"](num_documents, 1)
    write_index(prefix, lengths)
    index = pack(lengths, "bucket", buckets=BUCKETS)
    index.save(f"{prefix}.samples", source=IndexedDataset(prefix))
    del lengths, index
    importlib.import_module("megatron.core.datasets.gpt_dataset")  # exclude the import time
    sides = {
        "ours, first batch": our_first,
        "GPTDataset, first batch, building its cache": their_first,
        "GPTDataset, first batch, cached": their_first,
    }
    return [
        {"case": name}
        | common.in_child(lambda of=of: {"seconds": common.timed(partial(of, prefix))[0]})
        for name, of in sides.items()
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
    """Measure the datasets inside Megatron; return one dict per loader and dataset."""
    importlib.import_module("megapack.integrations.hosts.megatron")  # exclude the import time
    folder.mkdir()
    write_corpus(folder / "text_document", 10_000_000 if quick() else 50_000_000)
    (folder / "packed.json").write_text(
        '{"sources": [{"prefix": "text_document"}], '
        f'"buckets": [1024, 2048, 4096], "rows_per_block": {GLOBAL_BATCH}}}'
    )
    builds = {kind: [common.timed(lambda kind=kind: build(kind, folder)) for _ in range(2)]
              for kind in KINDS}  # fmt: skip
    rows = []
    for size in (1, 4):
        found = {}
        for workers in WORKERS:
            sides = {kind: next_of(rows_of(built[-1][1], size, workers), size)
                     for kind, built in builds.items()}  # fmt: skip
            found[workers] = common.take_turns(sides, seconds=0.2 if quick() else 1.0)
        best = max(of[KINDS[0]].rate for of in found.values())
        rows += [
            {
                "dataset": kind, "loader": f"mbs {size}, workers {workers}",
                "rows_per_second": timing.rate, "spread_%": 100 * timing.spread,
                "tokens_per_second": timing.rate * ROW,
                "ratio": timing.rate / of[KINDS[0]].rate,
                "build_cold_seconds": builds[kind][0][0], "build_warm_seconds": builds[kind][1][0],
                "ratio_to_best": timing.rate / best,
            }
            for workers, of in found.items()
            for kind, timing in of.items()
        ]  # fmt: skip
    return rows


def build(kind: str, folder: Path) -> Any:
    """Return the train split from megatron-core's builder."""
    from megapack.integrations.hosts.megatron import PackedGPTDataset  # noqa: PLC0415

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
        # Measure startup first, while this process has allocated little memory.
        begun = beginnings(folder, 2 * 10 ** (6 if quick() else 7))
        dataset = write_corpus(folder / "text", 10_000_000 if quick() else 60_000_000)
        packed = {
            strategy: PackedDataset(dataset, pack(dataset.document_lengths, strategy, buckets=ROW))
            for strategy in ("concat", "bucket")
        }
        ones = np.ones(dataset.num_tokens, np.float16)
        add_column(dataset.prefix, "weights", ones, INTERPRETED["weights"])
        weighted = IndexedDataset(dataset.prefix)
        indices = packed["bucket"].samples.indices
        packed["bucket, loss weights"] = PackedDataset(weighted, indices)
        gpt = {
            kind: megatron_train(
                None, folder / "text", folder / kind, positions=kind == POSITIONS,
                num_samples=2 * len(packed["concat"]),
            )
            for kind in (PLAIN, POSITIONS)
        }  # fmt: skip
        gathered = rates(gathering(packed, gpt), windows=5 if quick() else 30, seconds=0.05)
        middle = in_the_middle(weighted)
        carried = carrying(folder)
        how = {"rounds": 1 if quick() else 5, "seconds": 0.3 if quick() else 1.0}
        taken = loaded(loaders(folder, packed["bucket"], gpt), **how)
        inside = inside_megatron(folder / "inside")
    tables = {
        "inside Megatron: builder and DataLoader": inside,
        "the first batch": begun,
        f"data loaders, micro batches of {BATCHES[0]} rows, each at its best setting": taken,
        "half of the documents by fill-in-the-middle": middle,
        "with a column": carried,
        f"rows of {ROW}, one process": gathered,
    }
    common.write_results("data", [*gathered, *middle, *carried, *taken, *begun, *inside], **tables)


if __name__ == "__main__":
    main()
