"""Seamless Packing (Improving Continual Pre-training Through Seamless Data Packing), lengths only.

First what the paper expects of a corpus, beside what the strategy does (section 3.4): from a
histogram it derives how many documents slide and how many tokens are left to stage two, supposing
that lengths are uniform between multiples of the sample length. The corpora are the paper's
histograms (Tables 13 and 14) with lengths uniform inside an interval; what depends on the shape
inside an interval cannot agree exactly.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from functools import partial

import numpy as np
from common import take_turns
from lengths import LAWS, PUBMED
from numpy.typing import NDArray
from papers.composition.rows import Row, compared

from megapack import _core
from megapack.packing import pack
from megapack.packing.strategies import exact_ratio, largest_overlap

CORPORA = {
    "pubmed": (11_268, 2048, 50),
    "bbc_news": (11_966, 512, 10),
    "finance": (15_527, 512, 10),
}


@dataclass(frozen=True, kw_only=True)
class SeamlessStageOne:
    """num_sliding: documents in overlapping windows (N_sw); short_tokens: left to stage two, of
    documents longer than a sample (N_token_short)."""

    num_sliding: float
    short_tokens: float


def expect_seamless(
    num_documents: NDArray[np.int64] | list[int], capacity: int, r_max: float
) -> SeamlessStageOne:
    """Equations 6 and 7.

    Equation 6 is printed with both sums running over k = ceil(1 / r_max); its first sum must end
    before that (k r_max, the share that slides, would exceed 1), which is also what reproduces the
    paper's 6716.

    Args:
        num_documents: T_k, documents with a length in (k capacity, (k + 1) capacity], k = 1, 2, ...
        capacity: L_seq, tokens.
        r_max: largest repeated share, 0 < r_max <= 1.

    Raises:
        ValueError: r_max out of range.
    """
    if not 0 < r_max <= 1:
        raise ValueError(f"r_max is {r_max}; it must be above 0 and at most 1")
    all_slide_from = math.ceil(1 / Fraction(*exact_ratio(r_max)))
    sliding = short = 0.0
    for k, count in enumerate(num_documents, start=1):
        share = k * r_max if k < all_slide_from else 1.0
        sliding += share * float(count)
        short += (1 - share) * float(count) * (1 - share) * capacity / 2
    return SeamlessStageOne(num_sliding=sliding, short_tokens=short)


def measure_seamless(
    lengths: NDArray[np.int32] | NDArray[np.int64],
    capacity: int,
    r_max: float,
    *,
    placement: str = "exact",
) -> tuple[SeamlessStageOne, SeamlessStageOne]:
    """(expected from the histogram of ``lengths``, what the strategy does with them).

    Documents of at most ``capacity`` tokens are in neither: the theory leaves them out.
    """
    long = lengths[lengths > capacity]
    counts = np.bincount((long - 1) // capacity)[1:]
    share = largest_overlap(r_max, placement, capacity)
    checked = _core.DocumentLengths(np.ascontiguousarray(long))
    rules = {"capacity": capacity, "r_max": share, "placement": placement}
    stage = _core.seamless_stage_one(checked, rules)
    done = SeamlessStageOne(num_sliding=stage["num_sliding"], short_tokens=stage["short_tokens"])
    return expect_seamless(counts, capacity, r_max), done


def section_4_8() -> list[Row]:
    """Section 4.8: texts that slide and tokens in short chunks; PubMed, L 2048, r_max 0.3."""
    lengths = LAWS["pubmed"](11_268)
    printed = expect_seamless(PUBMED, 2048, 0.3)
    _, done = measure_seamless(lengths, 2048, 0.3)
    texts, tokens = done.num_sliding, done.short_tokens
    share = 100 * tokens / lengths.sum(dtype=np.int64)
    row = partial(compared, "Seamless 4.8", "pubmed law")
    shape = (
        "lengths inside an interval are uniform here, as eqs. 6 and 7 assume; the paper's are not"
    )
    return [
        row("eq. 6 on Table 13", "texts that slide", (6716, printed.num_sliding), within=1e-3),
        row("seamless", "texts that slide", (6988, texts), why_not=shape),
        row("seamless", "texts that slide, %", (62, 100 * texts / len(lengths)), why_not=shape),
        row("eq. 7 on Table 13", "short tokens, M", (2.6, printed.short_tokens / 1e6),
            within=0, rounding=0.05),
        row("seamless", "short tokens, M", (2.2, tokens / 1e6), why_not=shape),
        row("seamless", "short tokens, % of all", (3.4, share), why_not=shape),
    ]  # fmt: skip


def figure_3(ratios: Iterable[float] = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5)) -> list[Row]:
    """Figure 3: both counts over r_max. The figure prints no numbers; its shape is in the text.

    More texts slide and fewer tokens are short as r_max grows, both ever more slowly.
    """
    lengths = LAWS["pubmed"](11_268)
    row = partial(compared, "Seamless Figure 3", "pubmed law")
    rows = []
    for ratio in ratios:
        expected = expect_seamless(PUBMED, 2048, ratio)
        _, done = measure_seamless(lengths, 2048, ratio)
        item = f"r_max {ratio:g}"
        rows += [
            row(item, "texts that slide", (None, done.num_sliding),
                why=f"eq. 6: {expected.num_sliding:.0f}"),
            row(item, "short tokens, M", (None, done.short_tokens / 1e6),
                why=f"eq. 7: {expected.short_tokens / 1e6:.2f}"),
        ]  # fmt: skip
    return rows


def dropping() -> list[Row]:
    """Appendix I.1: tokens that Seamless drops against tokens that best fit decreasing pads."""
    paper = {"pubmed": (51, 75), "bbc_news": (7, 140), "finance": (None, None)}
    rows = []
    for name, (count, capacity, extra) in CORPORA.items():
        lengths = LAWS[name](count)
        row = partial(compared, "Seamless I.1", f"{name} law")
        seamless = partial(pack, lengths, "seamless", buckets=[capacity], r_max=0.3, last="drop")
        best_fit = pack(lengths, "best_fit_decreasing", buckets=[capacity]).metrics()
        dropped, padded = paper[name]
        tokens = [seamless(extra_capacity=c).metrics()["dropped_tokens"] / 1e3 for c in (extra, 0)]
        rows += [
            row(f"seamless, c_extra {extra}", "dropped tokens, k", (dropped, tokens[0]),
                why_not="c tokens of nearly every stage-2 bin, as in the paper; the number of bins "
                "follows the short tokens of section 4.8"),
            row("best_fit_decreasing", "padding tokens, k",
                (padded, best_fit["padding_tokens"] / 1e3),
                why_not="remainders are uniform here; where more lie above L / 2 than below, the "
                "surplus is padded"),
            row("seamless, c_extra 0", "dropped tokens, k", (None, tokens[1]),
                why="the last partial sample alone: nothing here asks for c_extra"),
        ]  # fmt: skip
    return rows


def table_9(num_documents: int = 1_000_000) -> list[Row]:
    """Table 9: seconds of FFD and BFD on the three corpora; their ratio on a million documents."""
    paper = {"pubmed": (1.26, 1.78), "bbc_news": (2.24, 2.63), "finance": (2.83, 3.61)}
    rows = []
    for name, (count, capacity, _) in CORPORA.items():
        row = partial(compared, "Seamless Table 9", f"{name} law")
        strategies = ("first_fit_decreasing", "best_fit_decreasing")
        small, large = (
            take_turns({s: partial(pack, lengths, s, buckets=[capacity]) for s in strategies})
            for lengths in (LAWS[name](count), LAWS[name](num_documents))
        )
        for item, printed, timing in zip(("FFD", "BFD"), paper[name], small.values(), strict=True):
            seconds = timing.seconds
            times = f"{printed / seconds:,.0f} times less than the paper's {printed} s"
            rows.append(row(f"{item}, {count:,} documents", "seconds", (None, seconds), why=times))
        ffd, bfd = large.values()
        figures = paper[name][1] / paper[name][0], bfd.seconds / ffd.seconds
        why = (
            "a plan on the histogram of lengths costs both about the same; scanning lists of bins "
        )
        item = f"BFD / FFD, {num_documents:,} documents"
        rows.append(row(item, "ratio", figures, within=0.1, why_not=f"{why}does not"))
    return rows
