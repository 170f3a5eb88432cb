"""Comparing runs by their logs: final perplexity and perplexity ranking.

Definitions of the atom-size paper, A.6: the last epoch is cut into 100 ranges of 0.01 epoch; in
each, every run has an average perplexity and a rank; the ranking is the mean rank, the final
perplexity that of the last range. Epochs, not steps, because padding changes the steps per epoch.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megapack.errors import DataError
from megapack.training.run.directory import RunDirectory, read_jsonl

__all__ = ["Curve", "Standing", "compare", "read_curve", "smooth"]

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Curve:
    """Training perplexity of one run over epochs.

    Attributes:
        epoch: (steps + 1,) where every step begins and, last, where the run ends.
        perplexity: (steps,) of every step.
    """

    epoch: Floats
    perplexity: Floats

    def average(self, begin: float, end: float) -> float:
        """Mean perplexity of ``[begin, end)`` epochs; a step counts by its part inside."""
        inside = np.minimum(self.epoch[1:], end) - np.maximum(self.epoch[:-1], begin)
        inside = np.maximum(inside, 0.0)
        if inside.sum() <= 0:
            raise DataError(f"the run has no step between epochs {begin:g} and {end:g}")
        return float((self.perplexity * inside).sum() / inside.sum())


@dataclass(frozen=True)
class Standing:
    """One run among others."""

    final_perplexity: float
    mean_rank: float


def read_curve(run_dir: str | Path) -> Curve:
    """The curve in ``log.jsonl`` of a run directory.

    Raises:
        DataError: the log is empty.
        OSError: there is no log.
    """
    path = RunDirectory(run_dir).log
    lines = [line for line in read_jsonl(path) if line["loss"] is not None]
    if not lines:
        raise DataError(f"{path} has no steps")
    begins = [line["epoch"] for line in lines]
    end = lines[-1]["epoch_end"]
    perplexities = [math.exp(min(line["loss"], 700.0)) for line in lines]
    return Curve(np.array([*begins, end]), np.array(perplexities))


def compare(curves: Mapping[str, Curve], num_ranges: int = 100) -> dict[str, Standing]:
    """Final perplexity and mean rank of every run, over the last epoch all of them finished.

    Where a run is shorter than an epoch, over the part of it that all have.

    Raises:
        DataError: a run has no step there.
    """
    common = min(curve.epoch[-1] for curve in curves.values())
    end = max(1, math.floor(common + 1e-9)) if common > 1 - 1e-9 else common
    edges = np.linspace(max(0.0, end - 1), end, num_ranges + 1)
    table = np.array(
        [[curve.average(a, b) for a, b in itertools.pairwise(edges)] for curve in curves.values()]
    )
    ranks = np.array([_ranks(column) for column in table.T]).mean(axis=0)
    return {name: Standing(float(table[i, -1]), float(ranks[i])) for i, name in enumerate(curves)}


def _ranks(values: Floats) -> Floats:
    """1 for the smallest; equal values share the mean of their ranks."""
    below = (values[None, :] < values[:, None]).sum(axis=1)
    equal = (values[None, :] == values[:, None]).sum(axis=1)
    ranks: Floats = below + (equal + 1) / 2.0
    return ranks


def smooth(values: Sequence[float], alpha: float) -> list[float]:
    """Exponential moving average for plots (A.7), without the bias of its beginning.

    ``min(sqrt(alpha), 0.999)`` is the weight of the past, as the factor in the paper is near 1.
    """
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha is {alpha}; it must be within 0 and 1")
    weight = min(math.sqrt(alpha), 0.999)
    total, norm, result = 0.0, 0.0, []
    for value in values:
        total = weight * total + (1 - weight) * value
        norm = weight * norm + (1 - weight)
        result.append(total / norm)
    return result
