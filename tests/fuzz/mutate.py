"""Deterministic mutation of bytes and of JSON: the same seed gives the same inputs everywhere."""

from __future__ import annotations

import random
import struct
from typing import Any

__all__ = ["change_value", "mutate"]

# Numbers near limits that readers of binary formats often get wrong.
_NUMBERS = [0, 1, 2, 3, 7, 8, 255, 2**15, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1, 2**53]
_NUMBERS += [2**61, 2**62, 2**63 - 1, 2**63, 2**64 - 1, 2**64 - 8]


def mutate(rng: random.Random, seeds: list[bytes], most: int = 4096) -> bytes:
    """Return a seed with one to four changes, at most ``most`` bytes."""
    data = bytearray(rng.choice(seeds))
    for _ in range(rng.randint(1, 4)):
        _change(rng, data, seeds)
    return bytes(data[:most])


_VALUES = [None, True, -1, 0, 1, 2, 7, 16, 19, 20, 21, 2**31, 2**63, 2**70, 1.5]
_VALUES += ["", "x", "<i4", [], [1], {}]


def change_value(rng: random.Random, tree: dict[str, Any]) -> None:
    """Change one value at any depth of a JSON tree: remove it, or replace it."""
    parent: Any = tree
    while True:
        key = rng.choice(list(parent) if isinstance(parent, dict) else range(len(parent)))
        value = parent[key]
        if not isinstance(value, dict | list) or not value or rng.random() < 0.2:
            break
        parent = value
    if rng.random() < 0.1:
        del parent[key]
        return
    nearby = value + rng.choice([-64, -1, 1, 64]) if type(value) is int else rng.choice(_VALUES)
    parent[key] = rng.choice([nearby, rng.choice(_VALUES)])


def _change(rng: random.Random, data: bytearray, seeds: list[bytes]) -> None:
    # Any position, but more often in the header, which most decisions depend on.
    at = rng.randrange(1 + (len(data) if rng.random() < 0.6 else min(len(data), 64)))
    kind = rng.choice(["flip", "flip", "number", "number", "cut", "remove", "insert", "splice"])
    if kind == "flip" and data:
        data[min(at, len(data) - 1)] ^= 1 << rng.randrange(8)
    elif kind == "number":
        width, value = rng.choice([1, 2, 4, 8]), rng.choice(_NUMBERS) + rng.choice([-1, 0, 0, 1])
        data[at : at + width] = struct.pack("<Q", value % 2**64)[:width]
    elif kind == "cut":
        del data[at:]
    elif kind == "remove":
        del data[at : at + rng.choice([1, 4, 8, 16])]
    elif kind == "insert":
        data[at:at] = rng.randbytes(rng.choice([1, 4, 8, 16]))
    elif kind == "splice" and (other := rng.choice(seeds)):
        begin, length = rng.randrange(len(other)), rng.randint(1, 32)
        data[at : at + length] = other[begin : begin + length]
