"""How others deal a step: for every micro batch and rank, the documents that it holds.

Static groups (Karmarkar-Karp and random dealing) have the degree that the longest document of the
corpus needs, as a run with one context parallel size does.
"""

from __future__ import annotations

import heapq
import itertools
import os
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

__all__ = ["Held", "karmarkar_karp", "megatron", "random_dealing"]

Held = list[list[list[int]]]  # micro batch, rank -> documents


def largest_differencing(costs: list[int], num_parts: int) -> list[list[int]]:
    """Karmarkar and Karp (1982): the two partitions that differ most become one, largest with
    smallest part, until one is left."""
    tie = itertools.count()
    heap = []
    for i in sorted(range(len(costs)), key=lambda i: -costs[i]):
        parts = [(0, [])] * (num_parts - 1) + [(costs[i], [i])]
        heapq.heappush(heap, (-costs[i], next(tie), parts))
    while len(heap) > 1:
        (_, _, a), (_, _, b) = heapq.heappop(heap), heapq.heappop(heap)
        joined = [(x + y, p + q) for (x, p), (y, q) in zip(a, reversed(b), strict=True)]
        joined.sort(key=lambda part: part[0])
        heapq.heappush(heap, (joined[0][0] - joined[-1][0], next(tie), joined))
    return [members for _, members in heap[0][2]]


def karmarkar_karp(
    lengths: list[int], num_ranks: int, max_tokens: int, degree: int, linear_length: int
) -> Held:
    """As verl's seqlen_balancing: ranks by cost, then micro batches of each rank by cost, as many
    as the fullest rank's tokens need. Nothing keeps a single micro batch within the budget."""
    costs = [n * (linear_length + n) for n in lengths]
    groups = largest_differencing(costs, num_ranks // degree)
    fullest = max(sum(lengths[i] for i in group) for group in groups)
    count = -(-fullest // (max_tokens * degree))
    held: Held = [[[] for _ in range(num_ranks)] for _ in range(count)]
    for g, group in enumerate(groups):
        parts = largest_differencing([costs[i] for i in group], count)
        for micro_batch, part in zip(held, parts, strict=True):
            for rank in range(g * degree, (g + 1) * degree):
                micro_batch[rank] = [group[i] for i in part]
    return held


def random_dealing(lengths: list[int], num_ranks: int, max_tokens: int, degree: int) -> Held:
    """Documents in random order, each to the next row with room; rows to groups in turn."""
    order = np.random.default_rng(0).permutation(len(lengths)).tolist()
    rows: list[list[int]] = [[]]
    tokens = 0
    for i in order:
        if tokens + lengths[i] > max_tokens * degree:
            rows.append([])
            tokens = 0
        rows[-1].append(i)
        tokens += lengths[i]
    num_groups = num_ranks // degree
    rows += [[]] * (-len(rows) % num_groups)
    return [
        [row for row in rows[begin : begin + num_groups] for _ in range(degree)]
        for begin in range(0, len(rows), num_groups)
    ]


def megatron() -> Callable[[list[int], int, int], Held] | None:
    """The planner of dynamic context parallelism of the checkout MEGATRON_LM=PATH; None without.

    A checkout of branch dev has it (``next_hdp_group_packing_aware``; called as its
    DefaultDynamicCPScheduler does, until no document is left). triton has to be installed.
    """
    checkout = os.environ.get("MEGATRON_LM")
    if not checkout:
        return None
    sys.path.insert(0, checkout)
    from megatron.core.datasets.data_schedule_utils import (  # noqa: PLC0415
        next_hdp_group_packing_aware,
    )

    def plan(lengths: list[int], num_ranks: int, max_tokens: int) -> Held:
        left: Any = list(enumerate(lengths))
        held: Held = []
        while left:
            _, left, _, documents = next_hdp_group_packing_aware(
                left, num_ranks, max_seq_len_per_rank=max_tokens
            )
            held.append(documents)
        return held

    return plan
