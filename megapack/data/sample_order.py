"""One bucket of a source as an endless sequence of epochs, each of which has every sample once.

- ``Epochs``: which sample a cursor takes, and which cursor took a sample.
- ``BlockOrder``: of an arranged source, straight through once, then by shuffled blocks.
- ``ScoreOrder``, ``Scores``: by a number per document (quality, perplexity, ...).
- ``Move``: cursors that a window of cost (``megapack.data.bucket_streams``) has put in order anew.

A cursor counts the samples that were taken: in a bucket of n samples cursor c stands at place
``c mod n`` of epoch ``c div n``, and takes the sample that the order of that epoch has there: a
shuffle, the order of the index, or one of its own. Of a bucket of 3 samples, shuffled to 2 0 1 and
then to 1 2 0, cursors 1 to 4 take

    Epochs(size=3, key=...).samples(1, 4)              # -> 0 1 1 2
    Epochs(size=3, key=..., move=Move(1, [1, 0]))      # -> 1 0 1 2

A move gives its cursors the same samples of the same epochs, each once, so an epoch is a
permutation whatever was moved. Samples are counted from the bucket's first one here.
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
from megapack.errors import ConfigError, FormatError
from megapack.packing import SampleIndex
from megapack.packing.sharded import Arranged, SourceIndex
from megapack.storage.tokens import open_npy

Ids = NDArray[np.int64]


class BlockOrder:
    """The samples of one bucket of an arranged source, epoch after epoch.

    ``megapack-build arrange`` writes the samples of every bucket in one random order, which the
    first epoch takes as it is. A later epoch takes the blocks of a bucket, consecutive samples of
    about ``block_tokens`` tokens, in a random order, and shuffles the samples inside every window
    of ``window_blocks`` of these. So files are read by whole blocks in every epoch, and since which
    samples are together in a block is random, so is what a step holds; what it is not is
    independent of the epoch before: samples of one block come close to each other again
    (tests/data/test_sample_order.py measures how close).

    Args:
        size: samples of the bucket.
        capacity: tokens of each.
        arranged: sizes of blocks and windows.
    """

    def __init__(self, size: int, capacity: int, arranged: Arranged) -> None:
        self.size = size
        self.block = max(1, arranged.block_tokens // capacity)
        self.window = arranged.window_blocks
        self.num_blocks = -(-size // self.block)

    def range(self, epoch: int, key: int, place: int, count: int) -> Ids:
        """Samples at places [place, place + count) of an epoch, given its key."""
        if epoch == 0:
            return np.arange(place, place + count, dtype=np.int64)
        result, done = np.empty(count, np.int64), 0
        while done < count:
            at = place + done
            number = at // (self.block * self.window)
            first, window = self._window(key, number)
            if at >= first + len(window):  # the short block came before
                first, window = self._window(key, number + 1)
            some = min(count - done, first + len(window) - at)
            bits = _core.random_bits(key, first + 1)
            mixed = _core.permute_range(bits, len(window), at - first, some)
            result[done : done + some] = window[mixed]
            done += some
        return result

    def places(self, epoch: int, key: int, samples: Ids) -> Ids:
        """Where some samples stand in an epoch, given its key."""
        if epoch == 0:
            return np.array(samples)
        slots = _core.permute_inverse(key, self.num_blocks, samples // self.block)
        result = np.empty_like(samples)
        for number in np.unique(slots // self.window).tolist():
            mine = slots // self.window == number
            first, window = self._window(key, number)
            order = np.argsort(window)
            inside = order[np.searchsorted(window, samples[mine], sorter=order)]
            bits = _core.random_bits(key, first + 1)
            result[mine] = first + _core.permute_inverse(bits, len(window), inside)
        return result

    def _window(self, key: int, number: int) -> tuple[int, Ids]:
        """Where a window of an epoch begins, and its samples before they are mixed."""
        slot = number * self.window
        blocks = _core.permute_range(
            key, self.num_blocks, slot, min(self.window, self.num_blocks - slot)
        )
        last = self.num_blocks - 1  # the block that may be short
        lacking = self.num_blocks * self.block - self.size
        came_before = int(_core.permute_inverse(key, self.num_blocks, np.array([last]))[0]) < slot
        begins = blocks * self.block
        parts = [np.arange(b, min(b + self.block, self.size)) for b in begins.tolist()]
        return slot * self.block - lacking * came_before, np.concatenate(parts)


@dataclass(frozen=True, kw_only=True)
class Scores:
    """A file of scores and what is made of it.

        sources:
          - {name: web, prefix: web/docs, index: web/docs.samples, scores: web/quality.npy}

    Attributes:
        path: a .npy of one finite number per document of the dataset.
        order: the lowest score first, or the highest.
    """

    path: str
    order: Literal["ascending", "descending"] = "ascending"

    def __post_init__(self) -> None:
        if self.order not in ("ascending", "descending"):
            raise ConfigError(f"score_order is {self.order!r}; it is 'ascending' or 'descending'")

    def read(self, num_documents: int) -> NDArray[np.float64]:
        """(num_documents,) scores.

        Raises:
            FormatError, OSError: not such a file; the message names it.
        """
        found = open_npy(self.path)
        if found.shape != (num_documents,) or found.dtype.kind not in "fiu":
            raise FormatError(
                f"{self.path} holds {found.dtype} of shape {found.shape}; scores are numbers, one "
                f"for each of {num_documents} documents"
            )
        values = np.array(found, np.float64)
        bad = np.flatnonzero(~np.isfinite(values))
        if len(bad):
            raise FormatError(
                f"{self.path} has {values[bad[0]]} for document {bad[0]} ({len(bad)} such "
                "documents); a score is a finite number: give these a value, too"
            )
        return values


class ScoreOrder:
    """The samples of one bucket of a source by the mean score of their documents, weighted by the
    tokens of each.

    Samples of equal score are shuffled among themselves, anew in every epoch; so a score with few
    values makes phases, and one that is the same everywhere is a shuffle. With the best documents
    last, a learning rate that has decayed by then wastes them: decay it moderately, or not at all
    and average the last checkpoints (Luo et al., arXiv 2511.18903).

    Args:
        means: (samples,) score of each; the lowest comes first.
    """

    def __init__(self, means: NDArray[np.float64]) -> None:
        self._order = np.argsort(means, kind="stable")
        by_rank = means[self._order]
        starts = np.flatnonzero(np.r_[True, by_rank[1:] != by_rank[:-1]])
        self._starts = np.r_[starts, len(means)]  # of the samples of equal score

    def range(self, epoch: int, key: int, place: int, count: int) -> Ids:  # noqa: ARG002
        """Samples at places [place, place + count) of an epoch, given its key."""
        ranks = np.arange(place, place + count)
        first, last = np.searchsorted(self._starts, [place, place + count - 1], side="right") - 1
        groups = self._starts[first : last + 2]
        shared = np.flatnonzero(np.diff(groups) > 1)
        for start, end in zip(groups[shared].tolist(), groups[shared + 1].tolist(), strict=True):
            low, high = max(start, place), min(end, place + count)
            bits = _core.random_bits(key, start)
            mixed = _core.permute_range(bits, end - start, low - start, high - low)
            ranks[low - place : high - place] = start + mixed
        found: Ids = self._order[ranks]
        return found

    def places(self, epoch: int, key: int, samples: Ids) -> Ids:  # noqa: ARG002
        """Where some samples stand in an epoch, given its key."""
        ranks: Ids = self._ranks[samples]
        group = np.searchsorted(self._starts, ranks, side="right") - 1
        order = np.argsort(group, kind="stable")
        present, begins = np.unique(group[order], return_index=True)
        for at, mine in zip(present.tolist(), np.split(order, begins[1:]), strict=True):
            start, end = self._starts[at : at + 2].tolist()
            if end - start > 1:
                bits = _core.random_bits(key, start)
                own = _core.permute_inverse(bits, end - start, ranks[mine] - start)
                ranks[mine] = start + own
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
    """Capacity -> order of the index's samples of that capacity; and a digest of the order.

    Sorting n samples takes O(n log n) once, and 16 bytes each are kept.

    Args:
        index: of a source.
        shards: of the source, as ``Shards.opened`` gives them.
        scores: of its documents.

    Raises:
        FormatError, OSError: see ``Scores.read``.
    """
    values = scores.read(index.num_documents)
    if scores.order == "descending":
        values = -values
    means = np.empty(index.num_samples)
    for shard, document, numbers in shards:
        own = values[document : document + shard.num_documents]
        for begin in range(0, shard.num_samples, _CHUNK):
            end = min(begin + _CHUNK, shard.num_samples)
            means[numbers[begin:end]] = _means(shard, own, begin, end)
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
    """Token-weighted mean score of samples [begin, end), added up in order of their segments."""
    bounds = np.asarray(index.sample_segment_offsets[begin : end + 1], np.int64)
    segments = slice(int(bounds[0]), int(bounds[-1]))
    owner = np.repeat(np.arange(end - begin), np.diff(bounds))
    lengths = np.asarray(index.segment_length[segments], np.float64)
    weighted = values[np.asarray(index.segment_document[segments])] * lengths
    sums, tokens = (np.bincount(owner, by, end - begin) for by in (weighted, lengths))
    means: NDArray[np.float64] = sums / tokens
    return means


class Move(NamedTuple):
    """What cursors from ``begin`` on take, one sample each, instead of the same ones in their
    former order."""

    begin: int
    samples: Ids

    @property
    def end(self) -> int:
        return self.begin + len(self.samples)


class Epochs(NamedTuple):
    """The order of one bucket of a source; see the module."""

    size: int
    """Samples of the bucket."""
    key: int | None
    """Key of the shuffles of all epochs; None: every epoch is in the order of the index."""
    order: ScoreOrder | BlockOrder | None = None
    """Instead of a shuffle."""
    move: Move | None = None

    def samples(self, cursor: int, count: int) -> Ids:
        """Samples that cursors ``[cursor, cursor + count)`` take."""
        if self.key is None:
            result = np.arange(cursor, cursor + count) % self.size
        elif self.order is None:
            size, begin, number = np.array([[self.size], [cursor], [count]], np.int64)
            key = np.array([self.key], np.uint64)
            result = _core.permute_epochs(key, size, begin, number, True)
        else:
            result, done = np.empty(count, np.int64), 0
            while done < count:
                epoch, place = divmod(cursor + done, self.size)
                some = min(count - done, self.size - place)
                key_of_epoch = _core.random_bits(self.key, epoch)
                result[done : done + some] = self.order.range(epoch, key_of_epoch, place, some)
                done += some
        if self.move is not None:
            begin, moved = self.move
            low, high = max(cursor, begin), min(cursor + count, self.move.end)
            if low < high:
                result[low - cursor : high - cursor] = moved[low - begin : high - begin]
        return result

    def moved(self, begin: int, samples: Ids) -> Epochs:
        """The same, and cursors from ``begin`` on take their samples in this order.

        What was moved before stays, unless all of it lies before ``begin``.
        """
        low, end = begin, begin + len(samples)
        if self.move is not None and begin < self.move.end:
            low, end = min(begin, self.move.begin), max(end, self.move.end)
        joined = self.samples(low, end - low)
        joined[begin - low : begin - low + len(samples)] = samples
        return self._replace(move=Move(low, joined))

    def places(self, epoch: int, samples: Ids) -> Ids:
        """Where some samples stand in an epoch."""
        places: Ids
        if self.key is None:
            places = samples.copy()
        else:
            key = _core.random_bits(self.key, epoch)
            if self.order is None:
                places = _core.permute_inverse(key, self.size, samples)
            else:
                places = self.order.places(epoch, key, samples)
        if self.move is not None:
            first = epoch * self.size
            low, high = max(self.move.begin, first), min(self.move.end, first + self.size)
            there = (low <= places + first) & (places + first < high)
            if there.any():
                own = self.move.samples[low - self.move.begin : high - self.move.begin]
                by_id = np.argsort(own)
                found = np.searchsorted(own, samples[there], sorter=by_id)
                places[there] = low - first + by_id[found]
        return places

    def times(self, cursor: int, samples: Ids) -> Ids:
        """How often each of some samples was taken before a cursor."""
        epoch, place = divmod(cursor, self.size)
        times: Ids = epoch + (self.places(epoch, samples) < place)
        return times

    def last(self, cursor: int, samples: Ids) -> Ids:
        """The last cursor before ``cursor`` that took each of some samples; negative: none did."""
        epoch, place = divmod(cursor, self.size)
        now, before = (self.places(max(0, e), samples) for e in (epoch, epoch - 1))
        last: Ids = self.size * epoch + np.where(now < place, now, before - self.size)
        return last
