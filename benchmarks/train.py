"""Training speed: useful tokens per second by strategy, and by bucket.

    make bench-train                         # a tiny model on the CPU, or 350M on a GPU
    python benchmarks/train.py --model llama_1b --micro-batch-tokens 16384
    QUICK=1 make bench-train

One corpus (lengths as in FineWeb-Edu), one model, one engine, the same tokens per step; only the
samples differ. "useful" counts tokens of documents, so padding costs what it costs. The second
table is BucketLLM's Table 3, the speed of every bucket relative to 8,192 (or to the largest one at
hand), with attention inside documents and, as there, over whole samples. Data comes through the
real loader; what the trainer waited for it is the last column. The third table is what a checkpoint
costs, written while training waits and while it goes on (``checkpoint.asynchronous``): "stopped" is
what training waited, "durable" how long until it counts, "step" the mean time of a step, without a
checkpoint and meanwhile.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np
import torch
from common import Timing, in_turns, quick, show, timed, write_documents, write_results
from lengths import BUCKETS, LAWS

from megapack.data import PackedDataset, Schedule, build_loader
from megapack.packing import SampleIndex, pack
from megapack.training.command import join
from megapack.training.config import (
    DataConfig,
    EngineConfig,
    ModelConfig,
    PretrainConfig,
)
from megapack.training.engine.checkpoint import CheckpointStore
from megapack.training.engine.engine import start_engine, train_step
from megapack.training.engine.world import World, world
from megapack.training.model.architecture import model_configuration
from megapack.training.model.flops import ModelFlops, peak_of
from megapack.training.model.opening import open_model
from megapack.training.monitoring.monitor import StepWork
from megapack.training.trainer import TimedBatches

SPEED = "useful_tokens_per_second"
QUIET_STEPS = 3  # beside those of a checkpoint


@dataclass(frozen=True)
class Case:
    """One line of the first table."""

    name: str
    strategy: str
    buckets: tuple[int, ...]
    attention: str


def cases(buckets: list[int]) -> list[Case]:
    largest = buckets[-1]
    usual = largest // 2  # 8k of 16k, as in the paper
    short = largest // 8
    return [
        Case(f"pad to {usual}", "pad", (usual,), "document"),
        Case(f"concat {short}, across documents", "concat", (short,), "sample"),
        Case(f"concat {usual}, across documents", "concat", (usual,), "sample"),
        Case(f"concat {usual}", "concat", (usual,), "document"),
        Case(f"concat {largest}", "concat", (largest,), "document"),
        Case(f"best fit {largest}", "best_fit_decreasing", (largest,), "document"),
        Case(f"bucket {buckets[0]}..{largest}", "bucket", tuple(buckets), "document"),
    ]


class Bench:
    """An engine, and what it takes to run steps of any index over one corpus."""

    def __init__(self, args: argparse.Namespace, here: World, directory: Path) -> None:
        self.args, self.here = args, here
        lengths = (LAWS["fineweb_edu_like"](args.documents) * args.scale).astype(np.int64)
        sizes = {"vocabulary": args.vocab_size, "dtype": np.int32}
        self.dataset = write_documents(directory / "corpus", np.maximum(2, lengths), **sizes)
        engine = EngineConfig(precision=args.precision, compile=args.compile)
        data = DataConfig(
            prefix="-",
            index="-",
            tokens_per_step=args.micro_batch_tokens,
            micro_batch_tokens=args.micro_batch_tokens,
        )
        model = ModelConfig(preset=args.model, attention_backend=args.attention_backend)
        self.config = PretrainConfig(run_dir="-", model=model, data=data, engine=engine)
        architecture = model_configuration(model, args.vocab_size)
        built, attention = open_model(model, engine, architecture, device=here.device)
        self.attention = attention.name
        self.num_parameters = built.num_parameters
        self.flops = ModelFlops.of(built, architecture)
        self.engine = start_engine(built, self.config, here)

    def run(self, index: SampleIndex, attention: str, num_steps: int) -> dict[str, Any]:
        """Speed over ``num_steps`` steps after a warm-up, in all and per bucket."""
        data = PackedDataset(self.dataset, index, attention=attention)  # type: ignore[arg-type]
        schedule = Schedule(data, tokens_per_step=self.args.micro_batch_tokens)
        warmup = 8 * len(schedule.capacities) if self.args.compile else 2
        loader = build_loader(
            data,
            schedule,
            data_parallel_rank=0,
            data_parallel_size=1,
            micro_batch_tokens=self.args.micro_batch_tokens,
            num_steps=warmup + num_steps,
            cu_seqlens="padded",
            pin_memory=self.here.device.type == "cuda",
            device=self.here.device,
        )
        batches = TimedBatches(loader)
        parts: list[tuple[int, float, StepWork]] = []  # capacity, seconds, work
        waited = 0.0
        self.wait()
        begin = time.perf_counter()
        for count, (step, micro_batches) in enumerate(batches.steps()):
            train_step(
                self.engine, micro_batches, world=self.here, config=self.config.engine, lr=1e-5
            )
            self.wait()
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
        """One step, again and again over the same few batches."""
        data = PackedDataset(self.dataset, index)
        tokens = self.args.micro_batch_tokens
        loader = build_loader(
            data,
            Schedule(data, tokens_per_step=tokens),
            data_parallel_rank=0,
            data_parallel_size=1,
            micro_batch_tokens=tokens,
            num_steps=4,
            cu_seqlens="padded",
        )
        batches = itertools.cycle(list(loader))

        def step() -> None:
            config = self.config.engine
            train_step(self.engine, [next(batches)], world=self.here, config=config, lr=1e-5)
            self.wait()

        return step

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
            SPEED: useful / seconds,
            "tokens_per_second": tokens / seconds,
            "padding": 1 - useful / tokens,
            "mfu": sum(part[2].flops for part in parts) / seconds / peak if peak else None,
            "data_wait_share": waited / seconds,
            "steps": len(parts),
            "buckets": buckets,
        }

    def wait(self) -> None:
        """For the device."""
        if self.here.device.type == "cuda":
            torch.cuda.synchronize()


def by_strategy(bench: Bench, rounds: int, num_steps: int) -> list[dict[str, Any]]:
    """The strategies take turns; the median round of each counts."""
    lengths = bench.dataset.document_lengths
    chosen = cases(bench.args.buckets)
    indices = {case: pack(lengths, case.strategy, buckets=case.buckets) for case in chosen}
    found = in_turns(
        {case: partial(bench.run, indices[case], case.attention, num_steps) for case in chosen},
        rounds,
    )
    rows = []
    for case, of in found.items():
        timing = Timing(tuple(1 / round_[SPEED] for round_ in of))
        middle = min(of, key=lambda round_: abs(1 / round_[SPEED] - timing.seconds))
        del middle["buckets"]
        rows.append({"case": case.name, **middle, "spread_%": 100 * timing.spread})
    return [row | {"over_padding": row[SPEED] / rows[0][SPEED]} for row in rows]


def by_bucket(bench: Bench, rounds: int, num_steps: int) -> list[dict[str, Any]]:
    """The buckets of the bucket index, with both kinds of attention; the median of the rounds."""
    index = pack(bench.dataset.document_lengths, "bucket", buckets=bench.args.buckets)
    tokens = index.bucket_capacity * np.diff(index.bucket_sample_offsets)
    shares = tokens / tokens.sum()
    kinds = ("document", "sample")
    found = in_turns({kind: partial(bench.run, index, kind, num_steps) for kind in kinds}, rounds)
    middle: dict[str, dict[int, float]] = {}
    for kind, runs in found.items():
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
    """How long a checkpoint stops training, one row per way; the median of the rounds.

    Args:
        engine: of ``start_engine``; has taken steps, so that all of its state exists.
        here: this process.
        directory: where checkpoints go.
        step: takes one optimizer step, and waits for the device.
        rounds: of each way, in turns.
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
            "stopped_s": stopped + end - last,
            "durable_s": end - begin,
            "step_ms": 1000 * mean(quiet),
            "step_meanwhile_ms": 1000 * mean(meanwhile) if meanwhile else 0.0,
            "steps_meanwhile": len(meanwhile),
            "MB": sum(path.stat().st_size for path in files if path.is_file()) / 1e6,
        }

    for way in stores:  # memory for the copies, and the first directory
        save(way)
    found = in_turns({way: lambda way=way: save(way) for way in stores}, rounds)
    rows = []
    for way, of in found.items():
        timing = Timing(tuple(round_["stopped_s"] for round_ in of))
        middle = min(of, key=lambda round_: abs(round_["stopped_s"] - timing.seconds))
        rows.append({"way": way, **middle, "spread_%": 100 * timing.spread})
    return rows


