"""What a shard manifest holds, as `pack` and `inspect` tell it."""

from __future__ import annotations

from typing import Any

import numpy as np

from megapack.cli.report import note, print_table
from megapack.packing.shards import ShardedIndex
from megapack.units import count, counted, percent

__all__ = ["describe_shards", "print_shards"]


def describe_shards(index: ShardedIndex) -> dict[str, Any]:
    """Facts about a source of many datasets as JSON values."""
    return {
        "manifest": str(index.path),
        "num_shards": len(index.shards),
        "num_documents": index.num_documents,
        "num_tokens": index.num_tokens,
        "num_samples": index.num_samples,
        "bucket_capacity": index.bucket_capacity.tolist(),
        "samples_per_bucket": np.diff(index.bucket_sample_offsets).tolist(),
        "fingerprint": index.fingerprint,
    }


def print_shards(index: ShardedIndex, remark: str = "", *, each: bool = False) -> None:
    """A row per bucket and, with ``each``, per shard, then the sums; ``remark`` follows the number
    of shards."""
    facts = describe_shards(index)
    buckets = list(zip(facts["bucket_capacity"], facts["samples_per_bucket"], strict=True))
    positions = max(1, sum(capacity * number for capacity, number in buckets))
    print_table(
        ("bucket", "samples", "of all tokens"),
        [(count(c), count(n), percent(c * n / positions)) for c, n in buckets],
    )
    if each:
        print()
        print_table(
            ("shard", "documents", "tokens", "samples", "type", "labels"),
            [
                (
                    shard.prefix,
                    count(shard.num_documents),
                    count(shard.num_tokens),
                    count(sum(shard.samples_per_bucket)),
                    shard.dtype,
                    "yes" if shard.labels else "",
                )
                for shard in index.shards
            ],
        )
    print(
        f"\n{index.path}: {counted(facts['num_shards'], 'dataset')}{remark}, "
        f"{count(index.num_documents)} documents, {count(index.num_tokens)} tokens -> "
        f"{count(index.num_samples)} samples"
    )
    if index.arranged is not None:
        print(f"arranged in the order of seed {index.arranged.seed}")
    unknown = sum(shard.max_token_id is None for shard in index.shards)
    if unknown:
        note(
            f"{counted(unknown, 'dataset')} without .meta.json: nobody checks their token ids "
            "against a model (`megapack-build import` writes it)"
        )
