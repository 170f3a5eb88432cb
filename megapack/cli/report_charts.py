"""Facts of a run, read from its directory, and the charts of its page: RunFacts -> Chart.

``read_run`` reads the files that exist; ``RunLog`` holds ``log.jsonl`` as columns. A chart draws at
most ``NUM_BINS`` groups of consecutive steps, so the page does not grow with the run:

    log = RunLog([{"step": 0, "loss": 4.0}, {"step": 1, "loss": 2.0}, {"step": 2, "loss": None}])
    Bins(log.column("step"), 1).mean(log.column("loss"))  # -> [3.0]; missing values are left out
"""

from __future__ import annotations

import json
import math
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megapack.compare.charts import BLUE, GREEN, GREY, INK, LIGHT, ORANGE, SOFT, Chart
from megapack.data.run import Decisions, read_decisions
from megapack.errors import ConfigError, DataError, FormatError
from megapack.training.engine.directory import RunDirectory, is_lost, read_jsonl, step_of, tags_in
from megapack.units import count, short

Floats = NDArray[np.float64]
Line = Mapping[str, Any]

NUM_BINS = 240
SHOWN = 8  # sources, buckets and branches that get a colour
VIOLET, RED = LIGHT["violet"], LIGHT["red"]
COLOURS = (BLUE, ORANGE, GREEN, VIOLET, RED, LIGHT["blue2"], GREY, LIGHT["blue6"])
WIDE, NARROW = 9.6, 4.9  # inches

_TIME_MEANS = [
    "tokens_per_second",
    "useful_tokens_per_second",
    "data_wait_share",
    "mfu",
    "naive_mfu",
]
_FIELDS = (
    *("step", "loss", "grad_norm", "lr", "tokens_seen", "seconds", "capacity", "label_tokens"),
    *("imbalance", "padding", "second_padding", "memory_gib"),
    *_TIME_MEANS,
)


class RunLog:
    """Lines of ``log.jsonl`` as columns.

    Attributes:
        sources: name -> (rows, losses, label tokens), by descending number of label tokens.
        ranks: per printed log line: step, forward and waiting times of ranks.
        skipped: steps whose update was skipped.
        not_finite: steps whose loss is not finite.
        latest: steps of the last printed log line, for ``slowdowns``; may be empty.
    """

    def __init__(self, lines: Iterable[Line]) -> None:
        self._columns = {name: array("d") for name in _FIELDS}
        by_source: dict[str, tuple[array[Any], ...]] = {}
        self.ranks: list[tuple[int, Line, Line]] = []
        self.skipped: list[int] = []
        self.not_finite: list[int] = []
        self.latest: list[Line] = []
        since: deque[Line] = deque(maxlen=1000)
        for row, line in enumerate(lines):
            for name, column in self._columns.items():
                value = line.get(name)
                column.append(np.nan if value is None else value)
            for name, loss in line.get("source_loss", {}).items():
                columns = by_source.setdefault(name, (array("q"), array("d"), array("d")))
                values = (row, np.nan if loss is None else loss, line["source_label_tokens"][name])
                for part, number in zip(columns, values, strict=True):
                    part.append(number)
            if line.get("skipped"):
                self.skipped.append(line["step"])
            if is_lost(line):
                self.not_finite.append(line["step"])
            since.append(line)
            if "rank_forward" in line:
                self.ranks.append((line["step"], line["rank_forward"], line["rank_data_wait"]))
                self.latest = list(since)
                since.clear()
        self.sources = {
            name: tuple(np.frombuffer(part, part.typecode) for part in by_source[name])
            for name in sorted(by_source, key=lambda name: -sum(by_source[name][2]))
        }

    def __len__(self) -> int:
        return len(self._columns["step"])

    def column(self, name: str) -> Floats:
        """Return (N,) float64, nan where the log has no value."""
        return np.frombuffer(self._columns[name])

    def weights(self, name: str) -> Floats:
        """Return (N,) weights of steps in the mean of a column: seconds for rates over time."""
        return self.column("seconds") if name in _TIME_MEANS else np.ones(len(self))

    def recent(self, name: str, share: float = 0.1) -> float:
        """Return the mean over the last steps; nan if the log has no value."""
        size = max(1, int(share * len(self)))
        last, weights = self.column(name)[-size:], self.weights(name)[-size:]
        known = ~np.isnan(last)
        return float(np.average(last[known], weights=weights[known])) if known.any() else np.nan


