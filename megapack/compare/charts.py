"""The plots of the report, one function each: Comparison -> Drawing.

Every plot has the strategies in the same order, axes with units, and exact values under the mouse.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from html import escape

from megapack.compare.comparison import Comparison
from megapack.compare.evaluation import Evaluation, money, percent, short_number

# ---- Just enough SVG for a report: elements, scales and ticks; colours come from the page's CSS -


@dataclass(frozen=True)
class Scale:
    """Data to pixels, linear or logarithmic; values outside the domain are clipped to its ends."""

    low: float
    high: float
    start: float
    stop: float
    log: bool = False

    def __call__(self, value: float) -> float:
        clipped = min(max(value, self.low), self.high)
        if self.log:
            share = math.log(clipped / self.low) / math.log(self.high / self.low)
        else:
            share = (clipped - self.low) / (self.high - self.low)
        return self.start + share * (self.stop - self.start)

    def ticks(self, target: int = 5) -> list[float]:
        """At most about ``target`` values in the domain: 1, 2, 5 x 10^k, or whole decades."""
        if self.log:
            first, last = math.ceil(math.log10(self.low)), math.floor(math.log10(self.high))
            decades = 1 + (last - first) // target
            return [10.0**k for k in range(first, last + 1, decades)]
        rough = (self.high - self.low) / max(1, target)
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough)
        count = math.floor((self.high - self.low) / step + 1e-9)
        first_tick = math.ceil(self.low / step - 1e-9) * step
        values = [first_tick + i * step for i in range(count + 1)]
        return [value for value in values if value <= self.high * (1 + 1e-12)]


@dataclass
class Drawing:
    """An SVG of fixed proportions that scales with the page.

    Attributes:
        width, height: user units of the view box (about pixels).
        top: where the view box begins; what is above is left out.
        label: what a screen reader says the picture shows.
    """

    width: float
    height: float
    label: str
    top: float = 0
    parts: list[str] = field(default_factory=list)

    def line(self, x1: float, y1: float, x2: float, y2: float, css: str) -> None:
        """A straight line."""
        self.parts.append(
            f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{css}"/>'
        )

    def rect(self, x: float, y: float, width: float, height: float, *, css: str, tip: str) -> None:
        """A filled rectangle that shows ``tip`` under the mouse."""
        self.parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0):.2f}" '
            f'height="{height:.1f}" class="{css}"><title>{escape(tip)}</title></rect>'
        )

    def circle(self, x: float, y: float, radius: float, css: str, tip: str) -> None:
        """A dot that shows ``tip`` under the mouse."""
        self.parts.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:.1f}" class="{css}">'
            f"<title>{escape(tip)}</title></circle>"
        )

    def polyline(self, points: Sequence[tuple[float, float]], css: str) -> None:
        """Connected straight lines."""
        joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self.parts.append(f'<polyline points="{joined}" class="{css}"/>')

    def text(self, x: float, y: float, words: str, css: str = "", anchor: str = "start") -> None:
        """Words; ``anchor`` is start, middle or end."""
        self.parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{css}">'
            f"{escape(words)}</text>"
        )

    def legend(self, x: float, y: float, entries: Sequence[tuple[str, str]]) -> None:
        """Coloured squares with words, side by side: (css class, words)."""
        for css, words in entries:
            self.rect(x, y - 9, 10, 10, css=css, tip=words)
            self.text(x + 15, y, words, "tick")
            x += 15 + 5.9 * len(words) + 22

    def __str__(self) -> str:
        body = "\n".join(self.parts)
        return (
            f'<svg viewBox="0 {self.top:g} {self.width:g} {self.height - self.top:g}" role="img" '
            f'aria-label="{escape(self.label, quote=True)}">\n{body}\n</svg>'
        )


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
    for tick in y.ticks():
        drawing.line(62, y(tick), WIDTH - 20, y(tick), "grid")
        drawing.text(54, y(tick) + 4, f"{tick:g} %", "tick", "end")
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


class _Rows:
    """A drawing with one named row per strategy; the recommended one stands out.

    ``left`` is where the plot begins, right of the names; ``bottom`` where it ends.
    """

    def __init__(self, comparison: Comparison, label: str) -> None:
        self.evaluations = comparison.evaluations
        names = [_shown(evaluation.label) for evaluation in self.evaluations]
        self.left = 30 + 7.0 * max(24, *map(len, names))
        self.bottom = 34 + len(names) * ROW
        self.drawing = Drawing(WIDTH, self.bottom + 62, label, top=22)
        for row, (y, name) in enumerate(zip(self.heights, names, strict=True)):
            css = "chosen" if row == comparison.recommendation.best else "row"
            self.drawing.text(self.left - 14, y + 4, name, css, "end")

    @property
    def heights(self) -> list[float]:
        return [42 + row * ROW for row in range(len(self.evaluations))]

    def __iter__(self) -> Iterator[tuple[float, Evaluation]]:
        """Height and strategy of every row."""
        return zip(self.heights, self.evaluations, strict=True)

    def grid(self, x: Scale, ticks: Sequence[float], words: Callable[[float], str]) -> None:
        for tick in ticks:
            self.drawing.line(x(tick), 28, x(tick), self.bottom, "grid")
            self.drawing.text(x(tick), self.bottom + 15, words(tick), "tick", "middle")

    def below(self, axis: str, legend: Sequence[tuple[str, str]]) -> Drawing:
        """Put the axis' name and the legend under the plot; the drawing is complete then."""
        self.drawing.text(self.left, self.bottom + 33, axis, "name")
        self.drawing.legend(self.left, self.bottom + 54, legend)
        return self.drawing


