"""Train the runs of the recipes (``papers.run``), two at a time.

A run is trained once: the cache keeps its log and result under a key of everything that determines
them (the run, the tokens, this software). So an interrupted ``make bench-papers`` continues, but
after a change of the code all runs are trained again. Workers import torch once, then execute run
after run (``papers.worker``).
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import multiprocessing
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, as_completed, wait
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

from papers.corpus import WORK, Corpus, prepare
from papers.run import Run, Task

from megapack.training.curves import Curve, read_curve
from megapack.training.engine.directory import read_jsonl

ROOT = Path(__file__).resolve().parents[2]
# Code that determines the numbers of a run.
CODE = (
    *("megapack/data", "megapack/packing", "megapack/training", "megapack/attention"),
    *("megapack/storage", "megapack/tokenization", "csrc/core", "csrc/bindings"),
    *("benchmarks/papers/corpus.py", "benchmarks/papers/run.py", "benchmarks/papers/runs.py"),
    "benchmarks/papers/worker.py",
)
Choice = TypeVar("Choice")


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Sizes of the recipes."""

    name: str  # cpu, long, quick or gpu
    num_seeds: int | None = None  # seeds per arm; None: the recipe's own number
    workers: int = 2  # runs at a time

    def seeds(self, usual: int = 3) -> range:
        """Return the seeds of every arm; ``usual`` is their number if the scale has none."""
        return range(usual if self.num_seeds is None else self.num_seeds)

    def pick(
        self, *, cpu: Choice, gpu: Choice, quick: Choice | None = None, long: Choice | None = None
    ) -> Choice:
        """Return the value for this scale; ``quick`` and ``long`` default to ``cpu``."""
        given = {"gpu": gpu, "quick": quick, "long": long}.get(self.name)
        return cpu if given is None and self.name != "gpu" else given  # type: ignore[return-value]


SCALES = {
    "cpu": Scale(name="cpu"),
    "long": Scale(name="long", num_seeds=8),
    "quick": Scale(name="quick", num_seeds=1),
    "gpu": Scale(name="gpu", num_seeds=3, workers=1),
}


def paired(base: Run, arms: Mapping[str, Mapping[str, Any]], seeds: Iterable[int]) -> list[Run]:
    """Return a run for every seed and arm; runs of one seed differ only in what an arm changes.

    Args:
        base: what all arms have in common.
        arms: name -> fields of ``Run`` that it changes, or ``data``: fields of ``config["data"]``.
        seeds: for instance ``Scale.seeds()``.
    """

    def run(seed: int, name: str, data: Mapping[str, Any] | None = None, **changes: Any) -> Run:
        config = changes.pop("config", base.config)
        config = {**config, "data": {**config["data"], **(data or {})}}
        return dataclasses.replace(base, name=name, seed=seed, config=config, **changes)

    return [run(seed, name, **changes) for seed in seeds for name, changes in arms.items()]


@dataclass(frozen=True)
class Result:
    """A finished run."""

    run: Run
    folder: Path
    """Folder of log.jsonl, evaluation.jsonl, result.json, and model/ if it was kept."""
    summary: dict[str, Any]
    """Content of result.json: steps, steps_per_epoch, tokens, seconds, parameters, index (metrics
    of the packing), valid (name -> loss, perplexity, ...), contexts (length -> these), probe."""

    def log(self) -> list[dict[str, Any]]:
        """Return one line per step: step, epoch, epoch_end, capacity, tokens, loss, seconds."""
        return list(read_jsonl(self.folder / "log.jsonl"))

    def evaluations(self) -> list[dict[str, Any]]:
        """Return one line per evaluation: step, tokens (trained until then), loss, perplexity."""
        path = self.folder / "evaluation.jsonl"
        return list(read_jsonl(path)) if path.exists() else []

    def curve(self) -> Curve:
        """Return the training perplexity over epochs."""
        return read_curve(self.folder)

    def perplexity(self, corpus: str) -> float:
        """Return the final perplexity of the held-out documents of ``run.validate[corpus]``."""
        return float(self.summary["valid"][corpus]["perplexity"])


def by_name(results: Sequence[Result]) -> dict[str, list[Result]]:
    """Return arm -> its results, one per seed in ascending order."""
    groups: dict[str, list[Result]] = {}
    for result in sorted(results, key=lambda r: r.run.seed):
        groups.setdefault(result.run.name, []).append(result)
    return groups


def perplexities(group: Sequence[Result], corpus: str = "documents") -> list[float]:
    """Return the perplexity of held-out documents, one per seed."""
    return [result.perplexity(corpus) for result in group]


def scores(results: Sequence[Result], corpus: str = "documents") -> dict[str, list[float]]:
    """Return arm -> its ``perplexities``."""
    return {name: perplexities(group, corpus) for name, group in by_name(results).items()}


def probed(group: Sequence[Result], name: str) -> list[float]:
    """Return a figure of ``Run.probe``, one per seed."""
    return [float(result.summary["probe"][name]) for result in group]


def mean_evaluations(group: Sequence[Result]) -> list[dict[str, float]]:
    """Return every evaluation during training, averaged over the seeds."""
    evaluations = zip(*(result.evaluations() for result in group), strict=True)
    names = ("step", "tokens", "perplexity")
    return [{name: fmean(line[name] for line in at) for name in names} for at in evaluations]


def lines(
    path: Path,
    curves: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    *,
    x: str,
    y: str,
    log_x: bool = False,
) -> None:
    """Plot one line per name to ``path``; x and y label the axes."""
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


