"""Parts of tiny models that keep documents apart; a bug replaces one of them by its own version.

- ``packed_batch``: one row of documents, with every usual form of boundaries to choose from.
- ``Decoder``: an embedding, three layers (``layers.1`` is the place of a bug), a norm, a head.
- ``Attention``, ``GatedDelta``, ``Mlp``: parts of a layer. Each reads the boundaries by name.

    packed_batch("cu_seqlens")["cu_seqlens"]    # -> [0, 14, 23, 40]: documents of 14, 9, 17 tokens
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

LENGTHS = (14, 9, 17)
VOCABULARY, WIDTH, HEADS = 61, 32, 2


def packed_batch(*names: str, lengths: Sequence[int] = LENGTHS) -> dict[str, Tensor]:
    """Return a row of documents: ``input_ids`` int64 ``[1, T]`` and the entries that are named.

    ``cu_seqlens`` int32 ``[documents + 1]``; ``position_ids`` ``[1, T]``, from 0 in every document;
    ``segment_ids`` ``[1, T]``, from 1; ``labels`` ``[1, T]``, the next token of the document or
    -100; ``loss_mask`` float32 ``[1, T]``, 1 where there is a label.
    """
    generator = torch.Generator().manual_seed(sum(lengths))
    sizes = torch.tensor(lengths)
    ends = torch.tensor([0, *itertools.accumulate(lengths)])
    tokens = torch.randint(3, VOCABULARY, (1, int(ends[-1])), generator=generator)
    labels = tokens.roll(-1, dims=1)
    labels[:, ends[1:] - 1] = -100
    entries = {
        "cu_seqlens": ends.int(),
        "position_ids": torch.cat([torch.arange(n) for n in lengths])[None],
        "segment_ids": torch.arange(1, len(lengths) + 1).repeat_interleave(sizes)[None],
        "labels": labels,
        "loss_mask": (labels >= 0).float(),
    }
    return {"input_ids": tokens, **{name: entries[name] for name in names}}


def segments_of(cu_seqlens: Tensor) -> Tensor:
    """Return the document number of every token, int64 ``[T]``."""
    return torch.arange(len(cu_seqlens) - 1).repeat_interleave(cu_seqlens.diff().long())


def offsets_of(cu_seqlens: Tensor) -> Tensor:
    """Return the position of every token in its document, int64 ``[T]``."""
    segments = segments_of(cu_seqlens)
    return torch.arange(len(segments)) - cu_seqlens.long()[segments]


def causal(length: int) -> Tensor:
    return torch.ones(length, length, dtype=torch.bool).tril()


def block_causal(cu_seqlens: Tensor) -> Tensor:
    """Return the mask of attention inside documents, bool ``[T, T]``."""
    segments = segments_of(cu_seqlens)
    return causal(len(segments)) & (segments[:, None] == segments)


def rotate(x: Tensor, positions: Tensor, base: float = 100.0) -> Tensor:
    """Rotate ``[1, heads, T, width]`` by positions ``[T]``."""
    half = x.shape[-1] // 2
    angles = positions[:, None] * base ** (-torch.arange(half) / half)
    left, right = x.chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)


class Attention(nn.Module):
    """Causal attention inside the documents of ``cu_seqlens``."""

    name = "self_attn"  # as transformers calls it in a layer

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def visible(self, length: int, **given: Any) -> Tensor:
        """Return which keys a query sees, bool ``[T, T]``."""
        del length
        return block_causal(given["cu_seqlens"])

    def positions(self, length: int, **given: Any) -> Tensor:
        """Return positions for the rotary embedding, int64 ``[T]``."""
        return given["position_ids"][0] if "position_ids" in given else torch.arange(length)

    def heads(self, x: Tensor, **given: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k, v ``[1, heads, T, width]`` of ``x`` ``[1, T, WIDTH]``."""
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        positions = self.positions(x.shape[1], **given)
        return rotate(q, positions), rotate(k, positions), v

    def forward(self, x: Tensor, **given: Any) -> Tensor:
        q, k, v = self.heads(x, **given)
        mask = self.visible(x.shape[1], **given)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.out(mixed.transpose(1, 2).flatten(2))


