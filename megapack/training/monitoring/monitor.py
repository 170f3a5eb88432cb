"""Log of a run: one JSON line per step, a regular log line, TensorBoard, Weights & Biases.

``Monitor`` collects steps and writes them. ``StepWork`` counts tokens and operations of a step from
the index alone; ``SourceLosses`` computes the loss of every source of a blend. Losses stay on the
device until a log line is due, so that steps do not wait for it.

    step 40/200, loss 3.1042 (web 3.2100, code 2.4100), lr 3.00e-04, bucket 4096, 91,000 tok/s
    (90,400 useful), wait 0.1%, MFU 41.2% (naive 55.0%), 60.1 GiB, 0:12:30 left
"""

from __future__ import annotations

import logging
import math
import resource
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from statistics import median_low
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from megapack.data import Schedule, Step
from megapack.data.batch import cut_lengths
from megapack.data.sources import SampleSource
from megapack.training.config import LoggingConfig
from megapack.training.engine.directory import RunDirectory, append_jsonl, is_lost
from megapack.training.engine.engine import StepResult
from megapack.training.engine.world import World
from megapack.training.model.flops import ModelFlops, peak_of
from megapack.training.monitoring.slowdowns import Slowdowns

_SHOWN = 8  # sources in a log line; log.jsonl and TensorBoard have all
# Key of a log line -> field of ``StepResult``, for losses that not every model has.
_OTHER_LOSSES = {"load_balancing_loss": "balance_sum", "distillation_loss": "divergence_sum"}
logger = logging.getLogger("megapack")


@dataclass(frozen=True, kw_only=True)
class StepWork:
    """Tokens and operations of one step."""

    tokens: int  # all tokens, with padding
    useful_tokens: int  # tokens of documents that are not masked
    flops: float
    """Model FLOPs: tokens of documents, attention within segments and window."""
    naive_flops: float
    """FLOPs if every sample were one document of its capacity; inflates the MFU of packed data."""
    second_padding: float | None = None
    """Share of the second capacities that stays free; None: no sample has one."""

    @staticmethod
    def of(schedule: Schedule, step: Step, flops: ModelFlops) -> StepWork:
        lengths, paths = segment_lengths(schedule, step)
        samples = [np.full(len(d.sample_ids), d.capacity, np.int64) for d in step.draws]
        capacities = np.concatenate(samples)
        tokens = schedule.stage_at(step.index).config.tokens_per_step
        useful = int(lengths.sum())
        second = [
            schedule.samples.second_sizes(d.sample_ids, d.capacity, step.view) for d in step.draws
        ]
        held, room = (sum(parts) for parts in zip(*second, strict=True))
        return StepWork(
            tokens=tokens,
            useful_tokens=useful,
            flops=flops.step(useful, lengths, paths),
            naive_flops=flops.step(tokens, capacities),
            second_padding=1 - held / room if room else None,
        )


def segment_lengths(
    schedule: Schedule, step: Step
) -> tuple[NDArray[np.int64], NDArray[np.int64] | None]:
    """Return the lengths in tokens of all unmasked segments of a step, cut by its window, and in
    prefix trees those of the paths to them."""
    samples = schedule.samples
    lengths = cut_lengths(samples.segment_lengths(step.sample_ids, step.view), step.view.window)
    return lengths, samples.path_lengths(step.sample_ids) if samples.attention == "tree" else None


class SourceLosses:
    """Mean loss per label token of every source in a step."""

    def __init__(self, samples: SampleSource, world: World) -> None:
        self.samples, self.world = samples, world
        self.names = list(dict.fromkeys(samples.names))
        place = {name: i for i, name in enumerate(self.names)}
        self._place = np.array([place[name] for name in samples.names])  # one place per name

    def label_tokens(self, content: Step) -> dict[str, int]:
        """Return the label tokens of a step by source, over all ranks."""
        source = self._place[self.samples.locate(content.sample_ids)[0]]
        counts = np.bincount(source, content.label_counts)
        return {self.names[place]: int(counts[place]) for place in np.unique(source).tolist()}

    def add_losses(self, lines: Sequence[dict[str, Any]], results: Sequence[StepResult]) -> None:
        """Set ``source_loss`` in lines with ``source_label_tokens``; collective. The sums over
        samples are computed on the host, so they do not depend on the device."""
        width = len(self.names)
        losses = torch.cat([result.sample_losses for result in results])
        row = np.repeat(np.arange(len(results)), [len(result.source) for result in results])
        place = self._place[np.concatenate([result.source for result in results])]
        table = np.bincount(
            row * width + place, losses.to("cpu", torch.float64).numpy(), len(results) * width
        )
        sums = torch.from_numpy(table).view(-1, width).to(self.world.device)
        dist.all_reduce(sums)
        for line, step_sums in zip(lines, sums.tolist(), strict=True):
            loss = dict(zip(self.names, step_sums, strict=True))
            line["source_loss"] = {
                name: _finite(loss[name] / labels)
                for name, labels in line["source_label_tokens"].items()
                if labels
            }


