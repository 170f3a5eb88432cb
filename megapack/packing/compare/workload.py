"""Attention work of an index, and how unequal it falls on the ranks of a step.

With attention inside documents the work of a sample is the sum of its squared segment lengths,
its padding being a segment too. All ranks of a step take samples of one bucket and equally many
tokens, so attention is the only thing that can differ between them. How much it differs is
estimated here by drawing steps; training itself deals with ``megapack.data``.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

__all__ = ["BucketWork", "deal_longest_first", "deal_randomly", "measure_work", "sample_squares"]

_CHUNK = 1 << 20  # samples at a time, so that temporary arrays stay small
_SEED = 20_240


class Samples(Protocol):
    """The arrays of a SampleIndex that work is computed from."""

    @property
    def bucket_capacity(self) -> NDArray[np.int64]: ...
    @property
    def bucket_sample_offsets(self) -> NDArray[np.int64]: ...
    @property
    def sample_segment_offsets(self) -> NDArray[np.int64]: ...
    @property
    def segment_length(self) -> NDArray[np.int32]: ...


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
    index: Samples, *, num_ranks: int = 64, tokens_per_rank: int = 49_152, num_steps: int = 32
) -> list[BucketWork]:
    """Work of every non-empty bucket.

    Args:
        index: a SampleIndex.
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
    result = []
    for bucket, capacity in enumerate(index.bucket_capacity.tolist()):
        begin, end = map(int, index.bucket_sample_offsets[bucket : bucket + 2])
        if begin == end:
            continue
        segment_squares, work = sample_squares(index, begin, end, capacity)
        per_rank = max(1, tokens_per_rank // capacity)
        generator = np.random.default_rng((_SEED, capacity, num_ranks))
        picks = generator.integers(0, end - begin, (num_steps, num_ranks * per_rank))
        drawn = work[picks]
        result.append(
            BucketWork(
                capacity=capacity,
                num_samples=end - begin,
                segment_squares=segment_squares,
                work=int(work.sum()),
                samples_per_rank=per_rank,
                imbalance_random=_imbalance([deal_randomly(row, num_ranks) for row in drawn]),
                imbalance_balanced=_imbalance(
                    [deal_longest_first(row, num_ranks) for row in drawn]
                ),
            )
        )
    return result


def sample_squares(
    index: Samples, begin: int, end: int, capacity: int
) -> tuple[int, NDArray[np.int64]]:
    """Squared segment lengths of the samples [begin, end) of one bucket.

    Returns:
        Their sum without padding; and int64 ``(end - begin,)`` per sample, padding as a segment.
    """
    total = 0
    work = np.empty(end - begin, np.int64)
    for chunk in range(begin, end, _CHUNK):
        stop = min(chunk + _CHUNK, end)
        offsets = index.sample_segment_offsets[chunk : stop + 1]
        lengths = index.segment_length[offsets[0] : offsets[-1]].astype(np.int64)
        starts = offsets[:-1] - offsets[0]
        squares = np.add.reduceat(lengths * lengths, starts)
        padding = capacity - np.add.reduceat(lengths, starts)
        total += int(squares.sum())
        work[chunk - begin : stop - begin] = squares + padding * padding
    return total, work


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
