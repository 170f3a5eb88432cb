"""megatron-core alone: its builder, its GPTModel, packed rows; no Transformer Engine needed.

torchrun --nproc-per-node 1 examples/megatron_core_loop.py text
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import num_microbatches_calculator, parallel_state
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.utils.data import DataLoader

from megapack.integrations.hosts.megatron import (
    PackedGPTDataset,
    forward_step,
    with_packed_attention,
)


@dataclass
class Tokenizer:
    """The attributes of a tokenizer that megatron-core's datasets read."""

    vocab_size: int
    eod: int = 0

    @property
    def unique_identifiers(self) -> dict[str, int]:
        return {"vocab_size": self.vocab_size}


def main(argv: Sequence[str] | None = None) -> list[float]:
    """Train; return the loss of every step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data_path", help="prefix or manifest")
    parser.add_argument("--vocab-size", type=int, default=1000)
    parser.add_argument("--seq-length", type=int, default=1024)
    parser.add_argument("--global-batch-size", type=int, default=8)
    parser.add_argument("--micro-batch-size", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args(argv)

    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    cuda = torch.cuda.is_available()
    if not dist.is_initialized():
        where = None if "MASTER_ADDR" in os.environ else "tcp://127.0.0.1:0"
        dist.init_process_group(
            "nccl" if cuda else "gloo", init_method=where, rank=rank, world_size=world_size
        )
    parallel_state.initialize_model_parallel()
    num_microbatches_calculator.init_num_microbatches_calculator(
        rank=rank,
        rampup_batch_size=None,
        global_batch_size=args.global_batch_size,
        micro_batch_size=args.micro_batch_size,
        data_parallel_size=world_size,
        decrease_batch_size_if_needed=False,
    )
    torch.manual_seed(0)

    train, _, _ = BlendedMegatronDatasetBuilder(
        PackedGPTDataset,
        [args.steps * args.global_batch_size, 0, 0],
        lambda: True,
        GPTDatasetConfig(
            random_seed=1234,
            sequence_length=args.seq_length,
            blend=([args.data_path], None),
            split="100,0,0",
            tokenizer=Tokenizer(args.vocab_size),
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=False,
            create_attention_mask=False,
        ),
    ).build()
    # Like Megatron's "single" sampler: this rank's part of the next rows of all ranks.
    size = args.micro_batch_size
    batches = [
        list(range(begin + rank * size, begin + (rank + 1) * size))
        for begin in range(0, len(train), size * world_size)
    ]
    data_iterator = iter(DataLoader(train, batch_sampler=batches))

    model = GPTModel(
        config=TransformerConfig(
            num_layers=2,
            hidden_size=64,
            num_attention_heads=4,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            use_cpu_initialization=True,
            bias_dropout_fusion=False,
            activation_func=F.gelu,
        ),
        transformer_layer_spec=with_packed_attention(get_gpt_layer_local_spec()),
        vocab_size=args.vocab_size,
        max_sequence_length=args.seq_length,
        # RoPE needs a GPU in megatron-core 0.16.
        position_embedding_type="rope" if cuda else "learned_absolute",
    ).to("cuda" if cuda else "cpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    losses: list[float] = []
    micro_steps = num_microbatches_calculator.get_num_microbatches()
    for step in range(args.steps):
        report = torch.zeros(2, device="cuda" if cuda else "cpu")
        for _ in range(micro_steps):
            output, loss_of = forward_step(data_iterator, model)
            loss, _, found = loss_of(output)
            loss.backward()
            report += found["lm loss"]
        dist.all_reduce(report)
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= report[1]  # --calculate-per-token-loss: one mean over all labels
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(report[0] / report[1]))
        if rank == 0:
            print(f"step {step}  loss {losses[-1]:.4f}")
    return losses


if __name__ == "__main__":
    main()