def mean_by_source(lines: Sequence[Mapping[str, Any]]) -> dict[str, tuple[float, int]]:
    """Return source -> (mean loss over lines of ``log.jsonl``, label tokens of these losses), the
    source with the most label tokens first. Losses that are missing, NaN or infinite are ignored.
    """
    sums: dict[str, float] = {}
    tokens: dict[str, int] = {}
    for line in lines:
        for name, loss in line.get("source_loss", {}).items():
            if loss is not None:
                labels = line["source_label_tokens"][name]
                sums[name] = sums.get(name, 0.0) + loss * labels
                tokens[name] = tokens.get(name, 0) + labels
    by_tokens = sorted(tokens, key=lambda name: -tokens[name])
    return {name: (sums[name] / tokens[name], tokens[name]) for name in by_tokens}


def named_means(means: Mapping[str, tuple[float, int]]) -> str:
    """Return text like `` (web 3.1, code 2.0)`` for the sources with the most label tokens."""
    shown = [f"{name} {loss:.4f}" for name, (loss, _) in list(means.items())[:_SHOWN]]
    if len(means) > _SHOWN:
        shown.append(f"{len(means) - _SHOWN} more")
    return f" ({', '.join(shown)})" if shown else ""


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


class Monitor:
    """Collects steps and writes them. All ranks call ``step`` and ``flush``.

    ``loss`` is the mean of the cross entropy over label tokens, without ``load_balancing_loss`` and
    ``distillation_loss``, which are logged without their coefficients. With several sources, the
    log has a loss for each.

    Args:
        start: first step; TensorBoard removes earlier curves from this step on.
        max_skipped: largest number of consecutive skipped updates (all ranks skip together).
        judge: called on all ranks with new lines, before a NaN loss ends the run; may raise.
    """

    def __init__(
        self,
        directory: RunDirectory,
        config: LoggingConfig,
        world: World,
        *,
        samples: SampleSource,
        num_steps: int,
        start: int = 0,
        max_skipped: int = 0,
        judge: Callable[[Sequence[dict[str, Any]]], None] | None = None,
    ) -> None:
        self.directory, self.config, self.world = directory, config, world
        self.num_steps, self.max_skipped, self.judge = num_steps, max_skipped, judge
        self._sources = SourceLosses(samples, world) if len(samples.indices) > 1 else None
        self._peak, self._limits = peak_of(world.device), Slowdowns()
        self._writers: list[Any] = []
        if world.is_first and config.wandb_project is not None:
            self._writers.append(_WeightsAndBiases(config.wandb_project, directory))
        if world.is_first and config.tensorboard:
            self._writers.append(_TensorBoard(directory))
        self.begin(start)

    def begin(self, start: int) -> None:
        """Start at a step; drop steps that are recorded but not written."""
        self.start = start
        self._skipped_in_a_row = self._skipped = 0
        self._lines: list[dict[str, Any]] = []
        self._results: list[StepResult] = []
        self._since = time.perf_counter()
        for writer in self._writers:
            writer.begin(start)

    def skip_time(self) -> None:
        """Do not count the time since the last step (an evaluation, a checkpoint) as training."""
        self._since = time.perf_counter()

    def step(
        self, line: dict[str, Any], *, content: Step, work: StepWork, result: StepResult
    ) -> None:
        """Record a step, and write the log if it is due. ``line`` has ``step``, ``tokens_seen``,
        ``epoch``, ``lr``, ``data_wait`` (s), ``imbalance``, ``padding``. Raises FloatingPointError
        as ``flush`` does, or after too many skipped updates."""
        now = time.perf_counter()
        seconds, self._since = now - self._since, now
        facts = {
            "bucket": content.bucket,
            "capacity": content.capacity,
            "label_tokens": content.num_label_tokens,
            "samples": content.checksum,
            "skipped": result.skipped,
        }
        if self._sources is not None:
            facts["source_label_tokens"] = self._sources.label_tokens(content)
        counts = {name: value for name, value in vars(work).items() if value is not None}
        self._lines.append({**line, **facts, "seconds": seconds, **counts})
        self._results.append(result)
        too_many = self._count_skipped(line["step"], result.skipped)
        if too_many is not None or len(self._lines) == self.config.every:
            self.flush()
        elif line["step"] == self.start:  # at once: the next line may be minutes away
            [loss] = _means([result.loss_sum], [result])
            seconds = time.perf_counter() - now + seconds
            logger.info(
                "step %d/%d, loss %.4f, %.1f s (the first is slower); then a line every %d steps",
                *(self.start + 1, self.num_steps, loss, seconds, self.config.every),
            )
        if too_many is not None:
            raise FloatingPointError(too_many)

    def _count_skipped(self, step: int, skipped: bool) -> str | None:
        """Count a skipped update; return why the run must end, or None."""
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if skipped else 0
        self._skipped += skipped
        if skipped:
            logger.info(
                "the update of step %d is skipped: its gradient is not finite (%d in a row, %d "
                "since the start)",
                *(step, self._skipped_in_a_row, self._skipped),
            )
        if self._skipped_in_a_row <= self.max_skipped:
            return None
        return (
            f"{self._skipped_in_a_row} updates in a row were skipped, optimizer.max_skipped allows "
            f"{self.max_skipped}; the weights are unchanged since step "
            f"{step + 1 - self._skipped_in_a_row}. Continue from the last checkpoint with a lower "
            "optimizer.lr, or look at these steps' samples (logging.batches)"
        )

    def flush(self) -> None:
        """Write the recorded steps; collective. Raises FloatingPointError on all ranks for NaN."""
        if not self._lines:
            return
        values = _means([r.loss_sum for r in self._results], self._results)
        for name, key in _OTHER_LOSSES.items():
            sums = [getattr(result, key) for result in self._results]
            if sums[0] is not None:  # all steps have one, or none
                for line, mean in zip(self._lines, _means(sums, self._results), strict=True):
                    line[name] = _finite(mean)
        if self._sources is not None:
            self._sources.add_losses(self._lines, self._results)
        # Exclude the first step, which compiles.
        counted = [i for i, line in enumerate(self._lines) if line["step"] > self.start]
        times = self._times_of_ranks(
            sum(self._results[i].forward.seconds() for i in counted),
            sum(self._lines[i]["data_wait"] for i in counted),
        )
        norms = [float(r.grad_norm) for r in self._results]
        # The device may have worked after the last step was recorded: add that time to the step.
        self._lines[-1]["seconds"] += time.perf_counter() - self._since
        self._since = time.perf_counter()
        lines = [
            self._finish(line, value, norm)
            for line, value, norm in zip(self._lines, values, norms, strict=True)
        ]
        lines[-1].update(times)
        self._lines, self._results = [], []
        if self.world.is_first:
            append_jsonl(self.directory.log, *lines)
            for line in lines:
                self._show(line)
            logger.info(self._sentence(lines))
            if counted:
                self._limits.look([lines[i] for i in counted])
        if self.judge is not None:
            self.judge(lines)
        for line in lines:
            if is_lost(line):
                raise FloatingPointError(
                    f"the loss of step {line['step']} is not a number; further training would be "
                    "wasted. Continue from the last checkpoint with a lower optimizer.lr or a "
                    "smaller optimizer.clip"
                )

    def _times_of_ranks(self, forward: float, waited: float) -> dict[str, Any]:
        """Return median and maximum over the ranks of the seconds of forwards and of waiting for
        batches, with the slowest rank and its host; collective."""
        ranks = self.world.gather((forward, waited, self.world.host))
        times = {}
        for i, name in enumerate(("rank_forward", "rank_data_wait")):
            seconds = [rank_times[i] for rank_times in ranks]
            most = max(seconds)
            slowest = seconds.index(most)
            where = {"rank": slowest, "host": ranks[slowest][2]}
            times[name] = {"median": median_low(seconds), "most": most, **where}
        return times

    def _finish(self, line: dict[str, Any], loss: float, norm: float) -> dict[str, Any]:
        seconds, flops = line.pop("seconds"), line.pop("flops")
        naive, tokens = line.pop("naive_flops"), line["tokens"]
        available = self._peak * self.world.size * seconds if self._peak else None
        return {
            **line,
            "loss": _finite(loss),
            "grad_norm": _finite(norm),
            "seconds": round(seconds, 6),
            "tokens_per_second": tokens / seconds,
            "useful_tokens_per_second": line["useful_tokens"] / seconds,
            "data_wait_share": line["data_wait"] / seconds,
            "tflops_per_rank": flops / seconds / self.world.size / 1e12,
            "mfu": flops / available if available else None,
            "naive_mfu": naive / available if available else None,
            "memory_gib": _memory_gib(self.world.device),
        }

    def _show(self, line: dict[str, Any]) -> None:
        step = line["step"]
        for writer in self._writers:
            scalars = {f"train/{k}": v for k, v in line.items() if isinstance(v, (int, float))}
            if line["loss"] is not None:
                scalars[f"bucket_loss/{line['capacity']}"] = line["loss"]
            for name, loss in line.get("source_loss", {}).items():
                if loss is not None:
                    scalars[f"source_loss/{name}"] = loss
            writer.write(scalars, step)

    def evaluation(self, step: int, tokens_seen: int, result: dict[str, Any]) -> None:
        """Write the validation after ``step`` steps; all ranks may call it."""
        if not self.world.is_first:
            return
        line = {"step": step, "tokens_seen": tokens_seen, **result}
        append_jsonl(self.directory.evaluation, line)
        for writer in self._writers:
            scalars = {f"valid/{k}": v for k, v in result.items() if isinstance(v, float)}
            if "average" in result:
                scalars["valid/average_loss"] = result["average"]["loss"]
            for name, loss in result.get("source_loss", {}).items():
                scalars[f"valid_source_loss/{name}"] = loss
            writer.write(scalars, step)

    def _sentence(self, lines: list[dict[str, Any]]) -> str:
        last, seconds = lines[-1], sum(line["seconds"] for line in lines)
        useful = sum(line["useful_tokens"] for line in lines) / seconds
        tokens = sum(line["tokens"] for line in lines) / seconds
        losses = [line["loss"] for line in lines if line["loss"] is not None]
        loss = sum(losses) / len(losses) if losses else math.nan
        remaining = round((self.num_steps - 1 - last["step"]) * seconds / len(lines))
        wait = sum(line["data_wait"] for line in lines) / seconds
        parts = [
            f"step {last['step'] + 1}/{self.num_steps}",
            f"loss {loss:.4f}{named_means(mean_by_source(lines))}",
            *_shown_divergence(lines),
            f"lr {last['lr']:.2e}",
            f"bucket {last['capacity']}",
            f"{tokens:,.0f} tok/s ({useful:,.0f} useful)",
            f"wait {wait:.1%}",
        ]
        if last["mfu"] is not None:
            mean = sum(line["mfu"] * line["seconds"] for line in lines) / seconds
            naive = sum(line["naive_mfu"] * line["seconds"] for line in lines) / seconds
            parts.append(f"MFU {mean:.1%} (naive {naive:.1%})")
        parts.append(f"{last['memory_gib']:.1f} GiB")
        return ", ".join([*parts, f"{timedelta(seconds=remaining)} left"])

    def close(self) -> None:
        """Write the remaining steps and close the writers; collective."""
        self.flush()
        for writer in self._writers:
            writer.close()


