"""Equal work: the samples of a draw dealt to ranks and micro batches.

Within one bucket all samples cost the linear layers the same; their attention differs, with the sum
of squared segment lengths. All ranks wait for the one that got most, so samples are dealt longest
first to the least loaded rank. It costs nothing at run time and changes no gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from megapack import _core

__all__ = ["Deal", "Imbalance", "deal"]

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


@dataclass(frozen=True)
class Deal:
    """Who gets which samples of one draw.

    Attributes:
        order: positions in the draw, rank after rank, in a rank micro batch after micro batch.
        rank_begin: (ranks + 1,) where each rank's positions begin in ``order``.
        samples_per_micro_batch: positions per micro batch.
        loads: (ranks,) attention work per rank.
        loads_undealt: the same for the order of the schedule.
        tokens: (ranks,) tokens per rank, padding included.
    """

    order: Ids
    rank_begin: Ids
    samples_per_micro_batch: int
    loads: Ids
    loads_undealt: Ids
    tokens: Ids

    def micro_batches(self, rank: int) -> list[Ids]:
        """Positions in the draw, one array per micro batch of this rank."""
        mine = self.order[self.rank_begin[rank] : self.rank_begin[rank + 1]]
        return list(mine.reshape(-1, self.samples_per_micro_batch))

    def imbalance(self, hidden_size: int | None = None) -> Imbalance:
        attention, undealt = _max_over_mean(self.loads), _max_over_mean(self.loads_undealt)
        if hidden_size is None:
            return Imbalance(attention, undealt)
        linear = 12 * hidden_size * self.tokens
        return Imbalance(
            attention,
            undealt,
            _max_over_mean(self.loads + linear),
            _max_over_mean(self.loads_undealt + linear),
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
    batches = num_micro_batches // num_ranks + (ranks < num_micro_batches % num_ranks)
    begin = np.concatenate([[0], np.cumsum(batches * size)])
    in_order = np.arange(len(costs), dtype=np.int64)
    order = in_order
    if how == "balanced":
        order = _core.deal_evenly(costs, batches * size)
        for rank in ranks:
            mine = slice(begin[rank], begin[rank + 1])
            order[mine] = order[mine][_micro_batches(costs[order[mine]], size)]
    return Deal(
        order=order,
        rank_begin=begin,
        samples_per_micro_batch=size,
        loads=_loads(costs[order], begin),
        loads_undealt=_loads(costs, begin),
        tokens=batches * size * capacity,
    )


def _micro_batches(costs: Ids, size: int) -> Ids:
    """Positions of one rank's samples, micro batch after micro batch, the costliest first."""
    num_batches = len(costs) // size
    if num_batches <= 1 or size == 1:  # dealt in order of falling cost already
        return np.arange(len(costs), dtype=np.int64)
    rows = _core.deal_evenly(costs, np.full(num_batches, size, np.int64)).reshape(-1, size)
    falling = np.argsort(-costs[rows].sum(axis=1), kind="stable")
    return rows[falling].reshape(-1)


def _loads(costs: Ids, begin: Ids) -> Ids:
    return np.diff(np.concatenate([[0], np.cumsum(costs)])[begin])


def _max_over_mean(loads: Ids) -> float:
    mean = loads.mean()
    return float(loads.max() / mean) if mean else 1.0
