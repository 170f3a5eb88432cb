"""One picture of a run: loss, bucket of every step, and the lengths the buckets were made for.

    python launch/demo_plot.py --run-dir demo/run --data-prefix demo/train \
        --samples demo/train.bucket.samples --output demo/demo.png
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
    parser.add_argument("--data-prefix", required=True)
    parser.add_argument("--samples", required=True)
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()

    attempts = read_attempts(args.run_dir / "log.jsonl")
    index = SampleIndex.load(args.samples)
    lengths = IndexedDataset(args.data_prefix).document_lengths

    figure, axes = plt.subplots(3, 1, figsize=(9, 10), constrained_layout=True)
    draw_loss(axes[0], attempts)
    draw_buckets(axes[1], attempts, index.bucket_capacity)
    draw_lengths(axes[2], lengths, index.bucket_capacity)
    figure.savefig(args.output, dpi=130)
    print(f"wrote {args.output}")


def read_attempts(path: Path) -> list[list[dict[str, Any]]]:
    """The steps of the log, cut wherever the step number falls back: one list per launch."""
    attempts: list[list[dict[str, Any]]] = []
    last = None
    for line in path.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        if "loss" not in record or "bucket" not in record:
            continue
        if last is None or record["step"] <= last:
            attempts.append([])
        attempts[-1].append(record)
        last = record["step"]
    if not attempts:
        raise SystemExit(f"{path} holds no training steps")
    return attempts


def draw_loss(axis: Axes, attempts: list[list[dict[str, Any]]]) -> None:
    for number, attempt in enumerate(attempts):
        is_last = number == len(attempts) - 1
        axis.plot(
            [r["step"] for r in attempt],
            [r["loss"] for r in attempt],
            color=RESUMED if is_last else FIRST,
            linewidth=1.2 if is_last else 5,
            label="resumed" if number else "first launch, killed with SIGKILL",
        )
    for attempt in attempts[1:]:
        axis.axvline(attempt[0]["step"], color=ACCENT, linestyle=":", label="resumed here")
    axis.set(title="training loss", xlabel="step", ylabel="nats per label token")
    axis.legend(frameon=False)


def draw_buckets(axis: Axes, attempts: list[list[dict[str, Any]]], capacity: np.ndarray) -> None:
    """Where launches overlap they are drawn on one another: the same steps, the same buckets."""
    for number, attempt in enumerate(attempts):
        is_last = number == len(attempts) - 1
        axis.scatter(
            [r["step"] for r in attempt],
            [r["capacity"] for r in attempt],
            s=10 if is_last else 45,
            color=RESUMED if is_last else FIRST,
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
