"""One picture of a run: loss, bucket of every step, and the lengths the buckets were made for.

    python launch/demo_plot.py --run-dir demo/run --killed-log demo/killed.jsonl \
        --data-prefix demo/train --samples demo/train.samples --output demo/demo.png
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np

mpl.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from megapack import IndexedDataset, SampleIndex

FIRST, RESUMED, ACCENT = "#9aa5b1", "#1f6feb", "#d1495b"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--killed-log", type=Path, required=True, help="of the first launch")
    parser.add_argument("--data-prefix", required=True)
    parser.add_argument("--samples", required=True)
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()

    killed, run = read_steps(args.killed_log), read_steps(args.run_dir / "log.jsonl")
    index = SampleIndex.load(args.samples)
    lengths = IndexedDataset(args.data_prefix).document_lengths

    figure, axes = plt.subplots(3, 1, figsize=(9, 10), constrained_layout=True)
    draw_loss(axes[0], killed, run)
    draw_buckets(axes[1], killed, run, index.bucket_capacity)
    draw_lengths(axes[2], lengths, index.bucket_capacity)
    figure.savefig(args.output, dpi=130)
    last = json.loads((args.run_dir / "evaluation.jsonl").read_text().splitlines()[-1])
    ten = sum(record["loss"] for record in run[-10:]) / len(run[-10:])  # one step says little
    print(
        f"loss {run[0]['loss']:.2f} -> {ten:.2f} nats (mean of the last ten of {len(run)} steps); "
        f"perplexity of the held-out documents {last['perplexity']:.1f}"
    )
    print(f"wrote {args.output}")


def read_steps(path: Path) -> list[dict[str, Any]]:
    """The training steps of a log; a line that a killed process left unfinished is not one."""
    steps = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if "loss" in record and "bucket" in record:
            steps.append(record)
    if not steps:
        raise SystemExit(f"{path} holds no training steps")
    return steps


def draw_loss(axis: Axes, killed: list[dict[str, Any]], run: list[dict[str, Any]]) -> None:
    for steps, color, width, label in (
        (killed, FIRST, 5, f"first launch, killed with SIGKILL after step {killed[-1]['step']}"),
        (run, RESUMED, 1.2, "the whole run, continued from the last checkpoint"),
    ):
        axis.plot(
            [record["step"] for record in steps],
            [record["loss"] for record in steps],
            color=color,
            linewidth=width,
            label=label,
        )
    axis.set(title="training loss", xlabel="step", ylabel="nats per label token")
    axis.legend(frameon=False)


def draw_buckets(
    axis: Axes, killed: list[dict[str, Any]], run: list[dict[str, Any]], capacity: np.ndarray
) -> None:
    """Where the launches overlap, one is drawn on the other: the same steps, the same buckets."""
    for steps, color, size in ((killed, FIRST, 45), (run, RESUMED, 10)):
        axis.scatter(
            [record["step"] for record in steps],
            [record["capacity"] for record in steps],
            s=size,
            color=color,
        )
    axis.set_yscale("log", base=2)
    axis.set_yticks(capacity, [f"{c:,}" for c in capacity])
    axis.minorticks_off()
    axis.set(
        title="bucket of every step (the same on every rank)",
        xlabel="step",
        ylabel="capacity, tokens",
    )


def draw_lengths(axis: Axes, lengths: np.ndarray, capacity: np.ndarray) -> None:
    positive = lengths[lengths > 0]
    bins = np.geomspace(max(1, positive.min()), positive.max() + 1, 60)
    axis.hist(positive, bins=bins.tolist(), color=FIRST)
    for value in capacity:
        axis.axvline(value, color=ACCENT, linewidth=1)
    axis.set_xscale("log", base=2)
    beyond = float(np.mean(positive > capacity[-1]))
    axis.set(
        title=f"document lengths and bucket capacities ({beyond:.1%} are longer than the largest)",
        xlabel="tokens",
        ylabel="documents",
    )


if __name__ == "__main__":
    main()
