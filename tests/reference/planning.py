"""The laws of a step's plan, document by document, and what a plan costs."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

Place = tuple[int, int, int]  # micro batch, first rank, degree


def groups_of(plan: Any) -> dict[Place, list[int]]:
    """Documents of every group of ranks."""
    groups = defaultdict(list)
    for i in range(len(plan.lengths)):
        place = (int(plan.micro_batch[i]), int(plan.first_rank[i]), int(plan.degree[i]))
        groups[place].append(i)
    return dict(groups)


def broken_laws(plan: Any, max_tokens: int, max_degree: int, max_documents: int) -> list[str]:
    """What a valid plan never has."""
    broken = []
    owner: dict[tuple[int, int], Place] = {}
    for place, documents in groups_of(plan).items():
        micro_batch, first, degree = place
        if not 0 <= micro_batch < plan.num_micro_batches:
            broken.append(f"{place} is in no micro batch")
        if degree < 1 or degree & (degree - 1) or degree > max_degree or first % degree:
            broken.append(f"{place} is no aligned group of at most {max_degree}")
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
    places = plan.num_ranks * plan.num_micro_batches
    if max_degree == 1 and len(owner) < places <= len(plan.lengths):
        broken.append("a rank holds nothing in a micro batch, and there are documents for it")
    used = {micro_batch for micro_batch, _ in owner}
    if used != set(range(plan.num_micro_batches)):
        broken.append(f"only micro batches {sorted(used)} hold documents")
    return broken


def costs(plan: Any, linear_length: float) -> list[list[float]]:
    """Of every micro batch and rank: n (linear_length + n) of its documents over their degree."""
    found = [[0.0] * plan.num_ranks for _ in range(plan.num_micro_batches)]
    for (micro_batch, first, degree), documents in groups_of(plan).items():
        for i in documents:
            length = int(plan.lengths[i])
            for rank in range(first, first + degree):
                found[micro_batch][rank] += length * (linear_length + length) / degree
    return found
