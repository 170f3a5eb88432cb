"""Stages as they are written -> stages in full: what each of them has, and from which step on."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from decimal import Context, Decimal, localcontext
from fractions import Fraction
from functools import cached_property, lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from megapack.config import check_positive, check_range
from megapack.data.attention_window import Window
from megapack.data.bucket_order import order_named
from megapack.errors import ConfigError

# ---- What a schedule is made with, ScheduleConfig, and what it is made of, steps and draws ------


@dataclass(frozen=True, kw_only=True)
class StepConfig:
    """What a step consists of, and how steps follow each other; all of it but the seed."""

    tokens_per_step: int
    """Tokens of one optimizer step over all ranks, padding included."""
    order: str = "proportional"
    """How buckets follow each other; a name of ``megapack.data.bucket_order.ORDERS``."""
    num_cycles: int | None = None
    """Times per epoch that a curriculum starts over; null takes the order's own number."""
    mix: Literal["step", "micro_step"] = "step"
    """One bucket per optimizer step, or one per ``micro_step_tokens``."""
    micro_step_tokens: int | None = None
    """Of ``mix: micro_step``: tokens that all ranks take from one bucket at a time. It is fixed
    here, and not by the ranks there are, so that steps stay independent of them."""
    row_tokens: int | None = None
    """Rows of this many tokens hold ``n = row_tokens // capacity`` samples each, which begin at 0,
    s, 2 s, ..., with ``s = row_tokens // n`` (rounded down to the alignment); what a sample leaves
    of its s tokens, and the last one of the row, is padding. A row of 64 holds samples of 24 at 0
    and 32, samples of 10 at 0, 10, 20, 30, 40 and 50. Needed only when a capacity does not divide
    ``tokens_per_step``."""
    cost_window: int = 1
    """The samples that a source gives to this many consecutive draws of a bucket are put in order
    of attention cost, so that a draw holds samples of like cost (``megapack.data.bucket_order``);
    for
    draws with one sample per rank, which no dealing can balance. Costs of steps differ as much more
    as those of ranks differ less, and sources of unlike costs stay unlike, since every draw has its
    exact share of each. 1: off."""

    def __post_init__(self) -> None:
        order_named(self.order)
        check_positive(
            "data",
            tokens_per_step=self.tokens_per_step,
            num_cycles=self.num_cycles,
            micro_step_tokens=self.micro_step_tokens,
            row_tokens=self.row_tokens,
            cost_window=self.cost_window,
        )
        if (self.mix == "micro_step") != (self.micro_step_tokens is not None):
            raise ConfigError("mix='micro_step' and micro_step_tokens go together: give both")
        if self.tokens_per_step % self.draw_tokens:
            raise ConfigError(
                f"micro_step_tokens {self.draw_tokens} does not divide tokens_per_step "
                f"{self.tokens_per_step}"
            )

    @property
    def draw_tokens(self) -> int:
        """Tokens that come from one bucket at a time."""
        return self.micro_step_tokens or self.tokens_per_step

    @property
    def draws_per_step(self) -> int:
        return self.tokens_per_step // self.draw_tokens


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig(StepConfig):
    """Everything, beside the index, that decides what a step contains."""

    seed: int = 0
    """Of shuffles and of the order of buckets."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("run", at_least=0, seed=self.seed)


@dataclass(frozen=True, eq=False)
class Draw:
    """Samples of one bucket that go through the model together.

    Attributes:
        bucket: number of the bucket among those that have samples, by rising capacity.
        capacity: tokens per sample.
        sample_ids: (samples,) int64, global ids.
    """

    bucket: int
    capacity: int
    sample_ids: NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Step:
    """One optimizer step of all ranks; ``mix="step"`` has one draw, ``micro_step`` several.

    Attributes:
        index: of the step, counted from 0.
        draws: what it holds.
        num_lists: of excluded documents in force.
        count_labels: (sample ids, num_lists) -> tokens of each sample that have a label.
    """

    index: int
    draws: tuple[Draw, ...]
    num_lists: int
    count_labels: Callable[[NDArray[np.int64], int], NDArray[np.int64]] = field(repr=False)

    @property
    def bucket(self) -> int:
        """Of the first draw."""
        return self.draws[0].bucket

    @property
    def capacity(self) -> int:
        """Of the first draw, tokens per sample."""
        return self.draws[0].capacity

    @cached_property
    def sample_ids(self) -> NDArray[np.int64]:
        """Of all draws, int64."""
        return np.concatenate([draw.sample_ids for draw in self.draws])

    @cached_property
    def label_counts(self) -> NDArray[np.int64]:
        """Of every sample, in the order of ``sample_ids``, tokens that have a label; int64."""
        return self.count_labels(self.sample_ids, self.num_lists)

    @property
    def num_label_tokens(self) -> int:
        """Tokens of the step that have a label: its loss denominator."""
        return int(self.label_counts.sum())


# ---- A way from one blend to another: weights as a function of progress, in pieces of constant wei
#     stages:
#       - {from_step: 1000, weights: {web: 0.5, code: 0.5}, ramp: {until_step: 5000, shape: cosine}}
#
# Over n steps the share of a source goes from a to b as a + (b - a) f(t / n), with f(x) = x
# (linear)
# or (1 - cos(pi x)) / 2 (cosine). The steps are cut into pieces of equal length, each a stage of
# its
# own with an exact blend; its shares are the means of a + (b - a) f over its steps.
#
# So at the end of every piece the blend has followed f, and between two ends it is at most
# |b - a| n / (8 pieces^2) steps' worth of tokens from it (linear; pi / 2 times that for cosine):
# what
# a function of slope s and mean 0 adds up to over a length h is at most s h^2 / 8. With 32 pieces
# that is |b - a| n / 8192. To this comes what every stage may be off, 1.69 samples per bucket.

_PI = Decimal("3.14159265358979323846264338327950288419716939937510")


@dataclass(frozen=True, kw_only=True)
class Ramp:
    """How the weights of a stage are reached; they hold from the end of the ramp on."""

    until_step: int | None = None
    """The first step that has the stage's own weights."""
    until_tokens: int | None = None
    """Instead of until_step: the first step before which so many tokens were taken."""
    shape: Literal["linear", "cosine"] = "linear"
    pieces: int = 32

    def __post_init__(self) -> None:
        if (self.until_step is None) == (self.until_tokens is None):
            raise ConfigError("a ramp ends at until_step or at until_tokens: give one of them")
        if self.pieces < 1:
            raise ConfigError(f"pieces of a ramp are {self.pieces}; give 1 or more")


