"""The loop of a run: steps, and now and then a log line, an evaluation, a checkpoint.

``Trainer`` is the loop; ``TimedBatches`` hands it the micro batches of a step and says how long
they were waited for; ``BatchTrace`` writes down what every rank was fed.
"""

from __future__ import annotations

import itertools
import json
import logging
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

import torch

from megapack.attention.probe import probe
from megapack.data import Batch, PackedLoader, Schedule
from megapack.data.bucket_order import fold_key
from megapack.training.config import PretrainConfig
from megapack.training.engine.checkpoint import CheckpointStore
from megapack.training.engine.directory import RunDirectory
from megapack.training.engine.engine import train_step
from megapack.training.engine.inputs import Inputs
from megapack.training.engine.world import World
from megapack.training.evaluation.validation import evaluate_sources
from megapack.training.model.flops import ModelFlops
from megapack.training.model.training_model import on_device
from megapack.training.monitoring.monitor import Monitor, StepWork
from megapack.training.monitoring.signals import Agreement, StepProfiler, StopSignals

logger = logging.getLogger("megapack")


class TimedBatches:
    """Batches of a loader, step by step, and how long the trainer waited for them."""

    def __init__(self, loader: PackedLoader) -> None:
        self._loader = loader
        self._waited = 0.0
        self.imbalance = 1.0
        """Attention work of the busiest rank over the mean, in the present step."""

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


