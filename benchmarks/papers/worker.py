"""Training runs in this process, one after the other, as a world of one.

The inputs, loader, schedule, model, loss, engine and evaluation are those of
``megapack-pretrain``. Checkpoints, heartbeat and the monitor are left out, because they do not
influence the results.
"""

from __future__ import annotations

import atexit
import gc
import json
import logging
import os
import shutil
import time
from contextlib import ExitStack
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from papers.corpus import Corpus, complete, prepare, remember
from papers.run import Task

from megapack.config import from_dict, to_dict
from megapack.packing import SampleIndex, pack
from megapack.packing.groups import read_groups
from megapack.storage import IndexedDataset
from megapack.training.command import set_rank_environment
from megapack.training.config import PretrainConfig
from megapack.training.engine.engine import start_engine, train_step
from megapack.training.engine.export import export_model
from megapack.training.engine.inputs import Inputs, open_validation
from megapack.training.engine.world import World, connect_ranks
from megapack.training.model.architecture import model_configuration
from megapack.training.model.opening import open_model
from megapack.training.trainer import TimedBatches
from megapack.training.validation import perplexity_by_context, validate

_stack = ExitStack()
_here: World | None = None


def begin() -> None:
    """Join a world of one, once per process."""
    global _here  # noqa: PLW0603
    if _here is not None:
        return
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)  # two runs share two cores
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT"):
        os.environ.pop(name, None)
    set_rank_environment()
    _here = _stack.enter_context(connect_ranks(timeout_minutes=5))
    atexit.register(_stack.close)


def train(task: Task) -> dict[str, Any]:
    """Execute a run; its folder appears when the run is complete.

    Returns:
        The content of ``Result.summary``.
    """
    assert _here is not None, "begin() comes first"
    for corpus, prepared in task.prepared.items():
        remember(corpus, prepared)
    with complete(task.folder) as partial:
        summary = _Training(task, partial, _here).run()
        gc.collect()  # the engine and its parameters refer to each other
        (partial / "result.json").write_text(json.dumps(summary, indent=1), encoding="utf-8")
        shutil.rmtree(task.folder, ignore_errors=True)  # an earlier one without its model
    return summary