def plot_over_steps(path: Path, results: Sequence[Result], *, y: str, first: int = 0) -> None:
    """Plot the validation perplexities of every arm, from evaluation ``first`` on."""
    curves = {}
    for name, group in by_name(results).items():
        points = mean_evaluations(group)[first:]
        curves[name] = [at["step"] for at in points], [at["perplexity"] for at in points]
    lines(path, curves, x="step", y=y)


def worker_pool(workers: int, *, cuda: bool = False) -> Executor:
    """Return processes for ``run_all``; they start with the first run and import torch once."""
    spawn = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(workers, spawn, initializer=_begin_worker, initargs=(cuda,))


def run_all(runs: Sequence[Run], pool: Executor) -> list[Result]:
    """Return the results of ``runs``, in their order; train those that are not in the cache.

    Runs that others start from are trained first. Equal runs are trained once.

    Raises:
        RuntimeError: if a run failed; the message names it. Finished runs stay in the cache.
    """
    tasks = {}
    for run in _with_starts(runs):
        task = _task(run)
        keep = task.keep_model or (task.folder in tasks and tasks[task.folder].keep_model)
        tasks[task.folder] = dataclasses.replace(task, keep_model=keep)
    todo = [task for task in tasks.values() if not _is_done(task)]
    if len(todo) < len(tasks):
        print(f"{len(tasks) - len(todo)} of {len(tasks)} runs are in the cache", flush=True)
    if todo:
        _train(todo, pool)
    return [_load(run) for run in runs]


def _with_starts(runs: Sequence[Run]) -> Iterator[Run]:
    for run in runs:
        if run.start is not None:
            yield from _with_starts([dataclasses.replace(run.start, keep_model=True)])
        yield run


def _task(run: Run) -> Task:
    return Task(
        run=run,
        folder=_folder(run),
        prepared={corpus: prepare(corpus) for corpus in _corpora(run)},
        start=_folder(run.start) / "model" if run.start is not None else None,
        keep_model=run.keep_model,
    )


def _corpora(run: Run) -> list[Corpus]:
    return [run.corpus, *filter(None, [run.other]), *run.validate.values()]


def _folder(run: Run) -> Path:
    content = dataclasses.asdict(dataclasses.replace(run, start=None, keep_model=False))
    parts = [
        content,
        [prepare(corpus).key for corpus in _corpora(run)],
        _folder(run.start).name if run.start is not None else None,
        *(_code_version(f.partition(":")[0] if f else None) for f in (run.probe, run.change)),
    ]
    text = json.dumps(parts, sort_keys=True)
    return WORK / "runs" / f"{run.recipe}-{hashlib.sha256(text.encode()).hexdigest()[:20]}"


@functools.cache
def _code_version(module: str | None) -> str:
    """Return a hash of the software, and of ``module`` (a probe or a change)."""
    paths = [ROOT / part for part in CODE]
    if module is not None:
        paths.append((ROOT / "benchmarks" / module.replace(".", "/")).with_suffix(".py"))
    result = hashlib.sha256()
    for path in paths:
        files = [path] if path.is_file() else sorted(path.rglob("*"))
        for file in files:
            if file.suffix in (".py", ".cpp", ".hpp"):
                result.update(str(file.relative_to(ROOT)).encode() + file.read_bytes())
    for package in ("torch", "transformers", "deepspeed"):
        result.update(f"{package} {importlib.metadata.version(package)}".encode())
    return result.hexdigest()


def _is_done(task: Task) -> bool:
    return (task.folder / "result.json").exists() and (
        not task.keep_model or (task.folder / "model").exists()
    )


def _load(run: Run) -> Result:
    folder = _folder(run)
    return Result(run, folder, json.loads((folder / "result.json").read_text(encoding="utf-8")))


def _train(tasks: Sequence[Task], pool: Executor) -> None:
    """Train runs: first those from which others start, then the others."""
    starts = {task.start.parent for task in tasks if task.start is not None}
    first = [task for task in tasks if task.folder in starts]
    rest = [task for task in tasks if task.folder not in starts]
    begin, done = time.perf_counter(), 0
    for stage in (first, rest):
        futures = {pool.submit(_work, task): task for task in stage}
        try:
            for future in as_completed(futures):
                run, summary = futures[future].run, future.result()
                done += 1
                begun = f"[{done}/{len(tasks)}, {time.perf_counter() - begin:.0f} s]"
                print(f"{begun} {_progress(run, summary)}", flush=True)
        except Exception as error:
            wait([other for other in futures if not other.cancel()])
            run = futures[future].run
            raise RuntimeError(
                f"{run.recipe}: {run.name}, seed {run.seed} failed: {error}"
            ) from error


def _progress(run: Run, summary: Mapping[str, Any]) -> str:
    scored = [f"{name} {of['perplexity']:.2f}" for name, of in summary["valid"].items()]
    return (
        f"{run.recipe}: {run.name}, seed {run.seed}: {summary['steps']} steps in "
        f"{summary['seconds']:.1f} s; " + (f"perplexity {', '.join(scored)}" if scored else "")
    ).rstrip("; ")


def _begin_worker(cuda: bool) -> None:
    os.environ.update(OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1")
    if not cuda:
        os.environ.update(DS_ACCELERATOR="cpu", CUDA_VISIBLE_DEVICES="")
    from papers import worker  # noqa: PLC0415  # its imports read the environment

    worker.begin()


def _work(task: Task) -> dict[str, Any]:
    from papers import worker  # noqa: PLC0415

    return worker.train(task)
