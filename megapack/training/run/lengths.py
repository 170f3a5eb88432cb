"""The steps of a run whose corpus does not exist yet, from lengths of its documents."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megapack.data.run import PlannedRun, plan_steps
from megapack.errors import ConfigError
from megapack.packing import pack
from megapack.storage.lengths import read_lengths_file
from megapack.training.config import PretrainConfig

__all__ = ["draw_lengths", "read_lengths", "steps_from_lengths"]

_LAW = "lognormal:"


def steps_from_lengths(
    config: PretrainConfig, source: str, buckets: Sequence[int] | None
) -> PlannedRun:
    """What the run would be on such documents, packed by strategy bucket.

    Args:
        config: the run; its data are not opened.
        source: of ``read_lengths``.
        buckets: capacities; None: powers of two from 1,024 on that divide a micro batch.

    Raises:
        ConfigError: sizes that do not fit.
    """
    largest = config.data.micro_batch_tokens
    usual = [2**k for k in range(10, 15) if largest % 2**k == 0] or [largest]
    index = pack(read_lengths(source, config.seed), "bucket", buckets=list(buckets or usual))
    return plan_steps(config, [index])


def read_lengths(source: str, seed: int) -> NDArray[Any]:
    """Tokens per document.

    Args:
        source: a .npy file of integers, or ``lognormal:MEAN,MEDIAN,DOCUMENTS`` (of FineWeb-Edu,
            999 and 603).
        seed: of the draws.

    Raises:
        ConfigError: neither.
        DataError: the file holds something else.
        OSError: it cannot be read.
    """
    if source.startswith(_LAW):
        try:
            mean, median, count = map(float, source.removeprefix(_LAW).split(","))
        except ValueError:
            raise ConfigError(f"{source!r} is not {_LAW}MEAN,MEDIAN,DOCUMENTS") from None
        return draw_lengths(mean, median, round(count), seed)
    return read_lengths_file(source)


def draw_lengths(mean: float, median: float, count: int, seed: int) -> NDArray[np.int64]:
    """Lengths of a log-normal law, at least 1. Raises ConfigError: no such law has these."""
    if not 1 <= median <= mean or count < 1:
        raise ConfigError(
            f"a law of mean {mean:g}, median {median:g} and {count} documents; they must be "
            "positive, and the mean is not below the median"
        )
    sigma = math.sqrt(2 * math.log(mean / median))
    values = np.random.default_rng(seed).lognormal(math.log(median), sigma, count)
    return np.maximum(np.rint(values), 1).astype(np.int64)
