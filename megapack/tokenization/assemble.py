"""Finished shards -> one dataset, in the order of the corpus."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megapack.storage import IndexedDataset, IndexedDatasetBuilder

__all__ = ["concatenate"]


def concatenate(
    prefixes: Sequence[str],
    output_prefix: str,
    *,
    dtype: str,
    vocab_size: int,
    metadata: Mapping[str, Any],
) -> None:
    """Write all documents of ``prefixes``, in order, as ``output_prefix``."""
    with IndexedDatasetBuilder(
        output_prefix, dtype, vocab_size=vocab_size, metadata=metadata
    ) as builder:
        for prefix in prefixes:
            dataset = IndexedDataset(prefix)
            builder.add_documents(dataset.tokens, dataset.document_offsets)
