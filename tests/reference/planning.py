"""Laws of a step plan, document by document, and its costs."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np

Place = tuple[int, int, int]  # micro batch, first rank, degree


def groups_of(plan: Any) -> dict[Place, list[int]]:
    """Return the documents of every group of ranks."""
    groups = defaultdict(list)
    for i in range(len(plan.lengths)):
        place = (int(plan.micro_batch[i]), int(plan.first_rank[i]), int(plan.degree[i]))
        groups[place].append(i)
    return dict(groups)


def broken_laws(
    plan: Any,
    max_tokens: int,
    max_context_parallel_size: int,
    max_documents: int,
    *,
    costs: Any = None,
    max_costs: Any = None,
    groups: Any = None,
    multiple: int = 1,
) -> list[str]:
    """Return the violations of a plan; a valid plan has none."""
    broken = []
    owner: dict[tuple[int, int], Place] = {}
    places = groups_of(plan)
    for place, documents in places.items():
        micro_batch, first, degree = place
        if not 0 <= micro_batch < plan.num_micro_batches:
            broken.append(f"{place} is in no micro batch")
        if (
            degree < 1
            or degree & (degree - 1)
            or degree > max_context_parallel_size
            or first % degree
        ):
            broken.append(f"{place} is not an aligned group of at most {max_context_parallel_size}")
        for rank in range(first, first + degree):
            if not 0 <= rank < plan.num_ranks:
                broken.append(f"{place} has rank {rank}")
            if owner.setdefault((micro_batch, rank), place) != place:
                broken.append(f"rank {rank} is in {place} and {owner[micro_batch, rank]}")
        tokens = sum(int(plan.lengths[i]) for i in documents)
        if -(-tokens // degree) > max_tokens:
            broken.append(f"{place} holds {tokens} tokens")
        if len(documents) > max_documents:
            broken.append(f"{place} holds {len(documents)} documents")
        for k, cap in enumerate(max_costs or ()):
            cost = sum(float(costs[i][k]) for i in documents)
            if cost > cap * degree:
                broken.append(f"{place} costs {cost} of kind {k}")
    used = {micro_batch for micro_batch, _ in owner}
    if plan.num_micro_batches % multiple:
        broken.append(f"{plan.num_micro_batches} micro batches are not a multiple of {multiple}")
    if multiple == 1 and used != set(range(plan.num_micro_batches)):
        broken.append(f"only micro batches {sorted(used)} hold documents")

    def one_rank_holds(documents: list[int]) -> bool:
        sums = [sum(float(costs[i][k]) for i in documents) for k in range(len(max_costs or ()))]
        fits = all(cost <= cap for cost, cap in zip(sums, max_costs or (), strict=True))
        tokens = sum(int(plan.lengths[i]) for i in documents)
        return fits and tokens <= max_tokens and len(documents) <= max_documents

    # Groups that are split: over ranks, or over micro batches without need.
    members: dict[int, list[int]] = defaultdict(list)
    for i, group in enumerate(() if groups is None else groups):
        members[int(group)].append(i)
    for group, documents in members.items():
        held = {(int(plan.first_rank[i]), int(plan.degree[i])) for i in documents}
        when = {int(plan.micro_batch[i]) for i in documents}
        fits = max_context_parallel_size > 1 or one_rank_holds(documents)
        if len(held) > 1 or (fits and len(when) > 1):
            broken.append(f"group {group} is on {held} in micro batches {when}")
    # Empty ranks, although another rank holds several documents of which one would fit.
    num_idle = plan.num_ranks * plan.num_micro_batches - len(owner)
    movable = [i for documents in places.values() if len(documents) > 1 for i in documents]
    fitting = [i for i in movable if one_rank_holds([i])]
    if num_idle and groups is None and fitting:
        broken.append(f"{num_idle} ranks hold nothing, and document {fitting[0]} would fit")
    return broken


def least_objectives(
    lengths: list[int], cost: list[int], num_micro_batches: int, max_tokens: int
) -> dict[str, float]:
    """Return the minimum of each balance on two non-empty ranks over all assignments, by the
    subsets of documents that a rank, a micro batch and the step may hold; inf if none is
    possible."""
    size = 1 << len(lengths)
    pairs = [(whole, part) for whole in range(1, size) for part in parts_of(whole)]
    whole, part = np.array(pairs).T
    first = np.flatnonzero(np.diff(whole, prepend=0))
    bits = np.arange(size)[:, None] >> np.arange(len(lengths)) & 1
    tokens, costs = bits @ lengths, (bits @ cost).astype(float)

    def joined(a: Any, b: Any, join: Any) -> Any:
        """Return for each subset the minimum over its splits in two."""
        least = np.full(size, np.inf)
        least[1:] = np.minimum.reduceat(join(a[part], b[whole ^ part]), first)
        return least

    rank = np.where((tokens > 0) & (tokens <= max_tokens), costs, np.inf)
    micro_batch = joined(rank, rank, np.maximum)
    some, alone, dearest = micro_batch, rank, micro_batch
    for _ in range(num_micro_batches - 1):
        some = joined(micro_batch, some, np.add)
        alone = joined(rank, alone, np.add)  # micro batches of one rank, with any fitting sums
        dearest = joined(micro_batch, dearest, np.maximum)
    return {
        "micro_batches": float(some[-1]),
        "step": float(np.maximum(alone, alone[::-1]).min()),
        "pipeline": float(dearest[-1]),
    }


def parts_of(subset: int) -> list[int]:
    """Return all non-empty subsets of a set of bits, itself included."""
    parts, part = [], subset
    while part:
        parts.append(part)
        part = (part - 1) & subset
    return parts


def costs(plan: Any, linear_cost_tokens: float) -> list[list[float]]:
    """Return costs of every micro batch and rank: n (linear_cost_tokens + n), over the degree."""
    result = [[0.0] * plan.num_ranks for _ in range(plan.num_micro_batches)]
    for (micro_batch, first, degree), documents in groups_of(plan).items():
        for i in documents:
            length = int(plan.lengths[i])
            for rank in range(first, first + degree):
                result[micro_batch][rank] += length * (linear_cost_tokens + length) / degree
    return result
