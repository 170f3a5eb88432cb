"""Sizes that follow from the buckets and a parameter, and which of them go together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megapack.errors import ConfigError

__all__ = ["atom_size", "check_atom_size", "check_decompose", "decompose_buckets"]


def atom_size(buckets: list[int], parameters: Mapping[str, Any]) -> int:
    """The parameter, or the capacity."""
    size = parameters["atom_size"]
    return buckets[-1] if size is None else int(size)


def check_atom_size(buckets: list[int], parameters: Mapping[str, Any]) -> None:
    """Refuse (ConfigError) an atom that neither divides the capacity nor is a multiple of it."""
    size, capacity = atom_size(buckets, parameters), buckets[-1]
    if capacity % size and size % capacity:
        raise ConfigError(
            f"atom_size is {size:,} and the capacity {capacity:,}; one must be a multiple of the "
            "other"
        )


def decompose_buckets(buckets: list[int], parameters: Mapping[str, Any]) -> list[int]:
    """All powers of two from the smallest segment to the largest bucket."""
    smallest = parameters["min_bucket"]
    if smallest is None:
        smallest = min(256, buckets[0])
    exponents = range(smallest.bit_length() - 1, buckets[-1].bit_length())
    return [1 << exponent for exponent in exponents]


def check_decompose(buckets: list[int], parameters: Mapping[str, Any]) -> None:
    """Refuse (ConfigError) what is no power of two, or no multiple of the alignment."""
    smallest, largest = parameters["min_bucket"], buckets[-1]
    named = [] if smallest is None else [("min_bucket", smallest)]
    for name, value in (*named, *(("bucket", size) for size in buckets)):
        if value & (value - 1):
            raise ConfigError(f"{name} is {value:,}; decompose needs powers of two")
    if smallest is not None and smallest > largest:
        raise ConfigError(f"min_bucket is {smallest:,}; the largest bucket is {largest:,}")
    made, alignment = decompose_buckets(buckets, parameters)[0], parameters.get("alignment", 1)
    if made % alignment:
        raise ConfigError(
            f"decompose makes buckets of {made:,} tokens, no multiple of the alignment "
            f"{alignment:,}; give min_bucket"
        )