class Trainer:
    """Everything that a step needs; the same on all ranks."""

    def __init__(
        self,
        config: PretrainConfig,
        here: World,
        inputs: Inputs,
        *,
        engine: Any,
        run: RunDirectory,
        store: CheckpointStore,
        flops: ModelFlops,
        start: int,
        profile: range | None = None,
    ) -> None:
        self.config, self.here, self.inputs, self.engine = config, here, inputs, engine
        self.run_dir, self.store, self.flops = run, store, flops
        self.saved = self.begun = start  # steps in a checkpoint; in one on its way to the disk
        self.end = min(inputs.num_steps, config.stop_at or inputs.num_steps)
        self.save_began = self.save_waited = 0.0  # seconds
        self.note(start)
        self.batches = TimedBatches(inputs.loader(config, here, start, max(0, self.end - start)))
        self.monitor = Monitor(
            run,
            config.logging,
            here,
            samples=inputs.schedule.samples,
            num_steps=inputs.num_steps,
            start=start,
            max_skipped=config.optimizer.max_skipped,
        )
        self.profiler = StepProfiler(run.profile, here, profile)
        self.trace = BatchTrace(run, here, inputs.schedule) if config.logging.batches else None
        self.to_probe = config.model.probe and config.engine.sequence_parallel_size == 1

    def note(self, done: int) -> None:
        """So many optimizer steps are done."""
        self.done, self.tokens_seen = done, self.inputs.schedule.tokens_before(done)
        self.run_dir.at = {"step": done, "saved": self.saved}
        self.here.progress.at(f"the end of step {done - 1}")

    def run(self, signals: StopSignals) -> Literal["done", "signal", "stop_at"]:
        """Train to the end, to the step after a signal, or to ``stop_at``; which of them it was."""
        try:
            stopped = self.take_steps(signals)
            self.profiler.close()
            self.save()
            self.monitor.close()
        except FloatingPointError:  # on all ranks alike, and what was begun before is good
            self.finish_save()
            raise
        self.finish_save()
        if stopped:
            return "signal"
        return "stop_at" if self.done < self.inputs.num_steps else "done"

    def take_steps(self, signals: StopSignals) -> bool:
        """All that are left; whether a signal ended them."""
        agreement = Agreement(self.here.group)
        for step, micro_batches in self.batches.steps():
            self.profiler.begin(step)
            self.take(step, micro_batches)
            self.profiler.end(step)
            said = agreement.any(signals.received is not None, not self.store.is_written)
            stop, still_writing = said or (False, True)
            if stop:
                logger.warning("a signal came; saving after step %d", step)
                return True
            if not still_writing:
                self.finish_save()
            last = self.done == self.inputs.num_steps
            if _due(self.config.evaluation.every, self.done) or last:
                self.validate()
            if _due(self.config.checkpoint.every, self.done):
                self.save()
        return False

    def take(self, step: int, micro_batches: Iterable[Batch]) -> None:
        """One optimizer step."""
        inputs, config = self.inputs, self.config
        content = inputs.schedule.step(step)
        lr = config.learning_rate.at(step, num_steps=inputs.num_steps, peak=config.optimizer.lr)
        torch.manual_seed(fold_key(config.seed, step, self.here.rank))  # dropout, if there is
        if self.to_probe:
            micro_batches = self.probed(micro_batches)
        if self.trace is not None:
            micro_batches = self.trace.follow(micro_batches)
        result = train_step(
            self.engine, micro_batches, world=self.here, config=config.engine, lr=lr
        )
        self.note(step + 1)
        line = {
            "step": step,
            "tokens_seen": self.tokens_seen,
            "epoch": inputs.schedule.epochs(step),
            "epoch_end": inputs.schedule.epochs(self.done),
            "lr": lr,
            "data_wait": self.batches.waited(),
            "imbalance": self.batches.imbalance,
        }
        work = StepWork.of(inputs.schedule, content, self.flops)
        self.monitor.step(line, content=content, work=work, result=result)

    def probed(self, micro_batches: Iterable[Batch]) -> Iterator[Batch]:
        """The same; the model is tried on the first of them (``megapack.attention.probe``)."""
        self.to_probe = False
        coming = iter(micro_batches)
        batch = next(coming)
        dtype = next(self.engine.parameters()).dtype

        def forward(asked: Mapping[str, Any]) -> torch.Tensor:
            self.here.progress.at("the probe of the model")
            arguments = on_device({**asked}, self.here.device, self.config.engine)
            losses: torch.Tensor = self.engine(**arguments)[1]
            return losses.to(dtype)  # which says how far rounding goes

        self.engine.eval()
        try:
            with torch.compiler.set_stance("force_eager"):
                seconds = probe(
                    forward, batch, outputs="losses", counted=lambda asked: asked["labels"] >= 0
                )
        finally:
            self.engine.train()
        logger.info("documents of a micro batch are kept apart: probed in %.1f s", seconds)
        self.monitor.skip_time()
        return itertools.chain([batch], coming)

    def validate(self) -> None:
        """Perplexity of the held-out documents, and of those of every source."""
        if not self.inputs.held_out:
            return
        self.monitor.flush()
        result = evaluate_sources(
            self.engine,
            self.inputs.valid,
            self.inputs.valid_sources,
            world=self.here,
            config=self.config.engine,
            micro_batch_tokens=self.config.data.micro_batch_tokens,
            max_tokens=self.config.evaluation.max_tokens,
        )
        named = [f"{name} {part.perplexity:.4f}" for name, part in result.sources.items()]
        logger.info(
            "after step %d: validation perplexity %.4f%s",
            *(self.done - 1, result.perplexity, f" ({', '.join(named)})" if named else ""),
        )
        self.monitor.evaluation(self.done, self.tokens_seen, result.report())
        self.monitor.skip_time()

    def save(self) -> None:
        """Begin a checkpoint; the data order's state is one step number."""
        if self.begun == self.done:
            return
        self.finish_save()
        self.monitor.flush()
        state = {"data": self.inputs.schedule.state_dict(self.done)}
        self.save_began = time.perf_counter()
        self.store.begin(self.engine, self.done, self.tokens_seen, state)
        self.save_waited = time.perf_counter() - self.save_began
        self.begun = self.done
        self.monitor.skip_time()
        if not self.config.checkpoint.asynchronous:
            self.finish_save()

    def finish_save(self) -> None:
        """See to it that a checkpoint that was begun counts."""
        tag = self.store.finish()
        if tag is None:
            return
        self.saved = self.begun
        self.note(self.done)
        logger.info(
            "saved %s: training waited %.2f s, on the disk after %.2f s",
            *(self.store.directory / tag, self.save_waited, time.perf_counter() - self.save_began),
        )
        self.monitor.skip_time()


def _due(every: int | None, done: int) -> bool:
    return every is not None and done % every == 0
