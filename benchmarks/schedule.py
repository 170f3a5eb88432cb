"""``make bench-schedule``: balance of 64 ranks, DeepSpeed's batches, and speed of the schedule.

1. Attention work (sum of squared segment lengths) per rank, largest over mean, for steps of one
   bucket on 64 ranks with 49,152 tokens each: samples assigned in the order of the schedule
   (random) and by megapack.
2. The same with one sample per rank and step, where no assignment helps: samples sorted by cost
   inside a window (``cost_window``), of one source, of eight equal and of three different sources.
   The price is ``spread_of_steps``: standard deviation over mean of the steps' mean cost.
   ``step``: a step, drawn in order; ``steps_of``: the steps of a random sample in three epochs.
3. DeepSpeed's batch_by_seqlens and megapack on the same lengths: seconds (DeepSpeed's grow with the
   square of the number of documents), and whether all ranks of a step have equal tokens and shapes.
4. Time for the buckets of 1e6 steps, compared with numpy's shuffle of 1e6 numbers, and time for a
   random step.
5. Megatron's build_blending_indices and megapack on the same log-normal(0, 2) weights of 3 to
   20,000 sources: seconds for the source and rank of every position (one thread, from weights to
   arrays), the largest |taken(n) - weight x n| over all sources and positions, and megapack's time
   for a step of 4,096 samples at position 1e12, for which Megatron's table would need 10 TB.
   Megatron visits every source for every position; its time is proportional to the positions.
6. A run of 1e6 steps of 4 Mi tokens from 10,000 sources of 100,000 samples each (all share one
   index in memory): seconds to open it with 1 stage and with 4 (reversed blend, a fifth of the
   sources, 20 documents excluded); milliseconds of a random step ("cold": without a cached epoch)
   and of each question of ``megapack-build trace``; memory without the index.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from common import in_child, quick, take_turns, timed, write_results
from lengths import BUCKETS, LAWS, RANKS, TOKENS_PER_RANK, Lengths
from numpy.typing import NDArray

from megapack import _core
from megapack.data import BucketBatchSampler, Schedule, Stage, plan_exclusions, plan_run
from megapack.data.bucket_streams import whole_shares
from megapack.data.steps import _cycle
from megapack.packing import SampleIndex, pack

STEP_TOKENS = 4 << 20  # in the run of many sources
QUERIES = 100
FAR = range(10**12, 10**12 + 409_600, 4096)  # first positions of steps
TARGET = {1024: 1.01, 2048: 1.01, 4096: 1.01, 8192: 1.01, 16384: 1.06}


def sampler_of(schedule: Schedule, tokens: int, ranks: int = RANKS, rank: int = 0) -> Any:
    """Return a sampler of micro batches of this many tokens."""
    sizes = {"data_parallel_rank": rank, "data_parallel_size": ranks}
    return BucketBatchSampler(schedule, micro_batch_tokens=tokens, **sizes)


def balance(lengths: Lengths, steps_per_bucket: int) -> list[dict[str, Any]]:
    """Measure the imbalance per bucket: mean and largest of some steps."""
    index = pack(lengths, "bucket", buckets=BUCKETS)
    schedule = Schedule(index, tokens_per_step=RANKS * TOKENS_PER_RANK, seed=1)
    sampler = sampler_of(schedule, TOKENS_PER_RANK)
    found: dict[int, list[Any]] = {capacity: [] for capacity in BUCKETS}
    for step, bucket in enumerate(schedule.stages[0].draws.buckets(0, schedule.num_steps())):
        own = found[schedule.capacities[bucket]]
        if len(own) < steps_per_bucket:
            own += sampler.imbalance(step)
    return [
        {"case": f"bucket {capacity}, {TOKENS_PER_RANK // capacity} per rank", **_means(items)}
        | {"target": TARGET[capacity]}
        for capacity, items in found.items()
        if items
    ]


def windows(lengths: Lengths, capacity: int) -> list[dict[str, Any]]:
    """Measure the effect and the price of ``cost_window`` with one sample per rank and step."""
    unlike = [LAWS[name](len(lengths) // 4, 1) for name in ("pubmed", "bbc_news")]
    sources = {"one source": [lengths], "8 alike": np.array_split(lengths, 8)}
    rows = []
    for name, parts in (sources | {"3 unlike": [lengths, *unlike]}).items():
        indices = [pack(part, "best_fit_decreasing", buckets=[capacity]) for part in parts]
        options = {"weights": [1] * len(indices), "tokens_per_step": RANKS * capacity, "seed": 1}
        for window in (1, 4, 16, 64):
            schedule = Schedule(indices, cost_window=window, **options)
            sampler = sampler_of(schedule, capacity)
            steps = range(min(schedule.num_steps(), 64))
            items = [item for step in steps for item in sampler.imbalance(step)]
            ids = [schedule.step(step).sample_ids for step in steps]
            costs = [schedule.samples.attention_cost(own, capacity).mean() for own in ids]
            case = f"{capacity}, 1 per rank, {name}, window {window}"
            spread = float(np.std(costs) / np.mean(costs))
            rows.append({"case": case, **_means(items), "spread_of_steps": spread})
            rows[-1] |= _times(schedule)
    return rows


def _times(schedule: Schedule) -> dict[str, float]:
    """Return milliseconds of the first steps in order, and of the steps of a sample in 3 epochs."""
    num_steps = 3 * schedule.num_steps()
    steps, _ = timed(lambda: [schedule.step(i) for i in range(640)])
    samples = np.random.default_rng(0).integers(0, schedule.samples.num_samples, 50).tolist()
    found = [timed(partial(schedule.steps_of, sample, num_steps))[0] for sample in samples]
    ms = {"step": steps / 640, "steps_of_min": min(found), "steps_of": float(np.median(found))}
    return {f"{name}_ms": 1000 * seconds for name, seconds in ms.items()}


def _means(items: list[Any]) -> dict[str, Any]:
    return {
        "steps": len(items),
        "random": float(np.mean([item.attention_in_order for item in items])),
        "ours": float(np.mean([item.attention for item in items])),
        "worst": float(np.max([item.attention for item in items])),
    }


def beside_deepspeed(lengths: Lengths) -> dict[str, Any]:
    """Compare how DeepSpeed and megapack make steps for 8 ranks of 16,384 tokens."""
    from deepspeed.runtime.data_pipeline.data_sampling.variable_batch_size_and_lr import (  # noqa: PLC0415
        batch_by_seqlens,
    )

    logging.disable(logging.WARNING)
    ranks, tokens = 8, BUCKETS[-1]
    documents = np.minimum(lengths, tokens)
    values = documents.tolist()

    def theirs() -> Any:
        return batch_by_seqlens(values, max_tokens=tokens, effective_batch_size=ranks)[0]

    def ours() -> Any:
        index = pack(documents, "bucket", buckets=BUCKETS)
        schedule = Schedule(index, tokens_per_step=ranks * tokens)
        return [list(sampler_of(schedule, tokens, ranks, rank)) for rank in range(ranks)]

    found = take_turns({"theirs": theirs, "ours": ours}, windows=3)
    members = [own for _, own in theirs()]
    loads = np.array([documents[own].sum() for own in members]).reshape(-1, ranks)
    shapes = np.array([len(own) for own in members]).reshape(-1, ranks)
    our_shapes = np.array([[(len(b), b.capacity) for b in of_rank] for of_rank in ours()])
    our_loads = our_shapes.prod(axis=2)
    their_seconds, our_seconds = found["theirs"].seconds, found["ours"].seconds
    return {
        "documents": len(documents), "deepspeed_seconds": their_seconds,
        "ours_seconds": our_seconds, "ratio": their_seconds / our_seconds,
        "deepspeed_tokens_max_over_mean": float((loads.max(1) / loads.mean(1)).mean()),
        "deepspeed_equal_shapes": float((shapes.min(1) == shapes.max(1)).mean()),
        "ours_tokens_max_over_mean": float((our_loads.max(0) / our_loads.mean(0)).mean()),
        "ours_equal_shapes": float((our_shapes == our_shapes[0]).all(axis=(0, 2)).mean()),
    }  # fmt: skip


def speed(lengths: Lengths) -> list[dict[str, Any]]:
    """Time the buckets of 1e6 steps, and the samples of random steps."""
    index = pack(lengths, "bucket", buckets=BUCKETS)
    steps = np.random.default_rng(0).integers(0, 1_000_000, 300).tolist()
    rows = []
    for order in ("proportional", "uniform", "grow-p2"):
        schedule = Schedule(index, tokens_per_step=BUCKETS[-1], order=order)
        sides = {
            "all": lambda draws=schedule.stages[0].draws: draws.buckets(0, 1_000_000),
            "one": lambda schedule=schedule: [schedule.step(i) for i in steps],
            "shuffle": lambda: np.random.default_rng(0).permutation(1_000_000),
        }
        seconds = {name: timing.seconds for name, timing in take_turns(sides).items()}
        rows.append({
            "order": order, "epochs": 1_000_000 / schedule.num_steps(),
            "seconds_1e6_steps": seconds["all"],
            "over_a_shuffle": seconds["all"] / seconds["shuffle"], "goal": 10,
            "milliseconds_per_step": 1000 * seconds["one"] / len(steps),
        })  # fmt: skip
    return rows


def beside_megatron(num_positions: int, counts: Sequence[int]) -> list[dict[str, Any]]:
    """Time the source of every position of a blend, with Megatron's builder and megapack."""
    from megatron.core.datasets import helpers  # noqa: PLC0415

    rows = []
    for sources in counts:
        weights = weights_of(sources)

        def megatron(weights: Any = weights, sources: int = sources) -> Any:
            source = np.zeros(num_positions, np.int16)
            rank = np.zeros(num_positions, np.int64)
            helpers.build_blending_indices(source, rank, weights, sources, num_positions, False)
            return source, rank

        def blend(weights: Any = weights) -> _core.Blend:
            return _core.Blend(whole_shares([int(w * 2**100) for w in weights.tolist()]))

        def ours(blend: Any = blend) -> Any:
            which, first, count, places = blend().range(0, num_positions)
            source, rank = np.empty(num_positions, np.int32), np.empty(num_positions, np.int64)
            source[places] = np.repeat(which, count)
            starts = np.repeat(first - (np.cumsum(count) - count), count)
            rank[places] = starts + np.arange(num_positions)
            return source, rank

        found = take_turns({"megatron": megatron, "ours": ours})
        theirs, own = found["megatron"].seconds, found["ours"].seconds
        made = blend()
        far, _ = timed(lambda made=made: [made.range(b, b + 4096) for b in FAR])
        rows.append({
            "sources": sources, "positions": num_positions, "nanoseconds": far / 409_600 * 1e9,
            "megatron_seconds": theirs, "ours_seconds": own, "ratio": theirs / own,
            "megatron_hours_1e9": theirs / num_positions * 1e9 / 3600,
            "megatron_worst": worst_error(*megatron(), weights),
            "ours_worst": worst_error(*ours(), weights),
        })  # fmt: skip
    return rows


