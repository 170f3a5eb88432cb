"""How long a document may be for the positions of a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["PositionLimit", "position_limit"]

# Position embeddings with a row per position.
_LEARNED = ("gpt2", "gpt_bigcode", "gpt_neo", "opt", "biogpt")


@dataclass(frozen=True, kw_only=True)
class PositionLimit:
    """What a transformers configuration says of the longest document."""

    tokens: int
    source: str
    """The field that says so."""
    remedy: str
    """Instead of shorter documents."""


def position_limit(configuration: Any, wanted: int) -> PositionLimit | None:
    """The limit of an architecture; None: any length, as with ALiBi or without positions.

    Args:
        configuration: of the transformers model.
        wanted: tokens, which the remedy is for.
    """
    limit = getattr(configuration, "max_position_embeddings", None)
    alibi = configuration.model_type == "gpt2_alibi" or getattr(configuration, "alibi", False)
    if not isinstance(limit, int) or alibi:
        return None
    if configuration.model_type in _LEARNED:
        remedy = "take a model with RoPE or ALiBi"
        return PositionLimit(tokens=limit, source="max_position_embeddings", remedy=remedy)
    switch = _longrope_switch(configuration)
    if switch is not None and switch < min(wanted, limit):
        # transformers takes the long factors for a whole micro batch once one document is longer:
        # what a document learns would depend on its neighbours.
        return PositionLimit(
            tokens=switch,
            source="original_max_position_embeddings of its longrope",
            remedy="give model.overrides.rope_parameters a rope_type that is the same for all "
            "documents, as yarn",
        )
    remedy = f"set model.overrides.max_position_embeddings={wanted}"
    if getattr(configuration, "rope_parameters", None):
        remedy += (
            " (RoPE reaches any position; a checkpoint that was trained on shorter documents may "
            "want another rope_theta or rope_type in model.overrides.rope_parameters)"
        )
    return PositionLimit(tokens=limit, source="max_position_embeddings", remedy=remedy)


def _longrope_switch(configuration: Any) -> int | None:
    """Tokens from which on longrope takes its long factors; None: it has no longrope."""
    found = getattr(configuration, "rope_parameters", None) or {}
    by_layer = [value for value in found.values() if isinstance(value, dict)]
    switches = [
        int(rope["original_max_position_embeddings"])
        for rope in by_layer or [found]
        if rope.get("rope_type") == "longrope"
    ]
    return min(switches, default=None)
