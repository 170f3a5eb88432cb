"""How long a checkpoint stops training: written while it waits, and while it goes on.

The part of ``bench-train`` about ``checkpoint.asynchronous``. The same engine, the same steps, one
disk; "stopped" is what training waited, "durable" how long until the checkpoint counts, and
"step" the mean time of the steps taken meanwhile, beside that of steps without a checkpoint.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Any

from common import Timing, in_turns, timed

from megapack.training.engine.checkpoint import CheckpointStore
from megapack.training.engine.world import World

_QUIET_STEPS = 3


def save_times(
    engine: Any, here: World, directory: Path, step: Callable[[], None], rounds: int
) -> list[dict[str, Any]]:
    """Rows of a table, one per way; the median of the rounds.

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
        quiet = [timed(step)[0] for _ in range(_QUIET_STEPS)]
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
