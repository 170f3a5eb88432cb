"""verl's actor on prefix trees, without Ray or sharding: pip install verl, then

python examples/tree_verl.py
python examples/tree_verl.py --no-trees

Each step scores rollouts and updates the policy with the functions that verl's workers call: the
FSDP engine's ``forward_backward_batch`` and ``ppo_loss``. The engine is verl's class around a model
on one device. Prints the tokens that the model forwarded and those of the rollouts; both ways train
the same parameters. A real run needs only the three settings of
``megapack.integrations.hosts.verl_trees``.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

from megapack.integrations.hosts import verl_trees

ANSWERS, VOCABULARY = 4, 96  # answers per prompt; token ids


def engine_of(model: Any) -> Any:
    """Return verl's policy engine around an unsharded model."""
    from verl.utils.torch_functional import entropy_from_logits  # noqa: PLC0415
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead  # noqa: PLC0415

    engine = object.__new__(FSDPEngineWithLMHead)  # its constructor shards
    engine.module = model
    chunks = {"entropy_checkpointing": False, "entropy_from_logits_with_chunking": False}
    engine.engine_config = SimpleNamespace(**chunks)
    engine.use_ulysses_sp, engine.ulysses_sequence_parallel_size = False, 1
    engine.pad_to_length, engine._autocast_dtype = False, torch.float32
    engine.compute_entropy_from_logits = entropy_from_logits
    engine.get_data_parallel_group = lambda: dist.group.WORLD
    engine.get_data_parallel_size = lambda: 1
    return engine


def nested(rows: list[Any]) -> Any:
    """Return rows of different lengths as verl passes them."""
    return torch.nested.as_nested_tensor([torch.tensor(r) for r in rows], layout=torch.jagged)


def rollouts(seed: int) -> dict[str, Any]:
    """Return rollouts of four prompts, with random advantages."""
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(2, VOCABULARY, rng.integers(12, 30)).tolist() for _ in range(4)]
    prompts = [prompt for prompt in prompts for _ in range(ANSWERS)]
    answers = [rng.integers(2, VOCABULARY, rng.integers(1, 16)).tolist() for _ in prompts]
    ones = nested([[1] * len(answer) for answer in answers])
    advantages = [[float(rng.normal())] * len(answer) for answer in answers]
    whole = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
    rows = {"prompts": nested(prompts), "responses": nested(answers), "input_ids": nested(whole)}
    rows |= {"position_ids": nested([list(range(len(row))) for row in whole])}
    rows |= {"response_mask": ones, "loss_mask": ones, "advantages": nested(advantages)}
    return {**rows, "temperature": torch.full((len(whole),), 0.7)}


def train(engine: Any, steps: int, max_token_len: int) -> torch.Tensor:
    """Update the policy; return the log-probabilities of all answers before each update."""
    from verl.utils import tensordict_utils as tu  # noqa: PLC0415
    from verl.workers.config import ActorConfig  # noqa: PLC0415
    from verl.workers.utils.losses import ppo_loss  # noqa: PLC0415

    sizes = {"rollout_n": ANSWERS, "ppo_micro_batch_size_per_gpu": 4, "entropy_coeff": 0.01}
    policy_loss = partial(ppo_loss, ActorConfig(strategy="fsdp", **sizes))
    optimizer = torch.optim.SGD(engine.module.parameters(), lr=0.5)
    settings = {"use_dynamic_bsz": True, "max_token_len_per_gpu": max_token_len}
    settings |= {"use_remove_padding": True, "calculate_entropy": True, "pad_mode": "no_padding"}
    log_probs = []
    for step in range(steps):
        rows = rollouts(step)
        settings["global_batch_size"] = len(rows["temperature"])
        batch = tu.get_tensordict(dict(rows), dict(settings))
        scored = engine.forward_backward_batch(batch, None, forward_only=True)
        lengths = rows["responses"].offsets().diff().tolist()
        of_samples = scored["model_output"]["log_probs"].unbind()
        parts = [row[-n - 1 : -1] for row, n in zip(of_samples, lengths, strict=True)]
        log_probs += parts
        # Log-probabilities of an old policy, so that the ratio is not 1.
        old = torch.nested.as_nested_tensor([part + 0.1 for part in parts], layout=torch.jagged)
        optimizer.zero_grad()
        batch = tu.get_tensordict({**rows, "old_log_probs": old}, dict(settings))
        engine.forward_backward_batch(batch, policy_loss)
        optimizer.step()
    return torch.cat(log_probs)


def main(argv: Sequence[str] | None = None) -> tuple[torch.Tensor, Any, list[int]]:
    """Train; return log-probabilities, the model, and the tokens of trees and of rollouts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--no-trees", action="store_true")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--max-token-len", type=int, default=96, help="tokens of a micro batch")
    args = parser.parse_args(argv)
    if not args.no_trees:
        verl_trees.install()
    if not dist.is_initialized():
        store = dist.FileStore(f"{tempfile.mkdtemp()}/store", 1)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    torch.manual_seed(0)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "vocab_size": VOCABULARY}
    sizes["initializer_range"] = 0.2  # gradients that differ from rounding
    model = LlamaForCausalLM._from_config(
        LlamaConfig(**sizes, **heads),
        attn_implementation="eager" if args.no_trees else "megapack",
    )
    engine, begin = engine_of(model), time.process_time()
    log_probs = train(engine, args.steps, args.max_token_len)
    seconds = time.process_time() - begin
    total = 2 * sum(len(rollouts(step)["input_ids"].values()) for step in range(args.steps))
    tokens = getattr(engine, "tree_tokens", [total, total])
    print(f"{tokens[0]:,} tokens forwarded, {tokens[1]:,} of rollouts, {seconds:.1f} s")
    return log_probs, model, tokens


if __name__ == "__main__":
    main()
