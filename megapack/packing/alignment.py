"""Room for segments that begin at multiples of a number, as context parallelism needs them.

A strategy is given every document length rounded up to the alignment, and afterwards the segments
their true lengths. Capacities are multiples, so strategies cut at multiples only (the windows of
`seamless` begin anywhere, but each is a sample by itself): a document ends inside of its last
segment, every other one is full, and a sample whose rounded segments fit holds them with each at
a multiple of the alignment. What lies between two of them is padding like any other.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megapack.errors import ConfigError

__all__ = ["check_alignment", "rounded_up", "with_true_lengths"]

Lengths = NDArray[np.int32] | NDArray[np.int64]

_INT32_MAX = (1 << 31) - 1
_PIECES = ("atom_size", "min_bucket")  # parameters that say where documents are cut


def check_alignment(alignment: int, capacities: list[int], parameters: Mapping[str, Any]) -> None:
    """Refuse what would cut documents elsewhere than at multiples. Raises ConfigError."""
    sizes = [("bucket", capacity) for capacity in capacities]
    sizes += [(name, parameters[name]) for name in _PIECES if parameters.get(name) is not None]
    for name, size in sizes:
        if size % alignment:
            raise ConfigError(f"{name} {size:,} is no multiple of the alignment {alignment:,}")


def rounded_up(lengths: Lengths, alignment: int) -> tuple[Lengths, Lengths]:
    """Every length rounded up, and the lengths themselves, both of a type that holds either."""
    if alignment == 1:
        return lengths, lengths
    if lengths.max(initial=0) > _INT32_MAX - alignment:
        lengths = lengths.astype(np.int64)
    return (lengths + (alignment - 1)) // alignment * alignment, lengths


def with_true_lengths(arrays: Mapping[str, Any], lengths: Lengths) -> dict[str, Any]:
    """What a strategy made of rounded lengths, with segments that end where documents do.

    Args:
        arrays: of a strategy.
        lengths: the documents' own.
    """
    documents, begin = arrays["segment_document"], arrays["segment_begin"]
    length = np.minimum(arrays["segment_length"], lengths[documents] - begin).astype(np.int32)
    # Dropped and repeated tokens were counted with the roundings.
    repeated = _repeated_tokens(documents, begin, length) if arrays["repeated_tokens"] else 0
    placed = int(length.sum(dtype=np.int64))
    return {
        **arrays,
        "segment_length": length,
        "repeated_tokens": repeated,
        "dropped_tokens": int(lengths.sum(dtype=np.int64)) - placed + repeated,
    }


def _repeated_tokens(documents: Lengths, begin: Lengths, length: NDArray[np.int32]) -> int:
    """How many tokens are in more than one segment, each counted once for every time but one."""
    order = np.lexsort((begin, documents))
    begins, ends = begin[order].astype(np.int64), (begin + length)[order].astype(np.int64)
    same = np.concatenate([[False], np.diff(documents[order]) == 0])
    # How far the segments before reach, counted in a place of its own for every document.
    base = np.cumsum(~same) * (ends.max(initial=0) + 1)
    reached = np.roll(np.maximum.accumulate(base + ends), 1) - base
    return int(np.where(same, np.minimum(ends, reached) - begins, 0).clip(0).sum())
