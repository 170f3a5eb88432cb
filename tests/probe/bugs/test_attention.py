"""Public bugs in attention masks and positions, rebuilt as tiny models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .corpus import Bug, check
from .parts import (
    LENGTHS,
    WIDTH,
    Attention,
    Decoder,
    block_causal,
    causal,
    offsets_of,
    packed_batch,
    segments_of,
)


def everywhere(attention: type[Attention]) -> Decoder:
    """Return a model with this attention in all layers."""
    return Decoder(attention, others=attention)


# ---- Masks


class NumbersToBool(Attention):
    """axolotl#3796: the mask holds document numbers (1, 1, 1, 2, 2), and sdpa casts it to bool.

    The numbers reach the attention, but every number but 0 is True: what remains of the boundaries
    is padding.
    """

    def visible(self, length: int, *, segment_ids: Tensor, **given: Any) -> Tensor:
        return causal(length) & segment_ids[0].bool()


class NumbersCompared(Attention):
    def visible(self, length: int, *, segment_ids: Tensor, **given: Any) -> Tensor:
        return causal(length) & (segment_ids[0][:, None] == segment_ids[0])


class PositionsWithoutMask(Attention):
    """transformers#46634: restarts of position ids count only if no attention mask is given.

    The collator gives one of ones, so the model builds the plain causal mask.
    """

    def visible(
        self, length: int, *, position_ids: Tensor, attention_mask: Tensor | None = None,
        **given: Any,
    ) -> Tensor:  # fmt: skip
        mask = causal(length)
        if attention_mask is None:
            documents = (position_ids[0] == 0).cumsum(0)
            mask = mask & (documents[:, None] == documents)
        return mask


class PreparedMasks(PositionsWithoutMask):
    """AReaL#1442: the engine passes ``{"full_attention": None}``, ends and restarting positions.

    A mapping counts as masks that are made already; None of them means plain causal attention for
    sdpa and eager. Only varlen kernels read the ends.
    """

    def visible(self, length: int, *, attention_mask: Any = None, **given: Any) -> Tensor:
        if isinstance(attention_mask, dict):
            mask: Tensor | None = attention_mask["full_attention"]
            return causal(length) if mask is None else mask
        return super().visible(length, attention_mask=attention_mask, **given)


def with_mapping(target: nn.Module) -> Any:
    def forward(batch: dict[str, Tensor]) -> Tensor:
        return target(**batch, attention_mask={"full_attention": None})

    return forward


def with_ones(target: nn.Module) -> Any:
    def forward(batch: dict[str, Tensor]) -> Tensor:
        return target(**batch, attention_mask=torch.ones_like(batch["input_ids"]))

    return forward


class TrainingKernel(Attention):
    """MaxText#4476: in training another kernel runs, with no argument for segment ids."""

    def forward(self, x: Tensor, **given: Any) -> Tensor:
        if not self.training:
            return super().forward(x, **given)
        mixed = F.scaled_dot_product_attention(*self.heads(x, **given), is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class OneSplit(Attention):
    """HunyuanVideo#310: the torch path reads ``cu_seqlens[1]`` and no later boundary."""

    def visible(self, length: int, *, cu_seqlens: Tensor, **given: Any) -> Tensor:
        return block_causal(torch.tensor([0, int(cu_seqlens[1]), length]))


class UnknownArgument(Attention):
    """NeMo-RL#2105: the trainer passes a dataclass under one name, the model expects its fields.

    ``**kwargs`` accepts both, so nothing fails: the boundaries arrive under a name nobody reads.
    """

    def visible(self, length: int, *, cu_seqlens: Tensor | None = None, **given: Any) -> Tensor:
        return causal(length) if cu_seqlens is None else block_causal(cu_seqlens)


def with_dataclass(model: nn.Module) -> Any:
    def forward(batch: dict[str, Tensor]) -> Tensor:
        arguments = {"cu_seqlens": batch["cu_seqlens"], "max_seqlen": 17}
        return model(batch["input_ids"], flash_attn_kwargs=arguments)

    return forward


def with_fields(model: nn.Module) -> Any:
    return lambda batch: model(batch["input_ids"], cu_seqlens=batch["cu_seqlens"])


def _near(length: int, window: int) -> Tensor:
    distance = torch.arange(length)[:, None] - torch.arange(length)
    return (distance >= 0) & (distance < window)


class RowWindow(Attention):
    """torchtitan#4801: a sparse window counts keys back through the row, across document begins.

    Only the first tokens of a document see the end of the one before it.
    """

    def visible(self, length: int, **given: Any) -> Tensor:
        return _near(length, 4)


class DocumentWindow(Attention):
    def visible(self, length: int, *, cu_seqlens: Tensor, **given: Any) -> Tensor:
        return _near(length, 4) & block_causal(cu_seqlens)


class RowChunks(Attention):
    """transformers#40324: chunks are counted from the first token of the row.

    Documents stay apart, but a chunk now ends inside a document where alone it would not: the
    output of a document depends on the lengths of those before it.
    """

    def visible(self, length: int, *, cu_seqlens: Tensor, **given: Any) -> Tensor:
        chunks = torch.arange(length) // 8
        return block_causal(cu_seqlens) & (chunks[:, None] == chunks)


class DocumentChunks(Attention):
    def visible(self, length: int, *, cu_seqlens: Tensor, **given: Any) -> Tensor:
        chunks = offsets_of(cu_seqlens) // 8
        return block_causal(cu_seqlens) & (chunks[:, None] == chunks)


class FirstRowsMask:
    """torchtitan#1723: the mask of a batch is made once, before a pipeline splits it.

    Every micro batch then uses the mask of the first row.
    """

    def __init__(self, broken: bool) -> None:
        self.model, self.broken = everywhere(MaskGiven), broken

    def __call__(self, batch: dict[str, Tensor]) -> Tensor:
        documents = (batch["position_ids"] == 0).cumsum(1)
        masks = causal(documents.shape[1]) & (documents[:, :, None] == documents[:, None])
        rows = batch["input_ids"].split(1)
        numbers = [0 if self.broken else row for row in range(len(rows))]
        return torch.cat([self.model(x, mask=masks[i]) for x, i in zip(rows, numbers, strict=True)])


class MaskGiven(Attention):
    def visible(self, length: int, *, mask: Tensor, **given: Any) -> Tensor:
        return mask


def two_rows() -> dict[str, Tensor]:
    """Return rows of documents of 14, 9, 17 tokens and of 11, 21, 8."""
    rows = [packed_batch("position_ids", lengths=lengths) for lengths in (LENGTHS, (11, 21, 8))]
    return {name: torch.cat([row[name] for row in rows]) for name in rows[0]}


class MisplacedGradient(torch.autograd.Function):
    """flash-attention#2337: two kernels of the backward pass disagree about the size of a tile.

    The gradient of q is gathered in a buffer in which each document begins at a full tile. One
    kernel writes with tiles of 64 (here 4), the next one reads with tiles of 128 (here 8), so the
    end of a document gets gradients of the next one. The forward pass and all losses are right.
    """

    tiles = (4, 8)

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor) -> Tensor:
        ctx.save_for_backward(q, k, v, cu_seqlens)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=block_causal(cu_seqlens))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q, k, v, cu_seqlens = ctx.saved_tensors
        with torch.enable_grad():
            inputs = [x.detach().requires_grad_() for x in (q, k, v)]
            out = F.scaled_dot_product_attention(*inputs, attn_mask=block_causal(cu_seqlens))
        dq, dk, dv = torch.autograd.grad(out, inputs, gradient)
        documents = segments_of(cu_seqlens)
        begins = cu_seqlens.long()[documents]
        written, read = (
            (begins + documents * tile) // tile * tile + offsets_of(cu_seqlens)
            for tile in MisplacedGradient.tiles
        )
        buffer = dq.new_zeros(*dq.shape[:2], 2 * dq.shape[2], dq.shape[3])
        buffer[:, :, written] = dq
        return buffer[:, :, read], dk, dv, None


