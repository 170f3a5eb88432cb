"""In which order the buckets come: proportional, Dataset Decomposition's curricula, sequential.

All of them visit the same samples; they differ in when. An epoch is ``num_cycles`` equal cycles
(the curriculum starts over in each), and inside a cycle every bucket has odds: with odds ``o`` it
is used up after a share ``1 / o`` of the time of a bucket with odds 1 (Dataset Decomposition, arXiv
2405.13226, "sampling odds").
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from megapack import _core
from megapack.errors import ConfigError

__all__ = ["ORDERS", "Order"]


@dataclass(frozen=True)
class Order:
    """One way to order buckets.

    Attributes:
        meaning: one line for people.
        odds: number of buckets -> odds of each, shortest first.
        num_cycles: cycles per epoch unless the user says otherwise.
        times: of the draws: stratified, so that every window holds its share; plainly random; or
            bucket after bucket.
    """

    meaning: str
    odds: Callable[[int], list[float]]
    num_cycles: int = 1
    times: Literal["spread", "random", "consecutive"] = "spread"

    @property
    def shuffled(self) -> bool:
        """Whether samples are shuffled, and the largest bucket comes first."""
        return self.times != "consecutive"

    def cycle(
        self, counts: NDArray[np.int64], key: int, *, largest_first: bool
    ) -> _core.CycleOrder:
        """One cycle, in which bucket b is drawn ``counts[b]`` times."""
        odds = np.array(self.odds(len(counts)), np.float64)
        return _core.CycleOrder(counts, odds, key, self.times, largest_first and self.shuffled)


def _equal(num_buckets: int) -> list[float]:
    return [1.0] * num_buckets


def _linear(num_buckets: int) -> list[float]:
    return [float(num_buckets - i) for i in range(num_buckets)]


def _power(base: int) -> Callable[[int], list[float]]:
    return lambda num_buckets: [float(base ** (num_buckets - 1 - i)) for i in range(num_buckets)]


def _reverse(odds: Callable[[int], list[float]]) -> Callable[[int], list[float]]:
    return lambda num_buckets: odds(num_buckets)[::-1]


def _curriculum(meaning: str, odds: Callable[[int], list[float]]) -> Order:
    return Order(meaning, odds, num_cycles=8)


ORDERS = {
    "proportional": Order("every window holds the buckets in proportion to their tokens", _equal),
    "uniform": Order("all draws of an epoch in random order (odds 1:1:1)", _equal, times="random"),
    "natural": Order("another name of uniform", _equal, times="random"),
    "grow-linear": _curriculum("short buckets earlier, odds ..., 3, 2, 1", _linear),
    "grow-p2": _curriculum("short buckets earlier, odds ..., 4, 2, 1", _power(2)),
    "grow-p100": _curriculum("short buckets earlier, odds ..., 10000, 100, 1", _power(100)),
    "shrink-linear": _curriculum("long buckets earlier, odds 1, 2, 3, ...", _reverse(_linear)),
    "shrink-p2": _curriculum("long buckets earlier, odds 1, 2, 4, ...", _reverse(_power(2))),
    "shrink-p100": _curriculum("long buckets earlier, odds 1, 100, ...", _reverse(_power(100))),
    "sequential": Order(
        "bucket after bucket, samples as the index has them (debugging)",
        _equal,
        times="consecutive",
    ),
}


def order_named(name: str) -> Order:
    """The order of that name. Raises ConfigError with the names there are."""
    if name not in ORDERS:
        raise ConfigError(f"order is {name!r}; it must be one of {', '.join(ORDERS)}")
    return ORDERS[name]
