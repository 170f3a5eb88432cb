"""ShardedIndex: many datasets, each packed by itself, as one source; nothing of them is read.

A source of many .bin/.idx pairs, its shards, is what their merge would be: documents are numbered
through the shards, and so are the samples of every bucket: those of the first shard, then those of
the second. So whatever speaks of samples and documents of a source (shuffle, cursors, blends, lists
of excluded documents, scores) does not know of shards, and every epoch has every sample once.

All that a run must know before it draws the first sample stands in the shard manifest
(``megapack.packing.shard_manifest``). A shard is opened when a sample of it is needed, and is then
compared with what the manifest says of it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import xxhash
from numpy.typing import NDArray

from megapack.errors import IndexMismatchError
from megapack.packing.index import SampleIndex
from megapack.storage.remote import is_remote

__all__ = ["Arranged", "PackedShard", "ShardedIndex", "SourceIndex", "place"]

Ids = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class PackedShard:
    """One dataset and its samples: a row of a shard manifest."""

    prefix: str
    """Of the .bin/.idx pair."""
    samples: str
    """Path of its .samples."""
    dtype: str
    num_documents: int
    num_tokens: int
    fingerprint: str
    """Of the documents' layout (``IndexedDataset.fingerprint``), compared whenever it is opened."""
    samples_fingerprint: str
    samples_per_bucket: tuple[int, ...]
    most_segments: tuple[int, ...]
    """Of one sample, in every bucket."""
    longest_segment: int
    """Tokens."""
    longest_reach: int
    """The largest begin + length of a segment, tokens of its document."""
    max_token_id: int | None
    """Of tokens and labels; None: no meta file tells."""
    vocab_size: int | None
    document_end_token: int | None
    labels: bool
    """Whether ``<prefix>.labels`` belongs to it."""

    def absolute(self) -> PackedShard:
        """The same, found from any directory."""
        return replace(self, prefix=place(self.prefix), samples=place(self.samples))


def place(path: str) -> str:
    """The same for two ways to write one path; of an object store it is written whole."""
    return path if is_remote(path) else os.path.abspath(path)  # noqa: PTH100 (links stay)


@dataclass(frozen=True, kw_only=True)
class Arranged:
    """That a source was arranged (``megapack-build arrange``), and how later epochs are drawn."""

    source: str
    """Fingerprint of the source that it was made of."""
    seed: int
    """Of its order."""
    block_tokens: int
    window_blocks: int


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class ShardedIndex:
    """What a ``SampleIndex`` says of itself, of all shards together.

    Attributes:
        path: of the shard manifest; its address, a str, where that is remote.
        shards: in their order; all of the manifest, or some that follow each other.
        strategy, parameters, buckets, seed: how each of them was packed.
        bucket_capacity: int64 (num_buckets,), tokens.
        arranged: the order in which its samples lie, if they lie in one.
    """

    path: Path | str
    shards: tuple[PackedShard, ...]
    strategy: str
    parameters: Mapping[str, Any]
    buckets: Sequence[int]
    seed: int
    bucket_capacity: NDArray[np.int64]
    arranged: Arranged | None = None

    def __repr__(self) -> str:
        return (
            f"ShardedIndex({self.path}: {len(self.shards):,} shards, {self.num_samples:,} samples, "
            f"{self.num_documents:,} documents)"
        )

    # --- what a SampleIndex has ------------------------------------------------------------------

    @cached_property
    def fingerprint(self) -> str:
        """Identity of documents and samples of all shards, and how many there are."""
        text = "".join(f"{s.fingerprint}:{s.samples_fingerprint};" for s in self.shards)
        order = "" if self.arranged is None else ", arranged"
        return f"{xxhash.xxh3_128_hexdigest(text.encode())} of {len(self.shards)} shards{order}"

    @property
    def alignment(self) -> int:
        """As of a SampleIndex."""
        return int(self.parameters.get("alignment", 1))

    @cached_property
    def bucket_sample_offsets(self) -> Ids:
        """int64 (num_buckets + 1,)."""
        return _offsets(self._counts.sum(axis=0))

    @property
    def num_samples(self) -> int:
        return int(self.bucket_sample_offsets[-1])

    @property
    def num_documents(self) -> int:
        return int(self.first_documents[-1])

    @cached_property
    def num_tokens(self) -> int:
        """Of the documents."""
        return sum(shard.num_tokens for shard in self.shards)

    def verify(self) -> None:
        """Read all samples of all shards. Raises FormatError, IndexMismatchError, OSError."""
        for number in range(len(self.shards)):
            self.open(number).verify()

    # --- shards ----------------------------------------------------------------------------------

    @cached_property
    def first_documents(self) -> Ids:
        """int64 (num_shards + 1,): the number of every shard's first document in the source."""
        return _offsets(np.array([shard.num_documents for shard in self.shards], np.int64))

    @cached_property
    def runs(self) -> tuple[Ids, Ids, Ids]:
        """Samples of the source that are consecutive samples of one shard, in their order.

        Returns:
            int64 (runs + 1,), their first numbers in the source, and how many samples it has;
            int64 (runs,), the shard of each; int64 (runs,), the number of the first one there.
        """
        counts = self._counts
        own = np.cumsum(counts, axis=1) - counts  # a shard's samples go on from bucket to bucket
        bucket, shard = np.nonzero(counts.T)  # bucket after bucket, in each shard after shard
        return _offsets(counts[shard, bucket]), shard, np.ascontiguousarray(own[shard, bucket])

    def open(self, number: int) -> SampleIndex:
        """The samples of one shard, mapped.

        Raises:
            IndexMismatchError: the file is not the one that the manifest speaks of.
            FormatError, OSError: it is damaged or missing.
        """
        shard = self.shards[number]
        index = SampleIndex.load(shard.samples)
        counts = tuple(np.diff(index.bucket_sample_offsets).tolist())
        if (index.fingerprint, counts) != (shard.samples_fingerprint, shard.samples_per_bucket):
            raise IndexMismatchError(
                f"{shard.samples} holds other samples than {self.path} says: it was packed again; "
                "restore it, or pack all shards again with --overwrite"
            )
        return index

    def __getstate__(self) -> dict[str, Any]:
        # Absolute: a worker may have another working directory.
        state = {field.name: getattr(self, field.name) for field in fields(self)}
        return {**state, "shards": tuple(shard.absolute() for shard in self.shards)}

    @cached_property
    def _counts(self) -> Ids:
        """(num_shards, num_buckets) samples."""
        return np.array([shard.samples_per_bucket for shard in self.shards], np.int64)


# The samples of one source.
SourceIndex: TypeAlias = "SampleIndex | ShardedIndex"


def _offsets(counts: Ids) -> Ids:
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
