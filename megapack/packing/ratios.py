"""Shares of a capacity as they were written, so that 0.1 of 1000 tokens are 100 tokens."""

from __future__ import annotations

from fractions import Fraction

__all__ = ["exact_ratio", "largest_overlap"]

# What the core multiplies in 128 bits. No shorter decimal than 19 places comes near.
_LARGEST_DENOMINATOR = 1 << 62


def exact_ratio(share: float) -> tuple[int, int]:
    """The decimal that prints as ``share``, as (numerator, denominator): 0.1 is (1, 10)."""
    return Fraction(repr(float(share))).limit_denominator(_LARGEST_DENOMINATOR).as_integer_ratio()


def largest_overlap(r_max: float, placement: str, capacity: int) -> tuple[int, int]:
    """Seamless Packing's r_max, exact; for ``published`` the tokens that the authors' program takes
    of a capacity (``int(r_max * capacity)``, in floating point), as a share of it."""
    if placement == "published":
        return int(r_max * capacity), capacity
    return exact_ratio(r_max)
