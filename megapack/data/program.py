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
``megapack.data.resolve`` says in full what every stage then has.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

from megapack.data.order import order_named
from megapack.data.ramp import Ramp
from megapack.data.step import ScheduleConfig
from megapack.data.window import Window
from megapack.errors import ConfigError

__all__ = ["Program", "Stage", "StageSettings", "Weights", "drawn_by", "spans", "tokens_before"]

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
        return self.drawn == other.drawn

    @property
    def drawn(self) -> tuple[Any, ...]:
        """What decides its draws: equal for two ways to write one thing, as ``drawn_by`` says."""
        config = self.config
        return drawn_by(
            config.tokens_per_step,
            config.order,
            config.num_cycles,
            config.micro_step_tokens,
            self.weights,
        )


def drawn_by(
    tokens_per_step: int,
    order: str,
    num_cycles: int | None,
    micro_step_tokens: int | None,
    weights: Sequence[float | None],
) -> tuple[Any, ...]:
    """What a stage may say of its draws, in one form of all that draw alike.

    Weights count by their proportions; sources that are not drawn, at the end, by nothing; a step
    of one micro step is one of none; an order has cycles of its own.
    """
    known = order_named(order)
    rule = (known.times, tuple(known.odds(16)), num_cycles or known.num_cycles)
    return (tokens_per_step, micro_step_tokens or tokens_per_step, rule, _shares(tuple(weights)))


@lru_cache(maxsize=4)  # a stage is compared with the one before it, and then with the next
def _shares(weights: Weights) -> tuple[Fraction | None, ...]:
    total = sum((Fraction(weight) for weight in weights if weight), Fraction()) or 1
    shares = [None if weight is None else Fraction(weight) / total for weight in weights]
    while shares and shares[-1] == 0:
        shares.pop()
    return tuple(shares)


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
