"""Order of the samples of one bucket of a source: an endless sequence of epochs.

- ``Epochs``: cursor -> sample, and sample -> cursor.
- ``BlockOrder``: order of an arranged source: first sequential, then by shuffled blocks.
- ``ScoreOrder``, ``Scores``: order by a number per document (quality, perplexity, ...).
- ``Move``: samples that a cost window (``megapack.data.bucket_streams``) has reordered.

A cursor counts the samples taken so far: in a bucket of n samples, cursor c takes the sample at
position ``c mod n`` in the order of epoch ``c div n``, which is a shuffle, the order of the index,
a ``BlockOrder`` or a ``ScoreOrder``. With 3 samples, shuffled to 2 0 1 and then to 1 2 0, cursors 1
to 4 take

    Epochs(size=3, key=...).samples(1, 4)              # -> 0 1 1 2
    Epochs(size=3, key=..., move=Move(1, [1, 0]))      # -> 1 0 1 2

A move permutes samples within epochs, so every epoch still has every sample once. In this module
samples are numbered within the bucket, from 0.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from megapack import _core
from megapack.calls import checked_call
from megapack.errors import FormatError
from megapack.packing import SampleIndex
from megapack.packing.sharded import Arranged, SourceIndex
from megapack.storage.tokens import open_npy

Ids = NDArray[np.int64]


class BlockOrder:
    """Order of one bucket of an arranged source, which reads files in whole blocks.

    ``megapack-build arrange`` writes the samples of every bucket in a random order; the first epoch
    reads them sequentially. Later epochs take the blocks of a bucket, consecutive samples of about
    ``block_tokens`` tokens, in a random order, and shuffle the samples within groups of
    ``window_blocks`` blocks. The content of a step is random, but epochs are not independent: the
    samples of one block stay close to each other (tests/data/test_sample_order.py measures it).
    """

    def __init__(self, size: int, capacity: int, arranged: Arranged) -> None:
        self.size = size
        self.block = max(1, arranged.block_tokens // capacity)
        self.window = arranged.window_blocks
        self.num_blocks = -(-size // self.block)

    def range(self, epoch: int, key: int, position: int, count: int) -> Ids:
        """Return ``count`` samples of an epoch from a position on, given the epoch's key."""
        if epoch == 0:
            return np.arange(position, position + count, dtype=np.int64)
        result, done = np.empty(count, np.int64), 0
        while done < count:
            begin = position + done
            number = begin // (self.block * self.window)
            first, samples = self._group(key, number)
            if begin >= first + len(samples):  # an earlier group has the short block
                first, samples = self._group(key, number + 1)
            num_taken = min(count - done, first + len(samples) - begin)
            bits = _core.random_bits(key, first + 1)
            shuffled = _core.permute_range(bits, len(samples), begin - first, num_taken)
            result[done : done + num_taken] = samples[shuffled]
            done += num_taken
        return result

    def positions(self, epoch: int, key: int, samples: Ids) -> Ids:
        """Return the positions of samples in an epoch, given the epoch's key."""
        if epoch == 0:
            return np.array(samples)
        slots = _core.permute_inverse(key, self.num_blocks, samples // self.block)
        result = np.empty_like(samples)
        for number in np.unique(slots // self.window).tolist():
            is_member = slots // self.window == number
            first, members = self._group(key, number)
            order = np.argsort(members)
            inside = order[np.searchsorted(members, samples[is_member], sorter=order)]
            bits = _core.random_bits(key, first + 1)
            result[is_member] = first + _core.permute_inverse(bits, len(members), inside)
        return result

    def _group(self, key: int, number: int) -> tuple[int, Ids]:
        """Return the first position of a group of blocks, and its samples before the shuffle."""
        slot = number * self.window
        blocks = _core.permute_range(
            key, self.num_blocks, slot, min(self.window, self.num_blocks - slot)
        )
        last = self.num_blocks - 1  # may have fewer samples
        missing = self.num_blocks * self.block - self.size
        slot_of_last = int(_core.permute_inverse(key, self.num_blocks, np.array([last]))[0])
        begins = blocks * self.block
        parts = [np.arange(b, min(b + self.block, self.size)) for b in begins.tolist()]
        first = slot * self.block - missing * (slot_of_last < slot)
        return first, np.concatenate(parts)


@checked_call
@dataclass(frozen=True, kw_only=True)
class Scores:
    """File of scores, and the order that they define.

        sources:
          - {name: web, prefix: web/docs, index: web/docs.samples, scores: web/quality.npy}

    Attributes:
        path: a .npy of one finite number per document of the dataset.
        order: the lowest score first, or the highest.
    """

    path: str
    order: Literal["ascending", "descending"] = "ascending"

    def read(self, num_documents: int) -> NDArray[np.float64]:
        """Return (num_documents,) scores. Raises FormatError or OSError, which name the file, if it
        does not hold them."""
        content = open_npy(self.path)
        if content.shape != (num_documents,) or content.dtype.kind not in "fiu":
            raise FormatError(
                f"{self.path} holds {content.dtype} of shape {content.shape}; scores are numbers, "
                f"one for each of {num_documents} documents"
            )
        values = np.array(content, np.float64)
        invalid = np.flatnonzero(~np.isfinite(values))
        if len(invalid):
            raise FormatError(
                f"{self.path} has {values[invalid[0]]} for document {invalid[0]} ({len(invalid)} "
                "such documents); a score is a finite number: give these a value, too"
            )
        return values


class ScoreOrder:
    """Order of one bucket of a source by the mean scores of samples, (samples,): the lowest first.

    Samples of equal score are shuffled in every epoch; so a score with few distinct values divides
    the epoch into phases. If the best documents come last, a learning rate that has decayed by then
    wastes them: decay it moderately, or keep it and average the last checkpoints (Luo et al., arXiv
    2511.18903).
    """

    def __init__(self, means: NDArray[np.float64]) -> None:
        self._order = np.argsort(means, kind="stable")
        by_rank = means[self._order]
        starts = np.flatnonzero(np.r_[True, by_rank[1:] != by_rank[:-1]])
        self._starts = np.r_[starts, len(means)]  # starts of the groups of equal score

    def range(self, epoch: int, key: int, position: int, count: int) -> Ids:  # noqa: ARG002
        """As ``BlockOrder.range``."""
        end = position + count
        ranks = np.arange(position, end)
        first, last = np.searchsorted(self._starts, [position, end - 1], side="right") - 1
        starts = self._starts[first : last + 2]
        shared = np.flatnonzero(np.diff(starts) > 1)
        for start, stop in zip(starts[shared].tolist(), starts[shared + 1].tolist(), strict=True):
            low, high = max(start, position), min(stop, end)
            bits = _core.random_bits(key, start)
            shuffled = _core.permute_range(bits, stop - start, low - start, high - low)
            ranks[low - position : high - position] = start + shuffled
        samples: Ids = self._order[ranks]
        return samples

    def positions(self, epoch: int, key: int, samples: Ids) -> Ids:  # noqa: ARG002
        """As ``BlockOrder.positions``."""
        ranks: Ids = self._ranks[samples]
        group = np.searchsorted(self._starts, ranks, side="right") - 1
        order = np.argsort(group, kind="stable")
        present, begins = np.unique(group[order], return_index=True)
        for number, members in zip(present.tolist(), np.split(order, begins[1:]), strict=True):
            start, stop = self._starts[number : number + 2].tolist()
            if stop - start > 1:
                bits = _core.random_bits(key, start)
                shuffled = _core.permute_inverse(bits, stop - start, ranks[members] - start)
                ranks[members] = start + shuffled
        return ranks

    @cached_property
    def _ranks(self) -> Ids:
        ranks = np.empty_like(self._order)
        ranks[self._order] = np.arange(len(self._order))
        return ranks


_CHUNK = 1 << 22  # samples at a time


def score_orders(
    index: SourceIndex, shards: Iterable[tuple[SampleIndex, int, Ids]], scores: Scores
) -> tuple[dict[int, ScoreOrder], str]:
    """Return capacity -> order of the samples, and a digest of the order. ``shards``: those of the
    source, from ``Shards.opened``.

    Sorting n samples takes O(n log n) once; 16 bytes per sample stay in memory. Raises the errors
    of ``Scores.read``.
    """
    values = scores.read(index.num_documents)
    if scores.order == "descending":
        values = -values
    means = np.empty(index.num_samples)
    for shard, document, numbers in shards:
        of_shard = values[document : document + shard.num_documents]
        for begin in range(0, shard.num_samples, _CHUNK):
            end = min(begin + _CHUNK, shard.num_samples)
            means[numbers[begin:end]] = _means(shard, of_shard, begin, end)
    offsets = index.bucket_sample_offsets.tolist()
    orders = {
        capacity: ScoreOrder(means[offsets[b] : offsets[b + 1]])
        for b, capacity in enumerate(index.bucket_capacity.tolist())
        if offsets[b] < offsets[b + 1]
    }
    return orders, xxhash.xxh3_64_hexdigest(means.astype("<f8").tobytes())


def _means(
    index: SampleIndex, values: NDArray[np.float64], begin: int, end: int
) -> NDArray[np.float64]:
    """Return the token-weighted mean score of samples [begin, end)."""
    bounds = np.asarray(index.sample_segment_offsets[begin : end + 1], np.int64)
    segments = slice(int(bounds[0]), int(bounds[-1]))
    owner = np.repeat(np.arange(end - begin), np.diff(bounds))
    lengths = np.asarray(index.segment_length[segments], np.float64)
    weighted = values[np.asarray(index.segment_document[segments])] * lengths
    sums, tokens = (np.bincount(owner, by, end - begin) for by in (weighted, lengths))
    means: NDArray[np.float64] = sums / tokens
    return means


class Move(NamedTuple):
    """New order of the samples that the cursors from ``begin`` on take."""

    begin: int
    samples: Ids

    @property
    def end(self) -> int:
        return self.begin + len(self.samples)


class Epochs(NamedTuple):
    """Order of one bucket of a source in all epochs; see the module docstring."""

    size: int  # samples of the bucket
    key: int | None
    """Key of the shuffles of all epochs; None: every epoch is in the order of the index."""
    order: ScoreOrder | BlockOrder | None = None
    """Order that replaces the shuffles; None: shuffle."""
    move: Move | None = None

    def samples(self, cursor: int, count: int) -> Ids:
        """Return the samples that cursors ``[cursor, cursor + count)`` take."""
        if self.key is None:
            result = np.arange(cursor, cursor + count) % self.size
        elif self.order is None:
            size, begin, number = np.array([[self.size], [cursor], [count]], np.int64)
            key = np.array([self.key], np.uint64)
            result = _core.permute_epochs(key, size, begin, number, True)
        else:
            result, done = np.empty(count, np.int64), 0
            while done < count:
                epoch, position = divmod(cursor + done, self.size)
                num_taken = min(count - done, self.size - position)
                key_of_epoch = _core.random_bits(self.key, epoch)
                samples = self.order.range(epoch, key_of_epoch, position, num_taken)
                result[done : done + num_taken] = samples
                done += num_taken
        if self.move is not None:
            begin, moved = self.move
            low, high = max(cursor, begin), min(cursor + count, self.move.end)
            if low < high:
                result[low - cursor : high - cursor] = moved[low - begin : high - begin]
        return result

    def moved(self, begin: int, samples: Ids) -> Epochs:
        """Return the order in which cursors from ``begin`` on take these samples. An earlier move
        is kept, unless it ends before ``begin``."""
        if self.move is None or begin >= self.move.end:
            return self._replace(move=Move(begin, samples))
        low, end = min(begin, self.move.begin), max(begin + len(samples), self.move.end)
        joined = self.samples(low, end - low)
        joined[begin - low : begin - low + len(samples)] = samples
        return self._replace(move=Move(low, joined))

    def positions(self, epoch: int, samples: Ids) -> Ids:
        positions: Ids
        if self.key is None:
            positions = samples.copy()
        else:
            key = _core.random_bits(self.key, epoch)
            if self.order is None:
                positions = _core.permute_inverse(key, self.size, samples)
            else:
                positions = self.order.positions(epoch, key, samples)
        if self.move is not None:
            first = epoch * self.size
            low, high = max(self.move.begin, first), min(self.move.end, first + self.size)
            is_moved = (low <= positions + first) & (positions + first < high)
            if is_moved.any():
                moved = self.move.samples[low - self.move.begin : high - self.move.begin]
                by_id = np.argsort(moved)
                rank = np.searchsorted(moved, samples[is_moved], sorter=by_id)
                positions[is_moved] = low - first + by_id[rank]
        return positions

    def times(self, cursor: int, samples: Ids) -> Ids:
        """Return how often each sample was taken before a cursor."""
        epoch, position = divmod(cursor, self.size)
        times: Ids = epoch + (self.positions(epoch, samples) < position)
        return times

    def last(self, cursor: int, samples: Ids) -> Ids:
        """Return the last cursor before ``cursor`` that took each sample; negative if none did."""
        epoch, position = divmod(cursor, self.size)
        now, before = (self.positions(max(0, e), samples) for e in (epoch, epoch - 1))
        last: Ids = self.size * epoch + np.where(now < position, now, before - self.size)
        return last
