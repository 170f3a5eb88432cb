"""``pack``: document lengths in, SampleIndex out."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megapack import _core
from megapack.errors import DataError
from megapack.packing.alignment import check_alignment, rounded_up, with_true_lengths
from megapack.packing.format import lengths_fingerprint
from megapack.packing.index import SampleIndex
from megapack.packing.metrics import DocumentTotals
from megapack.packing.runners import Request
from megapack.packing.strategies import find_strategy

__all__ = ["pack"]

# A histogram of 8 bytes per token of the largest capacity is kept for every pool in work.
MAX_CAPACITY = 1 << 24
_INT32_MAX = (1 << 31) - 1


def pack(
    lengths: ArrayLike,
    strategy: str = "bucket",
    *,
    buckets: int | Iterable[int],
    seed: int = 0,
    threads: int = 1,
    alignment: int = 1,
    preset: str | None = None,
    progress: Callable[[int, int], None] | None = None,
    **parameters: Any,
) -> SampleIndex:
    """Pack documents into samples.

    A pure function of its arguments: ``threads`` changes the time, never the result.

    Args:
        lengths: (num_documents,) integers, tokens per document, its end-of-document token
            included. Documents of length 0 give no segment. int32 is taken without a copy.
        strategy: a name of ``megapack.packing.STRATEGIES``.
        buckets: capacities in tokens; one for the strategies of fixed length.
        seed: every random choice comes from it; 0 to 2**64 - 1.
        threads: how many threads to use.
        alignment: samples have room for every segment to begin at a multiple of this (2 x context
            parallel size), so that ``PackedDataset(alignment=...)`` can place them so. Capacities
            are multiples of it.
        preset: the parameters of a paper, where the strategy has them (``"paper"``).
        progress: called with (work done, all work) a few times a second.
        **parameters: those of the strategy, see its entry in ``STRATEGIES``.

    Returns:
        The index, in memory; ``save`` writes it.

    Raises:
        ValueError: unknown strategy, parameter or preset, a value out of range, bad buckets.
        DataError: a negative length.
    """
    chosen = find_strategy(strategy)
    capacities = _check_buckets(buckets, chosen.many_buckets, strategy)
    if isinstance(seed, bool) or not 0 <= seed < 1 << 64:
        raise ValueError(f"seed is {seed}; it must be from 0 to 2**64 - 1")
    if threads < 1:
        raise ValueError(f"threads is {threads}; it must be at least 1")
    resolved = chosen.resolve(parameters, preset=preset, capacity=capacities[-1])
    check_alignment(alignment, capacities, resolved)
    documents = _check_lengths(lengths)
    totals = _totals(documents, capacities[-1])
    rounded, documents = rounded_up(documents, alignment)
    arrays = chosen.run(
        Request(
            lengths=rounded,
            buckets=capacities,
            parameters=resolved,
            seed=int(seed),
            threads=int(threads),
            progress=progress,
            wide_ids=False,
        )
    )
    if len(documents) <= _INT32_MAX:  # the core is wide in both if it is wide in one
        arrays["segment_document"] = arrays["segment_document"].astype(np.int32, copy=False)
    if alignment > 1:
        arrays = with_true_lengths(arrays, documents, alignment)
        resolved["alignment"] = int(alignment)
    index = SampleIndex(
        **{"decisions": {}, **arrays},
        strategy=strategy,
        parameters=resolved,
        buckets=capacities,
        seed=int(seed),
        documents=totals,
    )
    if index.dropped_tokens:  # its arrays alone do not tell which documents lost tokens
        whole = _core.whole_documents(*index.segment_arrays(), documents)
        index = replace(index, documents=replace(totals, num_whole=whole))
    return index


def _totals(lengths: NDArray[np.int32] | NDArray[np.int64], capacity: int) -> DocumentTotals:
    """All that is kept of the lengths: the array belongs to the caller, who may change it."""
    counted = _core.count_documents(lengths, capacity)
    return DocumentTotals(
        num_documents=len(lengths),
        num_empty=counted["num_empty"],
        num_longer=counted["num_longer"],
        num_tokens=counted["num_tokens"],
        num_whole=None,
        lengths_fingerprint=lengths_fingerprint(lengths),
    )


def _check_buckets(buckets: int | Iterable[int], many: bool, strategy: str) -> list[int]:
    given = list(buckets) if isinstance(buckets, Iterable) else [buckets]
    if not given:
        raise ValueError("buckets is empty; give at least one capacity in tokens")
    for capacity in given:
        integral = isinstance(capacity, numbers.Integral)
        if not integral or not 1 <= int(capacity) <= MAX_CAPACITY:
            raise ValueError(f"bucket {capacity} is not a capacity from 1 to {MAX_CAPACITY} tokens")
    capacities = sorted({int(capacity) for capacity in given})
    if len(capacities) != len(given):
        raise ValueError(f"buckets {given} names a capacity twice")
    if len(capacities) > 1 and not many:
        raise ValueError(f"strategy {strategy!r} has samples of one length; buckets is {given}")
    return capacities


def _check_lengths(lengths: ArrayLike) -> NDArray[np.int32] | NDArray[np.int64]:
    array = np.asarray(lengths)
    if array.size == 0:
        array = array.astype(np.int32)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ValueError(
            f"lengths is of dtype {array.dtype} and shape {array.shape}; it must be a "
            "one-dimensional array of integers, tokens per document"
        )
    if array.dtype not in (np.dtype(np.int32), np.dtype(np.int64)):
        array = array.astype(np.int64)
    array = np.ascontiguousarray(array)
    bits = _core.or_of_lengths(array)
    if bits < 0:
        document = int(np.argmax(array < 0))
        raise DataError(f"document {document} has length {array[document]}; it must not be below 0")
    if array.dtype == np.dtype(np.int64) and bits <= _INT32_MAX:
        array = array.astype(np.int32)
    return array
