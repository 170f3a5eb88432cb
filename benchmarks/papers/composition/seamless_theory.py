"""What Seamless Packing expects of a corpus, beside what it does (section 3.4 of the paper).

The paper derives from a histogram how many documents slide and how many tokens are left to stage
two, supposing that lengths are uniform between multiples of the sample length.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from megapack import _core
from megapack.packing.ratios import exact_ratio, largest_overlap

__all__ = ["SeamlessStageOne", "expect_seamless", "measure_seamless"]


@dataclass(frozen=True, kw_only=True)
class SeamlessStageOne:
    """num_sliding: documents in overlapping windows (N_sw); short_tokens: left to stage two, of
    documents longer than a sample (N_token_short)."""

    num_sliding: float
    short_tokens: float


def expect_seamless(
    num_documents: NDArray[np.int64] | list[int], capacity: int, r_max: float
) -> SeamlessStageOne:
    """Equations 6 and 7.

    Equation 6 is printed with both sums running over k = ceil(1 / r_max); its first sum must end
    before that (k r_max, the share that slides, would exceed 1), which is also what reproduces the
    paper's 6716.

    Args:
        num_documents: T_k, documents with a length in (k capacity, (k + 1) capacity], k = 1, 2, ...
        capacity: L_seq, tokens.
        r_max: largest repeated share, 0 < r_max <= 1.

    Raises:
        ValueError: r_max out of range.
    """
    if not 0 < r_max <= 1:
        raise ValueError(f"r_max is {r_max}; it must be above 0 and at most 1")
    all_slide_from = math.ceil(1 / Fraction(*exact_ratio(r_max)))
    sliding = short = 0.0
    for k, count in enumerate(num_documents, start=1):
        share = k * r_max if k < all_slide_from else 1.0
        sliding += share * float(count)
        short += (1 - share) * float(count) * (1 - share) * capacity / 2
    return SeamlessStageOne(num_sliding=sliding, short_tokens=short)


def measure_seamless(
    lengths: NDArray[np.int32] | NDArray[np.int64],
    capacity: int,
    r_max: float,
    *,
    placement: str = "exact",
) -> tuple[SeamlessStageOne, SeamlessStageOne]:
    """(expected from the histogram of ``lengths``, what the strategy does with them).

    Documents of at most ``capacity`` tokens are in neither: the theory leaves them out.
    """
    long = lengths[lengths > capacity]
    counts = np.bincount((long - 1) // capacity)[1:]
    share = largest_overlap(r_max, placement, capacity)
    checked = _core.DocumentLengths(np.ascontiguousarray(long))
    rules = {"capacity": capacity, "r_max": share, "placement": placement}
    stage = _core.seamless_stage_one(checked, rules)
    done = SeamlessStageOne(num_sliding=stage["num_sliding"], short_tokens=stage["short_tokens"])
    return expect_seamless(counts, capacity, r_max), done
