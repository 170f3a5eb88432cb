"""Memory is counted before it is taken, and the recipes of the repository can be planned."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from megapack.config import load_config
from megapack.training.config import DataConfig, EngineConfig, ModelConfig, PretrainConfig
from megapack.training.engine.deepspeed_config import deepspeed_configuration, describe_reduction
from megapack.training.model.architecture import model_configuration
from megapack.training.model.memory import MemoryEstimate, estimate_memory
from megapack.training.model.opening import build_model

from .processes import ROOT, Zygote
from .test_experts import saved

WORKER = str(Path(__file__).with_name("memory_worker.py"))

RECIPES = sorted((ROOT / "configs").glob("*.yaml"))


# (precision, ZeRO stage, checkpointing, tokens, micro steps, preset or None for Mixtral, overrides)
LARGE = {"hidden_size": 128, "num_hidden_layers": 4, "intermediate_size": 512, "head_dim": 32}
CASES: dict[str, tuple[str, int, bool, int, int, str | None, dict[str, int]]] = {
    "fp32, no ZeRO": ("fp32", 0, False, 512, 1, "llama_tiny", LARGE),
    "bf16 by autocast": ("bf16", 0, False, 512, 1, "llama_tiny", LARGE),
    "bf16 optimizer": ("bf16", 1, False, 512, 1, "llama_tiny", LARGE),
    "recomputed, long": ("bf16", 2, True, 2048, 1, "llama_tiny", LARGE),
    "two micro steps": ("fp32", 1, False, 512, 2, "llama_tiny", LARGE),
    "divided parameters": ("bf16", 3, False, 512, 1, "llama_tiny", LARGE),
    "gpt2, fp32, recomputed": ("fp32", 2, True, 512, 1, "gpt2_tiny", {}),
    "experts": ("bf16", 2, False, 512, 1, None, {}),
}
RANKS = 4


def _write(name: str, directory: Path) -> tuple[Path, PretrainConfig]:
    precision, stage, checkpointing, tokens, micro_steps, preset, overrides = CASES[name]
    model: dict[str, Any] = {"preset": preset, "overrides": overrides}
    if preset is None:
        model = {"pretrained": str(saved("mixtral", directory / "mixtral"))}
    buckets = {"reduce_bucket_size": 500_000, "allgather_bucket_size": 500_000}
    tree = {
        "run_dir": "-",
        "model": model,
        "data": {
            "prefix": "-",
            "index": "-",
            "tokens_per_step": tokens * micro_steps * RANKS,
            "micro_batch_tokens": tokens,
        },
        "engine": {
            "precision": precision,
            "zero_stage": stage,
            "activation_checkpointing": checkpointing,
            "loss_chunk_tokens": 128,
            "deepspeed": {"zero_optimization": buckets} if stage else {},
        },
    }
    path = directory / f"{name}.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path, load_config(PretrainConfig, path)


def _estimate(config: PretrainConfig, ranks: int) -> MemoryEstimate:
    architecture = model_configuration(config.model, 300)
    with torch.device("meta"):
        model = build_model(config.model, architecture, backend="sdpa", seed=0,
                            chunk_tokens=config.engine.loss_chunk_tokens)  # fmt: skip
    zero = deepspeed_configuration(config, ranks)["zero_optimization"]
    longest = config.data.micro_batch_tokens
    return estimate_memory(model, config, ranks, longest=longest, zero=zero)


def test_the_estimate_is_what_deepspeeds_engines_hold(zygote: Zygote, tmp_path: Path) -> None:
    """Within a tenth, on eight configurations, under torch's memory tracker."""
    written = {name: _write(name, tmp_path) for name in CASES}
    paths = json.dumps([[str(path), RANKS] for path, _ in written.values()])
    out = tmp_path / "peaks.json"
    zygote.start([WORKER, paths, str(out)], 1, tmp_path / "log").succeed()
    table = [f"{'':>24} {'tracked MiB':>12} {'estimated':>10} {'ratio':>6}"]
    ratios = {}
    for (name, (_, config)), tracked in zip(
        written.items(), json.loads(out.read_text()), strict=True
    ):
        found = _estimate(config, RANKS)
        ratios[name] = found.total / tracked
        row = f"{name:>24} {tracked / 2**20:12.2f} {found.total / 2**20:10.2f} {ratios[name]:6.3f}"
        table.append(f"{row}  { ({k: round(v / 2**20, 2) for k, v in found.parts.items()}) }")
    print("\n".join(table))
    assert all(0.9 <= ratio <= 1.1 for ratio in ratios.values()), "\n".join(table)


def test_zero_divides_what_it_says_it_divides() -> None:
    def parts(stage: int, ranks: int) -> dict[str, int]:
        config = PretrainConfig(
            run_dir="-",
            model=ModelConfig(preset="llama_tiny"),
            data=DataConfig(
                prefix="-", index="-", tokens_per_step=256 * 16, micro_batch_tokens=256
            ),
            engine=EngineConfig(zero_stage=stage),  # type: ignore[arg-type]
        )
        return _estimate(config, ranks).parts

    count = 82_240 + (384 - 128) * 64  # the vocabulary of 300 is padded to 384 rows
    alone = parts(1, 1)
    assert alone["parameters"] == 2 * count and alone["optimizer state"] == 8 * count
    divided = {stage: parts(stage, 8) for stage in (1, 2, 3)}
    for stage, found in divided.items():
        assert found["optimizer state"] == count
        assert found["gradients"] == alone["gradients"] // (8 if stage >= 2 else 1)
        assert found["parameters"] == alone["parameters"] // (8 if stage == 3 else 1)
    assert divided[2]["reduce buckets"] == 2 * 500_000_000, "DeepSpeed's default"


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
    """And none says how much memory it takes: the dry run does, of today's code."""
    config = load_config(PretrainConfig, path)
    assert config.data.tokens_per_step % config.data.micro_batch_tokens == 0
    if config.model.preset is not None:
        assert model_configuration(config.model, 1000).vocab_size == 1024
    assert "megapack" not in config.run_dir
    assert not re.search(r"\d\s*GiB", path.read_text())


def test_recipes_are_there() -> None:
    names = {path.stem for path in RECIPES}
    assert {"demo_cpu", "llama_350m_bucket", "llama_1b_bucket", "llama_3b_bucket"} <= names
