"""Figures of runs and evaluations, as PNG files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megapack.training.judge.curves import Curve, smooth

__all__ = ["plot_contexts", "plot_curves"]


def plot_contexts(path: Path, results: Mapping[str, Mapping[int, float]]) -> None:
    """Perplexity by context length, one line per model (BucketLLM, Figure 3)."""
    figure, axes = _figure()
    for name, perplexities in results.items():
        contexts = sorted(perplexities)
        axes.plot(contexts, [perplexities[c] for c in contexts], marker="o", label=name)
    axes.set_xscale("log", base=2)
    axes.set_xticks(contexts, [f"{c:,}" for c in contexts])
    axes.set(xlabel="context length (tokens)", ylabel="validation perplexity")
    _save(figure, axes, path)


def plot_curves(path: Path, curves: Mapping[str, Curve], *, alpha: float = 0.9) -> None:
    """Training perplexity over epochs, smoothed (atom-size paper, A.7)."""
    figure, axes = _figure()
    for name, curve in curves.items():
        axes.plot(curve.epoch[1:], smooth(curve.perplexity.tolist(), alpha), label=name)
    axes.set_yscale("log")
    axes.set(xlabel="epoch", ylabel="training perplexity, smoothed")
    _save(figure, axes, path)


def _figure() -> tuple[Any, Any]:
    import matplotlib  # noqa: PLC0415

    matplotlib.use("Agg")
    from matplotlib import pyplot  # noqa: PLC0415

    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    return figure, axes


def _save(figure: Any, axes: Any, path: Path) -> None:
    from matplotlib import pyplot  # noqa: PLC0415

    axes.grid(alpha=0.3)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
