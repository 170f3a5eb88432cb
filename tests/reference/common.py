"""What the definitions of all strategies share: segments, samples, cutting, joining."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple


class Segment(NamedTuple):
    document: int
    begin: int
    length: int


Sample = list[Segment]


class Packing(NamedTuple):
    """Bucket capacity -> its samples, in order; and what was lost or repeated on the way."""

    buckets: dict[int, list[Sample]]
    dropped: int = 0
    repeated: int = 0


def whole(lengths: list[int], order: Iterable[int] | None = None) -> list[Segment]:
    """Documents, empty ones left out, in file order or the order given."""
    order = range(len(lengths)) if order is None else order
    return [Segment(d, 0, lengths[d]) for d in order if lengths[d] > 0]


def head_and_rest(segment: Segment, tokens: int) -> tuple[Segment, Segment]:
    document, begin, length = segment
    return Segment(document, begin, tokens), Segment(document, begin + tokens, length - tokens)


def cut(documents: list[Segment], capacity: int) -> tuple[list[Segment], list[Segment]]:
    """Full chunks, and what is left of each document; both in the order of documents."""
    chunks, rests = [], []
    for rest in documents:
        while rest.length >= capacity:
            chunk, rest = head_and_rest(rest, capacity)  # noqa: PLW2901
            chunks.append(chunk)
        if rest.length > 0:
            rests.append(rest)
    return chunks, rests


def joined(segments: Iterable[Segment], capacity: int) -> list[Sample]:
    """A stream cut every ``capacity`` tokens; the last sample may be short."""
    samples: list[Sample] = []
    room = 0
    for rest in segments:
        while rest.length > 0:
            if room == 0:
                samples.append([])
                room = capacity
            piece, rest = head_and_rest(rest, min(room, rest.length))  # noqa: PLW2901
            samples[-1].append(piece)
            room -= piece.length
    return samples


def tokens(sample: Sample) -> int:
    return sum(segment.length for segment in sample)


def without_partial(samples: list[Sample], capacity: int) -> tuple[list[Sample], int]:
    """``last="drop"``: the samples without a short last one, and the tokens it had."""
    if samples and tokens(samples[-1]) < capacity:
        return samples[:-1], tokens(samples[-1])
    return samples, 0


def aligned(
    definition: Callable[..., Packing],
    lengths: list[int],
    buckets: list[int],
    seed: int,
    *,
    alignment: int,
    **parameters: Any,
) -> Packing:
    """With room for alignment, of every strategy: the definition's samples of rounded documents,
    each piece up to its document's end."""
    rounded = [-(-length // alignment) * alignment for length in lengths]
    packing = definition(rounded, buckets, seed, **parameters)
    samples = {
        capacity: [
            [Segment(d, begin, min(length, lengths[d] - begin)) for d, begin, length in sample]
            for sample in bucket
        ]
        for capacity, bucket in packing.buckets.items()
    }
    placed = Counter(
        (d, begin + i)
        for bucket in samples.values()
        for sample in bucket
        for d, begin, length in sample
        for i in range(length)
    )
    return Packing(samples, sum(lengths) - len(placed), placed.total() - len(placed))