def tokens_per_bucket(comparison: Comparison) -> Drawing:
    """Where the token positions of each strategy lie."""
    rows = _Rows(comparison, "Token positions per bucket")
    capacities = sorted({b.capacity for e in rows.evaluations for b in e.work})
    x = Scale(0, 100, rows.left, WIDTH - 20)
    rows.grid(x, x.ticks(), lambda tick: f"{short_number(tick)}%")
    for y, evaluation in rows:
        left = 0.0
        for bucket in evaluation.work:
            share = 100 * bucket.num_positions / evaluation.num_positions
            start, stop = x(left), x(left + share)
            css = f"r{min(capacities.index(bucket.capacity), 7)}"
            tip = (
                f"{evaluation.label}: {share:.2f} % of positions in {bucket.num_samples:,} "
                f"samples of {bucket.capacity:,}"
            )
            rows.drawing.rect(start, y - 9, stop - start - 0.7, 18, css=css, tip=tip)
            if share > 7:
                middle = (start + stop) / 2
                rows.drawing.text(middle, y + 4, f"{share:.1f}", f"on{css}", "middle")
            left += share
    legend = [(f"r{min(k, 7)}", f"{capacity:,}") for k, capacity in enumerate(capacities)]
    return rows.below("share of token positions (%)", legend)


def trade_off(comparison: Comparison) -> Drawing:
    """Padding, truncation, concatenation, and tokens lost or repeated, side by side."""
    rows = _Rows(comparison, "Padding, truncation and concatenation")
    drawing, bottom = rows.drawing, rows.bottom
    panels: tuple[tuple[str, str, Callable[[Evaluation], float]], ...] = (
        ("padding", "% of positions", lambda e: 100 * e.metrics["padding_ratio"]),
        ("truncation", "% of documents", lambda e: 100 * e.metrics["truncation_ratio"]),
        ("concatenation", "documents per sample", lambda e: e.metrics["concatenation_ratio"]),
        ("lost or repeated", "% of tokens", _lost_or_repeated),
    )
    drawing.top = 0  # room for the heads of the columns
    width = (WIDTH - rows.left) / len(panels)
    for number, (title, unit, value_of) in enumerate(panels):
        start, stop = rows.left + number * width, rows.left + (number + 1) * width - 48
        positive = [value for e in rows.evaluations if (value := value_of(e)) > 0]
        low = 10.0 ** _decade(max(min(positive, default=1.0), 1e-3))
        high = max(10.0 ** (_decade(max(positive, default=1.0)) + 1), 10 * low)
        x = Scale(low, high, start + 8, stop, log=True)
        drawing.text(start, 16, title, "head")
        for tick in x.ticks(20):
            drawing.line(x(tick), 28, x(tick), bottom, "grid")
        for tick in x.ticks(4):
            drawing.text(x(tick), bottom + 15, f"{tick:g}", "tick", "middle")
        drawing.text(start, bottom + 33, unit, "name")
        for row, (y, evaluation) in enumerate(rows):
            value = value_of(evaluation)
            css = "c1" if row == comparison.recommendation.best else "c0"
            tip = f"{evaluation.label}: {title} {value:.6g} {unit}"
            drawing.line(start + 8, y, x(value), y, "stem")
            drawing.circle(x(value), y, 5, css, tip)
            drawing.text(x(value) + 9, y + 4, _brief(value), "value")
    return drawing


