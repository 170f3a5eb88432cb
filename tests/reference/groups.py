"""Groups of documents: the definition.

A strategy packs a group as one document. It gets the tokens of each group, in the order of their
first documents; a group that no bucket holds comes in several parts, cut before the document that
would exceed the largest bucket. Token t of a part in a sample is then replaced by the token of its
document.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from reference.common import Packing, Segment, places


class Grouped(NamedTuple):
    """Packing in documents; for every segment, whether it continues the group of the segment before
    it in its sample; and how many groups there are, fit no bucket, and are cut."""

    packing: Packing
    joined: list[bool]
    num_groups: int
    num_longer: int
    num_cut: int


def units_of(ids: list[int], lengths: list[int], capacity: int) -> list[list[int]]:
    """Return the documents of every part, in the order in which parts are packed."""
    members: dict[Any, list[int]] = {}
    for document, group in enumerate(ids):
        members.setdefault(group if group >= 0 else ("alone", document), []).append(document)
    units = []
    for documents in members.values():
        total = sum(lengths[d] for d in documents)
        counts = sum(lengths[d] > 0 for d in documents) > 1
        units.append([])
        for d in documents:
            full = sum(lengths[e] for e in units[-1]) + lengths[d] > capacity
            if total > capacity and counts and units[-1] and full:
                units.append([])
            units[-1].append(d)
    return units


def grouped(
    definition: Callable[..., Packing],
    ids: list[int],
    lengths: list[int],
    buckets: list[int],
    seed: int,
    *,
    alignment: int = 1,
    fim_room: int = 0,
    **parameters: Any,
) -> Grouped:
    """Pack groups of documents with a strategy."""
    given = [places(length, buckets[-1], alignment, fim_room) for length in lengths]
    rounded = [len(samples_of) for samples_of in given]
    units = units_of(ids, rounded, buckets[-1])
    sizes = [sum(rounded[d] for d in unit) for unit in units]
    made = definition(sizes, buckets, seed, **parameters)
    joined: list[bool] = []
    samples_of: dict[int, list[list[Segment]]] = {}
    whole = set()
    for capacity, samples in made.buckets.items():
        samples_of[capacity] = []
        for sample in samples:
            samples_of[capacity].append([])
            for unit, begin, length in sample:
                # Token by token: its document, and its position there.
                tokens = [(d, t) for d in units[unit] for t in given[d]]
                part = [(d, t) for d, t in tokens[begin : begin + length] if t is not None]
                if length == len(tokens):
                    whole.add(tuple(units[unit]))
                positions_of: dict[int, list[int]] = {}
                for d, t in part:
                    positions_of.setdefault(d, []).append(t)
                samples_of[capacity][-1] += [
                    Segment(d, of[0], len(of)) for d, of in positions_of.items()
                ]
            made_here = samples_of[capacity][-1]
            for place, segment in enumerate(made_here):
                before = ids[made_here[place - 1].document] if place else -1
                joined.append(ids[segment.document] == before >= 0)
            if not samples_of[capacity][-1]:  # it held only room
                del samples_of[capacity][-1]
    groups: dict[int, list[int]] = {}
    for d, group in enumerate(ids):
        if group >= 0:
            groups.setdefault(group, []).append(d)
    several = [g for g in groups.values() if sum(lengths[d] > 0 for d in g) > 1]
    num_longer = sum(sum(rounded[d] for d in g) > buckets[-1] for g in several)
    num_cut = sum(tuple(g) not in whole for g in several)
    packing = Packing(samples_of, made.dropped, made.repeated)
    return Grouped(packing, joined, len(several), num_longer, num_cut)