class WrongBackward(Attention):
    def forward(self, x: Tensor, *, cu_seqlens: Tensor, **given: Any) -> Tensor:
        mixed = MisplacedGradient.apply(*self.heads(x, **given), cu_seqlens)
        return self.out(mixed.transpose(1, 2).flatten(2))


# ---- Positions


class LearnedPositions(nn.Module):
    """nanoVLM#204: the mask is right, but positions run through the row.

    Relative positions would hide it. With learned ones a document's outputs depend on its place.
    """

    def __init__(self, restart: bool) -> None:
        super().__init__()
        self.decoder = everywhere(NoRotation)
        self.wpe = nn.Embedding(64, WIDTH)
        self.restart = restart
        self.decoder.embed = WithPositions(self.decoder.embed, self.wpe)  # type: ignore[assignment]

    def forward(self, input_ids: Tensor, cu_seqlens: Tensor) -> Tensor:
        positions = torch.arange(input_ids.shape[1])
        self.decoder.embed.given = offsets_of(cu_seqlens) if self.restart else positions
        return self.decoder(input_ids, cu_seqlens=cu_seqlens)


class NoRotation(Attention):
    def positions(self, length: int, **given: Any) -> Tensor:
        return torch.zeros(length)


class WithPositions(nn.Module):
    """Token embedding plus position embedding."""

    given: Tensor

    def __init__(self, tokens: nn.Module, positions: nn.Module) -> None:
        super().__init__()
        self.wte, self.wpe = tokens, positions

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.wte(input_ids) + self.wpe(self.given)


