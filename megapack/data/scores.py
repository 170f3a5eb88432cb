"""Order by score: a number per document (quality, perplexity, ...) orders a source's samples.

    sources:
      - {name: web, prefix: web/docs, index: web/docs.samples, scores: web/quality.npy}

In every epoch of a bucket of the source its samples come by their score, ascending or descending,
instead of shuffled: the mean of its documents' scores, weighted by their tokens in it. Samples of
equal score are shuffled among themselves, anew in every epoch; so a score with few values makes
phases, and one that is the same everywhere is a shuffle. Blends, buckets and cursors stay as they
are, and a position of an epoch is still found without those before it.

With the best documents last, a learning rate that has decayed by then wastes them: decay it
moderately, or not at all and average the last checkpoints (Luo et al., arXiv 2511.18903).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import xxhash
from numpy.typing import NDArray

from megapack import _core
from megapack.errors import ConfigError, FormatError
from megapack.packing import SampleIndex
from megapack.packing.shards import SourceIndex

__all__ = ["ScoreOrder", "Scores", "score_orders"]

Ids = NDArray[np.int64]

_CHUNK = 1 << 22  # samples at a time


@dataclass(frozen=True, kw_only=True)
class Scores:
    """A file of scores and what is made of it.

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
        try:
            found = np.load(Path(self.path), allow_pickle=False)
        except ValueError as error:
            raise FormatError(f"{self.path} is no .npy file of numbers: {error}") from error
        if found.shape != (num_documents,) or found.dtype.kind not in "fiu":
            raise FormatError(
                f"{self.path} holds {found.dtype} of shape {found.shape}; scores are numbers, one "
                f"for each of {num_documents} documents"
            )
        values: NDArray[np.float64] = found.astype(np.float64)
        bad = np.flatnonzero(~np.isfinite(values))
        if len(bad):
            raise FormatError(
                f"{self.path} has {values[bad[0]]} for document {bad[0]} ({len(bad)} such "
                "documents); a score is a finite number: give these a value, too"
            )
        return values


class ScoreOrder:
    """The samples of one bucket of a source by rising place in the order.

    Args:
        means: (samples,) score of each; the lowest comes first.
    """

    def __init__(self, means: NDArray[np.float64]) -> None:
        self._order = np.argsort(means, kind="stable")
        by_rank = means[self._order]
        starts = np.flatnonzero(np.r_[True, by_rank[1:] != by_rank[:-1]])
        self._starts = np.r_[starts, len(means)]  # of the samples of equal score

    def samples(self, key_of: Callable[[int], int], begin: int, count: int) -> Ids:
        """Samples at positions [begin, begin + count) of the endless sequence of epochs.

        Args:
            key_of: epoch -> key of its shuffle.
        """
        size, result = len(self._order), np.empty(count, np.int64)
        done = 0
        while done < count:
            epoch, place = divmod(begin + done, size)
            number = min(count - done, size - place)
            result[done : done + number] = self._order[self._ranks(key_of(epoch), place, number)]
            done += number
        return result

    def places(self, epoch: int, key: int, samples: Ids) -> Ids:  # noqa: ARG002 (as BlockOrder)
        """Where some samples stand in an epoch, given its key."""
        ranks = self._inverse[samples]
        group = np.searchsorted(self._starts, ranks, side="right") - 1
        order = np.argsort(group, kind="stable")
        present, begins = np.unique(group[order], return_index=True)
        for at, mine in zip(present.tolist(), np.split(order, begins[1:]), strict=True):
            start, end = self._starts[at : at + 2].tolist()
            if end - start > 1:
                own = ranks[mine] - start
                ranks[mine] = start + _core.permute_inverse(_mixed(key, start), end - start, own)
        return ranks

    def _ranks(self, key: int, place: int, number: int) -> Ids:
        """Ranks at places [place, place + number) of an epoch: those of equal score shuffled."""
        ranks = np.arange(place, place + number)
        first, last = np.searchsorted(self._starts, [place, place + number - 1], side="right") - 1
        groups = self._starts[first : last + 2]
        shared = np.flatnonzero(np.diff(groups) > 1)
        for start, end in zip(groups[shared].tolist(), groups[shared + 1].tolist(), strict=True):
            low, high = max(start, place), min(end, place + number)
            ranks[low - place : high - place] = start + _core.permute_range(
                _mixed(key, start), end - start, low - start, high - low
            )
        return ranks

    @property
    def _inverse(self) -> Ids:
        if not hasattr(self, "_ranks_of"):
            self._ranks_of = np.empty_like(self._order)
            self._ranks_of[self._order] = np.arange(len(self._order))
        return self._ranks_of


def _mixed(key: int, start: int) -> int:
    return int(_core.random_bits(key, start))


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
