"""Bucket strategies that keep documents whole: bucket, bucket_v0, bucket_llm; decompose."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import combinations

from reference.common import Packing, Sample, Segment, cut, head_and_rest, tokens, whole
from reference.random import (
    DOCUMENTS,
    POOLS,
    SEGMENTS,
    Random,
    dealt,
    random_for,
    shuffled,
    swap_down,
)


@dataclass
class Rules:
    buckets: list[int]
    overflow: str = "pad"  # or "head", "promote"
    padding_threshold: float = 0.0  # as a share of the capacity
    pairs: bool = False
    lookahead: bool = False
    shuffle_segments: bool = False
    # in a sample of the largest bucket; proportionally fewer in smaller buckets
    max_segments: int | None = None

    def segment_limit(self, capacity: int) -> float:
        if self.max_segments is None:
            return float("inf")
        return max(1, self.max_segments * capacity // self.buckets[-1])


@dataclass
class Pool:
    """Documents in order of arrival. Of documents of equal length, the first to arrive is taken."""

    rules: Rules
    chance: Random
    documents: list[Segment] = field(default_factory=list)
    num_samples: int = 0

    def generate(self) -> tuple[int, Sample]:
        """Return one sample and the capacity of its bucket: BucketLLM, Algorithm 2."""
        chance = self.chance.child(self.num_samples)
        self.num_samples += 1
        longest = max(self.documents, key=lambda d: d.length)
        largest = self.rules.buckets[-1]
        if longest.length > largest:
            return largest, [self.take_head(longest, largest)]
        shortest = min(d.length for d in self.documents)
        capacity = min(b for b in self.rules.buckets if b >= longest.length)
        sample: Sample = []
        limit = self.rules.segment_limit
        while True:
            space = capacity - tokens(sample)
            threshold = Fraction(repr(float(self.rules.padding_threshold))) * capacity
            full = len(sample) >= limit(capacity)
            fitting = [] if full else [d for d in self.documents if d.length <= space]
            if fitting:
                chosen = max(fitting, key=lambda d: d.length)
                if self.rules.lookahead and sample and len(sample) + 1 < limit(capacity):
                    spaces = {space, *range(space - shortest + 1)}
                    preferred = [d for d in fitting if d.length in spaces]
                    chosen = max(preferred, key=lambda d: d.length, default=chosen)
                pair = self.better_pair(chosen, space, threshold) if self.rules.pairs else None
                for document in pair or (chosen,):
                    self.documents.remove(document)
                    sample.append(document)
                continue
            larger = self.larger_bucket(sample) if self.rules.overflow == "promote" else None
            if larger is None or space <= threshold:
                break
            capacity = larger
        sample.sort(key=lambda d: -d.length)
        if self.rules.shuffle_segments:
            swap_down(sample, chance)
        if self.rules.overflow == "head" and space > threshold and self.documents:
            shortest = min(self.documents, key=lambda d: d.length)
            sample.append(self.take_head(shortest, space))
        return capacity, sample

    def take_pattern(self, contents: dict[int, int]) -> Sample:
        """Take the first arrival of every length, longest first."""
        sample = []
        for length in sorted(contents, reverse=True):
            for _ in range(contents[length]):
                sample.append(next(d for d in self.documents if d.length == length))
                self.documents.remove(sample[-1])
        return sample

    def larger_bucket(self, sample: Sample) -> int | None:
        """Return the smallest bucket with room for this sample and one more document."""
        if not self.documents:
            return None
        needed = tokens(sample) + min(d.length for d in self.documents)
        limit = self.rules.segment_limit
        larger = [b for b in self.rules.buckets if b >= needed and len(sample) < limit(b)]
        return min(larger, default=None)

    def better_pair(self, single: Segment, space: int, threshold: Fraction) -> Sample | None:
        """Lines 6 to 12, with the space before ``single`` as the limit of the pair."""
        others = [d for d in self.documents if d is not single]
        space_left = space - single.length
        if not others or not min(d.length for d in others) > space_left > threshold:
            return None
        others.sort(key=lambda d: -d.length)  # stable: equally long ones in order of arrival
        # a pair with more tokens than the single document
        pair, best = None, (single.length, space)
        for a, b in combinations(others, 2):
            both = a.length + b.length
            if both <= space and (both, a.length) > best:
                best, pair = (both, a.length), [a, b]
        return pair

    def take_head(self, document: Segment, count: int) -> Segment:
        """Take the first tokens of a document; the remainder returns to the pool as the last
        arrival."""
        self.documents.remove(document)
        head, remainder = head_and_rest(document, count)
        self.documents.append(remainder)
        return head


# (index of the bucket, number of samples, length -> number of documents): decided by a refinement.
Pattern = tuple[int, int, dict[int, int]]


def drained(
    lengths: list[int], rules: Rules, pool_size: int, seed: int, given: tuple[Pattern, ...] = ()
) -> Packing:
    num_pools = max(1, -(-len(lengths) // pool_size))
    largest = rules.buckets[-1]
    buckets: dict[int, list[Sample]] = {capacity: [] for capacity in rules.buckets}
    for p, members in enumerate(dealt(len(lengths), num_pools, random_for(seed, POOLS))):
        # Draining cuts the long documents first anyway: they are the longest.
        chunks, rests = cut(whole(lengths, members), largest)
        buckets[largest] += [[chunk] for chunk in chunks]
        pool = Pool(rules, random_for(seed, SEGMENTS).child(p), rests)
        for place, count, contents in given:
            capacity = rules.buckets[place]
            buckets[capacity] += [pool.take_pattern(contents) for _ in range(count)]
        while pool.documents:
            capacity, sample = pool.generate()
            buckets[capacity].append(sample)
    return Packing(buckets)


def streamed(lengths: list[int], rules: Rules, pool_size: int, seed: int) -> Packing:
    """Run BucketLLM, Algorithm 1, and drain the pool at the end."""
    buckets: dict[int, list[Sample]] = {capacity: [] for capacity in rules.buckets}
    pool = Pool(rules, random_for(seed, SEGMENTS))
    arriving = whole(lengths, shuffled(len(lengths), random_for(seed, DOCUMENTS)))
    while arriving or pool.documents:
        if arriving:
            pool.documents.append(arriving.pop(0))
            if len(pool.documents) < pool_size:
                continue
        capacity, sample = pool.generate()
        buckets[capacity].append(sample)
    return Packing(buckets)


def bucket_llm(
    lengths: list[int],
    buckets: list[int],
    seed: int,
    *,
    pool: str = "drain",
    pool_size: int = 1 << 20,
    padding_threshold: float = 0.045,
    pairs: bool = True,
) -> Packing:
    rules = Rules(buckets, "head", padding_threshold, pairs, shuffle_segments=True)
    run = drained if pool == "drain" else streamed
    return run(lengths, rules, pool_size, seed)


def bucket_v0(lengths: list[int], buckets: list[int], seed: int, **parameters) -> Packing:
    return bucket_llm(lengths, buckets, seed, pairs=False, **parameters)


def bucket(
    lengths: list[int],
    buckets: list[int],
    seed: int,
    *,
    pool_size: int = 1 << 20,
    promote: str = "auto",
    padding_threshold: float = 0.05,
    max_segments: int | None = None,
    refine: bool = False,
) -> Packing:
    assert not refine, "a linear program has no definition in plain Python; see `drained`"
    padding = Rules(buckets, "pad", max_segments=max_segments)
    promoting = Rules(buckets, "promote", padding_threshold, max_segments=max_segments)
    ahead = replace(promoting, lookahead=True)
    rules = {"off": padding, "on": promoting, "lookahead": ahead}
    # one pool of all documents without full chunks: is the padding worth saving?
    if promote == "auto":
        _, rests = cut(whole(lengths), buckets[-1])
        shorter = [remainder.length for remainder in rests]
        least = math.inf
        for how in ("off", "on", "lookahead"):
            padded, slots = padding_of(drained(shorter, rules[how], len(shorter) or 1, seed))
            promote, least = (how, padded) if padded < least else (promote, least)
            if 1000 * padded <= slots:
                break
    return drained(lengths, rules[promote], pool_size, seed)


def padding_of(packing: Packing) -> tuple[int, int]:
    """Return (padding tokens, all tokens) of a packing."""
    slots = sum(capacity * len(samples) for capacity, samples in packing.buckets.items())
    used = sum(tokens(sample) for samples in packing.buckets.values() for sample in samples)
    return slots - used, slots


def decompose(
    lengths: list[int], buckets: list[int], seed: int, *, min_bucket: int | None = None
) -> Packing:
    smallest = min_bucket or min(256, buckets[0])
    sizes = [1 << k for k in range(64) if smallest <= 1 << k <= buckets[-1]]
    packed: dict[int, list[Sample]] = {size: [] for size in sizes}
    dropped = 0
    for remainder in whole(lengths):
        for size in reversed(sizes):
            while remainder.length >= size:
                piece, remainder = head_and_rest(remainder, size)  # noqa: PLW2901
                packed[size].append([piece])
        dropped += remainder.length
    return Packing(packed, dropped)
