"""Four pictures of what the benchmarks logged, for docs/results.md; readable in grey.

Lines are told apart by their style, points by their marker and words, nothing by colour. Error bars
are the spread that a benchmark logged: quartiles of windows, or the worst step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

__all__ = ["draw", "listed"]

Runs = Mapping[str, dict[str, Any]]
SMALLEST = 1e-4  # per cent: what a logarithmic axis shows for zero
GREYS = ("0.75", "0.45", "0.15")


def listed(runs: Runs) -> list[str]:
    """Every picture whose benchmark was logged, in markdown."""
    return [
        f"![{title}](images/results_{name}.png)"
        for name, (benchmark, title, _) in ALL.items()
        if benchmark in runs
    ]


def draw(runs: Runs, folder: Path) -> None:
    """Write the pictures that ``listed`` names."""
    import matplotlib  # noqa: PLC0415

    matplotlib.use("Agg")
    from matplotlib import pyplot  # noqa: PLC0415

    for name, (benchmark, _, picture) in ALL.items():
        if benchmark not in runs:
            continue
        figure, axes = pyplot.subplots(figsize=(6.4, 3.6), layout="constrained")
        picture(axes, runs[benchmark]["results"])
        figure.savefig(folder / f"results_{name}.png", dpi=110)
        pyplot.close(figure)


def _composition(axes: Any, rows: list[dict[str, Any]]) -> None:
    """Padding against truncation, one number per strategy; what coincides shares a place."""
    points: dict[str, dict[str, float]] = {}
    for row in rows:
        if row["source"] == "every strategy":
            points.setdefault(row["item"], {})[row["quantity"]] = max(row["measured"], SMALLEST)
    places: dict[tuple[float, float], list[int]] = {}
    for number, of in enumerate(points.values(), start=1):
        place = tuple(round(math.log10(of[name]) * 4) / 4 for name in ("r_pad %", "r_tru %"))
        places.setdefault((place[0], place[1]), []).append(number)
    for (x, y), numbers in places.items():
        text = ", ".join(map(str, numbers))
        axes.text(10**x, 10**y, text, ha="center", va="center", bbox={"fc": "0.9", "pad": 2.5})
    names = [f"{number}  {item}" for number, item in enumerate(points, start=1)]
    axes.text(1.03, 1, "\n".join(names), transform=axes.transAxes, va="top", fontsize=8)
    axes.set(xscale="log", yscale="log", xlabel="padding (%)", ylabel="documents split (%)")
    axes.set(xlim=(SMALLEST / 3, 300), ylim=(0.05, 300))
    axes.grid(alpha=0.3)


def _speed(axes: Any, results: dict[str, Any]) -> None:
    """Useful tokens per second of the same small model."""
    rows = results["strategies"]
    names = [row["case"] for row in rows]
    axes.barh(names, [row["useful_tokens_per_second"] for row in rows], color=GREYS[0], ec="black")
    axes.invert_yaxis()
    axes.set(xlabel=f"useful tokens/s, {results['setup']['device']}")


def _loader(axes: Any, rows: list[dict[str, Any]]) -> None:
    """Rates against megatron-core's plain GPTDataset: one call, a loader, inside Megatron."""
    by_case = {row["case"]: row for row in rows if "case" in row}
    inside = {(row["dataset"], row["loader"]): row for row in rows if "loader" in row}
    levels = [
        ("one call, one sample", by_case["ours, bucket, one sample"], by_case["GPTDataset, plain"]),
        (
            "a loader, no workers",
            by_case["ours (thread), 0 workers"],
            by_case["GPTDataset, plain, 0 workers"],
        ),
        *(
            (
                f"inside Megatron, {loader}",
                inside["PackedGPTDataset", loader],
                inside["GPTDataset", loader],
            )
            for loader in ("mbs 1, workers 0", "mbs 4, workers 0")
        ),
    ]
    names, ratios, errors = [], [], []
    for name, ours, theirs in levels:
        rate = "rows_per_second" if "rows_per_second" in ours else "samples_per_second"
        names.append(name)
        ratios.append(ours[rate] / theirs[rate])
        # Quartiles of both sides, as if they were independent.
        spread = (ours["spread_%"] ** 2 + theirs["spread_%"] ** 2) ** 0.5 / 200
        errors.append(ratios[-1] * spread)
    axes.barh(names, ratios, xerr=errors, color=GREYS[0], ec="black", capsize=3)
    axes.axvline(1, color="0.3", linestyle="--", linewidth=1)
    axes.invert_yaxis()
    axes.set(xlabel="times megatron-core's plain GPTDataset")


def _imbalance(axes: Any, rows: list[dict[str, Any]]) -> None:
    """Attention work of the busiest rank over the mean, by samples per rank."""
    cases = [row for row in rows if str(row.get("case", "")).startswith("bucket ")]
    samples = [int(row["case"].split(", ")[1].split()[0]) for row in cases]
    for (key, name), grey, style in zip(
        (("random", "random assignment"), ("ours", "megapack"), ("worst", "megapack, worst step")),
        GREYS,
        ("--", "-", ":"),
        strict=True,
    ):
        axes.plot(
            samples, [row[key] for row in cases], style, color=grey, marker="o", ms=4, label=name
        )
    axes.set(
        xscale="log",
        xlabel="samples per rank and step (64 ranks)",
        ylabel="attention work, busiest over mean",
    )
    axes.set_xticks(samples, [str(n) for n in samples])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)


ALL: dict[str, tuple[str, str, Callable[[Any, Any], None]]] = {
    "composition": ("composition", "padding against truncation, every strategy", _composition),
    "speed": ("train", "useful tokens per second by packing", _speed),
    "loader": ("data", "loader speed at three levels", _loader),
    "imbalance": ("schedule", "imbalance by samples per rank", _imbalance),
}
