"""A run on one page: loss, buckets, sources, throughput, MFU, padding, imbalance, validation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megapack.errors import DataError
from megapack.training.judge.curves import smooth
from megapack.training.judge.plots import new_figure, save_figure
from megapack.training.run.directory import RunDirectory, read_jsonl

__all__ = ["plot_run"]

Lines = Sequence[Mapping[str, Any]]
_ALPHA = 0.8  # of the smoothing


def plot_run(run_dir: str | Path, path: Path) -> None:
    """Draw ``log.jsonl`` and ``evaluation.jsonl`` of a run, over its steps, as a PNG.

    Raises:
        DataError: the log is empty.
        OSError: there is no log.
    """
    run = RunDirectory(run_dir)
    lines = list(read_jsonl(run.log))
    if not lines:
        raise DataError(f"{run.log} has no steps")
    evaluations = list(read_jsonl(run.evaluation)) if run.evaluation.exists() else []
    panels: list[tuple[str, Callable[[Any], None]]] = [
        ("training loss", lambda axes: _loss(axes, lines)),
        ("training loss by bucket", lambda axes: _by_bucket(axes, lines)),
        ("tokens per second", lambda axes: _speed(axes, lines)),
        ("padding and data wait, share", lambda axes: _shares(axes, lines)),
        ("busiest rank over the mean", lambda axes: _ranks(axes, lines)),
    ]
    if any(line["mfu"] is not None for line in lines):
        panels.append(("model FLOPs utilization", lambda axes: _mfu(axes, lines)))
    if any("source_loss" in line for line in lines):
        panels.append(("training loss by source", lambda axes: _by_source(axes, lines)))
    if evaluations:
        panels.append(("validation perplexity", lambda axes: _validation(axes, evaluations)))
    figure, grid = new_figure(rows=-(-len(panels) // 2), columns=2)
    figure.suptitle(f"{run.path.name}: {len(lines):,} steps")
    for axes, (title, draw) in zip(grid, panels, strict=False):
        draw(axes)
        axes.set(title=title, xlabel="step")
    for unused in grid[len(panels) :]:
        unused.set_axis_off()
    save_figure(figure, grid[: len(panels)], path)


def _line(axes: Any, lines: Lines, name: str, label: str | None = None) -> None:
    points = [(line["step"], line[name]) for line in lines if line.get(name) is not None]
    if points:
        steps, values = zip(*points, strict=True)
        axes.plot(steps, smooth(values, _ALPHA), label=label or name.replace("_", " "))


def _loss(axes: Any, lines: Lines) -> None:
    points = [(line["step"], line["loss"]) for line in lines if line["loss"] is not None]
    axes.scatter(*zip(*points, strict=True), s=3, color="silver", label="of a step")
    _line(axes, lines, "loss", "smoothed")
    skipped = [line["step"] for line in lines if line["skipped"]]
    for i, step in enumerate(skipped):
        axes.axvline(step, color="tab:red", linewidth=0.8, label=None if i else "skipped")


def _by_bucket(axes: Any, lines: Lines) -> None:
    for capacity in sorted({line["capacity"] for line in lines}):
        mine = [line for line in lines if line["capacity"] == capacity]
        _line(axes, mine, "loss", f"{capacity:,}")


def _by_source(axes: Any, lines: Lines) -> None:
    names = sorted({name for line in lines for name in line.get("source_loss", {})})
    for name in names[:10]:  # as many as there are colors
        mine = [{**line, "of": line.get("source_loss", {}).get(name)} for line in lines]
        _line(axes, mine, "of", name)


def _speed(axes: Any, lines: Lines) -> None:
    _line(axes, lines, "tokens_per_second", "all")
    _line(axes, lines, "useful_tokens_per_second", "of documents")
    axes.set_ylim(bottom=0)


def _shares(axes: Any, lines: Lines) -> None:
    _line(axes, lines, "padding")
    _line(axes, lines, "data_wait_share", "data wait")
    axes.set_ylim(bottom=0)


def _ranks(axes: Any, lines: Lines) -> None:
    _line(axes, lines, "imbalance", "attention work")
    found = [(line["step"], line["rank_forward"]) for line in lines if "rank_forward" in line]
    times = [(step, f["most"] / f["median"]) for step, f in found if f["median"]]
    if times:
        axes.plot(*zip(*times, strict=True), label="forward time (over the median)")


def _mfu(axes: Any, lines: Lines) -> None:
    _line(axes, lines, "mfu", "attention inside documents")
    _line(axes, lines, "naive_mfu", "every sample one document")
    axes.set_ylim(bottom=0)


def _validation(axes: Any, evaluations: Lines) -> None:
    steps = [line["step"] for line in evaluations]
    axes.plot(steps, [line["perplexity"] for line in evaluations], marker="o", label="all")
    for name in evaluations[-1].get("source_perplexity", {}):
        values = [line["source_perplexity"].get(name) for line in evaluations]
        axes.plot(steps, values, marker="o", label=name)