def attention_cost(comparison: Comparison) -> Drawing:
    """Squared segment (and sample) length per token position."""
    rows = _Rows(comparison, "Attention work per token")
    x = Scale(0, 1.1 * max(e.mean_sample_context for e in rows.evaluations), rows.left, WIDTH - 20)
    rows.grid(x, x.ticks(), short_number)
    for y, evaluation in rows:
        for value, css, top, words in (
            (evaluation.mean_context, "c2", -9, "inside documents"),
            (evaluation.mean_sample_context, "c3", 1, "over whole samples"),
        ):
            tip = f"{evaluation.label}, {words}: {value:,.1f} tokens"
            rows.drawing.rect(rows.left, y + top, x(value) - rows.left, 8, css=css, tip=tip)
            rows.drawing.text(x(value) + 5, y + top + 8, f"{value:,.0f}", "small")
    return rows.below(
        "mean of squared length per position (tokens)",
        [("c2", "attention inside documents"), ("c3", "attention over whole samples")],
    )


def rank_imbalance(comparison: Comparison) -> Drawing:
    """Attention work of the busiest rank over the mean: random assignment against longest first."""
    rows = _Rows(comparison, "Imbalance of attention work over the ranks")
    drawing = rows.drawing
    highest = max(b.imbalance_random for e in rows.evaluations for b in e.work)
    x = Scale(1.0, max(1.5, 1.04 * highest), rows.left + 8, WIDTH - 20, log=highest > 4)
    ticks = [t for t in (1, 1.5, 2, 3, 5, 8, 13, 20, 40) if t <= x.high] if x.log else x.ticks(6)
    rows.grid(x, ticks, lambda tick: f"{tick:.3g}")
    for y, evaluation in rows:
        for bucket in evaluation.work:
            tip = (
                f"{evaluation.label}, bucket {bucket.capacity:,}, {bucket.samples_per_rank} "
                f"samples per rank: random {bucket.imbalance_random:.3f}, longest first "
                f"{bucket.imbalance_balanced:.3f}"
            )
            drawing.circle(x(bucket.imbalance_random), y, 2.6, "faint3", tip)
            drawing.circle(x(bucket.imbalance_balanced), y, 2.6, "faint2", tip)
        random, balanced = evaluation.imbalance("random"), evaluation.imbalance("balanced")
        drawing.line(x(balanced), y, x(random), y, "link")
        drawing.circle(x(random), y, 5.5, "c3", f"{evaluation.label}: random {random:.3f}")
        tip = f"{evaluation.label}: longest first {balanced:.3f}"
        drawing.circle(x(balanced), y, 5.5, "c2", tip)
    return rows.below(
        "attention work of the busiest rank / mean of the ranks",
        [
            ("c3", "random assignment"),
            ("c2", "longest first to the least loaded"),
            ("c0", "small dots: single buckets"),
        ],
    )


def training_time(comparison: Comparison) -> Drawing:
    """GPU-hours by what they are spent on; the price at the end of each bar."""
    rows = _Rows(comparison, "Estimated training time and cost")
    hours = [e.breakdown.gpu_hours for e in rows.evaluations]
    # A strategy that pads ten times over would squeeze all others into nothing: cut its bar.
    longest = min(max(hours), 1.6 * min(hours))
    x = Scale(0, longest * 1.02, rows.left, WIDTH - 150)
    rows.grid(x, x.ticks(), short_number)
    for y, evaluation in rows:
        bill = evaluation.breakdown
        left = 0.0
        for attribute, words, css in PARTS:
            spent: float = getattr(bill, attribute)
            share = f"{spent / bill.gpu_hours:.2%}"
            tip = f"{evaluation.label}, {words}: {spent:,.1f} GPU hours ({share})"
            start, stop = x(left), x(left + spent)
            if stop > start:
                rows.drawing.rect(start, y - 9, stop - start, 18, css=css, tip=tip)
            left += spent
        if bill.gpu_hours > longest:
            rows.drawing.text(x(left) - 8, y + 5, "//", "cut", "end")
        words = f"{short_number(bill.gpu_hours, 4)} h, {money(bill.cost)}"
        rows.drawing.text(x(left) + 7, y + 4, words, "value")
    used = [
        (css, words)
        for attribute, words, css in PARTS
        if any(getattr(e.breakdown, attribute) > 0 for e in rows.evaluations)
    ]
    rows.below("GPU hours", used[:3])
    rows.drawing.legend(rows.left, rows.bottom + 72, used[3:])
    rows.drawing.height += 18
    return rows.drawing


def _shown(label: str) -> str:
    return label if len(label) <= LONGEST_LABEL else label[: LONGEST_LABEL - 3] + "..."


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
