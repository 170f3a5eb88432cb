"""Random forests of sequences, attention and a small model on them, as trees and in separate rows.

forest(3)                      # -> {1: [2, 0, 1], 4: [2, 0, 1, 1], 7: [2, 0]}: sequences by number
as_batch(forest(3), 3)         # -> their packed tree, with loss weights and perhaps padding
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from reference.trees import fields, tree_of
from torch import Tensor, nn

from megapack.attention import TreeSegments, alibi_slopes, tree_attention, tree_mask
from megapack.data import TreeBatch, tree_batch
from megapack.planning import Tree

from .cases import assert_close, reference_attention

VOCABULARY, LONGEST = 8, 40
KINDS = ("mixed", "deep", "wide", "prefixes", "identical", "unrelated", "single", "empty")

Forest = dict[int, list[int]]


def forest(seed: int) -> Forest:
    """Return up to 12 sequences, of every kind in turn; numbers are not consecutive."""
    draw, kind = random.Random(seed), KINDS[seed % len(KINDS)]

    def words(low: int, high: int) -> list[int]:
        return [draw.randrange(VOCABULARY) for _ in range(draw.randint(low, high))]

    found = [words(1, 12)]
    for _ in range({"empty": -1, "single": 0}.get(kind, draw.randint(1, 11))):
        old = draw.choice(found)
        following = {
            "mixed": lambda old=old: old[: draw.randint(0, len(old))] + words(0, 8),
            "deep": lambda: found[-1][: max(1, len(found[-1]) - 1)] + words(1, 4),
            "wide": lambda: found[0] + words(1, 3),
            "prefixes": lambda: found[0][: draw.randint(1, len(found[0]))],
            "identical": lambda old=old: old,
            "unrelated": lambda: words(1, 10),
        }[kind]()
        found.append(following[:LONGEST] or words(1, 3))
    if kind == "empty":
        found = []
    draw.shuffle(found)
    return {3 * i + 1: tokens for i, tokens in enumerate(found)}


def planned(sequences: Forest) -> Tree:
    """Return the tree by the definition, not by the planner."""
    return Tree(**fields(tree_of(sequences)))


def loss_weights(sequences: Forest, seed: int) -> dict[int, np.ndarray]:
    """Return weights whose sums float32 represents exactly."""
    draw = np.random.default_rng(seed)
    return {n: draw.integers(-8, 9, len(tokens)) / 4 for n, tokens in sequences.items()}


def as_batch(sequences: Forest, seed: int) -> TreeBatch:
    tree = planned(sequences)
    row = max(1, tree.num_tokens + (seed % 3) * (seed % 5))
    return tree_batch(tree, sequences, weights=loss_weights(sequences, seed), pad_to=row)


# ---- Attention


@dataclass(frozen=True)
class Rule:
    window: int = 0
    softcap: float = 0.0
    alibi: bool = False

    def arguments(self, heads: int, device: str = "cpu") -> dict[str, Any]:
        slopes = alibi_slopes(heads).to(device) if self.alibi else None
        return {"window": self.window, "softcap": self.softcap, "alibi_slopes": slopes}


def run_tree_case(
    batch: TreeBatch,
    rule: Rule,
    backend: str,
    dtype: torch.dtype,
    *,
    device: str = "cpu",
    shape: tuple[int, int, int] = (4, 2, 8),
    backward: bool = True,
) -> None:
    """Output and gradients of the row's tokens are those of the definition on the sequences."""
    heads, key_heads, width = shape
    torch.manual_seed(len(batch["kv_index"]))
    total = batch["tokens"].shape[1]
    real = int((batch["occurrence_offsets"].diff() > 0).sum())
    wide = [(total, heads), (total, key_heads), (total, key_heads), (total, heads)]
    q, k, v, weight = (torch.randn(*s, width).to(dtype).double() for s in wide)
    weight[real:] = 0  # padding
    for x in (q, k, v):
        x.requires_grad_(backward)
    lengths = batch["token_offsets"].diff().tolist() or [0]
    flat = (batch.per_sequence(x) for x in (q, k, v))
    of_sequences = reference_attention(*flat, lengths, **rule.arguments(heads))
    expected = of_sequences[batch["occurrences"][batch["occurrence_offsets"][:real]]]

    ours = [x.detach().to(device, dtype).requires_grad_(backward) for x in (q, k, v)]
    segments = TreeSegments.of(batch.to(device))
    out = tree_attention(*ours, segments, backend=backend, **rule.arguments(heads, device))
    assert out.dtype == dtype and out.shape == q.shape and out.isfinite().all()
    tolerance = {torch.float64: 1e-11, torch.float32: 3e-5, torch.bfloat16: 4e-2}[dtype]
    if real:
        assert_close(batch.per_sequence(out.cpu()), of_sequences, tolerance, "output")
    if not backward:
        return
    (expected * weight[:real]).sum().backward()
    (out * weight.to(device, dtype)).sum().backward()
    for name, mine, theirs in zip("qkv", ours, (q, k, v), strict=True):
        assert mine.grad is not None and theirs.grad is not None
        assert_close(mine.grad, theirs.grad, tolerance, f"gradient of {name}")


