"""What a run shows: one JSON line per step, a log line now and then, TensorBoard, W&B.

The device is waited for only when a log line is due: until then losses stay where they are.
"""

from __future__ import annotations

import json
import logging
import math
import resource
import sys
import time
from typing import Any

import torch
import torch.distributed as dist

from megapack.data import Step
from megapack.data.source import SampleSource
from megapack.training.config import LoggingConfig
from megapack.training.model.flops import peak_flops
from megapack.training.run.directory import RunDirectory
from megapack.training.run.engine import StepResult
from megapack.training.run.world import World
from megapack.training.watch.ranks import RankTimes, Slowdowns
from megapack.training.watch.skipped import SkippedUpdates
from megapack.training.watch.sources import SourceLosses, mean_by_source, named_means
from megapack.training.watch.work import StepWork, sample_digest

__all__ = ["Monitor"]

logger = logging.getLogger("megapack")


class Monitor:
    """Collects steps and writes them. ``step`` and ``flush`` are called on every rank.

    ``loss`` is that of the labels, per label token; what a mixture of experts is trained with
    besides, ``load_balancing_loss``, stands beside it, without its coefficient.

    Args:
        directory: of the run.
        config: how often, and where to.
        world: this process; the first one writes.
        samples: of the run; with several sources every one has its loss.
        num_steps: of the whole run, for the time that is left.
        start: the first step, after which older curves are cut.
        max_skipped: updates in a row that may be skipped.
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
    ) -> None:
        self.directory, self.config, self.world = directory, config, world
        self.num_steps, self.start = num_steps, start
        self._skipped = SkippedUpdates(max_skipped)
        self._sources = SourceLosses(samples, world) if len(samples.indices) > 1 else None
        self._peak = peak_flops(world.device)
        self._ranks, self._limits = RankTimes(world), Slowdowns()
        self._lines: list[dict[str, Any]] = []
        self._results: list[StepResult] = []
        self._since = time.perf_counter()
        self._writers = self._open_writers() if world.is_first else []

    def _open_writers(self) -> list[Any]:
        writers: list[Any] = []
        if self.config.tensorboard:
            from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415

            path = str(self.directory.tensorboard)
            writers.append(_TensorBoard(SummaryWriter(path, purge_step=self.start)))
        if self.config.wandb_project is not None:
            writers.append(_WeightsAndBiases(self.config.wandb_project, self.directory))
        return writers

    def skip_time(self) -> None:
        """What passed since the last step (an evaluation, a checkpoint) was no training."""
        self._since = time.perf_counter()

    def step(
        self, line: dict[str, Any], *, content: Step, work: StepWork, result: StepResult
    ) -> None:
        """Record a step; writes when a log line is due.

        Args:
            line: ``step``, ``tokens_seen``, ``epoch``, ``lr``, ``data_wait`` (s), ``imbalance``.
            content: what the step held.
            work: tokens and operations of the step.
            result: of this rank, on the device.

        Raises:
            FloatingPointError: as ``flush``, or too many updates in a row were skipped.
        """
        now = time.perf_counter()
        seconds, self._since = now - self._since, now
        about = {
            "bucket": content.bucket,
            "capacity": content.capacity,
            "label_tokens": content.num_label_tokens,
            "samples": sample_digest(content),
            "skipped": result.skipped,
        }
        if self._sources is not None:
            about["source_label_tokens"] = self._sources.label_tokens(content)
        self._lines.append({**line, **about, "seconds": seconds, **work.__dict__})
        self._results.append(result)
        problem = self._skipped.note(line["step"], result.skipped)
        if problem is not None or len(self._lines) == self.config.every:
            self.flush()
        if problem is not None:
            raise FloatingPointError(problem)

    def flush(self) -> None:
        """Write what was recorded; all ranks.

        Raises:
            FloatingPointError: a loss is infinite or not a number, on all ranks alike.
        """
        if not self._lines:
            return
        values = _means([r.loss_sum for r in self._results], self._results)
        balances = [r.balance_sum for r in self._results if r.balance_sum is not None]
        if balances:  # all of them, or none
            for line, mean in zip(self._lines, _means(balances, self._results), strict=True):
                line["load_balancing_loss"] = mean
        if self._sources is not None:
            self._sources.add_losses(self._lines, self._results)
        # Not of the first one, which sets up and compiles.
        counted = [i for i, line in enumerate(self._lines) if line["step"] > self.start]
        times = self._ranks.gather(
            sum(self._results[i].forward.seconds() for i in counted),
            sum(self._lines[i]["data_wait"] for i in counted),
        )
        norms = [float(r.grad_norm) for r in self._results]
        # The device may have worked on after the last step was recorded: its time counts too.
        self._lines[-1]["seconds"] += time.perf_counter() - self._since
        self._since = time.perf_counter()
        lines = [
            self._finish(line, value, norm)
            for line, value, norm in zip(self._lines, values, norms, strict=True)
        ]
        lines[-1].update(times)
        self._lines, self._results = [], []
        if self.world.is_first:
            with self.directory.log.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(line) + "\n" for line in lines)
            for line in lines:
                self._show(line)
            logger.info(self._sentence(lines))
            if counted:
                self._limits.look([lines[i] for i in counted])
        for line in lines:
            if line["loss"] is None:
                raise FloatingPointError(
                    f"the loss of step {line['step']} is not a number; everything from here on "
                    "would be lost time. Continue from the last checkpoint with a lower "
                    "optimizer.lr or a smaller optimizer.clip"
                )

    def _finish(self, line: dict[str, Any], loss: float, norm: float) -> dict[str, Any]:
        seconds, flops = line.pop("seconds"), line.pop("flops")
        naive, tokens = line.pop("naive_flops"), line["tokens"]
        available = self._peak * self.world.size * seconds if self._peak else None
        return {
            **line,
            "loss": loss if math.isfinite(loss) else None,
            "grad_norm": norm if math.isfinite(norm) else None,
            "padding": 1 - line["useful_tokens"] / tokens,
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
        """Write an evaluation after ``step`` steps; all ranks may call it."""
        if not self.world.is_first:
            return
        with self.directory.evaluation.open("a", encoding="utf-8") as file:
            line = {"step": step, "tokens_seen": tokens_seen, **result}
            file.write(json.dumps(line) + "\n")
        for writer in self._writers:
            scalars = {f"valid/{k}": v for k, v in result.items() if isinstance(v, float)}
            for name, loss in result.get("source_loss", {}).items():
                scalars[f"valid_source_loss/{name}"] = loss
            writer.write(scalars, step)

    def _sentence(self, lines: list[dict[str, Any]]) -> str:
        last, seconds = lines[-1], sum(line["seconds"] for line in lines)
        useful = sum(line["useful_tokens"] for line in lines) / seconds
        tokens = sum(line["tokens"] for line in lines) / seconds
        losses = [line["loss"] for line in lines if line["loss"] is not None]
        loss = sum(losses) / len(losses) if losses else math.nan
        left = (self.num_steps - 1 - last["step"]) * seconds / len(lines)
        wait = sum(line["data_wait"] for line in lines) / seconds
        parts = [
            f"step {last['step'] + 1}/{self.num_steps}",
            f"loss {loss:.4f}{named_means(mean_by_source(lines))}",
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
        return ", ".join([*parts, f"{_duration(left)} left"])

    def close(self) -> None:
        """Write the rest; all ranks."""
        self.flush()
        for writer in self._writers:
            writer.close()


def _means(sums: list[torch.Tensor], results: list[StepResult]) -> list[float]:
    """Of scalars on every rank's device, one per step, over the label tokens of the step."""
    of_all = torch.stack(sums).to(torch.float64)
    dist.all_reduce(of_all)
    return [value / r.label_weight for value, r in zip(of_all.tolist(), results, strict=True)]


class _TensorBoard:
    def __init__(self, writer: Any) -> None:
        self._writer = writer

    def write(self, scalars: dict[str, Any], step: int) -> None:
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class _WeightsAndBiases:
    def __init__(self, project: str, directory: RunDirectory) -> None:
        import wandb  # noqa: PLC0415 - megapack-pretrain has seen that it is there

        self._run = wandb.init(
            project=project,
            name=directory.path.name,
            id=directory.own_id(),
            resume="allow",
            dir=str(directory.path),
        )
        # An axis of our own: its steps may go back, to those done again after a rollback.
        self._run.define_metric("*", step_metric="step")

    def write(self, scalars: dict[str, Any], step: int) -> None:
        self._run.log({**scalars, "step": step})

    def close(self) -> None:
        self._run.finish()


def _memory_gib(device: torch.device) -> float:
    """The most this process ever held: on the device, or resident on the host."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


def _duration(seconds: float) -> str:
    if not math.isfinite(seconds):
        return "?"
    hours, rest = divmod(round(seconds), 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}"
