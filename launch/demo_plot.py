"""Plot of the demo: documents packed in buckets compared with concatenated documents.

    python launch/demo_plot.py --demo demo        # -> demo/demo.png and demo/demo.json

Top row, effects of the packing: documents that a sample boundary cuts, attention work of each rank,
seconds of training to the same held-out loss. Bottom row: the packed run, killed and resumed, which
repeats its steps exactly; document lengths and buckets; the final held-out losses of all seeds,
which differ by chance.
"""

from __future__ import annotations

import argparse
import json
import textwrap
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np

mpl.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

from megapack import IndexedDataset
from megapack.data.run import OpenRun
from megapack.training.command import read_config
from megapack.training.engine.directory import read_jsonl

RANKS = 2
ARMS = {"bucket": "packed in buckets", "concat": "concatenated and cut"}
COLORS = {"bucket": "#1d4ed8", "concat": "#c2410c"}
GREY, INK, PALE = "#94a3b8", "#1e293b", "#e2e8f0"
CAPTION = (
    "Same documents, model and tokens per step; both are scored on the same {valid} held-out "
    "documents, each alone. Concatenated, as trainers do by default: text is cut every "
    "{capacity:,} tokens; attention and labels continue into the next document. In buckets: only "
    "documents longer than the largest bucket are cut; each attends only to itself. Attention "
    "work: query-key pairs per token. Seconds: steps of the first seed, without evaluations and "
    "starts. {parameters:.1f} million parameters, {tokens:,.0f} thousand tokens: too few to "
    "compare the quality of the models (docs/concepts.md has longer runs)."
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--demo", type=Path, required=True, help="folder that demo.sh filled")
    demo = parser.parse_args().demo
    facts = {arm: facts_of(demo, arm) for arm in ARMS}
    target = max(figures["losses"][-1] for figures in facts.values())
    for figures in facts.values():
        figures["seconds_to_target"] = seconds_to(target, figures)
    launches = [list(read_jsonl(demo / name)) for name in ("killed.jsonl", "bucket/log.jsonl")]
    *_, last_start = read_jsonl(demo / "bucket" / "starts.jsonl")
    repeated = compare(*launches, resumed_at=last_start["step"])
    repeated |= {"target_loss": target, "parameters": last_start["parameters"]}

    draw(demo, facts, launches, repeated)
    (demo / "demo.json").write_text(json.dumps({**facts, **repeated}, indent=1, default=str) + "\n")
    for arm, title in ARMS.items():
        figures = facts[arm]
        print(
            f"{title:>20}: documents cut {figures['cut']:.1%}, padding {figures['padding']:.3%}, "
            "attention work of the ranks "
            + " and ".join(f"{pairs:,.0f}" for pairs in figures["pairs_per_token"])
            + f" pairs per token, {figures['seconds_to_target']:.0f} s to a held-out loss of "
            f"{target:.3f}; last loss of each seed "
            + ", ".join(f"{loss:.3f}" for loss in figures["last_losses"])
        )
    print(
        f"{repeated['repeated_steps']} steps were repeated after the kill: "
        f"{repeated['same_samples']} with the same samples, largest difference of the loss "
        f"{repeated['largest_difference']:.1g}\nwrote {demo / 'demo.png'}"
    )


def facts_of(demo: Path, arm: str) -> dict[str, Any]:
    """Return the plotted figures of one packing, from its index, its schedule and its runs."""
    run = OpenRun(read_config(str(demo / arm / "config.yaml")))
    (index,) = run.schedule.samples.indices
    metrics = index.metrics()
    evaluations = {line["step"]: line for line in read_jsonl(demo / arm / "evaluation.jsonl")}
    sampler, steps = run.sampler(0, RANKS), list(read_jsonl(demo / arm / "log.jsonl"))
    if arm == "concat":  # a token attends to all earlier tokens of its sample
        pairs = [index.bucket_capacity[-1] / 2] * RANKS
    else:
        work = sum(sampler.attention_of_ranks(step["step"]).sum(axis=0) for step in steps)
        pairs = (work * RANKS / steps[-1]["tokens_seen"] / 2).tolist()
    seconds = np.cumsum([step["seconds"] for step in steps])
    losses = [line["loss"] for line in evaluations.values()]
    others = sorted(demo.glob(f"{arm}-*/evaluation.jsonl"))
    return {
        "capacities": index.bucket_capacity.tolist(),
        "cut": metrics["truncation_ratio"],
        "longer": metrics["truncation_floor"],
        "padding": metrics["padding_ratio"],
        "pairs_per_token": pairs,
        "tokens_seen": steps[-1]["tokens_seen"],
        "seconds": [float(seconds[step - 1]) for step in evaluations],
        "losses": losses,
        "last_losses": [losses[-1], *(list(read_jsonl(path))[-1]["loss"] for path in others)],
    }


def seconds_to(target: float, figures: dict[str, Any]) -> float:
    """Return the seconds until the held-out loss, linear between evaluations, is the target."""
    losses, seconds = figures["losses"], figures["seconds"]
    after = next(i for i, loss in enumerate(losses) if loss <= target)
    before = max(after - 1, 0)
    return float(
        np.interp(-target, [-losses[before], -losses[after]], [seconds[before], seconds[after]])
    )


def compare(
    killed: list[dict[str, Any]], run: list[dict[str, Any]], *, resumed_at: int
) -> dict[str, Any]:
    """Compare the steps of both launches: from the checkpoint to where the first was killed."""
    first = {record["step"]: record for record in killed}
    again = [r for r in run if r["step"] >= resumed_at and r["step"] in first]
    differences = [abs(record["loss"] - first[record["step"]]["loss"]) for record in again]
    return {
        "killed_at": killed[-1]["step"],
        "resumed_at": resumed_at,
        "repeated_steps": len(again),
        "same_samples": sum(r["samples"] == first[r["step"]]["samples"] for r in again),
        "largest_difference": max(differences, default=float("nan")),
    }


# ---- The plot -----------------------------------------------------------------------------------


def draw(demo: Path, facts: dict[str, Any], launches: Any, repeated: dict[str, Any]) -> None:
    plt.rcParams.update(
        {"font.size": 9.5, "axes.edgecolor": GREY, "axes.labelcolor": INK, "text.color": INK}
        | {"xtick.color": INK, "ytick.color": INK, "axes.titlesize": 11, "axes.titleweight": "bold"}
        | {"axes.titlelocation": "left", "axes.spines.top": False, "axes.spines.right": False}
    )
    figure = plt.figure(figsize=(11.5, 7.4))
    above = figure.add_gridspec(1, 3, left=0.05, right=0.97, top=0.82, bottom=0.60, wspace=0.2)
    below = figure.add_gridspec(
        1, 3, left=0.05, right=0.97, top=0.50, bottom=0.20, wspace=0.26,
        width_ratios=(1.5, 0.95, 0.6),
    )  # fmt: skip
    figure.text(
        0.05, 0.94, "The same documents, packed in two ways", fontsize=17, fontweight="bold"
    )
    for x, arm in ((0.05, "bucket"), (0.205, "concat")):
        figure.text(x, 0.90, "\N{BLACK SQUARE} " + ARMS[arm], color=COLORS[arm], fontweight="bold")
    draw_bars(
        figure.add_subplot(above[0]), "documents cut",
        {arm: 100 * facts[arm]["cut"] for arm in ARMS},
        {arm: f"{facts[arm]['cut']:.1%}, {facts[arm]['padding']:.2%} padding" for arm in ARMS},
        100 * facts["bucket"]["longer"],
    )  # fmt: skip
    draw_work(figure.add_subplot(above[1]), facts)
    seconds = {arm: facts[arm]["seconds_to_target"] for arm in ARMS}
    draw_bars(
        figure.add_subplot(above[2]),
        f"seconds to a held-out loss of {repeated['target_loss']:.2f}", seconds,
        {arm: f"{seconds[arm]:.0f} s" for arm in ARMS},
    )  # fmt: skip
    draw_launches(figure.add_subplot(below[0]), *launches, repeated)
    lengths = IndexedDataset(demo / "train").document_lengths
    draw_lengths(figure.add_subplot(below[1]), lengths, facts)
    draw_seeds(figure.add_subplot(below[2]), facts)
    caption = CAPTION.format(
        valid=len(IndexedDataset(demo / "valid").document_lengths),
        capacity=facts["concat"]["capacities"][-1],
        parameters=repeated["parameters"] / 1e6,
        tokens=facts["bucket"]["tokens_seen"] / 1e3,
    )
    figure.text(
        0.05, 0.025, textwrap.fill(caption, 172), fontsize=8.2, color="#475569", linespacing=1.5
    )
    figure.savefig(demo / "demo.png", dpi=150)


def draw_seeds(axis: Axes, facts: dict[str, Any]) -> None:
    """Plot the last held-out loss of every seed; a line joins both packings of a seed."""
    pairs = np.array([facts[arm]["last_losses"] for arm in ARMS])
    axis.plot([0, 1], pairs, color=PALE, linewidth=1.5)
    for x, arm in enumerate(ARMS):
        axis.plot([x] * pairs.shape[1], pairs[x], "o", color=COLORS[arm], markersize=5)
    differences = pairs[0] - pairs[1]
    spread = f", sd {differences.std(ddof=1):.3f}" if len(differences) > 1 else ""
    axis.set_title(f"last held-out loss, {len(differences)} seeds", fontsize=9.5)
    axis.set_xticks([0, 1], ["buckets", "concat."])
    axis.set_xlabel(f"mean difference {differences.mean():+.3f}{spread}", fontsize=8.2)
    axis.locator_params(axis="y", nbins=5)
    axis.grid(axis="y", color=PALE)
    axis.margins(x=0.3, y=0.25)
    axis.tick_params(labelsize=8)


def draw_launches(
    axis: Axes, killed: list[dict[str, Any]], run: list[dict[str, Any]], repeated: dict[str, Any]
) -> None:
    """Plot both launches; where they overlap, one covers the other."""
    resumed = [record for record in run if record["step"] >= repeated["resumed_at"]]
    for steps, color, width in ((killed, "#fbbf24", 6.0), (resumed, COLORS["bucket"], 1.3)):
        axis.plot(
            [record["step"] for record in steps],
            [record["loss"] for record in steps],
            color=color, linewidth=width, solid_capstyle="round",
        )  # fmt: skip
    at = repeated["killed_at"]
    axis.axvline(at, color=INK, linewidth=1, linestyle=(0, (3, 3)))
    count, same = repeated["repeated_steps"], repeated["same_samples"]
    axis.annotate(
        f"kill -9 after step {at}, then the\nsame command again: {count} steps\n"
        f"were repeated, {'all' if same == count else same} with the\nsame samples; largest\n"
        f"difference of a loss: {repeated['largest_difference']:.1g}",
        (at, 0.93), xycoords=("data", "axes fraction"), xytext=(8, 0),
        textcoords="offset points", va="top", fontsize=8.2,
    )  # fmt: skip
    axis.text(
        0.02, 0.06, "first launch (wide), and the resumed run", color="#b45309", fontsize=8.2,
        transform=axis.transAxes,
    )  # fmt: skip
    axis.set(title="training loss of the packed run", xlabel="step", ylabel="nats per token")
    axis.grid(axis="y", color=PALE)
    axis.margins(x=0.02)


def draw_bars(
    axis: Axes,
    title: str,
    values: dict[str, float],
    texts: dict[str, str],
    unavoidable: float = 0.0,
) -> None:
    """Plot one bar per arm with its text; the unavoidable part is paler."""
    longest = max(values.values())
    for y, arm in enumerate(ARMS):
        axis.barh(y, values[arm], color=COLORS[arm], height=0.72)
        if unavoidable:
            axis.barh(y, unavoidable, color="white", alpha=0.55, height=0.72)
        axis.text(values[arm] + 0.02 * longest, y, texts[arm], va="center")
    if unavoidable:
        title += " (pale: longer than any sample)"
    _plain(axis, title, 1.6 * longest)


def draw_work(axis: Axes, facts: dict[str, Any]) -> None:
    """Plot the attention work of every rank over the whole run."""
    longest = max(max(facts[arm]["pairs_per_token"]) for arm in ARMS)
    y = 0.0
    for arm in ARMS:
        for rank, pairs in enumerate(facts[arm]["pairs_per_token"]):
            axis.barh(y, pairs, color=COLORS[arm], height=0.72)
            axis.text(pairs + 0.02 * longest, y, f"rank {rank}: {pairs:,.0f}", va="center")
            y += 0.85
        y += 0.35
    _plain(axis, "attention work of each rank", 1.4 * longest)


def _plain(axis: Axes, title: str, end: float) -> None:
    axis.set_title(title, fontsize=9.5)
    axis.set(xlim=(0, end), xticks=[], yticks=[])
    axis.invert_yaxis()
    axis.spines["bottom"].set_visible(False)


def draw_lengths(axis: Axes, lengths: np.ndarray, facts: dict[str, Any]) -> None:
    positive = lengths[lengths > 0]
    bins = np.geomspace(32, positive.max() + 1, 48)
    axis.hist(positive, bins=bins.tolist(), color="#cbd5e1")
    capacities = facts["bucket"]["capacities"]
    for value in capacities:
        axis.axvline(value, color=COLORS["bucket"], linewidth=1.4)
    axis.set_xscale("log", base=2)
    axis.set_xlim(left=32)
    axis.set_xticks(capacities, [f"{c:,}" for c in capacities], fontsize=8)
    axis.minorticks_off()
    axis.yaxis.set_major_formatter(FuncFormatter(lambda count, _: f"{count:,.0f}"))
    axis.set_title("lengths of the documents, and the buckets", fontsize=9.5)
    axis.set(xlabel="tokens", ylabel="documents")


if __name__ == "__main__":
    main()
