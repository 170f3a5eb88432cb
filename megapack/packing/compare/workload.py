"""Attention work of an index, and how unequal it falls on the ranks of a step.

With attention inside documents the work of a sample is the sum of its squared segment lengths,
its padding being a segment too. All ranks of a step take samples of one bucket and equally many
tokens, so attention is the only thing that can differ between them. How much it differs is
estimated here by drawing steps; training itself deals with ``megapack.data``.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from megapack.packing.index import SampleIndex

__all__ = ["BucketWork", "deal_longest_first", "deal_randomly", "measure_work"]

_SEED = 20_240


@dataclass(frozen=True, kw_only=True)
class BucketWork:
    """Work of one bucket, in tokens and squared tokens.

    Attributes:
        capacity: tokens per sample.
        num_samples: samples in the bucket.
        segment_squares: sum of squared segment lengths, padding left out.
        work: the same with the padding of each sample as one more segment.
        samples_per_rank: samples of one rank in one step.
        imbalance_random, imbalance_balanced: expected attention work of the busiest rank over the
            mean of all ranks, samples dealt at random and longest first.
    """

    capacity: int
    num_samples: int
    segment_squares: int
    work: int
    samples_per_rank: int
    imbalance_random: float
    imbalance_balanced: float

    @property
    def num_positions(self) -> int:
        """Token positions that are computed, padding included."""
        return self.num_samples * self.capacity

    @property
    def sample_squares(self) -> int:
        """Attention work when every sample attends to all of itself."""
        return self.num_samples * self.capacity**2

    def imbalance(self, dealing: Literal["balanced", "random"]) -> float:
        """Busiest rank over mean rank under one way of dealing."""
        return self.imbalance_balanced if dealing == "balanced" else self.imbalance_random


def measure_work(
    index: SampleIndex, *, num_ranks: int = 64, tokens_per_rank: int = 49_152, num_steps: int = 32
) -> list[BucketWork]:
    """Work of every non-empty bucket.

    Args:
        index: any packing; no sample of it is empty.
        num_ranks: data-parallel ranks that share a step.
        tokens_per_rank: tokens of one rank in one step; a bucket of capacity L gives each rank
            ``max(1, tokens_per_rank // L)`` samples (BucketLLM, Table 3: 49,152 tokens).
        num_steps: steps drawn for the estimate, samples with replacement, seeded.
    """
    if num_ranks < 1 or tokens_per_rank < 1 or num_steps < 1:
        raise ValueError(
            f"num_ranks is {num_ranks}, tokens_per_rank {tokens_per_rank}, num_steps {num_steps}; "
            "all must be at least 1"
        )
    squares = index.attention_cost()
    starts = index.sample_segment_offsets[:-1]
    placed = (
        np.add.reduceat(index.segment_length, starts, dtype=np.int64) if len(starts) else starts
    )
    result = []
    for bucket, capacity in enumerate(index.bucket_capacity.tolist()):
        begin, end = map(int, index.bucket_sample_offsets[bucket : bucket + 2])
        if begin == end:
            continue
        work = squares[begin:end] + (capacity - placed[begin:end]) ** 2
        per_rank = max(1, tokens_per_rank // capacity)
        generator = np.random.default_rng((_SEED, capacity, num_ranks))
        picks = generator.integers(0, end - begin, (num_steps, num_ranks * per_rank))
        drawn = work[picks]
        result.append(
            BucketWork(
                capacity=capacity,
                num_samples=end - begin,
                segment_squares=int(squares[begin:end].sum()),
                work=int(work.sum()),
                samples_per_rank=per_rank,
                imbalance_random=_imbalance([deal_randomly(row, num_ranks) for row in drawn]),
                imbalance_balanced=_imbalance(
                    [deal_longest_first(row, num_ranks) for row in drawn]
                ),
            )
        )
    return result


def deal_randomly(work: NDArray[np.int64], num_ranks: int) -> NDArray[np.int64]:
    """Loads ``(num_ranks,)`` when samples, already in random order, are dealt in that order."""
    loads: NDArray[np.int64] = work.reshape(num_ranks, -1).sum(axis=1)
    return loads


def deal_longest_first(work: NDArray[np.int64], num_ranks: int) -> NDArray[np.int64]:
    """Loads ``(num_ranks,)`` when the heaviest sample goes to the least loaded rank with a place.

    Every rank gets ``len(work) / num_ranks`` samples (Graham's longest processing time first, with
    equal counts).
    """
    places = [len(work) // num_ranks] * num_ranks
    loads = np.zeros(num_ranks, np.int64)
    heap = [(0, rank) for rank in range(num_ranks)]
    for item in np.sort(work)[::-1].tolist():
        load, rank = heap[0]
        load += item
        places[rank] -= 1
        if places[rank]:
            heapq.heapreplace(heap, (load, rank))
        else:
            heapq.heappop(heap)
            loads[rank] = load
    return loads


def _imbalance(steps: list[NDArray[np.int64]]) -> float:
    """Expected busiest rank over expected mean rank (steps last as long as their busiest rank)."""
    busiest = float(np.mean([loads.max() for loads in steps]))
    return busiest / float(np.mean([loads.mean() for loads in steps]))
