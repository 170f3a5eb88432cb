"""What a model asks of attention, in one value that every backend can accept or refuse."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

# ---- ALiBi slopes: a bias per head, linear in the distance, in place of position embeddings -----


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


class Segments(NamedTuple):
    """Where the segments of a stream of T tokens lie."""

    cu_seqlens: Tensor
    """``[S + 1]`` int32: 0, the end of every segment, T; repeated entries are empty segments."""
    max_seqlen: int
    """Tokens of the longest segment, known on the host."""


class Forward(NamedTuple):
    """Inputs and results of a forward, as its backward needs them."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    """``[H, T]``, float32 (float64 for float64 inputs): log of the sum of exponentiated scores."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ScoreRule:
    """How scores become weights, the same for every segment of a call.

    ``softmax(mask(alibi(cap(scale * q k^T))))``: the cap first, then the ALiBi bias, then the mask.
    """

    scale: float
    """Factor on ``q k^T``, usually ``head_dim ** -0.5``."""
    causal: bool = True
    """Position i attends to j <= i of its own segment."""
    window: int = 0
    """With w > 0, position i attends only to j with ``i - j < w`` (transformers' convention)."""
    softcap: float = 0.0
    """With c > 0, scores become ``c * tanh(scores / c)`` (Gemma-2)."""
    alibi_slopes: Tensor | None = None
    """``[H]`` float32: the score of (i, j) gets ``-slope * (i - j)``."""

    def __post_init__(self) -> None:
        if self.window < 0 or self.softcap < 0:
            raise ValueError(
                f"window is {self.window} and softcap {self.softcap}; they must be 0 (off) or more"
            )
        if self.window and not self.causal:
            raise ValueError("a sliding window without causal attention is not supported")


@dataclass(frozen=True, kw_only=True)
class AttentionNeeds:
    """Everything of a run that decides which backends can serve it."""

    device: torch.device
    dtype: torch.dtype
    head_dim: int
    num_heads: int
    num_key_value_heads: int
    window: bool = False
    softcap: bool = False
    alibi: bool = False

    def __post_init__(self) -> None:
        if self.num_key_value_heads < 1 or self.num_heads % self.num_key_value_heads:
            raise ValueError(
                f"{self.num_heads} query heads cannot share {self.num_key_value_heads} key/value "
                "heads evenly"
            )

    def describe(self) -> str:
        """One line for a log: ``bfloat16 on cuda, 32 heads of 64 over 8, window``."""
        extras = [n for n in ("window", "softcap", "alibi") if getattr(self, n)]
        shape = f"{self.num_heads} heads of {self.head_dim} over {self.num_key_value_heads}"
        name = str(self.dtype).removeprefix("torch.")
        return ", ".join([f"{name} on {self.device.type}", shape, *extras])
