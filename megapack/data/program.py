"""A run as a program: stages, each of which changes something from a step on.

    sources:                                  # of the manifest, megapack.data.blend
      - {name: web,  prefix: web/docs,  index: web/docs.samples,  weight: 0.8}
      - {name: code, prefix: code/docs, index: code/docs.samples, weight: 0.2}
      - {name: math, prefix: math/docs, index: math/docs.samples, weight: 0}  # not yet
    stages:
      - {from_tokens: 2_000_000_000, tokens_per_step: 1048576}
      - {from_step: 9000, skip_steps: 200}    # data that made the loss spike
      - {from_step: 9500, attention_window: 8192, window_steps: 2000}  # it was 2048 in the manifest
      - {from_step: 12000, weights: {web: 0.5, math: 0.5}, order: grow-p2, loss_weights: {math: 2}}
      - {from_step: 14000, weights: {math: 1}, ramp: {until_step: 15000}}  # little by little
      - {from_step: 15000, exclude: {web: takedown.txt}}  # documents masked from here on

What a stage does not say stays as it was. Its weights replace all weights: a source that they do
not name is not drawn from then on. Every bucket of every source keeps one cursor through all stages
(``megapack.data.stage``), so whatever stages do, each of its samples comes once per epoch.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

from megapack.data.order import order_named
from megapack.data.ramp import Ramp, ramp_pieces
from megapack.data.step import ScheduleConfig
from megapack.data.window import Window
from megapack.errors import ConfigError

__all__ = ["Program", "Stage", "StageSettings", "Weights", "resolve", "spans", "tokens_before"]

# Of every source: a share of the tokens, 0 for none, None for its size.
Weights = tuple[float | None, ...]


@dataclass(frozen=True, kw_only=True)
class Stage:
    """What changes from a step on. Everything but where it begins may be left out."""

    from_step: int | None = None
    """The first step of the stage, counted from the beginning of the run."""
    from_tokens: int | None = None
    """Instead of from_step: the first step before which so many tokens were taken, with padding."""
    weights: dict[str, float] | None = None
    """Source name -> share of the tokens; a source that is not named is not drawn."""
    tokens_per_step: int | None = None
    """As in ``ScheduleConfig``, like all below."""
    order: str | None = None
    num_cycles: int | None = None
    """Goes with order: a stage that gives another order and not this takes the order's own."""
    mix: Literal["step", "micro_step"] | None = None
    micro_step_tokens: int | None = None
    skip_steps: int = 0
    """Before the stage begins, what the stage before it would have drawn in so many steps is passed
    over: those samples count as seen, and come again with the next epoch."""
    exclude: dict[str, str] | None = None
    """Source name -> file of document ids, .npy of integers or text with one per line: masked from
    here to the end of the run (``megapack.data.exclusions``)."""
    ramp: Ramp | None = None
    """The weights are reached step by step (``megapack.data.ramp``); None: at once. Later stages
    without weights leave the ramp going."""
    loss_weights: dict[str, float] | None = None
    """Source name -> ``Source.loss_weight`` from here on; that of a source not named stays."""
    attention_window: int | None = None
    """Attention stays inside pieces of so many tokens of a segment (``megapack.data.window``); 0:
    inside segments, as without a window."""
    window_steps: int = 0
    """The window goes in so many steps from the one before to this one, on a line."""

    def __post_init__(self) -> None:
        if (self.from_step is None) == (self.from_tokens is None):
            raise ConfigError("a stage begins at from_step or at from_tokens: give one of them")
        if self.skip_steps < 0:
            raise ConfigError(f"skip_steps is {self.skip_steps}; it must be 0 (none) or more")
        if self.window_steps < 0 or (self.window_steps and not self.attention_window):
            raise ConfigError(
                f"{self} has window_steps {self.window_steps} and attention_window "
                f"{self.attention_window}; give the window it goes to, and a number of steps"
            )
        if self.exclude == {}:
            raise ConfigError(f"{self} has an empty exclude; name a source and its file")
        if self.ramp is not None and self.weights is None:
            raise ConfigError(f"{self} has a ramp and no weights; give those to reach")

    def relative_to(self, folder: Path) -> Stage:
        """The stage with paths relative to the manifest's folder."""
        if self.exclude is None:
            return self
        files = {name: str(folder / path) for name, path in self.exclude.items()}
        return replace(self, exclude=files)

    def __str__(self) -> str:
        if self.from_tokens is None:
            return f"the stage from step {self.from_step}"
        return f"the stage from {self.from_tokens} tokens"


class StageSettings(NamedTuple):
    """A stage in full: everything that decides its draws, beside what was drawn before it."""

    begin: int
    """Its first step."""
    skip_steps: int
    config: ScheduleConfig
    weights: Weights
    num_lists: int = 0
    """Of excluded documents, in force."""
    ramping: bool = False
    """Whether it is a piece of a ramp, after which another one comes."""
    loss_weights: tuple[float, ...] | None = None
    """Of every source; None: 1 for all."""
    window: Window | None = None

    def window_at(self, step: int) -> int | None:
        """The attention window of a step of the stage, tokens; None: there is none."""
        return None if self.window is None else self.window.at(step)

    def same_draws(self, other: StageSettings) -> bool:
        """Whether it goes on as the other one would have, but for what it skips."""
        return (self.config, self.weights) == (other.config, other.weights)


# The stages of a run in order; the first begins at step 0, each later one changes something.
Program = tuple[StageSettings, ...]


class _HasBegin(Protocol):
    @property
    def begin(self) -> int: ...


S = TypeVar("S", bound=_HasBegin)


def spans(stages: Sequence[S], num_steps: int) -> Iterator[tuple[S, int]]:
    """The first stage and all that begin before ``num_steps``, and the step at which each ends."""
    ends = [stage.begin for stage in stages[1:]] + [num_steps]
    for stage, end in zip(stages, ends, strict=True):
        if stage.begin < max(1, num_steps):
            yield stage, min(end, num_steps)


def tokens_before(program: Program, step: int) -> int:
    """Tokens of the steps before ``step``, padding included."""
    return sum(
        (end - stage.begin) * stage.config.tokens_per_step for stage, end in spans(program, step)
    )


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
    if before.cost_window > 1:
        raise ConfigError(
            f"{stage} ends one with cost_window {before.cost_window}: a window that is cut has "
            "drawn some of its samples and not others, which no cursor can tell; set cost_window "
            "to 1"
        )
    if order_named(before.order).shuffled != order_named(after.order).shuffled:
        raise ConfigError(
            f"{stage} goes from order {before.order} to {after.order}: an epoch cannot be both "
            "sequential and shuffled; use shuffled orders in all stages"
        )
