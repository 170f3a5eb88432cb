"""``make bench-schedule``: equal work on 64 ranks, DeepSpeed's batches beside ours, speed.

1. Attention work (sum of squared segment lengths) per rank, largest over mean, for steps of one
   bucket on 64 ranks with 49,152 tokens each: samples dealt in the order of the schedule (random)
   and as megapack deals them. "layer" adds the linear layers of a model with hidden size 2,048.
2. The same where every rank has one sample per step, which no dealing can balance: with draws
   ordered by cost inside a window.
3. DeepSpeed's batch_by_seqlens and ours on the same lengths: seconds, and whether all ranks of a
   step have the same number of tokens and the same shape.
4. Seconds to know the bucket of 1e6 steps, and to compute any one of them.
5. Megatron's build_blending_indices and ours on the same log-normal(0, 2) weights of 3 to 20,000
   sources: seconds for the source and rank of every position (both in one thread, weights to
   arrays), the largest |taken(n) - weight x n| over all sources and positions n, and what a step
   of 4,096 samples costs ours at position 1e12, where Megatron's table would need 10 TB.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from common import Table, quick, write_results
from lengths import LAWS
from numpy.typing import NDArray

from megapack import _core
from megapack.data import BucketBatchSampler, Schedule
from megapack.data.streams import whole_shares
from megapack.packing import pack

RANKS = 64
TOKENS_PER_RANK = 49_152
HIDDEN = 2048
BUCKETS = [1024, 2048, 4096, 8192, 16384]
TARGET = {1024: 1.01, 2048: 1.01, 4096: 1.01, 8192: 1.01, 16384: 1.06}

Lengths = NDArray[np.int32]


def sampler_of(schedule: Schedule, micro_batch_tokens: int, ranks: int = RANKS) -> Any:
    return BucketBatchSampler(
        schedule,
        data_parallel_rank=0,
        data_parallel_size=ranks,
        micro_batch_tokens=micro_batch_tokens,
        hidden_size=HIDDEN,
    )


def balance(lengths: Lengths, steps_per_bucket: int) -> list[dict[str, Any]]:
    """Imbalance per bucket, mean and worst of some steps."""
    index = pack(lengths, "bucket", buckets=BUCKETS)
    schedule = Schedule(index, tokens_per_step=RANKS * TOKENS_PER_RANK, seed=1)
    sampler = sampler_of(schedule, TOKENS_PER_RANK)
    found: dict[int, list[Any]] = {capacity: [] for capacity in BUCKETS}
    for step, bucket in enumerate(schedule.stages[0].draws.buckets(0, schedule.num_steps())):
        own = found[schedule.capacities[bucket]]
        if len(own) < steps_per_bucket:
            own += sampler.imbalance(step)
    return [
        {
            "case": f"bucket {capacity}, {TOKENS_PER_RANK // capacity} per rank",
            **_means(items),
            "target": TARGET[capacity],
        }
        for capacity, items in found.items()
        if items
    ]


def windows(lengths: Lengths, capacity: int) -> list[dict[str, Any]]:
    """One sample per rank and step: what ordering by cost inside a window does."""
    index = pack(lengths, "best_fit_decreasing", buckets=[capacity])
    rows = []
    for window in (1, 4, 16, 64):
        schedule = Schedule(index, tokens_per_step=RANKS * capacity, seed=1, cost_window=window)
        sampler = sampler_of(schedule, capacity)
        steps = range(min(schedule.num_steps(), 64))
        items = [item for step in steps for item in sampler.imbalance(step)]
        rows.append({"case": f"{capacity}, 1 per rank, window {window}", **_means(items)})
    return rows


def _means(items: list[Any]) -> dict[str, Any]:
    return {
        "steps": len(items),
        "random": float(np.mean([item.attention_undealt for item in items])),
        "ours": float(np.mean([item.attention for item in items])),
        "worst": float(np.max([item.attention for item in items])),
        "layer_random": float(np.mean([item.model_undealt for item in items])),
        "layer_ours": float(np.mean([item.model for item in items])),
    }


def beside_deepspeed(lengths: Lengths) -> dict[str, Any]:
    """Both make steps for 8 ranks of 16,384 tokens out of the same documents."""
    from deepspeed.runtime.data_pipeline.data_sampling.variable_batch_size_and_lr import (  # noqa: PLC0415
        batch_by_seqlens,
    )

    logging.disable(logging.WARNING)
    ranks, tokens = 8, BUCKETS[-1]
    documents = np.minimum(lengths, tokens)
    values = documents.tolist()
    theirs, (ids, _, _) = timed(
        lambda: batch_by_seqlens(values, max_tokens=tokens, effective_batch_size=ranks)
    )
    loads = np.array([documents[members].sum() for _, members in ids]).reshape(-1, ranks)
    shapes = np.array([len(members) for _, members in ids]).reshape(-1, ranks)

    def ours() -> tuple[Schedule, list[Any]]:
        index = pack(documents, "bucket", buckets=BUCKETS)
        schedule = Schedule(index, tokens_per_step=ranks * tokens)
        batches = [
            batch
            for rank in range(ranks)
            for batch in BucketBatchSampler(
                schedule,
                data_parallel_rank=rank,
                data_parallel_size=ranks,
                micro_batch_tokens=tokens,
            )
        ]
        return schedule, batches

    seconds, (schedule, batches) = timed(ours)
    # batches: rank after rank, each with one per step
    ours_shapes = np.array([(len(b), b.capacity) for b in batches]).reshape(ranks, -1, 2)
    ours_loads = ours_shapes.prod(axis=2)
    assert ours_loads.shape[1] == schedule.num_steps()
    return {
        "documents": len(documents),
        "deepspeed_seconds": theirs,
        "ours_seconds": seconds,
        "ratio": theirs / seconds,
        "deepspeed_tokens_max_over_mean": float((loads.max(1) / loads.mean(1)).mean()),
        "deepspeed_equal_shapes": float((shapes.min(1) == shapes.max(1)).mean()),
        "ours_tokens_max_over_mean": float((ours_loads.max(0) / ours_loads.mean(0)).mean()),
        "ours_equal_shapes": float((ours_shapes == ours_shapes[0]).all(axis=(0, 2)).mean()),
    }


def speed(lengths: Lengths) -> list[dict[str, Any]]:
    """The bucket of every one of 1e6 steps, and the samples of steps asked for at random."""
    index = pack(lengths, "bucket", buckets=BUCKETS)
    steps = np.random.default_rng(0).integers(0, 1_000_000, 300).tolist()
    rows = []
    for order in ("proportional", "uniform", "grow-p2"):
        schedule = Schedule(index, tokens_per_step=BUCKETS[-1], order=order)
        seconds, buckets = timed(lambda draws=schedule.stages[0].draws: draws.buckets(0, 1_000_000))
        assert len(buckets) == 1_000_000
        one, _ = timed(lambda schedule=schedule: [schedule.step(i) for i in steps])
        rows.append(
            {
                "order": order,
                "epochs": 1_000_000 / schedule.num_steps(),
                "seconds_1e6_steps": seconds,
                "milliseconds_per_step": 1000 * one / len(steps),
            }
        )
    return rows


def blends(num_positions: int) -> list[dict[str, Any]]:
    """Which source every position of a blend comes from, Megatron's builder and ours."""
    from megatron.core.datasets import helpers  # noqa: PLC0415

    rows = []
    for sources in (3, 1_000, 20_000):
        weights = np.random.default_rng(0).lognormal(0, 2, sources)
        weights /= weights.sum()

        def megatron(weights: Any = weights, sources: int = sources) -> Any:
            source = np.zeros(num_positions, np.int16)
            rank = np.zeros(num_positions, np.int64)
            helpers.build_blending_indices(source, rank, weights, sources, num_positions, False)
            return source, rank

        def ours(weights: Any = weights) -> Any:
            parts = [int(weight * 2**100) for weight in weights.tolist()]
            which, first, count, places = _core.Blend(whole_shares(parts)).range(0, num_positions)
            source, rank = np.empty(num_positions, np.int32), np.empty(num_positions, np.int64)
            source[places] = np.repeat(which, count)
            starts = np.repeat(first - (np.cumsum(count) - count), count)
            rank[places] = starts + np.arange(num_positions)
            return source, rank

        seconds = {side.__name__: timed(side) for side in (megatron, ours)}
        blend = _core.Blend(whole_shares([int(weight * 2**100) for weight in weights.tolist()]))
        far, _ = timed(lambda blend=blend: [blend.range(10**12 + i, 10**12 + i + 4096)
                                            for i in range(0, 409_600, 4096)])  # fmt: skip
        rows.append(
            {"sources": sources, "positions": num_positions, "nanoseconds": far / 409_600 * 1e9}
            | {f"{name}_seconds": taken for name, (taken, _) in seconds.items()}
            | {f"{name}_worst": worst_error(*out, weights) for name, (_, out) in seconds.items()}
        )
    return rows


