"""PackedTrainer and SFTTrainer replay routes; targets of multi-token prediction reach a loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from megapack import attention
from megapack.attention import record_routes, replay_routes
from megapack.data import PackedDataset, Schedule
from megapack.errors import ConfigError
from megapack.integrations.dialects import TORCHTITAN, emit
from megapack.integrations.hosts.transformers import MicroBatches, PackedTrainer
from megapack.packing import pack
from megapack.storage.columns import ColumnSpec
from tests.data.corpora import write_columns
from tests.integrations.samples import make_dataset
from tests.integrations.test_transformers import (
    MICRO,
    STEP,
    arguments,
    tiny_llama,
    tiny_mixtral,
    tiny_sft,
)

SPEC = ColumnSpec(dtype="int16", shape=(2, 2), fill=-1)


@pytest.fixture
def recorded(tmp_path: Path) -> MicroBatches:
    """Documents with random routes, half of the tokens with the model's own choice."""
    dataset = make_dataset(tmp_path, [20, 40, 7, 64, 30] * 20)
    pack(dataset.document_lengths, buckets=[16, 32, 64]).save(
        tmp_path / "text.samples", source=dataset
    )
    drawn = np.random.default_rng(0).random((dataset.num_tokens, 2, 6)).argsort(-1)[..., :2]
    drawn[::2] = -1
    write_columns(tmp_path / "text", {"routes": (SPEC, SPEC.rows(drawn))})
    return batches_of(tmp_path, columns=["routes"])


def batches_of(folder: Path, **options: Any) -> MicroBatches:
    data = PackedDataset(folder / "text", folder / "text.samples", **options)
    return MicroBatches(data, Schedule(data, tokens_per_step=STEP), micro_batch_tokens=MICRO)


def routed() -> Any:
    model = tiny_mixtral()
    model.config.output_router_logits = False
    return model


@pytest.mark.parametrize("kind", ["trainer", "checkpointing", "sft"])
def test_trainer_replays_the_routes_of_every_micro_batch(
    recorded: MicroBatches, tmp_path: Path, kind: str
) -> None:
    attention.register("sdpa")
    model, expected = routed(), routed()
    if kind == "sft":
        trainer = tiny_sft(tmp_path, recorded, model, router_aux_loss_coef=0.0)
    else:
        options = {"gradient_checkpointing": kind == "checkpointing"}
        args = arguments(tmp_path, max_steps=1, **options)
        trainer = PackedTrainer(model=model, args=args, train_dataset=recorded)
    trainer.replay_routes = True
    trainer.train()
    items = [recorded[i] for i in range(STEP // MICRO)]
    count = sum(int((item["shift_labels"] >= 0).sum()) for item in items)
    num_replayed = 0
    for item in items:
        labels, routes = item.pop("shift_labels")[0], item.pop("routes")
        del item["labels"]
        with replay_routes(expected, routes), record_routes(expected) as recording:
            logits = expected(**item).logits[0]
            used, wanted = recording.routes(), routes[0]
        given = (wanted >= 0).all(-1).all(-1)
        assert torch.equal(used[given], wanted[given])
        num_replayed += int(given.sum())
        losses = nn.functional.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")
        (losses / count).backward()
    assert num_replayed > STEP // 4
    before = routed()
    with torch.no_grad():
        for (name, found), wanted, start in zip(
            model.named_parameters(), expected.parameters(), before.parameters(), strict=True
        ):
            step = -0.1 * wanted.grad
            error = (found - start - step).norm() / step.norm().clamp(min=1e-6)
            assert error < 1e-2, f"{name}: {float(error):.1e}"


def test_a_dataset_without_routes_is_refused(recorded: MicroBatches, tmp_path: Path) -> None:
    attention.register("sdpa")
    args = arguments(tmp_path, max_steps=1)
    for model, batches, message in (
        (routed(), batches_of(tmp_path), "dataset has 'routes' as None: open it with"),
        (tiny_llama(), recorded, "it has no router that chooses experts by topk"),
    ):
        trainer = PackedTrainer(model=model, args=args, train_dataset=batches)
        trainer.replay_routes = True
        with pytest.raises(ConfigError, match=message):
            trainer.train()


def test_targets_of_multi_token_prediction_reach_a_loss_of_your_own(
    recorded: MicroBatches, tmp_path: Path
) -> None:
    attention.register("sdpa")
    batches, shapes = batches_of(tmp_path, num_mtp_targets=2), []

    class Predicting(PackedTrainer):
        def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **how: Any) -> Any:
            shapes.append((inputs["mtp_labels"].shape, inputs["mtp_loss_mask"].shape))
            return super().compute_loss(model, inputs, *args, **how)

    args = arguments(tmp_path, max_steps=1)
    Predicting(model=tiny_llama(), args=args, train_dataset=batches).train()
    assert set(shapes) == {((1, MICRO, 2), (1, MICRO, 2))}
    with pytest.raises(ConfigError, match="column mtp_labels would be lost"):
        emit(batches.batch(0), TORCHTITAN)
