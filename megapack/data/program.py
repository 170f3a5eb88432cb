"""A run as a program: its stages in full, and from which step on each of them holds.

- ``resolve``: a configuration and a mixture -> ``Program``, one ``StageSettings`` per stage.
- ``skipped_pieces``: which stages drew the steps that a stage skips.
- ``within_epochs``: the same with weights that repeat no source too often (UniMax).

    resolve(config, Mixture(names=["web", "math"], weights=[1, 0], stages=[
        Stage(from_step=100, weights={"math": 1}, ramp=Ramp(until_step=200, pieces=2)),
        Stage(from_step=150, skip_steps=9),
    ]))
    # -> stages from step 0, 100, 150 and 200 with weights (1, 0), (.75, .25), (.25, .75), (0, 1);
    #    the third has skip_steps 9

What a stage does not say stays as it was. Its weights replace all weights: a source that they do
not name is not drawn from then on. Every bucket of every source keeps one cursor through all stages
(``megapack.data.schedule``), so whatever stages do, each of its samples comes once per epoch.
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

from megapack.config import check_positive, check_range
from megapack.data.blend import Mixture, Ramp, Stage
from megapack.data.bucket_streams import whole_weights
from megapack.data.stage_settings import (
    STAGE_FIELDS,
    Program,
    StageSettings,
    Weights,
    Window,
    spans,
    tokens_before,
)
from megapack.data.steps import MOST_TOKENS, ScheduleConfig, order_named
from megapack.errors import ConfigError

T = TypeVar("T")


def numbered(given: Mapping[str, T], names: Sequence[str], what: str) -> dict[int, T]:
    """Values by name of a source -> by its number. Raises ConfigError: a name that no source has,
    or several have; ``what`` is how the message begins."""
    if not given:
        return {}
    times, numbers = Counter(names), {name: number for number, name in enumerate(names)}
    for name in given:
        if times[name] != 1:
            raise ConfigError(f"{what} {name!r}; sources are {', '.join(names[:20])}")
    return {numbers[name]: value for name, value in given.items()}


# ---- A configuration and a mixture -> stages -----------------------------------------------------


def resolve(
    config: ScheduleConfig, mixture: Mixture, tokens_per_epoch: Sequence[int] = ()
) -> Program:
    """Stages in full, in order; those that change nothing are left out.

    A skip edits the former run: it skips what the former run draws at these steps, also where other
    stages begin among them. Edits are made one after the other: the skips
    of ``mixture.stages`` by rising step, then ``mixture.decided`` as listed. With weights a, and b
    from step 10 on, a skip of 4 steps at step 8 skips two steps of a and two of b. A second such
    skip skips steps 8 to 11 of the run that has the first one: again two of a and two of b.

    Args:
        config: from step 0 on.
        mixture: ``Mixture.of`` the sources.
        tokens_per_epoch: samples x capacity of every source, for ``within_epochs``; not needed
            without ``mixture.run_tokens``.

    Raises:
        ConfigError: names the stage, what is wrong with it, and the remedy.
    """
    weights: dict[int, Stage] = {}  # decided, by first step

    def settings() -> tuple[Program, list[tuple[int, int]]]:
        decided = [weights[begin] for begin in sorted(weights)]
        program, skips = _without_skips(config, mixture, decided)
        return within_epochs(program, mixture, tokens_per_epoch), skips

    base, skips = settings()
    program = base
    for begin, count in skips:
        program = _skip(program, base, begin, count)
    for stage in mixture.decided:
        begin = stage.from_step or 0
        if stage.weights is not None:
            weights[begin] = stage
        if stage.skip_steps:
            former, _ = settings()
            check_reach(former, stage, begin + stage.skip_steps)
            program = _with_settings(program, base, former)
            # The run goes back to this step: later weights were decided by steps it takes back.
            weights = {first: kept for first, kept in weights.items() if first <= begin}
            base, _ = settings()
            program = _skip(program, base, begin, stage.skip_steps)
    final, _ = settings()
    for number, name in enumerate(mixture.names or ()):
        if not any(stage.weights[number] != 0 for stage in final):
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
    """Return the program that continues at step ``begin`` where ``former`` is at ``begin + count``.

    Args:
        former: the run before this skip.
        base: settings of every step from now on; they skip nothing.
    """
    end = begin + count
    inside = (stage for stage in former if begin < stage.begin < end)
    skipped = (_stage_at(former, begin), *inside)
    stage = _stage_at(base, begin)._replace(begin=begin, skip_steps=count, skipped=skipped)
    # Skips inside the range are part of what is skipped. Later ones are edits of the new run.
    program = (
        *(stage for stage in former if stage.begin < begin),
        stage,
        *(stage for stage in base if stage.begin > begin),
    )
    for later in former:
        if later.begin >= end:
            for size in _skips_of(later):
                program = _skip(program, base, later.begin, size)
    return program


def _skips_of(stage: StageSettings) -> list[int]:
    """Return the skips that begin with a stage, in the order in which they were made."""
    return [*_skips_of(stage.skipped[0]), stage.skip_steps] if stage.skipped else []


def _with_settings(program: Program, before: Program, after: Program) -> Program:
    """Return the program with other settings from some step on; skips up to there do not change.

    Args:
        before, after: settings of every step, without skips.
    """
    pairs = zip_longest(before, after)
    changes = [min(s.begin for s in pair if s) for pair in pairs if pair[0] != pair[1]]
    if not changes:
        return program
    result = after
    for stage in program:
        if stage.skip_steps and stage.begin <= min(changes):
            new = _stage_at(after, stage.begin)
            new = new._replace(skip_steps=stage.skip_steps, skipped=stage.skipped)
            result = (
                *(other for other in result if other.begin < stage.begin),
                new,
                *(other for other in result if other.begin > stage.begin),
            )
        else:
            for size in _skips_of(stage):
                result = _skip(result, after, stage.begin, size)
    return result


def skipped_pieces(stage: StageSettings) -> list[tuple[StageSettings, int]]:
    """Return (settings, number of steps) of what a stage skips, in the order of draws.

    Neighboring pieces that draw alike are merged.
    """
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
    """Return the stages in full without their skips, and the skips as (first step, steps)."""
    names = mixture.names or ()
    weights: Weights = tuple(mixture.weights or [None] * len(names))
    drawn = [weight for weight in weights if weight != 0]
    if None in drawn and any(weight is not None for weight in drawn):
        raise ConfigError(
            f"source {names[weights.index(None)]!r} has no weight, others have: give all or none"
        )
    check_range("the run", at_least=0, attention_window=mixture.attention_window)
    window = Window(mixture.attention_window) if mixture.attention_window else None
    factors = _loss_weights({}, mixture.loss_weights, names, "the run")
    rates = _fim_rates({}, mixture, mixture.fim_rates, "the run")
    settings = StageSettings(0, 0, config, weights)
    program: Program = (settings._replace(loss_weights=factors, fim_rates=rates, window=window),)
    ramp: list[tuple[int, Weights]] = []  # from which steps on one that has begun has which weights
    skips: list[tuple[int, int]] = []
    written, decided = deque(mixture.stages), deque(decided_weights)
    while written or decided:
        stage, begin = _next_stage(program, written, decided)
        last_begin = program[-1].begin if len(program) > 1 else 0
        last_begin = max([last_begin, *(first for first, _ in skips[-1:])])
        if begin <= last_begin:
            raise ConfigError(
                f"{stage} begins at step {begin}, and the one before it at {last_begin}: list "
                "stages in order, and what holds from step 0 on outside of them"
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
            window=_window(stage, begin, last),
        )
        if settings == last._replace(begin=begin, ramping=settings.ramping):
            continue
        shuffled = [order_named(of.order).shuffled for of in (last.config, after)]
        if shuffled[0] != shuffled[1]:
            raise ConfigError(
                f"{stage} goes from order {last.config.order} to {after.order}: an epoch cannot be "
                "both sequential and shuffled; use shuffled orders in all stages"
            )
        program = (*program, settings)
    return _ramped(program, ramp, None), skips


def _next_stage(
    program: Program, written: deque[Stage], decided: deque[Stage]
) -> tuple[Stage, int]:
    """The stage that begins first, taken from its list, and its first step.

    Where one of each begins, they are one stage: decided weights go before written ones.
    """
    begin = decided[0].from_step if decided else None
    if written:
        own = written[0].from_step
        if own is None:
            own = _step_of_tokens(program, int(written[0].from_tokens or 0))
        if begin is None or own < begin:
            return written.popleft(), own
        if own == begin:
            stage, added = written.popleft(), decided.popleft()
            return replace(stage, weights=added.weights, ramp=None), own
    stage = replace(decided.popleft(), skip_steps=0)
    assert stage.from_step is not None, "a run decides by step"
    return stage, stage.from_step


def _step_of_tokens(program: Program, tokens: int) -> int:
    """The first step before which so many tokens were taken, should the last stage go on."""
    last = program[-1]
    missing = tokens - tokens_before(program, last.begin)
    return last.begin + -(-missing // last.config.tokens_per_step)


_IN_STAGE = "let it begin (its ramp end, or skip fewer steps) before that"


def check_reach(program: Program, what: object, step: int, remedy: str = _IN_STAGE) -> None:
    """Positions of blends and of attention windows are counted as far, and no farther.

    Raises:
        ConfigError: ``what`` reaches to a step before which more tokens are taken.
    """
    largest = max(settings.config.tokens_per_step for settings in program)
    if step * largest > MOST_TOKENS and tokens_before(program, step) > MOST_TOKENS:
        raise ConfigError(
            f"{what} reaches to step {step}, and a run has at most 2^53 tokens "
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
    """(first step, weights): what the stage says of weights, its ramp in pieces."""
    given = stage.weights or {}
    by_number = numbered(given, names, f"{stage} gives a weight to")
    _check_above_0(str(stage), "weight", given, "leave a source out to draw nothing from it")
    wanted = [float(by_number.get(number, 0)) for number in range(len(names))]
    ramp, last = stage.ramp, program[-1]
    if ramp is None:
        return [(begin, tuple(wanted))]
    end = ramp.until_step
    if end is None:
        missing = int(ramp.until_tokens or 0) - tokens_before(program, begin)
        end = begin + -(-missing // config.tokens_per_step)
    if end <= begin:
        raise ConfigError(
            f"{stage} begins at step {begin} and its ramp ends at {end}: let it end at a later step"
        )
    check_reach(program, stage, end)
    before = [weight for weight in last.weights if weight is not None]
    if len(before) < len(last.weights):
        raise ConfigError(
            f"{stage} has a ramp, and the sources no weights that it could go on from: give them "
            "weights in the manifest (their tokens are what they have now)"
        )
    return list(ramp_pieces(ramp, begin, end, before, wanted))


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


_PI = Decimal("3.14159265358979323846264338327950288419716939937510")


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


def _ramped(program: Program, ramp: Sequence[tuple[int, Weights]], end: int | None) -> Program:
    """The program and those pieces of a ramp that begin before ``end``."""
    for number, (begin, weights) in enumerate(ramp, 1):
        last, going = program[-1], number < len(ramp)
        settings = last._replace(begin=begin, weights=weights, ramping=going)
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
    for number, weight in numbered(changes or {}, names, f"{by} gives a loss weight to").items():
        result[number] = float(weight)
    remedy = "to measure a source without training on it, make it a validation set"
    _check_above_0(by, "loss weight", dict(zip(names, result, strict=True)), remedy)
    return tuple(result) if set(result) != {1.0} else None


def _fim_rates(
    changes: Mapping[str, float] | None,
    mixture: Mixture,
    before: Sequence[float | None] | None,
    by: str,
) -> tuple[float, ...] | None:
    names = mixture.names or ()
    result = [rate or 0.0 for rate in before or [None] * len(names)]
    for number, rate in numbered(changes or {}, names, f"{by} gives a rate of fim to").items():
        result[number] = float(rate)
    rates = {f"rate of fim of {name!r}": rate for name, rate in zip(names, result, strict=True)}
    check_range(by, at_least=0, at_most=1, **rates)
    if mixture.fim is None and any(result):
        raise ConfigError(
            f"{by} has a rate of fim and there is no fim: say its sentinels (fim: {{sentinels: "
            "...} in the manifest), or leave the rate out"
        )
    return tuple(result) if any(result) else None


def _check_above_0(by: str, what: str, values: Mapping[str, float], remedy: str) -> None:
    try:
        check_positive(by, **{f"{what} of {name!r}": value for name, value in values.items()})
    except ConfigError as error:
        raise ConfigError(f"{error} ({remedy})") from None


def _window(stage: Stage, begin: int, before: StageSettings) -> Window | None:
    tokens = stage.attention_window
    if tokens is None:
        return before.window
    if not stage.window_steps:
        return Window(tokens) if tokens else None
    first = before.window_at(begin)
    if first is None:
        raise ConfigError(
            f"{stage} has window_steps {stage.window_steps} and there is no window before it to "
            "begin with; give an attention_window to the stage before, or to the manifest"
        )
    return Window(tokens, first, begin, stage.window_steps)


# ---- Weights that repeat no source too often -----------------------------------------------------


def within_epochs(program: Program, mixture: Mixture, tokens_per_epoch: Sequence[int]) -> Program:
    """The program with weights under which no source is repeated more than ``max_epochs`` times.

    Over ``run_tokens`` every source has what its weight says, but none more than its limit; what is
    left over goes to the others by their weights. With equal weights that is UniMax (Chung et al.
    2023, arXiv 2304.09151, Algorithm 1). Three sources of 100, 1,000 and 10,000 tokens with equal
    weights and a limit of 4, in a run of 9,000:

        tokens  400, 4,000, 4,600    # 3,000 each; then (9,000 - 400) / 2 = 4,300; then the rest
        epochs  4, 4, .46

    A stage is planned as if it went on to the end of the run, with what the stages before it have
    left of every source; so a stage that is appended changes nothing of what was done. Where all
    sources of a stage are at their limits they are drawn in proportion to what is left of them, and
    ``check_epochs`` refuses the run if the stage lasts that long.

    Tokens are those of steps, with padding; what is passed over (``skip_steps``) does not count,
    and where rows are not full (``row_tokens``) sources stay that much below their limits.

    Args:
        mixture: ``Mixture.of`` the sources.
        tokens_per_epoch: samples x capacity of every source.
    """
    if mixture.run_tokens is None or not tokens_per_epoch:
        return program
    assert isinstance(mixture.max_epochs, Sequence)
    room = [  # tokens that may still be drawn of every source
        None if limit is None else math.floor(Fraction(limit) * tokens)
        for limit, tokens in zip(mixture.max_epochs, tokens_per_epoch, strict=True)
    ]
    left, result = mixture.run_tokens, list(program)
    shares: list[Fraction] = []
    for i, stage in enumerate(program):
        if left <= 0:
            break
        if i == 0 or stage.weights != program[i - 1].weights:
            wanted = [
                tokens if weight is None else weight
                for weight, tokens in zip(stage.weights, tokens_per_epoch, strict=True)
            ]
            shares, kept = _limited(whole_weights(wanted), room, left)
            weights = stage.weights if kept else tuple(map(float, shares))
        result[i] = stage._replace(weights=weights)
        steps = program[i + 1].begin - stage.begin if i + 1 < len(program) else left
        taken = min(left, steps * stage.config.tokens_per_step)
        left -= taken
        room = [
            None if own is None else max(0, math.floor(own - share * taken))
            for own, share in zip(room, shares, strict=True)
        ]
    return tuple(result)


def _limited(
    weights: Sequence[int], room: Sequence[int | None], tokens: int
) -> tuple[list[Fraction], bool]:
    """Shares of ``tokens`` by weight, of no source more than its room; whether none is short."""
    shares = [Fraction(0)] * len(weights)
    rest, weight_of_rest = Fraction(tokens), sum(weights)
    open_ = {d for d, weight in enumerate(weights) if weight}
    limited = [(Fraction(own, weights[d]), own, d) for d in open_ if (own := room[d]) is not None]
    short = False
    for ratio, own, d in sorted(limited):  # those that reach their limits first
        if ratio * weight_of_rest >= rest:
            break
        shares[d], short = Fraction(own, tokens), True
        rest, weight_of_rest = rest - own, weight_of_rest - weights[d]
        open_.remove(d)
    for d in open_:
        shares[d] = rest / tokens * Fraction(weights[d], weight_of_rest)
    if not open_:  # together they do not hold so many
        shares = shares if any(shares) else [Fraction(weight) for weight in weights]
        shares = [share / sum(shares) for share in shares]
    return shares, not short
