"""What a paper claims, beside what was measured, and the one rule that decides whether it agrees.

Seeds are paired: run i of both sides has the same initial weights and the same documents. The rule:
the 95 % confidence interval of the mean difference (Student's t over the seeds) must lie on one
side. If it holds zero, or there is one seed only, the claim is undecided at this scale. A recipe
makes many claims, so what the interval decides stands only if it does by Holm's correction over all
claims of the recipe, too (Holm 1979): a wrong verdict anywhere in a table has a chance of 5 %.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev
from typing import Any, Literal

from scipy import stats

Verdict = Literal["yes", "no", "undecided"]
CONFIDENCE = 0.95
Kind = Callable[..., "Claim"]  # below or same


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One row of the table of claims.

    Attributes:
        source: paper and table, figure or section.
        claim: in words.
        paper: the paper's figure, or what it says.
        measured: ours, with spread and number of seeds.
        agrees: by the rule of this module; None where there is nothing to compare.
        why: why one should believe it, or what limits it.
        p: chance of seeds that decide as much if there is nothing to decide; None where no seeds
            are compared.
    """

    source: str
    claim: str
    paper: str
    measured: str
    agrees: Verdict | None
    why: str
    p: float | None = None


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
    """Claims whose verdict does not stand by Holm's correction are undecided."""
    tested = sorted((i for i, claim in enumerate(claims) if claim.p is not None), key=lambda i:
                    claims[i].p or 0.0)  # fmt: skip
    found, stands = list(claims), True
    for rank, i in enumerate(tested):
        stands = stands and (claims[i].p or 0.0) <= (1 - CONFIDENCE) / (len(tested) - rank)
        if not stands:
            found[i] = replace(claims[i], agrees="undecided")
    return found


def difference(a: Sequence[float], b: Sequence[float]) -> Difference:
    """Of ``a - b``, seed by seed.

    Raises:
        ValueError: the sides have different numbers of seeds, or none.
    """
    if len(a) != len(b) or not a:
        raise ValueError(f"paired seeds are compared; there are {len(a)} and {len(b)}")
    pairs = [x - y for x, y in zip(a, b, strict=True)]
    if len(pairs) == 1:
        return Difference(pairs[0], math.inf, 1)
    quantile = float(stats.t.ppf(0.5 + CONFIDENCE / 2, len(pairs) - 1))
    return Difference(fmean(pairs), quantile * stdev(pairs) / math.sqrt(len(pairs)), len(pairs))


def against(values: Sequence[float], base: Sequence[float]) -> dict[str, Any]:
    """Columns of a table: the perplexity, and its change against the one of ``base``, in %."""
    gap, mean = difference(values, base), fmean(base)
    return {
        "perplexity": shown(values),
        "against_first_%": 100 * gap.mean / mean,
        "plus_minus_%": 100 * gap.half_width / mean if gap.num_seeds > 1 else None,
    }


def _chance(a: Sequence[float], b: Sequence[float], limits: tuple[float, ...]) -> float:
    """Two-sided p that the mean of ``a - b`` is on this side of the nearest limit."""
    found = difference(a, b)
    if found.num_seeds == 1:
        return 1.0
    quantile = float(stats.t.ppf(0.5 + CONFIDENCE / 2, found.num_seeds - 1))
    error = found.half_width / quantile or math.ulp(1.0)
    nearest = min(abs(found.mean - limit) for limit in limits)
    return 2 * float(stats.t.sf(nearest / error, found.num_seeds - 1))


def less(a: Sequence[float], b: Sequence[float]) -> Verdict:
    """Whether "a is below b" holds."""
    found = difference(a, b)
    if found.high < 0:
        return "yes"
    return "no" if found.low > 0 else "undecided"


def alike(a: Sequence[float], b: Sequence[float], *, within: float) -> Verdict:
    """Whether "a and b differ by at most ``within`` of b" holds; the interval must say so."""
    found, limit = difference(a, b), within * fmean(b)
    if -limit <= found.low and found.high <= limit:
        return "yes"
    return "no" if found.low > limit or found.high < -limit else "undecided"


def near(measured: float, printed: float, *, within: float) -> Verdict:
    """Whether an exact figure (no seeds decide it) is the printed one, up to a share of it."""
    return "yes" if abs(measured - printed) <= within * abs(printed) else "no"


def together(verdicts: Iterable[Verdict]) -> Verdict:
    """Whether all of several statements hold: one that does not is enough for "no"."""
    return min(verdicts, key=("no", "undecided", "yes").index)


def shown(values: Sequence[float], digits: int = 2) -> str:
    """``mean +- standard deviation`` over seeds."""
    if len(values) == 1:
        return f"{values[0]:.{digits}f}"
    return f"{fmean(values):.{digits}f} +- {stdev(values):.{digits}f}"


def below(low: Sequence[float], high: Sequence[float], **words: Any) -> Claim:
    """The claim that ``low`` is below ``high``; ``words`` as in ``_compared``."""
    return _compared(low, high, less(low, high), _chance(low, high, (0.0,)), **words)


def same(a: Sequence[float], b: Sequence[float], *, within: float, **words: Any) -> Claim:
    """The claim that both are alike; ``words`` as in ``_compared``."""
    limit = within * fmean(b)
    return _compared(a, b, alike(a, b, within=within), _chance(a, b, (-limit, limit)), **words)


def stated(
    values: Mapping[str, Sequence[float]],
    kind: Kind,
    one: str,
    other: str,
    claim: str,
    **words: Any,
) -> Claim:
    """The claim of this kind about two arms; a source is said where it is not this project."""
    usual = {"source": "this project", "paper": ""}
    return kind(values[one], values[other], claim=claim, **{**usual, **words})


def _compared(
    a: Sequence[float],
    b: Sequence[float],
    verdict: Verdict,
    p: float,
    *,
    what: str = "validation perplexity",
    digits: int = 2,
    beside: str = "",
    **words: str,
) -> Claim:
    """Args: ``what`` the figures are, ``beside``: more that was measured; the rest as in Claim."""
    measured = f"{what} {shown(a, digits)} against {shown(b, digits)}{beside}".strip()
    return Claim(measured=measured, agrees=verdict, p=p, **words)
