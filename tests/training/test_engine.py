"""The loss is the mean over the label tokens of a step, for every division of the step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.runtime.config import DeepSpeedConfig

from megapack.config import load_config
from megapack.errors import ConfigError
from megapack.training.config import OptimizerConfig, PretrainConfig
from megapack.training.engine.deepspeed_config import check_deepspeed, deepspeed_configuration
from megapack.training.engine.engine import parameter_groups
from megapack.training.model.training_model import TrainingModel

from .conftest import Corpus, NewRun
from .packing_helpers import check_gradients, losses_one_by_one, plain, tiny_model


@pytest.fixture(scope="module")
def expected(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> TrainingModel:
    """Compare with the gradient of one plain mean over the documents of the step, without our loss,
    attention and batches, and without DeepSpeed."""
    path = corpus.config(tmp_path_factory.mktemp("reference") / "run")
    inputs, model = plain(load_config(PretrainConfig, path))
    found = losses_one_by_one(model, inputs, 0)
    count = sum(labels for _, _, labels in found)
    assert count == inputs.schedule.step(0).num_label_tokens
    model.loss = torch.stack([loss for _, loss, _ in found]).sum() / count
    model.loss.backward()
    return model


def _check(result: dict[str, Any], expected: TrainingModel, *, exact: bool = True) -> None:
    """Check the first loss, in float32 also its gradient, and that the loss falls."""
    loss = expected.loss.item()
    assert result["losses"][0] == pytest.approx(loss, rel=1e-5 if exact else 1e-2)
    assert result["losses"][2] < result["losses"][0] - 0.05, "the loss did not fall"
    if exact:
        check_gradients(result["grads"], expected)


Trained = Callable[..., dict[str, Any]]


@pytest.fixture
def trained(new_run: NewRun) -> Trained:
    """``trained(RANKS, **engine)``: results of gradient_worker.py in three steps."""

    def run(ranks: int, *, model: Any = (), env: Any = None, **engine: object) -> dict[str, Any]:
        name = "_".join(map(str, [ranks, *engine.values()]))
        made = new_run(name, num_steps=3, model=dict(model), engine=engine)
        return made.worker(ranks, env=env)

    return run


def test_the_gradient_does_not_depend_on_ranks_or_zero_stage(
    trained: Trained, expected: TrainingModel
) -> None:
    # A step is 4 micro batches: 4 micro steps of 1 rank, 2 of 2, 1 of 4.
    results = {
        (ranks, stage): trained(ranks, precision="fp32", zero_stage=stage)
        for ranks, stage in [(1, 1), (2, 1), (4, 1), (1, 0), (2, 0), (2, 2), (2, 3)]
    }
    for result in results.values():
        _check(result, expected)
    first = results[1, 1]
    for case, result in results.items():  # later steps, with clipping
        assert result["losses"] == pytest.approx(first["losses"], rel=1e-4), case
        assert result["norms"] == pytest.approx(first["norms"], rel=1e-3), case
        for name, weight in first["weights"].items():
            error = (result["weights"][name] - weight).abs().max()
            assert error < 5e-3, f"{case}, {name}: {error:.1e}"
    assert first["held"] > 80_000 and results[2, 3]["held"] == 0, "ZeRO-3 never has a whole model"
    for name, weight in first["initial"].items():
        assert torch.equal(results[2, 3]["initial"][name], weight), (
            f"{name} has other initial values"
        )


def test_mlps_in_chunks_give_the_same_gradient(trained: Trained, expected: TrainingModel) -> None:
    """A gradient reduced before the last chunk, or never, would differ."""
    chunks: dict[str, Any] = {"precision": "fp32", "mlp_chunk_tokens": 60}
    recomputed = {"zero_stage": 3, "activation_checkpointing": True}
    for case in ({"zero_stage": 1}, {"zero_stage": 2}, recomputed):
        _check(trained(2, **chunks, **case), expected)
    autocast = {**chunks, "precision": "bf16", "zero_stage": 0}
    _check(trained(2, **autocast), expected, exact=False)


def test_zero_3_loads_checkpoints_divided(trained: Trained, tmp_path: Path) -> None:
    saved = tiny_model("qwen2_tiny", seed=5, vocab_size=64)
    saved.save(tmp_path / "saved")
    model = {"preset": None, "pretrained": str(tmp_path / "saved")}
    engine = {"precision": "bf16", "zero_stage": 3}
    result = trained(2, model=model, **engine)
    assert result["held"] == 0
    for name, weight in saved.named_parameters():
        assert torch.equal(result["initial"][name], weight.bfloat16().float()), name
    assert result["buffers"] == {"torch.float32"}


def test_bfloat16_trains_like_float32_to_its_precision(
    trained: Trained, expected: TrainingModel
) -> None:
    for stage, more in [(0, {}), (3, {}), (1, {"activation_checkpointing": True})]:
        result = trained(2, precision="bf16", zero_stage=stage, **more)
        _check(result, expected, exact=False)
        # RoPE frequencies in bfloat16 would be off by whole turns at long positions.
        assert result["buffers"] == {"torch.float32"}, stage


def test_compiled_layers_train_the_same_with_one_graph_per_bucket(
    trained: Trained, expected: TrainingModel
) -> None:
    plain = {"precision": "fp32", "zero_stage": 1}
    mixed = {"precision": "bf16", "zero_stage": 2, "activation_checkpointing": True}
    # The second run counts graphs without compiling kernels, which take longest.
    for engine, tolerance, backend in [(plain, 1e-5, "inductor"), (mixed, 1e-2, "aot_eager")]:
        env = {"COMPILED_BY": backend}
        result = trained(1, env=env, compile=True, **engine)
        assert result["losses"][0] == pytest.approx(expected.loss.item(), rel=tolerance)
        theirs = {name: p.grad for name, p in expected.named_parameters()}
        ours, theirs = (
            torch.cat([grads[name].flatten().double() for name in theirs])
            for grads in (result["grads"], theirs)
        )
        assert (ours - theirs).norm() / theirs.norm() < 10 * tolerance
        assert result["num_buckets"] > 1
        assert result["graphs"] == result["num_buckets"] + 1, (
            "all layers share graphs; one is the loss"
        )


def test_weight_decay_excludes_norms_biases_and_embeddings() -> None:
    model = tiny_model("gpt2_tiny")
    names = {id(p): name for name, p in model.named_parameters()}

    def split(**fields: object) -> tuple[set[str], set[str]]:
        decayed, kept = parameter_groups(model, OptimizerConfig(**fields))  # type: ignore[arg-type]
        assert (decayed["weight_decay"], kept["weight_decay"]) == (0.1, 0.0)
        return {names[id(p)] for p in decayed["params"]}, {names[id(p)] for p in kept["params"]}

    decayed, kept = split()
    assert decayed | kept == set(names.values()) and not decayed & kept
    assert all(name.endswith(".weight") for name in decayed)
    assert any("wte" in name for name in decayed)
    assert all(".ln_" in name or name.endswith(".bias") for name in kept)
    decayed, kept = split(decay_embeddings=False)
    assert any("wte" in name for name in kept) and any("wpe" in name for name in kept)
    assert not any("wte" in name or "wpe" in name for name in decayed)


# One key of every part of DeepSpeed's configuration.
TUNED = [
    {"zero_optimization": {"reduce_bucket_size": 7, "allgather_bucket_size": 9}},
    {"zero_optimization": {"overlap_comm": False, "contiguous_gradients": False}},
    {"zero_optimization": {"offload_optimizer": {"device": "cpu", "pin_memory": True}}},
    {"comms_logger": {"enabled": True, "verbose": False}},
    {"flops_profiler": {"enabled": False, "profile_step": 3, "top_modules": 2}},
    {"tensorboard": {"enabled": False, "output_path": "x"}, "csv_monitor": {"enabled": False}},
    {"wall_clock_breakdown": True, "memory_breakdown": False, "dump_state": False},
    {"communication_data_type": "bf16", "prescale_gradients": True, "steps_per_print": 10},
    {"aio": {"block_size": 1048576, "queue_depth": 4}},
    {"checkpoint": {"tag_validation": "Warn", "parallel_write": {"pipeline_stage": False}}},
    {"timers": {"throughput": {"enabled": False}}},
]


@pytest.mark.parametrize("tuned", TUNED, ids="-".join)
@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_deepspeed_keys_are_merged_and_the_stage_stays(
    corpus: Corpus, tmp_path: Path, tuned: dict[str, Any], zero_stage: int
) -> None:
    engine = {"precision": "bf16", "zero_stage": zero_stage, "deepspeed": tuned}
    path = corpus.config(tmp_path / "run", engine=engine)
    config = load_config(PretrainConfig, path)
    check_deepspeed(config)
    made = DeepSpeedConfig(deepspeed_configuration(config, 1))
    assert made.zero_optimization_stage == config.engine.stage == zero_stage
    for key, value in tuned.items():
        if not isinstance(value, dict):
            continue
        engine["deepspeed"] = {key: {**value, "no_such": 1}}
        path = corpus.config(tmp_path / "run", engine=engine)
        with pytest.raises(ConfigError, match="no_such"):
            check_deepspeed(load_config(PretrainConfig, path))
