"""A loop with Accelerate on planned steps: documents of any length, no padding, equal work.

accelerate launch examples/planned_accelerate.py

A step has 32 documents for any number of ranks. The number of micro batches of at most 256 tokens
differs between steps, but not between ranks. Gradients are synchronized once per step, so whole
steps are balanced (balance="step").
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import numpy as np
import torch
from accelerate import Accelerator
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from megapack.integrations.hosts.planned import PlannedSteps, accumulate


def main(argv: Sequence[str] | None = None) -> list[float]:
    """Train; return the loss of every step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--max-tokens-per-rank", type=int, default=256)
    parser.add_argument("--steps", type=int, default=12)
    args = parser.parse_args(argv)

    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    lengths = np.minimum(rng.lognormal(3.0, 0.8, 128).astype(int) + 2, 200)
    steps = PlannedSteps(
        [{"input_ids": (rng.integers(50) + np.arange(length)) % 50} for length in lengths],
        documents_per_step=32,
        max_tokens_per_rank=args.max_tokens_per_rank,
        rank=accelerator.process_index,
        num_ranks=accelerator.num_processes,
        balance="step",
    )
    config = LlamaConfig(
        vocab_size=50,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=200,
    )
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer = accelerator.prepare(model, optimizer)

    losses = []
    for step in range(args.steps):  # an epoch has len(steps)
        total = torch.zeros((), device=accelerator.device)
        for row in accumulate(accelerator, model, steps[step]):
            inputs = {k: v.to(accelerator.device) if torch.is_tensor(v) else v
                      for k, v in row.items()}  # fmt: skip
            weights, labels = inputs.pop("loss_weights"), inputs.pop("shift_labels")
            logits = model(**inputs).logits
            loss = F.cross_entropy(logits[0], labels[0], reduction="none") @ weights[0]
            # Weights sum to 1 over the step; multiply by the ranks, as DDP averages over them.
            accelerator.backward(loss * accelerator.num_processes)
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(accelerator.reduce(total, "sum")))
        accelerator.print(f"step {step}  micro batches {len(steps[step])}  loss {losses[-1]:.4f}")
    return losses


if __name__ == "__main__":
    main()
