"""first_fit_decreasing, best_fit_decreasing, and Seamless Packing, which uses the first."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from fractions import Fraction

from reference.common import Packing, Sample, Segment, cut, joined, tokens, whole, without_partial


@dataclass
class Bin:
    space: int
    reached: int = 0  # when it got this space
    segments: Sample = field(default_factory=list)


def fitted(rests: list[Segment], capacity: int, *, best: bool) -> list[Bin]:
    """Put remainders, longest first, into the first (or fullest) bin with room, or a new one."""
    bins: list[Bin] = []
    for now, remainder in enumerate(sorted(rests, key=lambda remainder: -remainder.length)):
        fitting = [b for b in bins if b.space >= remainder.length]
        if best:
            fitting.sort(key=lambda b: (b.space, b.reached))
        if not fitting:
            bins.append(Bin(capacity))
            fitting = [bins[-1]]
        chosen = fitting[0]
        chosen.segments.append(remainder)
        chosen.space -= remainder.length
        chosen.reached = now
    return bins


def up_to(sample: Sample, capacity: int) -> Sample:
    """Return the first ``capacity`` tokens of a sample."""
    return (joined(sample, capacity) or [[]])[0]


def fit_decreasing(lengths: list[int], buckets: list[int], *, extra: int, best: bool) -> Packing:
    [capacity] = buckets
    chunks, rests = cut(whole(lengths), capacity)
    bins = [b.segments for b in fitted(rests, capacity + extra, best=best)]
    samples = [[chunk] for chunk in chunks] + [up_to(b, capacity) for b in bins]
    return Packing({capacity: samples}, sum(max(0, tokens(b) - capacity) for b in bins))


def first_fit_decreasing(
    lengths: list[int], buckets: list[int], seed: int, *, extra_capacity: int = 0
) -> Packing:
    return fit_decreasing(lengths, buckets, extra=extra_capacity, best=False)


def best_fit_decreasing(
    lengths: list[int], buckets: list[int], seed: int, *, extra_capacity: int = 0
) -> Packing:
    return fit_decreasing(lengths, buckets, extra=extra_capacity, best=True)


def window_begins(length: int, capacity: int, r_max: float, placement: str) -> list[int] | None:
    """Return the begins of the windows of a long document, or None if it does not slide."""
    n = length // capacity
    overlap = (n + 1) * capacity - length
    if overlap == capacity:
        return None  # exactly n samples
    if placement == "published":
        if overlap > n * int(r_max * capacity):
            return None
        stride = capacity - (overlap // (n + 1) + 1)
        return [i * stride for i in range(n)] + [length - capacity]
    if overlap > math.ceil(n * Fraction(repr(float(r_max))) * capacity):  # equations 1 and 2
        return None
    if placement == "paper":  # equation 3
        stride = capacity - math.ceil(overlap / n)
        return [j * stride for j in range(n + 1)]
    return [j * (length - capacity) // n for j in range(n + 1)]


def seamless(
    lengths: list[int],
    buckets: list[int],
    seed: int,
    *,
    r_max: float = 0.3,
    placement: str = "exact",
    extra_capacity: int = 0,
    last: str = "pad",
) -> Packing:
    [capacity] = buckets
    samples: list[Sample] = []
    rests = []
    dropped = repeated = 0
    for document in whole(lengths):
        begins = None
        if document.length >= capacity:
            begins = window_begins(document.length, capacity, r_max, placement)
        if begins is None:
            chunks, tail = cut([document], capacity)
            samples += [[chunk] for chunk in chunks]
            rests += tail
            continue
        samples += [[Segment(document.document, begin, capacity)] for begin in begins]
        covered = set()
        for begin in begins:
            covered |= set(range(begin, begin + capacity))
        assert covered <= set(range(document.length))
        dropped += document.length - len(covered)
        repeated += len(begins) * capacity - len(covered)
    bins = [b.segments for b in fitted(rests, capacity + extra_capacity, best=False)]
    full = capacity + 1 if placement == "published" else capacity
    leftover: list[Segment] = []
    for segments in bins:
        if tokens(segments) >= full:
            samples.append(up_to(segments, capacity))
            dropped += tokens(segments) - capacity
        else:
            leftover += segments
    samples += joined(leftover, capacity)
    if last == "drop":
        samples, lost = without_partial(samples, capacity)
        dropped += lost
    return Packing({capacity: samples}, dropped, repeated)
