"""The loop of a run: steps, and now and then a log line, an evaluation, a checkpoint.

``Trainer`` is the loop; ``TimedBatches`` hands it the micro batches of a step and says how long
they were waited for; ``BatchTrace`` writes down what every rank was fed.

Where the configuration has rules (``megapack.training.autopilot``) the loop obeys them: after a
spike it loads the last checkpoint of before and goes on from there, past what did it; and between
two steps the sources may be given other weights. Both append a stage to the run's program and open
its data anew, in the same processes.
"""

from __future__ import annotations

import itertools
import json
import logging
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch

from megapack.attention.probe import probe
from megapack.data import Batch, Schedule
from megapack.data.resume import ORDER_FIELDS, content_digests
from megapack.data.run import Decision, Decisions
from megapack.data.steps import fold_key
from megapack.errors import MegapackError
from megapack.training.autopilot import Spike, SpikeFound, SpikeWatch, next_mixture, report_of, skip
from megapack.training.config import PretrainConfig
from megapack.training.engine.checkpoint import CheckpointStore, Resume
from megapack.training.engine.directory import RunDirectory, append_jsonl, read_jsonl
from megapack.training.engine.engine import train_step
from megapack.training.engine.inputs import Inputs, open_inputs
from megapack.training.engine.world import World
from megapack.training.model.flops import ModelFlops
from megapack.training.model.training_model import on_device
from megapack.training.monitoring.monitor import Monitor, StepWork
from megapack.training.monitoring.signals import Agreement, StepProfiler, StopSignals
from megapack.training.validation import validate_sources

logger = logging.getLogger("megapack")

LOOKED_AT = 32  # steps among which a micro batch is chosen to probe the model on


