"""Batches on their way to the engine: how long they were waited for, and what they were."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterable, Iterator

from megapack.data import Batch, PackedLoader, Schedule
from megapack.training.run.directory import RunDirectory
from megapack.training.run.world import World

__all__ = ["BatchTrace", "TimedBatches"]


class TimedBatches:
    """Batches of a loader, step by step, and how long the trainer waited for them."""

    def __init__(self, loader: PackedLoader) -> None:
        self._loader = loader
        self._waited = 0.0
        self.imbalance = 1.0
        """Of the step: largest over mean attention work of the ranks."""

    def steps(self) -> Iterator[tuple[int, Iterator[Batch]]]:
        """Every step with its micro batches of this rank, each gathered when it is asked for.

        A step ends with its last micro batch: the next one's is not waited for before the update.
        """
        batches = self._batches()
        for first in batches:
            rest = itertools.islice(batches, first["num_micro_steps"] - 1)
            yield int(first["step"]), itertools.chain([first], rest)

    def _batches(self) -> Iterator[Batch]:
        batches = iter(self._loader)
        while True:
            begin = time.perf_counter()
            batch = next(batches, None)
            self._waited += time.perf_counter() - begin
            if batch is None:
                return
            self.imbalance = batch["imbalance"]
            yield batch

    def waited(self) -> float:
        """Seconds waited since this was last asked."""
        waited, self._waited = self._waited, 0.0
        return waited


class BatchTrace:
    """What every rank was fed, one line per micro batch: ``batches/rank_00000.jsonl``."""

    def __init__(self, directory: RunDirectory, world: World, schedule: Schedule) -> None:
        self._schedule = schedule
        directory.batches.mkdir(parents=True, exist_ok=True)
        self._path = directory.batches / f"rank_{world.rank:05d}.jsonl"

    def follow(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Pass batches on, and write down what they are."""
        for batch in batches:
            line = {name: batch[name] for name in ("step", "micro_step", "bucket", "capacity")}
            line["tokens_seen"] = self._schedule.tokens_before(line["step"] + 1)
            line["sample_ids"] = batch["sample_ids"].tolist()
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
            yield batch