# ---- A model

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class Decoder(nn.Module):
    """Two layers of grouped-query attention with learned positions; any float dtype."""

    HEADS, KEY_HEADS, WIDTH = 4, 2, 4

    def __init__(self) -> None:
        super().__init__()
        size, keys = self.HEADS * self.WIDTH, self.KEY_HEADS * self.WIDTH
        self.embed, self.place = nn.Embedding(VOCABULARY, size), nn.Embedding(LONGEST, size)
        self.norms = nn.ModuleList(nn.LayerNorm(size) for _ in range(2))
        self.project = nn.ModuleList(nn.Linear(size, size + 2 * keys) for _ in range(2))
        self.mlps = nn.ModuleList(
            nn.Sequential(nn.Linear(size, size), nn.GELU(), nn.Linear(size, size)) for _ in range(2)
        )
        self.head = nn.Linear(size, VOCABULARY)

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        x = self.embed(tokens) + self.place(positions)
        for norm, project, mlp in zip(self.norms, self.project, self.mlps, strict=True):
            sizes = [self.HEADS, self.KEY_HEADS, self.KEY_HEADS]
            heads = project(norm(x)).unflatten(-1, (-1, self.WIDTH)).split(sizes, dim=1)
            x = x + attend(*heads).flatten(1)
            x = x + mlp(x)
        return self.head(x)


@dataclass
class Result:
    loss: Tensor
    log_probs: Tensor  # of every position of every sequence, by number; 0 at first positions
    gradients: list[Tensor]


def _result(model: nn.Module, loss: Tensor, log_probs: Tensor, backward: bool = True) -> Result:
    parameters = list(model.parameters())
    found: list[Any] = [None] * len(parameters)
    if backward and loss.requires_grad:
        found = list(torch.autograd.grad(loss, parameters, allow_unused=True))
    pairs = zip(found, parameters, strict=True)
    gradients = [torch.zeros_like(p) if g is None else g for g, p in pairs]
    return Result(loss.detach(), log_probs.detach(), gradients)


def separate_rows(model: nn.Module, sequences: Forest, seed: int, rule: Rule) -> Result:
    """Run the sequences one by one through the definition of attention."""
    parts, loss = [torch.zeros(0, dtype=torch.float64)], torch.zeros((), dtype=torch.float64)
    weights = loss_weights(sequences, seed)
    for number in sorted(sequences):
        tokens = torch.tensor(sequences[number])

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return reference_attention(q, k, v, [len(q)], **rule.arguments(Decoder.HEADS))

        logits = model(tokens, torch.arange(len(tokens)), attend)
        picked = logits.log_softmax(-1)[:-1].gather(1, tokens[1:, None])[:, 0]
        parts += [picked.new_zeros(1), picked]
        loss = loss - (torch.from_numpy(weights[number])[1:] * picked).sum()
    return _result(model, loss, torch.cat(parts))


def tree_row(
    model: nn.Module, sequences: Forest, seed: int, rule: Rule, backend: str, *, backward: bool
) -> Result:
    """Run the packed tree; ``dense``: torch's attention with a dense mask."""
    batch = as_batch(sequences, seed)
    segments, total = TreeSegments.of(batch), batch["tokens"].shape[1]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if backend != "dense":
            how = rule.arguments(Decoder.HEADS)
            return tree_attention(q, k, v, segments, backend=backend, **how)
        mask = tree_mask(segments, total, window=rule.window)
        heads = (x.transpose(0, 1)[None] for x in (q, k, v))
        out = nn.functional.scaled_dot_product_attention(*heads, attn_mask=mask, enable_gqa=True)
        return out[0].transpose(0, 1)

    with torch.set_grad_enabled(backward):
        logits = model(batch["tokens"][0], batch["position_ids"][0], attend)
        log_probs = batch.log_probs(logits[None])
        loss = -(batch["loss_weights"][0] * log_probs).sum()
    lengths = batch["token_offsets"].diff().tolist()
    parts = batch.per_sequence(log_probs).split(lengths) if lengths else []
    by_number = dict(zip(batch["sequences"].tolist(), parts, strict=True))
    ordered = itertools.chain([log_probs[:0]], (by_number[n] for n in sorted(by_number)))
    return _result(model, loss, torch.cat(list(ordered)), backward)


def assert_same(ours: Result, theirs: Result, tolerance: float, *, backward: bool = True) -> None:
    assert_close(ours.loss, theirs.loss, tolerance, "loss")
    if theirs.log_probs.numel():
        assert_close(ours.log_probs, theirs.log_probs, tolerance, "log-probabilities")
    if backward:
        mine, expected = (torch.cat([g.flatten() for g in r.gradients]) for r in (ours, theirs))
        assert_close(mine, expected, tolerance, "gradients")
