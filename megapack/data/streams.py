"""Endless streams of sample ids: one per bucket, blended from one stream per dataset.

A dataset's stream of a bucket is the concatenation of its samples in a new order every epoch (by
score where it has one, ``megapack.data.scores``); any range of it is computed without what lies
before. A bucket's stream takes from the datasets by
their exact weights (``_core.Blend``): of its first n samples every dataset has given n times its
weight, within 1.69 samples, for any number of datasets and every n up to 2^53 (csrc/core/
schedule/blend.hpp has the proof: 1.681, and 2^-9 because weights are whole numbers of 2^-62).
Sample ids are global: the samples of dataset 0, then those of dataset 1, and so on.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megapack import _core
from megapack.data.blocks import BlockOrder
from megapack.data.epochs import Epochs
from megapack.data.scores import ScoreOrder
from megapack.errors import ConfigError
from megapack.packing.shards import SourceIndex

__all__ = [
    "Bucket",
    "BucketStream",
    "bucket_streams",
    "buckets_of",
    "fold_key",
    "shuffle_key",
    "whole_shares",
]

Ids = NDArray[np.int64]

_SHARE_BITS = 62  # what _core.Blend takes
_PART_BITS = 128  # parts are precise to 2^-64 of themselves for up to 2^64 tokens


def fold_key(seed: int, *parts: int) -> int:
    """One 64-bit key out of a seed and numbers that say what it is for."""
    key = seed % (1 << 64)
    for part in parts:
        key = _core.random_bits(key, part)
    return key


def shuffle_key(seed: int, capacity: int, dataset: int) -> int:
    """Of the shuffles of all epochs of one bucket of a dataset."""
    return fold_key(seed, 1, capacity, dataset)


class BucketStream:
    """All samples of one capacity, as an endless sequence.

    Attributes:
        capacity: tokens per sample.
        datasets: (D,) int64, numbers of the datasets that have samples of this capacity.
        first_sample, sizes: (D,) int64, the first global id of each and how many it has; the ids
            are consecutive.
        starts: (D,) int64, how many of its samples each gave before this stream began.
        blend: whose turn it is, by the exact weights.
        samples_per_epoch: samples that the schedule counts as one epoch of this bucket. With one
            dataset, its samples; with several, a share of the blend's tokens.
    """

    def __init__(
        self,
        bucket: Bucket,
        parts: Sequence[int],
        samples_per_epoch: int,
        *,
        seed: int | None,
        starts: Mapping[tuple[int, int], int],
        orders: Mapping[tuple[int, int], ScoreOrder | BlockOrder],
    ) -> None:
        self.capacity, self.datasets, self.first_sample, self.sizes = bucket
        there = [(dataset, bucket.capacity) for dataset in self.datasets.tolist()]
        self.starts = np.array([starts.get(pair, 0) for pair in there], np.int64)
        self.blend = _core.Blend(whole_shares(parts))
        self.samples_per_epoch = samples_per_epoch
        self._shuffled = seed is not None
        self._orders = [orders.get(pair) for pair in there]
        self._ordered = np.array([order is not None for order in self._orders])
        keys = [shuffle_key(seed or 0, bucket.capacity, dataset) for dataset, _ in there]
        self._keys = np.array(keys, np.uint64)

    @property
    def num_samples(self) -> int:
        """Different samples of this capacity."""
        return int(self.sizes.sum())

    def ids(self, begin: int, end: int) -> NDArray[np.int64]:
        """Global sample ids at positions ``[begin, end)``; shape (end - begin,)."""
        which, first, count, places = self.blend.range(begin, end)
        own = _core.permute_epochs(
            self._keys[which], self.sizes[which], self.starts[which] + first, count, self._shuffled
        )
        if self._ordered.any():
            self._put_in_order(own, which, self.starts[which] + first, count)
        ids = np.empty_like(own)
        ids[places] = own + np.repeat(self.first_sample[which], count)
        return ids

    def _put_in_order(self, own: Ids, which: NDArray[np.int32], begin: Ids, count: Ids) -> None:
        """Puts those runs of ``own`` whose source has an order of its own into that order."""
        ends = np.cumsum(count)
        for run in np.flatnonzero(self._ordered[which]).tolist():
            order, key = self._orders[which[run]], int(self._keys[which[run]])
            assert order is not None
            number, end = int(count[run]), int(ends[run])
            own[end - number : end] = order.samples(
                lambda epoch, key=key: fold_key(key, epoch), int(begin[run]), number
            )

    def positions(self, sample: int, end: int) -> list[int]:
        """Where a global sample id stands in positions ``[0, end)``; once per epoch."""
        [i] = np.flatnonzero(
            (self.first_sample <= sample) & (sample < self.first_sample + self.sizes)
        ).tolist()
        epochs, own = self._epochs(i), np.array([sample - int(self.first_sample[i])])
        first, last = int(self.starts[i]), self.cursor(i, end)
        found = []
        for epoch in range(first // epochs.size, -(-last // epochs.size)):
            cursor = epoch * epochs.size + int(epochs.places(epoch, own)[0])
            if first <= cursor < last:  # the position at which the source is taken once more
                turn = cursor - first
                found.append(
                    bisect_right(range(end), turn, key=lambda n: self.blend.taken_of(i, n)) - 1
                )
        return found

    def cursor(self, i: int, end: int) -> int:
        """How many samples dataset ``datasets[i]`` gave, before this stream and in its first
        ``end`` samples."""
        return int(self.starts[i]) + self.blend.taken_of(i, end)

    def _epochs(self, i: int) -> Epochs:
        key = int(self._keys[i]) if self._shuffled else None
        return Epochs(int(self.sizes[i]), key, self._orders[i])

    def taken(self, end: int) -> NDArray[np.int64]:
        """How many of the first ``end`` samples each of ``datasets`` gave; shape (D,)."""
        return self.blend.taken(end)


class Bucket(NamedTuple):
    """The samples of one capacity: numbers of the datasets that have some, the first global id of
    each and how many it has; (D,) int64."""

    capacity: int
    datasets: Ids
    first_sample: Ids
    sizes: Ids


def bucket_streams(
    buckets: Sequence[Bucket],
    weights: Sequence[float | None],
    seed: int,
    *,
    shuffled: bool = True,
    starts: Mapping[tuple[int, int], int] = MappingProxyType({}),
    orders: Mapping[tuple[int, int], ScoreOrder | BlockOrder] = MappingProxyType({}),
) -> list[BucketStream]:
    """One stream per capacity, ascending, of all indices together.

    Args:
        buckets: ``buckets_of`` at least one index.
        weights: of every index: a share of the tokens, 0 to leave it out, None for its tokens.
        seed: of the shuffles.
        shuffled: False: samples in the order of their index.
        starts: (number of the index, capacity) -> samples taken before; 0 where it is missing.
        orders: (number of the index, capacity) -> order by score, or of an arranged source,
            instead of a shuffle.

    Weights are shares of tokens (samples x capacity). Every dataset keeps its own distribution over
    buckets: bucket b of dataset d is given ``weight[d] * tokens[d, b] / tokens[d]`` of the tokens,
    so that all buckets of a dataset are repeated equally often. All of it in whole numbers.
    """
    counted = np.zeros(len(weights), np.int64)
    for bucket in buckets:
        np.add.at(counted, bucket.datasets, bucket.capacity * bucket.sizes)
    tokens = counted.tolist()
    exact = _exact_weights(weights, tokens)
    drawn = np.array([weight > 0 for weight in exact])
    epoch_tokens = sum(size for size, weight in zip(tokens, exact, strict=True) if weight)
    scale = sum(exact) << _PART_BITS
    result = []
    for capacity, *arrays in buckets:
        bucket = Bucket(capacity, *(array[drawn[arrays[0]]] for array in arrays))
        if not len(bucket.datasets):
            continue
        parts = [
            (exact[d] * capacity * size << _PART_BITS) // tokens[d]
            for d, size in zip(bucket.datasets.tolist(), bucket.sizes.tolist(), strict=True)
        ]
        epoch = _rounded(sum(parts) * epoch_tokens, scale * capacity)
        result.append(
            BucketStream(
                bucket,
                parts,
                max(1, epoch),
                seed=seed if shuffled else None,
                starts=starts,
                orders=orders,
            )
        )
    return result


def whole_shares(parts: Sequence[int]) -> NDArray[np.int64]:
    """Whole numbers with sum 2^62, each less than 1 from its exact share (largest remainders).

    Args:
        parts: not negative, in any unit.
    """
    total = sum(parts)
    divided = [divmod(part << _SHARE_BITS, total) for part in parts]
    shares = np.array([share for share, _ in divided], np.int64)
    lacking = (1 << _SHARE_BITS) - int(shares.sum())
    most_lacking = sorted(range(len(parts)), key=lambda i: -divided[i][1])[:lacking]
    shares[most_lacking] += 1
    return shares


def buckets_of(indices: Sequence[SourceIndex]) -> list[Bucket]:
    """The samples of all indices by rising capacity."""
    found: dict[int, list[tuple[int, int, int]]] = {}
    base = 0
    for d, index in enumerate(indices):
        offsets = index.bucket_sample_offsets.tolist()
        for b, capacity in enumerate(index.bucket_capacity.tolist()):
            begin, end = offsets[b], offsets[b + 1]
            if begin < end:
                found.setdefault(capacity, []).append((d, base + begin, end - begin))
        base += index.num_samples
    return [Bucket(c, *np.array(rows, np.int64).T.copy()) for c, rows in sorted(found.items())]


def _exact_weights(weights: Sequence[float | None], tokens: Sequence[int]) -> list[int]:
    """Whole numbers in the weights' exact proportions; the tokens where a weight is None."""
    if not tokens:
        raise ConfigError("a schedule needs at least one sample index")
    if min(tokens) == 0:
        raise ConfigError(f"index {tokens.index(0)} has no samples; leave it out")
    if len(weights) != len(tokens):
        raise ConfigError(f"{len(weights)} weights for {len(tokens)} indices; give one for each")
    given = [t if weight is None else weight for weight, t in zip(weights, tokens, strict=True)]
    for d, weight in enumerate(given):
        if not (math.isfinite(weight) and weight >= 0):
            raise ConfigError(f"weight of index {d} is {weight}; it must be a positive number")
    if not any(given):
        raise ConfigError(f"all {len(given)} weights are 0; give at least one index a weight")
    ratios = [weight.as_integer_ratio() for weight in given]  # denominators are powers of two
    common = max(denominator for _, denominator in ratios)
    return [numerator * (common // denominator) for numerator, denominator in ratios]


def _rounded(numerator: int, denominator: int) -> int:
    return (2 * numerator + denominator) // (2 * denominator)
