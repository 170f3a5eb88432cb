"""Small models of packed rows, with and without faults."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

WIDTH, IDS = 16, 50


def numbers(cu_seqlens: Tensor, num_tokens: int) -> Tensor:
    """Return the document of every token."""
    return torch.bucketize(torch.arange(num_tokens), cu_seqlens[1:].long(), right=True)


class Attention(nn.Module):
    """Causal attention inside documents."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, of_token: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        seen = (of_token[:, None] == of_token) & torch.ones(x.shape[1], x.shape[1]).tril().bool()
        weights = (q @ k.transpose(1, 2) / 4).masked_fill(~seen, -torch.inf).softmax(-1)
        made: Tensor = self.out(weights @ v)
        return made


class Edge(nn.Module):
    """Adds the mean of one document's tokens to all tokens of another, from ``skip`` on."""

    def __init__(self, source: int, to: int, skip: int = 0) -> None:
        super().__init__()
        self.source, self.to, self.skip = source, to, skip

    def forward(self, x: Tensor, of_token: Tensor) -> Tensor:
        where = (of_token == self.to).nonzero()[self.skip :, 0]
        added = torch.zeros_like(x)
        added[:, where] = x[:, of_token == self.source].mean(dim=1, keepdim=True)
        return added


class Model(nn.Module):
    """Layers on embedded tokens, and a head."""

    def __init__(self, *layers: nn.Module, ids: int = IDS) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.embed = nn.Embedding(ids, WIDTH)
            self.layers = nn.ModuleList([Attention(), *layers, Attention()])
            self.norm = nn.LayerNorm(WIDTH)
            self.lm_head = nn.Linear(WIDTH, ids)

    def forward(self, input_ids: Tensor, cu_seqlens: Tensor) -> Tensor:
        x = self.embed(input_ids)
        of_token = numbers(cu_seqlens, x.shape[1])
        for layer in self.layers:
            x = x + layer(x, of_token)
        made: Tensor = self.lm_head(self.norm(x))
        return made


def batch_of(lengths: list[int], ids: int = IDS) -> dict[str, Any]:
    """Return a row of documents."""
    generator = torch.Generator().manual_seed(7)
    return {
        "input_ids": torch.randint(0, ids, (1, sum(lengths)), generator=generator),
        "cu_seqlens": torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32),
    }
