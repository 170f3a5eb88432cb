"""Inputs for the packing tests: lengths, buckets and parameters for any strategy."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from hypothesis import strategies as st
from reference import Packing

from megapack.packing import STRATEGIES, Parameter, SampleIndex
from megapack.storage import IndexedDataset, IndexedDatasetBuilder

# Difficult lengths for a capacity of 16.
ADVERSARIAL: dict[str, list[int]] = {
    "no document": [],
    "one empty document": [0],
    "one token": [1],
    "one document of the capacity": [16],
    "one document of twice the capacity": [32],
    "one token more than the capacity": [17],
    "all lengths 1": [1] * 100,
    "all equal": [7] * 50,
    "all just over half": [9] * 33,
    "multiples of the capacity": [16 * k for k in range(6)],
    "one off the multiples": [16 * k + d for k in range(1, 5) for d in (-1, 1)],
    "huge among tiny": [1, 5000, 1, 0, 2, 1, 3001],
    "ascending": list(range(40)),
    "descending": list(range(40))[::-1],
    "alternating": [1, 15] * 20,
    "powers of two": [1 << k for k in range(10)],
    "empty documents between": [0, 5, 0, 0, 11, 16, 0, 3, 0],
}

lengths = st.one_of(
    st.lists(st.integers(0, 40), max_size=40),
    st.lists(st.sampled_from([0, 1, 2, 15, 16, 17, 33]), max_size=60),
    st.lists(st.integers(0, 1000), max_size=8),
)


def write_dataset(prefix: Path, lengths: Iterable[int], dtype: Any = np.uint16) -> IndexedDataset:
    with IndexedDatasetBuilder(prefix, dtype=dtype) as builder:
        for length in lengths:
            builder.add_document(np.arange(length, dtype=dtype))
    return IndexedDataset(prefix)


@st.composite
def packings(draw: st.DrawFn, name: str) -> dict[str, Any]:
    """Draw keyword arguments of ``pack`` (and of the definition) for one strategy."""
    capacities = st.sampled_from([1, 2, 4, 8, 16, 32])
    if name != "decompose":
        capacities = st.integers(1, 35)
    most = 4 if STRATEGIES[name].many_buckets else 1
    buckets = sorted(draw(st.sets(capacities, min_size=1, max_size=most)))
    chosen = {"buckets": buckets, "seed": draw(st.integers(0, 9))}
    for parameter in STRATEGIES[name].parameters:
        if parameter.name == "refine":  # tested in test_packing_alignment.py
            continue
        if draw(st.booleans()):
            chosen[parameter.name] = draw(values(parameter, buckets[-1]))
    return chosen


def values(parameter: Parameter, capacity: int) -> st.SearchStrategy[Any]:
    if parameter.choices:
        return st.sampled_from(parameter.choices)
    if parameter.kind is bool:
        return st.booleans()
    divisors = [size for size in range(1, capacity + 1) if capacity % size == 0]
    known = {
        "atom_size": st.sampled_from([*divisors, 2 * capacity, 3 * capacity]),
        "pool_size": st.sampled_from([1, 2, 5, 17, 1000]),
        "padding_threshold": st.sampled_from([0.0, 0.045, 0.1, 0.3, 1.0]),
        "r_max": st.sampled_from([0.0, 0.1, 0.3, 0.5, 1.0]),
        "extra_capacity": st.sampled_from([0, 1, 3, 20]),
        "max_segments": st.sampled_from([1, 2, 3, 8, 1000]),
        "min_bucket": st.sampled_from([1 << k for k in range(6) if 1 << k <= capacity]),
    }
    if parameter.name in known:
        return known[parameter.name]
    low, high = parameter.minimum or 0, parameter.maximum or 40
    if parameter.kind is int:
        return st.integers(int(low), int(min(high, low + 40)))
    return st.floats(low, high)


def as_packing(index: SampleIndex) -> Packing:
    """Return the index as the reference definitions represent it."""
    buckets: dict[int, list[Any]] = {int(capacity): [] for capacity in index.bucket_capacity}
    for i in range(index.num_samples):
        bucket, segments = index.sample(i)
        buckets[int(index.bucket_capacity[bucket])].append(segments)
    metrics = index.metrics()
    return Packing(buckets, metrics["dropped_tokens"], metrics["repeated_tokens"])


def same_arrays(a: SampleIndex, b: SampleIndex) -> bool:
    """Compare bytes and types."""
    arrays = ([index.bucket_capacity, *index.segment_arrays()] for index in (a, b))
    pairs = zip(*arrays, strict=True)
    return all(x.dtype == y.dtype and np.array_equal(x, y) for x, y in pairs)


PREAMBLE = struct.Struct("<8sIIQQ")  # of a .samples file


def header_of(data: bytes) -> dict[str, Any]:
    size = PREAMBLE.unpack_from(data)[3]
    header: dict[str, Any] = json.loads(data[PREAMBLE.size : PREAMBLE.size + size])
    return header


def with_header(data: bytes, header: Any, *, may_grow: bool = False) -> bytes:
    """Return the file with another header of the same size and its checksum."""
    size = PREAMBLE.unpack_from(data)[3]
    encoded = json.dumps(header).encode().ljust(size)
    assert may_grow or len(encoded) == size, "the change does not fit where the header stands"
    digest = xxhash.xxh3_64_intdigest(encoded)
    preamble = PREAMBLE.pack(b"MEGASAMP", 2, 0, len(encoded), digest)
    return preamble + encoded + data[PREAMBLE.size + size :]
