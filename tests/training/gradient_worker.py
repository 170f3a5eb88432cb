"""One rank: train some steps with an engine; save the first gradient and all losses.

argv: config, output. Started by test_engine.py.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import deepspeed
import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad
from torch.autograd.graph import save_on_cpu

import megapack.training.engine.engine as engine_module
from megapack.config import load_config
from megapack.training.command import set_rank_environment
from megapack.training.config import EngineConfig, ModelConfig, PretrainConfig
from megapack.training.engine.deepspeed_config import zero_3_configuration
from megapack.training.engine.engine import start_engine, train_step
from megapack.training.engine.inputs import Inputs
from megapack.training.engine.world import connect_ranks
from megapack.training.model.architecture import model_configuration
from megapack.training.model.opening import open_model
from megapack.training.trainer import TimedBatches

COLUMNS = ("teacher_ids", "teacher_logits")


class CountedOffload(save_on_cpu):
    """Counter of bytes that go to the host."""

    num_bytes = 0

    def __init__(self, pin_memory: bool) -> None:
        super().__init__(pin_memory)
        pack = self.pack_hook

        def counted(tensor: torch.Tensor) -> Any:
            CountedOffload.num_bytes += tensor.nbytes
            return pack(tensor)

        self.pack_hook = counted


def main() -> None:
    engine_module.save_on_cpu = CountedOffload  # type: ignore[misc]
    if backend := os.environ.get("COMPILED_BY"):
        torch.compile = partial(torch.compile, backend=backend)
    config = load_config(PretrainConfig, sys.argv[1], sys.argv[3:])
    if config.optimizer.kind == "muon":
        torch.compiler.set_stance("force_eager")  # DeepSpeed's kernels, a minute each
    set_rank_environment()
    shared = config.engine.sequence_parallel_size
    with connect_ranks(timeout_minutes=20, sequence_parallel_size=shared) as here:
        inputs = Inputs(config)
        architecture = model_configuration(config.model, inputs.vocab_size)
        model, _ = open_model(
            config.model,
            config.engine,
            architecture,
            device=here.device,
            seed=config.seed,
            zero_3=zero_3_configuration(config, here.size),
            distill=config.distill,
            sequence_group=here.sequence_group,
        )
        held = sum(p.numel() for p in model.parameters())
        engine = start_engine(model, config, here)
        initial = {name: full(p).detach().float().clone() for name, p in model.named_parameters()}
        loader = inputs.loader(config, here, 0, inputs.num_steps)
        if teacher := os.environ.get("TEACHER_ONLINE"):
            loader = with_teacher(loader, teacher, here.device)
        grads: dict[str, torch.Tensor] = {}
        capture_before_step(engine, model, grads)
        losses, norms, balances, capacities = [], [], [], set()
        divergences = []
        for step, batches in TimedBatches(loader).steps():
            capacities.add(inputs.schedule.step(step).capacity)
            result = train_step(engine, batches, world=here, config=config.engine, lr=0.01)
            losses.append(mean(result.loss_sum, result.label_weight))
            if result.balance_sum is not None:
                balances.append(mean(result.balance_sum, result.label_weight))
            if result.divergence_sum is not None:
                divergences.append(mean(result.divergence_sum, result.label_weight))
            norms.append(float(result.grad_norm))
        weights = {name: full(p).detach().float().clone() for name, p in model.named_parameters()}
        averages: dict[str, torch.Tensor] = {}
        if engine.weight_average is not None:
            with engine.weight_average.in_model():
                for name, parameter in model.named_parameters():
                    with deepspeed.zero.GatheredParameters([parameter], enabled=held == 0):
                        averages[name] = parameter.detach().float().clone()
            for name, parameter in model.named_parameters():
                with deepspeed.zero.GatheredParameters([parameter], enabled=held == 0):
                    assert (parameter - weights[name]).abs().max() < 1e-2, (
                        f"{name} was not restored"
                    )
        buffers = {str(b.dtype) for b in model.buffers() if b.is_floating_point()}
        if here.is_first:
            graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
            found: dict[str, Any] = {"grads": grads, "initial": initial, "weights": weights}
            found |= {"losses": losses, "norms": norms, "balances": balances, "averages": averages}
            found |= {"capacities": capacities, "num_buckets": len(capacities), "held": held}
            found |= {"divergences": divergences}
            found |= {"graphs": graphs, "offloaded": CountedOffload.num_bytes, "buffers": buffers}
            torch.save(found, sys.argv[2])


def with_teacher(loader: Any, path: str, device: torch.device) -> Iterator[Any]:
    """Yield the batches with the outputs of a teacher instead of columns."""
    config = ModelConfig(pretrained=path)
    engine = EngineConfig(precision="fp32")
    teacher, _ = open_model(config, engine, model_configuration(config, 1), device=device)
    for batch in loader:
        inputs = (batch[name] for name in ("tokens", "position_ids", "cu_seqlens"))
        k = batch["teacher_ids"].shape[2]
        best = teacher.eval().most_likely(*inputs, batch["max_seqlen"], k=k, vocab_size=64)
        tables = {name: table[None] for name, table in zip(COLUMNS, best, strict=True)}
        assert not any(tables[name].equal(batch[name]) for name in COLUMNS[1:])
        yield {**batch, **tables}


def mean(of_rank: torch.Tensor, weight: float) -> float:
    total = of_rank.clone()
    torch.distributed.all_reduce(total)
    return total.item() / weight


def full(parameter: torch.nn.Parameter) -> torch.Tensor:
    value = (
        safe_get_full_fp32_param(parameter)
        if hasattr(parameter, "_hp_mapping") or hasattr(parameter, "ds_id")
        else None
    )
    return parameter if value is None else value


def capture_before_step(engine: Any, model: Any, grads: dict[str, torch.Tensor]) -> None:
    """Save the whole unclipped gradient of the first step, just before the optimizer uses it."""
    original = engine.step

    def step() -> None:
        if not grads:
            for name, parameter in model.named_parameters():
                grad = safe_get_full_grad(parameter)
                grad = parameter.grad if grad is None else grad
                grads[name] = grad.detach().float().cpu().clone()
        original()

    engine.step = step


main()
