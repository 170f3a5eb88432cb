"""Public bugs under context and pipeline parallelism: what one rank runs, on gloo.

``context_parallel(rank, world_size, issue)`` and ``pipeline(...)`` probe the broken model and the
fixed one with all ranks of a group; ``test_parallel.py`` starts the ranks.
A context-parallel rank holds one slice of the row, a pipeline stage one layer of the model.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from megapack.probe import Report, probe, watch

from .parts import (
    WIDTH,
    Attention,
    Decoder,
    Layer,
    Mlp,
    block_causal,
    causal,
    delta_rule,
    packed_batch,
)
from .test_attention import WrongBackward

# ---- Context parallelism: rank r holds tokens [r * T / n, (r + 1) * T / n)


class Gather(torch.autograd.Function):
    """Join the slices of all ranks; its gradient is the sum of all ranks' gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int) -> Tensor:
        ctx.dim = dim
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, dim=dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        gradient = gradient.contiguous()
        dist.all_reduce(gradient)
        return mine(gradient, ctx.dim), None


def whole(x: Tensor, dim: int) -> Tensor:
    """Return the slices of all ranks, joined."""
    joined: Tensor = Gather.apply(x, dim)
    return joined


def mine(x: Tensor, dim: int) -> Tensor:
    return x.chunk(dist.get_world_size(), dim=dim)[dist.get_rank()]


class GatheredAttention(Attention):
    """Attention of this rank's queries to the keys of all ranks, inside documents."""

    def forward(self, x: Tensor, **given: Any) -> Tensor:
        q, k, v = self.heads(x, **given)
        k, v = whole(k, 2), whole(v, 2)
        mask = mine(self.visible(k.shape[2], **given), 0)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.out(mixed.transpose(1, 2).flatten(2))


class CausalRing(GatheredAttention):
    """TRL#6843: context parallelism knows full causal attention only, and replaces every mask."""

    def visible(self, length: int, **given: Any) -> Tensor:
        return causal(length)


class UlyssesMamba(nn.Module):
    """prime-rl#3000: heads are exchanged for the whole row, then convolved and scanned at once.

    A rank computes some channels of all tokens and returns all channels of its tokens. Documents
    may begin in the middle of a rank's slice, so only ``cu_seqlens`` of the row can separate them.
    """

    name = "mixer"
    separate = False

    def __init__(self) -> None:
        super().__init__()
        self.input, self.output = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.taps = nn.Parameter(torch.randn(WIDTH, 1, 4) / 2)
        self.decay = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x: Tensor, *, cu_seqlens: Tensor, **given: Any) -> Tensor:
        row = mine(whole(self.input(x), 1), 2)  # all tokens, some channels
        taps, decay = mine(self.taps, 0), mine(self.decay.sigmoid(), 0)
        sizes = cu_seqlens.diff().tolist() if self.separate else [row.shape[1]]
        pieces = [self.scan(piece[0], taps, decay) for piece in row.split(sizes, dim=1)]
        return self.output(mine(whole(torch.cat(pieces)[None], 2), 1))

    def scan(self, piece: Tensor, taps: Tensor, decay: Tensor) -> Tensor:
        mixed = F.conv1d(F.pad(piece.T, (3, 0))[None], taps, groups=len(taps))[0].T
        state, states = torch.zeros_like(mixed[0]), []
        for token in mixed:
            state = decay * state + token
            states.append(state)
        return torch.stack(states)


class SeparateUlyssesMamba(UlyssesMamba):
    separate = True


class ContextDelta(nn.Module):
    """prime-rl#3003: the state's context is built from made-up ends, [0, tokens of the row]."""

    name = "linear_attn"
    separate = False

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.gates = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, 2)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, *, cu_seqlens: Tensor, **given: Any) -> Tensor:
        row = whole(x, 1)[0]
        q, k, v = self.qkv(row).chunk(3, dim=-1)
        beta, decay = self.gates(row).sigmoid().unbind(-1)
        ends = cu_seqlens if self.separate else torch.tensor([0, len(row)])
        out = delta_rule(F.normalize(q, dim=-1), F.normalize(k, dim=-1), v, beta,
                         0.9 + 0.1 * decay, ends)  # fmt: skip
        return mine(self.out(out)[None], 1)


class SeparateContextDelta(ContextDelta):
    separate = True


