"""The training loop: steps, log lines, validation, checkpoints.

``Trainer`` is the loop. ``TimedBatches`` yields the micro batches of a step and measures how long
the trainer waits for them. ``BatchTrace`` logs the samples of every micro batch.

Configured rules (``megapack.training.autopilot``) may change the run. After a loss spike, the
trainer loads the last checkpoint before the spike and skips the samples of the spike. Between two
steps, a mixing rule may set new weights of the sources. Both append a stage to the run's program
and reopen the data in the same processes.
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

from megapack.data import Batch, Schedule
from megapack.data.resume import ORDER_FIELDS, content_digests
from megapack.data.run import Decision, Decisions
from megapack.data.steps import fold_key
from megapack.errors import MegapackError
from megapack.probe.rows import check_rows, probed_labels
from megapack.training.autopilot import Spike, SpikeFound, SpikeWatch, next_mixture, report_of, skip
from megapack.training.config import PretrainConfig
from megapack.training.engine.checkpoint import CheckpointStore, Resume
from megapack.training.engine.directory import RunDirectory, append_jsonl, read_jsonl
from megapack.training.engine.engine import train_step
from megapack.training.engine.inputs import Inputs, verify_files
from megapack.training.engine.world import World
from megapack.training.model.flops import ModelFlops
from megapack.training.model.training_model import on_device
from megapack.training.monitoring.monitor import Monitor, StepWork
from megapack.training.monitoring.signals import Agreement, StepProfiler, StopSignals
from megapack.training.validation import num_scored, validate_sources

logger = logging.getLogger("megapack")

PROBE_STEPS = 32  # the probe looks for the smallest bucket in this many steps


class TimedBatches:
    """Batches of a loader, step by step; measures how long the trainer waits for them."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self._iterator: Iterator[Batch] = iter(())
        self._waited = 0.0
        self.imbalance = 1.0
        """Attention work of the busiest rank over the mean, in the current step."""

    def steps(self) -> Iterator[tuple[int, Iterator[Batch]]]:
        """Yield every step with an iterator over this rank's micro batches. Each batch is gathered
        on request, so an update does not wait for the next step's first batch."""
        batches = self._batches()
        for first in batches:
            following = itertools.islice(batches, first["num_micro_steps"] - 1)
            yield int(first["step"]), itertools.chain([first], following)

    def close(self) -> None:
        if isinstance(self._iterator, Generator):
            self._iterator.close()

    def _batches(self) -> Iterator[Batch]:
        batches = self._iterator = iter(self.loader)
        while True:
            begin = time.perf_counter()
            batch = next(batches, None)
            self._waited += time.perf_counter() - begin
            if batch is None:
                return
            self.imbalance = batch["imbalance"]
            yield batch

    def waited(self) -> float:
        waited, self._waited = self._waited, 0.0
        return waited