def ramp_pieces(
    ramp: Ramp, begin: int, end: int, before: Sequence[float], after: Sequence[float]
) -> list[tuple[int, tuple[float, ...]]]:
    """(first step, shares) of every piece in order, and of what follows the last one.

    Args:
        ramp: its shape and number of pieces; no piece is shorter than a step.
        begin, end: steps [begin, end) of the run.
        before, after: weights of every source, in any unit.
    """
    old, new = ([weight / math.fsum(w) for weight in w] for w in (before, after))
    count = min(ramp.pieces, end - begin)
    bounds = [(end - begin) * i // count for i in range(count + 1)]
    result = []
    for low, high in pairwise(bounds):
        done = _mean(ramp.shape, low, high, end - begin)
        shares = tuple(a + (b - a) * done for a, b in zip(old, new, strict=True))
        result.append((begin + low, shares))
    return [*result, (end, tuple(after))]


def _mean(shape: str, low: int, high: int, length: int) -> float:
    """Mean of the shape over [low / length, high / length]."""
    if shape == "linear":
        return (low + high) / (2 * length)
    with localcontext(Context(prec=40)):
        rise = _sine_of_pi(high, length) - _sine_of_pi(low, length)
        return float(Decimal("0.5") - rise * length / (2 * _PI * (high - low)))


def _sine_of_pi(numerator: int, denominator: int) -> Decimal:
    """sin(pi * numerator / denominator), the same on every machine: libraries differ in the last
    bit of theirs, and so would the samples."""
    x = _PI * numerator / denominator
    term, total, n = x, x, 1
    while abs(term) > Decimal("1e-35"):
        n += 2
        term = -term * x * x / (n * (n - 1))
        total += term
    return total


# ---- A run as a program: stages, each of which changes something from a step on -----------------
#     sources:                                  # of the manifest, megapack.data.blend
#       - {name: web,  prefix: web/docs,  index: web/docs.samples,  weight: 0.8}
#       - {name: code, prefix: code/docs, index: code/docs.samples, weight: 0.2}
#       - {name: math, prefix: math/docs, index: math/docs.samples, weight: 0}  # not yet
#     stages:
#       - {from_tokens: 2_000_000_000, tokens_per_step: 1048576}
#       - {from_step: 9000, skip_steps: 200}    # data that made the loss spike
#       - {from_step: 9500, attention_window: 8192, window_steps: 2000}  # it was 2048 in the
#       manifest
#       - {from_step: 12000, weights: {web: 0.5, math: 0.5}, order: grow-p2, loss_weights: {math:
#       2}}
#       - {from_step: 14000, weights: {math: 1}, ramp: {until_step: 15000}}  # little by little
#       - {from_step: 15000, exclude: {web: takedown.txt}}  # documents masked from here on
#
# What a stage does not say stays as it was. Its weights replace all weights: a source that they do
# not name is not drawn from then on. Every bucket of every source keeps one cursor through all
# stages
# (``megapack.data.schedule``), so whatever stages do, each of its samples comes once per epoch.
# ``megapack.data.program`` says in full what every stage then has.

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
    """The weights are reached step by step (``megapack.data.program``); None: at once. Later stages
    without weights leave the ramp going."""
    loss_weights: dict[str, float] | None = None
    """Source name -> ``Source.loss_weight`` from here on; that of a source not named stays."""
    attention_window: int | None = None
    """Attention stays inside pieces of so many tokens of a segment
    (``megapack.data.attention_window``); 0:
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