class Bins:
    """At most ``at_most`` groups of consecutive ascending steps (N,), each of four or more if
    possible; a group is one point of a curve. ``steps``: (B,) middle of every group."""

    def __init__(self, steps: Floats, at_most: int = NUM_BINS) -> None:
        first, span = steps[0], steps[-1] - steps[0] + 1
        self.num = int(max(1, min(at_most, span // 4))) if span > 20 else int(min(at_most, span))
        self._first, self._span = first, span
        _, self._starts = np.unique(self.of(steps), return_index=True)
        self.steps = np.add.reduceat(steps, self._starts) / np.diff([*self._starts, len(steps)])

    def of(self, steps: Floats) -> NDArray[np.int64]:
        groups = (steps - self._first) * self.num // self._span
        return np.asarray(groups, np.int64)

    def mean(self, values: Floats, weights: Floats | None = None) -> Floats:
        """Return (B,) weighted means without nan values; nan for a group without values."""
        known = np.where(np.isnan(values), 0.0, 1.0 if weights is None else weights)
        sums = np.add.reduceat(np.nan_to_num(values) * known, self._starts)
        with np.errstate(invalid="ignore"):
            return np.asarray(sums / np.add.reduceat(known, self._starts))

    def total(self, values: Floats) -> Floats:
        return np.asarray(np.add.reduceat(values, self._starts))

    def range(self, values: Floats) -> tuple[Floats, Floats]:
        """Return the minimum and maximum of every group."""
        low, high = (ufunc.reduceat(values, self._starts) for ufunc in (np.fmin, np.fmax))
        return low, high


@dataclass
class Branch:
    path: Path
    from_step: int
    log: RunLog | None
    reason: str


@dataclass
class RunFacts:
    """Content of a run directory; missing files are empty or None."""

    run: RunDirectory
    log: RunLog
    config: dict[str, Any]
    end: dict[str, Any]
    starts: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]
    decisions: Decisions | None
    checkpoints: list[int]
    branches: list[Branch]

    @property
    def num_steps(self) -> int | None:
        """Steps of the whole run, if known."""
        last = self.starts[-1] if self.starts else {}
        known = last.get("num_steps") or self.config.get("num_steps")
        return None if known is None else int(known)


def read_run(path: str | Path) -> RunFacts:
    """Read a run directory. Raises DataError if the run has no steps yet, FormatError if a log is
    damaged, ConfigError if the path is not a run directory or the run has not started, and OSError
    if the log cannot be read."""
    run = RunDirectory(path)
    if not run.log.exists():
        raise ConfigError(
            f"{path} is not a run directory with {run.log.name}; give one whose run has started"
        )
    log = RunLog(read_jsonl(run.log))
    if not len(log):
        raise DataError(f"{run.log} has no steps yet; wait for the first step")
    return RunFacts(
        run=run,
        log=log,
        config=run.settings(),
        end=_end(run),
        starts=list(read_jsonl(run.starts)) if run.starts.exists() else [],
        evaluations=list(read_jsonl(run.evaluation)) if run.evaluation.exists() else [],
        decisions=read_decisions(run.path),
        checkpoints=[step_of(tag) for tag in tags_in(run.checkpoints)],
        branches=_branches(run),
    )


def _end(run: RunDirectory) -> dict[str, Any]:
    with suppress(OSError, ValueError, RecursionError):
        return dict(json.loads(run.ended.read_text(encoding="utf-8")))
    return {}


def _branches(run: RunDirectory) -> list[Branch]:
    """Return the readable runs in the same folder that began at a checkpoint of this one."""
    directory = run.path.resolve()
    others: list[Path] = []
    branches: list[Branch] = []
    with suppress(OSError):  # listing the folder of the runs may be forbidden
        others = sorted(path for path in directory.parent.iterdir() if path != directory)
    for path in others:
        other = RunDirectory(path)
        section = other.settings().get("checkpoint")
        origin = section.get("branch_from") if isinstance(section, dict) else None
        if origin is None or Path(origin).parent.parent.name != directory.name:
            continue
        log = None
        if len(branches) < SHOWN:
            with suppress(OSError, FormatError):  # missing or damaged; its own page reports it
                log = RunLog(read_jsonl(other.log))
        step = step_of(Path(origin).name)
        branches.append(Branch(path, step, log, _end(other).get("reason", "unknown")))
    return branches


# ---- Charts --------------------------------------------------------------------------------------


def curve(
    chart: Chart, bins: Bins, values: Floats, colour: str, weights: Floats | None = None
) -> None:
    """Draw the mean of every group, with gaps for groups without values; one group is a dot."""
    look = "o-" if bins.num == 1 else "-"
    chart.axes.plot(bins.steps, bins.mean(values, weights), look, color=colour, lw=1.4, ms=4)


def over_steps(facts: RunFacts, height: float, width: float) -> Chart:
    chart = Chart(height, width=width)
    steps = facts.log.column("step")
    chart.axes.set_xlim(steps[0] - 0.5, max(steps[-1] + 0.5, steps[0] + 1))
    chart.axes.xaxis.set_major_formatter("{x:,.0f}")
    chart.axes.locator_params(axis="x", nbins=9 if width > NARROW else 6, integer=True)
    chart.axes.grid(visible=False, axis="x")
    chart.axes.spines["bottom"].set_visible(True)
    chart.axes.set_xlabel("step")
    return chart


def mark(
    chart: Chart, facts: RunFacts, places: Iterable[tuple[float, str]], colour: str, at: float
) -> None:
    """Draw triangles at a height of the chart (0 to 1), at most one per group of steps."""
    steps = facts.log.column("step")
    bins = Bins(steps)
    shown: dict[int, tuple[float, str]] = {}
    for step, words in places:
        if steps[0] <= step <= steps[-1] + 1:
            shown[int(bins.of(np.array([step], np.float64))[0])] = (step, words)
    for step, words in shown.values():
        (marker,) = chart.axes.plot(
            *(step, at, "^" if at < 0.5 else "v"),
            transform=chart.axes.get_xaxis_transform(), color=colour, ms=6, mew=0, zorder=5,
        )  # fmt: skip
        chart.tip(marker, words)


def loss(facts: RunFacts) -> Chart:
    """Training loss of every step, validation loss, and changes of the run."""
    log, chart = facts.log, over_steps(facts, 3.4, WIDE)
    steps, losses = log.column("step"), log.column("loss")
    bins = Bins(steps)
    means, (low, high) = bins.mean(losses), bins.range(losses)
    known = high[~np.isnan(high)]
    # Cut single spikes, which would compress the rest of the curve.
    top = float(np.quantile(known, 0.995)) if len(known) else 1.0
    bottom = float(np.nanmin(low)) if len(known) else 0.0
    entries = [(BLUE, "mean of the training loss"), (LIGHT["blue0"], "minimum and maximum")]
    chart.axes.fill_between(bins.steps, low, np.minimum(high, top), color=LIGHT["blue0"], lw=0)
    look = "o-" if bins.num == 1 else "-"
    chart.axes.plot(bins.steps, np.minimum(means, top), look, color=BLUE, lw=1.6, ms=4)
    shown = (line for line in facts.evaluations if steps[0] < line["step"] <= steps[-1] + 1)
    valid = [line for line in shown if np.isfinite(line["loss"])]
    if valid:
        entries.append((ORANGE, "validation loss"))
        for line in valid[:: -(-len(valid) // NUM_BINS)]:
            (marker,) = chart.axes.plot(line["step"] - 0.5, line["loss"], "o", color=ORANGE, ms=4)
            chart.tip(marker, f"after step {line['step']:,}: validation loss {line['loss']:.4f}")
        top, bottom = (f(x, *(v["loss"] for v in valid)) for f, x in ((max, top), (min, bottom)))
    room = 0.08 * (top - bottom or 1.0)
    chart.axes.set_ylim(bottom - room, top + room)
    # Invisible bars over the whole height show the values of a group on hover.
    width = (steps[-1] - steps[0] + 1) / bins.num
    for x, mean, least, most in zip(bins.steps, means, low, high, strict=True):
        tall = top - bottom + 2 * room
        bar = chart.axes.bar(x, tall, width, bottom - room, alpha=0, color=INK, zorder=3)[0]
        words = f"{mean:.4f} ({least:.4f} to {most:.4f})"
        chart.tip(bar, f"step {x - width / 2 + 0.5:,.0f} to {x + width / 2 - 0.5:,.0f}: {words}")
    entries += _mark_changes(chart, facts)
    chart.axes.set_ylabel("loss per label token")
    chart.legend(entries)
    return chart


def _mark_changes(chart: Chart, facts: RunFacts) -> list[tuple[str, str]]:
    """Mark decisions, starts and skipped updates; return the entries of the legend."""
    decisions = facts.decisions.decisions if facts.decisions else ()
    reasons = {
        by: [(d.begin, d.reason) for d in decisions if d.by == by and not d.void]
        for by in ("autopilot", "mixing")
    }
    starts = [
        (start["step"], f"started at step {start['step']:,} by {start['world_size']} ranks")
        for start in facts.starts[1:]
    ]
    skipped = [(step, f"update {step:,} skipped") for step in facts.log.skipped]
    kinds: tuple[tuple[str, str, float, Sequence[tuple[float, str]]], ...] = (
        (RED, "autopilot skips", 0.97, reasons["autopilot"]),
        (VIOLET, "new mixture", 0.03, reasons["mixing"]),
        (GREY, "resumed", 0.03, starts),
        (INK, "update skipped", 0.97, skipped),
    )
    for colour, _, at, places in kinds:
        mark(chart, facts, places, colour, at)
    return [(colour, words) for colour, words, _, places in kinds if places]


def loss_by_source(facts: RunFacts) -> Chart:
    """Training loss of every source."""
    return _by_name(facts, {name: values[:2] for name, values in facts.log.sources.items()})


def loss_by_bucket(facts: RunFacts) -> Chart:
    """Training loss of every bucket."""
    capacities, losses = facts.log.column("capacity"), facts.log.column("loss")
    rows = {capacity: np.flatnonzero(capacities == capacity) for capacity in buckets(facts)}
    curves = {count(int(capacity)): (at, losses[at]) for capacity, at in rows.items()}
    return _by_name(facts, curves)


def buckets(facts: RunFacts) -> list[float]:
    return sorted(set(facts.log.column("capacity").tolist()))


def _by_name(facts: RunFacts, curves: Mapping[str, Sequence[NDArray[Any]]]) -> Chart:
    """Draw a curve per name: (rows of the log, values)."""
    chart, steps = over_steps(facts, 2.9, NARROW), facts.log.column("step")
    entries = []
    for (name, (rows, values)), colour in zip(curves.items(), COLOURS, strict=False):
        curve(chart, Bins(steps[rows], NUM_BINS // 2), np.asarray(values), colour)
        entries.append((colour, name))
    _limit(chart, steps)
    chart.axes.set_ylabel("loss per label token")
    return _named(chart, entries, len(curves))


def _limit(chart: Chart, steps: Floats) -> None:
    """Leave the first steps out of the vertical range: they would compress all others."""
    lines = chart.axes.get_lines()
    values = np.concatenate(
        [y[x >= steps[0] + 0.02 * (steps[-1] - steps[0])] for x, y in (a.get_data() for a in lines)]
    )
    values = values[~np.isnan(values)]
    if len(values) and values.max() > values.min():
        room = 0.05 * (values.max() - values.min())
        low, high = values.min() - room, values.max() + room
        chart.axes.set_ylim(low, high)
        for line in lines:
            line.set_ydata(np.clip(line.get_ydata(), low, high))


def _named(chart: Chart, entries: list[tuple[str, str]], number: int) -> Chart:
    if number > len(entries):
        entries.append((SOFT, f"{number - len(entries)} more in log.jsonl"))
    chart.legend(entries, columns=4)
    return chart


def mixture(facts: RunFacts) -> Chart:
    """Share of the label tokens of every source."""
    chart, log = over_steps(facts, 2.9, NARROW), facts.log
    steps = log.column("step")
    bins, names = Bins(steps, NUM_BINS // 2), list(log.sources)
    shown = names[: SHOWN - 1] if len(names) > SHOWN else names
    rows = []
    for name in names:
        column = np.zeros(len(log))
        column[log.sources[name][0]] = log.sources[name][2]
        rows.append(bins.total(column))
    total = np.maximum(np.sum(rows, axis=0), 1)
    shares = [100 * row / total for row in rows[: len(shown)]]
    labels = [*shown]
    if len(names) > len(shown):
        shares.append(100 - np.sum(shares, axis=0))
        labels.append(f"{len(names) - len(shown)} more")
    chart.axes.stackplot(bins.steps, shares, colors=COLOURS[: len(shares)], lw=0, alpha=0.85)
    chart.axes.set(ylim=(0, 100), ylabel="share of label tokens (%)")
    chart.legend([*zip(COLOURS, labels, strict=False)], columns=4)
    return chart


def validation(facts: RunFacts) -> Chart:
    """Validation perplexity, of all held-out documents and by source."""
    chart = over_steps(facts, 2.9, NARROW)
    lines = facts.evaluations[:: -(-len(facts.evaluations) // NUM_BINS)]
    names = list(lines[-1].get("source_perplexity", {}))
    steps = [line["step"] for line in lines]
    chart.axes.plot(steps, [v["perplexity"] for v in lines], "o-", color=INK, ms=3, lw=1.6)
    for name, colour in zip(names, COLOURS, strict=False):
        values = [line.get("source_perplexity", {}).get(name, np.nan) for line in lines]
        chart.axes.plot(steps, values, "o-", color=colour, ms=2.5, lw=1.2)
    chart.axes.set_ylabel("validation perplexity")
    entries = [(INK, "all"), *zip(COLOURS, names, strict=False)]
    return _named(chart, entries, len(names) + 1)


def _columns(facts: RunFacts, unit: str, words: Mapping[str, str], factor: float = 1.0) -> Chart:
    """Draw columns of the log (name -> text of the legend) on an axis from 0."""
    chart, steps = over_steps(facts, 2.5, NARROW), facts.log.column("step")
    bins = Bins(steps, NUM_BINS // 2)
    for name, colour in zip(words, COLOURS, strict=False):
        curve(chart, bins, factor * facts.log.column(name), colour, facts.log.weights(name))
    chart.axes.set_ylim(bottom=0)
    chart.axes.yaxis.set_major_formatter(lambda value, _: short(value))
    chart.axes.set_ylabel(unit)
    if len(words) > 1:
        chart.legend([*zip(COLOURS, words.values(), strict=False)], columns=4)
    return chart


def throughput(facts: RunFacts) -> Chart:
    """Tokens per second, of all ranks."""
    names = {"tokens_per_second": "all", "useful_tokens_per_second": "of documents"}
    return _columns(facts, "tokens per second", names)


def waste(facts: RunFacts) -> Chart:
    """Padding of both capacities, and the time in which the first rank waited for batches."""
    names = {"data_wait_share": "waited for data", "padding": "padding"}
    if not math.isnan(facts.log.recent("second_padding", 1.0)):
        names["second_padding"] = "second padding"
    return _columns(facts, "%", names, 100.0)


def utilization(facts: RunFacts) -> Chart:
    """Model FLOPs utilization."""
    names = {"mfu": "attention inside documents", "naive_mfu": "each sample as one document"}
    return _columns(facts, "% of the device's peak", names, 100.0)


def memory(facts: RunFacts) -> Chart:
    """Peak memory of the first rank."""
    return _columns(facts, "GiB", {"memory_gib": "peak, first rank"})


def learning_rate(facts: RunFacts) -> Chart:
    """Learning rate."""
    chart = _columns(facts, "learning rate", {"lr": "learning rate"})
    chart.axes.yaxis.set_major_formatter(lambda value, _: f"{value:.1e}" if value else "0")
    return chart


def gradients(facts: RunFacts) -> Chart:
    """Norm of the gradient before clipping, log scale."""
    chart, steps = over_steps(facts, 2.5, NARROW), facts.log.column("step")
    bins, norms = Bins(steps, NUM_BINS // 2), facts.log.column("grad_norm")
    low, high = (np.maximum(values, 1e-12) for values in bins.range(norms))
    chart.axes.fill_between(bins.steps, low, high, color=LIGHT["blue0"], lw=0)
    curve(chart, bins, np.maximum(norms, 1e-12), BLUE)
    chart.axes.set_yscale("log")
    chart.axes.locator_params(axis="y", subs=(1, 2, 5))  # also ticks within a decade
    chart.axes.minorticks_off()
    chart.axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    chart.axes.set_ylabel("gradient norm")
    return chart


def stragglers(facts: RunFacts) -> Chart:
    """The slowest rank over the median, and the busiest over the mean."""
    chart, steps = over_steps(facts, 2.5, NARROW), facts.log.column("step")
    curve(chart, Bins(steps, NUM_BINS // 2), facts.log.column("imbalance"), GREEN)
    ratios = [(step, f["most"] / f["median"]) for step, f, _ in facts.log.ranks if f["median"]]
    if ratios:
        at, ratio = np.array(ratios).T
        curve(chart, Bins(at, NUM_BINS // 2), ratio, ORANGE)
    chart.axes.set_ylim(bottom=min(0.98, chart.axes.get_ylim()[0]))
    chart.axes.set_ylabel("times")
    entries = [(GREEN, "attention work, busiest over mean")]
    entries += [(ORANGE, "forward, slowest over median")] * bool(ratios)
    chart.legend(entries, columns=2)
    return chart


def branches(facts: RunFacts) -> Chart:
    """Training loss of this run and of those that branched from it."""
    shown = [b for b in facts.branches if b.log]
    chart = over_steps(facts, 3.0, WIDE)
    logs = [(facts.run.path.resolve().name, 0, facts.log)]
    logs += [(b.path.name, b.from_step, b.log) for b in shown if b.log]
    first = 0.75 * min(b.from_step for b in shown)
    entries, last = [], 0.0
    for (name, begin, log), colour in zip(logs, COLOURS, strict=False):
        steps = log.column("step")
        rows = np.flatnonzero(steps >= max(begin, first))
        if len(rows):
            curve(chart, Bins(steps[rows]), log.column("loss")[rows], colour)
            entries.append((colour, name))
            last = max(last, steps[-1])
    for branch in shown:
        line = chart.axes.axvline(branch.from_step, color=SOFT, linewidth=0.8, dashes=(3, 4))
        chart.tip(line, f"{branch.path.name} begins at step {branch.from_step:,}")
    chart.axes.set_xlim(first, last + 1)
    chart.axes.set_ylabel("loss per label token")
    chart.legend(entries)
    return chart


def slowest(log: RunLog, which: int) -> Counter[tuple[int, str]]:
    """Count how often each rank took longest: forward (which=0), waiting for batches (1)."""
    return Counter((times[which]["rank"], times[which]["host"]) for _, *times in log.ranks)


Draw = Callable[[RunFacts], Chart]
