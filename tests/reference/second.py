"""The bucket strategy for documents with a second size: two capacities per bucket."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from reference.buckets import padding_of
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
    promote: str = "auto",
    padding_threshold: float = 0.05,
) -> Packing:
    def packed(threshold: Fraction | None) -> Packing:
        rules = Rules(buckets, second_capacity, second, max_segments, threshold)
        samples: dict[int, list[Sample]] = {capacity: [] for capacity in buckets}
        num_pools = max(1, -(-len(lengths) // pool_size))
        for pool in dealt(len(lengths), num_pools, random_for(seed, POOLS)):
            chunks, rests = cut(whole(lengths, pool), buckets[-1])
            samples[buckets[-1]] += [[chunk] for chunk in chunks]
            total = rules.sizes(rests)
            # More of the second size per token than the pool.
            heavy = {d for d in rests if second[d.document] * total[0] > d.length * total[1]}
            while rests:
                capacity, sample = next_sample(rests, heavy, rules)
                samples[capacity].append(sample)
        return Packing(samples)

    on, off = Fraction(repr(float(padding_threshold))), None
    if promote != "auto":
        return packed(on if promote == "on" else off)
    padding, slots = padding_of(packed(off))
    better = 1000 * padding > slots and padding_of(packed(on))[0] < padding
    return packed(on if better else off)


@dataclass
class Rules:
    buckets: list[int]
    second_capacity: list[int]
    second: list[int]
    max_segments: int | None
    threshold: Fraction | None  # free share of a bucket above which a sample moves to a larger one

    def sizes(self, documents: list[Segment]) -> tuple[int, int]:
        return sum(d.length for d in documents), sum(self.second[d.document] for d in documents)

    def segment_limit(self, b: int) -> float:
        if self.max_segments is None:
            return float("inf")
        return max(1, self.max_segments * self.buckets[b] // self.buckets[-1])


def next_sample(rests: list[Segment], heavy: set[Segment], rules: Rules) -> tuple[int, Sample]:
    """Take the documents of one sample out of ``rests``; return the capacity of its bucket."""
    buckets, limits, second = rules.buckets, rules.second_capacity, rules.second

    def largest(of_heavy: bool, tokens: int, room: int) -> Segment | None:
        """Return the largest document of a list that fits, the first of equal ones."""
        fits = [d for d in rests if d.length <= tokens and second[d.document] <= room]

        def size(d: Segment) -> tuple[int, int, int]:
            major, minor = d.length, second[d.document]
            return (*((minor, major) if of_heavy else (major, minor)), -d.document)

        return max((d for d in fits if (d in heavy) == of_heavy), key=size, default=None)

    def fitting(b: int) -> Segment | None:
        """Return the next document of the sample, if it was in bucket b."""
        if len(sample) >= rules.segment_limit(b):
            return None
        used = rules.sizes(sample)
        # Less of the second size per token than the documents that were left.
        lacks = used[1] * total[0] < used[0] * total[1]
        space = (buckets[b] - used[0], limits[b] - used[1])
        return largest(lacks, *space) or largest(not lacks, *space)

    total = rules.sizes(rests)
    both = [largest(of_heavy, buckets[-1], limits[-1]) for of_heavy in (False, True)]
    chosen: Segment | None = max(
        (d for d in both if d is not None),
        key=lambda d: max(
            Fraction(d.length, buckets[-1]), Fraction(second[d.document], limits[-1])
        ),
    )  # of equal ones the light one, which comes first
    assert chosen is not None
    b = min(
        b
        for b in range(len(buckets))
        if chosen.length <= buckets[b] and second[chosen.document] <= limits[b]
    )
    sample: Sample = []
    while chosen is not None:
        rests.remove(chosen)
        sample.append(chosen)
        chosen = fitting(b)
        space = buckets[b] - rules.sizes(sample)[0]
        if chosen is None and rules.threshold is not None and space > rules.threshold * buckets[b]:
            b = next((larger for larger in range(b + 1, len(buckets)) if fitting(larger)), b)
            chosen = fitting(b)
    return buckets[b], sample
