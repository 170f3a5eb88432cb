"""A run whose mixture, window and batch size change twice, killed once; draws one picture.

    python examples/changing_run.py --output runs/changing      # two minutes of one core

Two sources from files that this environment has: Python's standard library and torch's C++ headers,
as bytes. The manifest has all stages from the beginning. In the middle of the second stage the run
is killed (SIGKILL) and started again. ``changing_run.png`` shows the loss of both sources and the
time of every step; the output says whether repeated steps had the same samples and the same loss.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from megapack.packing import pack
from megapack.storage import IndexedDataset, IndexedDatasetBuilder
from megapack.training.engine.directory import read_jsonl

BUCKETS = [2048]  # one, so that the time of a step is that of its window
FIRST, SECOND, GREY, RED = "#1f6feb", "#d97706", "#9aa5b1", "#d1495b"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("runs/changing"))
    parser.add_argument("--steps", type=int, default=72)
    parser.add_argument("--megabytes", type=float, default=4.0, help="of each source")
    args = parser.parse_args()
    if args.output.exists():
        raise SystemExit(f"{args.output} exists; remove it or choose another --output")
    args.output.mkdir(parents=True)
    config, stages = write_run(args.output, args.steps, args.megabytes)
    log = args.output / "run" / "log.jsonl"
    killed = killed_at(config, log, args.steps * 44 // 100)
    subprocess.run(command(config), check=True)
    lines = list(read_jsonl(log))
    compare(killed, lines, args.output / "run")
    draw(args.output / "changing_run.png", killed, lines, stages)


def write_run(folder: Path, steps: int, megabytes: float) -> tuple[Path, list[dict[str, Any]]]:
    """Write documents, samples, manifest with all stages, and configuration."""
    roots = {
        "python": (Path(sysconfig.get_path("stdlib")), "*.py"),
        "headers": (Path(torch.__file__).parent / "include", "*.h"),
    }
    for name, (root, pattern) in roots.items():
        with IndexedDatasetBuilder(folder / name, np.uint16, vocab_size=257) as builder:
            for text in texts(root, pattern, int(megabytes * 1e6)):
                builder.add_document(np.r_[np.frombuffer(text, np.uint8).astype(np.uint16) + 1, 0])
            builder.finalize()
        dataset = IndexedDataset(folder / name)
        pack(dataset.document_lengths, "bucket", buckets=BUCKETS).save(
            folder / f"{name}.samples", source=dataset
        )
    weights: list[dict[str, float]] = [
        {"python": 0.9, "headers": 0.1},
        {"python": 0.5, "headers": 0.5},
        {"python": 0.1, "headers": 0.9},
    ]
    sources = [
        {"name": name, "prefix": name, "index": f"{name}.samples", "weight": weights[0][name]}
        for name in roots
    ]
    third = steps // 3
    stages: list[dict[str, Any]] = [
        {
            "from_step": third,
            "weights": weights[1],
            "tokens_per_step": 8192,
            "attention_window": 512,
            "window_steps": third // 2,
        },
        {
            "from_step": 2 * third,
            "weights": weights[2],
            "tokens_per_step": 16384,
            "attention_window": 0,
        },
    ]
    manifest = {"sources": sources, "attention_window": 64, "stages": stages}
    (folder / "blend.yaml").write_text(yaml.safe_dump(manifest, sort_keys=False))
    run = {
        "run_dir": str(folder / "run"),
        "num_steps": steps,
        "model": {"preset": "llama_tiny"},
        "data": {
            "blend": str(folder / "blend.yaml"),
            "tokens_per_step": 4096,
            "micro_batch_tokens": 4096,
        },
        "optimizer": {"lr": 3e-3},
        "learning_rate": {"kind": "wsd", "warmup_steps": 5},
        "checkpoint": {"every": max(1, steps // 10), "export": False},
        "logging": {"every": 1, "tensorboard": False},
        "engine": {"precision": "fp32", "zero_stage": 1},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(run, sort_keys=False))
    first = {"from_step": 0, "weights": weights[0], "tokens_per_step": 4096, "attention_window": 64}
    return folder / "config.yaml", [first, *stages]


def texts(root: Path, pattern: str, budget: int) -> Iterator[bytes]:
    """Yield the files of a folder, sorted by name, up to this many bytes."""
    for path in sorted(root.rglob(pattern)):
        text = path.read_bytes()[:6000]
        budget -= len(text)
        if text and budget >= 0:
            yield text


def command(config: Path) -> list[str]:
    return [sys.executable, "-m", "megapack.training.pretrain", "--config", str(config)]


def killed_at(config: Path, log: Path, step: int) -> list[dict[str, Any]]:
    """Start the run and kill it after a step; return the steps that it had logged."""
    process = subprocess.Popen(command(config), start_new_session=True)
    try:
        while not log.exists() or len(list(read_jsonl(log))) <= step:
            if process.poll() is not None:
                raise SystemExit(f"the run ended with {process.returncode} before it was killed")
            time.sleep(0.05)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return list(read_jsonl(log))


def compare(killed: list[dict[str, Any]], lines: list[dict[str, Any]], run: Path) -> None:
    """Compare the samples and losses of repeated steps."""
    starts = [start["step"] for start in read_jsonl(run / "starts.jsonl")]
    again = range(starts[1], len(killed))
    same = sum(killed[i]["samples"] == lines[i]["samples"] for i in again)
    largest = max((abs(killed[i]["loss"] / lines[i]["loss"] - 1) for i in again), default=0.0)
    print(
        f"killed after step {len(killed) - 1}, continued at step {starts[1]}: of {len(again)} "
        f"steps taken twice {same} held the same samples; losses differ by at most {largest:.1e}"
    )
    third = len(lines) // 3
    for begin in range(0, 3 * third, third):
        times = [1e6 * line["seconds"] / line["tokens"] for line in lines[begin : begin + third]]
        print(
            f"steps {begin} to {begin + third - 1}: "
            f"{np.median(times):.1f} ms per 1,000 tokens in the median"
        )
    print(json.dumps({name: round(loss, 3) for name, loss in lines[-1]["source_loss"].items()}))


def draw(
    path: Path,
    killed: list[dict[str, Any]],
    lines: list[dict[str, Any]],
    stages: list[dict[str, Any]],
) -> None:
    import matplotlib as mpl  # noqa: PLC0415

    mpl.use("Agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415

    figure, (loss, seconds) = plt.subplots(2, 1, figsize=(9, 7), sharex=True, layout="constrained")
    for name, color, dashes in (("python", FIRST, "-"), ("headers", SECOND, "--")):
        before = f"{name}, until it was killed"
        for steps, width, shade, label in ((killed, 4.0, GREY, before), (lines, 1.2, color, name)):
            points = [(s["step"], s["source_loss"].get(name)) for s in steps]
            kept = [(step, value) for step, value in points if value is not None]
            style = {"color": shade, "linestyle": dashes, "linewidth": width, "label": label}
            loss.plot(*zip(*kept, strict=True), **style)
    loss.set(ylabel="nats per label token", title="training loss of every source")
    loss.legend(frameon=False, loc="upper right")
    per_token = [1e6 * s["seconds"] / s["tokens"] for s in lines]
    seconds.scatter([s["step"] for s in lines], per_token, color=FIRST, s=12)
    seconds.set(xlabel="step", ylabel="ms per 1,000 tokens", title="time of a step", ylim=(0, None))
    for axis in (loss, seconds):
        axis.axvline(killed[-1]["step"], color=RED, linestyle=":", linewidth=1.2)
        for stage in stages[1:]:
            axis.axvline(stage["from_step"], color="black", linewidth=0.8)
    for stage in stages:
        window, grown = stage["attention_window"], "grows to " if stage.get("window_steps") else ""
        seconds.annotate(
            f"{stage['weights']['python']:.0%} python,\n"
            f"{f'window {grown}{window}' if window else 'no window'},\n"
            f"{stage['tokens_per_step']:,} tokens per step",
            (stage["from_step"] + 1, 0.05),
            xycoords=("data", "axes fraction"),
            fontsize=8,
        )
    loss.annotate(
        "killed", (killed[-1]["step"], 0.9), xycoords=("data", "axes fraction"), color=RED
    )
    figure.savefig(path, dpi=110)
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
