"""Figures of runs and evaluations, as PNG files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megapack.training.judge.curves import Curve, smooth

__all__ = ["new_figure", "plot_contexts", "plot_curves", "save_figure"]


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
