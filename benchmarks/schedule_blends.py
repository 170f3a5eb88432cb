"""Part of ``make bench-schedule``: blends of many sources, and what a program of them costs.

1. Megatron's build_blending_indices and ours on the same log-normal(0, 2) weights of 3 to 20,000
   sources: seconds for the source and rank of every position (both in one thread, weights to
   arrays), the largest |taken(n) - weight x n| over all sources and positions n, and what a step
   of 4,096 samples costs ours at position 1e12, where Megatron's table would need 10 TB. Theirs
   looks at every source for every position, so its time for more positions is in proportion.
2. A run of 1e6 steps of 4 Mi tokens from 10,000 sources of 100,000 samples each (all of them one
   index in memory, so that 1e9 samples fit): seconds to open it with 1 stage and with 4 (the blend
   turned round, a fifth of the sources alone, 20 documents excluded); milliseconds of a step asked
   for at random, "cold" with nothing kept of its epoch, and of each question of ``megapack-build
   trace``; and memory beside the index.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from common import in_child, take_turns, timed
from numpy.typing import NDArray

from megapack import _core
from megapack.data import Schedule, Stage, plan_exclusions, plan_run
from megapack.data.bucket_order import _cycle, whole_shares
from megapack.packing import SampleIndex, pack

BUCKETS = [1024, 2048, 4096, 8192, 16384]
STEP_TOKENS = 4 << 20
QUERIES = 100


def beside_megatron(num_positions: int, counts: Sequence[int]) -> list[dict[str, Any]]:
    """Which source every position of a blend comes from, Megatron's builder and ours."""
    from megatron.core.datasets import helpers  # noqa: PLC0415

    rows = []
    for sources in counts:
        weights = weights_of(sources)

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

        found = take_turns({"megatron": megatron, "ours": ours})
        blend = _core.Blend(whole_shares([int(weight * 2**100) for weight in weights.tolist()]))
        far, _ = timed(lambda blend=blend: [blend.range(10**12 + i, 10**12 + i + 4096)
                                            for i in range(0, 409_600, 4096)])  # fmt: skip
        rows.append(
            {"sources": sources, "positions": num_positions, "nanoseconds": far / 409_600 * 1e9}
            | {f"{name}_seconds": timing.seconds for name, timing in found.items()}
            | {"ratio": found["megatron"].seconds / found["ours"].seconds}
            | {"megatron_hours_1e9": found["megatron"].seconds / num_positions * 1e9 / 3600}
            | {"megatron_worst": worst_error(*megatron(), weights)}
            | {"ours_worst": worst_error(*ours(), weights)}
        )
    return rows


def worst_error(source: Any, rank: Any, weights: Any) -> float:
    """Largest |taken(n) - weight n|: it is found just before or after a sample, or at the end."""
    at = np.arange(len(source))
    own = weights[source]
    last = np.bincount(source, minlength=len(weights)) - weights * len(source)
    errors = (rank - own * at, rank + 1 - own * (at + 1), last)
    return float(max(np.abs(error).max() for error in errors))


def weights_of(sources: int) -> NDArray[np.float64]:
    weights = np.random.default_rng(0).lognormal(0, 2, sources)
    return np.asarray(weights / weights.sum())


def program(lengths: NDArray[np.int32], num_sources: int, num_steps: int) -> list[dict[str, Any]]:
    """What opening a run of many sources costs, and any step and any question of it."""
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

        def opened(own: Sequence[Stage]) -> Schedule:
            return Schedule(
                [index] * num_sources,
                names=names,
                weights=weights,
                tokens_per_step=STEP_TOKENS,
                stages=own,
            )

        return [
            in_child(lambda own=own: measured(index, lambda: opened(own), num_steps))
            for own in ([], stages)
        ]


def measured(index: SampleIndex, open_it: Callable[[], Schedule], num_steps: int) -> dict[str, Any]:
    seconds, schedule = timed(open_it)
    random = np.random.default_rng(1)
    steps = random.integers(0, num_steps, QUERIES).tolist()
    document = int(index.segment_document[0])
    sample = int(schedule.samples.bases[5]) + schedule.samples.samples_of(0, document)[0]
    questions: dict[str, Callable[[], Any]] = {
        "step": lambda: [
            draw.sample_ids for draw in schedule.stage_at(steps[0]).step_draws(steps[0])
        ],
        "document": lambda: schedule.steps_of(sample, num_steps),
        "until": lambda: plan_run(schedule, num_steps),
        "excluded": lambda: plan_exclusions(schedule, num_steps),
    }
    found = {
        name: 1000 * np.median([timed(ask)[0] for _ in range(9)]) for name, ask in questions.items()
    }
    each = [timed(lambda i=i: schedule.stage_at(i).step_draws(i))[0] for i in steps]
    cold = []
    for i in steps[:5]:
        _cycle.cache_clear()
        cold.append(timed(lambda i=i: schedule.stage_at(i).step_draws(i))[0])
    return {
        "sources": len(schedule.samples.indices),
        "samples": schedule.samples.num_samples,
        "steps": num_steps,
        "stages": len(schedule.stages),
        "open_seconds": seconds,
        "step_ms": 1000 * float(np.median(each)),
        "cold_step_ms": 1000 * float(np.median(cold)),
    } | {f"trace_{name}_ms": float(value) for name, value in found.items() if name != "step"}
