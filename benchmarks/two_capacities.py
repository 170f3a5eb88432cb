"""``make bench-two_capacities``: samples of documents with images, compared with a lower bound.

One core, ``pack`` with ``second`` on text and images. The bound is that of a linear program over
patterns (contents of a sample), solved by column generation with lengths rounded down to multiples
of 64 tokens, so no packing needs fewer samples. QUICK=1 takes fewer documents.
"""

from __future__ import annotations

import time

import highspy
import numpy as np
from common import quick, show
from numpy.typing import NDArray

from megapack.packing import pack

Numbers = NDArray[np.int64]


def text_and_images(count: int, seed: int = 0) -> tuple[Numbers, Numbers]:
    """Return tokens and images: 45 % texts, 33 % with one image, 22 % with 2 to 8."""
    chance = np.random.default_rng(seed)
    text = np.exp(chance.normal(6, 1.1, count)).astype(np.int64).clip(8)
    without, single = chance.random(count) < 0.45, chance.random(count) < 0.6
    images = np.select([without, single], [0, 1], chance.integers(2, 9, count))
    return (text + 256 * images).clip(max=8192), images


class _Patterns:
    """The most valuable pattern for every number of units and images, by dynamic programming."""

    def __init__(self, value: NDArray[np.float64], units: int, images: int) -> None:
        self.best = np.zeros((units + 1, images + 1))
        self.last = np.full((units + 1, images + 1, 2), -1)  # document added last; -1: none
        valued = [np.flatnonzero(value[:, k] > 0) for k in range(value.shape[1])]
        for room in range(1, units + 1):
            self.best[room] = self.best[room - 1]
            for k, lengths in enumerate(valued):
                fitting = lengths[(lengths > 0) & (lengths <= room)]
                if k > images or not len(fitting):
                    continue
                values = self.best[room - fitting, : images + 1 - k] + value[fitting, k][:, None]
                chosen, at = values.argmax(axis=0), np.arange(images + 1 - k)
                better = values[chosen, at] > self.best[room, k:] + 1e-12
                self.best[room, k:][better] = values[chosen, at][better]
                self.last[room, k:][better, 0] = fitting[chosen][better]
                self.last[room, k:][better, 1] = k

    def contents(self, room: int, images: int) -> tuple[tuple[int, int], ...]:
        """Return the (units, images) of the documents of the best pattern with this room."""
        documents = []
        while room > 0:
            units, k = self.last[room, images].tolist()
            if units < 0:
                room -= 1
                continue
            documents.append((units, k))
            room, images = room - units, images - k
        return tuple(sorted(documents))


def lower_bound(
    tokens: Numbers, images: Numbers, capacity: int, limit: int, unit: int = 64
) -> float:
    """Return a lower bound of the number of samples; documents below ``unit`` tokens are ignored.
    Farley's bound: the sum of any prices of documents, divided by the best pattern's value."""
    units, room = tokens // unit, capacity // unit
    counts = np.zeros((room + 1, int(images.max()) + 1))
    np.add.at(counts, (units, images), 1)
    counts[0] = 0
    kinds = list(map(tuple, np.argwhere(counts > 0).tolist()))
    row = {kind: i for i, kind in enumerate(kinds)}
    demand = np.array([counts[kind] for kind in kinds])
    program = highspy.Highs()
    program.silent()
    for count in demand.tolist():
        program.addRow(count, highspy.kHighsInf, 0, np.zeros(0, np.int32), np.zeros(0))

    def add(contents: dict[tuple[int, int], int]) -> None:
        rows = np.array([row[kind] for kind in contents], np.int32)
        copies = np.array(list(contents.values()), float)
        program.addCol(1.0, 0.0, highspy.kHighsInf, len(rows), rows, copies)

    for length, k in kinds:
        add({(length, k): min(room // length, limit // k if k else room)})
    bound, known = 0.0, set()
    while True:
        program.run()
        prices = np.maximum(program.getSolution().row_dual, 0)
        value = np.zeros_like(counts)
        for kind, price in zip(kinds, prices, strict=True):
            value[kind] = price
        patterns = _Patterns(value, room, limit)
        bound = max(bound, float(prices @ demand) / max(1.0, patterns.best[-1, -1]))
        ends = [(room, k) for k in range(limit + 1)]
        ends += [(length, limit) for length in range(1, room, max(1, room // 60))]
        new = {patterns.contents(*end) for end in ends if patterns.best[end] > 1 + 1e-6} - known
        if not new or patterns.best[-1, -1] < 1 + 1e-4:
            return bound
        known |= new
        for documents in new:
            add({kind: documents.count(kind) for kind in set(documents)})


def main() -> None:
    tokens, images = text_and_images(20_000 if quick() else 1_000_000)
    rows = []
    for limit in (8, 10, 12, 16):
        begin = time.process_time()
        index = pack(tokens, buckets=8192, second=images, second_capacity=limit)
        seconds = time.process_time() - begin
        metrics = index.metrics()
        bound = lower_bound(tokens, images, 8192, limit)
        sums = max(-(-int(tokens.sum()) // 8192), -(-int(images.sum()) // limit))
        rows.append(
            {
                "images": limit,
                "samples": index.num_samples,
                "bound": round(max(bound, sums)),
                "above %": round(100 * (index.num_samples / max(bound, sums) - 1), 3),
                "tokens filled %": round(100 * (1 - metrics["padding_ratio"]), 3),
                "images filled %": round(100 * (1 - metrics["second_padding_ratio"]), 3),
                "s": round(seconds, 2),
            }
        )
    show("Buckets of 8,192 tokens and so many images", rows)


if __name__ == "__main__":
    main()