class TimedBatches:
    """Batches of a loader, step by step, and how long the trainer waited for them."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self._coming: Iterator[Batch] = iter(())
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

    def close(self) -> None:
        """End what prepares batches; they are not asked for any more."""
        if isinstance(self._coming, Generator):
            self._coming.close()

    def _batches(self) -> Iterator[Batch]:
        batches = self._coming = iter(self.loader)
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
            append_jsonl(self._path, line)
            yield batch


class Trainer:
    """Everything that a step needs; the same on all ranks.

    ``find``: the newest good checkpoint of at most so many tokens, and where it lies.
    """

    def __init__(
        self,
        config: PretrainConfig,
        here: World,
        inputs: Inputs,
        *,
        engine: Any,
        run: RunDirectory,
        store: CheckpointStore,
        find: Callable[[int], tuple[Resume | None, CheckpointStore]],
        flops: ModelFlops,
        record: Mapping[str, Any],
        start: int,
        profile: range | None = None,
    ) -> None:
        self.config, self.here, self.engine = config, here, engine
        self.run_dir, self.store, self.find, self.flops = run, store, find, flops
        self.stamps = inputs.file_stamps()
        self.record = record  # ``run_record``, for checkpoints
        self.end = min(inputs.num_steps, config.stop_at or inputs.num_steps)
        self.save_began = self.save_waited = 0.0  # seconds
        self.decisions = inputs.decisions
        self.watch = SpikeWatch(config.autopilot) if config.autopilot.spikes else None
        self.monitor = Monitor(
            run,
            config.logging,
            here,
            samples=inputs.schedule.samples,
            num_steps=inputs.num_steps,
            start=start,
            max_skipped=config.optimizer.max_skipped,
            judge=None if self.watch is None else self.judge,
        )
        self.profiler = StepProfiler(run.profile, here, profile)
        self.to_probe = config.model.probe and config.engine.sequence_parallel_size == 1
        self.agreement = Agreement(here.group)
        self.saved = self.begun = start  # steps in a checkpoint; in one on its way to the disk
        self.batches = TimedBatches(())
        self.resume(inputs, start)

    def resume(self, inputs: Inputs, start: int) -> None:
        """From a step on, with a program that may be another one from there on."""
        self.batches.close()
        self.inputs = inputs
        left = max(0, self.end - start)
        self.batches = TimedBatches(inputs.loader(self.config, self.here, start, left))
        traced = self.config.logging.batches
        self.trace = BatchTrace(self.run_dir, self.here, inputs.schedule) if traced else None
        self.set_step(start)

    def set_step(self, done: int) -> None:
        """So many optimizer steps are done."""
        self.done, self.tokens_seen = done, self.inputs.schedule.tokens_before(done)
        self.run_dir.at = {"step": done, "saved": self.saved}
        self.here.progress.at(f"the end of step {done - 1}")

    def run(self, signals: StopSignals) -> Literal["done", "signal", "stop_at"]:
        """Train to the end, to the step after a signal, or to ``stop_at``; which of them it was."""
        try:
            if self.validation_is_due and self.done and self.here.on_first(self.left_out):
                self.validate()
            stopped = None
            while stopped is None:
                try:
                    stopped = self.train(signals)
                    self.save()
                except SpikeFound as found:  # on all ranks alike
                    stopped = None
                    self.roll_back(found.spike)
            self.profiler.close()
            self.monitor.close()
            self.finish_save()
            self.store.wait_for_mirror()
        except FloatingPointError:  # on all ranks alike, and what was begun before is good
            self.finish_save()
            raise
        if stopped:
            return "signal"
        return "stop_at" if self.done < self.inputs.num_steps else "done"

    def train(self, signals: StopSignals) -> bool:
        """All that are left; whether a signal ended them."""
        while True:
            self.mix()
            for step, micro_batches in self.batches.steps():
                self.profiler.begin(step)
                self.step(step, micro_batches)
                self.profiler.end(step)
                said = self.agreement.any(signals.received is not None, not self.store.is_written)
                stop, still_writing = said or (False, True)
                if stop:
                    logger.warning("a signal came; saving after step %d", step)
                    return True
                if not still_writing:
                    self.finish_save()
                if self.validation_is_due:
                    self.validate()
                if self.config.checkpoint.is_due(self.done):
                    self.save()
                if self.to_mix:
                    break
            else:
                return False

    def step(self, step: int, micro_batches: Iterable[Batch]) -> None:
        """One optimizer step."""
        inputs, config = self.inputs, self.config
        content = inputs.schedule.step(step)
        lr = config.learning_rate.at(step, num_steps=inputs.num_steps, peak=config.optimizer.lr)
        torch.manual_seed(fold_key(config.seed, step, self.here.rank))  # dropout, if there is
        if self.to_probe:
            self.probe()
        if self.trace is not None:
            micro_batches = self.trace.follow(micro_batches)
        result = train_step(
            self.engine, micro_batches, world=self.here, config=config.engine, lr=lr
        )
        self.set_step(step + 1)
        work = StepWork.of(inputs.schedule, content, self.flops)
        line = {
            "step": step,
            "tokens_seen": self.tokens_seen,
            "epoch": inputs.schedule.epochs(step),
            "epoch_end": inputs.schedule.epochs(self.done),
            "lr": lr,
            "data_wait": self.batches.waited(),
            "imbalance": self.batches.imbalance,
            "padding": 1 - work.useful_tokens / self.batches.loader.sampler.num_positions(step),
        }
        self.monitor.step(line, content=content, work=work, result=result)

    def probe(self) -> None:
        """Try the model (``megapack.attention.probe``) on a micro batch of a small bucket.

        Not on the first one: that is of the largest bucket, where a row may be one document.
        """
        self.to_probe = False
        soon = min(self.done + LOOKED_AT, self.end)
        step = self.inputs.schedule.shortest_step(self.done, soon)

        def batches_of(step: int) -> Iterable[Batch]:
            sampler = copy(self.batches.loader.sampler)
            sampler.start_step, sampler.num_steps = step, 1
            of_step: Iterable[Batch] = replace(self.batches.loader, sampler=sampler)
            return of_step

        batch = min(batches_of(step), key=lambda batch: int(batch["capacity"]))
        longest = max(batches_of(self.done), key=lambda batch: int(batch["capacity"]))
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
                    forward,
                    batch,
                    outputs="losses",
                    counted=lambda asked: asked["labels"] >= 0,
                    longest=longest,
                    any_length=True,
                )
        finally:
            self.engine.train()
        logger.info("documents of a micro batch are kept apart: probed in %.1f s", seconds)
        self.monitor.skip_time()
        self.batches.waited()  # within that time

    # ---- What the run decides itself (``megapack.training.autopilot``)

    def judge(self, lines: Sequence[dict[str, Any]]) -> None:
        """Look at lines of the log, on the first rank. Raises SpikeFound on all ranks."""
        assert self.watch is not None
        watch, settings_at = self.watch, self.inputs.schedule.settings_at

        def look() -> Spike | None:
            spikes = (
                watch.look(
                    line,
                    repr(settings_at(line["step"])._replace(begin=0, skip_steps=0, skipped=())),
                )
                for line in lines
            )
            return next(filter(None, spikes), None)

        spike = self.here.on_first(look)
        if spike is not None:
            raise SpikeFound(spike)

    def decide(self, decision: Decision) -> Inputs:
        """Append a decision to the program; what the run reads from now on. Collective."""
        decided = self.decisions or Decisions(
            num_epochs=self.config.num_epochs, num_steps=self.inputs.num_steps
        )
        decided = decided.with_new(decision)
        inputs = open_inputs(self.config, decided)  # what cannot be is not written down
        self.check_files(inputs)
        self.here.on_first(lambda: decided.write(self.run_dir.path))
        self.decisions = decided
        return inputs

    def check_files(self, inputs: Inputs | None = None) -> None:
        """Refuse files that were replaced or changed since the start; collective.

        Args:
            inputs: opened now; None: opened here if a file has another inode, size or time.

        Raises:
            ResumeError: a source has other samples or bytes, or the manifest of the blend changed.
        """
        problem = None
        stamps = self.inputs.file_stamps()
        if inputs is None and stamps == self.stamps:
            pass
        else:
            try:
                fresh = inputs or open_inputs(self.config, self.decisions)
                problem = self._difference(fresh)
            except (MegapackError, OSError) as error:
                problem = str(error)
        changed = [path for path, stamp in stamps.items() if stamp != self.stamps[path]]
        what = f"the data changed while the run was reading them ({', '.join(changed[:3])}). "
        what += "Restore the files, and start the run again from its last checkpoint"
        self.here.fail_together(problem, what)
        self.stamps = stamps  # a copy with the same content

    def _difference(self, fresh: Inputs) -> str | None:
        """Return how opened data differ from those that the run started with."""
        if fresh.fingerprints() != self.inputs.fingerprints():
            return "another fingerprint of documents or samples"
        digests = json.loads(json.dumps(content_digests(fresh.data)))
        if digests != self.record["data.content"]:
            return "other bytes of the same lengths"
        return None if fresh.blend == self.inputs.blend else "another manifest of the blend"

    def roll_back(self, spike: Spike) -> None:
        """To the last good checkpoint of before a spike, and on from there without its steps."""
        self.finish_save()
        decided = self.decisions or Decisions(num_epochs=1, num_steps=1)
        decision = skip(spike, self.config.autopilot, decided, self.done)
        found, home = self.find(self.inputs.schedule.tokens_before(decision.begin))
        if found is None:
            raise FloatingPointError(
                f"{spike.reason}; no checkpoint of step {decision.begin} or before is left to go "
                "back to: lower checkpoint.every, or raise checkpoint.keep"
            )
        # First of all, for whoever is killed here: no program has both the decision and what was
        # trained without it. Killed before the decision, the run goes on from `found` and meets the
        # spike again.
        self.store.abandon_after(found.tag)
        inputs = self.decide(decision)
        home.load(self.engine, found)
        state = found.manifest.state
        allowed = set(self.config.checkpoint.allow_change) & ORDER_FIELDS
        start = inputs.schedule.resume_step(state["data"], allowed)
        logger.warning(
            "autopilot: %s; back to step %d, %d steps are skipped from step %d on "
            "(megapack-build trace %s --skipped)",
            *(spike.reason, start, decision.stage.skip_steps, decision.begin),
            self.run_dir.path / "config.yaml",
        )
        self.begin_again(state, start)
        self.here.on_first(lambda: self.run_dir.forget_after(inputs.schedule.tokens_before(start)))
        self.saved = self.begun = start
        self.resume(inputs, start)

    def begin_again(self, state: Mapping[str, Any], start: int) -> None:
        """Bring what looks at steps to where a checkpoint was taken."""
        self.monitor.begin(start)
        if self.watch is not None:
            self.watch.restore(state.get("watch", {}))

    @property
    def to_mix(self) -> bool:
        """Whether the rule for mixtures is to be asked before the next step."""
        if self.config.mixing.rule is None or not 0 < self.done < self.end:
            return False
        made = self.decisions.decisions if self.decisions else ()
        asked = any(d.by == "mixing" and not d.void and d.begin == self.done for d in made)
        return self.done % self.config.mixing.every == 0 and not asked

    def mix(self) -> None:
        """Ask the rule for mixtures, if it is time; on the first rank, for all."""
        if not self.to_mix:
            return
        self.monitor.flush()
        schedule, samples = self.inputs.schedule, self.inputs.schedule.samples
        held = schedule.settings_at(self.done).weights
        sizes = samples.tokens_per_epoch.tolist()
        given = [n if weight is None else weight for weight, n in zip(held, sizes, strict=True)]
        report = partial(
            report_of,
            decisions=self.decisions,
            weights=dict(zip(samples.names, given, strict=True)),
            num_steps=self.inputs.num_steps,
            step=self.done,
        )
        decision = self.here.on_first(
            lambda: next_mixture(self.config.mixing, report(read_jsonl(self.run_dir.log)))
        )
        weights = decision.stage.weights or {}
        logger.info(
            "mixing after step %d: %s (losses: %s)",
            *(self.done - 1, ", ".join(f"{n} {w:.4g}" for n, w in weights.items())),
            decision.reason,
        )
        self.resume(self.decide(decision), self.done)
        self.monitor.skip_time()

    @property
    def validation_is_due(self) -> bool:
        """Whether the steps that are done call for one."""
        every, done = self.config.evaluation.every, self.done
        return done == self.inputs.num_steps or (every is not None and done % every == 0)

    def left_out(self) -> bool:
        """Whether the validation of now is still to do: a signal does not wait for it."""
        path = self.run_dir.evaluation
        lines = read_jsonl(path) if path.exists() else ()
        return all(line["step"] != self.done for line in lines)

    def validate(self) -> None:
        """Perplexity of the held-out documents, and of those of every source."""
        if not self.inputs.held_out:
            return
        self.monitor.flush()
        score = partial(
            validate_sources,
            self.engine,
            self.inputs.valid,
            self.inputs.valid_sources,
            world=self.here,
            config=self.config.engine,
            micro_batch_tokens=self.config.data.micro_batch_tokens,
            max_tokens=self.config.evaluation.max_tokens,
        )
        result = score()
        report = result.report()
        if (average := self.engine.weight_average) is not None:
            with average.in_model():
                report["average"] = score().report()
        named = [f"{name} {part.perplexity:.4f}" for name, part in result.sources.items()]
        logger.info(
            "after step %d: validation perplexity %.4f%s",
            *(self.done - 1, result.perplexity, f" ({', '.join(named)})" if named else ""),
        )
        self.monitor.evaluation(self.done, self.tokens_seen, report)
        self.monitor.skip_time()

    @property
    def next_rate(self) -> float | None:
        """Learning rate of the next step; None after the last one."""
        if self.done >= self.inputs.num_steps:
            return None
        config, num_steps = self.config, self.inputs.num_steps
        return config.learning_rate.at(self.done, num_steps=num_steps, peak=config.optimizer.lr)

    def save(self) -> None:
        """Begin a checkpoint; the data order's state is one step number."""
        if self.begun == self.done:
            return
        self.finish_save()
        self.check_files()
        self.monitor.flush()
        state: dict[str, Any] = {
            "data": self.inputs.schedule.state_dict(self.done),
            "run": self.record,
            "lr": self.next_rate,
        }
        if self.decisions is not None:
            state["decisions"] = self.decisions.tree
        if self.watch is not None:
            state["watch"] = self.here.on_first(self.watch.state)
        self.save_began = time.perf_counter()
        try:
            self.store.begin(self.engine, self.done, self.tokens_seen, state)
        except FloatingPointError as error:  # of weights, on all ranks alike
            if self.watch is None:
                raise
            raise SpikeFound(Spike(self.done - 1, self.done - 1, str(error))) from error
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
        self.set_step(self.done)
        logger.info(
            "saved %s: training waited %.2f s, on the disk after %.2f s",
            *(self.store.directory / tag, self.save_waited, time.perf_counter() - self.save_began),
        )
        self.monitor.skip_time()
