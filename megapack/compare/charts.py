"""Plots of the comparison page, one function each: Comparison -> SVG.

``draw`` turns a ``Chart`` of matplotlib into an element of the page: its colours become those of
the page (``PALETTE``: light, dark), text stays text, and hovering shows exact values. The page of
a run (``megapack.cli.report``) uses both, too.

    draw(trade_off, comparison)  # -> '<svg viewBox="0 0 691.2 316.8" role="img" ...>...</svg>'
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Sequence
from html import escape
from typing import Any, TypeVar

import numpy as np

from megapack.compare.comparison import Comparison
from megapack.compare.evaluation import Evaluation, money
from megapack.errors import ConfigError, printable
from megapack.units import count, percent, short

# Name in the stylesheet, value in light and in dark; the light values must be unique, because
# ``draw`` finds the name by the light value.
_COLOURS = """
paper #ffffff #12161c    ink #1c2430 #e6eaf0      soft #5b6675 #9aa6b5    rule #e3e7ec #2a323d
card #f5f7fa #1a2029     grey #9aa5b1 #66717f     pale #b9c0c9 #4b5563    green #16877a #35b5a4
orange #d9772b #ee9650   violet #8a5cc2 #ae86e0   red #c43d53 #e8667c     blue0 #cfe3f7 #16324f
blue1 #a3c9ee #1d4878    blue2 #6fa8e0 #2660a3    blue3 #3f83cd #3a7fcc   blue #2463c5 #5b9bf0
blue5 #184793 #8ab8f5    blue6 #10316a #b4d2f9    blue7 #0a1f45 #dbe9fc
"""
PALETTE = {
    name: (light, dark) for name, light, dark in re.findall(r"(\w+) (#\w+) (#\w+)", _COLOURS)
}
LIGHT = {name: light for name, (light, _) in PALETTE.items()}
PAPER, INK, SOFT, RULE = (LIGHT[name] for name in ("paper", "ink", "soft", "rule"))
GREY, BLUE, GREEN, ORANGE = (LIGHT[name] for name in ("grey", "blue", "green", "orange"))
BLUES = list(LIGHT.values())[-8:]  # from light to dark

# Parts of the GPU hours, in stacking order: attribute of Breakdown, text, colour.
PARTS = (
    ("tokens", "document tokens", BLUE),
    ("attention", "attention inside segments", GREEN),
    ("padding", "padding", LIGHT["pale"]),
    ("repeated", "repeated tokens", LIGHT["violet"]),
    ("cross_attention", "attention across segments and padding", ORANGE),
    ("waiting", "waiting for the busiest rank", LIGHT["red"]),
)
WIDTH, ROW = 9.6, 0.265  # inches
LONGEST_LABEL = 44  # characters; longer labels end in dots
_STYLE = {
    "svg.fonttype": "none",
    "text.parse_math": False,  # names may contain dollar signs
    "svg.hashsalt": "megapack",
    "font.size": 8.5,
    "text.color": INK,
    "axes.labelcolor": SOFT,
    "axes.edgecolor": SOFT,
    "axes.axisbelow": True,
    "axes.titlesize": 9.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    **{f"axes.spines.{side}": False for side in ("left", "right", "top", "bottom")},
    "axes.grid": True,
    "grid.color": RULE,
    "grid.linewidth": 0.7,
    **{f"{axis}tick.color": SOFT for axis in "xy"},
    **{f"{axis}tick.{kind}.size": 0 for axis in "xy" for kind in ("major", "minor")},
    "ytick.major.pad": 7,
    "legend.frameon": False,
    "legend.handlelength": 0.9,
    "legend.handleheight": 0.9,
}


class Chart:
    """Figure of panels that share the vertical axis; ``tips``: texts shown on hover.

    Args:
        height, width: inches.
        panels: number of panels.
    """

    def __init__(self, height: float, panels: int = 1, width: float = WIDTH) -> None:
        from matplotlib.figure import Figure  # noqa: PLC0415 (an extra)

        self.tips: list[str] = []
        self.figure: Any = Figure(figsize=(width, height), layout="constrained")
        self.panels: list[Any] = list(
            self.figure.subplots(1, panels, squeeze=False, sharey=True)[0]
        )
        self.axes: Any = self.panels[0]

    def tip(self, artist: Any, words: str) -> None:
        artist.set_gid(f"tip-{len(self.tips)}")
        self.tips.append(words)

    def legend(self, entries: Sequence[tuple[str, str]], columns: int = 7) -> None:
        """Draw entries (colour, text) below the plot, in fewer columns if texts are long."""
        from matplotlib.patches import Patch  # noqa: PLC0415

        handles = [Patch(color=colour, label="-") for colour, _ in entries]
        line = int(11 * self.figure.get_figwidth())  # characters
        half = line // 2 - 4
        texts = [w if len(w) <= 2 * half else f"{w[:half]}...{w[-half:]}" for _, w in entries]
        ncols = max(1, min(len(texts), columns, line // (max(map(len, texts), default=0) + 4)))
        legend = self.figure.legend(handles=handles, loc="outside lower left", ncols=ncols)
        for text, words in zip(legend.get_texts(), texts, strict=True):
            text.set_text(words)  # matplotlib leaves out labels that begin with _


class Plot(Chart):
    """Chart of a comparison."""

    def __init__(self, comparison: Comparison, height: float, panels: int = 1) -> None:
        super().__init__(height, panels)
        self.comparison = comparison
        self.evaluations = comparison.evaluations

    @classmethod
    def of_rows(cls, comparison: Comparison, panels: int = 1) -> Plot:
        """Return a plot with a named row per strategy; the recommended one is highlighted."""
        rows = len(comparison.evaluations)
        plot = cls(comparison, rows * ROW + 0.95, panels)
        labels = [evaluation.label for evaluation in comparison.evaluations]
        cut = LONGEST_LABEL - 3
        names = [n if len(n) <= LONGEST_LABEL else f"{n[:cut]}..." for n in labels]
        plot.axes.set_yticks(range(rows), names)
        plot.axes.set_ylim(rows - 0.4, -0.6)
        for row, label in enumerate(plot.axes.get_yticklabels()):
            chosen = row == comparison.recommendation.best
            label.set(color=BLUE if chosen else INK, weight="bold" if chosen else "normal")
        for axes in plot.panels:
            axes.grid(visible=False, axis="y")
        return plot

    def bar(self, row: float, left: float, width: float, colour: str, tip: str, **kw: Any) -> None:
        bars = self.axes.barh(row, width, left=left, color=colour, **{"height": 0.7, **kw})
        self.tip(bars[0], tip)

    def dot(self, x: float, row: float, size: float, colour: str, tip: str, **kw: Any) -> None:
        (marker,) = self.axes.plot(x, row, "o", ms=size, color=colour, mew=0, **kw)
        self.tip(marker, tip)

    def text_right_of(self, x: float, row: float, text: str, **kw: Any) -> None:
        place: dict[str, Any] = {"textcoords": "offset points", "va": "center_baseline"}
        self.axes.annotate(text, (x, row), (5.5, 0), **place, **kw)


def check_matplotlib() -> None:
    """Raise ConfigError if matplotlib is not installed."""
    try:
        import matplotlib  # noqa: F401, PLC0415
    except ImportError as error:
        raise ConfigError(
            "matplotlib is not installed: pip install matplotlib, or leave out the page"
        ) from error


Subject = TypeVar("Subject")


def draw(plot: Callable[[Subject], Chart], subject: Subject) -> str:
    """Return a plot as a self-contained ``<svg>``, always with the same bytes. Raises ConfigError
    if matplotlib is not installed.

    Args:
        plot: a function as below; the first line of its docstring labels the picture.
        subject: its argument.
    """
    check_matplotlib()
    import matplotlib  # noqa: PLC0415
    from matplotlib.text import Text  # noqa: PLC0415

    file = io.StringIO()
    with matplotlib.rc_context(_STYLE):
        chart = plot(subject)
        for artist in chart.figure.findobj():
            artist.set_clip_on(False)  # clips would be references to ids; they are not needed
            if isinstance(artist, Text) and artist.get_text():
                # Names come from files: matplotlib fails on lone surrogates and on an unpaired
                # ``$``.
                artist.set_text(printable(artist.get_text()))
                artist.set_parse_math(False)
        chart.figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    text = file.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", text, flags=re.DOTALL)
    box = re.search(r'viewBox="[^"]+"', text)
    assert box is not None
    label = escape((plot.__doc__ or "").strip().split("\n")[0], quote=True)
    text = re.sub(r"^<svg[^>]*>", f'<svg {box[0]} role="img" aria-label="{label}">', text)
    # Turn the groups that Chart.tip marked into elements with a title, which browsers show on
    # hover.
    for number, words in enumerate(chart.tips):
        text = text.replace(f'<g id="tip-{number}">', f"<g><title>{escape(words)}</title>", 1)
    # Several charts share one page, so keep only the ids of markers, which are hashes.
    text = re.sub(r' id="(?!m[0-9a-f]{9})[^"]*"', "", text).replace("xlink:href", "href")
    text = re.sub(r"font: ([^;\"]*?)'[^;\"]*", r"font: \1system-ui, sans-serif", text)
    # Replace colours by variables of the stylesheet, which has a light and a dark theme.
    for name, (light, _) in PALETTE.items():
        text = text.replace(light, f"var(--{name})")
    return text


def length_histogram(comparison: Comparison) -> Plot:
    """Share of documents and of tokens by document length; lines mark capacities."""
    corpus, plot = comparison.corpus, Plot(comparison, 3.3)
    axes = plot.axes
    documents = corpus.documents_per_interval / corpus.num_documents
    tokens = corpus.tokens_per_interval / corpus.num_tokens
    used = np.nonzero(documents)[0]
    first, last = used[0], used[-1] + 1
    edges = corpus.edges[first : last + 1]
    documents, tokens = documents[first:last], tokens[first:last]
    bars = axes.bar(edges[:-1], 100 * documents, np.diff(edges), align="edge", color=BLUE)
    for bar, low, high, d, t in zip(bars, edges, edges[1:], documents, tokens, strict=False):
        bar.set(edgecolor=PAPER, linewidth=0.7)
        shares = f"{percent(d, None)} of documents, {percent(t, None)} of tokens"
        plot.tip(bar, f"{low:,.0f} to {high:,.0f} tokens: {shares}")
    axes.stairs(100 * tokens, edges, color=ORANGE, linewidth=1.6)
    axes.set_xscale("log", base=2)
    axes.set_xlim(edges[0], edges[-1])
    step = 4 if edges[-1] / edges[0] > 64 else 2
    marks = [step**k for k in range(20) if edges[0] <= step**k <= edges[-1]]
    axes.set_xticks(marks, map(count, marks))
    axes.minorticks_off()
    axes.yaxis.set_major_formatter("{x:g} %")
    axes.spines["bottom"].set_visible(True)
    axes.grid(visible=False, axis="x")
    top = axes.get_ylim()[1]
    for capacity in sorted({c for e in comparison.evaluations for c in e.case.buckets}):
        if edges[0] < capacity < edges[-1]:
            axes.axvline(capacity, color=SOFT, linewidth=0.7, dashes=(3, 4))
            axes.text(capacity, 1.02 * top, count(capacity), ha="center", color=SOFT)
    axes.set_xlabel("document length (tokens, log scale)")
    entries = [(BLUE, "share of documents"), (ORANGE, "share of tokens")]
    plot.legend([*entries, (GREY, "dashed: capacities compared")])
    return plot


def tokens_per_bucket(comparison: Comparison) -> Plot:
    """Share of the token positions of each strategy, by bucket."""
    plot = Plot.of_rows(comparison)
    capacities = sorted({bucket.capacity for e in plot.evaluations for bucket in e.work})
    for row, evaluation in enumerate(plot.evaluations):
        left = 0.0
        for bucket in evaluation.work:
            share = 100 * bucket.num_positions / evaluation.num_positions
            k = min(capacities.index(bucket.capacity), 7)
            tip = (
                f"{evaluation.label}: {share:.2f} % of positions in {count(bucket.num_samples)} "
                f"samples of {count(bucket.capacity)}"
            )
            plot.bar(row, left, share, BLUES[k], tip, ec=PAPER, lw=0.5)
            if share > 7:
                colour = PAPER if k > 2 else INK
                plot.axes.text(left + share / 2, row, f"{share:.1f}", color=colour, **_MIDDLE)
            left += share
    plot.axes.set(xlim=(0, 100), xlabel="share of token positions (%)")
    plot.legend([(BLUES[min(k, 7)], count(capacity)) for k, capacity in enumerate(capacities)])
    return plot


_MIDDLE: dict[str, Any] = {"ha": "center", "va": "center_baseline", "size": 8}


def trade_off(comparison: Comparison) -> Plot:
    """Padding, truncation, concatenation, and tokens dropped or repeated, side by side."""
    plot = Plot.of_rows(comparison, panels=4)
    columns: tuple[tuple[str, str, Callable[[Evaluation], float]], ...] = (
        ("padding", "% of positions", lambda e: 100 * e.metrics["padding_ratio"]),
        ("truncation", "% of documents", lambda e: 100 * e.metrics["truncation_ratio"]),
        ("concatenation", "documents per sample", lambda e: e.metrics["concatenation_ratio"]),
        (
            "dropped or repeated",
            "% of tokens",
            lambda e: 100 * (e.metrics["dropped_ratio"] + e.metrics["repeated_ratio"]),
        ),
    )
    for axes, (title, unit, value_of) in zip(plot.panels, columns, strict=True):
        plot.axes = axes
        values = [float(value_of(evaluation)) for evaluation in plot.evaluations]
        positive = [value for value in values if value > 0] or [1.0]
        low = 10.0 ** math.floor(math.log10(max(min(positive), 1e-3)))
        high = max(10.0 ** (math.floor(math.log10(max(positive))) + 1), 10 * low)
        decades = np.arange(round(math.log10(low)), round(math.log10(high)) + 1)
        axes.set_xscale("log")
        axes.set(xlim=(low, high * (high / low) ** 0.35), title=title, xlabel=unit)
        shown = decades[:: math.ceil(len(decades) / 4)]
        axes.set_xticks(10.0**shown, [f"{10.0**k:g}" for k in shown])
        axes.set_xticks(10.0**decades, minor=True)
        axes.grid(visible=True, axis="x", which="minor")
        axes.tick_params(axis="x", which="minor", labelbottom=False)
        for row, (evaluation, value) in enumerate(zip(plot.evaluations, values, strict=True)):
            at = max(value, low)
            axes.plot([low, at], [row, row], color=RULE, linewidth=1.5)
            colour = BLUE if row == comparison.recommendation.best else GREY
            plot.dot(at, row, 6.5, colour, f"{evaluation.label}: {title} {value:.6g} {unit}")
            plot.text_right_of(at, row, _format(value))
    return plot


def attention_cost(comparison: Comparison) -> Plot:
    """Attention work per token: squared lengths of segments and of samples, per position."""
    plot = Plot.of_rows(comparison)
    for row, evaluation in enumerate(plot.evaluations):
        for value, colour, below, words in (
            (evaluation.mean_context, GREEN, -0.19, "inside documents"),
            (evaluation.mean_sample_context, ORANGE, 0.19, "over whole samples"),
        ):
            tip = f"{evaluation.label}, {words}: {value:,.1f} tokens"
            plot.bar(row + below, 0, value, colour, tip, height=0.34)
            plot.text_right_of(value, row + below, f"{value:,.0f}", size=7, color=SOFT)
    plot.axes.xaxis.set_major_formatter("{x:,g}")
    plot.axes.set_xlabel("mean of squared length per position (tokens)")
    plot.axes.margins(x=0.08)
    plot.legend([(GREEN, "attention inside documents"), (ORANGE, "attention over whole samples")])
    return plot


def rank_imbalance(comparison: Comparison) -> Plot:
    """Attention work of the busiest rank over the mean: random assignment, longest first."""
    plot = Plot.of_rows(comparison)
    highest = max(bucket.imbalance_random for e in plot.evaluations for bucket in e.work)
    if highest > 4:
        plot.axes.set_xscale("log")
        ticks = [t for t in (1, 1.5, 2, 3, 5, 8, 13, 20, 40) if t <= 1.04 * highest]
        plot.axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        plot.axes.minorticks_off()
    for row, evaluation in enumerate(plot.evaluations):
        ways: dict[Any, str] = {"random": ORANGE, "balanced": GREEN}
        means = {way: evaluation.imbalance(way) for way in ways}
        plot.axes.plot(list(means.values()), [row, row], color=LIGHT["pale"], linewidth=2, zorder=1)
        for way, colour in ways.items():
            words = "random" if way == "random" else "longest first"
            for bucket in evaluation.work:
                value = bucket.imbalance(way)
                tip = (
                    f"{evaluation.label}, bucket {count(bucket.capacity)}, "
                    f"{bucket.samples_per_rank} samples per rank: {words} {value:.3f}"
                )
                plot.dot(value, row, 3, colour, tip, alpha=0.45)
            plot.dot(means[way], row, 7, colour, f"{evaluation.label}: {words} {means[way]:.3f}")
    plot.axes.set(xlim=(0.98, max(1.5, 1.04 * highest)))
    plot.axes.set_xlabel("attention work of the busiest rank / mean of the ranks")
    entries = [(ORANGE, "random assignment"), (GREEN, "longest first to the least loaded")]
    plot.legend([*entries, (GREY, "small dots: single buckets")])
    return plot


def training_time(comparison: Comparison) -> Plot:
    """GPU hours by cause, with the price at the end of each bar."""
    plot = Plot.of_rows(comparison)
    hours = [evaluation.breakdown.gpu_hours for evaluation in plot.evaluations]
    # Cut the bar of a strategy with very much padding, so that the other bars remain visible.
    longest = min(max(hours), 1.6 * min(hours))
    for row, evaluation in enumerate(plot.evaluations):
        bill, left = evaluation.breakdown, 0.0
        for attribute, words, colour in PARTS:
            spent: float = getattr(bill, attribute)
            tip = f"{evaluation.label}, {words}: {spent:,.1f} GPU hours"
            width = min(spent, longest - left)
            if width > 0:
                share = percent(spent / bill.gpu_hours)
                plot.bar(row, left, width, colour, f"{tip} ({share})")
            left += max(width, 0.0)
        if bill.gpu_hours > longest:
            plot.axes.text(0.985 * left, row, "//", weight="bold", **_MIDDLE)
        plot.text_right_of(left, row, f"{short(bill.gpu_hours)} h, {money(bill.cost)}")
    plot.axes.set(xlim=(0, 1.16 * longest), xlabel="GPU hours")
    bills = [evaluation.breakdown for evaluation in plot.evaluations]
    plot.legend([(c, text) for name, text, c in PARTS if any(getattr(b, name) > 0 for b in bills)])
    return plot


def _format(value: float) -> str:
    if value < 0.001:
        return "<0.001" if value > 0 else "0"
    return f"{value:.0f}" if value >= 99.95 else f"{value:.2g}" if value < 1 else f"{value:.3g}"
