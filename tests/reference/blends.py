"""Source of every position of a blend: the definition of ``_core.Blend``.

The sources are the leaves of a Huffman tree of their integer weights (among equal weights the
earlier source first, a source before a joined pair). The lighter half of a pair takes ``floor(m a +
1/2 - 2^-64)`` of its first m positions, where a is its share of the pair, to the nearest 2^-64; the
heavier half takes the others.
"""

from __future__ import annotations

import heapq
from fractions import Fraction
from math import floor
from typing import NamedTuple

UNIT = Fraction(1, 2**64)
HALF = Fraction(1, 2)


class Pair(NamedTuple):
    light: Pair | int
    heavy: Pair | int
    light_share: Fraction

    def before(self, position: int) -> int:
        """Return how many of the first ``position`` positions belong to the lighter half."""
        return floor(position * self.light_share + HALF - UNIT)


def tree(weights: list[int]) -> Pair | int:
    nodes: list[tuple[int, int, Pair | int]] = [(w, i, i) for i, w in enumerate(weights)]
    heapq.heapify(nodes)
    for age in range(len(weights), 2 * len(weights) - 1):
        light_weight, _, light = heapq.heappop(nodes)
        heavy_weight, _, heavy = heapq.heappop(nodes)
        total = light_weight + heavy_weight
        share = Fraction(light_weight, total) if total else Fraction(0)
        nearest = floor(share / UNIT + HALF) * UNIT
        heapq.heappush(nodes, (total, age, Pair(light, heavy, nearest)))
    return nodes[0][2]


def locate(root: Pair | int, position: int) -> tuple[int, int]:
    """Return (source, number of earlier positions of the source) of a position."""
    node = root
    while isinstance(node, Pair):
        light = node.before(position)
        if node.before(position + 1) > light:
            node, position = node.light, light
        else:
            node, position = node.heavy, position - light
    return node, position


def taken(root: Pair | int, end: int) -> dict[int, int]:
    """Return how often every source is taken in positions [0, end)."""
    if not isinstance(root, Pair):
        return {root: end}
    light = root.before(end)
    return taken(root.light, light) | taken(root.heavy, end - light)
