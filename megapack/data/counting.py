"""What samples cost and how many labels they have, by their index alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from megapack.errors import ConfigError
from megapack.packing import SampleIndex

__all__ = ["Masks", "document_ends", "label_counts", "segment_costs", "segments_of"]

Ids = NDArray[np.int64]

# document of each segment -> whether it is masked
Masks: TypeAlias = Callable[[Ids], NDArray[np.bool_]]


def segment_costs(
    index: SampleIndex, samples: Ids, masks: Masks, *, capacity: int, window: int, whole: bool
) -> Ids:
    """(len(samples),) token pairs: squared lengths of what attends to itself, padding included.

    Args:
        index, samples: numbers of samples of one capacity.
        masks: segments that are padding.
        capacity: of the samples, tokens.
        window: attention, also in padding, stays inside pieces of so many tokens.
        whole: samples attend as a whole instead of segment by segment.
    """
    segments, owner = segments_of(index, samples)
    documents = np.asarray(index.segment_document[segments], np.int64)
    lengths = np.asarray(index.segment_length[segments], np.int64)
    kept = np.where(masks(documents), 0, lengths)
    used = _sums(owner, kept, len(samples))
    own, padding = (
        window * window * (n // window) + (n % window) ** 2
        for n in (used if whole else kept, capacity - used)
    )
    return padding + (own if whole else _sums(owner, own, len(samples)))


def label_counts(index: SampleIndex, samples: Ids, masks: Masks, ends: Ids) -> Ids:
    """(len(samples),) tokens with a label: all but the last one of each document that ends there.

    Args:
        index, samples: numbers of samples.
        masks: segments that are padding.
        ends: ``document_ends(index)``.
    """
    segments, owner = segments_of(index, samples)
    documents = np.asarray(index.segment_document[segments], np.int64)
    lengths = np.asarray(index.segment_length[segments], np.int64)
    last = np.asarray(index.segment_begin[segments], np.int64) + lengths == ends[documents]
    labels = np.where(masks(documents), 0, lengths - last)
    return _sums(owner, labels, len(samples))


def document_ends(index: SampleIndex) -> Ids:
    """Length of every document of an index.

    Raises:
        ConfigError: the index dropped tokens, so it does not know.
    """
    dropped = index.metrics()["dropped_tokens"]
    if dropped:
        raise ConfigError(
            f"the index dropped {dropped} tokens, so it does not tell where documents end: make "
            "the schedule from the PackedDataset, which counts labels exactly"
        )
    ends = np.zeros(int(np.max(index.segment_document)) + 1, np.int64)
    np.maximum.at(
        ends,
        index.segment_document,
        np.asarray(index.segment_begin, np.int64) + index.segment_length,
    )
    return ends


def segments_of(index: SampleIndex, samples: Ids) -> tuple[Ids, Ids]:
    """Numbers of the segments of some samples, and the position of the sample of each."""
    first = np.asarray(index.sample_segment_offsets[samples])
    counts = np.asarray(index.sample_segment_offsets[samples + 1]) - first
    before = np.cumsum(counts) - counts
    segments = np.repeat(first - before, counts) + np.arange(counts.sum())
    return segments, np.repeat(np.arange(len(samples)), counts)


def _sums(groups: Ids, values: Ids, num_groups: int) -> Ids:
    return np.bincount(groups, values, num_groups).astype(np.int64)
