"""One strategy out of many, and the sentence that says why.

The rule is short enough to disagree with:

1. a strategy that loses tokens, or that splits more than one document in a hundred beyond those
   longer than the largest capacity of the comparison, is out (if that leaves none, losing counts
   alone, and those that split the fewest stay);
2. of the rest, the least estimated training time wins;
3. within half a percent of that time, fewer documents per sample wins, then less padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megapack.packing.compare.evaluate import Evaluation

__all__ = ["Recommendation", "recommend"]

MAX_EXTRA_TRUNCATION = 0.01
MAX_DROPPED = 0.001
SAME_TIME = 0.005


@dataclass(frozen=True, kw_only=True)
class Recommendation:
    """The choice and its reasons.

    Attributes:
        best: index into the evaluations.
        best_fixed: the best one with a single sample shape, or None if there is none.
        reasons: sentences, most important first.
        out: per evaluation, why rule 1 excludes it, or "" if it does not.
    """

    best: int
    best_fixed: int | None
    reasons: tuple[str, ...]
    out: tuple[str, ...]


def recommend(evaluations: Sequence[Evaluation]) -> Recommendation:
    """Apply the rule of this module's text to at least one evaluation."""
    floor = min(e.metrics["truncation_floor"] for e in evaluations)
    out = tuple(_why_out(e, floor) for e in evaluations)
    best = _cheapest(evaluations, range(len(evaluations)), out)
    fixed = [i for i, e in enumerate(evaluations) if e.case.is_fixed_length]
    best_fixed = _cheapest(evaluations, fixed, out) if fixed else None
    reasons = _reasons(evaluations, best, out)
    return Recommendation(best=best, best_fixed=best_fixed, reasons=reasons, out=out)


def _why_out(evaluation: Evaluation, floor: float) -> str:
    metrics = evaluation.metrics
    if metrics["dropped_ratio"] > MAX_DROPPED:
        return f"loses {percent(metrics['dropped_ratio'])} of the tokens"
    if metrics["truncation_ratio"] > floor + MAX_EXTRA_TRUNCATION:
        return f"splits {percent(metrics['truncation_ratio'])} of the documents"
    return ""


def _cheapest(evaluations: Sequence[Evaluation], among: Sequence[int], out: Sequence[str]) -> int:
    """Rules 1 to 3 on the evaluations with the given positions."""
    kept = [i for i in among if not out[i]]
    if not kept:
        kept = [i for i in among if not out[i].startswith("loses")] or list(among)
        fewest = min(evaluations[i].metrics["truncation_ratio"] for i in kept)
        limit = fewest + MAX_EXTRA_TRUNCATION
        kept = [i for i in kept if evaluations[i].metrics["truncation_ratio"] <= limit]
    least = min(evaluations[i].breakdown.gpu_hours for i in kept)
    tied = [i for i in kept if evaluations[i].breakdown.gpu_hours <= least * (1 + SAME_TIME)]
    return min(
        tied,
        key=lambda i: (
            round(evaluations[i].metrics["concatenation_ratio"], 2),
            evaluations[i].metrics["padding_ratio"],
        ),
    )


def _reasons(evaluations: Sequence[Evaluation], best: int, out: Sequence[str]) -> tuple[str, ...]:
    chosen = evaluations[best]
    metrics = chosen.metrics
    longest = max(chosen.case.buckets)
    reasons = [
        f"It splits {percent(metrics['truncation_ratio'])} of the documents; "
        f"{percent(metrics['truncation_floor'])} are longer than {longest:,} tokens and must be.",
        f"{percent(metrics['padding_ratio'])} of its positions are padding, and a sample holds "
        f"{metrics['concatenation_ratio']:.2f} documents on average.",
    ]
    rivals = [i for i in range(len(evaluations)) if i != best]
    if not rivals:
        return tuple(reasons)
    in_race = [i for i in rivals if not out[i]]
    if in_race:
        runner_up = min(in_race, key=lambda i: evaluations[i].breakdown.gpu_hours)
        reasons.append(_against(chosen, evaluations[runner_up]))
    excluded = [i for i in rivals if out[i]]
    cheaper = [
        i
        for i in excluded
        if evaluations[i].breakdown.gpu_hours < chosen.breakdown.gpu_hours * (1 - SAME_TIME)
    ]
    if cheaper:
        names = "; ".join(f"{evaluations[i].label} {out[i]}" for i in cheaper)
        reasons.append(f"Cheaper, but out: {names}.")
    return tuple(reasons)


def _against(chosen: Evaluation, rival: Evaluation) -> str:
    ratio = rival.breakdown.gpu_hours / chosen.breakdown.gpu_hours - 1
    documents = rival.metrics["concatenation_ratio"]
    if abs(ratio) <= SAME_TIME:
        return (
            f"{rival.label} would take the same time ({ratio:+.1%}) but joins "
            f"{documents:.2f} documents per sample."
        )
    if ratio < 0:
        return f"{rival.label} would take {percent(-ratio)} less time."
    return f"The next best, {rival.label}, would take {percent(ratio)} more time."


def percent(share: float) -> str:
    """A share in percent with three significant digits: 0.00034 -> 0.034 %."""
    if share == 0:
        return "0 %"
    value = 100 * share
    return f"{value:.0f} %" if value >= 99.95 else f"{value:.3g} %"