def _shown_divergence(lines: Sequence[Mapping[str, Any]]) -> list[str]:
    known = [line["distillation_loss"] for line in lines if line.get("distillation_loss")]
    return [f"distillation {sum(known) / len(known):.4f}"] if known else []


def _means(sums: list[torch.Tensor], results: list[StepResult]) -> list[float]:
    """Return the mean per label token of each step (nan for a step without labels), from one sum
    per step on every rank's device; collective."""
    totals = torch.stack(sums).to(torch.float64)
    dist.all_reduce(totals)
    weights = (r.label_weight or math.nan for r in results)
    return [value / weight for value, weight in zip(totals.tolist(), weights, strict=True)]


class _TensorBoard:
    def __init__(self, directory: RunDirectory) -> None:
        self._directory = str(directory.tensorboard)
        self._writer: Any = None

    def begin(self, start: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415

        self.close()
        self._writer = SummaryWriter(self._directory, purge_step=start)

    def write(self, scalars: dict[str, Any], step: int) -> None:
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class _WeightsAndBiases:
    def __init__(self, project: str, directory: RunDirectory) -> None:
        import wandb  # noqa: PLC0415 - an extra, checked at startup

        self._run = wandb.init(
            project=project,
            name=directory.path.name,
            id=directory.create_id(),
            resume="allow",
            dir=str(directory.path),
        )
        # The default axis cannot go back, as steps do after a rollback.
        self._run.define_metric("*", step_metric="step")

    def begin(self, start: int) -> None:
        """Keep the curves: W&B cannot remove steps."""

    def write(self, scalars: dict[str, Any], step: int) -> None:
        self._run.log({**scalars, "step": step})

    def close(self) -> None:
        self._run.finish()


def _memory_gib(device: torch.device) -> float:
    """Return the peak memory of this process: allocated on the device, or resident on the host."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