def worst_error(source: Any, rank: Any, weights: Any) -> float:
    """Return the largest |taken(n) - weight n|: it is just before or after a sample, or last."""
    at = np.arange(len(source))
    own = weights[source]
    last = np.bincount(source, minlength=len(weights)) - weights * len(source)
    errors = (rank - own * at, rank + 1 - own * (at + 1), last)
    return float(max(np.abs(error).max() for error in errors))


def weights_of(sources: int) -> NDArray[np.float64]:
    weights = np.random.default_rng(0).lognormal(0, 2, sources)
    return np.asarray(weights / weights.sum())


def program(lengths: NDArray[np.int32], num_sources: int, num_steps: int) -> list[dict[str, Any]]:
    """Measure opening a run of many sources, random steps, and questions about it."""
    index = pack(lengths, "bucket", buckets=BUCKETS)
    names = [f"source{number}" for number in range(num_sources)]
    weights = weights_of(num_sources).tolist()
    with tempfile.TemporaryDirectory() as folder:
        gone = Path(folder) / "gone.npy"
        np.save(gone, np.arange(0, len(lengths), len(lengths) // 20)[:20])
        stages = [
            Stage(from_step=num_steps // 4, weights=dict(zip(names, weights[::-1], strict=True))),
            Stage(from_step=num_steps // 2, weights=dict.fromkeys(names[::5], 1.0)),
            Stage(from_step=num_steps * 3 // 4, exclude={names[5]: str(gone)}),
        ]
        options = {"names": names, "weights": weights, "tokens_per_step": STEP_TOKENS}
        open_it = partial(Schedule, [index] * num_sources, **options)
        return [
            in_child(partial(measured, index, partial(open_it, stages=own), num_steps))
            for own in ([], stages)
        ]


def measured(index: SampleIndex, open_it: Callable[[], Schedule], num_steps: int) -> dict[str, Any]:
    seconds, schedule = timed(open_it)
    random = np.random.default_rng(1)
    steps = random.integers(0, num_steps, QUERIES).tolist()
    document = int(index.segment_document[0])
    sample = int(schedule.samples.bases[5]) + schedule.samples.samples_of(0, document)[0]
    questions: dict[str, Callable[[], Any]] = {
        "document": lambda: schedule.steps_of(sample, num_steps),
        "until": lambda: plan_run(schedule, num_steps),
        "excluded": lambda: plan_exclusions(schedule, num_steps),
    }
    schedule.stage_at(steps[0]).step_draws(steps[0])
    found = {name: [timed(ask)[0] for _ in range(9)] for name, ask in questions.items()}
    each = [timed(lambda i=i: schedule.stage_at(i).step_draws(i))[0] for i in steps]
    cold = []
    for i in steps[:5]:
        _cycle.cache_clear()
        cold.append(timed(lambda i=i: schedule.stage_at(i).step_draws(i))[0])
    ms = {"step": each, "cold_step": cold} | {f"trace_{name}": of for name, of in found.items()}
    about = {"sources": len(schedule.samples.indices), "samples": schedule.samples.num_samples}
    about |= {"steps": num_steps, "stages": len(schedule.stages), "open_seconds": seconds}
    return about | {f"{name}_ms": 1000 * float(np.median(of)) for name, of in ms.items()}


def main() -> None:
    n = 200_000 if quick() else 3_000_000
    lengths = LAWS["fineweb_edu_like"](n, 1)
    # Run this first: its forked processes start with the memory that this one has allocated.
    staged = program(lengths[:230_000], 1_000 if quick() else 10_000, 1_000_000)
    work, priced = balance(lengths, 10 if quick() else 100), windows(lengths, BUCKETS[-1])
    sizes = (2_000,) if quick() else (1_000, 2_000, 4_000)
    beside = [beside_deepspeed(lengths[:size]) for size in sizes]
    fast = speed(lengths)
    counts = (3, 1_000, 10_000, 20_000)
    blended = beside_megatron(50_000 if quick() else 200_000, counts)
    tables = {
        "DeepSpeed's batch_by_seqlens beside ours, 8 ranks of 16,384 tokens": beside,
        "which source of a blend": blended,
        "a program of many sources": staged,
        "the schedule itself": fast,
        "cost_window: the busiest rank over the mean, and the spread of the steps": priced,
        f"attention work of {RANKS} ranks, largest over mean": work,
    }
    write_results("schedule", [*work, *priced, *beside, *fast, *blended, *staged], **tables)


if __name__ == "__main__":
    main()