def worst_error(source: Any, rank: Any, weights: Any) -> float:
    """Largest |taken(n) - weight n|: it is found just before or after a sample, or at the end."""
    at = np.arange(len(source))
    own = weights[source]
    last = np.bincount(source, minlength=len(weights)) - weights * len(source)
    errors = (rank - own * at, rank + 1 - own * (at + 1), last)
    return float(max(np.abs(error).max() for error in errors))


def timed(function: Callable[[], Any]) -> tuple[float, Any]:
    begin = time.perf_counter()
    result = function()
    return time.perf_counter() - begin, result


def main() -> None:
    n = 200_000 if quick() else 3_000_000
    lengths = LAWS["fineweb_edu_like"](n, 1)
    work = balance(lengths, 10 if quick() else 100)
    one = windows(lengths, BUCKETS[-1])
    sizes = (2_000,) if quick() else (2_000, 4_000, 8_000)
    beside = [beside_deepspeed(lengths[:size]) for size in sizes]
    fast = speed(lengths)
    blended = blends(50_000 if quick() else 200_000)
    write_results("schedule", [*work, *one, *beside, *fast, *blended])
    table = Table(
        "DeepSpeed's batch_by_seqlens beside ours, 8 ranks of 16,384 tokens",
        [
            "documents",
            "DeepSpeed s",
            "ours s",
            "ratio",
            "tokens max/mean",
            "equal shapes",
            "ours: tokens",
            "shapes",
        ],
    )
    for row in beside:
        table.add(
            f"{row['documents']:,}", f"{row['deepspeed_seconds']:.2f}",
            f"{row['ours_seconds']:.4f}", f"{row['ratio']:,.0f}",
            f"{row['deepspeed_tokens_max_over_mean']:.3f}", f"{row['deepspeed_equal_shapes']:.0%}",
            f"{row['ours_tokens_max_over_mean']:.3f}", f"{row['ours_equal_shapes']:.0%}",
        )  # fmt: skip
    table.print()
    table = Table(
        f"which source, {blended[0]['positions']:,} positions",
        ["sources", "Megatron s", "ours s", "ratio", "worst error", "ours", "any step, ns/sample"],
    )
    for row in blended:
        table.add(
            f"{row['sources']:,}", f"{row['megatron_seconds']:.3f}", f"{row['ours_seconds']:.3f}",
            f"{row['megatron_seconds'] / row['ours_seconds']:,.2f}",
            f"{row['megatron_worst']:.2f}", f"{row['ours_worst']:.2f}",
            f"{row['nanoseconds']:.0f}",
        )  # fmt: skip
    table.print()
    table = Table(
        "the schedule itself",
        ["order", "epochs", "1e6 steps, s", "target", "any one step, ms"],
    )
    for row in fast:
        table.add(
            row["order"], f"{row['epochs']:.1f}", f"{row['seconds_1e6_steps']:.2f}", "1.00",
            f"{row['milliseconds_per_step']:.3f}",
        )  # fmt: skip
    table.print()
    table = Table(
        f"attention work of {RANKS} ranks, largest over mean",
        ["step", "steps", "random", "ours", "worst", "target", "layer: random", "ours"],
    )
    for row in work + one:
        table.add(
            row["case"], f"{row['steps']}", f"{row['random']:.3f}", f"{row['ours']:.3f}",
            f"{row['worst']:.3f}", f"{row['target']:.2f}" if "target" in row else "",
            f"{row['layer_random']:.3f}", f"{row['layer_ours']:.3f}",
        )  # fmt: skip
    table.print()


if __name__ == "__main__":
    main()
