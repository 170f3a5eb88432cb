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
            for source, (orders, _) in enumerate(self._read)
            for capacity, order in orders.items()
        }

    @property
    def digests(self) -> list[str]:
        """Of every index one of its orders; empty where it has none."""
        return [digest for _, digest in self._read]

    @cached_property
    def _read(self) -> list[tuple[dict[int, ScoreOrder], str]]:
        return [
            ({}, "") if scores is None else score_orders(index, self._shards.opened(source), scores)
            for source, (index, scores) in enumerate(zip(self._indices, self._scores, strict=True))
        ]


def arranged_orders(
    indices: Sequence[SourceIndex], buckets: Sequence[Bucket]
) -> dict[Place, BlockOrder]:
    """Of the indices that were written in the order in which they are drawn."""
    return {
        (int(source), bucket.capacity): BlockOrder(int(size), bucket.capacity, index.arranged)
        for bucket in buckets
        for source, size in zip(bucket.datasets, bucket.sizes, strict=True)
        if isinstance(index := indices[source], ShardedIndex) and index.arranged
    }
