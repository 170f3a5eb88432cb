"""TRL's SFTTrainer on packed conversations; only tokens with a label carry loss.

megapack-build tokenize --messages-key messages ...   writes text with a column labels
python examples/trl_sft.py text text.samples --tokenizer DIRECTORY
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
from trl import SFTConfig

from megapack.data import PackedDataset, Schedule
from megapack.integrations.hosts.transformers import MicroBatches, sft_trainer


def main(argv: Sequence[str] | None = None) -> list[float]:
    """Train; return the logged losses."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prefix")
    parser.add_argument("samples")
    parser.add_argument("--tokenizer", required=True, help="a directory that AutoTokenizer reads")
    parser.add_argument("--vocab-size", type=int, default=1000)
    parser.add_argument("--tokens-per-step", type=int, default=8192)
    parser.add_argument("--micro-batch-tokens", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--output", default="runs/trl")
    args = parser.parse_args(argv)

    dataset = PackedDataset(args.prefix, args.samples)
    schedule = Schedule(dataset, tokens_per_step=args.tokens_per_step)
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    cuda = torch.cuda.is_available()
    config = LlamaConfig(
        vocab_size=args.vocab_size,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=schedule.capacities[-1],
    )
    trainer = sft_trainer(
        model=LlamaForCausalLM(config),  # or a checkpoint
        args=SFTConfig(
            output_dir=args.output,
            max_steps=args.steps,
            gradient_accumulation_steps=args.tokens_per_step
            // (args.micro_batch_tokens * world_size),
            learning_rate=1e-3,
            logging_steps=1,
            packing=False,
            gradient_checkpointing=False,
            report_to=[],
            bf16=cuda,
            use_cpu=not cuda,
        ),
        train_dataset=MicroBatches(dataset, schedule, micro_batch_tokens=args.micro_batch_tokens),
        processing_class=AutoTokenizer.from_pretrained(args.tokenizer),
    )
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    main()
