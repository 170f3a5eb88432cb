"""Resumes of transformers' Trainer: exact with other ranks and implementations, else refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)
from torch.nn.functional import cross_entropy
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from megapack import attention
from megapack.data import Schedule
from megapack.errors import ResumeError
from megapack.integrations.hosts.transformers import (
    MicroBatches,
    PackedTrainer,
)
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


def _train_in_rank(rank: int, world_size: int, folder: str, out: str, steps: int) -> Any:
    attention.register("sdpa")
    trainer = PackedTrainer(
        model=tiny_llama(),
        args=arguments(
            Path(out),
            max_steps=steps,
            gradient_accumulation_steps=STEP // MICRO // world_size,
            save_strategy="steps",
            save_steps=2,
            ddp_find_unused_parameters=False,
        ),
        train_dataset=micro_batches(Path(folder)),
    )
    trainer.train(resume_from_checkpoint=steps > 2 and world_size > 1)
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.multiprocess
def test_run_resumes_exactly_on_other_ranks(folder: Path, tmp_path: Path, free_port: int) -> None:
    [undisturbed] = run_ranks(_train_in_rank, 1, free_port, str(folder), str(tmp_path / "a"), 4)
    [begun] = run_ranks(_train_in_rank, 1, free_port, str(folder), str(tmp_path / "b"), 2)
    resumed = run_ranks(_train_in_rank, 2, free_port, str(folder), str(tmp_path / "b"), 4)[0]
    assert begun == undisturbed[:2]
    assert len(resumed) == 4
    np.testing.assert_allclose(resumed, undisturbed, rtol=1e-4)


def test_run_resumes_only_with_its_own_schedule(folder: Path, tmp_path: Path) -> None:
    """Also where Trainer restores callbacks; and a checkpoint that has no schedule is taken."""

    def train(seed: int, steps: int, *, resume: bool = True, **changes: Any) -> PackedTrainer:
        batches = micro_batches(folder)
        schedule = Schedule(batches.dataset, tokens_per_step=STEP, seed=seed)
        mine = MicroBatches(batches.dataset, schedule, micro_batch_tokens=MICRO)
        options = {"save_strategy": "steps", "save_steps": 1, "max_steps": steps, **changes}
        trainer = PackedTrainer(
            model=tiny_llama(), args=arguments(tmp_path, **options), train_dataset=mine
        )
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    train(0, 1, resume=False)
    for step, restore in ((2, False), (3, True)):
        with pytest.raises(ResumeError, match="seed"):
            train(1, step, restore_callback_states_from_checkpoint=restore)
        train(0, step, restore_callback_states_from_checkpoint=restore)
    path = tmp_path / "run" / "checkpoint-3" / "trainer_state.json"
    state = json.loads(path.read_text())
    assert state["stateful_callbacks"].pop("ScheduleOfRun")["attributes"]["saved"]["step"] == 3
    path.write_text(json.dumps(state))
    trainer = train(1, 4)
    trainer.train_dataset = micro_batches(folder)
    assert trainer.train().global_step == 4  # a separate run


def test_changed_model_or_argument_is_refused_at_resume(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def train(steps: int, allow: tuple[str, ...] = (), act: str = "silu", **changes: Any) -> None:
        model = tiny_llama()
        model.config.hidden_act = act
        options = {"save_strategy": "steps", "save_steps": 1, "max_steps": steps, **changes}
        trainer = PackedTrainer(
            model=model, args=arguments(tmp_path, **options), train_dataset=micro_batches(folder)
        )
        trainer.allow_change = allow
        trainer.train(resume_from_checkpoint=steps > 1)

    train(1)
    with pytest.raises(ResumeError, match=r"model.hidden_act was 'silu' and is 'gelu'"):
        train(2, act="gelu")
    with pytest.raises(ResumeError, match=r"args.weight_decay was 0.0 and is 0.5"):
        train(2, weight_decay=0.5)
    train(2, ("args.weight_decay",), weight_decay=0.5, logging_steps=7)
    # Trainer keeps the checkpoint's rate for the next step (2), and uses the scheduler's then.
    assert "the learning rate" not in caplog.text
    train(4, ("args.weight_decay", "args.lr_scheduler_type"), lr_scheduler_type="linear")
    assert "the learning rate of step 3 is 0.025, and the checkpoint's run would have had 0.1" in (
        caplog.text
    )
    caplog.clear()
    train(8, ("args.weight_decay",), lr_scheduler_type="linear")
    assert "of step 5 is 0.0375, and the checkpoint's run would have had 0:" in caplog.text


def _my_loss(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    shifted = nn.functional.pad(labels, (0, 1), value=-100)[..., 1:].flatten()
    losses = cross_entropy(outputs.logits.flatten(0, 1), shifted, reduction="sum")
    return losses / num_items_in_batch


def test_changes_outside_of_the_arguments_are_refused_at_resume(
    folder: Path, tmp_path: Path
) -> None:
    def train(steps: int, kind: Any = torch.optim.AdamW, *, frozen: str = "", **more: Any) -> None:
        model = tiny_llama()
        for name, value in model.named_parameters():
            value.requires_grad_(frozen not in name if frozen else True)
        loss = {"compute_loss_func": more.pop("loss")} if "loss" in more else {}
        args = arguments(tmp_path, save_strategy="steps", save_steps=1, max_steps=steps)
        trained = [value for value in model.parameters() if value.requires_grad]
        optimizers = kind(trained, lr=0.01, **more), None
        data = {"args": args, "train_dataset": micro_batches(folder)}
        trainer = PackedTrainer(model=model, optimizers=optimizers, **data, **loss)
        trainer.train(resume_from_checkpoint=steps > 1)

    train(1, frozen="k_proj")
    for change, message in (
        ({"kind": torch.optim.Adam}, "optimizer.class was 'AdamW' and is 'Adam'"),
        ({"kind": torch.optim.SGD}, "optimizer.class was 'AdamW' and is 'SGD'"),
        ({"betas": (0.8, 0.9)}, r"optimizer.betas was \[0.9, 0.999\] and is \[0.8, 0.9\]"),
        ({"weight_decay": 0.5}, "optimizer.weight_decay was 0.01 and is 0.5"),
        ({"frozen": "v_proj"}, r"model.trained was \[\d+, "),  # of the same shapes
        ({"loss": _my_loss}, "compute_loss_func was None and is '_my_loss'"),
    ):
        with pytest.raises(ResumeError, match=message):
            train(2, **{"frozen": "k_proj", **change})
    path = tmp_path / "run" / "checkpoint-1" / "trainer_state.json"
    whole = path.read_text()
    for name, value in (("saved", {"step": [1]}), ("saved_record", 7), ("saved_rates", 1)):
        state = json.loads(whole)
        state["stateful_callbacks"]["ScheduleOfRun"]["attributes"][name] = value
        path.write_text(json.dumps(state))
        with pytest.raises(ResumeError, match=r"trainer_state.json is damaged|not the state"):
            train(2, frozen="k_proj")
    path.write_text(whole)
    train(2, frozen="k_proj")


def _resumed(
    folder: Path, out: Path, steps: int, *, change: str = "", **options: Any
) -> list[float]:
    """Train to a step, from the last checkpoint; return the losses of all steps. ``options`` of
    AdamW or Adam (``rule``), else those of the arguments."""
    model: Any = tiny_llama()
    if change == "recomputed":
        apply_activation_checkpointing(model, check_fn=lambda m: isinstance(m, LlamaDecoderLayer))
    elif change == "compiled":
        model = torch.compile(model, backend="eager")
    more: dict[str, Any] = {}
    if (rule := options.pop("rule", None)) is not None:
        more["optimizers"] = (rule(model.parameters(), **{"lr": 0.01, **options}), None)
        options = {}
    saved = {"save_strategy": "steps", "save_steps": 1, "max_steps": steps}
    args = arguments(out, **{"optim": "adamw_torch", **saved, **options})
    trainer = PackedTrainer(model=model, args=args, train_dataset=micro_batches(folder), **more)
    trainer.train(resume_from_checkpoint=steps > 1)
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


ADAMW, ADAM = {"rule": torch.optim.AdamW}, {"rule": torch.optim.Adam}


@pytest.mark.parametrize(
    ("begun", "resumed"),
    [
        ({}, {"optim": "adamw_torch_fused"}),
        ({"optim": "adamw_torch_fused"}, {}),
        ({}, {"torch_compile": True, "torch_compile_backend": "eager"}),
        ({"torch_compile": True, "torch_compile_backend": "eager"}, {}),
        ({}, {"change": "recomputed"}),
        ({"change": "recomputed"}, {}),
        ({"change": "compiled"}, {"change": "compiled"}),
        (ADAMW, {**ADAMW, "foreach": True}),
        ({**ADAMW, "fused": True}, {**ADAMW, "differentiable": False}),
        (ADAMW, {**ADAM, "weight_decay": 0.01, "decoupled_weight_decay": True}),
        (ADAMW, {**ADAMW, "lr": torch.tensor(0.01)}),
    ],
    ids=str,
)
def test_a_run_resumes_with_another_implementation(
    folder: Path, tmp_path: Path, begun: dict[str, Any], resumed: dict[str, Any]
) -> None:
    _resumed(folder, tmp_path, 1, **begun)
    shutil.copytree(tmp_path / "run", tmp_path / "same" / "run")
    losses = _resumed(folder, tmp_path, 2, **resumed)
    assert len(losses) == 2
    same = _resumed(folder, tmp_path / "same", 2, **begun)
    np.testing.assert_allclose(losses, same, rtol=1e-5)


@pytest.mark.parametrize(
    ("resumed", "key"),
    [
        ({**ADAM, "weight_decay": 0.01}, "optimizer.class was 'AdamW' and is 'Adam'"),
        ({**ADAMW, "betas": (0.9, 0.9)}, "optimizer.betas"),
        ({**ADAMW, "eps": 1e-3}, "optimizer.eps"),
        ({**ADAMW, "lr": 0.02}, "optimizer.lr"),
        ({**ADAMW, "amsgrad": True}, "optimizer.amsgrad"),
        ({**ADAMW, "maximize": True}, "optimizer.maximize"),
        # Trainer would not find the names of one in the checkpoint of the other.
        ({**ADAMW, "change": "compiled"}, "model.is_compiled was False and is True"),
    ],
    ids=str,
)
def test_a_run_does_not_resume_with_another_update(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, resumed: dict[str, Any], key: str
) -> None:
    out = tmp_path_factory.mktemp("update")
    _resumed(folder, out, 1, **ADAMW)
    with pytest.raises(ResumeError, match=key):
        _resumed(folder, out, 2, **resumed)
