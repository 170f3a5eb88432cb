"""What a packing is worth: the metrics of BucketLLM section 3, made exact, and a few more.

All are counted from the arrays of an index and the document lengths, so they mean the same for
every strategy. Ratios are fractions, not percent.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from megapack import _core

if TYPE_CHECKING:
    from megapack.packing.index import SampleIndex

__all__ = ["compute_metrics"]


def compute_metrics(
    index: SampleIndex,
    lengths: NDArray[np.int32] | NDArray[np.int64],
    *,
    dropped_tokens: int,
    repeated_tokens: int,
) -> dict[str, Any]:
    """Metrics of ``index`` over the documents it was packed from.

    Returns:
        dict of JSON values. Counts: num_documents, num_empty_documents, num_tokens, num_samples,
        num_segments, num_truncated_documents (cut into several segments, or losing tokens; each
        once), num_documents_longer_than_largest_bucket. Tokens: placed_tokens, padding_tokens,
        dropped_tokens, repeated_tokens; tokens_per_bucket (placed) and samples_per_bucket are
        lists along ``bucket_capacity``. Ratios: padding_ratio (padding / samples x capacity),
        truncation_ratio (truncated / all documents) and truncation_floor (documents that no bucket
        holds / all documents), concatenation_ratio (documents / samples), utilization
        (1 - padding_ratio), dropped_ratio and repeated_ratio (of num_tokens), segments_per_sample,
        cross_document_share (of the token pairs of a sample, those in two different segments).
        attention_cost: sum of segment length squared; attention_cost_sample: sum of capacity
        squared, what attention across documents costs.
    """
    capacities = [int(c) for c in index.bucket_capacity]
    documents = _core.count_documents(lengths, capacities[-1])
    totals = _core.measure_samples(*index.segment_arrays(), lengths)
    samples = np.diff(index.bucket_sample_offsets).tolist()
    slots = sum(c * n for c, n in zip(capacities, samples, strict=True))
    placed = sum(totals["tokens_per_bucket"])
    num_tokens = documents["num_tokens"]
    # The law that every token is accounted for; a strategy that breaks it has a bug.
    assert num_tokens == placed - repeated_tokens + dropped_tokens, (
        f"{index.strategy}: {num_tokens} tokens != {placed} placed - {repeated_tokens} repeated "
        f"+ {dropped_tokens} dropped"
    )
    num_documents = len(lengths)
    num_truncated = num_documents - documents["num_empty"] - totals["whole_documents"]
    return {
        "num_documents": num_documents,
        "num_empty_documents": documents["num_empty"],
        "num_tokens": num_tokens,
        "num_samples": index.num_samples,
        "num_segments": index.num_segments,
        "num_truncated_documents": num_truncated,
        "num_documents_longer_than_largest_bucket": documents["num_longer"],
        "placed_tokens": placed,
        "padding_tokens": slots - placed,
        "dropped_tokens": dropped_tokens,
        "repeated_tokens": repeated_tokens,
        "tokens_per_bucket": totals["tokens_per_bucket"],
        "samples_per_bucket": samples,
        "padding_ratio": _ratio(slots - placed, slots),
        "truncation_ratio": _ratio(num_truncated, num_documents),
        "truncation_floor": _ratio(documents["num_longer"], num_documents),
        "concatenation_ratio": _ratio(num_documents, index.num_samples),
        "utilization": _ratio(placed, slots),
        "dropped_ratio": _ratio(dropped_tokens, num_tokens),
        "repeated_ratio": _ratio(repeated_tokens, num_tokens),
        "segments_per_sample": _ratio(index.num_segments, index.num_samples),
        "cross_document_share": _ratio(
            totals["sample_squares"] - totals["segment_squares"], totals["sample_squares"]
        ),
        "attention_cost": totals["segment_squares"],
        "attention_cost_sample": sum(c * c * n for c, n in zip(capacities, samples, strict=True)),
    }


def _ratio(part: int, whole: int) -> float:
    return part / whole if whole else 0.0
