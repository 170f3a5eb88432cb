"""Trainer's other engines on two gloo processes: FSDP2 and DeepSpeed's ZeRO.

Each must give the losses and the weights of one process, also when it stops and resumes, and of a
planned step those of the padded batch. And what Trainer offers that would cut or deal micro batches
a second time is refused.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from accelerate import DistributedType, PartialState
from accelerate.parallelism_config import ParallelismConfig
from datasets import Dataset
from ports import free_port
from trl import SFTConfig

from megapack import attention
from megapack.errors import ConfigError
from megapack.integrations.hosts.transformers import PackedTrainer
from tests.integrations import test_planned as planned
from tests.integrations.harness import run_ranks
from tests.integrations.test_transformers import (
    MICRO,
    STEP,
    arguments,
    folder,
    micro_batches,
    on_a_cpu,
    tiny_llama,
)

__all__ = ["folder", "on_a_cpu"]  # fixtures

# With a state; an epsilon of 1 makes its step as smooth as SGD's.
SMOOTH = {"optim": "adamw_torch", "adam_epsilon": 1.0}
FSDP = {"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
ENGINES: dict[str, dict[str, Any]] = {
    "FSDPLlamaForCausalLM": {"fsdp": True, "fsdp_config": FSDP},
    **{
        f"DeepSpeedEngine, ZeRO {stage}": {
            "deepspeed": {
                "zero_optimization": {"stage": stage},
                "train_micro_batch_size_per_gpu": "auto",
                "gradient_accumulation_steps": "auto",
                "gradient_clipping": "auto",
                "zero_allow_untested_optimizer": True,
            }
        }
        for stage in (1, 3)
    },
}


def _trainer(world_size: int, folder: str, out: str, **options: Any) -> PackedTrainer:
    attention.register("sdpa")
    args = arguments(Path(out), gradient_accumulation_steps=STEP // MICRO // world_size, **options)
    if "fsdp" in options:  # Accelerate shards on devices only; torch's FSDP2 does on a CPU, too
        assert args.device.type == "cpu"
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    return PackedTrainer(model=tiny_llama(), args=args, train_dataset=micro_batches(Path(folder)))


def _train(rank: int, world_size: int, folder: str, out: str, steps: int, options: Any) -> Any:
    """Losses of the run so far, the engine's class, and all weights (rank 0)."""
    saved = {"max_steps": steps, "save_strategy": "steps", "save_steps": 2}
    trainer = _trainer(world_size, folder, out, **saved, **SMOOTH, **options)
    trainer.train(resume_from_checkpoint=any(Path(out).glob("run/checkpoint-*")))
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses, type(trainer.model_wrapped).__name__, _weights(trainer)


def _weights(trainer: PackedTrainer) -> dict[str, Any]:
    if trainer.is_deepspeed_enabled:
        import deepspeed  # noqa: PLC0415

        with deepspeed.zero.GatheredParameters(list(trainer.model.parameters())):
            return {name: p.detach().numpy().copy() for name, p in trainer.model.named_parameters()}
    state = trainer.accelerator.get_state_dict(trainer.model_wrapped)
    return {name: tensor.detach().numpy().copy() for name, tensor in state.items()}


@pytest.fixture(scope="module")
def one_rank(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[float], Any]:
    """Losses and weights after four steps of one process."""
    out = str(tmp_path_factory.mktemp("one"))
    [(losses, _, weights)] = run_ranks(_train, 1, free_port(), str(folder), out, 4, {})
    return losses, weights


@pytest.mark.multiprocess
@pytest.mark.parametrize("engine", ENGINES)
def test_two_resumed_ranks_train_like_one(
    folder: Path, one_rank: tuple[list[float], Any], tmp_path: Path, engine: str
) -> None:
    def run(steps: int) -> Any:
        options = ENGINES[engine]
        return run_ranks(_train, 2, free_port(), str(folder), str(tmp_path), steps, options)[0]

    losses, weights = one_rank
    run(2)
    found, used, trained = run(4)
    assert used == engine.split(",", maxsplit=1)[0]
    assert len(found) == len(losses) == 4
    np.testing.assert_allclose(found, losses, rtol=1e-5)
    before = dict(tiny_llama().named_parameters())
    assert trained.keys() >= before.keys()
    for name, start in before.items():
        moved = np.abs(weights[name] - start.detach().numpy()).max()
        assert moved > 0 and np.abs(trained[name] - weights[name]).max() < 1e-3 * moved, name


@pytest.mark.parametrize("name", ["dispatch_batches", "split_batches"])
def test_loaders_that_shard_a_second_time_are_refused(
    folder: Path, tmp_path: Path, name: str
) -> None:
    trainer = _trainer(1, str(folder), str(tmp_path), accelerator_config={name: True})
    with pytest.raises(ConfigError, match=f"accelerator_config.{name} is True: every rank reads"):
        trainer.get_train_dataloader()


def _cut_by_accelerate(rank: int, world_size: int, folder: str, out: str) -> str:
    sizes = ParallelismConfig(cp_size=2)
    options = {**ENGINES["FSDPLlamaForCausalLM"], "parallelism_config": sizes}
    try:
        _trainer(world_size, folder, out, **options).get_train_dataloader()
    except ConfigError as error:
        return str(error)
    return "taken"


@pytest.mark.multiprocess
def test_context_parallelism_of_accelerate_is_refused(folder: Path, tmp_path: Path) -> None:
    for answer in run_ranks(_cut_by_accelerate, 2, free_port(), str(folder), str(tmp_path)):
        assert "the context parallel size is 2: micro batches go to" in answer


# ---- A planned step of SFTTrainer


def _planned_step(rank: int, world_size: int, folder: str, engine: str) -> Any:
    changes = {**ENGINES[engine], **SMOOTH, "learning_rate": 0.1}
    args = SFTConfig(**planned.options(folder, max_length=64, **changes))
    if "fsdp" in ENGINES[engine]:  # Accelerate shards on devices only; torch on a CPU, too
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    trainer = planned.PlannedSFT(
        args=args,
        model=planned.tiny_model(),
        train_dataset=Dataset.from_list(planned.documents()),
        processing_class=planned.tokenizer(),
        documents_per_step=22,
        max_tokens_per_rank=planned.CAP,
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses, type(trainer.model_wrapped).__name__, _weights(trainer)


@pytest.mark.multiprocess
@pytest.mark.parametrize("engine", ENGINES)
def test_sft_trainer_has_the_step_of_the_padded_batch_under(tmp_path: Path, engine: str) -> None:
    losses, used, weights = run_ranks(_planned_step, 2, free_port(), str(tmp_path), engine)[0]
    expected, gradients = planned.padded_step("token_mean")
    assert used == engine.split(",", maxsplit=1)[0]
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    before = dict(planned.tiny_model().named_parameters())
    for name, gradient in gradients.items():
        moved = before[name].detach().numpy() - weights[name]
        first = 0.1 * gradient / (np.abs(gradient) + 1)  # AdamW's first step, its epsilon 1
        np.testing.assert_allclose(moved, first, atol=1e-5, rtol=0)
