"""A training run of a recipe: everything that defines it (``Run``), and its files (``Task``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from papers.corpus import Corpus, Prepared


@dataclass(frozen=True, kw_only=True)
class Run:
    """Everything that defines one training run.

    ``config`` holds fields of ``megapack.training.config.PretrainConfig`` as nested dictionaries
    (without run_dir, seed, and the paths of data, which come from the other fields).
    """

    recipe: str
    name: str = ""
    """Name of the arm, the same for all seeds (``paired``)."""
    seed: int = 0
    """Decides the weights, the packing and the order of samples."""
    corpus: Corpus
    strategy: str
    buckets: tuple[int, ...]
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """Parameters of the strategy."""
    groups: Literal["folder", "shuffled"] | None = None
    """``folder``: pack the documents of a folder as one group. ``shuffled``: groups of the same
    sizes; the seed shuffles which documents they contain."""
    other: Corpus | None = None
    """Second source of the same weight, which also provides the tokens above ``max_epochs``; packed
    like the first, never repeated."""
    max_epochs: float | None = None
    """Largest number of epochs of ``corpus`` in a blend with ``other``."""
    fim: Mapping[str, Any] | None = None
    """Section ``fim`` of the manifest; samples are then packed with room for the sentinels."""
    config: Mapping[str, Any]
    start: Run | None = None
    """Continue from the weights of this run; ``config`` then names no model."""
    keep_model: bool = False
    """Keep the weights (``Result.model``); a run that others start from is always kept."""
    validate: Mapping[str, Corpus] = field(default_factory=dict)
    """Name -> corpus whose held-out documents are scored at the end."""
    valid_bucket: int = 1024
    """Capacity in which these documents are packed, the same for all runs that are compared."""
    evaluate_every: int | None = None
    """Steps between evaluations of the first corpus of ``validate``."""
    contexts: tuple[int, ...] = ()
    """Context lengths for ``perplexity_by_context`` of ``validate["long"]``."""
    change: str | None = None
    """``module:function`` that gets every micro batch and returns the one to train on: for changes
    that megapack does not offer because they are wrong."""
    probe: str | None = None
    """``module:function`` for more measurements: called at the end with (model, world, engine
    configuration, run), it returns a dictionary of JSON values."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """A run with its files, as a worker gets it."""

    run: Run
    folder: Path
    prepared: Mapping[Corpus, Prepared]
    start: Path | None
    keep_model: bool
