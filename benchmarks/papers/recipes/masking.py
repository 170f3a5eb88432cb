"""Masks between documents: attention, the label at a boundary, and restarting positions.

The blog (sections 4 and 7.2) says that both masks matter; a public training log found that the
attention mask does not. Here documents are concatenated to samples of one length, and one option
changes at a time. All models are scored in the same way: whole held-out documents that fit the
context, one by one, from position 0; boundaries have no label.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

from papers.claims import Claim, against, below, same, stated
from papers.run import Run
from papers.runs import Result, Scale, paired, plot_over_steps, scores
from papers.settings import Setting

TITLE = "Masks between documents"
EQUAL = (
    "model, initial weights, samples (concatenated, 8,192 of the paper's tokens), their order, "
    "optimizer and steps; scored on whole documents, each by itself"
)
DEFAULT, CLASSIC = "all masked (the default)", "nothing masked"
LABELS, ACROSS = "boundary labels trained", "attention across documents"
RESTARTED, UNBROKEN = "attention across, positions restarted", "masked, positions not restarted"
LEARNED, LEARNED_UNBROKEN = "learned positions, restarted", "learned positions, not restarted"

# name: (attention, label_boundary, positions)
ARMS = {
    DEFAULT: ("document", "document", "segment"),
    LABELS: ("document", "sample", "segment"),
    UNBROKEN: ("document", "document", "sample"),
    ACROSS: ("sample", "document", "sample"),
    RESTARTED: ("sample", "document", "segment"),
    CLASSIC: ("sample", "sample", "sample"),
    LEARNED: ("document", "document", "segment"),
    LEARNED_UNBROKEN: ("document", "document", "sample"),
}  # fmt: skip
WITHOUT_ROPE = (LEARNED, LEARNED_UNBROKEN)  # with learned position embeddings


def runs(scale: Scale) -> list[Run]:
    """Return the runs of eight ways to treat a boundary and all seeds."""
    setting = Setting(scale)
    capacity = setting.ladder[-2]
    # A token has more than 2 bytes of text, so nearly all of these documents fit into one sample.
    valid = dataclasses.replace(setting.corpus, max_bytes=2 * capacity)
    rotary = setting.config(steps=scale.pick(cpu=340, quick=4, gpu=30))
    small = {"n_head": 2, "initializer_range": 0.125}
    overrides = {"n_positions": capacity, **scale.pick(cpu=small, gpu={})}
    model = {"preset": scale.pick(cpu="gpt2_tiny", gpu="gpt2_124m"), "overrides": overrides}
    learned = {**rotary, "model": model}
    base = Run(
        recipe="masking", corpus=setting.corpus, strategy="concat", buckets=(capacity,),
        config=rotary, validate={"documents": valid}, valid_bucket=capacity,
        evaluate_every=scale.pick(cpu=100, quick=4, gpu=8),
    )  # fmt: skip
    fields, arms = ("attention", "label_boundary", "positions"), {}
    for name, values in ARMS.items():
        config = learned if name in WITHOUT_ROPE else rotary
        arms[name] = {"data": dict(zip(fields, values, strict=True)), "config": config}
    return paired(base, arms, scale.seeds(4))


def rows(results: list[Result]) -> list[dict[str, Any]]:
    """Return one row per arm: perplexity, and its difference from the default by paired seeds."""
    arms = scores(results)
    fields = ("attention", "labels", "positions")
    return [
        {
            "arm": name,
            **dict(zip(fields, ARMS[name], strict=True)),
            "position_embedding": "learned" if name in WITHOUT_ROPE else "RoPE",
            **against(values, arms[LEARNED if name in WITHOUT_ROPE else DEFAULT]),
        }
        for name, values in arms.items()
    ]


def claims(results: list[Result]) -> list[Claim]:
    """Return the claims of the blog's two warnings, of the public log, and about positions."""
    arms = scores(results)
    paired = "the same samples in the same order; one option differs"
    state = partial(stated, arms)
    return [
        state(below, UNBROKEN, ACROSS, "attention across documents makes a worse model",
              source="Blog 4.1", paper="learns spurious correlations, no figure", why=paired),
        state(same, UNBROKEN, ACROSS, "masking attention changes less than 0.5 %", within=0.005,
              source="nanochat log, 2026-01-13",
              paper="0.85407 against 0.85427 bits per byte: no gain",
              why=f"{paired}; there, every row begins with a document, and the model has a "
              "thousand times as many parameters"),
        state(below, DEFAULT, LABELS, "a trained label at the boundary makes a worse model",
              source="Blog 7.2", paper="degrades generation quality, no figure",
              why=f"{paired}; perplexity inside documents, in which the boundary itself has no "
              "part"),
        state(below, DEFAULT, CLASSIC, "all masks together make a better model than none",
              source="Blog 4 and 7", paper="no figure",
              why="the same samples in the same order"),
        state(below, ACROSS, RESTARTED,
              "restarting positions without masking attention does not help",
              source="transformers issue 31629", paper="documents still attend to each other",
              why=f"{paired}; tokens of different documents then share positions"),
        state(same, UNBROKEN, DEFAULT,
              "with RoPE and masked attention positions need not restart (within 0.2 %)",
              within=0.002,
              why="RoPE sees differences of positions only; what differs is rounding"),
        state(below, LEARNED, LEARNED_UNBROKEN,
              "learned positions: restarting them is better than counting the sample",
              why=f"{paired}; scored from position 0, which the other model sees once per sample"),
    ]  # fmt: skip


def plots(results: list[Result], folder: Path) -> None:
    """Plot the validation perplexity of the models with RoPE over the steps."""
    rotary = [result for result in results if result.run.name not in WITHOUT_ROPE]
    plot_over_steps(folder / "masking_curves.png", rotary, y="validation perplexity", first=1)
