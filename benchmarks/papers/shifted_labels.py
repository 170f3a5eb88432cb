"""Labels as most trainers make them: the inputs of a sample, shifted by one."""

from __future__ import annotations

import torch

from megapack.data import Batch

__all__ = ["shifted"]


def shifted(batch: Batch) -> Batch:
    """Every token of a sample has the next one of the sample as its label, the last one has none.

    Only for micro batches that are a whole step, as ``num_step_label_tokens`` is counted here.
    """
    tokens, labels = batch["tokens"].flatten(), batch["labels"].flatten()
    changed = torch.where(labels >= 0, tokens.roll(-1).to(labels.dtype), labels)
    changed[batch["cu_seqlens"].long()[1:] - 1] = -100
    count = max(1, int((changed >= 0).sum()))
    return {**batch, "labels": changed.view_as(batch["labels"]), "num_step_label_tokens": count}
