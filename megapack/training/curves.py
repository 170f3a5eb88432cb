"""Comparison of runs by their logs: perplexity curves, ranking, plots as PNG files.

``read_curve`` and ``standings`` compare runs, ``plot_curves`` and ``plot_contexts`` plot them
(``megapack-build report`` makes a page of one run). As in the atom-size paper, A.6, the last epoch
is divided into 100 ranges of 0.01 epoch; in each, every run has an average perplexity and a rank.
Runs are ranked by their mean rank; the final perplexity is that of the last range. They are
compared by epoch, not by step, because padding changes the number of steps per epoch.

    a = Curve(np.array([0.0, 0.5, 1.0]), np.array([10.0, 40.0]))  # two steps, one epoch
    b = Curve(np.array([0.0, 0.5, 1.0]), np.array([20.0, 30.0]))
    standings({"a": a, "b": b}, num_ranges=2)  # -> mean rank 1.5 of both, final 40 and 30
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
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
        epoch: (steps + 1,) epochs at the start of every step, then at the end of the run.
        perplexity: (steps,) perplexity of every step.
    """

    epoch: Floats
    perplexity: Floats

    def average(self, begin: float, end: float) -> float:
        """Return the mean perplexity of epochs ``[begin, end)``; steps are weighted by overlap."""
        inside = np.minimum(self.epoch[1:], end) - np.maximum(self.epoch[:-1], begin)
        inside = np.maximum(inside, 0.0)
        if inside.sum() <= 0:
            raise DataError(f"the run has no step between epochs {begin:g} and {end:g}")
        return float((self.perplexity * inside).sum() / inside.sum())


@dataclass(frozen=True)
class Standing:
    """Result of one run among others."""

    final_perplexity: float
    mean_rank: float


def read_curve(run_dir: str | Path) -> Curve:
    """Read the curve of a run directory. Raises DataError (empty log) or OSError."""
    path = RunDirectory(run_dir).log
    lines = [line for line in read_jsonl(path) if line["loss"] is not None]
    if not lines:
        raise DataError(f"{path} has no steps")
    begins = [line["epoch"] for line in lines]
    end = lines[-1]["epoch_end"]
    perplexities = [math.exp(min(line["loss"], 700.0)) for line in lines]
    return Curve(np.array([*begins, end]), np.array(perplexities))


def compared(curves: Mapping[str, Curve]) -> tuple[float, float]:
    """Return the start and end of the last epoch, or part of the first, that all runs completed."""
    common = float(min(curve.epoch[-1] for curve in curves.values()))
    end = max(1, math.floor(common + 1e-9)) if common > 1 - 1e-9 else common
    return max(0.0, end - 1), end


def standings(curves: Mapping[str, Curve], num_ranges: int = 100) -> dict[str, Standing]:
    """Return final perplexity and mean rank of every run in the range of ``compared``."""
    edges = np.linspace(*compared(curves), num_ranges + 1)
    table = np.array(
        [[curve.average(a, b) for a, b in itertools.pairwise(edges)] for curve in curves.values()]
    )
    below = (table[None] < table[:, None]).sum(axis=1)
    equal = (table[None] == table[:, None]).sum(axis=1)  # equal runs share the mean of their ranks
    ranks = (below + (equal + 1) / 2).mean(axis=1)
    return {name: Standing(float(table[i, -1]), float(ranks[i])) for i, name in enumerate(curves)}


def smooth(values: Sequence[float], alpha: float) -> list[float]:
    """Return an exponential moving average for plots (A.7), corrected for its start. The weight of
    the past is ``min(sqrt(alpha), 0.999)``, close to the paper's factor."""
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
    """Plot perplexity by context length, one line per model (BucketLLM, Figure 3)."""
    with axes_in(path) as axes:
        for name, perplexities in results.items():
            contexts = sorted(perplexities)
            axes.plot(contexts, [perplexities[c] for c in contexts], marker="o", label=name)
        axes.set_xscale("log", base=2)
        axes.set_xticks(contexts, [f"{c:,}" for c in contexts])
        axes.set(xlabel="context length (tokens)", ylabel="validation perplexity")


def plot_curves(path: Path, curves: Mapping[str, Curve], *, alpha: float = 0.9) -> None:
    """Plot smoothed training perplexity over epochs (atom-size paper, A.7)."""
    with axes_in(path) as axes:
        for name, curve in curves.items():
            axes.plot(curve.epoch[1:], smooth(curve.perplexity.tolist(), alpha), label=name)
        axes.set_yscale("log")
        axes.set(xlabel="epoch", ylabel="training perplexity, smoothed")


@contextmanager
def axes_in(path: Path) -> Iterator[Any]:
    """Yield axes, then write them as a PNG with grid and legend."""
    from matplotlib.figure import Figure  # noqa: PLC0415 (an extra)

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    yield axes
    axes.grid(alpha=0.3)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
