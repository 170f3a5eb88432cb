"""Plain-Python definitions of all packing strategies, written to be read.

Each is ``definition(lengths, buckets, seed, **parameters) -> Packing``, with the names, parameters
and defaults of ``megapack.packing.STRATEGIES``. The C++ core must return the same samples, segment
by segment.
"""

from __future__ import annotations

from reference.buckets import bucket, bucket_llm, bucket_v0, decompose
from reference.common import Packing, Segment, aligned
from reference.fits import best_fit_decreasing, first_fit_decreasing, seamless
from reference.streams import bucket_naive, concat, length_sorted, next_fit, pad

_ALL = (
    *(pad, concat, next_fit, length_sorted, first_fit_decreasing, best_fit_decreasing, seamless),
    *(bucket_naive, bucket_v0, bucket_llm, bucket, decompose),
)
DEFINITIONS = {definition.__name__: definition for definition in _ALL}

__all__ = ["DEFINITIONS", "Packing", "Segment", "aligned"]
