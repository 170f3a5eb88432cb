"""Leaks by mechanism, not by a public bug: each is found with its layer and kind; its fix passes.

Mixing("canon", ...)    broken: a convolution over the row     fixed: restarted in documents
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megapack.probe import LeakError, probe

from .bugs.corpus import Bug, check, pairs_of
from .bugs.parts import (
    HEADS,
    WIDTH,
    Attention,
    Decoder,
    Mlp,
    block_causal,
    causal,
    offsets_of,
    packed_batch,
    segments_of,
    token_losses,
)
from .bugs.test_rows import Experts

# ---- Positions


class RowBias(Attention):
    """T5's bias per bucket of positions, counted from the first token of the row."""

    by_row = True

    def __init__(self) -> None:
        super().__init__()
        self.relative_attention_bias = nn.Embedding(8, HEADS)

    def forward(self, x: Tensor, **given: Any) -> Tensor:
        q, k, v = self.heads(x, **given)
        places = torch.arange(x.shape[1]) // 6
        if not self.by_row:
            places = offsets_of(given["cu_seqlens"])
        distance = places[None].expand(x.shape[1], -1)
        if not self.by_row:
            distance = distance.mT - distance
        bias = self.relative_attention_bias(distance.clamp(0, 7)).permute(2, 0, 1)[None]
        mask = torch.zeros(x.shape[1], x.shape[1]).masked_fill(
            ~self.visible(x.shape[1], **given), -torch.inf
        )
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=bias + mask)
        return self.out(mixed.transpose(1, 2).flatten(2))


class DocumentBias(RowBias):
    by_row = False


class RowAngles(Attention):
    """Positions are divided by the number of tokens in the row."""

    def positions(self, length: int, **given: Any) -> Tensor:
        return torch.arange(length) * 30.0 / length


# ---- Masks


class KeptCache(Attention):
    """Runs documents one by one and does not clear the cache of keys between them."""

    cleared = False

    def forward(self, x: Tensor, *, cu_seqlens: Tensor, **given: Any) -> Tensor:
        q, k, v = self.heads(x, **given)
        begin, parts = 0, []
        for a, b in itertools.pairwise(cu_seqlens.tolist()):
            begin = a if self.cleared else 0
            mask = causal(b)[a:b, begin:b]
            part = q[:, :, a:b], k[:, :, begin:b], v[:, :, begin:b]
            parts.append(F.scaled_dot_product_attention(*part, attn_mask=mask))
        return self.out(torch.cat(parts, dim=2).transpose(1, 2).flatten(2))


class ClearedCache(KeptCache):
    cleared = True


class CrossAttention(nn.Module):
    """A document reads the encoder's states of all documents."""

    name = "cross_attn"
    apart = False

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.kv_proj = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: Tensor, *, cu_seqlens: Tensor, **given: Any) -> Tensor:
        segments = segments_of(cu_seqlens)
        mask = (segments[:, None] == segments) | (not self.apart)
        k, v = self.kv_proj(x).chunk(2, dim=-1)
        return F.scaled_dot_product_attention(self.q_proj(x), k, v, attn_mask=mask)


class CrossAttentionApart(CrossAttention):
    apart = True


class OffByOne(Attention):
    """The first token of a document has the number of the document before it."""

    def visible(self, length: int, *, cu_seqlens: Tensor, **given: Any) -> Tensor:
        numbers = torch.bucketize(torch.arange(length), cu_seqlens[1:].long())
        return causal(length) & (numbers[:, None] == numbers)


class PrefixOfRow(Attention):
    """A prefix of 20 tokens of the row sees itself in both directions."""

    def visible(self, length: int, *, cu_seqlens: Tensor, **given: Any) -> Tensor:
        both = torch.arange(length) < 20
        return block_causal(cu_seqlens) | (both & both[:, None])


class Modulo(Attention):
    """Document numbers wrap around: their type has four values."""

    numbers = 4

    def visible(self, length: int, *, cu_seqlens: Tensor, **given: Any) -> Tensor:
        numbers = segments_of(cu_seqlens) % self.numbers
        return causal(length) & (numbers[:, None] == numbers)


