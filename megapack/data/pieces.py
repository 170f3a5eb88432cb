"""Samples as documents of their own: a segment each, and the token behind it where it goes on."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megapack.data.counting import segments_of
from megapack.data.dataset import PackedDataset

__all__ = ["Pieces", "cut_pieces"]

Ids = NDArray[np.int64]


class Pieces(NamedTuple):
    """The documents that some samples become."""

    offsets: Ids
    """(documents + 1,), tokens."""
    lengths: Ids
    """(documents,) tokens that the sample has of each; one more goes along where it goes on."""
    counts: Ids
    """(samples,) documents of each."""


def cut_pieces(
    data: PackedDataset, chosen: PackedDataset | None, capacity: int, ids: Ids
) -> tuple[Pieces, Ids, Ids | None]:
    """Samples of one capacity as documents of their own: where they are, their tokens, and their
    labels: as those of ``chosen``, not shifted."""
    shards, owners, parts = data.samples.shards, [], []
    for shard, mine, local in shards.by_shard(ids):
        segments, owner = segments_of(shards.index(shard), local)
        owners.append(mine[owner])
        parts.append(np.asarray(shards.index(shard).segment_length[segments], np.int64))
    order = np.argsort(np.concatenate(owners), kind="stable")
    owner, lengths = np.concatenate(owners)[order], np.concatenate(parts)[order]
    counts = np.bincount(owner, minlength=len(ids))
    used = np.bincount(owner, lengths, len(ids)).astype(np.int64)
    before = np.cumsum(lengths) - lengths - (np.cumsum(used) - used)[owner]
    begins = owner * capacity + before
    batch = data.micro_batch(ids, capacity=capacity)
    following = batch["labels"].numpy()[0, begins + lengths - 1]
    goes_on = following >= 0
    offsets = np.concatenate([[0], np.cumsum(lengths + goes_on)])
    at = np.repeat(begins - offsets[:-1], lengths + goes_on) + np.arange(offsets[-1])
    tokens = np.append(batch["tokens"].numpy()[0], 0)[at]
    tokens[offsets[1:][goes_on] - 1] = following[goes_on]
    pieces = Pieces(offsets, lengths, counts)
    if chosen is None:
        return pieces, tokens, None
    shifted = chosen.micro_batch(ids, capacity=capacity)["labels"].numpy()[0]
    labels = np.concatenate([[-100], shifted])[at]
    labels[offsets[:-1]] = -100  # the first token of a segment is nobody's label in its sample
    return pieces, tokens, labels
