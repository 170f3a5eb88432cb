"""A planned step of SFTTrainer under FSDP2 and ZeRO, on two gloo processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from accelerate import DistributedType, PartialState
from datasets import Dataset
from trl import SFTConfig

from tests.integrations.harness import run_ranks
from tests.integrations.test_planned import (
    CAP,
    PlannedSFT,
    documents,
    options,
    padded_step,
    tiny_model,
    tokenizer,
)
from tests.integrations.test_trainer_engines import ENGINES, _weights


def _step(rank: int, world_size: int, folder: str, engine: str) -> Any:
    changes = {"optim": "adamw_torch", "adam_epsilon": 1.0, "learning_rate": 0.1}
    args = SFTConfig(**{**options(folder, max_length=64), **ENGINES[engine], **changes})
    if "fsdp" in ENGINES[engine]:  # Accelerate shards on devices only; torch on a CPU, too
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    trainer = PlannedSFT(
        args=args,
        model=tiny_model(),
        train_dataset=Dataset.from_list(documents()),
        processing_class=tokenizer(),
        documents_per_step=22,
        max_tokens_per_rank=CAP,
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses, type(trainer.model_wrapped).__name__, _weights(trainer)


@pytest.mark.multiprocess
@pytest.mark.parametrize("engine", ENGINES)
def test_sft_trainer_has_the_step_of_the_padded_batch_under(
    tmp_path: Path, free_port: int, engine: str
) -> None:
    losses, used, weights = run_ranks(_step, 2, free_port, str(tmp_path), engine)[0]
    expected, gradients = padded_step("token_mean")
    assert used == engine.split(",", maxsplit=1)[0]
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    before = dict(tiny_model().named_parameters())
    for name, gradient in gradients.items():
        moved = before[name].detach().numpy() - weights[name]
        first = 0.1 * gradient / (np.abs(gradient) + 1)  # AdamW's first step, its epsilon 1
        np.testing.assert_allclose(moved, first, atol=1e-5, rtol=0)
