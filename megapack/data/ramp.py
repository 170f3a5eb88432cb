"""A way from one blend to another: weights as a function of progress, in pieces of constant weight.

    stages:
      - {from_step: 1000, weights: {web: 0.5, code: 0.5}, ramp: {until_step: 5000, shape: cosine}}

Over n steps the share of a source goes from a to b as a + (b - a) f(t / n), with f(x) = x (linear)
or (1 - cos(pi x)) / 2 (cosine). The steps are cut into pieces of equal length, each a stage of its
own with an exact blend; its shares are the means of a + (b - a) f over its steps.

So at the end of every piece the blend has followed f, and between two ends it is at most
|b - a| n / (8 pieces^2) steps' worth of tokens from it (linear; pi / 2 times that for cosine): what
a function of slope s and mean 0 adds up to over a length h is at most s h^2 / 8. With 32 pieces
that is |b - a| n / 8192. To this comes what every stage may be off, 1.69 samples per bucket.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Context, Decimal, localcontext
from itertools import pairwise
from typing import Literal

from megapack.errors import ConfigError

__all__ = ["Ramp", "ramp_pieces"]

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
