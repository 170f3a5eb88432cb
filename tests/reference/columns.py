"""Columns: stored bytes of numbers, and the file of a dataset, one number at a time."""

from __future__ import annotations

import struct
from fractions import Fraction

FORMATS = {
    **{"int8": "b", "uint8": "B", "int16": "h", "uint16": "H", "int32": "i", "uint32": "I"},
    **{"int64": "q", "uint64": "Q", "float16": "e", "float32": "f"},
}


def number_bytes(dtype: str, number: float) -> bytes:
    """Return the little-endian bytes of a finite number; floats are rounded to the nearest, ties
    to the even last bit."""
    if dtype != "bfloat16":
        return struct.pack("<" + FORMATS[dtype], number)
    # bfloat16 is the upper half of a float32, so magnitudes have the order of these halves.
    low, high = 0, 0x7F80  # 0 and infinity
    magnitude = abs(Fraction(number))
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if bfloat16(middle) <= magnitude else (low, middle)
    below, above = magnitude - bfloat16(low), bfloat16(high) - magnitude
    half = low if below < above or (below == above and low % 2 == 0) else high
    return struct.pack("<H", half | (0x8000 if number < 0 else 0))


def bfloat16(half: int) -> Fraction:
    """Return the number with these 16 bits (without sign)."""
    if half == 0x7F80:
        return Fraction(2) ** 128  # where infinity would lie if exponents went on
    return Fraction(struct.unpack("<f", struct.pack("<I", half << 16))[0])


def column_bytes(dtype: str, documents: list[list[list[float]]]) -> bytes:
    """Return a .col file: for each document, for each token, its numbers."""
    return b"".join(
        number_bytes(dtype, number) for rows in documents for row in rows for number in row
    )
