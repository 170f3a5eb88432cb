"""What the steps of a program hold: the definition, one sample after the other.

A program is stages, each a first step, tokens per step, weights of the sources (0: not drawn) and
how many steps it passes over before it begins. Every bucket of every source has a cursor, which a
sample that is drawn (or passed over) moves on by one; the sample at cursor c is element ``c % n``
of the shuffle of epoch ``c // n`` of the n samples that the source has in the bucket. Nothing else
is remembered from stage to stage.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from math import ceil, floor

from reference.blends import locate, tree
from reference.random import MASK

SHARES = 1 << 62


@dataclass(frozen=True)
class Stage:
    begin: int
    tokens_per_step: int
    weights: tuple[float, ...]
    skip_steps: int = 0


# capacity -> samples, of every source
Sources = list[dict[int, int]]
# capacity, [(source, number among its samples of that capacity)]
StepContent = tuple[int, list[tuple[int, int]]]


def steps(sources: Sources, stages: list[Stage], seed: int, num_steps: int) -> list[StepContent]:
    """The first ``num_steps`` steps, with order "proportional" and one bucket per step."""
    cursors: Counter[tuple[int, int]] = Counter()
    found: list[StepContent] = []
    largest = 0
    draws: Iterator[StepContent] = iter(())
    for number, stage in enumerate(stages):
        before = stages[number - 1]
        for _ in range(stage.skip_steps):
            next(draws)
        if number == 0 or (stage.tokens_per_step, stage.weights) != (
            before.tokens_per_step,
            before.weights,
        ):
            capacity = max(c for s, w in zip(sources, stage.weights, strict=True) if w for c in s)
            draws = stage_draws(sources, stage, seed, cursors, swap=capacity > largest)
            largest = max(largest, capacity)
        end = stages[number + 1].begin if number + 1 < len(stages) else num_steps
        found += [next(draws) for _ in range(min(end, num_steps) - stage.begin)]
    return found


def stage_draws(
    sources: Sources, stage: Stage, seed: int, cursors: Counter[tuple[int, int]], *, swap: bool
) -> Iterator[StepContent]:
    """Draw after draw of one stage; moves the cursors."""
    drawn = [s for s, weight in enumerate(stage.weights) if weight]
    tokens = [sum(c * n for c, n in source.items()) for source in sources]
    total = sum(Fraction(w) for w in stage.weights)
    epoch_tokens = sum(tokens[s] for s in drawn)
    capacities = sorted({c for s in drawn for c in sources[s]})
    blends, members, epochs = [], [], []
    for capacity in capacities:
        those = [s for s in drawn if capacity in sources[s]]
        parts = [
            Fraction(stage.weights[s]) / total * capacity * sources[s][capacity] / tokens[s]
            for s in those
        ]
        members.append(those)
        blends.append(tree(whole_shares(parts)))
        epochs.append(max(1, floor(sum(parts) * epoch_tokens / capacity + Fraction(1, 2))))
    per_draw = [stage.tokens_per_step // capacity for capacity in capacities]
    positions = [0] * len(capacities)
    key = fold_key(seed, 4, stage.begin) if stage.begin else seed
    for bucket in draw_order(epochs, per_draw, key, swap=swap):
        capacity = capacities[bucket]
        content = []
        for _ in range(per_draw[bucket]):
            which, _ = locate(blends[bucket], positions[bucket])
            positions[bucket] += 1
            source = members[bucket][which]
            epoch, place = divmod(cursors[source, capacity], sources[source][capacity])
            cursors[source, capacity] += 1
            shuffle = fold_key(seed, 1, capacity, source, epoch)
            content.append((source, permuted(sources[source][capacity], shuffle)[place]))
        yield capacity, content


def draw_order(epochs: list[int], per_draw: list[int], key: int, *, swap: bool) -> Iterator[int]:
    """Buckets, cycle after cycle: every bucket as often as its samples need, spread evenly."""
    cycle = 0
    while True:
        times = []
        for b, (samples, count) in enumerate(zip(epochs, per_draw, strict=True)):
            first, last = (ceil(Fraction(c * samples, count)) for c in (cycle, cycle + 1))
            bucket_key = fold_key(key, 2, cycle, b)
            for turn in range(last - first):
                chance = (random_bits(bucket_key, turn) >> 11) * 2.0**-53
                times.append(((turn + chance) / (last - first), b))
        order = [b for _, b in sorted(times)]
        if cycle == 0 and swap:
            at = order.index(max(order))
            order[0], order[at] = order[at], order[0]
        yield from order
        cycle += 1


def whole_shares(parts: list[Fraction]) -> list[int]:
    """Shares of 2^62 by largest remainders."""
    exact = [part / sum(parts) * SHARES for part in parts]
    shares = [floor(share) for share in exact]
    lacking = sorted(range(len(parts)), key=lambda i: shares[i] - exact[i])
    for i in lacking[: SHARES - sum(shares)]:
        shares[i] += 1
    return shares


def permuted(size: int, key: int) -> list[int]:
    """Fisher and Yates; up to 1024 elements."""
    order = list(range(size))
    for i in range(size, 1, -1):
        j = random_bits(key, i) % i
        order[i - 1], order[j] = order[j], order[i - 1]
    return order


def fold_key(seed: int, *parts: int) -> int:
    key = seed & MASK
    for part in parts:
        key = random_bits(key, part)
    return key


def random_bits(key: int, counter: int) -> int:
    return mix(key ^ mix(counter))


def mix(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ x >> 30) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ x >> 27) * 0x94D049BB133111EB) & MASK
    return x ^ x >> 31
