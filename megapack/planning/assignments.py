"""The usual ways to assign the documents of a step to ranks: load balancing as trainers do it.

    ASSIGNMENTS           name -> function: plan_step with each balance, and what trainers do
    largest_differencing  numbers in parts of like sums (Karmarkar and Karp)
    cut_documents         documents in pieces of at most so many tokens

An assignment is a ``StepPlan`` of segments that attend to themselves: padding is a segment, and a
row that attends to all of itself is one. Six documents on two ranks of 8 tokens per micro batch:

    lengths = np.array([5, 2, 3, 4, 1, 1])
    assign = ASSIGNMENTS["padded rows"]                  # rows 5 2 | 3 4 1 | 1, padded to 8
    assign(lengths, Cluster(data_parallel=2), 8, 0.0).lengths   # -> [5 2 1 3 4 1 1 7]
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

import numpy as np

from megapack.planning.simulation import Cluster
from megapack.planning.step_plan import Integers, StepPlan, plan_step

__all__ = ["ASSIGNMENTS", "Assign", "cut_documents", "largest_differencing"]

# A row is what one data-parallel group holds in one micro batch: lengths of what attends to itself.
# Documents are shared by all ranks of a group, as with one size of context parallelism for the run.

Rows = list[list[list[int]]]  # micro batch, group


def cut_documents(lengths: Integers, limit: int) -> Integers:
    """Documents in pieces of `limit` tokens, each document's last one of what is left."""
    counts = -(-lengths // limit)
    pieces = np.full(int(counts.sum()), limit, np.int64)
    pieces[counts.cumsum() - 1] = lengths - (counts - 1) * limit
    return pieces


def largest_differencing(costs: Sequence[float], num_parts: int) -> list[list[int]]:
    """Numbers in parts of like sums (Karmarkar and Karp 1982, "The differencing method of set
    partitioning"): the two partitions that differ most become one, the largest part of the one
    with the smallest of the other, until one is left. Gives positions of every part."""
    tie = itertools.count()
    empty: tuple[float, list[int]] = (0, [])
    heap = [
        (-costs[i], next(tie), [empty] * (num_parts - 1) + [(costs[i], [i])])
        for i in sorted(range(len(costs)), key=lambda i: -costs[i])
    ]
    heapq.heapify(heap)
    while len(heap) > 1:
        (_, _, a), (_, _, b) = heapq.heappop(heap), heapq.heappop(heap)
        joined = [(x + y, p + q) for (x, p), (y, q) in zip(a, reversed(b), strict=True)]
        joined.sort(key=lambda part: part[0])
        heapq.heappush(heap, (joined[0][0] - joined[-1][0], next(tie), joined))
    return [members for _, members in heap[0][2]] if heap else [[] for _ in range(num_parts)]


def _filled(lengths: Sequence[int], room: int) -> list[list[int]]:
    """Documents in order, each behind the one before it as long as the row has room."""
    rows: list[list[int]] = []
    left = 0
    for n in lengths:
        if not rows or n > left:
            rows.append([])
            left = room
        rows[-1].append(n)
        left -= n
    return rows


def _padded(lengths: Integers, num_groups: int, room: int) -> Rows:
    """Documents in order into rows, which are padded to their full length."""
    rows = [row + [room - sum(row)] * (sum(row) < room) for row in _filled(lengths.tolist(), room)]
    return _in_turns(rows, num_groups)


def _chunked(lengths: Integers, num_groups: int, room: int) -> Rows:
    """Documents one behind the other, cut wherever a row ends; a row attends to all of itself."""
    return _in_turns([[room]] * -(-int(lengths.sum()) // room), num_groups)


def _in_turns(rows: list[list[int]], num_groups: int) -> Rows:
    filled = rows + [[]] * (-len(rows) % num_groups)
    return [filled[begin : begin + num_groups] for begin in range(0, len(filled), num_groups)]


def _side_by_side(groups: list[list[list[int]]]) -> Rows:
    """The micro batches of every group beside each other, as many as the one that has most."""
    return [list(rows) for rows in itertools.zip_longest(*groups, fillvalue=[])]


def _round_robin(lengths: Integers, num_groups: int, room: int) -> Rows:
    """Sorted by length, one to each rank in turn; each fills its micro batches in this order."""
    falling = np.sort(lengths)[::-1].tolist()
    return _side_by_side([_filled(falling[g::num_groups], room) for g in range(num_groups)])


def _karmarkar_karp(
    lengths: Integers, cluster: Cluster, max_tokens: int, linear_cost_tokens: float
) -> StepPlan:
    """Ranks by cost, then the micro batches of each by cost, as many as the fullest rank's tokens
    need. Nothing keeps a single one within the cap."""

    def parts(some: list[int], count: int) -> list[list[int]]:
        found = largest_differencing([n * (linear_cost_tokens + n) for n in some], count)
        return [[some[i] for i in part] for part in found]

    groups = parts(lengths.tolist(), cluster.data_parallel)
    count = -(-max(map(sum, groups)) // (max_tokens * cluster.context_parallel))
    return _plan(_side_by_side([parts(group, count) for group in groups]), cluster)


def _token_budget(lengths: Integers, num_groups: int, room: int) -> Rows:
    """Documents as they come, each to the rank with least attention that has room; where none has,
    the next micro batch begins."""
    micro_batches: Rows = []
    loads = np.zeros((2, num_groups), np.int64)  # tokens, attention
    for n in lengths.tolist():
        has_room = loads[0] + n <= room
        if not micro_batches or not has_room.any():
            micro_batches.append([[] for _ in range(num_groups)])
            loads[:], has_room[:] = 0, True
        group = int(np.where(has_room, loads[1], np.iinfo(np.int64).max).argmin())
        micro_batches[-1][group].append(n)
        loads[:, group] += n, n * n
    return micro_batches


def _assign(
    way: Callable[[Integers, int, int], Rows],
    lengths: Integers,
    cluster: Cluster,
    max_tokens: int,
    _linear_cost_tokens: float,
) -> StepPlan:
    rows = way(lengths, cluster.data_parallel, max_tokens * cluster.context_parallel)
    return _plan(rows, cluster)


def _plan(rows: Rows, cluster: Cluster) -> StepPlan:
    places = [(n, g, m) for m, held in enumerate(rows) for g, row in enumerate(held) for n in row]
    lengths, group, micro_batch = np.array(places, np.int64).reshape(-1, 3).T
    degree = cluster.context_parallel
    return StepPlan(
        num_ranks=cluster.num_ranks,
        num_micro_batches=len(rows),
        lengths=lengths,
        first_rank=group * degree,
        degree=np.full(len(lengths), degree),
        micro_batch=micro_batch,
    )


def _planned(
    balance: Literal["micro_batches", "step", "pipeline"],
    lengths: Integers,
    cluster: Cluster,
    max_tokens: int,
    linear_cost_tokens: float,
) -> StepPlan:
    return plan_step(
        lengths,
        num_ranks=cluster.num_ranks,
        max_tokens_per_rank=max_tokens,
        max_context_parallel_size=cluster.context_parallel,
        linear_cost_tokens=linear_cost_tokens,
        balance=balance,
        micro_batch_multiple=cluster.pipeline_parallel if cluster.virtual_stages > 1 else 1,
    )


Assign = Callable[[Integers, Cluster, int, float], StepPlan]

#: name -> (lengths, cluster, max_tokens_per_rank, linear_cost_tokens) -> plan.
#: No length is above ``context_parallel`` times max_tokens_per_rank (``cut_documents``).
ASSIGNMENTS: dict[str, Assign] = {
    "plan_step, micro batches": partial(_planned, "micro_batches"),
    "plan_step, step": partial(_planned, "step"),
    "plan_step, pipeline": partial(_planned, "pipeline"),
    "padded rows": partial(_assign, _padded),
    "concatenate and chunk": partial(_assign, _chunked),
    "sorted round robin": partial(_assign, _round_robin),
    "Karmarkar-Karp": _karmarkar_karp,
    "token budget": partial(_assign, _token_budget),
}
