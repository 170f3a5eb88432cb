"""One rank: a step of Llama on packed trees with DeepSpeed; save the loss and the gradient.

argv: output, ZeRO stage. Started by test_tree_ranks.py.
"""

from __future__ import annotations

import os
import sys

import deepspeed
import torch
from deepspeed.utils import safe_get_full_grad
from transformers import AutoConfig, AutoModelForCausalLM

from megapack.attention import TreeSegments, register, tree_arguments

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))  # noqa: PTH120, PTH100
from attention.test_tree_ranks import FIELDS, batches_of


def main() -> None:
    output, stage = sys.argv[1], int(sys.argv[2])
    deepspeed.init_distributed("gloo")
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    register("sdpa")
    batches = batches_of(rank, size)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model("llama", **FIELDS), attn_implementation="megapack"
    )
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": len(batches),
            "optimizer": {"type": "SGD", "params": {"lr": 0.0}},
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
            "zero_force_ds_cpu_optimizer": False,
            "zero_allow_untested_optimizer": True,
        },
    )
    total, grads = torch.zeros(()), {}
    for batch in batches:
        logits = engine(
            input_ids=batch["tokens"],
            position_ids=batch["position_ids"],
            **tree_arguments(TreeSegments.of(batch)),
        ).logits
        loss = -(batch["loss_weights"] * batch.log_probs(logits)).sum()
        total += loss.detach()
        engine.backward(
            loss * size * len(batches)
        )  # DeepSpeed averages over ranks and micro batches
        if engine.is_gradient_accumulation_boundary():
            for name, parameter in model.named_parameters():
                grad = safe_get_full_grad(parameter)
                grad = parameter.grad if grad is None else grad
                grads[name] = grad.detach().float().clone()  # the step clears it
        engine.step()
    torch.distributed.all_reduce(total)
    if rank == 0:
        torch.save({"loss": total.item(), "grads": grads}, output)


if __name__ == "__main__":
    main()
