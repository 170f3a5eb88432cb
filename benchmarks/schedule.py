"""``make bench-schedule``: equal work on 64 ranks, DeepSpeed's batches beside ours, speed.

1. Attention work (sum of squared segment lengths) per rank, largest over mean, for steps of one
   bucket on 64 ranks with 49,152 tokens each: samples assigned to ranks in the order of the
   schedule (random) and as megapack deals them. "layer" adds the linear layers of a model with
   hidden size 2,048.
2. The same where every rank has one sample per step, which no dealing can balance: with samples in
   order of cost inside a window, of one source, of eight equal ones and of three unlike ones. What
   it costs: the spread (standard deviation over mean) of the mean cost of a step.
3. DeepSpeed's batch_by_seqlens and ours on the same lengths: seconds, and whether all ranks of a
   step have the same number of tokens and the same shape. Theirs grows with the square of the
   documents, so the ratio says as much about their number as about the code.
4. What the bucket of 1e6 steps takes beside a shuffle of 1e6 numbers by numpy, and what any one of
   them takes.
5. Blends beside Megatron's builder, and a program of 10,000 sources and 1e9 samples over 1e6
   steps (benchmarks/schedule_blends.py).
"""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
from common import quick, show, take_turns, write_results
from lengths import LAWS
from numpy.typing import NDArray
from schedule_blends import beside_megatron, program

from megapack.data import BucketBatchSampler, Schedule
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
    """One sample per rank and step: what ordering by cost inside a window does, and costs."""
    unlike = [LAWS[name](len(lengths) // 4, 1) for name in ("pubmed", "bbc_news")]
    sources = {
        "one source": [lengths],
        "8 alike": np.array_split(lengths, 8),
        "3 unlike": [lengths, *unlike],
    }
    rows = []
    for name, parts in sources.items():
        indices = [pack(part, "best_fit_decreasing", buckets=[capacity]) for part in parts]
        for window in (1, 4, 16, 64):
            schedule = Schedule(
                indices,
                weights=[1] * len(indices),
                tokens_per_step=RANKS * capacity,
                seed=1,
                cost_window=window,
            )
            sampler = sampler_of(schedule, capacity)
            steps = range(min(schedule.num_steps(), 64))
            items = [item for step in steps for item in sampler.imbalance(step)]
            ids = [schedule.step(step).sample_ids for step in steps]
            costs = [schedule.samples.attention_cost(own, capacity).mean() for own in ids]
            rows.append(
                {
                    "case": f"{capacity}, 1 per rank, {name}, window {window}",
                    **_means(items),
                    "spread_of_steps": float(np.std(costs) / np.mean(costs)),
                }
            )
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

    def theirs() -> Any:
        return batch_by_seqlens(values, max_tokens=tokens, effective_batch_size=ranks)[0]

    ids = theirs()
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

    schedule, batches = ours()
    found = take_turns({"theirs": theirs, "ours": ours}, windows=3)
    # batches: rank after rank, each with one per step
    ours_shapes = np.array([(len(b), b.capacity) for b in batches]).reshape(ranks, -1, 2)
    ours_loads = ours_shapes.prod(axis=2)
    assert ours_loads.shape[1] == schedule.num_steps()
    return {
        "documents": len(documents),
        "deepspeed_seconds": found["theirs"].seconds,
        "ours_seconds": found["ours"].seconds,
        "ratio": found["theirs"].seconds / found["ours"].seconds,
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
        found = take_turns(
            {
                "all": lambda draws=schedule.stages[0].draws: draws.buckets(0, 1_000_000),
                "one": lambda schedule=schedule: [schedule.step(i) for i in steps],
                "shuffle": lambda: np.random.default_rng(0).permutation(1_000_000),
            }
        )
        rows.append(
            {
                "order": order,
                "epochs": 1_000_000 / schedule.num_steps(),
                "seconds_1e6_steps": found["all"].seconds,
                "over_a_shuffle": found["all"].seconds / found["shuffle"].seconds,
                "goal": 10,
                "milliseconds_per_step": 1000 * found["one"].seconds / len(steps),
            }
        )
    return rows


def main() -> None:
    n = 200_000 if quick() else 3_000_000
    lengths = LAWS["fineweb_edu_like"](n, 1)
    # First, as its memory is measured in processes that begin as this one is.
    staged = program(lengths[:230_000], 1_000 if quick() else 10_000, 1_000_000)
    work = balance(lengths, 10 if quick() else 100) + windows(lengths, BUCKETS[-1])
    sizes = (2_000,) if quick() else (1_000, 2_000, 4_000)
    beside = [beside_deepspeed(lengths[:size]) for size in sizes]
    fast = speed(lengths)
    counts = (3, 1_000, 10_000, 20_000)
    blended = beside_megatron(50_000 if quick() else 200_000, counts)
    write_results("schedule", [*work, *beside, *fast, *blended, *staged])
    show("DeepSpeed's batch_by_seqlens beside ours, 8 ranks of 16,384 tokens", beside)
    show("which source of a blend", blended)
    show("a program of many sources", staged)
    show("the schedule itself", fast)
    show(f"attention work of {RANKS} ranks, largest over mean", work)


if __name__ == "__main__":
    main()
