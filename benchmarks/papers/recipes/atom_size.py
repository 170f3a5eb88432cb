"""Atom size (Chen et al. 2024): GPT-2 with ALiBi, concat and padding, atoms of 0.25 to 4 MSL.

What the paper leaves open or does otherwise, and how it is here:

* One epoch instead of two: an order that repeats would tell atoms apart by more than their size.
* Atoms of one MSL are shuffled by the schedule; those of other sizes by the packing, whose order is
  then kept (``sequential``), so that the pieces of a large atom stay neighbours.
* The paper ends every atom of padding with EOS; here documents end with it, atoms do not.
* The last token of an atom has its true successor in the document as its label. Where labels are
  the inputs shifted by one, as is usual, it has the first token of an atom drawn at random: with
  atoms of 16 tokens one label in 16 cannot be predicted. Concat is trained with such labels, too.
* Its perplexity is that of training, on samples that differ from atom to atom and from strategy to
  strategy. It is given, and beside it the perplexity of the same held-out documents for all.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from papers.atom_size_claims import ATOMS, MSL, STRATEGIES, arm, claims, rows
from papers.corpus import Corpus
from papers.plain import WHOLE, engine
from papers.runs import Result, Run, Scale, by_name

from megapack.training.judge.curves import Curve
from megapack.training.judge.plots import plot_curves

__all__ = ["EQUAL", "TITLE", "claims", "plots", "rows", "runs"]

TITLE = "Atom size (Chen et al.)"
EQUAL = "documents, one epoch, tokens per step, learning rate (constant after its warmup), weights"
OTHER_MSL = (32, 128)


@dataclass(frozen=True)
class Arm:
    """A way to make samples, whatever the seed."""

    strategy: str
    share: float = 1.0
    """Atom size over MSL."""
    capacity: int = MSL
    shifted: bool = False


def arms() -> list[Arm]:
    """Table 2; Table 3 at its other lengths; concat with the labels of shifted inputs."""
    return [
        *(Arm(strategy, share) for strategy in STRATEGIES for share in ATOMS),
        *(Arm(strategy, capacity=n) for n in OTHER_MSL for strategy in STRATEGIES),
        *(Arm("concat", share, shifted=True) for share in ATOMS if share <= 1),
    ]


def corpus(scale: Scale) -> Corpus:
    """Short prose as in A.1: no document below about 50 words, 188 tokens in the mean."""
    return Corpus(
        domain="prose",
        train_bytes=scale.pick(cpu=1_150_000, quick=60_000, gpu=2_000_000),
        valid_bytes=scale.pick(cpu=120_000, quick=10_000, gpu=300_000),
        min_bytes=250,
        max_bytes=700,
    )


def runs(scale: Scale) -> list[Run]:
    """All arms times seeds."""
    documents = corpus(scale)
    return [
        Run(
            recipe="atom_size",
            name=arm(of.strategy, of.share, capacity=of.capacity, shifted=of.shifted),
            seed=seed,
            corpus=documents,
            strategy=of.strategy,
            buckets=(of.capacity,),
            parameters={"atom_size": round(of.share * of.capacity)},
            config=_config(scale, "proportional" if of.share == 1 else "sequential"),
            validate={"prose": documents},
            valid_bucket=of.capacity,
            evaluate_every=scale.pick(cpu=50, quick=4, gpu=50) if of == Arm("pad") else None,
            change="papers.shifted_labels:shifted" if of.shifted else None,
        )
        for seed in scale.seeds
        for of in arms()
    ]


def _config(scale: Scale, order: str) -> dict[str, Any]:
    small = {"preset": "gpt2_tiny_alibi", "overrides": {"n_head": 2, "initializer_range": 0.125}}
    tokens = scale.pick(cpu=1024, quick=512, gpu=4096)
    return {
        "num_steps": scale.pick(cpu=None, quick=4, gpu=None),
        "model": scale.pick(cpu=small, quick=small, gpu={"preset": "gpt2_124m_alibi"}),
        "data": {
            "tokens_per_step": tokens,
            "micro_batch_tokens": tokens,
            "order": order,
            **WHOLE,
        },
        "optimizer": {"lr": scale.pick(cpu=3e-3, quick=3e-3, gpu=6e-4)},
        "schedule": {"kind": "constant", "warmup_steps": 20},
        "engine": engine(scale),
    }


def plots(results: list[Result], folder: Path) -> None:
    """Figures 1 and 2: training perplexity over the epoch, smoothed (A.7), mean of the seeds."""
    groups = by_name(results)
    for strategy, words in STRATEGIES.items():
        curves = {}
        for share in ATOMS:
            of = [result.curve() for result in groups[arm(strategy, share)]]
            mean = np.mean([curve.perplexity for curve in of], axis=0)
            curves[f"{share:g} MSL"] = Curve(of[0].epoch, mean)
        plot_curves(folder / f"atom_size_{words}.png", curves)
