"""Work and losses of several ranks at a step, computed by one process.

The recipe on steps uses it as ``Run.probe`` and ``Run.change``. The micro batches of all ranks are
computed one after the other, so a rank's time contains no communication. On the CPU it is the CPU
time of this thread, which other programs hardly change.
"""

from __future__ import annotations

import time
from statistics import fmean
from typing import Any, Literal, TypeAlias

import torch
from papers.corpus import prepare
from papers.run import Run
from torch import Tensor

from megapack.config import from_dict
from megapack.data import Batch, PackedDataset, PackedLoader, Schedule, build_loader
from megapack.packing import pack
from megapack.storage import IndexedDataset
from megapack.training.config import EngineConfig, ModelConfig
from megapack.training.engine.world import World
from megapack.training.model.opening import compute_dtype, open_model
from megapack.training.model.training_model import TrainingModel, on_device

Attention: TypeAlias = Literal["document", "sample"]
Dealing: TypeAlias = Literal["balanced", "in_order"]

NUM_RANKS = 4
NUM_STEPS = 6  # or all steps of the run, if it has fewer
SAMPLES = 4  # samples of the largest bucket per rank and step

# name: (scope of attention, one bucket for all ranks, dealing)
ARMS: dict[str, tuple[Attention, bool, Dealing]] = {
    "masked, same bucket, equal work": ("document", True, "balanced"),
    "masked, same bucket, in order": ("document", True, "in_order"),
    "masked, any bucket": ("document", False, "in_order"),
    "whole samples, same bucket": ("sample", True, "in_order"),
    "whole samples, any bucket": ("sample", False, "in_order"),
}


def mean_of_ranks(batch: Batch) -> Batch:
    """Return a micro batch whose mean loss counts as much as that of any other micro batch.

    ``train_step`` divides the sum of losses by ``num_step_label_tokens``, so that every token of
    the step counts the same; with this change every micro batch counts the same.
    """
    labels = int((batch["labels"] >= 0).sum())
    return {**batch, "num_step_label_tokens": max(1, labels) * batch["num_micro_steps"]}


def step_times(model: TrainingModel, here: World, engine: EngineConfig, run: Run) -> dict[str, Any]:
    """Time forward and backward of every rank at some steps; compare gradients of both dealings.

    Returns:
        ``times``: arm -> for every step the seconds of every rank; ``work``: arm of one bucket ->
        attention work of the busiest rank over the mean, mean over the steps (exact, from the
        lengths); ``gradient``: norm of the difference of one step's gradients under both dealings
        over the norm of either.
    """
    with torch.enable_grad():
        bench = _Bench(model, here, engine, run)
        times = {name: bench.times(*arm) for name, arm in ARMS.items()}
        balanced, in_order = bench.gradient("balanced"), bench.gradient("in_order")
    difference = float((balanced - in_order).norm() / balanced.norm())
    work = {name: bench.work(*arm) for name, arm in ARMS.items() if arm[1]}
    return {"times": times, "work": work, "gradient": difference}


class _Bench:
    """A fresh model of the same architecture, and the samples of the run."""

    def __init__(self, model: TrainingModel, here: World, engine: EngineConfig, run: Run) -> None:
        self.here, self.engine, self.run = here, engine, run
        self.num_steps = min(NUM_STEPS, int(run.config["num_steps"]))
        # A run of one step (QUICK) only tests this code; its times mean nothing.
        self.size = (SAMPLES if self.num_steps > 1 else 1) * max(run.buckets)
        self.dataset = IndexedDataset(prepare(run.corpus).train)
        how = {"buckets": list(run.buckets), "seed": run.seed, **run.parameters}
        self.index = pack(self.dataset.document_lengths, run.strategy, **how)
        # Not the trained model: DeepSpeed has hooks on its gradients.
        config = from_dict(ModelConfig, dict(run.config["model"]), where="model")
        own = {"device": here.device, "seed": run.seed}
        fresh, _ = open_model(config, engine, model.configuration, **own)
        self.model = fresh.cast(compute_dtype(engine))

    def times(self, attention: Attention, same: bool, dealing: Dealing) -> list[list[float]]:
        """Return the seconds of every step and rank, the smaller of two measurements."""
        loaders = self.loaders(attention, same, dealing)
        found = [
            [min(self.seconds(batch) for _ in range(2)) for batch in step]
            for step in zip(*loaders, strict=True)
        ]
        return found[1:]  # the first step warms up

    def work(self, attention: Attention, same: bool, dealing: Dealing) -> float:
        """Return the work of the busiest rank over the mean, which the loader computes."""
        return fmean(batch["imbalance"] for batch in self.loaders(attention, same, dealing)[0])

    def loaders(self, attention: Attention, same: bool, dealing: Dealing) -> list[PackedLoader]:
        """Return a loader per rank: of common steps if ``same``, otherwise of its own schedule."""
        data, found = PackedDataset(self.dataset, self.index, attention=attention), []
        how: dict[str, Any] = {"micro_batch_tokens": self.size, "num_steps": self.num_steps + 1}
        how |= {"dealing": dealing, "prefetch": 0}
        for rank in range(NUM_RANKS):
            seed = self.run.seed if same else NUM_RANKS * self.run.seed + rank
            place, ranks = (rank, NUM_RANKS) if same else (0, 1)
            schedule = Schedule(data, tokens_per_step=ranks * self.size, seed=seed)
            who = {"data_parallel_rank": place, "data_parallel_size": ranks}
            found.append(build_loader(data, schedule, **who, **how))
        return found

    def seconds(self, batch: Batch) -> float:
        """Return the seconds of one forward and backward."""
        cuda = self.here.device.type == "cuda"

        def clock() -> float:
            if not cuda:
                return time.thread_time()
            torch.cuda.synchronize()
            return time.perf_counter()

        arguments = on_device(batch, self.here.device, self.engine)
        begin = clock()
        loss, *_ = self.model(**arguments, scale=1 / batch["num_step_label_tokens"])
        loss.backward()
        return clock() - begin

    def gradient(self, dealing: Dealing) -> Tensor:
        """Return the gradient of the first step, summed over all ranks."""
        self.model.zero_grad()
        for loader in self.loaders("document", True, dealing):
            self.seconds(next(iter(loader)))
        gradients = [p.grad.flatten() for p in self.model.parameters() if p.grad is not None]
        return torch.cat(gradients).float()