class ReadsPadding(Attention):
    """Every token sees the padding on the right."""

    reads = True

    def visible(self, length: int, *, segment_ids: Tensor, **given: Any) -> Tensor:
        numbers = segment_ids[0]
        return (numbers[:, None] == numbers) | ((numbers == 0) & self.reads)


class IgnoresPadding(ReadsPadding):
    reads = False


# ---- States, convolutions, statistics


class OverRow(nn.Module):
    """Mixer over the row, or over each document."""

    apart = False

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, 1, 4) / 2)

    def forward(self, x: Tensor, *, cu_seqlens: Tensor, **given: Any) -> Tensor:
        sizes = cu_seqlens.diff().tolist() if self.apart else [x.shape[1]]
        return torch.cat([self.mix(piece) for piece in x.split(sizes, dim=1)], dim=1)

    def mix(self, x: Tensor) -> Tensor:
        """Mix the tokens of one piece (tokens, width); identity."""
        return x


class TokenShift(OverRow):
    """RWKV mixes a token with the one before it."""

    name = "time_mix"

    def mix(self, x: Tensor) -> Tensor:
        return x + F.pad(x[:, :-1], (0, 0, 1, 0))


class Canon(OverRow):
    """A short convolution in a module whose name does not say so."""

    name = "local"

    def mix(self, x: Tensor) -> Tensor:
        return F.conv1d(F.pad(x.mT, (3, 0)), self.weight, groups=WIDTH).mT


class Recurrent(OverRow):
    name = "rnn"

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def mix(self, x: Tensor) -> Tensor:
        out: Tensor = self.gru(x)[0]
        return out


def apart(kind: type[OverRow]) -> Any:
    return type(kind.__name__, (kind,), {"apart": True})


class RowNorm(Mlp):
    """Layer norm over tokens and channels."""

    dimensions = 2

    def forward(self, x: Tensor, **given: Any) -> Tensor:
        return F.layer_norm(super().forward(x), x.shape[-self.dimensions :])


class TokenNorm(RowNorm):
    dimensions = 1


class RowScale(nn.Linear):
    """Quantizes to eight bits with one scale for all tokens."""

    def forward(self, x: Tensor) -> Tensor:
        scale = x.abs().amax() / 127
        return super().forward(x + ((x / scale).round() * scale - x).detach())


