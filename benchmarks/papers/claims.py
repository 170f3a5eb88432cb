"""Claims of papers, measured values, and the rules that decide whether they agree.

``Row`` is a printed figure that depends only on lengths: it agrees within a tolerance. ``Claim`` is
about trained models. Seeds are paired: run i of both sides has the same initial weights and the
same documents. The rule: the 95 % confidence interval of the mean difference (Student's t over the
seeds) must lie on one side of zero. If it contains zero, or there is only one seed, the claim is
undecided at this scale. A verdict must also pass Holm's correction over all claims of the recipe
(Holm 1979): the chance of any wrong verdict in a table is at most 5 %.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev
from typing import Any, Literal

from scipy import stats

Verdict = Literal["yes", "no", "undecided"]
Judged = tuple[Verdict, float]  # verdict, p
CONFIDENCE = 0.95


@dataclass(frozen=True, kw_only=True)
class Row:
    """Figure of a paper, and its measured value."""

    source: str  # paper and table, figure or section
    corpus: str  # lengths that it was measured on
    item: str  # the strategy or setting
    quantity: str  # what the figure is, with its unit
    paper: float | None  # printed figure; None if not printed
    measured: float
    agrees: bool | None = None  # within the tolerance; None if there is nothing to compare
    why: str = ""  # reason of a disagreement, or a remark


def compared(
    source: str,
    corpus: str,
    item: str,
    quantity: str,
    figures: tuple[float | None, float],
    *,
    within: float = 0.05,
    rounding: float = 0.0,
    claimed: bool = True,
    why: str = "",
    why_not: str = "",
) -> Row:
    """Return a row that agrees if ``|measured - paper| <= within * paper + rounding``.

    ``why_not`` is shown only if they disagree. Without ``claimed`` the two figures are shown
    together, without a verdict.
    """
    paper, measured = figures[0], float(figures[1])  # not a numpy float
    agrees: bool | None = None
    if claimed and paper is not None:
        agrees = abs(measured - paper) <= within * abs(paper) + rounding
    about = {"source": source, "corpus": corpus, "item": item, "quantity": quantity}
    said = (why_not if agrees is False else "") or why
    return Row(**about, paper=paper, measured=measured, agrees=agrees, why=said)


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One row of the table of claims."""

    source: str  # paper and table, figure or section
    claim: str  # in words
    paper: str  # the paper's figure, or what it says
    measured: str  # measured figure, with spread and number of seeds
    agrees: Verdict | None  # by the rule of this module; None if there is nothing to compare
    why: str  # evidence for the verdict, or its limits
    p: float | None = None
    """p-value of the verdict; None if no seeds are compared."""


Kind = Callable[..., Claim]  # below or same


@dataclass(frozen=True)
class Difference:
    """Mean of ``a - b`` over paired seeds and the half width of its confidence interval."""

    mean: float
    half_width: float
    num_seeds: int

    @property
    def low(self) -> float:
        return self.mean - self.half_width

    @property
    def high(self) -> float:
        return self.mean + self.half_width


def corrected(claims: Sequence[Claim]) -> list[Claim]:
    """Return the claims; a verdict that fails Holm's correction becomes undecided."""
    tested = sorted((claim.p, i) for i, claim in enumerate(claims) if claim.p is not None)
    found, stands = list(claims), True
    for rank, (p, i) in enumerate(tested):
        stands = stands and p <= (1 - CONFIDENCE) / (len(tested) - rank)
        if not stands:
            found[i] = replace(claims[i], agrees="undecided")
    return found


def difference(a: Sequence[float], b: Sequence[float]) -> Difference:
    """Return the statistics of the differences ``a - b`` of paired seeds.

    Raises:
        ValueError: if the sides have different numbers of seeds, or none.
    """
    if len(a) != len(b) or not a:
        raise ValueError(f"paired seeds are compared; there are {len(a)} and {len(b)}")
    pairs = [x - y for x, y in zip(a, b, strict=True)]
    if len(pairs) == 1:
        return Difference(pairs[0], math.inf, 1)
    quantile = float(stats.t.ppf(0.5 + CONFIDENCE / 2, len(pairs) - 1))
    return Difference(fmean(pairs), quantile * stdev(pairs) / math.sqrt(len(pairs)), len(pairs))


