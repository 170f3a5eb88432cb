"""A policy update with verl's own functions on planned batches: pip install verl, then

torchrun --nproc-per-node 2 examples/planned_verl.py

The script calls the functions of one step of verl's trainer and workers, without Ray:
``balance_batch`` gives every rank the same number of samples, ``use_dynamic_bsz`` divides a rank's
samples into micro batches below a limit of tokens, and verl's ``agg_loss`` divides by the tokens of
the whole step. A real run of verl needs only ``verl.install()``.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

from megapack.integrations.hosts import verl as planned

planned.install()

from verl import DataProto  # noqa: E402
from verl.trainer.ppo.core_algos import agg_loss  # noqa: E402
from verl.utils import seqlen_balancing  # noqa: E402


def samples(count: int = 32) -> DataProto:
    """Return rollouts that count upwards, after prompts of 4 tokens, padded on the right."""
    rng = np.random.default_rng(0)
    lengths = np.minimum(rng.lognormal(3.0, 0.8, count).astype(int) + 8, 128)
    positions = np.arange(lengths.max())
    mask = torch.from_numpy(positions < lengths[:, None]).long()
    ids = torch.from_numpy((rng.integers(0, 50, (count, 1)) + positions) % 50) * mask
    labelled = mask * (torch.arange(mask.shape[1]) >= 4)
    tensors = {"input_ids": ids, "attention_mask": mask, "response_mask": labelled}
    return DataProto.from_dict(tensors, {"uid": np.arange(count).astype(object)})


def update(model: Any, data: DataProto, rank: int, ranks: int, max_token_len: int) -> list[float]:
    """Return the gradients of one step, averaged over ranks as in FSDP, and this rank's losses."""
    of_sample = data.batch["attention_mask"].sum(1)
    num_tokens = int(data.batch["response_mask"][:, 1:].sum())
    parts = seqlen_balancing.get_seqlen_balanced_partitions(
        seqlen_balancing.calculate_workload(of_sample), k_partitions=ranks, equal_size=True
    )
    mine = data.select_idxs(parts[rank])
    group = dist.group.WORLD if dist.is_initialized() else None
    micro_batches, _ = seqlen_balancing.prepare_dynamic_batch(mine, max_token_len, dp_group=group)
    losses = []
    for micro_batch in micro_batches:
        ids, mask = micro_batch.batch["input_ids"], micro_batch.batch["attention_mask"]
        logits = model(input_ids=ids, attention_mask=mask).logits[:, :-1]
        nll = -logits.log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]
        labelled = micro_batch.batch["response_mask"][:, 1:]
        loss = agg_loss(nll, labelled, "token-mean", dp_size=ranks, batch_num_tokens=num_tokens)
        loss.backward()
        losses.append(float(loss))
    if group is not None:
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= ranks
    return losses


def main(argv: Sequence[str] | None = None) -> list[float]:
    """Train; return the loss of every step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--max-token-len", type=int, default=256)
    parser.add_argument("--steps", type=int, default=12)
    args = parser.parse_args(argv)

    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1 and not dist.is_initialized():
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=128,
    )
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in range(args.steps):
        total = torch.tensor(sum(update(model, samples(), rank, ranks, args.max_token_len)))
        optimizer.step()
        optimizer.zero_grad()
        if ranks > 1:
            dist.all_reduce(total)
        losses.append(float(total) / ranks)
        if rank == 0:
            print(f"step {step}  loss {losses[-1]:.4f}")
    return losses


if __name__ == "__main__":
    main()
