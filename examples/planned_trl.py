"""TRL's SFTTrainer and GRPOTrainer on planned steps: micro batches by tokens, not by documents.

accelerate launch examples/planned_trl.py --method sft
accelerate launch examples/planned_trl.py --method grpo
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import datasets
import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

from megapack.integrations.hosts.planned import PlannedGRPOMixin, PlannedSFTMixin


class PlannedSFTTrainer(PlannedSFTMixin, SFTTrainer):
    """A step has 32 documents; per_device_train_batch_size is ignored."""


class PlannedGRPOTrainer(PlannedGRPOMixin, GRPOTrainer):
    """A step has per_device_train_batch_size completions per rank, assigned by the plan."""


def counts_upwards(completions: list[str], **_: Any) -> list[float]:
    """Reward numbers that follow their predecessor, per word: short texts win."""
    words = [[int(word) for word in text.split() if word.isdigit()] for text in completions]
    return [sum(b == a + 1 for a, b in pairwise(w)) / (1 + len(w)) for w in words]


def main(argv: Sequence[str] | None = None) -> list[float]:
    """Train; return the logged losses (sft) or rewards (grpo)."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--method", choices=("sft", "grpo"), default="sft")
    parser.add_argument("--max-tokens-per-rank", type=int, default=256)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--output", default="runs/planned_trl")
    args = parser.parse_args(argv)

    words = {"[PAD]": 0, "[EOS]": 1, **{str(number): number for number in range(2, 50)}}
    numbers = Tokenizer(models.WordLevel(words, unk_token="[EOS]"))
    numbers.pre_tokenizer = pre_tokenizers.Whitespace()
    cuda = torch.cuda.is_available()
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=50,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=256,
            eos_token_id=1,
            pad_token_id=0,
        )
    )
    common: dict[str, Any] = {
        "output_dir": args.output,
        "max_steps": args.steps,
        "gradient_accumulation_steps": 1,  # each plan has its own number
        "learning_rate": 3e-3,
        "logging_steps": 1,
        "report_to": [],
        "bf16": cuda,
        "use_cpu": not cuda,
        "gradient_checkpointing": False,
    }
    shared = {
        "model": model,
        "processing_class": PreTrainedTokenizerFast(
            tokenizer_object=numbers, pad_token="[PAD]", eos_token="[EOS]"
        ),
        "max_tokens_per_rank": args.max_tokens_per_rank,
    }
    rng = np.random.default_rng(0)
    if args.method == "sft":
        lengths = np.minimum(rng.lognormal(3.0, 0.8, 128).astype(int) + 2, 200)
        documents = [(rng.integers(48) + np.arange(length)) % 48 + 2 for length in lengths]
        trainer = PlannedSFTTrainer(
            args=SFTConfig(**common, max_length=256),
            train_dataset=datasets.Dataset.from_dict({"input_ids": documents}),
            documents_per_step=32,
            planning={"balance": "step"},  # one synchronization per step; "micro_batches" with FSDP
            **shared,
        )
    else:
        prompts = [" ".join(map(str, range(n, n + 4))) for n in rng.integers(2, 40, 64)]
        trainer = PlannedGRPOTrainer(
            args=GRPOConfig(
                **common,
                per_device_train_batch_size=16,
                num_generations=8,
                max_completion_length=32,
            ),
            reward_funcs=counts_upwards,
            train_dataset=datasets.Dataset.from_dict({"prompt": prompts}),
            keep_groups=True,  # keep completions of a prompt on one rank
            **shared,
        )
    trainer.train()
    logged = "loss" if args.method == "sft" else "reward"
    return [entry[logged] for entry in trainer.state.log_history if logged in entry]


if __name__ == "__main__":
    main()