CONTEXT = {
    "huggingface/trl#6843": (CausalRing, GatheredAttention),
    "PrimeIntellect-ai/prime-rl#3000": (UlyssesMamba, SeparateUlyssesMamba),
    "PrimeIntellect-ai/prime-rl#3003": (ContextDelta, SeparateContextDelta),
}


def context_parallel(rank: int, world_size: int, issue: str) -> list[dict[str, Any]]:
    """Return this rank's reports, broken and fixed; ranks hold slices of the row."""
    torch.set_num_threads(1)
    row = packed_batch("position_ids", "segment_ids", "cu_seqlens")
    batch = {key: value if key == "cu_seqlens" else mine(value, 1) for key, value in row.items()}
    models = [Decoder(mixer, others=GatheredAttention) for mixer in CONTEXT[issue]]
    return [probe(model, batch, boundaries="segment_ids").as_dict() for model in models]


# ---- Pipeline parallelism: a stage is one layer; the first embeds, the last has the head


class Stage(nn.Module):
    """Megatron-Bridge#2952: ``get_batch`` returns early in middle stages, without cu_seqlens.

    Their layers attend to the whole row. With two stages, none is in the
    middle, so the broken model is correct.
    """

    def __init__(self, broken: bool) -> None:
        super().__init__()
        self.rank, self.last = dist.get_rank(), dist.get_world_size() - 1
        with torch.random.fork_rng():
            torch.manual_seed(self.rank)
            self.embed = nn.Embedding(64, WIDTH) if self.rank == 0 else None
            self.layers = nn.ModuleList([Layer(StageAttention(), Mlp())])
            self.head = nn.Linear(WIDTH, 64) if self.rank == self.last else None
        self.broken = broken

    def forward(self, input_ids: Tensor, cu_seqlens: Tensor) -> Tensor:
        middle = 0 < self.rank < self.last
        ends = None if self.broken and middle else cu_seqlens
        if self.embed is None:
            x = torch.empty(*input_ids.shape, WIDTH)
            dist.recv(x, self.rank - 1)
        else:
            x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x, cu_seqlens=ends)
        if self.head is not None:
            return self.head(x)
        dist.send(x.detach().contiguous(), self.rank + 1)
        return x


class StageAttention(Attention):
    def visible(self, length: int, *, cu_seqlens: Tensor | None, **given: Any) -> Tensor:
        return causal(length) if cu_seqlens is None else block_causal(cu_seqlens)


def pipeline(rank: int, world_size: int, issue: str) -> list[dict[str, Any]]:
    """Return this rank's reports, broken and fixed; every rank is a stage."""
    torch.set_num_threads(1)
    batch = packed_batch("cu_seqlens")
    return [probe(Stage(broken), batch).as_dict() for broken in (True, False)]


# ---- FSDP2: norm and head are one group, and a chunked loss calls the head, as in torchtitan


class WithoutHead(Decoder):
    def forward(self, input_ids: Tensor, **given: Any) -> Tensor:
        return self.hidden(input_ids, **given)


class CausalAttention(Attention):
    def visible(self, length: int, **given: Any) -> Tensor:
        return causal(length)


def sharded_step(kind: type[Attention], watched: bool) -> tuple[list[Tensor], Report | None]:
    """Return the gradients of one training step under FSDP2, and the report."""
    model = WithoutHead(kind)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard([model.norm, model.head])
    fully_shard(model)
    seen = watch(model, on_leak="warn") if watched else None
    # Ranks have different documents.
    batch = packed_batch("cu_seqlens", lengths=(14, 9, 17) if dist.get_rank() else (12, 20, 3, 9))
    hidden = model(**batch)
    leaf = hidden.detach().requires_grad_()
    for chunk in leaf.chunk(2, dim=1):
        model.head(chunk).square().mean().backward()
    hidden.backward(leaf.grad)
    return [p.grad.to_local() for p in model.parameters()], seen and seen.report


def sharded(rank: int, world_size: int) -> list[tuple[bool, dict[str, Any]]]:
    """Return, for attention that is correct, wrong, and wrong only in its backward pass: whether a
    watched step has the gradients of an unwatched one, and its report."""
    torch.set_num_threads(1)
    found = []
    for kind in (Attention, CausalAttention, WrongBackward):
        plain, _ = sharded_step(kind, watched=False)
        gradients, report = sharded_step(kind, watched=True)
        same = all(torch.equal(a, b) for a, b in zip(plain, gradients, strict=True))
        found.append((same, report.as_dict()))
    return found