class BatchTrace:
    """Log of a rank's micro batches, one line each: ``batches/rank_00000.jsonl``."""

    def __init__(self, directory: RunDirectory, world: World, schedule: Schedule) -> None:
        self._schedule = schedule
        directory.batches.mkdir(parents=True, exist_ok=True)
        self._path = directory.batches / f"rank_{world.rank:05d}.jsonl"

    def follow(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        for batch in batches:
            line = {name: batch[name] for name in ("step", "micro_step", "bucket", "capacity")}
            line["tokens_seen"] = self._schedule.tokens_before(line["step"] + 1)
            line["sample_ids"] = batch["sample_ids"].tolist()
            append_jsonl(self._path, line)
            yield batch


class Trainer:
    """State of the training loop, the same on all ranks. ``find(tokens)`` returns the newest good
    checkpoint of at most that many tokens, and its store. ``record`` is the result of
    ``run_record``, for checkpoints."""

    def __init__(
        self,
        config: PretrainConfig,
        world: World,
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
        self.config, self.world, self.engine = config, world, engine
        self.run_dir, self.store, self.find, self.flops = run, store, find, flops
        self.stamps = inputs.file_stamps()
        self.record = record
        self.end = min(inputs.num_steps, config.stop_at or inputs.num_steps)
        self.save_began = self.save_waited = 0.0  # seconds
        self.decisions = inputs.decisions
        self.watch = SpikeWatch(config.autopilot) if config.autopilot.spikes else None
        self.monitor = Monitor(
            run,
            config.logging,
            world,
            samples=inputs.schedule.samples,
            num_steps=inputs.num_steps,
            start=start,
            max_skipped=config.optimizer.max_skipped,
            judge=None if self.watch is None else self.judge,
        )
        self.profiler = StepProfiler(run.profile, world, profile)
        self.to_probe = config.model.probe and config.engine.sequence_parallel_size == 1
        self.agreement = Agreement(world.group)
        self.saved = self.begun = start  # step of the last checkpoint: complete; begun
        self.batches = TimedBatches(())
        self.resume(inputs, start)

    def resume(self, inputs: Inputs, start: int) -> None:
        """Continue at step ``start``; ``inputs`` may have a different program from there on."""
        self.batches.close()
        self.inputs = inputs
        num_steps = max(0, self.end - start)
        self.batches = TimedBatches(inputs.loader(self.config, self.world, start, num_steps))
        traced = self.config.logging.batches
        self.trace = BatchTrace(self.run_dir, self.world, inputs.schedule) if traced else None
        self.set_step(start)

    def set_step(self, done: int) -> None:
        self.done, self.tokens_seen = done, self.inputs.schedule.tokens_before(done)
        self.run_dir.steps = {"step": done, "saved": self.saved}
        self.world.progress.at(f"the end of step {done - 1}")

    def run(self, signals: StopSignals) -> Literal["done", "signal", "stop_at"]:
        """Train until the end, a signal or ``stop_at``; return the reason."""
        try:
            if self.validation_is_due and self.done and self.world.on_first(self.not_validated):
                self.validate()
            if self.done < self.end:
                logger.info("training steps %s to %s", f"{self.done + 1:,}", f"{self.end:,}")
            stopped = None
            while stopped is None:
                try:
                    stopped = self.train(signals)
                    self.save()
                except SpikeFound as found:  # raised on all ranks
                    stopped = None
                    self.roll_back(found.spike)
            self.profiler.close()
            self.monitor.close()
            self.finish_save()
            if self.store.mirror is not None:
                logger.info("waiting for the mirror, %s", self.store.mirror.address)
            self.store.wait_for_mirror()
        except FloatingPointError:  # on all ranks; finish a checkpoint that was begun earlier
            self.finish_save()
            raise
        if stopped:
            return "signal"
        return "stop_at" if self.done < self.inputs.num_steps else "done"

    def train(self, signals: StopSignals) -> bool:
        """Train the remaining steps; return True if a signal ended them."""
        while True:
            self.mix()
            for step, micro_batches in self.batches.steps():
                self.profiler.begin(step)
                self.step(step, micro_batches)
                self.profiler.end(step)
                answers = self.agreement.any(
                    signals.received is not None, not self.store.is_written
                )
                stop, still_writing = answers or (False, True)
                if stop:
                    logger.warning("received a signal; saving after step %d", self.done)
                    return True
                if not still_writing:
                    self.finish_save()
                if self.validation_is_due:
                    self.validate()
                if self.config.checkpoint.is_due(self.done):
                    self.save()
                if self.mixture_is_due:
                    break
            else:
                return False

    def step(self, step: int, micro_batches: Iterable[Batch]) -> None:
        """Take one optimizer step and log it."""
        inputs, config = self.inputs, self.config
        content = inputs.schedule.step(step)
        lr = config.learning_rate.at(step, num_steps=inputs.num_steps, peak=config.optimizer.lr)
        torch.manual_seed(fold_key(config.seed, step, self.world.rank))  # for dropout
        if self.to_probe:
            self.probe()
        if self.trace is not None:
            micro_batches = self.trace.follow(micro_batches)
        result = train_step(
            self.engine, micro_batches, world=self.world, config=config.engine, lr=lr
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
        """Probe the model (``megapack.probe.rows``) on a micro batch of a small bucket: in the
        largest bucket, that of the first micro batch, one document may fill a row."""
        self.to_probe = False
        end = min(self.done + PROBE_STEPS, self.end)
        step = self.inputs.schedule.shortest_step(self.done, end)

        def batches_of(step: int) -> Iterable[Batch]:
            sampler = copy(self.batches.loader.sampler)
            sampler.start_step, sampler.num_steps = step, 1
            loader: Iterable[Batch] = replace(self.batches.loader, sampler=sampler)
            return loader

        batch = min(batches_of(step), key=lambda batch: int(batch["capacity"]))
        longest = max(batches_of(self.done), key=lambda batch: int(batch["capacity"]))

        def forward(variant: Mapping[str, Any]) -> torch.Tensor:
            self.world.progress.at("the probe of the model")
            few = {**variant, "labels": probed_labels(variant)}
            arguments = on_device(few, self.world.device, self.config.engine)
            losses: torch.Tensor = self.engine(**arguments, few_labels=True)[1]
            return losses

        logger.info("probing whether documents of a micro batch depend on each other")
        self.engine.eval()
        try:
            with torch.compiler.set_stance("force_eager"):
                seconds = check_rows(
                    forward,
                    batch,
                    counted=lambda variant: probed_labels(variant) >= 0,
                    longest=longest,
                    any_length=True,
                )
        finally:
            self.engine.train()
        logger.info("documents of a micro batch are kept apart: probed in %.1f s", seconds)
        self.monitor.skip_time()
        self.batches.waited()  # skip_time already covers this wait

    # ---- Decisions of the run (``megapack.training.autopilot``)

    def judge(self, lines: Sequence[dict[str, Any]]) -> None:
        """Check log lines on the first rank; raise SpikeFound on all ranks if it finds a spike."""
        assert self.watch is not None
        watch, settings_at = self.watch, self.inputs.schedule.settings_at

        def first_spike() -> Spike | None:
            for line in lines:
                settings = settings_at(line["step"])._replace(begin=0, skip_steps=0, skipped=())
                if (spike := watch.look(line, repr(settings))) is not None:
                    return spike
            return None

        spike = self.world.on_first(first_spike)
        if spike is not None:
            raise SpikeFound(spike)

    def decide(self, decision: Decision) -> Inputs:
        """Append a decision to the program and reopen the data; collective."""
        decisions = self.decisions or Decisions(
            num_epochs=self.config.num_epochs, num_steps=self.inputs.num_steps
        )
        decisions = decisions.with_new(decision)
        inputs = Inputs(self.config, decisions)  # raises before an invalid stage is written
        self.check_files(inputs)

        def write() -> None:
            decisions.write(self.run_dir.path)
            self.run_dir.record("decision")

        self.world.on_first(write)
        self.decisions = decisions
        return inputs

    def check_files(self, inputs: Inputs | None = None) -> None:
        """Check that the data files are those that the run started with; collective. Without
        freshly opened ``inputs``, opens the files only if the inode, size or modification time of
        one changed, once per host. Raises ResumeError on all ranks if samples, bytes or the
        manifest changed."""
        problem = None
        stamps = self.inputs.file_stamps()
        changed = [path for path, stamp in stamps.items() if stamp != self.stamps[path]]
        reads = self.world.is_first_of_host() and bool(changed)
        if inputs is not None or reads:
            try:
                inputs = inputs or Inputs(self.config, self.decisions)
                problem = self._difference(inputs)
                if problem is None and reads:
                    verify_files(inputs)  # the digests are of sampled blocks
            except (MegapackError, OSError) as error:
                problem = str(error)
        if problem is not None and changed:
            problem = f"{', '.join(changed[:3])}: {problem}"
        what = "the data changed while the run was reading them. Restore the files, and start the "
        what += "run again from its last checkpoint"
        self.world.fail_together(problem, what)
        self.stamps = stamps  # the files may be new copies with the same content

    def _difference(self, fresh: Inputs) -> str | None:
        """Return how opened data differ from those that the run started with."""
        if fresh.fingerprints() != self.inputs.fingerprints():
            return "another fingerprint of documents or samples"
        digests = json.loads(json.dumps(content_digests(fresh.data)))
        if digests != self.record["data.content"]:
            return "other bytes of the same lengths"
        return None if fresh.blend == self.inputs.blend else "another manifest of the blend"

    def roll_back(self, spike: Spike) -> None:
        """Load the last good checkpoint before a spike; continue without the spike's steps."""
        self.finish_save()
        decisions = self.decisions or Decisions(num_epochs=1, num_steps=1)
        decision = skip(spike, self.config.autopilot, decisions, self.done)
        resume, store = self.find(self.inputs.schedule.tokens_before(decision.begin))
        if resume is None:
            raise FloatingPointError(
                f"{spike.reason}; there is no checkpoint of step {decision.begin} or before to "
                "return to: lower checkpoint.every, or raise checkpoint.keep"
            )
        # Abandon newer checkpoints before writing the decision: if the process is killed between
        # the two, the run resumes from `resume` and meets the spike again. In the other order it
        # would resume, with the decision, from a state that was trained without it.
        self.store.abandon_after(resume.tag)
        inputs = self.decide(decision)
        store.load(self.engine, resume)
        state = resume.manifest.state
        allowed = set(self.config.checkpoint.allow_change) & ORDER_FIELDS
        start = inputs.schedule.resume_step(state["data"], allowed)
        logger.warning(
            "autopilot: %s; back to step %d, %d steps are skipped from step %d on "
            "(megapack-build trace %s --skipped)",
            *(spike.reason, start, decision.stage.skip_steps, decision.begin),
            self.run_dir.path / "config.yaml",
        )
        self.restore_monitors(state, start)

        def truncate() -> None:
            self.run_dir.truncate_logs(inputs.schedule.tokens_before(start))
            self.run_dir.record("rollback")

        self.world.on_first(truncate)
        self.saved = self.begun = start
        self.resume(inputs, start)

    def restore_monitors(self, state: Mapping[str, Any], start: int) -> None:
        self.monitor.begin(start)
        if self.watch is not None:
            self.watch.restore(state.get("watch", {}))

    @property
    def mixture_is_due(self) -> bool:
        """True if the mixing rule must run before the next step."""
        if self.config.mixing.rule is None or not 0 < self.done < self.end:
            return False
        decisions = self.decisions.decisions if self.decisions else ()
        answered = any(d.by == "mixing" and not d.void and d.begin == self.done for d in decisions)
        return self.done % self.config.mixing.every == 0 and not answered

    def mix(self) -> None:
        """Run the mixing rule if it is due, on the first rank, and adopt its weights."""
        if not self.mixture_is_due:
            return
        self.monitor.flush()
        schedule, samples = self.inputs.schedule, self.inputs.schedule.samples
        weights_now = schedule.settings_at(self.done).weights
        sizes = samples.tokens_per_epoch.tolist()
        shares = [n if w is None else w for w, n in zip(weights_now, sizes, strict=True)]
        report = partial(
            report_of,
            decisions=self.decisions,
            weights=dict(zip(samples.names, shares, strict=True)),
            num_steps=self.inputs.num_steps,
            step=self.done,
        )
        decision = self.world.on_first(
            lambda: next_mixture(self.config.mixing, report(read_jsonl(self.run_dir.log)))
        )
        weights = decision.stage.weights or {}
        logger.info(
            "mixing after step %d: %s (losses: %s)",
            *(self.done, ", ".join(f"{n} {w:.4g}" for n, w in weights.items())),
            decision.reason,
        )
        self.resume(self.decide(decision), self.done)
        self.monitor.skip_time()

    @property
    def validation_is_due(self) -> bool:
        """True if validation is due after the steps done so far."""
        every, done = self.config.evaluation.every, self.done
        return done == self.inputs.num_steps or (every is not None and done % every == 0)

    def not_validated(self) -> bool:
        path = self.run_dir.evaluation  # missing if a signal stopped the run before validation
        lines = read_jsonl(path) if path.exists() else ()
        return all(line["step"] != self.done for line in lines)

    def validate(self) -> None:
        """Log the perplexity of all held-out documents, and of those of every source."""
        if not self.inputs.held_out:
            return
        self.monitor.flush()
        score = partial(
            validate_sources,
            self.engine,
            self.inputs.valid,
            self.inputs.valid_sources,
            world=self.world,
            config=self.config.engine,
            micro_batch_tokens=self.config.data.micro_batch_tokens,
            max_tokens=self.config.evaluation.max_tokens,
        )
        count = num_scored(self.inputs.held_out, self.config.evaluation.max_tokens)
        logger.info("after step %d: validating on %s samples", self.done, f"{count:,}")
        result = score()
        report = result.report()
        if (average := self.engine.weight_average) is not None:
            with average.in_model():
                report["average"] = score().report()
        named = [f"{name} {part.perplexity:.4f}" for name, part in result.sources.items()]
        logger.info(
            "after step %d: validation perplexity %.4f%s",
            *(self.done, result.perplexity, f" ({', '.join(named)})" if named else ""),
        )
        self.monitor.evaluation(self.done, self.tokens_seen, report)
        self.monitor.skip_time()

    @property
    def next_rate(self) -> float:
        """Learning rate of the next step; after the last step, of the last step."""
        config, num_steps = self.config, self.inputs.num_steps
        step = min(self.done, num_steps - 1)
        return config.learning_rate.at(step, num_steps=num_steps, peak=config.optimizer.lr)

    def save(self) -> None:
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
            state["watch"] = self.world.on_first(self.watch.state)
        logger.info("saving step %d", self.done)
        self.save_began = time.perf_counter()
        try:
            self.store.begin(self.engine, self.done, self.tokens_seen, state)
        except FloatingPointError as error:  # weights are not finite; raised on all ranks
            if self.watch is None:
                raise
            raise SpikeFound(Spike(self.done - 1, self.done - 1, str(error))) from error
        self.save_waited = time.perf_counter() - self.save_began
        self.begun = self.done
        self.monitor.skip_time()
        if not self.config.checkpoint.asynchronous:
            self.finish_save()

    def finish_save(self) -> None:
        tag = self.store.finish()
        if tag is None:
            return
        self.saved = self.begun
        self.set_step(self.done)
        self.world.on_first(lambda: self.run_dir.record("checkpoint"))
        logger.info(
            "saved %s: training waited %.2f s, on the disk after %.2f s",
            *(self.store.directory / tag, self.save_waited, time.perf_counter() - self.save_began),
        )
        self.monitor.skip_time()