def against(values: Sequence[float], base: Sequence[float]) -> dict[str, Any]:
    """Return columns of a table: the perplexity, and its change relative to ``base`` in %."""
    gap, mean = difference(values, base), fmean(base)
    return {
        "perplexity": shown(values),
        "against_first_%": 100 * gap.mean / mean,
        "plus_minus_%": 100 * gap.half_width / mean if gap.num_seeds > 1 else None,
    }


def _judged(a: Sequence[float], b: Sequence[float], low: float, high: float) -> Judged:
    """Decide by the interval whether the mean of ``a - b`` is inside (low, high).

    Also return p, the two-sided p-value of a test against the nearest limit.
    """
    found = difference(a, b)
    if found.num_seeds == 1:
        return "undecided", 1.0
    inside = low < found.low and found.high < high
    outside = found.high < low or found.low > high
    degrees = found.num_seeds - 1
    error = found.half_width / float(stats.t.ppf(0.5 + CONFIDENCE / 2, degrees)) or math.ulp(1.0)
    nearest = min(abs(found.mean - low), abs(found.mean - high))
    p = 2 * float(stats.t.sf(nearest / error, degrees))
    return "yes" if inside else "no" if outside else "undecided", p


def less(a: Sequence[float], b: Sequence[float]) -> Judged:
    """Return whether "a is below b" holds, and p."""
    return _judged(a, b, -math.inf, 0.0)


def alike(a: Sequence[float], b: Sequence[float], *, within: float) -> Judged:
    """Return whether "a and b differ by less than ``within`` of b" holds, and p."""
    limit = within * fmean(b)
    return _judged(a, b, -limit, limit)


def near(measured: float, printed: float, *, within: float) -> Verdict:
    """Return "yes" if an exact figure is within a share of the printed one, otherwise "no"."""
    return "yes" if abs(measured - printed) <= within * abs(printed) else "no"


def together(statements: Iterable[Judged]) -> dict[str, Any]:
    """Return ``agrees`` and ``p`` of the claim that all statements hold; one "no" refutes it.

    Without a "no", p is the largest of all statements. With one, it is the smallest p of those that
    are refuted, times the number of all statements (Bonferroni).
    """
    found = list(statements)
    refuted = [p for verdict, p in found if verdict == "no"]
    if refuted:
        return {"agrees": "no", "p": min(1.0, len(found) * min(refuted))}
    every = all(verdict == "yes" for verdict, _ in found)
    return {"agrees": "yes" if every else "undecided", "p": max(p for _, p in found)}


def shown(values: Sequence[float], digits: int = 2) -> str:
    """Return ``mean +- standard deviation`` over seeds."""
    if len(values) == 1:
        return f"{values[0]:.{digits}f}"
    return f"{fmean(values):.{digits}f} +- {stdev(values):.{digits}f}"


def below(low: Sequence[float], high: Sequence[float], **words: Any) -> Claim:
    """Return the claim that ``low`` is below ``high``; ``words`` as in ``_compared``."""
    return _compared(low, high, less(low, high), **words)


def same(a: Sequence[float], b: Sequence[float], *, within: float, **words: Any) -> Claim:
    """Return the claim that both are alike; ``words`` as in ``_compared``."""
    return _compared(a, b, alike(a, b, within=within), **words)


def stated(
    values: Mapping[str, Sequence[float]],
    kind: Kind,
    one: str,
    other: str,
    claim: str,
    **words: Any,
) -> Claim:
    """Return a claim of this kind about two arms; ``source`` defaults to this project."""
    usual = {"source": "this project", "paper": ""}
    return kind(values[one], values[other], claim=claim, **{**usual, **words})


def _compared(
    a: Sequence[float],
    b: Sequence[float],
    judged: Judged,
    *,
    what: str = "validation perplexity",
    digits: int = 2,
    beside: str = "",
    **words: str,
) -> Claim:
    """Return a claim; ``what`` names the figures, ``beside`` appends measured values."""
    measured = f"{what} {shown(a, digits)} against {shown(b, digits)}{beside}".strip()
    return Claim(measured=measured, agrees=judged[0], p=judged[1], **words)
