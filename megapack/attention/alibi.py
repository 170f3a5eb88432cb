"""ALiBi slopes: a bias per head, linear in the distance, in place of position embeddings."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["alibi_slopes"]


def alibi_slopes(num_heads: int) -> Tensor:
    """One slope per head, ``[num_heads]`` float32 on the CPU.

    For a power of two n the slopes are ``2 ** (-8 i / n)``, i = 1..n. Otherwise those of the power
    of two below, then every other slope of the power of two above, as Press et al. ("Train Short,
    Test Long", 2021) released them.
    """
    if num_heads < 1:
        raise ValueError(f"num_heads is {num_heads}; it must be at least 1")
    below = 1 << (num_heads.bit_length() - 1)
    slopes = [2.0 ** (-8.0 * i / below) for i in range(1, below + 1)]
    slopes += [2.0 ** (-4.0 * i / below) for i in range(1, 2 * (num_heads - below), 2)]
    return torch.tensor(slopes, dtype=torch.float32, device="cpu")
