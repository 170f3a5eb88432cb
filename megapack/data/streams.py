"""Endless streams of sample ids: one per bucket, blended from one stream per dataset.

A dataset's stream of a bucket is the concatenation of its samples in a new order every epoch; any
range of it is computed without what lies before. A bucket's stream takes from the datasets in
turn, the one that lags most behind its weight first, which is Megatron's meaning of weights.
Sample ids are global: the samples of dataset 0, then those of dataset 1, and so on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megapack import _core
from megapack.errors import ConfigError
from megapack.packing import SampleIndex

__all__ = ["BucketStream", "bucket_streams", "fold_key"]

# Shares of a blend are whole numbers of this total: weights are exact to 1.5e-5.
BLEND_TOTAL = 1 << 16


def fold_key(seed: int, *parts: int) -> int:
    """One 64-bit key out of a seed and numbers that say what it is for."""
    key = seed % (1 << 64)
    for part in parts:
        key = _core.random_bits(key, part)
    return key


@dataclass(frozen=True)
class SampleStream:
    """The samples of one dataset in one bucket, again and again.

    Attributes:
        source: number of the dataset.
        first_sample: its first global sample id; the ids are consecutive.
        num_samples: how many there are.
        key: of its shuffles; None leaves the samples in order.
    """

    source: int
    first_sample: int
    num_samples: int
    key: int | None

    def ids(self, begin: int, end: int) -> NDArray[np.int64]:
        """Global sample ids at positions ``[begin, end)`` of the stream; shape (end - begin,)."""
        parts = []
        while begin < end:
            epoch, at = divmod(begin, self.num_samples)
            count = min(end - begin, self.num_samples - at)
            if self.key is None:
                part = np.arange(at, at + count, dtype=np.int64)
            else:
                key = fold_key(self.key, epoch)
                part = _core.permute_range(key, self.num_samples, at, count)
            parts.append(part + self.first_sample)
            begin += count
        return np.concatenate(parts) if parts else np.zeros(0, np.int64)


class BucketStream:
    """All samples of one capacity, as an endless sequence.

    Attributes:
        capacity: tokens per sample.
        streams: one per dataset that has samples of this capacity.
        samples_per_epoch: samples that the schedule counts as one epoch of this bucket. With one
            dataset, its samples; with several, a share of the blend's tokens.
        shares: (len(streams),) int64, how many of BLEND_TOTAL consecutive samples are of each.
    """

    def __init__(
        self,
        capacity: int,
        streams: Sequence[SampleStream],
        weights: Sequence[float],
        samples_per_epoch: int,
    ) -> None:
        self.capacity = capacity
        self.streams = tuple(streams)
        self.samples_per_epoch = samples_per_epoch
        self.shares = _whole_shares(weights)
        self._pattern = _core.blend_pattern(self.shares) if len(self.streams) > 1 else None

    @property
    def num_samples(self) -> int:
        """Different samples of this capacity."""
        return sum(stream.num_samples for stream in self.streams)

    def ids(self, begin: int, end: int) -> NDArray[np.int64]:
        """Global sample ids at positions ``[begin, end)``; shape (end - begin,)."""
        if self._pattern is None:
            return self.streams[0].ids(begin, end)
        dataset, rank = self._pattern
        turn, at = np.divmod(np.arange(begin, end, dtype=np.int64), len(dataset))
        chosen = dataset[at]
        positions = turn * self.shares[chosen] + rank[at]
        ids = np.empty(end - begin, np.int64)
        for d, stream in enumerate(self.streams):
            mine = chosen == d
            if mine.any():  # consecutive positions of that dataset's own stream
                where = positions[mine]
                ids[mine] = stream.ids(int(where[0]), int(where[-1]) + 1)
        return ids

    def taken(self, end: int) -> list[int]:
        """How many of the first ``end`` samples each stream gave."""
        if self._pattern is None:
            return [end]
        dataset = self._pattern[0]
        turns, at = divmod(end, len(dataset))
        part = np.bincount(dataset[:at], minlength=len(self.streams))
        return [int(turns * share + rest) for share, rest in zip(self.shares, part, strict=True)]


def bucket_streams(
    indices: Sequence[SampleIndex],
    weights: Sequence[float] | None,
    seed: int,
    *,
    shuffled: bool = True,
) -> list[BucketStream]:
    """One stream per capacity, ascending, of all indices together.

    Weights are shares of tokens (samples x capacity). Every dataset keeps its own distribution over
    buckets: bucket b of dataset d is given ``weight[d] * tokens[d, b] / tokens[d]`` of the tokens,
    so that all buckets of a dataset are repeated equally often.
    """
    tables = [_samples_by_capacity(index) for index in indices]
    tokens = [sum(cap * (end - begin) for cap, (begin, end) in t.items()) for t in tables]
    shares = _token_shares(weights, tokens)
    bases = np.cumsum([0] + [index.num_samples for index in indices])
    result = []
    for capacity in sorted({capacity for table in tables for capacity in table}):
        streams: list[SampleStream] = []
        parts: list[float] = []
        for d, table in enumerate(tables):
            if capacity not in table:
                continue
            begin, end = table[capacity]
            key = fold_key(seed, 1, capacity, d) if shuffled else None
            streams.append(SampleStream(d, int(bases[d]) + begin, end - begin, key))
            parts.append(shares[d] * capacity * (end - begin) / tokens[d])
        samples = streams[0].num_samples
        if len(indices) > 1:
            samples = max(1, round(sum(parts) * sum(tokens) / capacity))
        result.append(BucketStream(capacity, streams, parts, samples))
    return result


def _samples_by_capacity(index: SampleIndex) -> dict[int, tuple[int, int]]:
    offsets = index.bucket_sample_offsets
    return {
        int(capacity): (int(offsets[b]), int(offsets[b + 1]))
        for b, capacity in enumerate(index.bucket_capacity)
        if offsets[b] < offsets[b + 1]
    }


def _token_shares(weights: Sequence[float] | None, tokens: Sequence[int]) -> list[float]:
    if not tokens:
        raise ConfigError("a schedule needs at least one sample index")
    if min(tokens) == 0:
        raise ConfigError(f"index {tokens.index(0)} has no samples; leave it out")
    if weights is None:
        weights = tokens  # as one dataset
    if len(weights) != len(tokens):
        raise ConfigError(f"{len(weights)} weights for {len(tokens)} indices; give one for each")
    if not all(np.isfinite(w) and w > 0 for w in weights):
        raise ConfigError(f"weights are {list(weights)}; they must be positive numbers")
    total = float(sum(weights))
    return [float(weight) / total for weight in weights]


def _whole_shares(weights: Sequence[float]) -> NDArray[np.int64]:
    """Whole numbers with sum BLEND_TOTAL, none of them 0, nearest to the weights."""
    exact = np.asarray(weights, np.float64) / float(np.sum(weights)) * BLEND_TOTAL
    shares = np.maximum(1, np.floor(exact)).astype(np.int64)
    remainders = np.argsort(shares - exact, kind="stable")  # most lacking first
    lacking = BLEND_TOTAL - int(shares.sum())
    if lacking < 0:  # many tiny weights were raised to 1: the largest gives
        shares[int(np.argmax(shares))] += lacking
    else:
        shares[remainders[:lacking]] += 1
    return shares
