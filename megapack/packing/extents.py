"""The longest of an index: what a run allocates for, and a model must have positions for."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from megapack.packing.shards import ShardedIndex, SourceIndex

__all__ = ["longest_reach", "longest_segment", "most_segments"]


def most_segments(index: SourceIndex) -> list[int]:
    """The most segments of one sample, of every bucket; 0 where it has no samples."""
    if isinstance(index, ShardedIndex):
        return [max(most) for most in zip(*(s.most_segments for s in index.shards), strict=True)]
    offsets = index.bucket_sample_offsets.tolist()
    return [
        int(np.diff(index.sample_segment_offsets[begin : end + 1]).max(initial=0))
        for begin, end in pairwise(offsets)
    ]


def longest_segment(index: SourceIndex) -> int:
    """Tokens; 0 without samples."""
    if isinstance(index, ShardedIndex):
        return max(shard.longest_segment for shard in index.shards)
    return int(index.segment_length.max(initial=0))


def longest_reach(index: SourceIndex) -> int:
    """The largest begin + length of a segment: tokens of its document up to its end."""
    if isinstance(index, ShardedIndex):
        return max(shard.longest_reach for shard in index.shards)
    ends = np.asarray(index.segment_length, np.int64) + index.segment_begin
    return int(ends.max(initial=0))
