"""xxh3 of arrays: what a ``.samples`` file keeps of its own arrays and of the lengths packed."""

from __future__ import annotations

from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

__all__ = ["blocks", "checksum", "lengths_fingerprint"]

_BLOCK = 1 << 26  # bytes hashed or written at a time


def checksum(array: NDArray[Any]) -> str:
    """xxh3_64 of an array's bytes, as 16 hex digits."""
    digest = xxhash.xxh3_64()
    for block in blocks(array):
        digest.update(block)
    return digest.hexdigest()


def lengths_fingerprint(lengths: NDArray[Any]) -> str:
    """Identity of document lengths, whatever integer type they are held in."""
    wide = lengths.dtype.itemsize > 4 and len(lengths) and int(lengths.max()) > (1 << 31) - 1
    return checksum(np.ascontiguousarray(lengths, dtype="<i8" if wide else "<i4"))


def blocks(array: NDArray[Any]) -> list[memoryview]:
    """An array's bytes, a few at a time, without a copy."""
    data = np.ascontiguousarray(array).data.cast("B") if array.size else memoryview(b"")
    return [data[i : i + _BLOCK] for i in range(0, len(data), _BLOCK)]
