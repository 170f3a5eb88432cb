"""Accelerators by name, and how much arithmetic training is: one home for every estimate.

``PEAK_FLOPS`` and ``peak_flops`` what a device can do; ``FLOPS_PER_WEIGHT`` and ``attention_flops``
what a token and a segment cost. A matrix multiplication of m x k and k x n counts 2 m k n
operations, and the backward twice the forward.

    peak_flops("NVIDIA H100 80GB HBM3")   # -> 989e12
    peak_flops("NVIDIA H100 PCIe")        # -> 756e12
    attention_flops(16, 2048) * 1000**2   # -> 1.97e11: a document of 1,000 tokens in a 1B model
    FLOPS_PER_WEIGHT * 1.24e9 * 1000      # -> 7.44e12: its tokens through all weights
"""

from __future__ import annotations

import re

__all__ = ["FLOPS_PER_WEIGHT", "PEAK_FLOPS", "attention_flops", "peak_flops"]

# Dense 16-bit tensor operations per second, from the makers' data sheets.
PEAK_FLOPS: dict[str, float] = {
    "v100": 125e12,
    "a10": 125e12,
    "a100": 312e12,
    "a800": 312e12,
    "l20": 119.5e12,
    "l40s": 362e12,
    "rtx-3090": 71e12,
    "rtx-4090": 165e12,
    "h20": 148e12,
    "h100": 989e12,
    "h100-nvl": 835e12,
    "h100-pcie": 756e12,
    "h800": 989e12,
    "h200": 989e12,
    "mi300x": 1307e12,
    "b200": 2250e12,
}

FLOPS_PER_WEIGHT = 6.0
"""Operations of training per token and weight: 2 forward, 4 backward."""


def peak_flops(name: str) -> float | None:
    """The peak of the device whose driver calls it so, as in "NVIDIA H100 80GB HBM3", or of a key
    of ``PEAK_FLOPS``; None: it is not known."""
    words = name.lower().replace("-", " ")
    # Another digit behind it makes another device: an A1000 is no A100.
    known = [key for key in PEAK_FLOPS if re.search(rf"{key.replace('-', ' ')}(?!\d)", words)]
    return PEAK_FLOPS[max(known, key=len)] if known else None  # "h100-pcie" before "h100"


def attention_flops(num_layers: int, width: int, *, recomputed: bool = False) -> float:
    """Operations of causal attention in training, per squared token of a segment.

    Two products forward and four backward of ``2 width`` operations each, half of the pairs.

    Args:
        num_layers: with attention.
        width: of all query heads together.
        recomputed: count the product that FlashAttention computes again in the backward, as time
            does and model FLOPs (PaLM's MFU) do not.
    """
    return (7.0 if recomputed else 6.0) * num_layers * width
