"""Variable-length attention as a problem, and the interface of the backends that solve it.

- ``ScoreRule``: how scores become weights (scale, mask, window, soft cap, ALiBi).
- ``TreeSegments``: the queries and keys of every node; a document is a tree of one node.
- ``AttentionNeeds``: requirements of a model, which each backend accepts or refuses.
- ``Backend``: a forward pass, its backward pass, and the reasons for which it refuses a model.

    alibi_slopes(4)  # -> 0.25, 0.0625, 0.015625, 0.00390625
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor


def alibi_slopes(num_heads: int) -> Tensor:
    """Return one ALiBi slope per head, ``[num_heads]`` float32 on the CPU.

    For a power of two n the slopes are ``2 ** (-8 i / n)``, i = 1..n. For other n they are the
    slopes of the next lower power of two, then every other slope of the next higher one, as Press
    et al. ("Train Short, Test Long", 2021) released them.
    """
    if num_heads < 1:
        raise ValueError(f"num_heads is {num_heads}; it must be at least 1")
    below = 1 << (num_heads.bit_length() - 1)
    slopes = [2.0 ** (-8.0 * i / below) for i in range(1, below + 1)]
    slopes += [2.0 ** (-4.0 * i / below) for i in range(1, 2 * (num_heads - below), 2)]
    return torch.tensor(slopes, dtype=torch.float32, device="cpu")


class TreeSegments(NamedTuple):
    """Queries and keys of the N nodes of packed prefix trees, in a row of T tokens.

    The tokens of a node are queries. Their keys are the path of the node, from its root to its last
    token. A stream of documents is a forest in which every document is a root.

        row           p p p a a b                  sequences p p p a a and p p p b
        cu_seqlens_q  0 3 5 6                      nodes p, a, b
        cu_seqlens_k  0 3 8 12                     their paths
        kv_index      0 1 2 | 0 1 2 3 4 | 0 1 2 5
    """

    cu_seqlens_q: Tensor
    """``[N + 1]`` int32: 0, the end of every node, T; a repeated entry is an empty node."""
    cu_seqlens_k: Tensor
    """``[N + 1]`` int32: 0, the end of every path in ``kv_index``, K."""
    kv_index: Tensor | None
    """``[K]`` int32: rows of the keys, path after path; None: every node is a root."""
    max_seqlen_q: int
    """Length of the longest node in tokens, known on the CPU."""
    max_seqlen_k: int
    """Length of the longest path in tokens, known on the CPU."""

    @staticmethod
    def of_documents(cu_seqlens: Tensor, max_seqlen: int) -> TreeSegments:
        """Return the segments of a stream of documents, ``cu_seqlens`` ``[documents + 1]``."""
        return TreeSegments(cu_seqlens, cu_seqlens, None, max_seqlen, max_seqlen)

    @staticmethod
    def of(batch: Mapping[str, Any]) -> TreeSegments:
        """Return the segments of a batch that has the fields as entries (``tree_batch``)."""
        return TreeSegments(*(batch[name] for name in TreeSegments._fields))

    def spans(self, num_tokens: int) -> tuple[Tensor, Tensor]:
        """Return the depth of every token in its path, and the row at which the last path through
        it ends: two int64 ``[T]``. Does not wait for the device.

        Nodes are in preorder. So row i sees row j if ``j <= i < end[j]``, at the distance
        ``depth[i] - depth[j]``.
        """
        ends, positions = self.cu_seqlens_q.long(), torch.arange(num_tokens, device=self.device)
        node = torch.searchsorted(ends[1:], positions, right=True)
        above = (self.cu_seqlens_k.long() - ends).diff()  # tokens of a path before its node
        depth = positions - (ends[:-1] - above)[node]
        if self.kv_index is None:
            return depth, ends[node + 1]
        keys = torch.arange(len(self.kv_index), device=self.device)
        node = torch.searchsorted(self.cu_seqlens_k[1:].long(), keys, right=True)
        end = torch.zeros_like(positions)
        return depth, end.scatter_reduce(0, self.kv_index.long(), ends[node + 1], "amax")

    @property
    def device(self) -> torch.device:
        """Device of the tensors."""
        return self.cu_seqlens_q.device


class Forward(NamedTuple):
    """Inputs and results of a forward pass that the backward pass reads."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    """``[H, T]`` float32 (float64 for float64 inputs): log-sum-exp of the scores."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ScoreRule:
    """Function from q and k to attention weights, ``softmax(mask(alibi(cap(scale * q k^T))))``."""

    scale: float
    """Factor on ``q k^T``, usually ``head_dim ** -0.5``."""
    causal: bool = True
    """Position i attends to j <= i of the same segment."""
    window: int = 0
    """With w > 0, position i attends only to j with ``i - j < w`` (transformers' convention)."""
    softcap: float = 0.0
    """With c > 0, scores become ``c * tanh(scores / c)`` (Gemma-2)."""
    alibi_slopes: Tensor | None = None
    """``[H]`` float32: the score of (i, j) increases by ``-slope * (i - j)``."""

    def __post_init__(self) -> None:
        if self.window < 0 or self.softcap < 0:
            raise ValueError(
                f"window is {self.window} and softcap {self.softcap}; they must be 0 (off) or more"
            )
        if self.window and not self.causal:
            raise ValueError("a sliding window without causal attention is not supported")

    def hides(self, distance: Tensor) -> Tensor | None:
        """Return the pairs that the mask hides; ``distance`` is ``i - j`` within one path."""
        if not self.causal:
            return None
        hidden = distance < 0
        return hidden | (distance >= self.window) if self.window else hidden


