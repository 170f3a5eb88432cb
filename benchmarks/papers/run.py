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
    """The arm, the same for all seeds (``paired``)."""
    seed: int = 0
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
    """A second source of the same weight, which gets the tokens above ``max_epochs``; packed alike,
    never repeated."""
    max_epochs: float | None = None
    """Limit of the epochs of ``corpus`` in a blend with ``other``."""
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
    """Context lengths for ``perplexity_by_context`` of ``validate["long"]``."""
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
    prepared: Mapping[Corpus, Prepared]
    start: Path | None
    keep_model: bool
