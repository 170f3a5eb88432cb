"""Training, validation and test documents: by position (Megatron's meaning) or by a hash."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from megapack.errors import ConfigError

__all__ = ["SPLIT_NAMES", "hashed_split", "ordered_split", "parse_split"]

SPLIT_NAMES = ("train", "valid", "test")


def parse_split(text: str) -> tuple[float, ...]:
    """``"98,1,1"`` -> (98.0, 1.0, 1.0): weights of train, valid and test; missing ones are 0.

    Raises:
        ConfigError: not one to three numbers, a negative one, or nothing above 0.
    """
    try:
        weights = [float(part) for part in text.split(",")]
    except ValueError as error:
        raise ConfigError(f"split {text!r} is not a list of numbers as 98,1,1") from error
    usable = len(weights) <= len(SPLIT_NAMES) and min(weights) >= 0 < sum(weights) < float("inf")
    if not usable:
        raise ConfigError(f"split {text!r} must have one to three weights, none below 0, not all 0")
    return tuple(weights + [0.0] * (len(SPLIT_NAMES) - len(weights)))


def _bounds(weights: Sequence[float]) -> list[float]:
    """Running sums of the normalized weights, from 0 to 1."""
    total = sum(weights)
    return [0.0, *itertools.accumulate(weight / total for weight in weights)]


def ordered_split(weights: Sequence[float], num_documents: int) -> list[range]:
    """Consecutive ranges of documents, rounded as megatron-core rounds them."""
    bounds = _bounds(weights)
    at = [round(bound * float(num_documents)) for bound in bounds]
    return [range(begin, end) for begin, end in itertools.pairwise(at)]


def hashed_split(weights: Sequence[float], hashes: NDArray[np.uint64]) -> NDArray[np.int64]:
    """The split of every document: uint64 hashes are uniform, so shares follow the weights.

    A document keeps its split when the corpus grows or is read in another order.
    """
    bounds = np.array(_bounds(weights)[1:-1])
    # 53 bits are what a double holds exactly.
    fractions = (hashes >> np.uint64(11)).astype(np.float64) / 2.0**53
    result: NDArray[np.int64] = np.searchsorted(bounds, fractions, side="right")
    return result