def main() -> None:
    args = parse_arguments()
    join()
    with tempfile.TemporaryDirectory() as directory, world(timeout_minutes=10) as here:
        torch.set_num_threads(1)  # threads that wait for a busy core would be all one measures
        bench = Bench(args, here, Path(directory))
        strategies = by_strategy(bench, args.rounds, args.steps)
        buckets = by_bucket(bench, args.rounds, args.bucket_steps)
        index = pack(bench.dataset.document_lengths, "concat", buckets=args.buckets[-1:])
        step = bench.repeated_step(index)
        saves = save_times(bench.engine, here, Path(directory), step, args.rounds)
    setup = {
        "model": args.model,
        "parameters": bench.num_parameters,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU, one thread",
        "precision": args.precision,
        "attention": bench.attention,
        "compiled": args.compile,
        "micro_batch_tokens": args.micro_batch_tokens,
    }
    write_results(
        "train", {"setup": setup, "strategies": strategies, "buckets": buckets, "saves": saves}
    )
    show("setup", [setup])
    show("useful tokens per second", strategies)
    show("tokens per second (attention in documents, or over whole samples)", buckets)
    show("a checkpoint", saves)


def parse_arguments() -> argparse.Namespace:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", default="llama_350m" if cuda else "llama_demo")
    add("--precision", choices=["bf16", "fp32"], default="bf16" if cuda else "fp32")
    add("--micro-batch-tokens", type=int, default=49152 if cuda else 4096)
    add("--buckets", type=int, nargs="+", default=None)
    add("--documents", type=int, default=40000 if cuda else 4000)
    add("--scale", type=float, default=1.0 if cuda else 0.25, help="factor on document lengths")
    add("--vocab-size", type=int, default=128256 if cuda else 4096)
    add("--attention-backend", default="auto")
    add("--compile", action="store_true", help="compile layers and loss")
    add("--rounds", type=int, default=1 if quick() else 3, help="the median counts")
    add("--steps", type=int, default=4 if quick() else 16, help="per strategy and round")
    add("--bucket-steps", type=int, default=12 if quick() else 60, help="per attention and round")
    args = parser.parse_args()
    if args.buckets is None:
        args.buckets = BUCKETS if cuda else [n // 4 for n in BUCKETS]
    return args


if __name__ == "__main__":
    main()