@dataclass(frozen=True, kw_only=True)
class AttentionNeeds:
    """All properties of a run that decide which backends can serve it."""

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
        """Return one line for a log: ``bfloat16 on cuda, 32 heads of 64 over 8, window``."""
        extras = [n for n in ("window", "softcap", "alibi") if getattr(self, n)]
        shape = f"{self.num_heads} heads of {self.head_dim} over {self.num_key_value_heads}"
        name = str(self.dtype).removeprefix("torch.")
        return ", ".join([f"{name} on {self.device.type}", shape, *extras])


@dataclass(frozen=True, kw_only=True)
class Backend:
    """One implementation of attention.

    Attributes:
        name: value of ``model.attention_backend``; ``title``: name for messages.
        forward: ``(q, k, v, segments, rule)``, shapes as in ``varlen_attention``; returns the
            output ``[T, H, D]`` and the log-sum-exp ``[H, T]``. k and v have a row per entry of
            ``kv_index``; causal masks are aligned to the end of a path.
        backward: ``(grad_out, forward, segments, rule)`` with a ``Forward``; returns the gradients
            of q, k and v. None: autograd differentiates ``forward``, which returns only the output
            and gets k and v in the order of q.
        refusal: returns why the backend cannot serve the needs (device, dtype, package, ...), or
            None; ``softcap`` and ``alibi`` are checked separately.
        softcap, alibi: whether the backend supports the rule. Every backend supports windows.
    """

    name: str
    title: str
    forward: Callable[..., Any]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]] | None
    refusal: Callable[[AttentionNeeds], str | None] | None = None
    softcap: bool = True
    alibi: bool = True

    def why_not(self, needs: AttentionNeeds) -> str | None:
        """Return why the backend cannot serve ``needs``; None: it can."""
        if needs.softcap and not self.softcap:
            return f"{self.title} has no soft cap"
        if needs.alibi and not self.alibi:
            return f"{self.title} has no ALiBi"
        return None if self.refusal is None else self.refusal(needs)


def accumulator(x: Tensor) -> torch.dtype:
    """Return the dtype of sums and scores: float32, or float64 for float64 inputs."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32
