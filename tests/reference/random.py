"""Seeded generators of csrc/core (base/random.hpp, schedule/random.hpp), and two orders."""

from __future__ import annotations

from dataclasses import dataclass

MASK = (1 << 64) - 1

# Uses of the children of the seed's generator.
DOCUMENTS, ATOMS, SEGMENTS, POOLS = range(4)


def mix(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ x >> 30) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ x >> 27) * 0x94D049BB133111EB) & MASK
    return x ^ x >> 31


def random_bits(key: int, counter: int) -> int:
    return mix(key ^ mix(counter))


def unit(key: int, counter: int) -> float:
    """Return a uniform number from 0 to 1."""
    return (random_bits(key, counter) >> 11) * 2.0**-53


def fold_key(seed: int, *parts: int) -> int:
    key = seed & MASK
    for part in parts:
        key = random_bits(key, part)
    return key


@dataclass(frozen=True)
class Random:
    """SplitMix64 with a counter: word ``i`` is a pure function of (key, i)."""

    key: int

    def word(self, i: int) -> int:
        return mix(self.key + i * 0x9E3779B97F4A7C15)

    def below(self, i: int, n: int) -> int:
        return self.word(i) * n >> 64

    def child(self, i: int) -> Random:
        return Random(self.word(i))


def random_for(seed: int, purpose: int) -> Random:
    return Random(seed).child(purpose)


def swap_down(items: list, chance: Random) -> None:
    """Shuffle by Fisher and Yates: swap position k, from the last one down, with one up to it."""
    for k in range(len(items) - 1, 0, -1):
        j = chance.below(k, k + 1)
        items[k], items[j] = items[j], items[k]


def shuffled(count: int, chance: Random) -> list[int]:
    """Split 0 ... count - 1 into groups, shuffle each, and concatenate them."""
    num_groups = min(4096, max(1, -(-count // 32768)))
    groups: list[list[int]] = [[] for _ in range(num_groups)]
    for i in range(count):
        groups[chance.child(0).below(i, num_groups)].append(i)
    for g, group in enumerate(groups):
        swap_down(group, chance.child(1).child(g))
    return [i for group in groups for i in group]


def dealt(count: int, num_pools: int, chance: Random) -> list[list[int]]:
    """Draw a pool for each of 0 ... count - 1; return them by pool in ascending order."""
    pools: list[list[int]] = [[] for _ in range(num_pools)]
    for i in range(count):
        pools[chance.below(i, num_pools)].append(i)
    return pools
