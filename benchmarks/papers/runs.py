"""Training runs of the recipes: what defines one, and how many of them are done, two at a time.

A run is done once: its log and its result lie in the cache under a key of everything that decides
them (the run, the tokens, this software), so an interrupted ``make bench-papers`` goes on where it
stopped, and a changed line of code trains again. Workers import torch once and then do run after
run (``papers.worker``).
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
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, as_completed, wait
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, TypeVar

from papers.corpus import WORK, Corpus, Prepared, prepare

from megapack.training.engine.directory import read_jsonl
from megapack.training.evaluation.comparison import Curve, read_curve

ROOT = Path(__file__).resolve().parents[2]
# Everything that decides a number of a run.
CODE = (
    *("megapack/data", "megapack/packing", "megapack/training", "megapack/attention"),
    *("megapack/storage", "megapack/tokenization", "csrc/core", "csrc/bindings"),
    *("benchmarks/papers/corpus.py", "benchmarks/papers/runs.py", "benchmarks/papers/worker.py"),
)
Choice = TypeVar("Choice")


@dataclass(frozen=True, kw_only=True)
class Run:
    """Everything that defines one training run.

    ``config`` holds fields of ``megapack.training.config.PretrainConfig`` as nested dictionaries
    (without run_dir, seed, and the paths of data, which come from the other fields).
    """

    recipe: str
    name: str
    """The variant, the same for all seeds."""
    seed: int
    """Decides the weights, the packing and the order of samples."""
    corpus: Corpus
    strategy: str
    buckets: tuple[int, ...]
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """Of the strategy."""
    groups: Literal["folder", "shuffled"] | None = None
    """Documents of a folder are packed as one, or as many that a shuffle of the ids by the seed
    puts in their places."""
    other: Corpus | None = None
    """A second source of the same weight, which has what ``max_epochs`` leaves of the run; packed
    alike, and repeated never."""
    max_epochs: float | None = None
    """Of ``corpus``, beside ``other``."""
    fim: Mapping[str, Any] | None = None
    """The section of the manifest; samples then need room for the sentinels."""
    config: Mapping[str, Any]
    start: Run | None = None
    """Continue from the weights of this run; ``config`` then names no model."""
    keep_model: bool = False
    """Keep the weights (``Result.model``); a run that others start from is always kept."""
    validate: Mapping[str, Corpus] = field(default_factory=dict)
    """Name -> whose held-out documents are scored at the end."""
    valid_bucket: int = 1024
    """Capacity in which they are packed, the same for all runs that are compared."""
    evaluate_every: int | None = None
    """Steps between evaluations of the first corpus of ``validate``."""
    contexts: tuple[int, ...] = ()
    """Context lengths for ``perplexity_by_context``."""
    contexts_of: str | None = None
    """Whose documents are scored then, a name of ``validate``; None: the first."""
    change: str | None = None
    """``module:function`` that is given every micro batch and returns what is trained on instead:
    for what this software has no switch, because it would be wrong."""
    probe: str | None = None
    """``module:function`` that measures more: called at the end with (model, world, engine
    configuration, run), it gives a dictionary of JSON values."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """A run with its files: what a worker gets."""

    run: Run
    folder: Path
    prepared: Prepared
    other: Prepared | None
    validate: Mapping[str, Prepared]
    start: Path | None
    keep_model: bool


@dataclass(frozen=True, kw_only=True)
class Scale:
    """How large the recipes are."""

    name: str
    seeds: tuple[int, ...]
    workers: int

    def pick(
        self, *, cpu: Choice, quick: Choice, gpu: Choice, long: Choice | None = None
    ) -> Choice:
        """The value for this scale; ``long`` is as ``cpu`` unless it is given."""
        longer = cpu if long is None else long
        return {"cpu": cpu, "quick": quick, "gpu": gpu, "long": longer}[self.name]


SCALES = {
    "cpu": Scale(name="cpu", seeds=(0, 1, 2), workers=2),
    "long": Scale(name="long", seeds=tuple(range(8)), workers=2),
    "quick": Scale(name="quick", seeds=(0,), workers=2),
    "gpu": Scale(name="gpu", seeds=(0, 1, 2), workers=1),
}


@dataclass(frozen=True)
class Result:
    """A finished run.

    Attributes:
        run: what was run.
        folder: log.jsonl, evaluation.jsonl, result.json, and model/ where it was kept.
        summary: result.json: steps, steps_per_epoch, tokens, useful_tokens, seconds, parameters,
            index (metrics of the packing), train_loss (of the last tenth of the steps), valid
            (name -> loss, perplexity, ...), contexts (context -> the same), probe.
    """

    run: Run
    folder: Path
    summary: dict[str, Any]

    def log(self) -> list[dict[str, Any]]:
        """One line per step: step, epoch, epoch_end, capacity, tokens, useful_tokens,
        label_tokens, loss, lr, seconds."""
        return list(read_jsonl(self.folder / "log.jsonl"))

    def evaluations(self) -> list[dict[str, Any]]:
        """step, tokens, useful_tokens, seconds (of training until then), loss, perplexity."""
        path = self.folder / "evaluation.jsonl"
        return list(read_jsonl(path)) if path.exists() else []

    def curve(self) -> Curve:
        """Training perplexity over epochs."""
        return read_curve(self.folder)

    def perplexity(self, corpus: str) -> float:
        """Of the held-out documents of ``run.validate[corpus]``, at the end."""
        return float(self.summary["valid"][corpus]["perplexity"])


def by_name(results: Sequence[Result]) -> dict[str, list[Result]]:
    """Variant -> its results, one per seed in ascending order: what claims compare."""
    groups: dict[str, list[Result]] = {}
    for result in sorted(results, key=lambda r: r.run.seed):
        groups.setdefault(result.run.name, []).append(result)
    return groups


def perplexities(group: Sequence[Result], corpus: str = "documents") -> list[float]:
    """Of held-out documents, one per seed."""
    return [result.perplexity(corpus) for result in group]


def mean_evaluations(group: Sequence[Result]) -> list[dict[str, float]]:
    """Every evaluation on the way, its figures averaged over the seeds."""
    evaluations = zip(*(result.evaluations() for result in group), strict=True)
    names = ("step", "tokens", "perplexity")
    return [{name: fmean(line[name] for line in at) for name in names} for at in evaluations]


def perplexity_curves(
    results: Sequence[Result], *, first: int = 0
) -> dict[str, tuple[list[float], list[float]]]:
    """Of every arm steps and validation perplexities, from evaluation ``first`` on."""
    points = {name: mean_evaluations(group)[first:] for name, group in by_name(results).items()}
    return {
        name: ([at["step"] for at in own], [at["perplexity"] for at in own])
        for name, own in points.items()
    }


def worker_pool(workers: int, *, cuda: bool = False) -> Executor:
    """Processes for ``run_all``; they start with the first run, and import torch once."""
    return ProcessPoolExecutor(
        workers,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_begin_worker,
        initargs=(cuda,),
    )


def run_all(runs: Sequence[Run], pool: Executor) -> list[Result]:
    """The results of ``runs``, in their order; those in the cache are not trained again.

    Runs that others start from are trained first. Equal runs are trained once.

    Raises:
        RuntimeError: a run failed; the message names it, and what was done before is kept.
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
        prepared=prepare(run.corpus),
        other=None if run.other is None else prepare(run.other),
        validate={name: prepare(corpus) for name, corpus in run.validate.items()},
        start=_folder(run.start) / "model" if run.start is not None else None,
        keep_model=run.keep_model,
    )


def _folder(run: Run) -> Path:
    content = dataclasses.asdict(dataclasses.replace(run, start=None, keep_model=False))
    corpora = [run.corpus, *([] if run.other is None else [run.other]), *run.validate.values()]
    parts = [
        content,
        [prepare(corpus).key for corpus in corpora],
        _folder(run.start).name if run.start is not None else None,
        *(_code_version(f.partition(":")[0] if f else None) for f in (run.probe, run.change)),
    ]
    text = json.dumps(parts, sort_keys=True)
    return WORK / "runs" / f"{run.recipe}-{hashlib.sha256(text.encode()).hexdigest()[:20]}"


@functools.cache
def _code_version(module: str | None) -> str:
    """A hash of the software, and of the module that probes."""
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
    """Those that others start from, then the others."""
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
    from papers import worker  # noqa: PLC0415  # what it imports reads the environment

    worker.begin()


def _work(task: Task) -> dict[str, Any]:
    from papers import worker  # noqa: PLC0415

    return worker.train(task)
