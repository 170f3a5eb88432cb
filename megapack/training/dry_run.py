"""What a run would be: its resolved configuration, steps, buckets, memory and time."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import torch
import yaml

from megapack.attention import Choice
from megapack.config import to_dict
from megapack.data.stage import StageDraws
from megapack.errors import ConfigError
from megapack.training.config import PretrainConfig
from megapack.training.model.architecture import model_configuration
from megapack.training.model.flops import ModelFlops, peak_by_name, peak_flops
from megapack.training.model.memory import estimate_memory
from megapack.training.model.opening import open_model
from megapack.training.model.training_model import TrainingModel
from megapack.training.run.directory import plain
from megapack.training.run.inputs import Inputs, check_inputs, open_inputs
from megapack.training.run.learning_rate import num_warmup_steps
from megapack.training.watch.work import segment_lengths

__all__ = ["dry_run"]

_ASSUMED_MFU = 0.4
_STEPS_LOOKED_AT = 64


def dry_run(config: PretrainConfig, *, world_size: int | None, device: str | None) -> str:
    """The plan of a run as text; opens the data, computes nothing on a device.

    Args:
        config: the run.
        world_size: ranks; None takes the launcher's, or 1.
        device: name of the accelerator the time is estimated for; None takes this machine's.

    Raises:
        ConfigError: whatever would stop the run at its start.
    """
    ranks = world_size or int(os.environ.get("WORLD_SIZE", "1"))
    inputs = open_inputs(config)
    architecture = model_configuration(config.model, inputs.vocab_size)
    check_inputs(inputs, architecture, config.data.positions)
    _check_ranks(config, ranks)
    here = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    wanted = config.model if here.type == "cuda" else replace(config.model, attention="auto")
    model, attention = open_model(wanted, config.engine, architecture, device=here, empty=True)
    flops = ModelFlops.of(model, architecture)
    sections = [
        yaml.safe_dump(plain(to_dict(config)), sort_keys=False).rstrip(),
        _model(architecture, model, attention),
        _length(config, inputs),
        _buckets(config, inputs, ranks),
        _memory(config, model, inputs, ranks),
        _time(inputs, flops, ranks, device),
    ]
    return "\n\n".join(sections)


def _check_ranks(config: PretrainConfig, ranks: int) -> None:
    batches = config.data.tokens_per_step // config.data.micro_batch_tokens
    if batches % ranks and config.data.uneven == "error":
        raise ConfigError(
            f"{ranks} ranks do not divide the {batches} micro batches of a step; change "
            "data.tokens_per_step or data.micro_batch_tokens, or set data.uneven=pad"
        )


def _model(architecture: Any, model: TrainingModel, attention: Choice) -> str:
    return "\n".join(
        [
            f"model: {architecture.model_type}, {model.num_parameters:,} parameters, "
            f"vocabulary {architecture.vocab_size:,}",
            f"attention on this machine: {attention.name}, {attention.reason}",
        ]
    )


def _length(config: PretrainConfig, inputs: Inputs) -> str:
    tokens = inputs.schedule.tokens_before(inputs.num_steps)
    warmup = num_warmup_steps(inputs.num_steps, config.schedule)
    return "\n".join(
        [
            f"steps: {inputs.num_steps:,} ({warmup:,} of warmup), "
            f"{inputs.steps_per_epoch:,} per epoch",
            f"tokens: {tokens:,} ({config.data.tokens_per_step:,} per step)",
            f"epochs: {inputs.schedule.epochs(inputs.num_steps):.3f}",
        ]
    )


def _buckets(config: PretrainConfig, inputs: Inputs, ranks: int) -> str:
    """Of every stage."""
    stages = inputs.schedule.spans(inputs.num_steps)
    return "\n".join(_stage(config, stage, end, ranks) for stage, end in stages)


def _stage(config: PretrainConfig, stage: StageDraws, end: int, ranks: int) -> str:
    settings, micro = stage.config, config.data.micro_batch_tokens
    micro_steps = -(-settings.tokens_per_step // (micro * ranks))
    draws = stage.num_draws(end)
    rows = [
        f"{'bucket':>8} {'steps':>10} {'share':>7} {'samples/step':>13} {'per micro batch':>16}"
    ]
    for stream, samples, count in zip(
        stage.buckets, stage.samples_per_draw, draws.tolist(), strict=True
    ):
        share = count / max(1, int(draws.sum()))
        per_batch = micro // stream.capacity
        rows.append(
            f"{stream.capacity:>8,} {count:>10,} {share:>7.2%} {samples:>13,} {per_batch:>16,}"
        )
    shown = min(stage.begin + 12, end)
    order = " ".join(
        str(draw.capacity) for i in range(stage.begin, shown) for draw in stage.step_draws(i)
    )
    return "\n".join(
        [
            *([f"steps {stage.begin:,} to {end - 1:,}:"] if stage.begin else []),
            f"ranks: {ranks}, {micro_steps} micro steps of {micro:,} tokens each",
            *rows,
            f"order: {settings.order}; the first draws: {order}",
        ]
    )


def _memory(config: PretrainConfig, model: Any, inputs: Inputs, ranks: int) -> str:
    parts = estimate_memory(model, config, ranks, longest=inputs.schedule.capacities[-1])
    lines = [f"{name:>22}: {size / 2**30:8.2f} GiB" for name, size in parts.items()]
    total = sum(parts.values()) / 2**30
    return "\n".join(["memory per rank, estimated:", *lines, f"{'together':>22}: {total:8.2f} GiB"])


def _time(inputs: Inputs, flops: ModelFlops, ranks: int, device: str | None) -> str:
    steps = min(_STEPS_LOOKED_AT, inputs.num_steps)
    total = 0.0
    for i in range(steps):
        content = inputs.schedule.step(i)
        lengths = segment_lengths(inputs.schedule, content.sample_ids)
        tokens = inputs.schedule.stage_at(i).config.tokens_per_step
        total += flops.step(tokens, lengths)
    run = (
        total
        * inputs.schedule.tokens_before(inputs.num_steps)
        / inputs.schedule.tokens_before(steps)
    )
    peak = peak_by_name(device) if device is not None else _own_peak()
    text = f"arithmetic: {run:.3e} FLOP ({run / inputs.num_steps:.3e} per step)"
    if peak is None:
        return f"{text}\ntime: unknown for this device; name one with --device (H100, A800, ...)"
    hours = run / (peak * ranks * _ASSUMED_MFU) / 3600
    return f"{text}\ntime: {hours:,.1f} hours on {ranks} ranks at {_ASSUMED_MFU:.0%} MFU, assumed"


def _own_peak() -> float | None:
    return peak_flops(torch.device("cuda")) if torch.cuda.is_available() else None
