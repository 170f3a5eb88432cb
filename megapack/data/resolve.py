"""Stages as they are written -> stages in full: what each of them has, and from which step on."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from megapack.data.order import order_named
from megapack.data.program import Program, Stage, StageSettings, Weights, tokens_before
from megapack.data.ramp import ramp_pieces
from megapack.data.step import ScheduleConfig
from megapack.data.window import Window
from megapack.errors import ConfigError

__all__ = ["resolve"]

MOST_TOKENS = 1 << 53  # of a run


def resolve(
    config: ScheduleConfig,
    weights: Weights,
    names: Sequence[str],
    stages: Sequence[Stage],
    *,
    loss_weights: Sequence[float] | None = None,
    attention_window: int | None = None,
) -> Program:
    """Stages in full, in order; those that change nothing are left out.

    Args:
        config, weights, loss_weights, attention_window: from step 0 on.
        names: of the sources, in the order of the weights.
        stages: the changes, in order.

    Raises:
        ConfigError: names the stage, what is wrong with it, and the remedy.
    """
    given = [weight for weight in weights if weight is None or weight != 0]
    if None in given and any(weight is not None for weight in given):
        raise ConfigError(
            f"source {names[weights.index(None)]!r} has no weight, others have: give all or none"
        )
    first = _loss_weights({}, loss_weights, names, "the run")
    window = _constant(attention_window, "the run")
    program: Program = (StageSettings(0, 0, config, weights, loss_weights=first, window=window),)
    ramp: list[tuple[int, Weights]] = []  # from which steps on one that has begun has which weights
    for stage in stages:
        last = program[-1]
        begin = _begin(program, stage)
        if begin <= (last.begin if len(program) > 1 else 0):
            raise ConfigError(
                f"{stage} begins at step {begin}, and the one before it at {last.begin}: list "
                "stages in order, and what holds from step 0 on outside of them"
            )
        _check_reach(program, stage, begin + stage.skip_steps)
        program = _ramped(program, ramp, begin)
        last = program[-1]
        ramp = [piece for piece in ramp if piece[0] >= begin]
        after = _config(stage, last.config)
        if stage.weights is not None:
            ramp = _pieces(program, stage, begin, after, names)
        weights = last.weights
        if ramp and ramp[0][0] == begin:
            _, weights = ramp.pop(0)
        settings = StageSettings(
            begin=begin,
            skip_steps=stage.skip_steps,
            config=after,
            weights=weights,
            num_lists=last.num_lists + (stage.exclude is not None),
            ramping=bool(ramp),
            loss_weights=_loss_weights(stage.loss_weights, last.loss_weights, names, str(stage)),
            window=_window(stage, begin, last),
        )
        if settings == last._replace(begin=begin, skip_steps=0, ramping=settings.ramping):
            continue
        if not settings.same_draws(last):
            _check_transition(stage, last.config, settings.config)
        program = (*program, settings)
    program = _ramped(program, ramp, None)
    for number, name in enumerate(names):
        if not any(stage.weights[number] != 0 for stage in program):
            raise ConfigError(
                f"source {name!r} has weight 0 in every stage; give it a positive one in some "
                "stage, or leave it out"
            )
    return program


def _begin(program: Program, stage: Stage) -> int:
    if stage.from_step is not None:
        return stage.from_step
    assert stage.from_tokens is not None
    last = program[-1]
    missing = stage.from_tokens - tokens_before(program, last.begin)
    return last.begin + -(-missing // last.config.tokens_per_step)


def _check_reach(program: Program, stage: Stage, step: int) -> None:
    """Positions of blends and of attention windows are counted as far, and no farther."""
    largest = max(settings.config.tokens_per_step for settings in program)
    if step * largest > MOST_TOKENS and tokens_before(program, step) > MOST_TOKENS:
        raise ConfigError(
            f"{stage} reaches to step {step}, and a run has at most 2^53 tokens "
            f"({MOST_TOKENS:,}): let it begin (its ramp end, or skip fewer steps) before that"
        )


def _weights(stage: Stage, names: Sequence[str]) -> Weights:
    assert stage.weights is not None
    times = Counter(names)
    for name, weight in stage.weights.items():
        if times[name] != 1:
            there = ", ".join(names[:20])
            raise ConfigError(f"{stage} gives {name!r} a weight; sources are {there}")
        if not isinstance(weight, (int, float)) or not (math.isfinite(weight) and weight > 0):
            raise ConfigError(
                f"{stage} gives {name!r} the weight {weight!r}; it must be a positive number "
                "(leave a source out to draw nothing from it)"
            )
    if not stage.weights:
        raise ConfigError(f"{stage} has empty weights; name at least one source")
    return tuple(float(stage.weights.get(name, 0)) for name in names)


def _pieces(
    program: Program, stage: Stage, begin: int, config: ScheduleConfig, names: Sequence[str]
) -> list[tuple[int, Weights]]:
    """(first step, weights): what the stage says of weights, its ramp in pieces."""
    wanted, ramp, last = _weights(stage, names), stage.ramp, program[-1]
    if ramp is None:
        return [(begin, wanted)]
    end = ramp.until_step
    if ramp.until_tokens is not None:
        missing = ramp.until_tokens - tokens_before(program, begin)
        end = begin + -(-missing // config.tokens_per_step)
    assert end is not None
    if end <= begin:
        raise ConfigError(
            f"{stage} begins at step {begin} and its ramp ends at {end}: let it end at a later step"
        )
    _check_reach(program, stage, end)
    before = [weight for weight in last.weights if weight is not None]
    if len(before) < len(last.weights):
        raise ConfigError(
            f"{stage} has a ramp, and the sources no weights that it could go on from: give them "
            "weights in the manifest (their tokens are what they have now)"
        )
    after = [weight for weight in wanted if weight is not None]
    return list(ramp_pieces(ramp, begin, end, before, after))


def _ramped(program: Program, ramp: Sequence[tuple[int, Weights]], end: int | None) -> Program:
    """The program and those pieces of a ramp that begin before ``end``."""
    for number, (begin, weights) in enumerate(ramp, 1):
        last, going = program[-1], number < len(ramp)
        settings = last._replace(begin=begin, skip_steps=0, weights=weights, ramping=going)
        if (end is None or begin < end) and not settings.same_draws(last):
            order = order_named(last.config.order)
            if not order.shuffled or len(set(order.odds(2))) > 1:
                raise ConfigError(
                    f"a ramp goes on at step {begin} with order {last.config.order}, which would "
                    "begin anew with every piece of the ramp: use proportional or uniform until it "
                    "ends, or one stage without a ramp"
                )
            program = (*program, settings)
    return program


def _loss_weights(
    changes: dict[str, float] | None, before: Sequence[float] | None, names: Sequence[str], by: str
) -> tuple[float, ...] | None:
    if not changes and before is None:
        return None
    result = [1.0] * len(names) if before is None else [float(weight) for weight in before]
    times, numbers = Counter(names), {name: number for number, name in enumerate(names)}
    for name, weight in (changes or {}).items():
        if times[name] != 1:
            there = ", ".join(names[:20])
            raise ConfigError(f"{by} gives {name!r} a loss weight; sources are {there}")
        result[numbers[name]] = float(weight)
    for name, weight in zip(names, result, strict=True):
        if not (math.isfinite(weight) and weight > 0):
            raise ConfigError(
                f"{by} gives {name!r} the loss weight {weight}; it must be a positive number (to "
                "measure a source without training on it, make it a validation set)"
            )
    return tuple(result) if set(result) != {1.0} else None


def _constant(tokens: int | None, by: str) -> Window | None:
    if tokens is not None and tokens < 0:
        raise ConfigError(f"{by} has attention_window {tokens}; it is positive, or 0 for none")
    return Window(tokens) if tokens else None


def _window(stage: Stage, begin: int, before: StageSettings) -> Window | None:
    if stage.attention_window is None:
        return before.window
    window = _constant(stage.attention_window, str(stage))
    if window is None or not stage.window_steps:
        return window
    first = before.window_at(begin)
    if first is None:
        raise ConfigError(
            f"{stage} has window_steps {stage.window_steps} and there is no window before it to "
            "begin with; give an attention_window to the stage before, or to the manifest"
        )
    return Window(window.last, first, begin, stage.window_steps)


def _config(stage: Stage, before: ScheduleConfig) -> ScheduleConfig:
    changes: dict[str, Any] = {
        name: value
        for name in ("tokens_per_step", "order", "num_cycles", "mix", "micro_step_tokens")
        if (value := getattr(stage, name)) is not None
    }
    if stage.order not in (None, before.order):
        changes.setdefault("num_cycles", None)
    if stage.mix == "step":
        changes.setdefault("micro_step_tokens", None)
    try:
        return replace(before, **changes)
    except ConfigError as error:
        raise ConfigError(f"{stage}: {error}") from error


def _check_transition(stage: Stage, before: ScheduleConfig, after: ScheduleConfig) -> None:
    if order_named(before.order).shuffled != order_named(after.order).shuffled:
        raise ConfigError(
            f"{stage} goes from order {before.order} to {after.order}: an epoch cannot be both "
            "sequential and shuffled; use shuffled orders in all stages"
        )
