"""Plot of the demo: documents packed in buckets compared with concatenated documents.

    python launch/demo_plot.py --demo demo        # -> demo/demo.png and demo/demo.json

Above: loss on the held-out documents over training tokens, of both runs; documents that a sample
boundary cuts, padding, and the attention work of each rank. Below: the packed run, killed and
resumed, which repeats its steps exactly; the document lengths and the buckets.
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
    "Same documents, model, first weights and tokens per step; both are scored on the same {valid} "
    "held-out documents, each alone. Concatenated, as trainers do by default: text is cut every "
    "{capacity:,} tokens; attention and labels continue into the next document. In buckets: only "
    "documents longer than the largest bucket are cut; each attends only to itself. {loss} "
    "Attention work: query-key pairs per token. One seed, 1.1 million parameters."
)
LOWER = (
    "It is this mask that lowers the loss: with it, concatenation trains equally well (six seeds, "
    "docs/concepts.md)."
)
NOT_LOWER = "This run is too short to show the effect of the mask (docs/concepts.md)."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--demo", type=Path, required=True, help="folder that demo.sh filled")
    demo = parser.parse_args().demo
    facts = {arm: facts_of(demo, arm) for arm in ARMS}
    launches = [list(read_jsonl(demo / name)) for name in ("killed.jsonl", "bucket/log.jsonl")]
    *_, last_start = read_jsonl(demo / "bucket" / "starts.jsonl")
    repeated = compare(*launches, resumed_at=last_start["step"])

    draw(demo, facts, launches, repeated)
    (demo / "demo.json").write_text(json.dumps({**facts, **repeated}, indent=1, default=str) + "\n")
    for arm, title in ARMS.items():
        figures = facts[arm]
        print(
            f"{title:>20}: held-out loss {figures['losses'][-1]:.3f}, documents cut "
            f"{figures['cut']:.1%}, padding {figures['padding']:.3%}, attention work of the ranks "
            + " and ".join(f"{pairs:,.0f}" for pairs in figures["pairs_per_token"])
            + " pairs per token"
        )
    print(
        f"{repeated['repeated_steps']} steps were taken again after the kill: "
        f"{repeated['same_samples']} with the same samples, largest difference of the loss "
        f"{repeated['largest_difference']:.1g}\nwrote {demo / 'demo.png'}"
    )


def facts_of(demo: Path, arm: str) -> dict[str, Any]:
    """Return the plotted figures of one run, from its index, its schedule and its evaluations."""
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
    return {
        "capacities": index.bucket_capacity.tolist(),
        "cut": metrics["truncation_ratio"],
        "longer": metrics["truncation_floor"],
        "padding": metrics["padding_ratio"],
        "pairs_per_token": pairs,
        "tokens": [line["tokens_seen"] for line in evaluations.values()],
        "losses": [line["loss"] for line in evaluations.values()],
        "perplexity": [line["perplexity"] for line in evaluations.values()][-1],
    }


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
    figure = plt.figure(figsize=(11.5, 8.4))
    left = figure.add_gridspec(
        2, 1, left=0.06, right=0.60, top=0.85, bottom=0.165, hspace=0.42, height_ratios=(1.25, 1)
    )
    right = figure.add_gridspec(
        4, 1, left=0.68, right=0.98, top=0.85, bottom=0.165, hspace=0.72,
        height_ratios=(0.8, 0.8, 1.5, 2.1),
    )  # fmt: skip
    figure.text(
        0.06, 0.945, "The same documents, packed in two ways", fontsize=17, fontweight="bold"
    )
    for x, arm in ((0.06, "bucket"), (0.205, "concat")):
        figure.text(x, 0.915, "\N{BLACK SQUARE} " + ARMS[arm], color=COLORS[arm], fontweight="bold")
    draw_losses(figure.add_subplot(left[0]), facts)
    draw_launches(figure.add_subplot(left[1]), *launches, repeated)
    draw_bars(
        figure.add_subplot(right[0]), "documents cut",
        {arm: 100 * facts[arm]["cut"] for arm in ARMS}, "{:.1f} %", 100 * facts["bucket"]["longer"],
    )  # fmt: skip
    draw_bars(
        figure.add_subplot(right[1]), "padding",
        {arm: 100 * facts[arm]["padding"] for arm in ARMS}, "{:.3f} %", least=1.0,
    )  # fmt: skip
    draw_work(figure.add_subplot(right[2]), facts)
    lengths = IndexedDataset(demo / "train").document_lengths
    draw_lengths(figure.add_subplot(right[3]), lengths, facts)
    valid = len(IndexedDataset(demo / "valid").document_lengths)
    lower = facts["bucket"]["losses"][-1] < facts["concat"]["losses"][-1]
    words = {"valid": valid, "loss": LOWER if lower else NOT_LOWER}
    caption = CAPTION.format(capacity=facts["concat"]["capacities"][-1], **words)
    figure.text(
        0.06, 0.025, textwrap.fill(caption, 170), fontsize=8.2, color="#475569", linespacing=1.5
    )
    figure.savefig(demo / "demo.png", dpi=150)


def draw_losses(axis: Axes, facts: dict[str, Any]) -> None:
    ends = {arm: facts[arm]["losses"][-1] for arm in ARMS}
    middle = sum(ends.values()) / len(ends)
    for arm in reversed(ARMS):
        tokens, losses = np.array(facts[arm]["tokens"]) / 1e6, facts[arm]["losses"]
        axis.plot(tokens, losses, color=COLORS[arm], linewidth=2.4, marker="o", markersize=4)
        axis.annotate(
            f"{ends[arm]:.2f}", (tokens[-1], ends[arm]), color=COLORS[arm], fontweight="bold",
            xytext=(8, 5 if ends[arm] > middle else -11), textcoords="offset points",
        )  # fmt: skip
    perplexities = [facts[arm]["perplexity"] for arm in ARMS]
    words = "perplexity {:.0f} in buckets, {:.0f} concatenated".format(*perplexities)
    axis.text(0.97, 0.9, words, transform=axis.transAxes, ha="right", fontweight="bold")
    axis.set(
        title="loss on held-out documents",
        xlabel="million training tokens",
        ylabel="nats per token",
    )
    axis.grid(axis="y", color=PALE)
    axis.margins(x=0.07, y=0.1)


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
        f"kill -9 after step {at}, and the same command again:\n"
        f"{count} steps since the last checkpoint were repeated,\n"
        f"{'all' if same == count else same} with the same samples;\n"
        f"largest difference of a loss: {repeated['largest_difference']:.1g}",
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
    form: str,
    unavoidable: float = 0.0,
    *,
    least: float = 0.0,
) -> None:
    """Plot one bar per arm; the unavoidable part is paler. ``least``: minimum end of the axis."""
    longest = max(*values.values(), least)
    for y, arm in enumerate(ARMS):
        axis.barh(y, values[arm], color=COLORS[arm], height=0.72)
        if unavoidable:
            axis.barh(y, unavoidable, color="white", alpha=0.55, height=0.72)
        axis.text(values[arm] + 0.02 * longest, y, form.format(values[arm]), va="center")
    if unavoidable:
        title += " (pale: longer than any sample)"
    _plain(axis, title, 1.3 * longest)


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
