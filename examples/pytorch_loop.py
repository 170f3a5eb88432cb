"""Plain PyTorch: the loader, a small transformer on varlen attention, a loop.

python examples/pytorch_loop.py text text.samples
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from megapack.attention import AttentionNeeds, choose_backend, varlen_attention
from megapack.data import PackedDataset, Schedule, build_loader

WIDTH, HEADS, DEPTH = 64, 4, 2


class Layer(nn.Module):
    """Pre-norm attention inside segments, then an MLP."""

    def __init__(self, backend: str) -> None:
        super().__init__()
        self.backend = backend
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
        """Attend within segments; x has shape ``(tokens, WIDTH)``."""
        qkv = self.qkv(self.norms[0](x)).view(-1, 3, HEADS, WIDTH // HEADS)
        attended = varlen_attention(
            *qkv.unbind(1), cu_seqlens, max_seqlen=max_seqlen, backend=self.backend
        )
        x = x + self.out(attended.flatten(1))
        return x + self.mlp(self.norms[1](x))


class Model(nn.Module):
    """A decoder with learned positions."""

    def __init__(self, vocab_size: int, longest: int, backend: str) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab_size, WIDTH), nn.Embedding(longest, WIDTH)
        self.layers = nn.ModuleList(Layer(backend) for _ in range(DEPTH))
        for table in (self.tokens, self.positions):
            nn.init.normal_(table.weight, std=0.02)

    def forward(
        self, tokens: Tensor, positions: Tensor, cu_seqlens: Tensor, max_seqlen: int
    ) -> Tensor:
        """Return logits ``(tokens, vocab_size)``."""
        x = self.tokens(tokens[0]) + self.positions(positions[0])
        for layer in self.layers:
            x = layer(x, cu_seqlens, max_seqlen)
        return F.linear(x, self.tokens.weight)


def main(argv: Sequence[str] | None = None) -> list[float]:
    """Train; return the loss of every step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prefix")
    parser.add_argument("samples")
    parser.add_argument("--vocab-size", type=int, default=1000)
    parser.add_argument("--tokens-per-step", type=int, default=8192)
    parser.add_argument("--micro-batch-tokens", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args(argv)

    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if cuda else "cpu"
    if world_size > 1:
        dist.init_process_group("nccl" if cuda else "gloo")
    torch.manual_seed(0)

    dataset = PackedDataset(args.prefix, args.samples)
    schedule = Schedule(dataset, tokens_per_step=args.tokens_per_step)
    loader = build_loader(
        dataset,
        schedule,
        data_parallel_rank=rank,
        data_parallel_size=world_size,
        micro_batch_tokens=args.micro_batch_tokens,
        num_steps=args.steps,
        device=device,
    )
    longest = schedule.capacities[-1]
    needs = AttentionNeeds(
        device=torch.device(device),
        dtype=torch.float32,
        head_dim=WIDTH // HEADS,
        num_heads=HEADS,
        num_key_value_heads=HEADS,
    )
    model = Model(args.vocab_size, longest, choose_backend(needs).name).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    losses: list[float] = []
    total = torch.zeros((), device=device)
    for batch in loader:
        logits = model(
            batch["tokens"], batch["position_ids"], batch["cu_seqlens"], batch["max_seqlen"]
        )
        # Divide the sum over labels by the labels of the whole step on all ranks, which the index
        # knows without communication.
        loss = F.cross_entropy(logits, batch["labels"][0], ignore_index=-100, reduction="sum")
        loss = loss / batch["num_step_label_tokens"]
        loss.backward()
        total += loss.detach()
        if batch["micro_step"] + 1 < batch["num_micro_steps"]:
            continue
        if world_size > 1:
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
            dist.all_reduce(total)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(total))
        total.zero_()
        if rank == 0:
            print(f"step {batch['step']}  bucket {batch['capacity']}  loss {losses[-1]:.4f}")
    return losses


if __name__ == "__main__":
    main()
