"""Training speed: useful tokens per second by strategy, and by bucket.

    make bench-train                         # a tiny model on the CPU, or 350M on a GPU
    python benchmarks/train.py --model llama_1b --micro-batch-tokens 16384
    QUICK=1 make bench-train

One corpus (lengths as in FineWeb-Edu), one model, one engine, the same tokens per step; only the
samples differ. "useful" counts tokens of documents, without padding. The second table is
BucketLLM's Table 3, the speed of every bucket relative to 8,192 (or to the largest available), with
attention inside documents and, as in the paper, across whole samples. Data come through the real
loader; the last column is the trainer's waiting time. The third table is the cost of a checkpoint,
written while training waits or continues (``checkpoint.asynchronous``): "stopped" is the time that
training waited, "durable" the time until the checkpoint counts, "step" the mean time of a step,
without a checkpoint and during one.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
import time
from collections.abc import Callable
from functools import partial
from operator import itemgetter
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np
import torch
from common import Timing, in_turns, quick, timed, write_results
from lengths import BUCKETS, LAWS, write_documents

from megapack.data import PackedDataset, PackedLoader, Schedule, build_loader
from megapack.packing import SampleIndex, pack
from megapack.training.command import set_rank_environment
from megapack.training.config import DataConfig, EngineConfig, ModelConfig, PretrainConfig
from megapack.training.engine.checkpoint import CheckpointStore
from megapack.training.engine.engine import start_engine, train_step
from megapack.training.engine.world import World, connect_ranks
from megapack.training.model.architecture import model_configuration
from megapack.training.model.flops import ModelFlops, peak_of
from megapack.training.model.opening import open_model
from megapack.training.monitoring.monitor import StepWork
from megapack.training.trainer import TimedBatches

CUDA = torch.cuda.is_available()
LADDER = BUCKETS if CUDA else [n // 4 for n in BUCKETS]
DOCUMENTS, SCALE = (40_000, 1.0) if CUDA else (4000, 0.25)  # SCALE: factor on document lengths
VOCABULARY = 128_256 if CUDA else 4096
PRECISION = "bf16" if CUDA else "fp32"
STEPS = 4 if quick() else 16  # per strategy and round
BUCKET_STEPS = 12 if quick() else 60  # per attention and round
SPEED = "useful_tokens_per_second"
QUIET_STEPS = 3  # timed without a checkpoint


def cases() -> dict[str, tuple[str, list[int], str]]:
    """Return name -> (strategy, buckets, attention), the rows of the first table."""
    usual, short = LADDER[-2:-1], LADDER[-4:-3]  # 8k of 16k, as in the paper, and 2k
    largest, across = LADDER[-1:], "sample"
    return {
        f"pad to {usual[0]}": ("pad", usual, "document"),
        f"concat {short[0]}, across documents": ("concat", short, across),
        f"concat {usual[0]}, across documents": ("concat", usual, across),
        f"concat {usual[0]}": ("concat", usual, "document"),
        f"concat {largest[0]}": ("concat", largest, "document"),
        f"best fit {largest[0]}": ("best_fit_decreasing", largest, "document"),
        f"bucket {LADDER[0]}..{largest[0]}": ("bucket", LADDER, "document"),
    }


class Bench:
    """Engine that runs steps of any sample index over one corpus."""

    def __init__(self, args: argparse.Namespace, here: World, directory: Path) -> None:
        self.args, self.here, self.tokens = args, here, args.micro_batch_tokens
        lengths = (LAWS["fineweb_edu_like"](DOCUMENTS) * SCALE).astype(np.int64)
        sizes = {"vocabulary": VOCABULARY, "dtype": np.int32}
        self.dataset = write_documents(directory / "corpus", np.maximum(2, lengths), **sizes)
        engine = EngineConfig(precision=PRECISION, compile=args.compile)
        step = {"tokens_per_step": self.tokens, "micro_batch_tokens": self.tokens}
        data, model = DataConfig(prefix="-", index="-", **step), ModelConfig(preset=args.model)
        self.config = PretrainConfig(run_dir="-", model=model, data=data, engine=engine)
        architecture = model_configuration(model, VOCABULARY)
        built, attention = open_model(model, engine, architecture, device=here.device)
        self.attention = attention.name
        self.num_parameters = built.num_parameters
        self.flops = ModelFlops.of(built, architecture)
        self.engine = start_engine(built, self.config, here)

    def loader(self, data: PackedDataset, schedule: Schedule, **how: Any) -> PackedLoader:
        """Return the loader of whole steps for one rank."""
        rank = {"data_parallel_rank": 0, "data_parallel_size": 1, "cu_seqlens": "padded"}
        return build_loader(data, schedule, micro_batch_tokens=self.tokens, **rank, **how)

    def step(self, micro_batches: Any) -> None:
        """Run one optimizer step, and wait for the device."""
        train_step(self.engine, micro_batches, world=self.here, config=self.config.engine, lr=1e-5)
        self.wait()

    def run(self, index: SampleIndex, attention: str, num_steps: int) -> dict[str, Any]:
        """Measure the speed of ``num_steps`` steps after a warm-up, overall and per bucket."""
        data = PackedDataset(self.dataset, index, attention=attention)  # type: ignore[arg-type]
        schedule = Schedule(data, tokens_per_step=self.tokens)
        warmup = 8 * len(schedule.capacities) if self.args.compile else 2
        how = {"num_steps": warmup + num_steps, "pin_memory": CUDA, "device": self.here.device}
        batches = TimedBatches(self.loader(data, schedule, **how))
        parts: list[tuple[int, float, StepWork]] = []  # capacity, seconds, work
        waited = 0.0
        self.wait()
        begin = time.perf_counter()
        for count, (step, micro_batches) in enumerate(batches.steps()):
            self.step(micro_batches)
            now = time.perf_counter()
            wait = batches.waited()
            if count >= warmup:
                content = schedule.step(step)
                work = StepWork.of(schedule, content, self.flops)
                parts.append((content.capacity, now - begin, work))
                waited += wait
            begin = time.perf_counter()
        return self._summary(parts, waited)

    def repeated_step(self, index: SampleIndex) -> Callable[[], None]:
        """Return a function that runs one step; its calls repeat the same few batches."""
        data = PackedDataset(self.dataset, index)
        loader = self.loader(data, Schedule(data, tokens_per_step=self.tokens), num_steps=4)
        batches = itertools.cycle(list(loader))
        return lambda: self.step([next(batches)])

    def _summary(self, parts: list[tuple[int, float, StepWork]], waited: float) -> dict[str, Any]:
        seconds = sum(part[1] for part in parts)
        tokens = sum(part[2].tokens for part in parts)
        useful = sum(part[2].useful_tokens for part in parts)
        peak = peak_of(self.here.device)
        buckets = {}
        for capacity in sorted({part[0] for part in parts}):
            mine = [part for part in parts if part[0] == capacity]
            buckets[capacity] = sum(p[2].tokens for p in mine) / sum(p[1] for p in mine)
        return {
            SPEED: useful / seconds, "tokens_per_second": tokens / seconds,
            "padding": 1 - useful / tokens,
            "mfu": sum(part[2].flops for part in parts) / seconds / peak if peak else None,
            "data_wait_share": waited / seconds, "steps": len(parts), "buckets": buckets,
        }  # fmt: skip

    def wait(self) -> None:
        """Wait for the device."""
        if CUDA:
            torch.cuda.synchronize()


def middle_of(rounds: list[dict[str, Any]], seconds: Callable[[Any], float]) -> dict[str, Any]:
    """Return the round whose seconds are nearest to the median, with the spread of all rounds."""
    timing = Timing(tuple(map(seconds, rounds)))
    middle = min(rounds, key=lambda of: abs(seconds(of) - timing.seconds))
    return {**middle, "spread_%": 100 * timing.spread}


def by_strategy(bench: Bench, rounds: int) -> list[dict[str, Any]]:
    """Run the strategies in turns; return the median round of each."""
    lengths = bench.dataset.document_lengths
    sides = {
        name: partial(bench.run, pack(lengths, strategy, buckets=buckets), attention, STEPS)
        for name, (strategy, buckets, attention) in cases().items()
    }
    rows = []
    for name, of in in_turns(sides, rounds).items():
        middle = middle_of(of, lambda found: 1 / found[SPEED])
        del middle["buckets"]
        rows.append({"case": name, **middle})
    return [row | {"over_padding": row[SPEED] / rows[0][SPEED]} for row in rows]


def by_bucket(bench: Bench, rounds: int) -> list[dict[str, Any]]:
    """Measure the buckets with both kinds of attention; return medians over the rounds."""
    index = pack(bench.dataset.document_lengths, "bucket", buckets=LADDER)
    tokens = index.bucket_capacity * np.diff(index.bucket_sample_offsets)
    shares = tokens / tokens.sum()
    sides = {of: partial(bench.run, index, of, BUCKET_STEPS) for of in ("document", "sample")}
    middle: dict[str, dict[int, float]] = {}
    for kind, runs in in_turns(sides, rounds).items():
        capacities = sorted({capacity for run in runs for capacity in run["buckets"]})
        middle[kind] = {
            n: median(run["buckets"][n] for run in runs if n in run["buckets"]) for n in capacities
        }
    reference = 8192 if 8192 in middle["document"] else max(middle["document"])
    return [
        {"bucket": capacity, "share": float(share)}
        | {kind: of[capacity] for kind, of in middle.items()}
        | {f"{kind}_relative": of[capacity] / of[reference] - 1 for kind, of in middle.items()}
        for capacity, share in zip(index.bucket_capacity.tolist(), shares, strict=True)
        if capacity in middle["document"]
    ]


def save_times(
    engine: Any, here: World, directory: Path, step: Callable[[], None], rounds: int
) -> list[dict[str, Any]]:
    """Measure how long a checkpoint stops training, one row per method; the median of the rounds.

    ``engine`` must have run steps, so that its state exists; ``step`` runs one and synchronizes.
    """
    stores = {
        way: CheckpointStore(directory / way, here, keep=1, zero_stage=1, asynchronous=background)
        for way, background in (("blocking", False), ("asynchronous", True))
    }
    numbers = itertools.count(1)

    def save(way: str) -> dict[str, float]:
        quiet = [timed(step)[0] for _ in range(QUIET_STEPS)]
        store, number, meanwhile = stores[way], next(numbers), []
        begin = time.perf_counter()
        store.begin(engine, number, number, {})
        stopped = time.perf_counter() - begin
        while not store.is_written:
            meanwhile.append(timed(step)[0])
        last = time.perf_counter()
        tag = store.finish()
        end = time.perf_counter()
        files = (directory / way / str(tag)).rglob("*")
        return {
            "stopped_s": stopped + end - last, "durable_s": end - begin,
            "step_ms": 1000 * mean(quiet),
            "step_meanwhile_ms": 1000 * mean(meanwhile) if meanwhile else 0.0,
            "steps_meanwhile": len(meanwhile),
            "MB": sum(path.stat().st_size for path in files if path.is_file()) / 1e6,
        }  # fmt: skip

    for way in stores:  # warm up: allocate memory, create directories
        save(way)
    found = in_turns({way: lambda way=way: save(way) for way in stores}, rounds)
    stopped = itemgetter("stopped_s")
    return [{"way": way, **middle_of(of, stopped)} for way, of in found.items()]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", default="llama_350m" if CUDA else "llama_demo")
    add("--micro-batch-tokens", type=int, default=49152 if CUDA else 4096)
    add("--compile", action="store_true", help="compile layers and loss")
    add("--rounds", type=int, default=1 if quick() else 3, help="rounds; the median is reported")
    args = parser.parse_args()
    set_rank_environment()
    with tempfile.TemporaryDirectory() as directory, connect_ranks(timeout_minutes=10) as here:
        torch.set_num_threads(1)  # with more threads, waits for a busy core would dominate
        bench = Bench(args, here, Path(directory))
        strategies = by_strategy(bench, args.rounds)
        buckets = by_bucket(bench, args.rounds)
        index = pack(bench.dataset.document_lengths, "concat", buckets=LADDER[-1:])
        step = bench.repeated_step(index)
        saves = save_times(bench.engine, here, Path(directory), step, args.rounds)
    setup = {
        "model": args.model, "parameters": bench.num_parameters,
        "device": torch.cuda.get_device_name() if CUDA else "CPU, one thread",
        "precision": PRECISION, "attention": bench.attention, "compiled": args.compile,
        "micro_batch_tokens": args.micro_batch_tokens,
    }  # fmt: skip
    results = {"setup": setup, "strategies": strategies, "buckets": buckets, "saves": saves}
    tables = {
        "setup": [setup],
        "useful tokens per second": strategies,
        "tokens per second (attention in documents, or over whole samples)": buckets,
        "a checkpoint": saves,
    }
    write_results("train", results, **tables)


if __name__ == "__main__":
    main()
