"""Shared parts of the definitions of all strategies: segments, samples, cutting, joining."""

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
    """Bucket capacity -> its samples, in order; and the dropped and repeated tokens."""

    buckets: dict[int, list[Sample]]
    dropped: int = 0
    repeated: int = 0


def whole(lengths: list[int], order: Iterable[int] | None = None) -> list[Segment]:
    """Return non-empty documents, in file order or in the given order."""
    order = range(len(lengths)) if order is None else order
    return [Segment(d, 0, lengths[d]) for d in order if lengths[d] > 0]


def head_and_rest(segment: Segment, tokens: int) -> tuple[Segment, Segment]:
    document, begin, length = segment
    return Segment(document, begin, tokens), Segment(document, begin + tokens, length - tokens)


def cut(documents: list[Segment], capacity: int) -> tuple[list[Segment], list[Segment]]:
    """Return full chunks, and the remainder of each document; both in the order of documents."""
    chunks, rests = [], []
    for remainder in documents:
        while remainder.length >= capacity:
            chunk, remainder = head_and_rest(remainder, capacity)  # noqa: PLW2901
            chunks.append(chunk)
        if remainder.length > 0:
            rests.append(remainder)
    return chunks, rests


def joined(segments: Iterable[Segment], capacity: int) -> list[Sample]:
    """Cut a stream every ``capacity`` tokens; the last sample may be short."""
    samples: list[Sample] = []
    room = 0
    for remainder in segments:
        while remainder.length > 0:
            if room == 0:
                samples.append([])
                room = capacity
            piece, remainder = head_and_rest(remainder, min(room, remainder.length))  # noqa: PLW2901
            samples[-1].append(piece)
            room -= piece.length
    return samples


def tokens(sample: Sample) -> int:
    return sum(segment.length for segment in sample)


def without_partial(samples: list[Sample], capacity: int) -> tuple[list[Sample], int]:
    """``last="drop"``: return the samples without a short last one, and its number of tokens."""
    if samples and tokens(samples[-1]) < capacity:
        return samples[:-1], tokens(samples[-1])
    return samples, 0


def places(length: int, capacity: int, alignment: int, fim_room: int) -> list[int | None]:
    """Return the input of a strategy for a document: its tokens, and None for room.

    The room for sentinels is before the last token, the padding of the alignment at the end.
    """
    has_room = 1 < length <= capacity - fim_room
    room: list[int | None] = [None] * (fim_room if has_room else 0)
    given = [*range(length - 1), *room, *range(max(0, length - 1), length)]
    return given + [None] * (-len(given) % alignment)


def aligned(
    definition: Callable[..., Packing],
    lengths: list[int],
    buckets: list[int],
    seed: int,
    *,
    alignment: int = 1,
    fim_room: int = 0,
    **parameters: Any,
) -> Packing:
    """Apply a strategy with room for alignment and sentinels: pack the ``places`` of the documents,
    and keep the tokens of each piece; pieces without tokens are dropped."""
    given = [places(length, buckets[-1], alignment, fim_room) for length in lengths]
    packing = definition(
        [len(tokens_and_room) for tokens_and_room in given], buckets, seed, **parameters
    )
    samples: dict[int, list[Sample]] = {}
    for capacity, bucket in packing.buckets.items():
        samples[capacity] = []
        for sample in bucket:
            kept: Sample = []
            for d, begin, length in sample:
                without_room = [t for t in given[d][begin : begin + length] if t is not None]
                kept += [Segment(d, without_room[0], len(without_room))] if without_room else []
            samples[capacity] += [kept] if kept else []
    segments = [s for bucket in samples.values() for sample in bucket for s in sample]
    placed = Counter((d, begin + i) for d, begin, length in segments for i in range(length))
    return Packing(samples, sum(lengths) - len(placed), placed.total() - len(placed))
