"""Targets of multi-token prediction: labels further ahead in the same document.

A model with multi-token prediction predicts at position i not only token i + 1, the label, but at
depth d also token i + 1 + d (DeepSeek-AI, *DeepSeek-V3*, 2024, section 2.2). That is the label of
position i + d, if this position belongs to the same segment. Two documents of 4 and 2 tokens, of
which the first continues with tokens 9 and 10 in another sample:

    tokens          5  6  7  8 | 1  2
    labels          6  7  8  9 | 2  -
    depth 1         7  8  9  - | -  -      token 10 is known, but depth 1 at position 8 would need
    depth 2         8  9  -  - | -  -      the embedding of token 9, which is not in the batch

A target is missing (-100, weight 0) where its label is missing: beyond the end of a document, in
padding, and where column ``labels`` has none. A target has the loss weight of its label.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from megapack.data.batch import MTP_TARGETS, Batch, segment_ids
from megapack.errors import ConfigError

NO_LABEL = -100


def check_targets(num_targets: int, options: Mapping[str, Any]) -> None:
    """Raise ConfigError if batches with these options (of ``PackedDataset``) do not show where
    documents are cut, so that targets could belong to another document."""
    attention, positions = options["attention"], options["positions"]
    if not num_targets or attention == "document":
        return
    boundary = options["label_boundary"]
    if attention != "sample" or boundary != "document" or positions != "segment":
        raise ConfigError(
            f"num_mtp_targets is {num_targets}, with attention: {attention}, label_boundary: "
            f"{boundary} and positions: {positions}, where batches do not show the ends of all "
            "documents: choose attention: document (or sample, with label_boundary: document and "
            "positions: segment)"
        )


def mtp_targets(batch: Batch, num_targets: int, *, attention: str) -> Batch:
    """Return ``mtp_labels`` int64 and ``mtp_loss_mask`` float32, (rows, R, num_targets), for
    depths 1, 2, ...

    Args:
        batch: whole rows or a whole stream, gathered with options that ``check_targets`` accepts.
        attention: ``document``; or ``sample``, in which documents begin at position id 0.
    """
    labels, loss_mask = batch["labels"], batch["loss_mask"]
    if attention == "sample":
        segments = (batch["position_ids"] == 0).flatten().cumsum(0).view(labels.shape)
        # A window cuts segments between two restarts. Both numbers ascend, so their sum is unique.
        segments = segments + _segments(batch)
    else:
        segments = _segments(batch)
    targets = labels.new_full((*labels.shape, num_targets), NO_LABEL)
    weights = loss_mask.new_zeros(*labels.shape, num_targets)
    for depth in range(1, min(num_targets, labels.shape[1] - 1) + 1):
        inside = segments[:, depth:] == segments[:, :-depth]
        targets[:, :-depth, depth - 1] = torch.where(inside, labels[:, depth:], NO_LABEL)
        weights[:, :-depth, depth - 1] = torch.where(inside, loss_mask[:, depth:], 0)
    return dict(zip(MTP_TARGETS, (targets, weights), strict=True))


def _segments(batch: Batch) -> Tensor:
    """Return the segment number of every token, (rows, R); it ascends within a row."""
    # Aligned segments begin at their padded boundaries.
    name = "cu_seqlens_padded" if "cu_seqlens_padded" in batch else "cu_seqlens"
    cu_seqlens: Tensor = batch[name]
    rows, row_tokens = batch["labels"].shape
    per_row = cu_seqlens.dim() == 2
    numbers = segment_ids(cu_seqlens, row_tokens if per_row else rows * row_tokens)
    return numbers.view(rows, row_tokens)
