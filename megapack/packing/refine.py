"""``refine``: pack the histogram of lengths with a linear program, for the strategy ``bucket``.

The greedy rule pads when short documents run out: it chooses one sample at a time. Choosing all
samples together is the cutting stock problem (Gilmore and Gomory 1961). Lengths are rounded up to
a grid; a *pattern* is a multiset of rounded lengths that fits a bucket; a linear program decides
how often to use each pattern, so that all documents fit in the least capacity. Column generation
adds patterns that the program's prices favor (one knapsack solves all capacities).

Patterns are then filled with true lengths: the longest document of each class, and last the longest
document that fits the remaining space, which mostly undoes the rounding. The program runs again on
the remaining documents, and the caller packs what is left after that greedily.

It takes seconds for any number of documents, since it reads only the histogram; it needs highspy.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megapack.errors import ConfigError

GRID_CLASSES = 1024  # lengths are rounded up to 1/1024 of the largest bucket
ROUNDS = 3
MAX_ITERATIONS = 40
LARGEST_GAP = 0.03  # a sample that pads a larger share of its bucket is discarded
# Each sample earns this share of the smallest bucket: the program then prefers several short
# samples to one long sample, so fewer documents are concatenated.
PRICE_OF_A_SAMPLE = 0.1

Counts = NDArray[np.int64]
Pattern = tuple[int, ...]  # rounded lengths in grid units, longest first
Column = tuple[int, Pattern]  # (bucket, pattern)


@dataclass(frozen=True)
class Refined:
    """``count`` samples of ``bucket``; ``lengths``: length -> number of documents in each."""

    bucket: int
    lengths: dict[int, int]
    count: int


def refine(counts: Counts, buckets: list[int]) -> tuple[list[Refined], Counts]:
    """Pack most documents of a histogram: counts[l] documents of length l, ascending buckets.
    Return the samples and the remaining counts. Raises ConfigError if highspy is not installed."""
    unit = -(-buckets[-1] // GRID_CLASSES)
    pool = _Pool(counts)
    samples: list[Refined] = []
    for _ in range(ROUNDS):
        demand = np.zeros(-(-len(counts) // unit) + 1)
        np.add.at(demand, -(-np.arange(len(counts)) // unit), pool.counts)
        if not demand[: buckets[-1] // unit + 1].any():
            break
        program = _Program(demand, buckets, unit)
        samples += _fill_patterns(program.solve(), pool, buckets, unit)
    return samples, pool.counts


def price_of_a_sample(buckets: list[int]) -> float:
    return PRICE_OF_A_SAMPLE * buckets[0]


class _Program:
    """Minimize sum x_p (capacity_p - price) while placing every class, by column generation. The
    solver keeps its basis when patterns are added: each solve starts at the last solution."""

    def __init__(self, demand: NDArray[np.float64], buckets: list[int], unit: int) -> None:
        self._buckets = buckets
        self._units = [capacity // unit for capacity in buckets]
        self._costs = np.array(buckets) - price_of_a_sample(buckets)
        # Leave out a class that exceeds the largest bucket only because it was rounded up.
        self._classes = np.nonzero(demand[: self._units[-1] + 1])[0]
        self._scale = demand.sum() / 1e4  # HiGHS has absolute tolerances
        self._row = np.zeros(self._units[-1] + 1, np.int32)
        self._row[self._classes] = np.arange(len(self._classes))
        self._columns: dict[Column, None] = {}  # in order of discovery
        self._solver = _solver(demand[self._classes] / self._scale)
        self._add(
            (bucket, pattern)
            for g in self._classes.tolist()
            for bucket, room in enumerate(self._units)
            if g <= room
            for pattern in ((g,) * (room // g), (g,))
        )

    def solve(self) -> list[tuple[Column, int]]:
        amounts, prices = self._solve_columns()
        for _ in range(MAX_ITERATIONS):
            if not self._add(self._favorable(prices)):
                break
            amounts, prices = self._solve_columns()
        used = np.rint(amounts * self._scale).astype(np.int64)
        return [(column, int(n)) for column, n in zip(self._columns, used, strict=True) if n > 0]

    def _add(self, columns: Iterable[Column]) -> int:
        """Add new columns to the solver; return their number."""
        new = [c for c in dict.fromkeys(columns) if c not in self._columns]
        self._columns.update(dict.fromkeys(new))
        counts = [Counter(pattern) for _, pattern in new]
        sizes = [len(count) for count in counts]
        costs = np.array([self._costs[bucket] for bucket, _ in new]) / self._buckets[-1]
        self._solver.addCols(
            len(new),
            costs,
            np.zeros(len(new)),
            np.full(len(new), np.inf),
            sum(sizes),
            np.cumsum([0, *sizes[:-1]], dtype=np.int32),
            self._row[[g for count in counts for g in count]],
            np.array([copies for count in counts for copies in count.values()], np.float64),
        )
        return len(new)

    def _solve_columns(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        self._solver.run()
        solution = self._solver.getSolution()
        assert solution.value_valid and solution.dual_valid  # each class alone is a pattern
        prices = np.full(self._units[-1] + 1, -np.inf)
        prices[self._classes] = np.array(solution.row_dual) * self._buckets[-1]
        return np.array(solution.col_value), prices

    def _favorable(self, prices: NDArray[np.float64]) -> Iterator[Column]:
        """Yield, for every class and bucket, the best pattern if its prices exceed its cost."""
        best, choice = _knapsack(prices)
        for bucket, room in enumerate(self._units):
            for g in self._classes[self._classes <= room].tolist():
                gain = prices[g] + best[room - g] - self._costs[bucket]
                if gain > 1e-6 * self._buckets[-1]:
                    yield bucket, tuple(sorted((g, *_unfold(choice, room - g)), reverse=True))


def _solver(demand: NDArray[np.float64]) -> Any:
    """Return a linear program with a row per class, >= its demand, and no columns."""
    try:
        import highspy  # noqa: PLC0415
    except ImportError as error:
        raise ConfigError(
            "refine needs highspy; pip install highspy, or pack without refine"
        ) from error
    solver = highspy.Highs()
    # Primal simplex (4): new columns keep the last solution feasible, but not its prices.
    options = {"output_flag": False, "solver": "simplex", "simplex_strategy": 4, "parallel": "off"}
    for option, value in options.items():
        solver.setOptionValue(option, value)
    empty = np.zeros(0, np.int32)
    solver.addRows(len(demand), demand, np.full(len(demand), np.inf), 0, empty, empty, np.zeros(0))
    return solver


def _knapsack(prices: NDArray[np.float64]) -> tuple[NDArray[np.float64], list[int]]:
    """Return best[s], the highest price of lengths up to s in all, and one length (0: none)."""
    best = np.zeros(len(prices))
    choice = [0] * len(prices)
    for s in range(1, len(prices)):
        values = prices[1 : s + 1] + best[s - 1 :: -1]
        g = int(np.argmax(values))
        best[s] = best[s - 1]
        if values[g] > best[s]:
            best[s], choice[s] = values[g], g + 1
    return best, choice


def _unfold(choice: list[int], room: int) -> Iterator[int]:
    while room > 0:
        if choice[room] == 0:
            room -= 1
        else:
            yield choice[room]
            room -= choice[room]


class _Pool:
    def __init__(self, counts: Counts) -> None:
        self.counts = counts.copy()
        self._present: list[int] = np.nonzero(counts)[0].tolist()

    def longest(self, low: int, high: int, used: Counter[int]) -> int | None:
        """Return the longest length in [low, high] of which more documents remain than are used."""
        i = bisect.bisect_right(self._present, high) - 1
        while i >= 0 and self._present[i] >= low:
            length = self._present[i]
            if self.counts[length] > used[length]:
                return length
            i -= 1
        return None

    def take(self, lengths: Counter[int], repeats: int) -> None:
        for length, copies in lengths.items():
            self.counts[length] -= copies * repeats
            if self.counts[length] == 0:
                self._present.remove(length)


def _fill_patterns(
    plan: list[tuple[Column, int]], pool: _Pool, buckets: list[int], unit: int
) -> Iterator[Refined]:
    """Fill planned patterns with true lengths, large buckets first, until documents run out."""
    for (bucket, pattern), planned in sorted(plan, key=lambda p: (-p[0][0], p[0][1])):
        remaining = planned
        while remaining > 0:
            lengths = _true_lengths(pattern, pool, buckets[bucket], unit)
            if lengths is None:
                break
            repeats = min(remaining, *(int(pool.counts[n]) // k for n, k in lengths.items()))
            pool.take(lengths, repeats)
            remaining -= repeats
            yield Refined(bucket, dict(sorted(lengths.items(), reverse=True)), repeats)


def _true_lengths(pattern: Pattern, pool: _Pool, capacity: int, unit: int) -> Counter[int] | None:
    lengths: Counter[int] = Counter()
    space = capacity
    for i, g in enumerate(pattern):
        if i < len(pattern) - 1:
            length = pool.longest((g - 1) * unit + 1, g * unit, lengths)
        else:
            length = pool.longest((g - 3) * unit, space, lengths)
        if length is None:
            return None
        lengths[length] += 1
        space -= length
    return lengths if space <= LARGEST_GAP * capacity else None
