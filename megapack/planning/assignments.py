"""Ways to assign the documents of a step to ranks: ``plan_step``, and the methods of trainers.

    ASSIGNMENTS           name -> function
    largest_differencing  divide numbers into parts with similar sums (Karmarkar and Karp)
    cut_documents         cut documents into pieces of a maximum length

An assignment is a ``StepPlan`` whose segments attend only to themselves. Padding is a segment, too;
a row with attention across its documents is one segment. Six documents on two ranks of 8 tokens:

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

# A row is the list of segment lengths of one data-parallel group in one micro batch. All context-
# parallel ranks of the group share it.
Rows = list[list[list[int]]]  # micro batch, group


def cut_documents(lengths: Integers, limit: int) -> Integers:
    """Cut documents into pieces of `limit` tokens; a document's last piece may be shorter."""
    counts = -(-lengths // limit)
    pieces = np.full(int(counts.sum()), limit, np.int64)
    pieces[counts.cumsum() - 1] = lengths - (counts - 1) * limit
    return pieces


def largest_differencing(costs: Sequence[float], num_parts: int) -> list[list[int]]:
    """Divide numbers into parts with similar sums; return the positions of each part.

    Karmarkar and Karp 1982, "The differencing method of set partitioning": merge the two partitions
    with the largest differences, largest part with smallest part, until one remains.
    """
    tie = itertools.count()
    empty: tuple[float, list[int]] = (0, [])
    heap = [
        (-costs[i], next(tie), [empty] * (num_parts - 1) + [(costs[i], [i])])
        for i in sorted(range(len(costs)), key=lambda i: -costs[i])
    ]
    heapq.heapify(heap)
    while len(heap) > 1:
        (_, _, a), (_, _, b) = heapq.heappop(heap), heapq.heappop(heap)
        merged = [(x + y, p + q) for (x, p), (y, q) in zip(a, reversed(b), strict=True)]
        merged.sort(key=lambda part: part[0])
        heapq.heappush(heap, (merged[0][0] - merged[-1][0], next(tie), merged))
    return [members for _, members in heap[0][2]] if heap else [[] for _ in range(num_parts)]


def _fill_rows(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Fill rows in order; a document that does not fit opens the next row."""
    rows: list[list[int]] = []
    space = 0
    for n in lengths:
        if not rows or n > space:
            rows.append([])
            space = capacity
        rows[-1].append(n)
        space -= n
    return rows


def _padded(lengths: Integers, num_groups: int, capacity: int) -> Rows:
    """Fill rows in order and pad each to its capacity."""
    rows = _fill_rows(lengths.tolist(), capacity)
    padded = [row + [capacity - sum(row)] * (sum(row) < capacity) for row in rows]
    return _in_turns(padded, num_groups)


def _chunked(lengths: Integers, num_groups: int, capacity: int) -> Rows:
    """Concatenate documents and cut at row ends; each row is one segment."""
    return _in_turns([[capacity]] * -(-int(lengths.sum()) // capacity), num_groups)


def _in_turns(rows: list[list[int]], num_groups: int) -> Rows:
    """Give the rows to the groups in turn."""
    complete = rows + [[]] * (-len(rows) % num_groups)
    return [complete[begin : begin + num_groups] for begin in range(0, len(complete), num_groups)]


def _transpose(groups: list[list[list[int]]]) -> Rows:
    """Return rows by micro batch from rows by group; missing rows are empty."""
    return [list(rows) for rows in itertools.zip_longest(*groups, fillvalue=[])]


def _round_robin(lengths: Integers, num_groups: int, capacity: int) -> Rows:
    """Give documents to groups in turn, longest first; each group fills its rows in this order."""
    descending = np.sort(lengths)[::-1].tolist()
    return _transpose([_fill_rows(descending[g::num_groups], capacity) for g in range(num_groups)])


def _karmarkar_karp(
    lengths: Integers, cluster: Cluster, max_tokens: int, linear_cost_tokens: float
) -> StepPlan:
    """Divide documents by cost among groups, then each group's among its micro batches. The fullest
    group's tokens decide the number of micro batches; a micro batch may exceed max_tokens."""

    def divide(documents: list[int], num_parts: int) -> list[list[int]]:
        costs = [n * (linear_cost_tokens + n) for n in documents]
        parts = largest_differencing(costs, num_parts)
        return [[documents[i] for i in part] for part in parts]

    groups = divide(lengths.tolist(), cluster.data_parallel)
    count = -(-max(map(sum, groups)) // (max_tokens * cluster.context_parallel))
    return _plan(_transpose([divide(group, count) for group in groups]), cluster)


def _token_budget(lengths: Integers, num_groups: int, capacity: int) -> Rows:
    """Give documents in order to the group with the least attention that has space. If no group has
    space, the next micro batch begins."""
    micro_batches: Rows = []
    loads = np.zeros((2, num_groups), np.int64)  # tokens, attention
    for n in lengths.tolist():
        has_room = loads[0] + n <= capacity
        if not micro_batches or not has_room.any():
            micro_batches.append([[] for _ in range(num_groups)])
            loads[:], has_room[:] = 0, True
        group = int(np.where(has_room, loads[1], np.iinfo(np.int64).max).argmin())
        micro_batches[-1][group].append(n)
        loads[:, group] += n, n * n
    return micro_batches


def _assign(
    method: Callable[[Integers, int, int], Rows],
    lengths: Integers,
    cluster: Cluster,
    max_tokens: int,
    _linear_cost_tokens: float,
) -> StepPlan:
    rows = method(lengths, cluster.data_parallel, max_tokens * cluster.context_parallel)
    return _plan(rows, cluster)


def _plan(rows: Rows, cluster: Cluster) -> StepPlan:
    segments = [
        (n, g, m) for m, groups in enumerate(rows) for g, row in enumerate(groups) for n in row
    ]
    lengths, group, micro_batch = np.array(segments, np.int64).reshape(-1, 3).T
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
        micro_batch_multiple=cluster.micro_batch_multiple,
    )


Assign = Callable[[Integers, Cluster, int, float], StepPlan]

#: name -> (lengths, cluster, max_tokens_per_rank, linear_cost_tokens) -> plan.
#: Lengths must not exceed ``context_parallel`` times max_tokens_per_rank (``cut_documents``).
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
