"""Memory is counted before it is taken, and the recipes of the repository can be planned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megapack.training.config import (
    DataConfig,
    EngineConfig,
    ModelConfig,
    PretrainConfig,
    load_config,
)
from megapack.training.model.architecture import model_configuration
from megapack.training.model.memory import estimate_memory, saved_activations
from megapack.training.model.opening import build_model
from megapack.training.run.deepspeed_config import describe_reduction

from .packing_helpers import VOCAB, documents, pack_documents, tiny_model
from .processes import ROOT

RECIPES = sorted((ROOT / "configs").glob("*.yaml"))


def _kept_for_backward(preset: str, backend: str, checkpointing: bool) -> int:
    """What autograd really keeps for 256 tokens, counted on real tensors."""
    model = tiny_model(preset, backend=backend).train()
    if checkpointing:
        model.checkpoint_activations()
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    batch = pack_documents(documents([200, 56]))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(**batch.arguments())
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("preset", ["llama_tiny", "gpt2_tiny"])
def test_activations_are_counted_without_computing_them(preset: str, checkpointing: bool) -> None:
    config = ModelConfig(preset=preset)
    with torch.device("meta"):
        model = build_model(config, model_configuration(config, VOCAB), backend="sdpa", seed=0)
    if checkpointing:
        model.checkpoint_activations()
    counted = saved_activations(model, 256, longest=200)
    real = _kept_for_backward(preset, "sdpa", checkpointing)
    assert counted == pytest.approx(real, rel=0.02)


def test_zero_divides_what_it_says_it_divides() -> None:
    def parts(stage: int, ranks: int) -> dict[str, int]:
        config = PretrainConfig(
            run_dir="-",
            model=ModelConfig(preset="llama_tiny"),
            data=DataConfig(prefix="-", index="-", tokens_per_step=256, micro_batch_tokens=256),
            engine=EngineConfig(zero_stage=stage),  # type: ignore[arg-type]
        )
        with torch.device("meta"):
            architecture = model_configuration(config.model, VOCAB)
            model = build_model(config.model, architecture, backend="sdpa", seed=0)
        return estimate_memory(model, config, ranks, longest=256)[0]

    count = 82_240 + (384 - 128) * 64  # the vocabulary of 257 is padded to 384 rows
    alone = parts(1, 1)
    assert alone["parameters"] == 2 * count and alone["optimizer state"] == 8 * count
    divided = {stage: parts(stage, 8) for stage in (1, 2, 3)}
    for stage, found in divided.items():
        assert found["optimizer state"] == count
        assert found["gradients"] == alone["gradients"] // (8 if stage >= 2 else 1)
        assert found["parameters"] == alone["parameters"] // (8 if stage == 3 else 1)
    assert parts(1, 1)["activations"] == divided[3]["activations"]


def test_the_plan_says_when_gradients_are_reduced() -> None:
    def line(precision: Any, stage: Any, ranks: int = 8) -> str:
        engine = EngineConfig(precision=precision, zero_stage=stage)
        return describe_reduction(engine, 2**30, ranks, 4)

    assert line("bf16", "auto").startswith("ZeRO: stage 2 (auto); 4.00 GiB of gradients")
    assert "in each of 4 micro steps, during the backward" in line("bf16", "auto")
    assert line("fp32", "auto").startswith("ZeRO: stage 1 (auto)")
    assert line("fp32", "auto").endswith("once per step, during the last backward")
    assert "after the last backward, which does not hide it" in line("bf16", 1)
    assert line("bf16", 1, ranks=1) == "ZeRO: stage 1; one rank, nothing to reduce"


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipes_are_valid_configurations_of_models_that_exist(path: Path) -> None:
    config = load_config(PretrainConfig, path)
    assert config.data.tokens_per_step % config.data.micro_batch_tokens == 0
    if config.model.preset is not None:
        architecture = model_configuration(config.model, 1000)
        assert architecture.vocab_size == 1024
    assert "megapack" not in config.run_dir


def test_the_recipes_are_there() -> None:
    names = {path.stem for path in RECIPES}
    assert {"demo_cpu", "llama_350m_bucket", "llama_1b_bucket", "llama_3b_bucket"} <= names
