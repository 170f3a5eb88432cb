"""Small inputs that several tests share: rows with known segments, documents, a tokenizer."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megapack.storage import IndexedDataset, IndexedDatasetBuilder


def make_row(lengths: list[int], first_token: int = 1, entries: int = 0) -> dict[str, Tensor]:
    """One dataset row whose segments have these lengths; cu_seqlens padded to ``entries``."""
    total = sum(lengths)
    tokens = torch.arange(first_token, first_token + total)
    mask = torch.ones(total)
    ends = torch.tensor(lengths).cumsum(0)
    mask[ends - 1] = 0.0
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.int64), ends])
    if entries:
        fill = (0, entries - cu_seqlens.numel())
        cu_seqlens = torch.nn.functional.pad(cu_seqlens, fill, value=total)
    return {
        "tokens": tokens,
        "labels": tokens + 1,
        "loss_mask": mask,
        "position_ids": torch.cat([torch.arange(n) for n in lengths]),
        "cu_seqlens": cu_seqlens.to(torch.int32),
        "max_seqlen": torch.tensor(max(lengths), dtype=torch.int32),
    }


def make_dataset(folder: Path, lengths: list[int], name: str = "text") -> IndexedDataset:
    """Documents of these lengths with tokens 0, 1, 2, ... modulo 1000."""
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    with IndexedDatasetBuilder(folder / name, np.uint16, overwrite=True) as builder:
        builder.add_documents(np.arange(offsets[-1]) % 1000, offsets)
    return IndexedDataset(folder / name)


@dataclass
class Tokenizer:
    """The four attributes that megatron-core's datasets read of a tokenizer."""

    vocab_size: int
    eod: int
    pad: int = -1

    @property
    def unique_identifiers(self) -> dict[str, Any]:
        return {"class": "Tokenizer", **asdict(self)}