class ShortConvolution(nn.Conv1d):
    """Depthwise causal convolution of four tokens, restarted at the ends that it gets."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH, kernel_size=4, groups=WIDTH)

    def forward(self, x: Tensor, cu_seqlens: Tensor | None) -> Tensor:
        sizes = [x.shape[1]] if cu_seqlens is None else cu_seqlens.diff().tolist()
        pieces = [super(ShortConvolution, self).forward(F.pad(piece.mT, (3, 0))).mT
                  for piece in x.split(sizes, dim=1)]  # fmt: skip
        return torch.cat(pieces, dim=1)


def delta_rule(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, decay: Tensor,
               cu_seqlens: Tensor | None) -> Tensor:  # fmt: skip
    """Return the outputs ``[T, width]`` of the gated delta rule; the state restarts at ends."""
    begins = {0} if cu_seqlens is None else set(cu_seqlens.tolist())
    state, outputs = torch.zeros(k.shape[-1], v.shape[-1]), []
    for t in range(len(q)):
        state = state * (decay[t] if t not in begins else 0)
        state = state + k[t, :, None] * (beta[t] * (v[t] - k[t] @ state))
        outputs.append(q[t] @ state)
    return torch.stack(outputs)


class GatedDelta(nn.Module):
    """Gated delta net: a short convolution, then a recurrent state."""

    name = "linear_attn"

    def __init__(self) -> None:
        super().__init__()
        self.conv = ShortConvolution()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.gates = nn.Linear(WIDTH, 2)
        self.out = nn.Linear(WIDTH, WIDTH)

    def ends(self, **given: Any) -> tuple[Tensor | None, Tensor | None]:
        """Return the ends for the convolution and those for the state."""
        return given["cu_seqlens"], given["cu_seqlens"]

    def forward(self, x: Tensor, **given: Any) -> Tensor:
        for_conv, for_state = self.ends(**given)
        mixed = F.silu(self.conv(x, for_conv))[0]
        q, k, v = self.qkv(mixed).chunk(3, dim=-1)
        beta, decay = self.gates(mixed).sigmoid().unbind(-1)
        out = delta_rule(F.normalize(q, dim=-1), F.normalize(k, dim=-1), v, beta,
                         0.9 + 0.1 * decay, for_state)  # fmt: skip
        return self.out(out)[None]


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor, **given: Any) -> Tensor:
        del given
        return self.down(F.gelu(self.up(x)))


class Layer(nn.Module):
    def __init__(self, mixer: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.add_module(mixer.name, mixer)
        self.mlp, self.name = mlp, mixer.name

    def forward(self, x: Tensor, **given: Any) -> Tensor:
        x = x + self.get_submodule(self.name)(self.norm1(x), **given)
        return x + self.mlp(self.norm2(x), **given)


class Decoder(nn.Module):
    """Logits ``[1, T, VOCABULARY]`` of ``input_ids`` ``[1, T]``; other arguments go to the layers.

    Layers 0 and 2 have right attention, unless ``others`` replaces it: the probe must name layer 1.
    """

    def __init__(
        self, mixer: type[nn.Module] = Attention, mlp: type[nn.Module] = Mlp, *,
        others: type[nn.Module] | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        others = others or Attention
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.embed = nn.Embedding(VOCABULARY, WIDTH)
            kinds = [(others, Mlp), (mixer, mlp), (others, Mlp)]
            self.layers = nn.ModuleList(Layer(mix(), feed()) for mix, feed in kinds)
            self.norm = nn.RMSNorm(WIDTH)
            self.head = nn.Linear(WIDTH, VOCABULARY)

    def hidden(self, input_ids: Tensor, **given: Any) -> Tensor:
        """Return the states before the head, float32 ``[1, T, WIDTH]``."""
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x, **given)
        return self.norm(x)

    def forward(self, input_ids: Tensor, **given: Any) -> Tensor:
        return self.head(self.hidden(input_ids, **given))


def token_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the loss of every token ``[1, T]``; 0 where the label is -100."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view_as(labels)
