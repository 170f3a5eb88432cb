"""Deterministic mutation of bytes and of JSON: the same seed gives the same inputs everywhere."""

from __future__ import annotations

import random
import struct
from typing import Any

__all__ = ["change_value", "mutate"]

# Numbers at which readers of binary formats trip.
_NUMBERS = [0, 1, 2, 3, 7, 8, 255, 2**15, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1, 2**53]
_NUMBERS += [2**61, 2**62, 2**63 - 1, 2**63, 2**64 - 1, 2**64 - 8]


def mutate(rng: random.Random, seeds: list[bytes], most: int = 4096) -> bytes:
    """One input near the seeds: one to four changes of one of them, at most ``most`` bytes."""
    data = bytearray(rng.choice(seeds))
    for _ in range(rng.randint(1, 4)):
        rng.choice(_CHANGES)(rng, data, seeds)
    return bytes(data[:most])


_VALUES = [None, True, -1, 0, 1, 2, 7, 16, 19, 20, 21, 2**31, 2**63, 2**70, 1.5]
_VALUES += ["", "x", "<i4", [], [1], {}]


def change_value(rng: random.Random, tree: dict[str, Any]) -> None:
    """One value of a JSON tree, wherever it lies: gone, a number nearby, or something else."""
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


def _at(rng: random.Random, data: bytearray) -> int:
    """Any position; headers, where most decisions are made, more often."""
    end = len(data) if rng.random() < 0.6 else min(len(data), 64)
    return rng.randrange(end + 1)


def _flip(rng: random.Random, data: bytearray, seeds: list[bytes]) -> None:
    if data:
        data[min(_at(rng, data), len(data) - 1)] ^= 1 << rng.randrange(8)


def _number(rng: random.Random, data: bytearray, seeds: list[bytes]) -> None:
    width, at = rng.choice([1, 2, 4, 8]), _at(rng, data)
    value = rng.choice(_NUMBERS) + rng.choice([-1, 0, 0, 1])
    data[at : at + width] = struct.pack("<Q", value % 2**64)[:width]


def _cut(rng: random.Random, data: bytearray, seeds: list[bytes]) -> None:
    del data[_at(rng, data) :]


def _remove(rng: random.Random, data: bytearray, seeds: list[bytes]) -> None:
    at = _at(rng, data)
    del data[at : at + rng.choice([1, 4, 8, 16])]


def _insert(rng: random.Random, data: bytearray, seeds: list[bytes]) -> None:
    at = _at(rng, data)
    data[at:at] = rng.randbytes(rng.choice([1, 4, 8, 16]))


def _splice(rng: random.Random, data: bytearray, seeds: list[bytes]) -> None:
    other = rng.choice(seeds)
    if other:
        begin = rng.randrange(len(other))
        at, length = _at(rng, data), rng.randint(1, 32)
        data[at : at + length] = other[begin : begin + length]


_CHANGES = [_flip, _flip, _number, _number, _cut, _remove, _insert, _splice]
