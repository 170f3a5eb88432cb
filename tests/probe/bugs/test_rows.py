"""Public bugs that mix the tokens of a row: experts, statistics, losses, multi-token prediction.

The attention of every model here is right.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .corpus import Bug, check
from .parts import WIDTH, Attention, Decoder, Layer, Mlp, packed_batch, token_losses

# ---- Experts and statistics

EXPERTS = 4


class Experts(nn.Module):
    """Mixture of experts, one per token; without a capacity no token is dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(Mlp() for _ in range(EXPERTS))

    def kept(self, scores: Tensor) -> Tensor:
        """Return which tokens each expert takes, bool ``[T, experts]``, for scores alike."""
        return F.one_hot(scores.argmax(-1), EXPERTS).bool()

    def forward(self, x: Tensor, **given: Any) -> Tensor:
        scores = self.router(x[0]).softmax(-1)
        kept = self.kept(scores)
        out = torch.zeros_like(x[0])
        for number, expert in enumerate(self.experts):
            places = kept[:, number].nonzero()[:, 0]
            out = out.index_add(0, places, scores[places, number, None] * expert(x[0][places]))
        return out[None]


class DroppingExperts(Experts):
    """DeepSeek-V2#48: capacity = tokens x top k / experts; tokens over it are dropped in order.

    Which tokens of a document lose their expert depends on the documents before it in the row.
    """

    def kept(self, scores: Tensor) -> Tensor:
        chosen = super().kept(scores)
        capacity = math.ceil(len(scores) / EXPERTS)
        return chosen & (chosen.cumsum(0) <= capacity)


class ChoosingExperts(Experts):
    """MoSA#3: experts choose tokens, so a token competes with all of the row, also later ones."""

    def kept(self, scores: Tensor) -> Tensor:
        chosen = scores.topk(math.ceil(len(scores) / EXPERTS), dim=0).indices
        return torch.zeros_like(scores, dtype=torch.bool).scatter(0, chosen, True)


class RowMean(Mlp):
    """MEO#2: the router takes the mean over the sequence, which is the row of all documents."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: Tensor, **given: Any) -> Tensor:
        return self.down(F.gelu(self.up(x)) * self.gate(x.mean(1, keepdim=True)).sigmoid())


class TokenScale(RowMean):
    def forward(self, x: Tensor, **given: Any) -> Tensor:
        return self.down(F.gelu(self.up(x)) * self.gate(x).sigmoid())


# ---- Losses


class ShiftedRow:
    """torchtune#2613, torchtitan#4075: labels are the tokens of the row, moved by one.

    The last token of a document is trained to predict the first one of the next document.
    """

    def __init__(self, at_ends: bool) -> None:
        self.model, self.at_ends = Decoder(), at_ends

    def __call__(self, batch: dict[str, Tensor]) -> Tensor:
        tokens, ends = batch["input_ids"], batch["cu_seqlens"]
        labels = F.pad(tokens[:, 1:], (0, 1), value=-100)
        if not self.at_ends:
            labels[:, ends[1:].long() - 1] = -100
        return token_losses(self.model(tokens, cu_seqlens=ends), labels)


class ShiftedTwice:
    """transformers#32944: the data set moved the labels, and so does the loss.

    A token's loss is taken where the mask of the batch has 0: at the end of each document.
    """

    def __init__(self, shift: int) -> None:
        self.model, self.shift = Decoder(), shift

    def __call__(self, batch: dict[str, Tensor]) -> Tensor:
        labels = batch["labels"].roll(-self.shift, dims=1)
        return token_losses(self.model(batch["input_ids"], cu_seqlens=batch["cu_seqlens"]), labels)


class MultiTokenLayer(nn.Module):
    """Megatron-LM#1661: predict one token further from the state and the next token's embedding."""

    def __init__(self, within: bool) -> None:
        super().__init__()
        self.hnorm, self.enorm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.eh_proj = nn.Linear(2 * WIDTH, WIDTH)
        self.layer = Layer(Attention(), Mlp())
        self.within = within

    def forward(self, hidden: Tensor, ids: Tensor, embed: nn.Module, cu_seqlens: Tensor) -> Tensor:
        moved = ids.roll(-1, dims=1)
        if self.within:  # Megatron's _roll_tensor_packed_seq
            moved[:, cu_seqlens[1:].long() - 1] = 0
        both = torch.cat([self.hnorm(hidden), self.enorm(embed(moved))], dim=-1)
        return self.layer(self.eh_proj(both), cu_seqlens=cu_seqlens)


class MultiToken(nn.Module):
    """Decoder with a layer of multi-token prediction; returns the sum of both losses per token."""

    def __init__(self, within: bool) -> None:
        super().__init__()
        self.decoder, self.within = Decoder(), within
        self.mtp = nn.ModuleList([MultiTokenLayer(within)])

    def forward(self, input_ids: Tensor, labels: Tensor, cu_seqlens: Tensor) -> Tensor:
        hidden = self.decoder.hidden(input_ids, cu_seqlens=cu_seqlens)
        losses = token_losses(self.decoder.head(hidden), labels)
        for layer in self.mtp:
            hidden = layer(hidden, input_ids, self.decoder.embed, cu_seqlens)
            labels = labels.roll(-1, dims=1)
            labels = labels.masked_fill(self.crosses(cu_seqlens), -100)
            losses = losses + token_losses(self.decoder.head(hidden), labels)
        return losses

    def crosses(self, cu_seqlens: Tensor) -> Tensor:
        """Return whether a token's second next token is in another document."""
        last = torch.zeros(int(cu_seqlens[-1]), dtype=torch.bool)
        last[cu_seqlens[1:].long() - 1] = True
        return last & self.within


ENDS = packed_batch("cu_seqlens")
LABELS = packed_batch("cu_seqlens", "labels")
MASKED = packed_batch("cu_seqlens", "labels", "loss_mask")
BUGS = [
    Bug("deepseek-ai/DeepSeek-V2#48", lambda: Decoder(mlp=DroppingExperts),
        lambda: Decoder(mlp=Experts), ENDS, "expert_capacity", "layers.1.mlp"),
    Bug("piotrpiekos/MoSA#3", lambda: Decoder(mlp=ChoosingExperts), lambda: Decoder(mlp=Experts),
        ENDS, "expert_capacity", "layers.1.mlp"),
    Bug("Shwai-He/MEO#2", lambda: Decoder(mlp=RowMean), lambda: Decoder(mlp=TokenScale), ENDS,
        "row_statistics", "layers.1.mlp"),
    Bug("meta-pytorch/torchtune#2613", lambda: ShiftedRow(True), lambda: ShiftedRow(False), ENDS,
        "loss_mask", None, pairs={(1, 0), (2, 1)}),
    Bug("huggingface/transformers#32944", lambda: ShiftedTwice(1), lambda: ShiftedTwice(0),
        MASKED, "loss_mask", None),
    Bug("NVIDIA/Megatron-LM#1661", lambda: MultiToken(False), lambda: MultiToken(True), LABELS,
        "mtp", "mtp.0", pairs={(1, 0), (2, 1)}),
]  # fmt: skip


@pytest.mark.parametrize("bug", BUGS, ids=str)
def test_a_bug_of_a_row_is_found(bug: Bug) -> None:
    check(bug)
