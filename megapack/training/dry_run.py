"""Plan of a run as text or JSON: model, steps, buckets, memory, time and cost.

steps: 20,000 (200 of warmup), 4,312 per epoch
tokens: 62,914,560,000 (3,145,728 per step)
...
time: 96.2 hours on 8 ranks at 40% MFU, assumed
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, replace
from json import dumps
from typing import Any

import numpy as np
import torch
import yaml

from megapack.attention import Choice
from megapack.config import to_dict
from megapack.data.report import (
    RunPlan,
    describe_fim,
    often_repeated,
    plan_run,
    steps_without_labels,
)
from megapack.data.run import PlannedRun
from megapack.data.schedule import Schedule, StageDraws
from megapack.data.stage_settings import Window
from megapack.data.steps import ranks_per_micro_batch
from megapack.devices import peak_flops
from megapack.training.config import PretrainConfig
from megapack.training.engine.deepspeed_config import deepspeed_configuration, describe_reduction
from megapack.training.engine.directory import RunDirectory
from megapack.training.engine.inputs import Inputs, check_run, steps_from_lengths
from megapack.training.model.flops import ModelFlops, peak_of
from megapack.training.model.memory import MemoryEstimate, estimate_memory
from megapack.training.model.opening import open_model
from megapack.training.monitoring.monitor import segment_lengths
from megapack.training.start import check_directory, check_newest, check_start
from megapack.units import counted, size

_ASSUMED_MFU = 0.4
_FLOPS_STEPS = 64  # the FLOPs of the run are extrapolated from this many steps
_BALANCE_STEPS = 24  # the load balance is computed for this many steps


def dry_run(
    config: PretrainConfig,
    *,
    world_size: int = 1,
    device: str | None = None,
    lengths: str | None = None,
    buckets: Sequence[int] | None = None,
    gpu_price: float | None = None,
    show_config: bool = False,
    json: bool = False,
) -> str:
    """Return the plan of a run, without computing on a device.

    Args:
        device: accelerator that the time is estimated for; None: that of this machine.
        lengths: document lengths (``read_lengths``) instead of the data; None: open the data.
        buckets: capacities that these documents are packed into.
        gpu_price: price of one device per hour.
        json: return JSON (sizes in bytes, times in hours) instead of text.

    Raises the errors that would stop the run at its start.
    """
    ranks, run = world_size, RunDirectory(config.run_dir)
    steps: PlannedRun
    if lengths is None:
        steps, architecture, tokenizer = check_start(config, run, ranks)
        check_newest(config, run, steps, architecture, tokenizer)
    else:
        check_directory(config.checkpoint, run)
        steps = steps_from_lengths(config, lengths, buckets)
        architecture = check_run(config, steps, ranks)
    local_device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    section = config.model
    if local_device.type != "cuda":  # the configured backend may need CUDA
        section = replace(section, attention_backend="auto")
    model, attention = open_model(
        section,
        config.engine,
        architecture,
        device=local_device,
        empty=True,
        trees=config.data.attention == "tree",
    )
    flops = ModelFlops.of(model, architecture)
    # Read now: estimate_memory replaces the tensors of the model, which unties shared ones.
    description, num_parameters = model.description, model.num_parameters
    zero = deepspeed_configuration(config, ranks)["zero_optimization"]
    longest = steps.schedule.capacities[-1]
    peak = peak_flops(device) if device is not None else peak_of(local_device)
    flop = _flops_of_run(steps, ranks, flops)
    plan = _Plan(
        config=config,
        ranks=ranks,
        steps=steps,
        run=plan_run(steps.schedule, steps.num_steps),
        description=description,
        num_parameters=num_parameters,
        vocab_size=architecture.vocab_size,
        vocabulary_is_assumed=bool(
            lengths and config.model.vocab_size is None and not config.model.has_vocabulary
        ),
        attention=attention,
        busiest_rank_over_mean=_balance(config, steps, ranks, flops),
        memory=estimate_memory(model, config, ranks, longest=longest, zero=zero),
        flop=flop,
        hours=None if peak is None else flop / (peak * ranks * _ASSUMED_MFU) / 3600,
        gpu_price=gpu_price,
    )
    shown = to_dict(config) if show_config else {}
    if json:
        return dumps({**plan.facts(), **({"config": shown} if shown else {})}, indent=2)
    return "\n\n".join(
        [*plan.sections(), *([yaml.safe_dump(shown, sort_keys=False).rstrip()] if shown else [])]
    )


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """A planned run, as text and as JSON."""

    config: PretrainConfig
    ranks: int
    steps: PlannedRun
    run: RunPlan
    description: str
    num_parameters: int
    vocab_size: int
    vocabulary_is_assumed: bool
    attention: Choice
    busiest_rank_over_mean: tuple[float, float]  # per step, per micro step
    memory: MemoryEstimate
    flop: float
    hours: float | None  # None: unknown device
    gpu_price: float | None

    @property
    def cost(self) -> float | None:
        if self.hours is None or self.gpu_price is None:
            return None
        return self.hours * self.ranks * self.gpu_price

    @property
    def micro_steps(self) -> int:
        data = self.config.data
        return -(-data.tokens_per_step // (data.micro_batch_tokens * self.ranks))

    @property
    def unlabeled(self) -> list[str]:
        """A warning about steps without labels, or nothing. Lengths alone have no labels."""
        if not isinstance(self.steps, Inputs):
            return []
        warning = steps_without_labels(self.steps.schedule, self.run.num_steps)
        return [warning] if warning else []

    def facts(self) -> dict[str, Any]:
        """Return the figures as JSON; sizes in bytes."""
        schedule, num_steps = self.steps.schedule, self.run.num_steps
        per_step, per_micro_step = self.busiest_rank_over_mean
        return {
            "model": {
                "description": self.description,
                "parameters": self.num_parameters,
                "vocab_size": self.vocab_size,
                "attention": self.attention.name,
            },
            "num_steps": num_steps,
            "warmup_steps": self.config.learning_rate.warmup(num_steps),
            "steps_per_epoch": self.steps.steps_per_epoch,
            "epochs": schedule.epochs(num_steps),
            "tokens": schedule.tokens_before(num_steps),
            "ranks": self.ranks,
            "micro_steps": self.micro_steps,
            "stages": [dataclasses.asdict(stage) for stage in self.run.stages],
            "sources": [source._asdict() for source in self.run.datasets],
            "busiest_rank_over_mean": {"step": per_step, "micro_step": per_micro_step},
            "warnings": [*often_repeated(self.run), *self.unlabeled],
            "zero_stage": self.config.engine.stage,
            "memory": {**dataclasses.asdict(self.memory), "total": self.memory.total},
            "flop": self.flop,
            "mfu": _ASSUMED_MFU,
            "hours": self.hours,
            "cost": self.cost,
        }

    def sections(self) -> list[str]:
        """Return the plan as text, in paragraphs."""
        config, schedule, num_steps = self.config, self.steps.schedule, self.run.num_steps
        stages = (
            _stage(config, stage, end, self.ranks, schedule.settings_at(stage.begin).window)
            for stage, end in schedule.spans(num_steps)
        )
        is_mixture = len(schedule.samples.indices) > 1
        return [
            f"model: {self.description}; vocabulary {self.vocab_size:,}"
            f"{' (assumed, see model.vocab_size)' * self.vocabulary_is_assumed}\n"
            f"attention on this machine: {self.attention.name}, {self.attention.reason}",
            f"steps: {num_steps:,} ({config.learning_rate.warmup(num_steps):,} of warmup), "
            f"{self.steps.steps_per_epoch:,} per epoch\n"
            f"tokens: {schedule.tokens_before(num_steps):,} "
            f"({config.data.tokens_per_step:,} per step)\n"
            f"epochs: {schedule.epochs(num_steps):.3f}",
            "\n".join(stages)
            + "\nwork of the busiest rank over the mean, predicted: "
            "{:.4f} per step, {:.4f} per micro step".format(*self.busiest_rank_over_mean),
            *([self.run.table()] if is_mixture else often_repeated(self.run)),
            *self.unlabeled,
            *_packed(schedule),
            describe_reduction(config.engine, self.num_parameters, self.ranks, self.micro_steps),
            _memory(config, self.memory),
            f"arithmetic: {self.flop:.3e} FLOP ({self.flop / num_steps:.3e} per step)\n"
            + self._time(),
        ]

    def _time(self) -> str:
        if self.hours is None:
            return "time: unknown for this device; name one with --device (H100, A800, ...)"
        on = f"on {counted(self.ranks, 'rank')} at {_ASSUMED_MFU:.0%} MFU, assumed"
        cost = ""
        if self.cost is not None:
            cost = f"\ncost: {self.cost:,.2f} at {self.gpu_price:g} per rank and hour"
        return f"time: {_duration(self.hours)} {on}{cost}"


def _packed(schedule: Schedule) -> list[str]:
    """Return counts of groups, and of documents with room for fill-in-the-middle, per index."""
    rows = []
    for name, index in zip(schedule.samples.names, schedule.samples.indices, strict=True):
        m = {} if None in index.open_shards else index.open(0).metrics()
        if "num_groups" in m:
            rows.append(
                f"groups of {name}: {m['num_groups']:,}, {m['num_cut_groups']:,} cut, "
                f"{m['num_groups_longer_than_largest_bucket']:,} longer than the largest bucket"
            )
        if schedule.samples.fim_room and index.fim_room:
            rows.append(
                f"fill-in-the-middle of {name}: {m['num_documents_with_fim_room']:,} of "
                f"{m['num_documents']:,} documents have room for {index.fim_room} tokens; the "
                "others stay unchanged"
            )
    return ["\n".join(rows)] if rows else []


def _balance(
    config: PretrainConfig, plan: PlannedRun, ranks: int, flops: ModelFlops
) -> tuple[float, float]:
    """Return the predicted work of the busiest rank over the mean, per step and per micro step,
    for steps of the whole run."""
    sampler = plan.sampler(0, ranks)
    linear = flops.linear_cost_tokens * config.data.micro_batch_tokens
    busiest = np.zeros(3)  # busiest rank of a step, busiest of every micro step, mean of ranks
    for step in np.unique(np.linspace(0, plan.num_steps - 1, _BALANCE_STEPS).astype(int)).tolist():
        work = sampler.attention_of_ranks(step) + linear
        busiest += work.sum(axis=0).max(), work.max(axis=1).sum(), work.sum() / ranks
    return float(busiest[0] / busiest[2]), float(busiest[1] / busiest[2])


def _stage(
    config: PretrainConfig, stage: StageDraws, end: int, ranks: int, window: Window | None
) -> str:
    settings, micro = stage.config, config.data.micro_batch_tokens
    micro_steps = -(-settings.tokens_per_step // (micro * ranks))
    draws = stage.num_draws(end)
    unit = "step" if settings.draws_per_step == 1 else "draw"
    each = f"samples/{unit}"
    rows = [f"{'bucket':>8} {unit + 's':>10} {'share':>7} {each:>13} {'per micro batch':>16}"]
    group = config.engine.sequence_parallel_size
    for stream, samples, count in zip(
        stage.buckets, stage.samples_per_draw, draws.tolist(), strict=True
    ):
        share = count / max(1, int(draws.sum()))
        shared = ranks_per_micro_batch(stream.capacity, micro, group)
        per_batch = micro * shared // stream.capacity
        by = f"  of {shared} ranks" if shared > 1 else ""
        rows.append(
            f"{stream.capacity:>8,} {count:>10,} {share:>7.2%} {samples:>13,} {per_batch:>16,}{by}"
        )
    shown = min(stage.begin + 12, end)
    order = " ".join(
        str(draw.capacity) for i in range(stage.begin, shown) for draw in stage.step_draws(i)
    )
    reach, several = config.data.attention, f"; {settings.draws_per_step} draws per step"
    lines = [
        f"steps {stage.begin:,} to {end - 1:,}:" if stage.begin else "",
        "" if window is None else f"attention window: {window}",
        describe_fim(stage),
        "" if reach == "document" else f"attention inside: {reach}",
        f"ranks: {ranks}, {counted(micro_steps, 'micro step')} of {micro:,} tokens each"
        + several * (unit == "draw"),
        _mix(stage, micro_steps, micro * ranks),
        *rows,
        f"order: {settings.order}; the first draws: {order}",
    ]
    return "\n".join(filter(None, lines))


def _mix(stage: StageDraws, micro_steps: int, tokens: int) -> str:
    """Describe the buckets of a step, and what the other value of ``mix`` would change.
    ``tokens``: tokens per micro step, over all ranks."""
    settings = stage.config
    if len(stage.buckets) == 1:
        return "buckets per step: one, the only one"
    if settings.draws_per_step > 1:
        return (
            f"buckets per step: several, one for every {settings.draw_tokens:,} tokens, the same "
            "on all ranks (mix: micro_step); mix: step would fill each step from one bucket"
        )
    now = "buckets per step: one, the same on all ranks (mix: step)"
    if micro_steps == 1:
        return f"{now}; mix: micro_step needs several micro steps in a step"
    if settings.tokens_per_step % tokens:
        return f"{now}; mix: micro_step needs ranks that share its micro steps evenly"
    return (
        f"{now}; with mix: micro_step and micro_step_tokens: {tokens} each of its {micro_steps} "
        "micro steps would have its own bucket"
    )


def _memory(config: PretrainConfig, memory: MemoryEstimate) -> str:
    lines = [f"{name:>22}: {size(part):>9}" for name, part in memory.parts.items()]
    # Attention needs memory in proportion to tokens, so the bucket does not matter.
    tokens = f"{config.data.micro_batch_tokens:,} tokens"
    title = f"memory per rank at its peak, estimated, the same in every bucket ({tokens})"
    lines.append(f"{'together':>22}: {size(memory.total):>9}")
    if memory.on_host:
        lines.append(f"{'and on its host':>22}: {size(memory.on_host):>9} (inputs of layers)")
    return "\n".join([f"{title}:", *lines])


def _flops_of_run(plan: PlannedRun, ranks: int, flops: ModelFlops) -> float:
    """Extrapolate the FLOPs of the run from steps of all its parts: windows grow and orders change.
    Padding counts like any token, also on idle ranks."""
    schedule, sampler = plan.schedule, plan.sampler(0, ranks)
    number = np.arange(min(_FLOPS_STEPS, plan.num_steps))
    # One step of every part of the run, at irregular distances (buckets may alternate regularly).
    places = (number + number * 0.618034 % 1) * (plan.num_steps / len(number))
    total = tokens = 0.0
    for i in places.astype(int).tolist():
        total += flops.step(sampler.num_positions(i), *segment_lengths(schedule, schedule.step(i)))
        tokens += schedule.stage_at(i).config.tokens_per_step
    return total / tokens * schedule.tokens_before(plan.num_steps)


def _duration(hours: float) -> str:
    for unit, name in ((1, "hours"), (1 / 60, "minutes"), (1 / 3600, "seconds")):
        if hours >= unit:
            return f"{hours / unit:,.1f} {name}"
    return f"{hours * 3600:.2g} seconds"