class _Training:
    """Inputs, model and engine of one run."""

    def __init__(self, task: Task, folder: Path, here: World) -> None:
        self.task, self.run_, self.folder, self.here = task, task.run, folder, here
        self.metrics = self._pack(task.run.corpus, folder / "train.samples").metrics()
        if task.run.other is not None:
            self._pack(task.run.other, folder / "other.samples")
        self.config = configuration(task, folder)
        (folder / "config.json").write_text(json.dumps(to_dict(self.config), default=str))
        self.inputs = Inputs(self.config)
        architecture = model_configuration(self.config.model, self.inputs.vocab_size)
        own = {"device": here.device, "seed": self.config.seed}
        model, _ = open_model(self.config.model, self.config.engine, architecture, **own)
        self.parameters = model.num_parameters
        self.engine = start_engine(model, self.config, here)
        self.seconds = 0.0

    def _pack(self, corpus: Corpus, path: Path) -> SampleIndex:
        dataset = IndexedDataset(prepare(corpus).train)
        groups = None
        if self.run_.groups is not None:
            groups = read_groups("auto", dataset.prefix, dataset.num_documents)
        if self.run_.groups == "shuffled":
            groups = np.random.default_rng(self.run_.seed).permutation(groups)
        how = {"buckets": list(self.run_.buckets), "seed": self.run_.seed, **self.run_.parameters}
        index = pack(dataset.document_lengths, self.run_.strategy, groups=groups, **how)
        index.save(path, source={"fingerprint": dataset.fingerprint}, overwrite=True)
        return index

    def run(self) -> dict[str, Any]:
        """Train, evaluate and probe; return the summary."""
        self._train()
        summary: dict[str, Any] = {
            "steps": self.inputs.num_steps,
            "steps_per_epoch": self.inputs.steps_per_epoch,
            "tokens": self.inputs.num_steps * self.config.data.tokens_per_step,
            "seconds": self.seconds,
            "parameters": self.parameters,
            "index": {k: v for k, v in self.metrics.items() if isinstance(v, (int, float))},
            "valid": {name: self._validate(name) for name in self.run_.validate},
        }
        if contexts := self.run_.contexts:
            long = IndexedDataset(prepare(self.run_.validate["long"]).valid)
            by = perplexity_by_context(self.engine, long, contexts, **self._evaluation())
            summary["contexts"] = {str(context): of.report() for context, of in by.items()}
        if self.run_.probe is not None:
            model, probe = self.engine.module.eval(), _named(self.run_.probe)
            with torch.no_grad():
                summary["probe"] = probe(model, self.here, self.config.engine, self.run_)
        if self.task.keep_model:
            export_model(self.engine, self.folder / "model", self.here)
        self.engine.destroy()
        return summary

    def _train(self) -> None:
        config, inputs, every = self.config, self.inputs, self.run_.evaluate_every
        loader: Any = inputs.loader(config, self.here, 0, inputs.num_steps)
        if self.run_.change is not None:
            loader = map(_named(self.run_.change), loader)
        rates = partial(
            config.learning_rate.at, num_steps=inputs.num_steps, peak=config.optimizer.lr
        )
        how = {"world": self.here, "config": config.engine}
        begin = time.perf_counter()
        for step, of_step in TimedBatches(loader).steps():
            micro_batches = list(of_step)
            result = train_step(self.engine, micro_batches, lr=rates(step), **how)
            # Count the labels, because ``change`` may have removed some.
            labels = sum(int((batch["labels"] >= 0).sum()) for batch in micro_batches)
            # item() waits for the device, so that the seconds cover the whole step.
            loss = result.loss_sum.item() / max(1, labels)
            seconds = time.perf_counter() - begin
            self.seconds += seconds
            self._note("log.jsonl", {
                "step": step, "epoch": step / inputs.steps_per_epoch,
                "epoch_end": (step + 1) / inputs.steps_per_epoch,
                "capacity": inputs.schedule.step(step).capacity,
                "tokens": config.data.tokens_per_step, "loss": loss, "seconds": seconds,
            })  # fmt: skip
            done = step + 1
            if every is not None and (done % every == 0 or done == inputs.num_steps):
                about = {"step": done, "tokens": done * config.data.tokens_per_step}
                scored = self._validate(next(iter(self.run_.validate)))
                self._note("evaluation.jsonl", {**about, **scored})
            begin = time.perf_counter()

    def _note(self, name: str, line: dict[str, Any]) -> None:
        with (self.folder / name).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def _validate(self, name: str) -> dict[str, Any]:
        """Score every held-out token once, with its own document as context."""
        positions = "document" if self.config.data.positions == "document" else "segment"
        how = {"buckets": [self.run_.valid_bucket], "positions": positions}
        data = open_validation(str(prepare(self.run_.validate[name]).valid), None, **how)
        return validate(self.engine, data, **self._evaluation()).report()

    def _evaluation(self) -> dict[str, Any]:
        tokens = self.config.data.micro_batch_tokens
        return {"world": self.here, "config": self.config.engine, "micro_batch_tokens": tokens}


def _named(path: str) -> Any:
    """Import the function of ``module:function``."""
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)


def configuration(task: Task, folder: Path) -> PretrainConfig:
    """Return the configuration of a run, as ``megapack-pretrain`` would read it."""
    given = {**task.run.config, "run_dir": str(folder), "seed": task.run.seed}
    given["data"] = {**given["data"], **_sources(task, folder)}
    if task.start is not None:
        given["model"] = {**given.get("model", {}), "pretrained": str(task.start)}
    return from_dict(PretrainConfig, given, where=f"{task.run.recipe}: {task.run.name}")


def _sources(task: Task, folder: Path) -> dict[str, str]:
    """Return fields of ``data``: documents and samples, or a blend for two sources or FIM."""
    run = task.run
    one = {"prefix": str(prepare(run.corpus).train), "index": str(folder / "train.samples")}
    if run.other is None and run.fim is None:
        return one
    manifest: dict[str, Any] = {"sources": [{"name": "corpus", **one, "weight": 1}]}
    if run.fim is not None:
        manifest["fim"] = run.fim
    if run.other is not None:
        other = {"prefix": str(prepare(run.other).train), "index": str(folder / "other.samples")}
        manifest["run_tokens"] = run.config["num_steps"] * run.config["data"]["tokens_per_step"]
        manifest["sources"][0]["max_epochs"] = run.max_epochs
        manifest["sources"].append({"name": "other", **other, "weight": 1, "max_epochs": 1})
    (folder / "blend.json").write_text(json.dumps(manifest), encoding="utf-8")
    return {"blend": str(folder / "blend.json")}