class Quantized(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.down = RowScale(2 * WIDTH, WIDTH)


class BestFirst(Experts):
    """The capacity of an expert goes to the best scores of the row."""

    def kept(self, scores: Tensor) -> Tensor:
        chosen = super().kept(scores)
        best = scores.masked_fill(~chosen, -1).topk(len(scores) // 4, dim=0).indices
        return chosen & torch.zeros_like(chosen).scatter(0, best, True)


class LoadBias(Experts):
    """A buffer with the load of the experts changes their choice in the same pass."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bias", torch.zeros(4))

    def kept(self, scores: Tensor) -> Tensor:
        self.bias += 0.3 * (0.25 - super().kept(scores).float().mean(0))
        return super().kept(scores + self.bias)


class ChoiceOfFirst(Mlp):
    """The third document gets a number that has no gradient from the first."""

    def forward(self, x: Tensor, *, cu_seqlens: Tensor, **given: Any) -> Tensor:
        segments = segments_of(cu_seqlens)
        number = x[:, segments == 0].argmax(-1).float().mean()
        return x + (segments == 2)[:, None] * number / WIDTH


class ScaledEmbedding(nn.Embedding):
    """Scales by the length of the row, as NEFTune scales its noise."""

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) / math.sqrt(ids.shape[1] / 10)


def scaled_embedding(kind: type[nn.Embedding]) -> Decoder:
    model = Decoder()
    model.embed = kind(61, WIDTH)
    return model


class RowAverage:
    """The loss of a token is divided by the number of tokens in the row."""

    def __init__(self, by_row: bool) -> None:
        self.model, self.by_row = Decoder(), by_row

    def __call__(self, batch: dict[str, Tensor]) -> Tensor:
        labels = batch["labels"]
        losses = token_losses(
            self.model(batch["input_ids"], cu_seqlens=batch["cu_seqlens"]), labels
        )
        return losses / ((labels >= 0).sum() if self.by_row else 100)


def padded_batch() -> dict[str, Tensor]:
    batch = packed_batch("segment_ids")
    return {name: F.pad(value, (0, 12)) for name, value in batch.items()}


ENDS, LABELS = packed_batch("cu_seqlens"), packed_batch("cu_seqlens", "labels")
MASK, PLACE, STATISTICS = "attention_mask", "position_ids", "row_statistics"
SELF, MLP = "layers.1.self_attn", "layers.1.mlp"
MECHANISMS = [
    Bug("T5 bias", lambda: Decoder(RowBias), lambda: Decoder(DocumentBias), ENDS, PLACE,
        f"{SELF}.relative_attention_bias"),
    Bug("positions by row", lambda: Decoder(RowAngles), Decoder, ENDS, PLACE, SELF),
    Bug("kept cache", lambda: Decoder(KeptCache), lambda: Decoder(ClearedCache), ENDS, MASK, SELF),
    Bug("cross-attention", lambda: Decoder(CrossAttention), lambda: Decoder(CrossAttentionApart),
        ENDS, MASK, "layers.1.cross_attn"),
    Bug("off by one", lambda: Decoder(OffByOne), Decoder, ENDS, MASK, SELF, {(0, 1), (1, 2)}),
    Bug("prefix of row", lambda: Decoder(PrefixOfRow), Decoder, ENDS, MASK, SELF),
    Bug("ids modulo 4", lambda: Decoder(Modulo), Decoder, packed_batch(
        "cu_seqlens", lengths=[5] * 7), MASK, SELF, {(0, 4), (1, 5), (2, 6)}),
    Bug("padding", lambda: Decoder(ReadsPadding, others=IgnoresPadding),
        lambda: Decoder(IgnoresPadding, others=IgnoresPadding), padded_batch(), MASK, SELF,
        {(None, 0), (None, 1), (None, 2)}),  # type: ignore[arg-type]
    Bug("token shift", lambda: Decoder(TokenShift), lambda: Decoder(apart(TokenShift)), ENDS,
        "convolution", "layers.1.time_mix", {(0, 1), (1, 2)}),
    Bug("canon", lambda: Decoder(Canon), lambda: Decoder(apart(Canon)), ENDS, "convolution",
        "layers.1.local", {(0, 1), (1, 2)}),
    Bug("GRU", lambda: Decoder(Recurrent), lambda: Decoder(apart(Recurrent)), ENDS,
        "recurrent_state", "layers.1.rnn.gru"),
    Bug("norm of row", lambda: Decoder(mlp=RowNorm), lambda: Decoder(mlp=TokenNorm), ENDS,
        STATISTICS, MLP),
    Bug("scale of row", lambda: Decoder(mlp=Quantized), Decoder, ENDS, STATISTICS, f"{MLP}.down"),
    Bug("best first", lambda: Decoder(mlp=BestFirst), lambda: Decoder(mlp=Experts), ENDS,
        "expert_capacity", MLP),
    Bug("no gradient", lambda: Decoder(mlp=ChoiceOfFirst), Decoder, ENDS, STATISTICS, MLP,
        {(0, 2)}),
    Bug("scaled embedding", lambda: scaled_embedding(ScaledEmbedding),
        lambda: scaled_embedding(nn.Embedding), ENDS, STATISTICS, "embed"),
    Bug("row average", lambda: RowAverage(True), lambda: RowAverage(False), LABELS, STATISTICS,
        None),
]  # fmt: skip


@pytest.mark.parametrize("bug", MECHANISMS, ids=str)
def test_a_mechanism_is_found(bug: Bug) -> None:
    check(bug)


def test_documents_256_apart_are_compared() -> None:
    """Document numbers in a byte: the sets of documents must not repeat every 256."""
    batch = packed_batch("cu_seqlens", lengths=[3] * 300)
    report = probe(Decoder(type("Byte", (Modulo,), {"numbers": 256})), batch)
    assert pairs_of(report) and all(to - source == 256 for source, to in pairs_of(report))


def test_a_state_between_calls_is_named() -> None:
    class KeepsKeys(Attention):
        past: Any = ()

        def forward(self, x: Tensor, **given: Any) -> Tensor:
            past, self.past = self.past, (x.detach().mean(),)
            return super().forward(x, **given) + sum(past)

    for model in (Decoder(KeepsKeys), Decoder(mlp=LoadBias)):
        with pytest.raises(LeakError, match="keeps a state between calls"):
            probe(model, ENDS)


def test_losses_that_the_mask_of_the_batch_excludes_are_not_compared() -> None:
    """Megatron's model returns all losses; its loss function applies the mask."""
    model = Decoder()
    row = packed_batch("cu_seqlens", "loss_mask")

    def losses(batch: dict[str, Tensor]) -> Tensor:
        logits = model(batch["input_ids"], cu_seqlens=batch["cu_seqlens"])
        return token_losses(logits, batch["input_ids"].roll(-1, dims=1))

    assert probe(losses, row).ok
    wrong = probe(losses, {**row, "loss_mask": torch.ones_like(row["loss_mask"])})
    assert {leak.kind for leak in wrong.leaks} == {"loss_mask"}


# ---- Correct models


class BeginsAtOne(Decoder):
    """Documents begin at token 1; cu_seqlens is not read."""

    def forward(self, input_ids: Tensor, **given: Any) -> Tensor:
        begins = F.pad((input_ids[0] == 1).nonzero()[:, 0], (0, 1), value=input_ids.shape[1])
        return super().forward(input_ids, cu_seqlens=begins)


class ScalarLoss(nn.Module):
    """Returns logits and a mean loss that includes a loss over all logits."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = Decoder()

    def forward(self, input_ids: Tensor, labels: Tensor, cu_seqlens: Tensor) -> Any:
        logits = self.decoder(input_ids, cu_seqlens=cu_seqlens)
        z_loss = logits.logsumexp(-1).square().mean()
        loss = F.cross_entropy(logits[0], labels[0]) + 0.01 * z_loss
        return {"loss": loss, "logits": logits}


def at(batch: dict[str, Tensor], name: str, places: Tensor, value: int) -> dict[str, Tensor]:
    return {**batch, name: batch[name].index_fill(1, places.long(), value)}


def test_boundaries_taken_from_tokens_stay() -> None:
    assert probe(BeginsAtOne(), at(ENDS, "input_ids", ENDS["cu_seqlens"][:-1], 1)).ok


@pytest.mark.parametrize("label", [-100, 2])
def test_a_label_at_the_end_of_a_document_may_count(label: int) -> None:
    """The last token may predict a token of its own document, or have an auxiliary loss."""
    ends = LABELS["cu_seqlens"][1:] - 1
    model = ScalarLoss()

    def loss(output: Any, batch: Any) -> Tensor:
        return output["loss"]  # type: ignore[no-any-return]

    assert probe(model, at(LABELS, "labels", ends, label), loss=loss).ok
    row = {**LABELS, "labels": LABELS["input_ids"].roll(-1, dims=1)}
    wrong = probe(model, row, loss=loss)
    assert {(leak.kind, leak.direction) for leak in wrong.leaks} == {("loss_mask", "backward")}


def test_embeddings_have_gradients() -> None:
    model = Decoder()
    batch = {"inputs_embeds": torch.randn(1, 40, WIDTH), "cu_seqlens": ENDS["cu_seqlens"]}

    def states(batch: dict[str, Tensor]) -> Tensor:
        x = batch["inputs_embeds"]
        for layer in model.layers:
            x = layer(x, cu_seqlens=batch["cu_seqlens"])
        return x

    report = probe(states, batch)
    assert report.ok and not report.notes
