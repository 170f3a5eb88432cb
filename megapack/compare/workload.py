"""Attention work of an index, and how unequal it falls on the ranks of a step.

With attention inside documents the work of a sample is the sum of its squared segment lengths,
its padding being a segment too. All ranks of a step take samples of one bucket and equally many
tokens, so attention is the only thing that can differ between them. How much it differs is
estimated here by drawing steps and dealing them as training does (``megapack.data.dealing``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from megapack import _core
from megapack.errors import ConfigError
from megapack.packing import SampleIndex

__all__ = ["NUM_STEPS", "BucketWork", "measure_work"]

NUM_STEPS = 32  # drawn per bucket
_SEED = 20_240
_MOST_DEALT = 64  # samples per rank; with more, longest first leaves less than 0.1 %


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
    index: SampleIndex,
    *,
    num_ranks: int = 64,
    tokens_per_rank: int = 49_152,
    num_steps: int = NUM_STEPS,
) -> list[BucketWork]:
    """Work of every non-empty bucket.

    Args:
        index: any packing; no sample of it is empty.
        num_ranks: data-parallel ranks that share a step.
        tokens_per_rank: tokens of one rank in one step; a bucket of capacity L gives each rank
            ``max(1, tokens_per_rank // L)`` samples (BucketLLM, Table 3: 49,152 tokens).
        num_steps: steps drawn for the estimate, samples with replacement, seeded. Where a rank
            takes more than 64 samples, the dealing longest first is tried with 64.
    """
    if num_ranks < 1 or tokens_per_rank < 1 or num_steps < 1:
        raise ConfigError(
            f"num_ranks is {num_ranks}, tokens_per_rank {tokens_per_rank}, num_steps {num_steps}; "
            "all must be at least 1"
        )
    squares = index.attention_cost()
    result = []
    for bucket, capacity in enumerate(index.bucket_capacity.tolist()):
        begin, end = map(int, index.bucket_sample_offsets[bucket : bucket + 2])
        if begin == end:
            continue
        work = _core.attention_cost_of(
            index.sample_segment_offsets,
            index.segment_length,
            np.arange(begin, end, dtype=np.int64),
            capacity,
            whole=False,
        )
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
                imbalance_random=_imbalance([row.reshape(num_ranks, -1).sum(1) for row in drawn]),
                imbalance_balanced=_imbalance(
                    [_deal(row[: num_ranks * _MOST_DEALT], num_ranks) for row in drawn]
                ),
            )
        )
    return result


def _deal(work: NDArray[np.int64], num_ranks: int) -> NDArray[np.int64]:
    """Loads ``(num_ranks,)`` as training deals a step: longest first to the least loaded rank."""
    places = np.full(num_ranks, len(work) // num_ranks, np.int64)
    loads: NDArray[np.int64] = work[_core.deal_evenly(work, places)].reshape(num_ranks, -1).sum(1)
    return loads


def _imbalance(steps: list[NDArray[np.int64]]) -> float:
    """Expected busiest rank over expected mean rank (steps last as long as their busiest rank)."""
    busiest = float(np.mean([loads.max() for loads in steps]))
    return busiest / float(np.mean([loads.mean() for loads in steps]))
