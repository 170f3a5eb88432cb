"""Better samples than the greedy rule finds, for `bucket`: a linear program on the histogram.

The greedy rule pads where short documents are missing: what stands beside a long document should
have been chosen earlier, and for many documents at once. That is the cutting stock problem
(Gilmore and Gomory 1961): lengths are rounded up to a grid, a *pattern* is a multiset of rounded
lengths that fits in a bucket, and a linear program asks how often to use each pattern so that all
documents are placed in the fewest tokens of capacity. Patterns are found when the program's prices
ask for them (column generation; the knapsack is solved for all capacities at once).

The program's answer is then carried out with the true lengths: each pattern takes the longest
documents of its classes and ends with the longest document that fits the space left, so that what
rounding gave away is mostly won back. What remains is packed again, and in the end greedily.

This costs seconds whatever the number of documents, because only the histogram is looked at. It
needs highspy.
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
LARGEST_GAP = 0.03  # a sample that leaves more of its bucket than this is not worth keeping
# A sample saved is worth this share of the smallest bucket in padding: the program then prefers
# several short samples to a long one, and documents are concatenated less.
PRICE_OF_A_SAMPLE = 0.1

Counts = NDArray[np.int64]
Pattern = tuple[int, ...]  # rounded lengths in grid units, longest first
Column = tuple[int, Pattern]  # (bucket, pattern)


@dataclass(frozen=True)
class Refined:
    """``count`` samples of ``bucket`` with these documents: length -> how many of it."""

    bucket: int
    lengths: dict[int, int]
    count: int


def refine(counts: Counts, buckets: list[int]) -> tuple[list[Refined], Counts]:
    """Samples for most documents of a histogram.

    Args:
        counts: counts[l] documents of length l, for l below the largest bucket.
        buckets: ascending capacities.

    Returns:
        The samples, and the counts of the documents that they leave.

    Raises:
        ConfigError: highspy is not installed.
    """
    unit = -(-buckets[-1] // GRID_CLASSES)
    left = _Pool(counts)
    samples: list[Refined] = []
    for _ in range(ROUNDS):
        demand = np.zeros(-(-len(counts) // unit) + 1)
        np.add.at(demand, -(-np.arange(len(counts)) // unit), left.counts)
        if not demand[: buckets[-1] // unit + 1].any():
            break
        program = _Program(demand, buckets, unit)
        samples += _carry_out(program.solve(), left, buckets, unit)
    return samples, left.counts


def price_of_a_sample(buckets: list[int]) -> float:
    return PRICE_OF_A_SAMPLE * buckets[0]


class _Program:
    """minimise sum x_p (capacity_p - price) so that every class is placed, by column generation.

    The solver keeps its basis while patterns are added, so that each solution starts at the last.
    """

    def __init__(self, demand: NDArray[np.float64], buckets: list[int], unit: int) -> None:
        self._buckets = buckets
        self._units = [capacity // unit for capacity in buckets]
        self._costs = np.array(buckets) - price_of_a_sample(buckets)
        # A class that only rounding up makes longer than the largest bucket is not placed.
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
        """How often to use which pattern."""
        amounts, prices = self._solve_columns()
        for _ in range(MAX_ITERATIONS):
            if not self._add(self._worth_adding(prices)):
                break
            amounts, prices = self._solve_columns()
        used = np.rint(amounts * self._scale).astype(np.int64)
        return [(column, int(n)) for column, n in zip(self._columns, used, strict=True) if n > 0]

    def _add(self, columns: Iterable[Column]) -> int:
        """Give the solver the columns that it has not; returns how many."""
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
        answer = self._solver.getSolution()
        assert answer.value_valid and answer.dual_valid  # every class has a pattern of its own
        prices = np.full(self._units[-1] + 1, -np.inf)
        prices[self._classes] = np.array(answer.row_dual) * self._buckets[-1]
        return np.array(answer.col_value), prices

    def _worth_adding(self, prices: NDArray[np.float64]) -> Iterator[Column]:
        """For every class and bucket the best pattern, if its prices exceed its capacity."""
        best, choice = _knapsack(prices)
        for bucket, room in enumerate(self._units):
            for g in self._classes[self._classes <= room].tolist():
                gain = prices[g] + best[room - g] - self._costs[bucket]
                if gain > 1e-6 * self._buckets[-1]:
                    yield bucket, tuple(sorted((g, *_unfold(choice, room - g)), reverse=True))


def _solver(demand: NDArray[np.float64]) -> Any:
    """A linear program of one row per class, >= its demand, and no column yet."""
    try:
        import highspy  # noqa: PLC0415
    except ImportError as error:
        raise ConfigError(
            "refine needs highspy; pip install highspy, or pack without refine"
        ) from error
    solver = highspy.Highs()
    # Primal: the last answer stays feasible when columns come, its prices do not.
    options = {"output_flag": False, "solver": "simplex", "simplex_strategy": 4, "parallel": "off"}
    for option, value in options.items():
        solver.setOptionValue(option, value)
    empty = np.zeros(0, np.int32)
    solver.addRows(len(demand), demand, np.full(len(demand), np.inf), 0, empty, empty, np.zeros(0))
    return solver


def _knapsack(prices: NDArray[np.float64]) -> tuple[NDArray[np.float64], list[int]]:
    """best[s]: the highest price of documents of at most s units; choice[s]: one of them, or 0."""
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
    """Documents left, by length."""

    def __init__(self, counts: Counts) -> None:
        self.counts = counts.copy()
        self._present: list[int] = np.nonzero(counts)[0].tolist()

    def longest(self, low: int, high: int, used: Counter[int]) -> int | None:
        """The longest length in [low, high] of which more documents are left than are used."""
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


def _carry_out(
    plan: list[tuple[Column, int]], left: _Pool, buckets: list[int], unit: int
) -> Iterator[Refined]:
    """The plan with true lengths, large buckets first, as far as there are documents for it."""
    for (bucket, pattern), planned in sorted(plan, key=lambda p: (-p[0][0], p[0][1])):
        wanted = planned
        while wanted > 0:
            lengths = _true_lengths(pattern, left, buckets[bucket], unit)
            if lengths is None:
                break
            repeats = min(wanted, *(int(left.counts[n]) // k for n, k in lengths.items()))
            left.take(lengths, repeats)
            wanted -= repeats
            yield Refined(bucket, dict(sorted(lengths.items(), reverse=True)), repeats)


def _true_lengths(pattern: Pattern, left: _Pool, capacity: int, unit: int) -> Counter[int] | None:
    lengths: Counter[int] = Counter()
    space = capacity
    for i, g in enumerate(pattern):
        if i < len(pattern) - 1:
            length = left.longest((g - 1) * unit + 1, g * unit, lengths)
        else:
            length = left.longest((g - 3) * unit, space, lengths)
        if length is None:
            return None
        lengths[length] += 1
        space -= length
    return lengths if space <= LARGEST_GAP * capacity else None
