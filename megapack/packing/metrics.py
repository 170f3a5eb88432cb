"""Metrics of a packing: those of BucketLLM section 3, exact, and a few more.

All are computed from the arrays of an index and the totals of its documents, so they mean the same
for every strategy. Ratios are fractions, not percent.

    pack([5, 3, 9, 2], "bucket", buckets=[4, 8]).metrics()
    # -> padding_ratio 0.05 (1 of 20 positions), truncation_ratio 0.25 and truncation_floor 0.25
    #    (one of four documents is longer than 8), concatenation_ratio 1.33 (4 documents, 3 samples)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from megapack import _core

Lengths = NDArray[np.int32] | NDArray[np.int64]
# bucket_sample_offsets, sample_segment_offsets, segment_document, segment_begin, segment_length
SegmentArrays = tuple[NDArray[Any], NDArray[Any], NDArray[Any], NDArray[Any], NDArray[Any]]

COUNTS = (
    "num_documents",
    "num_empty_documents",
    "num_tokens",
    "num_samples",
    "num_segments",
    "num_truncated_documents",
    "num_documents_longer_than_largest_bucket",
    "placed_tokens",
    "padding_tokens",
    "dropped_tokens",
    "repeated_tokens",
    "attention_cost",
    "attention_cost_sample",
)
LISTS = ("tokens_per_bucket", "samples_per_bucket")
RATIOS = (
    "padding_ratio",
    "truncation_ratio",
    "truncation_floor",
    "concatenation_ratio",
    "utilization",
    "dropped_ratio",
    "repeated_ratio",
    "segments_per_sample",
    "cross_document_share",
)


def array_checksum(array: NDArray[Any]) -> str:
    """Return xxh3_64 of an array's bytes as 16 hex digits."""
    return xxhash.xxh3_64_hexdigest(np.ascontiguousarray(array).data)


def lengths_fingerprint(lengths: NDArray[Any]) -> str:
    """Return the checksum of document lengths; it does not depend on their integer type."""
    wide = lengths.dtype.itemsize > 4 and len(lengths) and int(lengths.max()) > (1 << 31) - 1
    return array_checksum(np.ascontiguousarray(lengths, dtype="<i8" if wide else "<i4"))


@dataclass(frozen=True, kw_only=True)
class DocumentTotals:
    """Totals of the documents that an index was packed from."""

    num_documents: int
    num_empty: int
    num_longer: int  # documents longer than the largest bucket
    num_tokens: int
    # Documents that one segment contains from first to last token. None: the packing dropped no
    # tokens, so every nonempty document with a single segment is whole.
    num_whole: int | None
    lengths_fingerprint: str
    num_with_fim_room: int | None = None  # documents of one segment; None: fim_room is 0

    @classmethod
    def of(cls, lengths: Lengths, checked: _core.DocumentLengths) -> DocumentTotals:
        """Return the totals; ``checked`` was made with the largest capacity."""
        return cls(
            num_documents=len(lengths),
            num_empty=checked.num_empty,
            num_longer=checked.num_longer,
            num_tokens=checked.num_tokens,
            num_whole=None,
            lengths_fingerprint=lengths_fingerprint(lengths),
        )