class DynamicRotation(nn.Module):
    """Qwen#401: the base of dynamic NTK grows with the longest sequence of the batch.

    A short document that shares a row with a long one gets other frequencies than alone.
    """

    def __init__(self, per_document: bool) -> None:
        super().__init__()
        self.per_document = per_document

    def forward(self, x: Tensor, cu_seqlens: Tensor) -> Tensor:
        lengths = cu_seqlens.diff().long()
        longest = lengths if self.per_document else lengths.max().expand_as(lengths)
        ratio = (longest / 12).clamp(min=1)[segments_of(cu_seqlens)]
        half = x.shape[-1] // 2
        frequencies = (100.0 * ratio[:, None] ** 2) ** (-torch.arange(half) / half)
        angles = offsets_of(cu_seqlens)[:, None] * frequencies
        left, right = x.chunk(2, dim=-1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)


class DynamicAttention(Attention):
    per_document = False

    def __init__(self) -> None:
        super().__init__()
        self.rotary = DynamicRotation(self.per_document)

    def heads(self, x: Tensor, *, cu_seqlens: Tensor, **given: Any) -> tuple[Tensor, ...]:  # type: ignore[override]
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        return self.rotary(q, cu_seqlens), self.rotary(k, cu_seqlens), v


class DynamicPerDocument(DynamicAttention):
    per_document = True


ENDS = packed_batch("cu_seqlens")
BUGS = [
    Bug("axolotl-ai-cloud/axolotl#3796", lambda: everywhere(NumbersToBool),
        lambda: everywhere(NumbersCompared), packed_batch("segment_ids"),
        "attention_mask", "layers.0.self_attn"),
    Bug("huggingface/transformers#46634", lambda: with_ones(everywhere(PositionsWithoutMask)),
        lambda: everywhere(PositionsWithoutMask), packed_batch("position_ids"),
        "attention_mask", "Decoder.layers.0.self_attn"),
    Bug("areal-project/AReaL#1442", lambda: with_mapping(everywhere(PreparedMasks)),
        lambda: everywhere(PreparedMasks), packed_batch("position_ids", "cu_seqlens"),
        "attention_mask", "Decoder.layers.0.self_attn"),
    Bug("AI-Hypercomputer/maxtext#4476", lambda: Decoder(TrainingKernel).train(),
        lambda: Decoder().train(), ENDS, "attention_mask", "layers.1.self_attn"),
    Bug("Tencent-Hunyuan/HunyuanVideo#310", lambda: Decoder(OneSplit), Decoder, ENDS,
        "attention_mask", "layers.1.self_attn", pairs={(1, 2)}),
    Bug("NVIDIA-NeMo/RL#2105", lambda: with_dataclass(everywhere(UnknownArgument)),
        lambda: with_fields(everywhere(UnknownArgument)), ENDS,
        "attention_mask", "Decoder.layers.0.self_attn"),
    Bug("pytorch/torchtitan#4801", lambda: Decoder(RowWindow), lambda: Decoder(DocumentWindow),
        ENDS, "attention_mask", "layers.1.self_attn", pairs={(0, 1), (1, 2)}),
    Bug("huggingface/transformers#40324", lambda: Decoder(RowChunks),
        lambda: Decoder(DocumentChunks), ENDS, "position_ids", "layers.1.self_attn"),
    Bug("pytorch/torchtitan#1723", lambda: FirstRowsMask(True), lambda: FirstRowsMask(False),
        two_rows(), "attention_mask", None),
    Bug("Dao-AILab/flash-attention#2337", lambda: Decoder(WrongBackward), Decoder,
        packed_batch("cu_seqlens", lengths=(14, 10, 17, 9)), "gradient", "layers.1.self_attn"),
    Bug("huggingface/nanoVLM#204", lambda: LearnedPositions(False),
        lambda: LearnedPositions(True), ENDS, "position_ids", "decoder.embed.wpe"),
    Bug("QwenLM/Qwen#401", lambda: Decoder(DynamicAttention), lambda: Decoder(DynamicPerDocument),
        ENDS, "position_ids", "layers.1.self_attn.rotary"),
]  # fmt: skip


@pytest.mark.parametrize("bug", BUGS, ids=str)
def test_a_bug_of_attention_is_found(bug: Bug) -> None:
    check(bug)
