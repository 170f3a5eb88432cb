"""TRL's GRPOTrainer and DPOTrainer on prefix trees: a prompt is computed once for its completions.

python examples/tree_trl.py --method grpo
python examples/tree_trl.py --method dpo

Trains without and with trees, each in its own process. Prints the tokens that the model forwarded
and the processor seconds, both without generation; the growth of memory; how far the parameters
moved, and how far those of the two runs differ after the last step.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import time
from collections.abc import Sequence
from typing import Any

import datasets
import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer

from megapack.attention import register
from megapack.integrations.hosts.planned import PlannedGRPOMixin
from megapack.integrations.hosts.trees import TreeDPOMixin

ANSWERS = 16  # of a prompt


class Timed:
    """Measures the time of generation."""

    generation_seconds = 0.0

    def _generate(self, prompts: list[Any]) -> Any:
        begin = time.process_time()
        made = super()._generate(prompts)  # type: ignore[misc]
        self.generation_seconds += time.process_time() - begin
        return made


class StockGRPO(Timed, GRPOTrainer):
    """GRPOTrainer, for the comparison."""


class TreeGRPO(Timed, PlannedGRPOMixin, GRPOTrainer):
    """Micro batches are trees of at most max_tokens_per_rank tokens."""


class TreeDPO(TreeDPOMixin, DPOTrainer):
    """The pairs of a micro batch are one tree."""


def words(rng: np.random.Generator, count: int) -> str:
    """Return numbers as a text."""
    return " ".join(map(str, rng.integers(2, 50, count)))


def distinct(completions: list[str], **_: Any) -> list[float]:
    """Reward completions for different words."""
    return [len(set(text.split())) / (1 + len(text.split())) for text in completions]


def copies(model: Any) -> list[Any]:
    """Return the parameters as arrays."""
    return [parameter.detach().float().numpy(force=True).copy() for parameter in model.parameters()]


def train(args: argparse.Namespace, trees: bool) -> dict[str, Any]:
    """Train; return what was measured, the logged losses and the parameters."""
    cuda = torch.cuda.is_available()
    register("flash2" if cuda else "sdpa")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50,
        hidden_size=args.hidden_size,
        intermediate_size=2 * args.hidden_size,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=args.prompt_tokens + args.answer_tokens + 8,
        eos_token_id=1,
        pad_token_id=0,
    )
    attention = "megapack" if trees else "sdpa"
    model, reference = (
        LlamaForCausalLM._from_config(config, attn_implementation=attention) for _ in range(2)
    )
    vocabulary = {"[PAD]": 0, "[EOS]": 1, **{str(number): number for number in range(2, 50)}}
    numbers = Tokenizer(models.WordLevel(vocabulary, unk_token="[EOS]"))
    numbers.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=numbers, pad_token="[PAD]", eos_token="[EOS]"
    )
    common: dict[str, Any] = {
        "output_dir": args.output,
        "max_steps": args.steps,
        "gradient_accumulation_steps": 1,
        "learning_rate": 0.1,
        "optim": "sgd",
        "per_device_train_batch_size": 2 * ANSWERS if args.method == "grpo" else 16,
        "logging_steps": 1,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        "bf16": cuda,
        "use_cpu": not cuda,
        "gradient_checkpointing": False,
    }
    shared = {"model": model, "processing_class": tokenizer}
    rng = np.random.default_rng(0)
    prompts = [words(rng, args.prompt_tokens) for _ in range(16 * args.steps)]
    length = args.answer_tokens
    if args.method == "grpo":
        settings = GRPOConfig(
            **common,
            num_generations=ANSWERS,
            max_completion_length=length,
            generation_kwargs={"min_new_tokens": length},
        )
        data = datasets.Dataset.from_dict({"prompt": prompts})
        shared |= {"args": settings, "reward_funcs": distinct, "train_dataset": data}
        trainer: Any = (
            TreeGRPO(max_tokens_per_rank=8192, trees=True, keep_groups=True, **shared)
            if trees
            else StockGRPO(**shared)
        )
    else:
        answers = {
            name: [" " + words(rng, length) for _ in prompts] for name in ("chosen", "rejected")
        }
        data = datasets.Dataset.from_dict({"prompt": prompts, **answers})
        settings = DPOConfig(**common, max_length=config.max_position_embeddings)
        shared |= {"args": settings, "ref_model": reference, "train_dataset": data}
        trainer = (TreeDPO if trees else DPOTrainer)(**shared)

    forwarded = [0]

    def count(_: Any, __: Any, inputs: dict[str, Any]) -> None:
        if inputs.get("use_cache") is False:  # not generation
            forwarded[0] += inputs["input_ids"].numel()

    for each in (model, reference):
        each.model.register_forward_pre_hook(count, with_kwargs=True)
    start = copies(model)
    memory, begin = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    trainer.train()
    seconds = time.process_time() - begin - getattr(trainer, "generation_seconds", 0.0)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory) / 1024
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    parameters = copies(model)
    return {
        "tokens": forwarded[0],
        "seconds": seconds,
        "MiB": grown,
        "losses": losses,
        "parameters": parameters,
        "moved": max(abs(new - old).max() for new, old in zip(parameters, start, strict=True)),
    }


def main(argv: Sequence[str] | None = None) -> dict[str, dict[str, Any]]:
    """Train both ways; print and return what was measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--method", choices=("grpo", "dpo"), default="grpo")
    parser.add_argument("--prompt-tokens", type=int, default=600)
    parser.add_argument("--answer-tokens", type=int, default=60)
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--output", default="runs/tree_trl")
    args = parser.parse_args(argv)
    found = {}
    for name, trees in (("without trees", False), ("with trees", True)):
        # Separate processes: a run must not reuse memory of the run before it.
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            found[name] = pool.apply(train, (args, trees))
        print("{}: {tokens:,} tokens, {seconds:.1f} s, {MiB:.0f} MiB".format(name, **found[name]))
    pairs = zip(*(each["parameters"] for each in found.values()), strict=True)
    differ, moved = max(abs(a - b).max() for a, b in pairs), found["with trees"]["moved"]
    print(f"parameters moved by up to {moved:.1e} and differ by up to {differ:.1e}")
    return found


if __name__ == "__main__":
    main()
