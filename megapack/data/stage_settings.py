"""Complete settings of a stage, and values derived from them alone.

- ``StageSettings``: all settings that determine a stage's draws; ``Program``: the stages of a run.
- ``drawn_by``: key of the draws, equal for stages that draw alike.
- ``Window``: attention window, which may grow.
- ``spans``, ``tokens_before``: ends of stages, tokens of steps.

    Window(last=64, first=16, begin=10, steps=3).at(11)    # -> 32, a third of the way
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, Protocol, TypeVar

from megapack.data.bucket_streams import whole_weights
from megapack.data.steps import ScheduleConfig, StepView, order_named

# One per source: share of the tokens; 0: none; None: in proportion to its size.
Weights = tuple[float | None, ...]


class Window(NamedTuple):
    """Attention window: ``first`` tokens at step ``begin``, ``last`` at ``begin + steps``.

    A window of w tokens cuts a segment at its positions w, 2 w, ... and limits attention to the
    pieces, so a step costs less. Labels and position ids do not change. SkyLadder (Zhu et al. 2025,
    arXiv 2503.15450) grows the window to the whole context: faster, and better at the same number
    of tokens. Only boundaries differ (``cut_bounds`` in ``megapack.data.batch``). RoPE is relative,
    so it may restart at a boundary (as Megatron's does). Other layers that read the boundaries
    (state space models) are cut, too.

    The window grows linearly, rounded down to a multiple of the greatest common divisor of both
    sizes; with ``steps`` 0 it is ``last`` immediately.
    """

    last: int
    first: int = 0
    begin: int = 0
    steps: int = 0

    def at(self, step: int) -> int:
        """Return the window of a step of the run, tokens."""
        elapsed = step - self.begin
        if elapsed >= self.steps:
            return self.last
        unit = math.gcd(self.first, self.last)
        num_units = (self.last - self.first) * elapsed // (unit * self.steps)
        return self.first + unit * num_units

    def __str__(self) -> str:
        if not self.steps:
            return f"{self.last:,} tokens"
        end = self.begin + self.steps
        return f"{self.first:,} at step {self.begin:,} to {self.last:,} at step {end:,}"


# Fields of ScheduleConfig that a stage can change; the others apply to the whole run.
STAGE_FIELDS = ("tokens_per_step", "order", "num_cycles", "mix", "micro_step_tokens")


class StageSettings(NamedTuple):
    """Everything that determines the draws of a stage, except the cursors at its first step."""

    begin: int
    """First step of the stage."""
    skip_steps: int
    """Steps to skip before the stage: ``begin`` to ``begin + skip_steps`` without this skip."""
    config: ScheduleConfig
    weights: Weights
    num_lists: int = 0
    """Exclusion lists in force."""
    ramping: bool = False
    """The stage is a piece of a ramp, and another piece follows."""
    loss_weights: tuple[float, ...] | None = None
    """Loss weights, one per source; None: 1 for all."""
    fim_rates: tuple[float, ...] | None = None
    """Share of documents with their middle at the end, one per source; None: 0 for all."""
    window: Window | None = None
    skipped: tuple[StageSettings, ...] = ()
    """Stages of the skipped steps in the run without the skip; the first begins at ``begin``."""

    @property
    def view(self) -> StepView:
        """View that all steps of the stage share."""
        return StepView(num_lists=self.num_lists, seed=self.config.seed)

    def window_at(self, step: int) -> int | None:
        """Return the attention window of a step of the stage, tokens; None: no limit."""
        return None if self.window is None else self.window.at(step)

    @property
    def of_draws(self) -> dict[str, Any]:
        """Settings that determine the draws of the stage, by name."""
        fields = {name: getattr(self.config, name) for name in STAGE_FIELDS}
        return {**fields, "weights": self.weights}

    def same_draws(self, other: StageSettings) -> bool:
        """Return whether both stages draw alike, apart from skipped steps."""
        return drawn_by(self.of_draws) == drawn_by(other.of_draws)


def drawn_by(stage: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return a key of a stage's draws (``of_draws``), equal for stages that draw alike. Weights are
    reduced to proportions, without sources of weight 0 at the end. A step of one micro step equals
    a step without micro steps. ``num_cycles`` None is the order's default."""
    tokens, order = stage["tokens_per_step"], order_named(stage["order"])
    rule = (order.times, tuple(order.odds(16)), stage["num_cycles"] or order.num_cycles)
    return (
        tokens,
        stage["micro_step_tokens"] or tokens,
        rule,
        _proportions(tuple(stage["weights"])),
    )


@lru_cache(maxsize=4)  # every stage is compared with the previous and the next one
def _proportions(weights: Weights) -> tuple[int | None, ...]:
    """Return weights as the smallest integers of the same proportions, up to the last above 0."""
    whole = whole_weights([weight or 0 for weight in weights])
    unit = math.gcd(*whole) or 1
    proportions = [
        None if weight is None else w // unit for w, weight in zip(whole, weights, strict=True)
    ]
    while proportions and proportions[-1] == 0:
        proportions.pop()
    return tuple(proportions)


# The stages of a run in order; the first begins at step 0, each later one changes something.
Program = tuple[StageSettings, ...]


class _HasBegin(Protocol):
    @property
    def begin(self) -> int: ...


S = TypeVar("S", bound=_HasBegin)


def spans(stages: Sequence[S], num_steps: int) -> Iterator[tuple[S, int]]:
    """Yield the first stage and all that begin before ``num_steps``, with the end of each."""
    ends = [stage.begin for stage in stages[1:]] + [num_steps]
    for stage, end in zip(stages, ends, strict=True):
        if stage.begin < max(1, num_steps):
            yield stage, min(end, num_steps)


def tokens_before(program: Program, step: int) -> int:
    """Return the tokens of all steps before ``step``, padding included."""
    return sum(
        (end - stage.begin) * stage.config.tokens_per_step for stage, end in spans(program, step)
    )
