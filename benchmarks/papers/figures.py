"""Figures of the recipes: lines over a common axis, as small PNG files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path


def lines(
    path: Path,
    curves: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    *,
    x: str,
    y: str,
    log_x: bool = False,
) -> None:
    """Write one line per name; x and y name the axes."""
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(7.5, 4), layout="constrained")
    axes = figure.subplots()
    for name, (xs, ys) in curves.items():
        axes.plot(xs, ys, marker="o", markersize=3, linewidth=1.2, label=name)
    if log_x:
        ticks = sorted({value for xs, _ in curves.values() for value in xs})
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [f"{tick:,.0f}" for tick in ticks])
    axes.set(xlabel=x, ylabel=y)
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right upper", fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
