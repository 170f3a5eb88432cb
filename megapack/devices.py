"""Peak speed of accelerators, and arithmetic of training, for all estimates.

- ``PEAK_FLOPS``, ``peak_flops``: speed of a device
- ``FLOPS_PER_WEIGHT``, ``attention_flops``: operations per token and per segment; a matrix product
  of m x k and k x n counts 2 m k n operations, and a backward pass twice as many

    peak_flops("NVIDIA H100 80GB HBM3")   # -> 989e12
    peak_flops("NVIDIA H100 PCIe")        # -> 756e12
    attention_flops(16, 2048) * 1000**2   # -> 1.97e11: a document of 1,000 tokens in a 1B model
    FLOPS_PER_WEIGHT * 1.24e9 * 1000      # -> 7.44e12: its tokens through all weights
"""

from __future__ import annotations

import re

__all__ = ["FLOPS_PER_WEIGHT", "PEAK_FLOPS", "attention_flops", "peak_flops"]

# Dense 16-bit tensor operations per second, from data sheets.
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
    """Return the peak of a device by its driver's name ("NVIDIA H100 80GB HBM3") or its key in
    ``PEAK_FLOPS``; None if it is unknown."""
    words = name.lower().replace("-", " ")
    # No digit or letter may follow: an A1000 is not an A100, an A10G no A10.
    known = [key for key in PEAK_FLOPS if re.search(rf"{key.replace('-', ' ')}(?![0-9a-z])", words)]
    return PEAK_FLOPS[max(known, key=len)] if known else None  # "h100-pcie" before "h100"


def attention_flops(num_layers: int, width: int, *, recomputed: bool = False) -> float:
    """Return the operations of causal attention in training, per squared token of a segment.

    Two products forward and four backward of ``2 width`` operations each, for half of the pairs.

    Args:
        num_layers: layers with attention.
        width: width of all query heads together.
        recomputed: also count the product that FlashAttention recomputes in the backward pass,
            to estimate time; model FLOPs (PaLM's MFU) leave it out.
    """
    return (7.0 if recomputed else 6.0) * num_layers * width
