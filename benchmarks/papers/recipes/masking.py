"""Masks between documents: attention, the label at a boundary, and where positions restart.

The blog (sections 4 and 7.2) says that both masks matter; a public training log found that the mask
of attention does not. Here samples are concatenated to the length where most documents meet, and
one thing is changed at a time. Every model is scored alike: held-out documents that fit whole into
the context, each by itself, from position 0; a boundary has no label.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from statistics import fmean
from typing import Any

from papers.claims import Claim, below, difference, same, shown
from papers.figures import lines
from papers.runs import Result, Run, Scale, by_name
from papers.settings import Setting

__all__ = ["ARMS", "DEFAULT", "EQUAL", "TITLE", "claims", "plots", "rows", "runs"]

TITLE = "Masks between documents"
EQUAL = (
    "model, initial weights, samples (concatenated, 8,192 of the paper's tokens), their order, "
    "optimizer and steps; scored on whole documents, each by itself"
)
DEFAULT, CLASSIC = "all masked (the default)", "nothing masked"
LABELS, ACROSS = "boundary labels trained", "attention across documents"
RESTARTED, UNBROKEN = "attention across, positions restarted", "masked, positions not restarted"
LEARNED, LEARNED_UNBROKEN = "learned positions, restarted", "learned positions, not restarted"

# name: (attention, labels, positions, learned position embeddings instead of RoPE)
ARMS = {
    DEFAULT: ("document", "document", "segment", False),
    LABELS: ("document", "sample", "segment", False),
    UNBROKEN: ("document", "document", "sample", False),
    ACROSS: ("sample", "document", "sample", False),
    RESTARTED: ("sample", "document", "segment", False),
    CLASSIC: ("sample", "sample", "sample", False),
    LEARNED: ("document", "document", "segment", True),
    LEARNED_UNBROKEN: ("document", "document", "sample", True),
}


def runs(scale: Scale) -> list[Run]:
    """Eight ways to treat a boundary times seeds."""
    setting = Setting(scale)
    capacity = setting.ladder[-2]
    # More than 2 bytes of text are a token: nearly all of these fit into one sample.
    valid = dataclasses.replace(setting.corpus, max_bytes=2 * capacity)
    steps = scale.pick(cpu=340, quick=4, gpu=30)
    small = {"n_head": 2, "initializer_range": 0.125}
    learned = {
        "preset": scale.pick(cpu="gpt2_tiny", quick="gpt2_tiny", gpu="gpt2_124m"),
        "overrides": {"n_positions": capacity, **scale.pick(cpu=small, quick=small, gpu={})},
    }
    return [
        Run(
            recipe="masking",
            name=name,
            seed=seed,
            corpus=setting.corpus,
            strategy="concat",
            buckets=(capacity,),
            config=setting.config(
                steps=steps,
                data={"attention": attention, "labels": labels, "positions": positions},
                **(learned if is_learned else {}),
            ),
            validate={"documents": valid},
            valid_bucket=capacity,
            evaluate_every=scale.pick(cpu=100, quick=4, gpu=8),
        )
        for name, (attention, labels, positions, is_learned) in ARMS.items()
        for seed in ((0, 1, 2, 3) if scale.name == "cpu" else scale.seeds)
    ]


def _perplexities(group: list[Result]) -> list[float]:
    return [result.perplexity("documents") for result in group]


def rows(results: list[Result]) -> list[dict[str, Any]]:
    """One line per arm: perplexity, and its difference from the default's over paired seeds."""
    arms = {name: _perplexities(group) for name, group in by_name(results).items()}
    found = []
    for name, values in arms.items():
        attention, labels, positions, is_learned = ARMS[name]
        base = arms[LEARNED if is_learned else DEFAULT]
        gap = difference(values, base)
        found.append(
            {
                "arm": name,
                "attention": attention,
                "labels": labels,
                "positions": positions,
                "position_embedding": "learned" if is_learned else "RoPE",
                "perplexity": shown(values),
                "against_first_%": 100 * gap.mean / fmean(base),
                "plus_minus_%": 100 * gap.half_width / fmean(base) if gap.num_seeds > 1 else None,
            }
        )
    return found


def claims(results: list[Result]) -> list[Claim]:
    """The blog's two warnings, the public log, and what positions do."""
    arms = {name: _perplexities(group) for name, group in by_name(results).items()}
    paired = "the same samples in the same order; one option differs"
    return [
        below(
            arms[UNBROKEN],
            arms[ACROSS],
            source="Blog 4.1",
            claim="attention across documents makes a worse model",
            paper="learns spurious correlations, no figure",
            why=paired,
        ),
        same(
            arms[UNBROKEN],
            arms[ACROSS],
            within=0.005,
            source="nanochat log, 2026-01-13",
            claim="masking attention changes less than 0.5 %",
            paper="0.85407 against 0.85427 bits per byte: no gain",
            why=f"{paired}; there, every row begins with a document, and the model has a thousand "
            "times as many parameters",
        ),
        below(
            arms[DEFAULT],
            arms[LABELS],
            source="Blog 7.2",
            claim="a trained label at the boundary makes a worse model",
            paper="degrades generation quality, no figure",
            why=f"{paired}; perplexity inside documents, in which the boundary itself has no part",
        ),
        below(
            arms[DEFAULT],
            arms[CLASSIC],
            source="Blog 4 and 7",
            claim="all masks together make a better model than none",
            paper="no figure",
            why="the same samples in the same order",
        ),
        below(
            arms[ACROSS],
            arms[RESTARTED],
            source="transformers issue 31629",
            claim="restarting positions without masking attention does not help",
            paper="documents still attend to each other",
            why=f"{paired}; tokens of different documents then share positions",
        ),
        same(
            arms[UNBROKEN],
            arms[DEFAULT],
            within=0.002,
            source="this project",
            claim="with RoPE and masked attention positions need not restart (within 0.2 %)",
            paper="",
            why="RoPE sees differences of positions only; what differs is rounding",
        ),
        below(
            arms[LEARNED],
            arms[LEARNED_UNBROKEN],
            source="this project",
            claim="learned positions: restarting them is better than counting the sample",
            paper="",
            why=f"{paired}; scored from position 0, which the other model sees once per sample",
        ),
    ]


def plots(results: list[Result], folder: Path) -> None:
    """Validation perplexity over the steps, of the models with RoPE."""
    curves = {}
    for name, group in by_name(results).items():
        if ARMS[name][3]:
            continue
        evaluations = list(zip(*(result.evaluations() for result in group), strict=True))
        curves[name] = (
            [float(at[0]["step"]) for at in evaluations],
            [fmean(line["perplexity"] for line in at) for at in evaluations],
        )
    lines(
        folder / "masking_curves.png",
        {name: (xs[1:], ys[1:]) for name, (xs, ys) in curves.items()},
        x="step",
        y="validation perplexity",
        marker="o",
    )
