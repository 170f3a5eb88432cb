"""Replacements of kernels of Apex and Transformer Engine that have no CPU version."""

from __future__ import annotations

import copy
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor


class AttentionNotRun(torch.nn.Module):
    """Attention over context-parallel ranks that returns its queries; tests check its inputs."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    def forward(self, query: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return query.flatten(-2)


def thd_get_partitioned_indices(
    cu_seqlens: Tensor, total_tokens: int, cp_size: int, cp_rank: int
) -> Tensor:
    """Return chunks ``cp_rank`` and ``2 cp_size - 1 - cp_rank`` of ``2 cp_size`` of every segment.

    Follows Transformer Engine's documentation: int32 positions; other segment lengths are cut down.
    """
    held: list[int] = []
    for begin, end in pairwise(cu_seqlens.tolist()):
        size = (end - begin) // (2 * cp_size)
        for chunk in (cp_rank, 2 * cp_size - 1 - cp_rank):
            held += range(begin + chunk * size, begin + (chunk + 1) * size)
    assert len(held) == total_tokens // cp_size, "segments do not divide into equal chunks"
    return torch.tensor(held, dtype=torch.int32)


def take_sequence_parallel(norm_class: Any) -> None:
    """Let torch's norm mark weights whose gradients are summed, as only fused norms may."""
    stock = norm_class.__new__

    def new(cls: Any, config: Any, *args: Any, **kwargs: Any) -> Any:
        plain = copy.copy(config)
        plain.sequence_parallel = False
        norm = stock(cls, plain, *args, **kwargs)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm

    norm_class.__new__ = new
