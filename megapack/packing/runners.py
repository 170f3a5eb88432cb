"""One function per strategy: checked parameters in, the arrays of the C++ core out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megapack import _core
from megapack.packing.bucket_choice import choose_bucket_way
from megapack.packing.ratios import exact_ratio, largest_overlap

__all__ = ["Request"]


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a runner works on; ``buckets`` ascends."""

    lengths: _core.DocumentLengths
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
        largest_overlap(
            request.parameters["r_max"], request.parameters["placement"], request.capacity
        ),
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
        padding_threshold=exact_ratio(request.parameters["padding_threshold"]),
        pairs=pairs,
        shuffle_segments=True,
    )
    drain = request.parameters["pool"] == "drain"
    pool_size = request.parameters["pool_size"]
    if drain:
        return _core.drain_buckets(request.lengths, rules, [], pool_size, request.common)
    return _core.stream_buckets(request.lengths, rules, pool_size, request.common)


def run_bucket(request: Request) -> dict[str, Any]:
    choice = choose_bucket_way(
        request.lengths,
        request.buckets,
        promote=request.parameters["promote"],
        padding_threshold=exact_ratio(request.parameters["padding_threshold"]),
        refine=request.parameters["refine"],
        threads=request.threads,
    )
    # Patterns for all documents need all documents in one pool.
    pool_size = max(1, len(request.lengths)) if choice.given else request.parameters["pool_size"]
    packed = _core.drain_buckets(
        request.lengths, choice.rules, choice.given, pool_size, request.common
    )
    return packed | {"decisions": choice.decisions}


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
