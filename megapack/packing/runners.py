"""One function per strategy: checked parameters in, the arrays of the C++ core out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megapack import _core

__all__ = ["Request"]

# `promote="auto"` leaves a packing alone that pads less than one token in so many.
_PADDING_WORTH_SAVING = 1000


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a runner works on; ``lengths`` is int32 or int64, ``buckets`` ascends."""

    lengths: NDArray[np.int32] | NDArray[np.int64]
    buckets: list[int]
    parameters: dict[str, Any]
    seed: int
    threads: int
    progress: Callable[[int, int], None] | None = None
    wide_ids: bool = False

    @property
    def capacity(self) -> int:
        return self.buckets[-1]

    @property
    def common(self) -> _core.PackingCommon:
        return _core.PackingCommon(
            seed=self.seed, threads=self.threads, wide_ids=self.wide_ids, progress=self.progress
        )

    def atom_size(self) -> int:
        """The parameter, or the capacity; one of the two must divide the other."""
        size = self.parameters["atom_size"]
        if size is None:
            return self.capacity
        if self.capacity % size and size % self.capacity:
            raise ValueError(
                f"atom_size is {size} and the capacity {self.capacity}; one must be a multiple of "
                "the other"
            )
        return int(size)


def run_pad(request: Request) -> dict[str, Any]:
    return _core.pack_pad(request.lengths, request.capacity, request.atom_size(), request.common)


def run_concat(request: Request) -> dict[str, Any]:
    return _core.pack_concat(
        request.lengths,
        request.capacity,
        request.atom_size(),
        request.parameters["last"] == "drop",
        request.parameters["shuffle"],
        request.common,
    )


def run_next_fit(request: Request) -> dict[str, Any]:
    return _core.pack_next_fit(
        request.lengths, request.capacity, request.parameters["shuffle"], request.common
    )


def run_length_sorted(request: Request) -> dict[str, Any]:
    return _core.pack_length_sorted(request.lengths, request.capacity, request.common)


def run_first_fit_decreasing(request: Request) -> dict[str, Any]:
    return _fit_decreasing(request, best=False)


def run_best_fit_decreasing(request: Request) -> dict[str, Any]:
    return _fit_decreasing(request, best=True)


def _fit_decreasing(request: Request, *, best: bool) -> dict[str, Any]:
    return _core.pack_fit_decreasing(
        request.lengths,
        request.capacity,
        request.parameters["extra_capacity"],
        best,
        request.common,
    )


def run_seamless(request: Request) -> dict[str, Any]:
    return _core.pack_seamless(
        request.lengths,
        request.capacity,
        request.parameters["r_max"],
        request.parameters["placement"],
        request.parameters["extra_capacity"],
        request.parameters["last"] == "drop",
        request.common,
    )


def run_bucket_naive(request: Request) -> dict[str, Any]:
    return _core.pack_bucket_naive(
        request.lengths, request.buckets, request.parameters["shuffle"], request.common
    )


def run_bucket_v0(request: Request) -> dict[str, Any]:
    return _bucket_llm(request, pairs=False)


def run_bucket_llm(request: Request) -> dict[str, Any]:
    return _bucket_llm(request, pairs=True)


def _bucket_llm(request: Request, *, pairs: bool) -> dict[str, Any]:
    rules = _core.BucketRules(
        capacities=request.buckets,
        overflow="head",
        padding_threshold=request.parameters["padding_threshold"],
        pairs=pairs,
        shuffle_segments=True,
    )
    drain = request.parameters["pool"] == "drain"
    run = _core.drain_buckets if drain else _core.stream_buckets
    return run(request.lengths, rules, request.parameters["pool_size"], request.common)


def run_bucket(request: Request) -> dict[str, Any]:
    promote, decisions = request.parameters["promote"] == "on", {}
    if request.parameters["promote"] == "auto":
        promote, decisions["promote"] = _decide_promote(request)
    packed = _core.drain_buckets(
        request.lengths,
        _bucket_rules(request, promote),
        request.parameters["pool_size"],
        request.common,
    )
    return packed | {"decisions": decisions}


def _bucket_rules(request: Request, promote: bool) -> _core.BucketRules:
    return _core.BucketRules(
        capacities=request.buckets,
        overflow="promote" if promote else "pad",
        padding_threshold=request.parameters["padding_threshold"],
    )


def _decide_promote(request: Request) -> tuple[bool, str]:
    """Drain all documents as one pool, on their histogram, with and without; no sample is made."""
    counts, _ = _core.length_histogram(request.lengths, request.capacity, request.threads)
    tokens = int((counts * np.arange(len(counts))).sum())
    slots = {}
    for promote in (False, True):
        samples = _core.count_bucket_samples(counts, _bucket_rules(request, promote))
        slots[promote] = sum(c * n for c, n in zip(request.buckets, samples, strict=True))
    off, on = slots[False] - tokens, slots[True] - tokens
    promote = on < off and off * _PADDING_WORTH_SAVING > slots[False]
    return promote, (
        f"{'on' if promote else 'off'}: documents shorter than the largest bucket would be padded "
        f"by {_percent(off, slots[False])} without and by {_percent(on, slots[True])} with it"
    )


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole if whole else 0.0:.3f} %"


def run_decompose(request: Request) -> dict[str, Any]:
    largest = request.capacity
    smallest = request.parameters["min_bucket"]
    if smallest is None:
        smallest = min(256, request.buckets[0])
    for name, value in (("min_bucket", smallest), *(("bucket", b) for b in request.buckets)):
        if value & (value - 1):
            raise ValueError(f"{name} is {value}; decompose needs powers of two")
    if smallest > largest:
        raise ValueError(f"min_bucket is {smallest}; the largest bucket is {largest}")
    exponents = range(smallest.bit_length() - 1, largest.bit_length())
    return _core.pack_decompose(request.lengths, [1 << k for k in exponents], request.common)
