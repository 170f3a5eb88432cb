"""Of every index and bucket the order of its samples, where it is no shuffle."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from megapack.data.blocks import BlockOrder
from megapack.data.scores import ScoreOrder, Scores, score_orders
from megapack.data.shards import Shards
from megapack.data.streams import Bucket, Place
from megapack.packing.shards import ShardedIndex, SourceIndex

__all__ = ["ScoreOrders", "arranged_orders"]


class ScoreOrders:
    """By score; scores are read when they are first asked for.

    Args:
        indices: of all sources.
        shards: theirs.
        scores: of every index; None where it has none.
    """

    def __init__(
        self, indices: Sequence[SourceIndex], shards: Shards, scores: Sequence[Scores | None]
    ) -> None:
        self._indices, self._shards, self._scores = indices, shards, scores

    @cached_property
    def by_score(self) -> dict[Place, ScoreOrder]:
        """Of all buckets of the indices that have scores."""
        return {
            (source, capacity): order
            for source, (orders, _) in self._read.items()
            for capacity, order in orders.items()
        }

    @property
    def digests(self) -> list[str]:
        """Of every index one of its orders; empty where it has none."""
        return [self._read[i][1] if i in self._read else "" for i in range(len(self._indices))]

    @cached_property
    def _read(self) -> dict[int, tuple[dict[int, ScoreOrder], str]]:
        return {
            source: score_orders(self._indices[source], self._shards.opened(source), scores)
            for source, scores in enumerate(self._scores)
            if scores is not None
        }


def arranged_orders(
    indices: Sequence[SourceIndex], buckets: Sequence[Bucket]
) -> dict[Place, BlockOrder]:
    """Of the indices that were written in the order in which they are drawn."""
    arranged = {
        source: index.arranged
        for source, index in enumerate(indices)
        if isinstance(index, ShardedIndex) and index.arranged
    }
    return {
        (source, bucket.capacity): BlockOrder(int(size), bucket.capacity, how)
        for bucket in buckets
        for source, how in arranged.items()
        for size in bucket.sizes[bucket.datasets == source]
    }
