"""Seamless Packing (Improving Continual Pre-training Through Seamless Data Packing), lengths only.

The corpora are the paper's histograms (Tables 13 and 14) with lengths uniform inside an interval.
What depends on the shape inside an interval cannot agree exactly.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from functools import partial

import numpy as np
from lengths import LAWS
from papers.composition.rows import Row, compared
from papers.composition.seamless_theory import expect_seamless, measure_seamless

from megapack.packing import pack

__all__ = ["dropping", "figure_3", "section_4_8", "table_9"]

TABLE_13 = [3906, 4095, 1789, 763, 355, 150, 73, 47, 90]  # texts of (2k, 4k], (4k, 6k], ... tokens
CORPORA = {
    "pubmed": (11_268, 2048, 50),
    "bbc_news": (11_966, 512, 10),
    "finance": (15_527, 512, 10),
}


def section_4_8() -> list[Row]:
    """Section 4.8: texts that slide and tokens in short chunks; PubMed, L 2048, r_max 0.3."""
    lengths = LAWS["pubmed"](11_268)
    printed = expect_seamless(TABLE_13, 2048, 0.3)
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
        expected = expect_seamless(TABLE_13, 2048, ratio)
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
        rows += [
            row(
                f"seamless, c_extra {extra}",
                "dropped tokens, k",
                (dropped, seamless(extra_capacity=extra).metrics()["dropped_tokens"] / 1e3),
                why_not="c tokens of nearly every stage-2 bin, as in the paper; the number of bins "
                "follows the short tokens of section 4.8",
            ),
            row(
                "best_fit_decreasing",
                "padding tokens, k",
                (padded, best_fit["padding_tokens"] / 1e3),
                why_not="remainders are uniform here; where more lie above L / 2 than below, the "
                "surplus is padded",
            ),
            row(
                "seamless, c_extra 0",
                "dropped tokens, k",
                (None, seamless(extra_capacity=0).metrics()["dropped_tokens"] / 1e3),
                why="the last partial sample alone: nothing here asks for c_extra",
            ),
        ]
    return rows


def table_9(num_documents: int = 1_000_000, repeats: int = 3) -> list[Row]:
    """Table 9: seconds of FFD and BFD on the three corpora; their ratio on a million documents."""
    paper = {"pubmed": (1.26, 1.78), "bbc_news": (2.24, 2.63), "finance": (2.83, 3.61)}
    rows = []
    for name, (count, capacity, _) in CORPORA.items():
        row = partial(compared, "Seamless Table 9", f"{name} law")
        small, large = (
            [_seconds(partial(pack, lengths, strategy, buckets=[capacity]), repeats)
             for strategy in ("first_fit_decreasing", "best_fit_decreasing")]
            for lengths in (LAWS[name](count), LAWS[name](num_documents))
        )  # fmt: skip
        for item, printed, seconds in zip(("FFD", "BFD"), paper[name], small, strict=True):
            times = f"{printed / seconds:,.0f} times less than the paper's {printed} s"
            rows.append(row(f"{item}, {count:,} documents", "seconds", (None, seconds), why=times))
        rows.append(
            row(
                f"BFD / FFD, {num_documents:,} documents",
                "ratio",
                (paper[name][1] / paper[name][0], large[1] / large[0]),
                within=0.1,
                why_not="a plan on the histogram of lengths costs both about the same; scanning "
                "lists of bins does not",
            )
        )
    return rows


def _seconds(action: Callable[[], object], repeats: int) -> float:
    """Best of several runs."""
    best = float("inf")
    for _ in range(repeats):
        begin = time.perf_counter()
        action()
        best = min(best, time.perf_counter() - begin)
    return best
