"""What recipes share where the papers do nothing special: plain causal models and engines."""

from __future__ import annotations

from typing import Any

from papers.runs import Scale

__all__ = ["WHOLE", "engine"]

# Fields of ``data``: attention, labels and positions know samples, not documents.
WHOLE = {"attention": "sample", "labels": "sample", "positions": "sample"}


def engine(scale: Scale) -> dict[str, Any]:
    """Fields of ``engine``: float32 on a CPU, bfloat16 on a GPU."""
    small = {"precision": "fp32", "zero_stage": 0}
    return scale.pick(cpu=small, quick=small, gpu={"precision": "bf16", "zero_stage": 1})
