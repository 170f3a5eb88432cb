"""Program of a run: the complete settings of its stages, each with its first step.

- ``resolve``: a configuration and a mixture -> ``Program``, one ``StageSettings`` per stage.
- ``skipped_pieces``: settings of the steps that a stage skips.
- ``within_epochs``: program with weights that keep to the limits of epochs (UniMax).

    resolve(config, Mixture(names=["web", "math"], weights=[1, 0], stages=[
        Stage(from_step=100, weights={"math": 1}, ramp=Ramp(until_step=200, pieces=2)),
        Stage(from_step=150, skip_steps=9),
    ]))
    # -> stages from step 0, 100, 150 and 200 with weights (1, 0), (.75, .25), (.25, .75), (0, 1);
    #    the third has skip_steps 9

A stage keeps the settings that it does not name. Its weights replace all weights: a source that
they do not name is not drawn from then on. Every bucket of every source keeps one cursor through
all stages (``megapack.data.schedule``), so each of its samples is drawn once per epoch.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from decimal import Context, Decimal, localcontext
from fractions import Fraction
from itertools import pairwise, zip_longest
from typing import TypeVar

from megapack.config import check_positive
from megapack.data.blend import Mixture, Ramp, Stage
from megapack.data.bucket_streams import whole_weights
from megapack.data.stage_settings import (
    STAGE_FIELDS,
    Program,
    StageSettings,
    Weights,
    spans,
    tokens_before,
)
from megapack.data.steps import MOST_TOKENS, ScheduleConfig, order_named
from megapack.errors import ConfigError

T = TypeVar("T")


def numbered(values: Mapping[str, T], names: Sequence[str], subject: str) -> dict[int, T]:
    """Return values by number of the source instead of its name. Raises ConfigError, with a message
    that begins with ``subject``, if a name is not that of exactly one source."""
    if not values:
        return {}
    counts, numbers = Counter(names), {name: number for number, name in enumerate(names)}
    for name in values:
        if counts[name] != 1:
            raise ConfigError(
                f"{subject} {name!r}, an unknown or ambiguous source; sources are "
                f"{', '.join(names[:20])}"
            )
    return {numbers[name]: value for name, value in values.items()}


# ---- A configuration and a mixture -> stages -----------------------------------------------------


def resolve(
    config: ScheduleConfig, mixture: Mixture, tokens_per_epoch: Sequence[int] = ()
) -> Program:
    """Return the stages with all settings, in order, without stages that change nothing.

    A skip edits the former run: it skips the draws of the former run at these steps, even if other
    stages begin among them. Edits apply one after the other: first the skips of ``mixture.stages``
    by ascending step, then ``mixture.decided`` in their order. With weights a, and b from step 10
    on, a skip of 4 steps at step 8 skips two steps of a and two of b. A second such skip skips
    steps 8 to 11 of the run that has the first one: again two of a and two of b.

    Args:
        config: settings from step 0 on.
        mixture: result of ``Mixture.of``.
        tokens_per_epoch: samples x capacity of every source; used only with ``mixture.run_tokens``.

    Raises ConfigError, which names the stage, the problem and the remedy.
    """
    decided_weights: dict[int, Stage] = {}  # by first step

    def settings() -> tuple[Program, list[tuple[int, int]]]:
        decided = [stage for _, stage in sorted(decided_weights.items())]
        program, skips = _without_skips(config, mixture, decided)
        return within_epochs(program, mixture, tokens_per_epoch), skips

    base, skips = settings()
    program = base
    for begin, count in skips:
        program = _skip(program, base, begin, count)
    for stage in mixture.decided:
        begin = stage.from_step or 0
        if stage.weights is not None:
            decided_weights[begin] = stage
        if stage.skip_steps:
            former, _ = settings()
            check_reach(former, stage, begin + stage.skip_steps)
            program = _with_settings(program, base, former)
            # The run goes back to this step: later weights were decided by steps that it undoes.
            decided_weights = {b: kept for b, kept in decided_weights.items() if b <= begin}
            base, _ = settings()
            program = _skip(program, base, begin, stage.skip_steps)
    final, _ = settings()
    for number, name in enumerate(mixture.names or ()):
        is_scored = mixture.held_out is not None and mixture.held_out[number]
        if not is_scored and not any(stage.weights[number] != 0 for stage in final):
            raise ConfigError(
                f"source {name!r} has weight 0 in every stage; give it a positive one in some "
                "stage, or leave it out"
            )
    return _with_settings(program, base, final)


# ---- Skipped steps -------------------------------------------------------------------------------


def _stage_at(program: Program, step: int) -> StageSettings:
    """Return the settings of a step, as a stage that begins there and skips nothing."""
    stage = program[bisect_right(program, step, key=lambda stage: stage.begin) - 1]
    return stage if stage.begin == step else stage._replace(begin=step, skip_steps=0, skipped=())


def _skip(former: Program, base: Program, begin: int, count: int) -> Program:
    """Return the program that continues at step ``begin`` where ``former``, the run before this
    skip, is at ``begin + count``; ``base``: settings of every step from now on, without skips."""
    end = begin + count
    inside = (stage for stage in former if begin < stage.begin < end)
    skipped = (_stage_at(former, begin), *inside)
    stage = _stage_at(base, begin)._replace(begin=begin, skip_steps=count, skipped=skipped)
    # Skips inside the range are part of what is skipped. Later ones are edits of the new run.
    program = _spliced(former, stage, base)
    for later in former:
        if later.begin >= end:
            for size in _skips_of(later):
                program = _skip(program, base, later.begin, size)
    return program


def _spliced(before: Program, stage: StageSettings, after: Program) -> Program:
    """Return the stages of ``before`` up to the stage, the stage, and those of ``after``."""
    return (
        *(other for other in before if other.begin < stage.begin),
        stage,
        *(other for other in after if other.begin > stage.begin),
    )


def _skips_of(stage: StageSettings) -> list[int]:
    """Return the skips that begin with a stage, in the order in which they were made."""
    return [*_skips_of(stage.skipped[0]), stage.skip_steps] if stage.skipped else []


def _with_settings(program: Program, before: Program, after: Program) -> Program:
    """Return the program with other settings from some step on; skips up to there do not change.
    ``before``, ``after``: settings of every step, without skips."""
    pairs = zip_longest(before, after)
    changes = [min(s.begin for s in pair if s) for pair in pairs if pair[0] != pair[1]]
    if not changes:
        return program
    result = after
    for stage in program:
        if stage.skip_steps and stage.begin <= min(changes):
            new = _stage_at(after, stage.begin)
            new = new._replace(skip_steps=stage.skip_steps, skipped=stage.skipped)
            result = _spliced(result, new, result)
        else:
            for size in _skips_of(stage):
                result = _skip(result, after, stage.begin, size)
    return result


def skipped_pieces(stage: StageSettings) -> list[tuple[StageSettings, int]]:
    """Return (settings, number of steps) of the pieces that a stage skips, in the order of draws;
    neighboring pieces with the same draws are merged."""
    pieces: list[tuple[StageSettings, int]] = []
    parts = spans(stage.skipped, stage.begin + stage.skip_steps) if stage.skipped else ()
    for part, end in parts:
        for piece, count in (*skipped_pieces(part), (part, end - part.begin)):
            if pieces and piece.same_draws(pieces[-1][0]):
                pieces[-1] = (pieces[-1][0], pieces[-1][1] + count)
            else:
                pieces.append((piece, count))
    return pieces


# ---- Settings of every step ----------------------------------------------------------------------


def _without_skips(
    config: ScheduleConfig, mixture: Mixture, decided_weights: Sequence[Stage]
) -> tuple[Program, list[tuple[int, int]]]:
    """Return the stages with all settings but skips, and the skips as (first step, steps)."""
    names = mixture.names or ()
    weights: Weights = tuple(mixture.weights or [None] * len(names))
    drawn = [weight for weight in weights if weight != 0]
    if None in drawn and any(weight is not None for weight in drawn):
        raise ConfigError(
            f"source {names[weights.index(None)]!r} has no weight, but others do: give all or none"
        )
    first = StageSettings(
        begin=0,
        skip_steps=0,
        config=config,
        weights=weights,
        loss_weights=_loss_weights({}, mixture.loss_weights, names, "the run"),
        fim_rates=_fim_rates({}, mixture, mixture.fim_rates, "the run"),
        window=mixture.window,
    )
    program: Program = (first,)
    ramp: list[tuple[int, Weights]] = []  # remaining (first step, weights) of the current ramp
    skips: list[tuple[int, int]] = []
    written, decided = deque(mixture.stages), deque(decided_weights)
    while written or decided:
        stage, begin = _next_stage(program, written, decided)
        last_begin = program[-1].begin if len(program) > 1 else 0
        last_begin = max([last_begin, *(first for first, _ in skips[-1:])])
        if begin <= last_begin:
            raise ConfigError(
                f"{stage} begins at step {begin}, and the one before it at {last_begin}: list "
                "stages in order, and give the settings of step 0 outside of stages"
            )
        check_reach(program, stage, begin + stage.skip_steps)
        program = _ramped(program, ramp, begin)
        last = program[-1]
        ramp = [piece for piece in ramp if piece[0] >= begin]
        if stage.skip_steps:
            skips.append((begin, stage.skip_steps))
        after = _changed(stage, last.config)
        if stage.weights is not None:
            ramp = _pieces(program, stage, begin, after, names)
        weights = ramp.pop(0)[1] if ramp and ramp[0][0] == begin else last.weights
        settings = StageSettings(
            begin=begin,
            skip_steps=0,
            config=after,
            weights=weights,
            num_lists=last.num_lists + (stage.exclude is not None),
            ramping=bool(ramp),
            loss_weights=_loss_weights(stage.loss_weights, last.loss_weights, names, str(stage)),
            fim_rates=_fim_rates(stage.fim_rates, mixture, last.fim_rates, str(stage)),
            window=stage.window_after(last.window, begin),
        )
        if settings == last._replace(begin=begin, ramping=settings.ramping):
            continue
        if order_named(last.config.order).shuffled != order_named(after.order).shuffled:
            raise ConfigError(
                f"{stage} goes from order {last.config.order} to {after.order}: an epoch cannot be "
                "both sequential and shuffled; use shuffled orders in all stages"
            )
        program = (*program, settings)
    return _ramped(program, ramp, None), skips


def _next_stage(
    program: Program, written: deque[Stage], decided: deque[Stage]
) -> tuple[Stage, int]:
    """Take the stage that begins first from its list; return it and its first step. A decided and a
    written stage at the same step become one, with the decided weights."""
    decided_begin = decided[0].from_step if decided else None
    if written:
        begin = written[0].from_step
        if begin is None:
            begin = _step_of_tokens(program, int(written[0].from_tokens or 0))
        if decided_begin is None or begin < decided_begin:
            return written.popleft(), begin
        if begin == decided_begin:
            stage, added = written.popleft(), decided.popleft()
            return replace(stage, weights=added.weights, ramp=None), begin
    stage = replace(decided.popleft(), skip_steps=0)
    assert stage.from_step is not None, "a run decides by step"
    return stage, stage.from_step


def _step_of_tokens(program: Program, tokens: int) -> int:
    """Return the first step of the last stage with at least that many tokens before it."""
    last = program[-1]
    missing = tokens - tokens_before(program, last.begin)
    return last.begin + -(-missing // last.config.tokens_per_step)


_IN_STAGE = "begin the stage or end its ramp earlier, or skip fewer steps"


def check_reach(program: Program, subject: object, step: int, remedy: str = _IN_STAGE) -> None:
    """Raise ConfigError if the steps before ``step`` have more tokens than blends can count."""
    largest = max(settings.config.tokens_per_step for settings in program)
    if step * largest > MOST_TOKENS and tokens_before(program, step) > MOST_TOKENS:
        raise ConfigError(
            f"{subject} reaches step {step}, and a run has at most 2^53 tokens "
            f"({MOST_TOKENS:,}): {remedy}"
        )


def _changed(stage: Stage, before: ScheduleConfig) -> ScheduleConfig:
    changes = {name: value for name in STAGE_FIELDS if (value := getattr(stage, name)) is not None}
    if stage.order not in (None, before.order):
        changes.setdefault("num_cycles", None)
    if stage.mix == "step":
        changes.setdefault("micro_step_tokens", None)
    try:
        return replace(before, **changes)
    except ConfigError as error:
        raise ConfigError(f"{stage}: {error}") from error


def _pieces(
    program: Program, stage: Stage, begin: int, config: ScheduleConfig, names: Sequence[str]
) -> list[tuple[int, Weights]]:
    """Return (first step, weights) per piece of the stage's ramp, or of the stage without one."""
    by_name = stage.weights or {}
    by_number = numbered(by_name, names, f"{stage} gives a weight to")
    _check_above_0(str(stage), "weight", by_name, "leave a source out to draw nothing from it")
    after = [float(by_number.get(number, 0)) for number in range(len(names))]
    ramp, last = stage.ramp, program[-1]
    if ramp is None:
        return [(begin, tuple(after))]
    end = ramp.until_step
    if end is None:
        missing = int(ramp.until_tokens or 0) - tokens_before(program, begin)
        end = begin + -(-missing // config.tokens_per_step)
    if end <= begin:
        raise ConfigError(
            f"{stage} begins at step {begin} and its ramp ends at {end}: make it end later"
        )
    check_reach(program, stage, end)
    before = [weight for weight in last.weights if weight is not None]
    if len(before) < len(last.weights):
        raise ConfigError(
            f"{stage} has a ramp, and the sources have no weights before it: give them weights in "
            "the manifest (without weights, their numbers of tokens decide)"
        )
    return list(ramp_pieces(ramp, begin, end, before, after))


def ramp_pieces(
    ramp: Ramp, begin: int, end: int, before: Sequence[float], after: Sequence[float]
) -> list[tuple[int, tuple[float, ...]]]:
    """Return (first step, shares) of every piece in order, and (end, ``after``). No piece is
    shorter than a step; ``before``, ``after``: weights of every source, in any unit."""
    old, new = ([weight / math.fsum(w) for weight in w] for w in (before, after))
    count = min(ramp.pieces, end - begin)
    bounds = [(end - begin) * i // count for i in range(count + 1)]
    result = []
    for low, high in pairwise(bounds):
        mean = _mean(ramp.shape, low, high, end - begin)
        shares = tuple(a + (b - a) * mean for a, b in zip(old, new, strict=True))
        result.append((begin + low, shares))
    return [*result, (end, tuple(after))]


def _mean(shape: str, low: int, high: int, length: int) -> float:
    """Return the mean of the shape over [low / length, high / length]."""
    if shape == "linear":
        return (low + high) / (2 * length)
    with localcontext(Context(prec=40)):
        rise = _sine_of_pi(high, length) - _sine_of_pi(low, length)
        return float(Decimal("0.5") - rise * length / (2 * _PI * (high - low)))


_PI = Decimal("3.14159265358979323846264338327950288419716939937510")


def _sine_of_pi(numerator: int, denominator: int) -> Decimal:
    """Return sin(pi * numerator / denominator), the same on every machine."""
    # The sine of C libraries differs in the last bit, and would change the samples of a run.
    x = _PI * numerator / denominator
    term, total, n = x, x, 1
    while abs(term) > Decimal("1e-35"):
        n += 2
        term = -term * x * x / (n * (n - 1))
        total += term
    return total


def _ramped(program: Program, ramp: Sequence[tuple[int, Weights]], end: int | None) -> Program:
    """Return the program with the pieces of a ramp that begin before ``end``."""
    for number, (begin, weights) in enumerate(ramp, 1):
        last, is_ramping = program[-1], number < len(ramp)
        settings = last._replace(begin=begin, weights=weights, ramping=is_ramping)
        if (end is None or begin < end) and not settings.same_draws(last):
            order = order_named(last.config.order)
            if not order.shuffled or len(set(order.odds(2))) > 1:
                raise ConfigError(
                    f"a ramp continues at step {begin} with order {last.config.order}, which would "
                    "restart with every piece of the ramp: use proportional or uniform until the "
                    "ramp ends, or one stage without a ramp"
                )
            program = (*program, settings)
    return program


def _loss_weights(
    changes: dict[str, float] | None, before: Sequence[float] | None, names: Sequence[str], by: str
) -> tuple[float, ...] | None:
    if not changes and before is None:
        return None
    result = [1.0] * len(names) if before is None else [float(weight) for weight in before]
    for number, weight in numbered(changes or {}, names, f"{by} gives a loss weight to").items():
        result[number] = float(weight)
    remedy = "to measure a source without training on it, make it a validation set"
    _check_above_0(by, "loss weight", dict(zip(names, result, strict=True)), remedy)
    return None if set(result) == {1.0} else tuple(result)


def _fim_rates(
    changes: Mapping[str, float] | None,
    mixture: Mixture,
    before: Sequence[float | None] | None,
    by: str,
) -> tuple[float, ...] | None:
    names = mixture.names or ()
    result = [rate or 0.0 for rate in before or [None] * len(names)]
    subject = f"{by} gives a rate of fill-in-the-middle to"
    for number, rate in numbered(changes or {}, names, subject).items():
        result[number] = float(rate)
    mixture.check_fim_rates(by, result)
    return tuple(result) if any(result) else None


def _check_above_0(by: str, quantity: str, values: Mapping[str, float], remedy: str) -> None:
    try:
        check_positive(by, **{f"{quantity} of {name!r}": value for name, value in values.items()})
    except ConfigError as error:
        raise ConfigError(f"{error} ({remedy})") from None


# ---- Weights that repeat no source too often -----------------------------------------------------


def within_epochs(program: Program, mixture: Mixture, tokens_per_epoch: Sequence[int]) -> Program:
    """Return the program with weights under which no source exceeds its ``max_epochs``.

    The weights of a stage decide the tokens of every source in the rest of ``run_tokens``. Sources
    that would exceed their limit get the tokens up to the limit; the others share the remainder by
    their weights. With equal weights this is UniMax (Chung et al. 2023, arXiv 2304.09151, Algorithm
    1). Three sources of 100, 1,000 and 10,000 tokens with equal weights and a limit of 4, in a run
    of 9,000:

        tokens  400, 4,000, 4,600    # 3,000 each; then (9,000 - 400) / 2 = 4,300; then the rest
        epochs  4, 4, .46

    A stage is planned up to the end of the run, so that a stage appended later does not change
    steps already taken. If all sources of a stage are at their limits, their shares are their
    remaining tokens, and ``check_epochs`` refuses a run in which the stage lasts longer. Tokens are
    those of steps, with padding. Skipped steps do not count. With partly filled rows
    (``row_tokens``) sources stay below their limits by the unfilled part.
    """
    if mixture.run_tokens is None or not tokens_per_epoch:
        return program
    assert isinstance(mixture.max_epochs, Sequence)
    limits = [  # remaining tokens of every source
        None if limit is None else math.floor(Fraction(limit) * tokens)
        for limit, tokens in zip(mixture.max_epochs, tokens_per_epoch, strict=True)
    ]
    remaining, result = mixture.run_tokens, list(program)
    shares: list[Fraction] = []
    for i, stage in enumerate(program):
        if remaining <= 0:
            break
        if i == 0 or stage.weights != program[i - 1].weights:
            requested = [
                tokens if weight is None else weight
                for weight, tokens in zip(stage.weights, tokens_per_epoch, strict=True)
            ]
            shares, is_limited = _limited(whole_weights(requested), limits, remaining)
            weights = tuple(map(float, shares)) if is_limited else stage.weights
        result[i] = stage._replace(weights=weights)
        steps = program[i + 1].begin - stage.begin if i + 1 < len(program) else remaining
        taken = min(remaining, steps * stage.config.tokens_per_step)
        remaining -= taken
        limits = [
            None if limit is None else max(0, math.floor(limit - share * taken))
            for limit, share in zip(limits, shares, strict=True)
        ]
    return tuple(result)


def _limited(
    weights: Sequence[int], limits: Sequence[int | None], tokens: int
) -> tuple[list[Fraction], bool]:
    """Return shares of ``tokens`` by weight up to the limits; True if a source is at its limit."""
    shares = [Fraction(0)] * len(weights)
    unassigned, total_weight = Fraction(tokens), sum(weights)
    unlimited = {d for d, weight in enumerate(weights) if weight}
    ratios = [(Fraction(n, weights[d]), n, d) for d in unlimited if (n := limits[d]) is not None]
    is_limited = False
    for ratio, limit, d in sorted(ratios):  # sources that reach their limits first
        if ratio * total_weight >= unassigned:
            break
        shares[d], is_limited = Fraction(limit, tokens), True
        unassigned, total_weight = unassigned - limit, total_weight - weights[d]
        unlimited.remove(d)
    for d in unlimited:
        shares[d] = unassigned / tokens * Fraction(weights[d], total_weight)
    if not unlimited:  # the limits add up to less than ``tokens``
        shares = shares if any(shares) else [Fraction(weight) for weight in weights]
        shares = [share / sum(shares) for share in shares]
    return shares, is_limited
