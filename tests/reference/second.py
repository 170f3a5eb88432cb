"""The bucket strategy for documents with a second size: two capacities per bucket."""

from __future__ import annotations

from fractions import Fraction

from reference.common import Packing, Sample, Segment, cut, whole
from reference.random import POOLS, dealt, random_for


def bucket_second(
    lengths: list[int],
    second: list[int],
    buckets: list[int],
    second_capacity: list[int],
    seed: int,
    *,
    pool_size: int = 1 << 20,
    max_segments: int | None = None,
) -> Packing:
    packed: dict[int, list[Sample]] = {capacity: [] for capacity in buckets}
    num_pools = max(1, -(-len(lengths) // pool_size))
    for pool in dealt(len(lengths), num_pools, random_for(seed, POOLS)):
        chunks, rests = cut(whole(lengths, pool), buckets[-1])
        packed[buckets[-1]] += [[chunk] for chunk in chunks]
        total = sizes_of(rests, second)
        # More of the second size per token than the pool.
        heavy = {d for d in rests if second[d.document] * total[0] > d.length * total[1]}
        while rests:
            capacity, sample = next_sample(
                rests, heavy, second, buckets, second_capacity, max_segments
            )
            packed[capacity].append(sample)
    return Packing(packed)


def next_sample(
    rests: list[Segment],
    heavy: set[Segment],
    second: list[int],
    buckets: list[int],
    second_capacity: list[int],
    max_segments: int | None,
) -> tuple[int, Sample]:
    """Take the documents of one sample out of ``rests``."""

    def largest(of_heavy: bool, tokens: int, room: int) -> Segment | None:
        """Return the largest document of a list that fits, the first of equal ones."""
        fits = [d for d in rests if d.length <= tokens and second[d.document] <= room]

        def size(d: Segment) -> tuple[int, int, int]:
            major, minor = d.length, second[d.document]
            return (*((minor, major) if of_heavy else (major, minor)), -d.document)

        return max((d for d in fits if (d in heavy) == of_heavy), key=size, default=None)

    total = sizes_of(rests, second)
    both = [largest(of_heavy, buckets[-1], second_capacity[-1]) for of_heavy in (False, True)]
    chosen = max(
        (d for d in both if d is not None),
        key=lambda d: max(
            Fraction(d.length, buckets[-1]), Fraction(second[d.document], second_capacity[-1])
        ),
    )  # of equal ones the light one, which comes first
    room = [
        (tokens, limit)
        for tokens, limit in zip(buckets, second_capacity, strict=True)
        if chosen.length <= tokens and second[chosen.document] <= limit
    ]
    capacity, limit = room[0]
    most = len(rests)
    if max_segments is not None:
        most = max(1, max_segments * capacity // buckets[-1])
    sample: Sample = []
    while chosen is not None:
        rests.remove(chosen)
        sample.append(chosen)
        if len(sample) == most:
            break
        used = sizes_of(sample, second)
        # Less of the second size per token than the documents that were left.
        lacks = used[1] * total[0] < used[0] * total[1]
        space = (capacity - used[0], limit - used[1])
        chosen = largest(lacks, *space) or largest(not lacks, *space)
    return capacity, sample


def sizes_of(documents: list[Segment], second: list[int]) -> tuple[int, int]:
    return sum(d.length for d in documents), sum(second[d.document] for d in documents)