def compute_metrics(
    bucket_capacity: NDArray[np.int64],
    segment_arrays: SegmentArrays,
    documents: DocumentTotals,
    *,
    dropped_tokens: int,
    repeated_tokens: int,
    in_trees: bool = False,
) -> dict[str, Any]:
    """Return the metrics of an index, as JSON values.

    Returns:
        Counts: num_documents, num_empty_documents, num_tokens, num_samples, num_segments,
        num_truncated_documents (cut into several segments, or losing tokens; each counted once),
        num_documents_longer_than_largest_bucket. Tokens: placed_tokens, padding_tokens,
        dropped_tokens, repeated_tokens. Lists along ``bucket_capacity``: tokens_per_bucket
        (placed) and samples_per_bucket. Ratios, without empty documents: padding_ratio (padding /
        samples x capacity), truncation_ratio (truncated / documents) and truncation_floor (its
        lower bound: documents longer than every bucket / documents), concatenation_ratio
        (documents / samples), utilization (1 - padding_ratio), dropped_ratio and repeated_ratio
        (of num_tokens), segments_per_sample, cross_document_share (share of the token pairs of a
        sample that lie in two different segments). attention_cost: sum of segment length squared;
        attention_cost_sample: sum of capacity squared, the cost of attention across documents.
        ``in_trees``: segments are nodes of prefix trees. Then tokens that documents share count
        once in placed_tokens, and shared_tokens are num_tokens - placed_tokens; attention_cost
        counts a node with its path.
    """
    bucket_sample_offsets, sample_segment_offsets = segment_arrays[:2]
    counted = _core.measure_samples(*segment_arrays, documents.num_documents)
    capacities = bucket_capacity.tolist()
    samples = np.diff(bucket_sample_offsets).tolist()
    num_samples, num_segments = len(sample_segment_offsets) - 1, len(segment_arrays[2])
    positions = sum(c * n for c, n in zip(capacities, samples, strict=True))
    placed = sum(counted["tokens_per_bucket"])
    shared = documents.num_tokens - placed if in_trees else 0
    # Every token is accounted for; otherwise the strategy has a bug.
    assert documents.num_tokens == placed - repeated_tokens + dropped_tokens + shared, (
        f"{documents.num_tokens} tokens != {placed} placed - {repeated_tokens} repeated "
        f"+ {dropped_tokens} dropped"
    )
    num_filled = documents.num_documents - documents.num_empty
    truncated, pairs = counted["cut_documents"], counted["segment_squares"]
    if in_trees:
        truncated, pairs = 0, int(segment_pairs(*segment_arrays[3:]).sum())
    if documents.num_whole is not None:
        truncated = num_filled - documents.num_whole
    return {
        "num_documents": documents.num_documents,
        "num_empty_documents": documents.num_empty,
        "num_tokens": documents.num_tokens,
        "num_samples": num_samples,
        "num_segments": num_segments,
        "num_truncated_documents": truncated,
        "num_documents_longer_than_largest_bucket": documents.num_longer,
        "placed_tokens": placed,
        "padding_tokens": positions - placed,
        "dropped_tokens": dropped_tokens,
        "repeated_tokens": repeated_tokens,
        "tokens_per_bucket": counted["tokens_per_bucket"],
        "samples_per_bucket": samples,
        "padding_ratio": _ratio(positions - placed, positions),
        "truncation_ratio": _ratio(truncated, num_filled),
        "truncation_floor": _ratio(documents.num_longer, num_filled),
        "concatenation_ratio": _ratio(num_filled, num_samples),
        "utilization": _ratio(placed, positions),
        "dropped_ratio": _ratio(dropped_tokens, documents.num_tokens),
        "repeated_ratio": _ratio(repeated_tokens, documents.num_tokens),
        "segments_per_sample": _ratio(num_segments, num_samples),
        "cross_document_share": _ratio(
            counted["sample_squares"] - pairs, counted["sample_squares"]
        ),
        "attention_cost": pairs,
        "attention_cost_sample": sum(c * c * n for c, n in zip(capacities, samples, strict=True)),
        **({"shared_tokens": shared} if in_trees else {}),
    }


def segment_pairs(begin: NDArray[Any], length: NDArray[Any]) -> NDArray[np.int64]:
    """Return the attention work of nodes of prefix trees, int64 (num_segments,), in the unit of
    length squared: (begin + length)^2 - begin^2, since a node also attends to the path to it."""
    first = np.asarray(begin, np.int64)
    pairs: NDArray[np.int64] = (first + length) ** 2 - first**2
    return pairs


def _ratio(part: int, whole: int) -> float:
    return part / whole if whole else 0.0
