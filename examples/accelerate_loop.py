"""A loop with Accelerate: the loader is rank-aware, so only model and optimizer are prepared.

accelerate launch examples/accelerate_loop.py text text.samples
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from accelerate import Accelerator
from transformers import LlamaConfig, LlamaForCausalLM

from megapack.data import PackedDataset, Schedule, build_loader
from megapack.integrations.hosts.transformers import check_model, model_inputs


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

    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    dataset = PackedDataset(args.prefix, args.samples)
    schedule = Schedule(dataset, tokens_per_step=args.tokens_per_step)
    loader = build_loader(
        dataset,
        schedule,
        data_parallel_rank=accelerator.process_index,
        data_parallel_size=accelerator.num_processes,
        micro_batch_tokens=args.micro_batch_tokens,
        num_steps=args.steps,
        device=accelerator.device,
    )
    config = LlamaConfig(
        vocab_size=args.vocab_size,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=schedule.capacities[-1],
    )
    model = LlamaForCausalLM(config)
    check_model(model, dataset, device=accelerator.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = accelerator.prepare(model, optimizer)

    losses, total = [], torch.zeros((), device=accelerator.device)
    for batch in loader:
        last = batch["micro_step"] + 1 == batch["num_micro_steps"]
        accelerator.gradient_state._set_sync_gradients(last)
        # Divide by the labels of the whole step; multiply by the ranks, as DDP averages over them.
        loss = model(**model_inputs(batch), num_items_in_batch=batch["num_step_label_tokens"]).loss
        accelerator.backward(loss * accelerator.num_processes)
        total += loss.detach()
        if not last:
            continue
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(accelerator.reduce(total, "sum")))
        total.zero_()
        accelerator.print(f"step {batch['step']}  loss {losses[-1]:.4f}")
    return losses


if __name__ == "__main__":
    main()
