"""Small packed batches made by hand, for tests that need no dataset."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megapack.training.config import ModelConfig
from megapack.training.model.architecture import model_configuration
from megapack.training.model.opening import build_model
from megapack.training.model.training_model import TrainingModel

VOCAB = 257


@dataclass(frozen=True)
class Packed:
    tokens: Tensor  # [1, T]
    labels: Tensor
    position_ids: Tensor
    cu_seqlens: Tensor
    max_seqlen: int

    def arguments(self) -> dict[str, object]:
        return {
            "tokens": self.tokens,
            "labels": self.labels,
            "position_ids": self.position_ids,
            "cu_seqlens": self.cu_seqlens,
            "max_seqlen": self.max_seqlen,
        }


def documents(lengths: list[int], seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, VOCAB, (n,), generator=generator) for n in lengths]


def pack_documents(docs: list[Tensor], padding: int = 0) -> Packed:
    """One stream; the padding is its own last segment, with token 0 and no labels."""
    pad = [torch.zeros(padding, dtype=torch.int64)] if padding else []
    pieces = docs + pad
    labels = []
    for doc in docs:
        labels.append(torch.cat([doc[1:], torch.tensor([-100])]))
    labels += [torch.full((padding,), -100)] if padding else []
    lengths = [len(piece) for piece in pieces]
    return Packed(
        tokens=torch.cat(pieces).unsqueeze(0),
        labels=torch.cat(labels).unsqueeze(0),
        position_ids=torch.cat([torch.arange(n) for n in lengths]).unsqueeze(0),
        cu_seqlens=torch.tensor([0, *lengths]).cumsum(0).to(torch.int32),
        max_seqlen=max(lengths),
    )


def tiny_model(
    preset: str, *, backend: str = "sdpa", seed: int = 0, **more: object
) -> TrainingModel:
    config = ModelConfig(preset=preset, **more)  # type: ignore[arg-type]
    configuration = model_configuration(config, VOCAB)
    return build_model(config, configuration, backend=backend, seed=seed, chunk_tokens=32)
