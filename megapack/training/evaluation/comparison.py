"""Runs by their logs: perplexity curves, who stands where, and figures as PNG files.

``read_curve`` and ``standings`` compare runs; ``plot_curves``, ``plot_contexts`` and ``plot_run``
(a run on one page) draw. Definitions of the atom-size paper, A.6: the last epoch is cut into 100
ranges of 0.01 epoch; in each, every run has an average perplexity and a rank; the ranking is the
mean rank, the final perplexity that of the last range. Epochs, not steps, because padding changes
the steps per epoch.

    a = Curve(np.array([0.0, 0.5, 1.0]), np.array([10.0, 40.0]))  # two steps, one epoch
    b = Curve(np.array([0.0, 0.5, 1.0]), np.array([20.0, 30.0]))
    standings({"a": a, "b": b}, num_ranges=2)  # -> mean rank 1.5 of both, final 40 and 30
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megapack.errors import DataError
from megapack.training.engine.directory import RunDirectory, read_jsonl

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Curve:
    """Training perplexity of one run over epochs.

    Attributes:
        epoch: (steps + 1,) where every step begins and, last, where the run ends.
        perplexity: (steps,) of every step.
    """

    epoch: Floats
    perplexity: Floats

    def average(self, begin: float, end: float) -> float:
        """Mean perplexity of ``[begin, end)`` epochs; a step counts by its part inside."""
        inside = np.minimum(self.epoch[1:], end) - np.maximum(self.epoch[:-1], begin)
        inside = np.maximum(inside, 0.0)
        if inside.sum() <= 0:
            raise DataError(f"the run has no step between epochs {begin:g} and {end:g}")
        return float((self.perplexity * inside).sum() / inside.sum())


@dataclass(frozen=True)
class Standing:
    """One run among others."""

    final_perplexity: float
    mean_rank: float


def read_curve(run_dir: str | Path) -> Curve:
    """The curve in ``log.jsonl`` of a run directory.

    Raises:
        DataError: the log is empty.
        OSError: there is no log.
    """
    path = RunDirectory(run_dir).log
    lines = [line for line in read_jsonl(path) if line["loss"] is not None]
    if not lines:
        raise DataError(f"{path} has no steps")
    begins = [line["epoch"] for line in lines]
    end = lines[-1]["epoch_end"]
    perplexities = [math.exp(min(line["loss"], 700.0)) for line in lines]
    return Curve(np.array([*begins, end]), np.array(perplexities))


def standings(curves: Mapping[str, Curve], num_ranges: int = 100) -> dict[str, Standing]:
    """Final perplexity and mean rank of every run, over the last epoch all of them finished.

    Where a run is shorter than an epoch, over the part of it that all have.

    Raises:
        DataError: a run has no step there.
    """
    common = min(curve.epoch[-1] for curve in curves.values())
    end = max(1, math.floor(common + 1e-9)) if common > 1 - 1e-9 else common
    edges = np.linspace(max(0.0, end - 1), end, num_ranges + 1)
    table = np.array(
        [[curve.average(a, b) for a, b in itertools.pairwise(edges)] for curve in curves.values()]
    )
    below = (table[None] < table[:, None]).sum(axis=1)
    equal = (table[None] == table[:, None]).sum(axis=1)  # which share the mean of their ranks
    ranks = (below + (equal + 1) / 2).mean(axis=1)
    return {name: Standing(float(table[i, -1]), float(ranks[i])) for i, name in enumerate(curves)}


def smooth(values: Sequence[float], alpha: float) -> list[float]:
    """Exponential moving average for plots (A.7), without the bias of its beginning.

    ``min(sqrt(alpha), 0.999)`` is the weight of the past, as the factor in the paper is near 1.
    """
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha is {alpha}; it must be within 0 and 1")
    weight = min(math.sqrt(alpha), 0.999)
    total, norm, result = 0.0, 0.0, []
    for value in values:
        total = weight * total + (1 - weight) * value
        norm = weight * norm + (1 - weight)
        result.append(total / norm)
    return result


def plot_contexts(path: Path, results: Mapping[str, Mapping[int, float]]) -> None:
    """Perplexity by context length, one line per model (BucketLLM, Figure 3)."""
    figure, (axes,) = new_figure()
    for name, perplexities in results.items():
        contexts = sorted(perplexities)
        axes.plot(contexts, [perplexities[c] for c in contexts], marker="o", label=name)
    axes.set_xscale("log", base=2)
    axes.set_xticks(contexts, [f"{c:,}" for c in contexts])
    axes.set(xlabel="context length (tokens)", ylabel="validation perplexity")
    save_figure(figure, [axes], path)


def plot_curves(path: Path, curves: Mapping[str, Curve], *, alpha: float = 0.9) -> None:
    """Training perplexity over epochs, smoothed (atom-size paper, A.7)."""
    figure, (axes,) = new_figure()
    for name, curve in curves.items():
        axes.plot(curve.epoch[1:], smooth(curve.perplexity.tolist(), alpha), label=name)
    axes.set_yscale("log")
    axes.set(xlabel="epoch", ylabel="training perplexity, smoothed")
    save_figure(figure, [axes], path)


def new_figure(rows: int = 1, columns: int = 1) -> tuple[Any, list[Any]]:
    """A figure and its axes, row by row."""
    import matplotlib  # noqa: PLC0415

    matplotlib.use("Agg")
    from matplotlib import pyplot  # noqa: PLC0415

    size = (7, 4.5) if rows == 1 else (6 * columns, 3.2 * rows)
    figure, axes = pyplot.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False)
    return figure, list(axes.flat)


def save_figure(figure: Any, axes: Sequence[Any], path: Path) -> None:
    """Write it as a PNG, with a grid and a legend in all of its axes."""
    from matplotlib import pyplot  # noqa: PLC0415

    for one in axes:
        one.grid(alpha=0.3)
        one.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


Lines = Sequence[Mapping[str, Any]]


def plot_run(run_dir: str | Path, path: Path) -> None:
    """Draw ``log.jsonl`` and ``evaluation.jsonl`` of a run, over its steps, as a PNG.

    Raises:
        DataError: the log is empty.
        OSError: there is no log.
    """
    run = RunDirectory(run_dir)
    lines = list(read_jsonl(run.log))
    if not lines:
        raise DataError(f"{run.log} has no steps")
    evaluations = list(read_jsonl(run.evaluation)) if run.evaluation.exists() else []
    panels: dict[str, Callable[[Any], None]] = {
        "training loss": partial(_loss, lines=lines),
        "training loss by bucket": partial(_by_bucket, lines=lines),
        "tokens per second": partial(
            _fields, lines=lines, tokens_per_second="all", useful_tokens_per_second="of documents"
        ),
        "padding and data wait, share": partial(
            _fields, lines=lines, padding="padding", data_wait_share="data wait"
        ),
        "busiest rank over the mean": partial(_ranks, lines=lines),
    }
    if any(line["mfu"] is not None for line in lines):
        panels["model FLOPs utilization"] = partial(
            _fields,
            lines=lines,
            mfu="attention inside documents",
            naive_mfu="every sample one document",
        )
    if any("source_loss" in line for line in lines):
        panels["training loss by source"] = partial(_by_source, lines=lines)
    if evaluations:
        panels["validation perplexity"] = partial(_validation, evaluations=evaluations)
    figure, grid = new_figure(rows=-(-len(panels) // 2), columns=2)
    figure.suptitle(f"{run.path.name}: {len(lines):,} steps")
    for axes, (title, draw) in zip(grid, panels.items(), strict=False):
        draw(axes)
        axes.set(title=title, xlabel="step")
    for unused in grid[len(panels) :]:
        unused.set_axis_off()
    save_figure(figure, grid[: len(panels)], path)


def _line(axes: Any, points: Sequence[tuple[int, float | None]], label: str) -> None:
    known = [(step, value) for step, value in points if value is not None]
    if known:
        steps, values = zip(*known, strict=True)
        axes.plot(steps, smooth(values, 0.8), label=label)


def _fields(axes: Any, lines: Lines, **labels: str) -> None:
    for name, label in labels.items():
        _line(axes, [(line["step"], line[name]) for line in lines], label)
    axes.set_ylim(bottom=0)


def _loss(axes: Any, lines: Lines) -> None:
    points = [(line["step"], line["loss"]) for line in lines if line["loss"] is not None]
    axes.scatter(*zip(*points, strict=True), s=3, color="silver", label="of a step")
    _line(axes, points, "smoothed")
    skipped = [line["step"] for line in lines if line["skipped"]]
    for i, step in enumerate(skipped):
        axes.axvline(step, color="tab:red", linewidth=0.8, label=None if i else "skipped")


def _by_bucket(axes: Any, lines: Lines) -> None:
    for capacity in sorted({line["capacity"] for line in lines}):
        mine = [(line["step"], line["loss"]) for line in lines if line["capacity"] == capacity]
        _line(axes, mine, f"{capacity:,}")


def _by_source(axes: Any, lines: Lines) -> None:
    names = sorted({name for line in lines for name in line.get("source_loss", {})})
    for name in names[:10]:  # as many as there are colors
        mine = [(line["step"], line.get("source_loss", {}).get(name)) for line in lines]
        _line(axes, mine, name)


def _ranks(axes: Any, lines: Lines) -> None:
    _line(axes, [(line["step"], line["imbalance"]) for line in lines], "attention work")
    found = [(line["step"], line["rank_forward"]) for line in lines if "rank_forward" in line]
    times = [(step, f["most"] / f["median"]) for step, f in found if f["median"]]
    if times:
        axes.plot(*zip(*times, strict=True), label="forward time (over the median)")


def _validation(axes: Any, evaluations: Lines) -> None:
    steps = [line["step"] for line in evaluations]
    axes.plot(steps, [line["perplexity"] for line in evaluations], marker="o", label="all")
    for name in evaluations[-1].get("source_perplexity", {}):
        values = [line["source_perplexity"].get(name) for line in evaluations]
        axes.plot(steps, values, marker="o", label=name)
