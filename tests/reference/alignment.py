"""Packing with room for alignment, for every strategy: its definition over rounded lengths."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from reference.common import Packing, Segment


def aligned(
    definition: Callable[..., Packing],
    lengths: list[int],
    buckets: list[int],
    seed: int,
    *,
    alignment: int,
    **parameters: Any,
) -> Packing:
    """The definition's samples of the rounded documents, each piece up to its document's end."""
    rounded = [-(-length // alignment) * alignment for length in lengths]
    packing = definition(rounded, buckets, seed, **parameters)
    samples = {
        capacity: [
            [Segment(d, begin, min(length, lengths[d] - begin)) for d, begin, length in sample]
            for sample in bucket
        ]
        for capacity, bucket in packing.buckets.items()
    }
    placed = Counter(
        (d, begin + i)
        for bucket in samples.values()
        for sample in bucket
        for d, begin, length in sample
        for i in range(length)
    )
    return Packing(samples, sum(lengths) - len(placed), placed.total() - len(placed))
