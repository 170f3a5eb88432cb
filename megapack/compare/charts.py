"""The plots of the report, one function each: Comparison -> Drawing.

Every plot has the strategies in the same order, axes with units, and exact values under the mouse.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from megapack.compare.comparison import Comparison
from megapack.compare.evaluation import Evaluation
from megapack.compare.svg import Drawing, Scale
from megapack.compare.words import money, percent, short_number

__all__ = [
    "attention_cost",
    "length_histogram",
    "rank_imbalance",
    "tokens_per_bucket",
    "trade_off",
    "training_time",
]

WIDTH = 960.0
ROW = 26.0
LONGEST_LABEL = 44  # characters; what is longer ends in dots

# Parts of the bill, in stacking order: attribute of Breakdown, words, css class.
PARTS = (
    ("tokens", "document tokens", "c1"),
    ("attention", "attention inside segments", "c2"),
    ("padding", "padding", "c4"),
    ("repeated", "repeated tokens", "c5"),
    ("cross_attention", "attention across segments and padding", "c3"),
    ("waiting", "waiting for the busiest rank", "c6"),
)


def length_histogram(comparison: Comparison) -> Drawing:
    """Share of documents and of tokens by document length, capacities marked."""
    corpus = comparison.corpus
    documents = corpus.documents_per_interval / corpus.num_documents
    tokens = corpus.tokens_per_interval / corpus.num_tokens
    used = [k for k in range(len(documents)) if documents[k] > 0]
    low, high = corpus.edges[used[0]], corpus.edges[used[-1] + 1]
    drawing = Drawing(WIDTH, 330, "Histogram of document lengths")
    x = Scale(low, high, 62, WIDTH - 20, log=True)
    y = Scale(0, 100 * max(documents.max(), tokens.max()) * 1.08, 270, 40)
    _horizontal_grid(drawing, y, 62, WIDTH - 20, "%")
    for k in range(used[0], used[-1] + 1):
        left, right = x(corpus.edges[k]), x(corpus.edges[k + 1])
        span = f"{corpus.edges[k]:,.0f} to {corpus.edges[k + 1]:,.0f} tokens"
        top = y(100 * documents[k])
        tip = f"{span}: {percent(documents[k])} of documents, {percent(tokens[k])} of tokens"
        drawing.rect(left + 0.6, top, right - left - 1.2, 270 - top, css="c1", tip=tip)
    steps: list[tuple[float, float]] = []
    for k in range(used[0], used[-1] + 1):
        steps += [(x(corpus.edges[k]), y(100 * tokens[k]))]
        steps += [(x(corpus.edges[k + 1]), y(100 * tokens[k]))]
    drawing.polyline(steps, "s3")
    for capacity in sorted({c for e in comparison.evaluations for c in e.case.buckets}):
        if low < capacity < high:
            drawing.line(x(capacity), 40, x(capacity), 270, "mark")
            drawing.text(x(capacity), 33, f"{capacity:,}", "tick", "middle")
    power = 1
    while power <= high:
        if power >= low:
            drawing.line(x(power), 270, x(power), 275, "axis")
            drawing.text(x(power), 289, short_number(power), "tick", "middle")
        power *= 4 if high / low > 64 else 2
    drawing.line(62, 270, WIDTH - 20, 270, "axis")
    drawing.text(
        (62 + WIDTH - 20) / 2, 308, "document length (tokens, log scale)", "name", "middle"
    )
    drawing.legend(
        62,
        325,
        [
            ("c1", "share of documents"),
            ("c3", "share of tokens"),
            ("c0", "dashed: capacities compared"),
        ],
    )
    return drawing


def tokens_per_bucket(comparison: Comparison) -> Drawing:
    """Where the token positions of each strategy lie."""
    rows = comparison.evaluations
    capacities = sorted({b.capacity for e in rows for b in e.work})
    left_edge = _label_room(rows)
    drawing = _rows(rows, "Token positions per bucket", comparison)
    x = Scale(0, 100, left_edge, WIDTH - 20)
    _vertical_grid(drawing, x, len(rows), "%")
    for row, evaluation in enumerate(rows):
        total = evaluation.num_positions
        left = 0.0
        for bucket in evaluation.work:
            share = 100 * bucket.num_positions / total
            css = f"r{min(capacities.index(bucket.capacity), 7)}"
            tip = (
                f"{evaluation.label}: {share:.2f} % of positions in {bucket.num_samples:,} "
                f"samples of {bucket.capacity:,}"
            )
            drawing.rect(
                x(left), _y(row) - 9, x(left + share) - x(left) - 0.7, 18, css=css, tip=tip
            )
            if share > 7:
                middle = (x(left) + x(left + share)) / 2
                drawing.text(middle, _y(row) + 4, f"{share:.1f}", f"on{css}", "middle")
            left += share
    _axis_name(drawing, len(rows), left_edge, "share of token positions (%)")
    drawing.legend(
        left_edge,
        _bottom(len(rows)) + 54,
        [(f"r{min(k, 7)}", f"{capacity:,}") for k, capacity in enumerate(capacities)],
    )
    return drawing


def trade_off(comparison: Comparison) -> Drawing:
    """Padding, truncation, concatenation, and tokens lost or repeated, side by side."""
    rows = comparison.evaluations
    panels: tuple[tuple[str, str, Callable[[Evaluation], float]], ...] = (
        ("padding", "% of positions", lambda e: 100 * e.metrics["padding_ratio"]),
        ("truncation", "% of documents", lambda e: 100 * e.metrics["truncation_ratio"]),
        ("concatenation", "documents per sample", lambda e: e.metrics["concatenation_ratio"]),
        ("lost or repeated", "% of tokens", _lost_or_repeated),
    )
    left_edge = _label_room(rows)
    drawing = _rows(rows, "Padding, truncation and concatenation", comparison)
    drawing.top = 0  # room for the heads of the columns
    width = (WIDTH - left_edge) / len(panels)
    bottom = _bottom(len(rows))
    for number, (title, unit, value_of) in enumerate(panels):
        start, stop = left_edge + number * width, left_edge + (number + 1) * width - 48
        values = [value_of(e) for e in rows]
        positive = [v for v in values if v > 0]
        low = 10.0 ** _decade(max(min(positive, default=1.0), 1e-3))
        high = max(10.0 ** (_decade(max(positive, default=1.0)) + 1), 10 * low)
        x = Scale(low, high, start + 8, stop, log=True)
        drawing.text(start, 16, title, "head")
        for tick in x.ticks(20):
            drawing.line(x(tick), 28, x(tick), bottom, "grid")
        for tick in x.ticks(4):
            drawing.text(x(tick), bottom + 15, f"{tick:g}", "tick", "middle")
        drawing.text(start, bottom + 33, unit, "name")
        for row, (evaluation, value) in enumerate(zip(rows, values, strict=True)):
            css = "c1" if row == comparison.recommendation.best else "c0"
            tip = f"{evaluation.label}: {title} {value:.6g} {unit}"
            drawing.line(start + 8, _y(row), x(max(value, low)), _y(row), "stem")
            drawing.circle(x(max(value, low)), _y(row), 5, css, tip)
            drawing.text(x(max(value, low)) + 9, _y(row) + 4, _brief(value), "value")
    return drawing


def attention_cost(comparison: Comparison) -> Drawing:
    """Squared segment (and sample) length per token position."""
    rows = comparison.evaluations
    left_edge = _label_room(rows)
    drawing = _rows(rows, "Attention work per token", comparison)
    inside = [e.mean_context for e in rows]
    whole = [e.mean_sample_context for e in rows]
    x = Scale(0, 1.1 * max(whole), left_edge, WIDTH - 20)
    _vertical_grid(drawing, x, len(rows), "")
    for row, evaluation in enumerate(rows):
        for value, css, top, words in (
            (inside[row], "c2", -9, "inside documents"),
            (whole[row], "c3", 1, "over whole samples"),
        ):
            tip = f"{evaluation.label}, {words}: {value:,.1f} tokens"
            drawing.rect(left_edge, _y(row) + top, x(value) - left_edge, 8, css=css, tip=tip)
            drawing.text(x(value) + 5, _y(row) + top + 8, f"{value:,.0f}", "small")
    _axis_name(drawing, len(rows), left_edge, "mean of squared length per position (tokens)")
    drawing.legend(
        left_edge,
        _bottom(len(rows)) + 54,
        [("c2", "attention inside documents"), ("c3", "attention over whole samples")],
    )
    return drawing


def rank_imbalance(comparison: Comparison) -> Drawing:
    """Attention work of the busiest rank over the mean: random assignment against longest first."""
    rows = comparison.evaluations
    left_edge = _label_room(rows)
    drawing = _rows(rows, "Imbalance of attention work over the ranks", comparison)
    pairs = [(e.imbalance("random"), e.imbalance("balanced")) for e in rows]
    highest = max(b.imbalance_random for e in rows for b in e.work)
    x = Scale(1.0, max(1.5, 1.04 * highest), left_edge + 8, WIDTH - 20, log=highest > 4)
    bottom = _bottom(len(rows))
    for tick in (
        [t for t in (1, 1.5, 2, 3, 5, 8, 13, 20, 40) if t <= x.high] if x.log else x.ticks(6)
    ):
        drawing.line(x(tick), 28, x(tick), bottom, "grid")
        drawing.text(x(tick), bottom + 15, f"{tick:.3g}", "tick", "middle")
    for row, evaluation in enumerate(rows):
        random, balanced = pairs[row]
        for bucket in evaluation.work:
            tip = (
                f"{evaluation.label}, bucket {bucket.capacity:,}, {bucket.samples_per_rank} "
                f"samples per rank: random {bucket.imbalance_random:.3f}, longest first "
                f"{bucket.imbalance_balanced:.3f}"
            )
            drawing.circle(x(bucket.imbalance_random), _y(row), 2.6, "faint3", tip)
            drawing.circle(x(bucket.imbalance_balanced), _y(row), 2.6, "faint2", tip)
        drawing.line(x(balanced), _y(row), x(random), _y(row), "link")
        drawing.circle(x(random), _y(row), 5.5, "c3", f"{evaluation.label}: random {random:.3f}")
        tip = f"{evaluation.label}: longest first {balanced:.3f}"
        drawing.circle(x(balanced), _y(row), 5.5, "c2", tip)
    _axis_name(
        drawing, len(rows), left_edge, "attention work of the busiest rank / mean of the ranks"
    )
    drawing.legend(
        left_edge,
        bottom + 54,
        [
            ("c3", "random assignment"),
            ("c2", "longest first to the least loaded"),
            ("c0", "small dots: single buckets"),
        ],
    )
    return drawing


def training_time(comparison: Comparison) -> Drawing:
    """GPU-hours by what they are spent on; the price at the end of each bar."""
    rows = comparison.evaluations
    left_edge = _label_room(rows)
    drawing = _rows(rows, "Estimated training time and cost", comparison)
    cheapest = min(e.breakdown.gpu_hours for e in rows)
    # A strategy that pads ten times over would squeeze all others into nothing: cut its bar.
    longest = min(max(e.breakdown.gpu_hours for e in rows), 1.6 * cheapest)
    x = Scale(0, longest * 1.02, left_edge, WIDTH - 150)
    _vertical_grid(drawing, x, len(rows), "")
    for row, evaluation in enumerate(rows):
        bill = evaluation.breakdown
        left = 0.0
        for attribute, words, css in PARTS:
            hours: float = getattr(bill, attribute)
            if hours <= 0:
                continue
            share = hours / bill.gpu_hours
            tip = f"{evaluation.label}, {words}: {hours:,.1f} GPU hours ({share:.2%})"
            start, stop = x(left), x(left + hours)
            if stop > start:
                drawing.rect(start, _y(row) - 9, stop - start, 18, css=css, tip=tip)
            left += hours
        if bill.gpu_hours > longest:
            drawing.text(x(left) - 8, _y(row) + 5, "//", "cut", "end")
        words = f"{short_number(bill.gpu_hours, 4)} h, {money(bill.cost)}"
        drawing.text(x(left) + 7, _y(row) + 4, words, "value")
    _axis_name(drawing, len(rows), left_edge, "GPU hours")
    used = [
        (css, words)
        for attribute, words, css in PARTS
        if any(getattr(e.breakdown, attribute) > 0 for e in rows)
    ]
    drawing.legend(left_edge, _bottom(len(rows)) + 54, used[:3])
    drawing.legend(left_edge, _bottom(len(rows)) + 72, used[3:])
    drawing.height += 18
    return drawing


def _rows(rows: Sequence[Evaluation], label: str, comparison: Comparison) -> Drawing:
    """A drawing with one named row per strategy; the recommended one stands out."""
    drawing = Drawing(WIDTH, _bottom(len(rows)) + 62, label, top=22)
    for row, evaluation in enumerate(rows):
        css = "chosen" if row == comparison.recommendation.best else "row"
        drawing.text(_label_room(rows) - 14, _y(row) + 4, _shown(evaluation.label), css, "end")
    return drawing


def _label_room(rows: Sequence[Evaluation]) -> float:
    """Where the plot begins, right of the names of the strategies."""
    return 30 + 7.0 * max(24, *(len(_shown(e.label)) for e in rows))


def _shown(label: str) -> str:
    return label if len(label) <= LONGEST_LABEL else label[: LONGEST_LABEL - 3] + "..."


def _y(row: int) -> float:
    return 42 + row * ROW


def _bottom(num_rows: int) -> float:
    return 34 + num_rows * ROW


def _horizontal_grid(drawing: Drawing, y: Scale, left: float, right: float, unit: str) -> None:
    for tick in y.ticks():
        drawing.line(left, y(tick), right, y(tick), "grid")
        drawing.text(left - 8, y(tick) + 4, f"{tick:g} {unit}", "tick", "end")


def _vertical_grid(drawing: Drawing, x: Scale, num_rows: int, unit: str) -> None:
    bottom = _bottom(num_rows)
    for tick in x.ticks():
        drawing.line(x(tick), 28, x(tick), bottom, "grid")
        drawing.text(x(tick), bottom + 15, f"{short_number(tick)}{unit}", "tick", "middle")


def _axis_name(drawing: Drawing, num_rows: int, left: float, words: str) -> None:
    drawing.text(left, _bottom(num_rows) + 33, words, "name")


def _decade(value: float) -> int:
    """Power of ten below a positive value."""
    return math.floor(math.log10(value))


def _brief(value: float) -> str:
    if value < 0.001:
        return "<0.001" if value > 0 else "0"
    return f"{value:.0f}" if value >= 99.95 else f"{value:.2g}" if value < 1 else f"{value:.3g}"


def _lost_or_repeated(evaluation: Evaluation) -> float:
    metrics = evaluation.metrics
    return 100 * float(metrics["dropped_ratio"] + metrics["repeated_ratio"])
