"""Equal work: the samples of a draw dealt to ranks and micro batches.

Within one bucket all samples cost the linear layers the same; their attention differs, with the sum
of squared segment lengths. All ranks wait for the one that got most, so samples are dealt longest
first to the least loaded rank. It costs nothing at run time and changes no gradient.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from megapack import _core

__all__ = ["Deal", "Imbalance", "deal", "equal_groups"]

Ids = NDArray[np.int64]


@dataclass(frozen=True)
class Imbalance:
    """Largest over mean work of the ranks; 1.0 is perfect.

    Attributes:
        attention: of attention alone, as dealt.
        attention_undealt: had the samples been dealt in the order of the schedule.
        model, model_undealt: of a layer as a whole, in which a token costs the linear layers as
            much as attending to ``12 * hidden_size`` others (forward: 24 h^2 FLOPs per token
            against 4 h per pair, halved by causality); None when hidden_size is not known.
    """

    attention: float
    attention_undealt: float
    model: float | None = None
    model_undealt: float | None = None


@dataclass(frozen=True, kw_only=True)
class Deal:
    """Who gets which samples of one draw.

    Attributes:
        costs: (samples,) attention work.
        order: positions in the draw, rank after rank.
        rank_begin: (ranks + 1,) where each rank's positions begin in ``order``.
        samples_per_micro_batch: positions per micro batch.
        capacity: tokens per sample.
        balanced: a rank's micro batches have like work, the costliest first; else as scheduled.
    """

    costs: Ids
    order: Ids
    rank_begin: Ids
    samples_per_micro_batch: int
    capacity: int
    balanced: bool

    @property
    def loads(self) -> Ids:
        """(ranks,) attention work per rank."""
        return _sums(self.costs[self.order], self.rank_begin)

    @property
    def loads_undealt(self) -> Ids:
        """(ranks,) the same had the samples been dealt in the order of the schedule."""
        return _sums(self.costs, self.rank_begin)

    def micro_batches(self, rank: int) -> list[Ids]:
        """Positions in the draw, one array per micro batch of this rank."""
        mine = self.order[self.rank_begin[rank] : self.rank_begin[rank + 1]]
        if self.balanced:
            return list(mine[equal_groups(self.costs[mine], self.samples_per_micro_batch)])
        return list(mine.reshape(-1, self.samples_per_micro_batch))

    @property
    def loads_of_micro_batches(self) -> Ids:
        """(micro batches, ranks) attention work; 0 where a rank has one micro batch fewer."""
        batches = [self.micro_batches(rank) for rank in range(len(self.rank_begin) - 1)]
        loads = np.zeros((max(map(len, batches)), len(batches)), np.int64)
        for rank, of_rank in enumerate(batches):
            loads[: len(of_rank), rank] = [self.costs[batch].sum() for batch in of_rank]
        return loads

    def imbalance(self, hidden_size: int | None = None) -> Imbalance:
        loads, undealt = self.loads, self.loads_undealt
        attention = Imbalance(_max_over_mean(loads), _max_over_mean(undealt))
        if hidden_size is None:
            return attention
        linear = 12 * hidden_size * self.capacity * np.diff(self.rank_begin)
        return replace(
            attention,
            model=_max_over_mean(loads + linear),
            model_undealt=_max_over_mean(undealt + linear),
        )


def deal(
    costs: Ids,
    *,
    num_ranks: int,
    num_micro_batches: int,
    capacity: int,
    how: Literal["balanced", "in_order"] = "balanced",
) -> Deal:
    """Deal the samples of a draw.

    Args:
        costs: (samples,) int64 attention work; samples divide evenly among micro batches.
        num_ranks: data-parallel ranks. Where they do not divide the micro batches, the first ranks
            have one more.
        num_micro_batches: of all ranks together.
        capacity: tokens per sample.
        how: ``balanced``, or ``in_order`` of the schedule.

    Returns:
        The deal; the same on every rank that computes it.
    """
    size = len(costs) // num_micro_batches
    ranks = np.arange(num_ranks)
    samples = (num_micro_batches // num_ranks + (ranks < num_micro_batches % num_ranks)) * size
    balanced = how == "balanced"
    return Deal(
        costs=costs,
        order=_core.deal_evenly(costs, samples) if balanced else np.arange(len(costs)),
        rank_begin=np.concatenate([[0], np.cumsum(samples)]),
        samples_per_micro_batch=size,
        capacity=capacity,
        balanced=balanced,
    )


def equal_groups(costs: Ids, size: int) -> Ids:
    """Positions in groups of ``size`` that have like work, the heaviest group first.

    Groups beside each other differ least, so whoever takes any number of them in turn has like
    work. Shape (len(costs) // size, size), int64.
    """
    num_groups = len(costs) // size
    if num_groups == 0:
        return np.zeros((0, size), np.int64)
    groups = _core.deal_evenly(costs, np.full(num_groups, size, np.int64)).reshape(-1, size)
    falling: Ids = groups[np.argsort(-costs[groups].sum(axis=1), kind="stable")]
    return falling


def _sums(costs: Ids, begin: Ids) -> Ids:
    return np.diff(np.concatenate([[0], np.cumsum(costs)])[begin])


def _max_over_mean(loads: Ids) -> float:
    mean = loads.mean()
    return float(loads.max() / mean) if mean else 1.0
