"""Estimates of memory are correct, and the recipes can be planned."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from megapack.config import load_config
from megapack.training.config import (
    DataConfig,
    EngineConfig,
    ModelConfig,
    OptimizerConfig,
    PretrainConfig,
)
from megapack.training.dry_run import dry_run
from megapack.training.engine.deepspeed_config import deepspeed_configuration, describe_reduction
from megapack.training.model.architecture import model_configuration
from megapack.training.model.memory import MemoryEstimate, estimate_memory
from megapack.training.model.opening import build_model

from .conftest import Corpus, NewRun
from .packing_helpers import documents, pack_documents, tiny_model
from .processes import ROOT, Zygote
from .test_experts import saved

WORKER = str(Path(__file__).with_name("memory_worker.py"))

RECIPES = sorted((ROOT / "configs").glob("*.yaml"))


# (precision, ZeRO stage, checkpointing, tokens, micro steps, preset or None for Mixtral, overrides)
LARGE = {"hidden_size": 128, "num_hidden_layers": 2, "intermediate_size": 512, "head_dim": 32}
CASES: dict[str, tuple[str, int, bool, int, int, str | None, dict[str, int]]] = {
    "fp32, no ZeRO": ("fp32", 0, False, 512, 1, "llama_tiny", LARGE),
    "bf16 by autocast": ("bf16", 0, False, 512, 1, "llama_tiny", LARGE),
    "bf16 optimizer": ("bf16", 1, False, 512, 1, "llama_tiny", LARGE),
    "recomputed, long": ("bf16", 2, True, 2048, 1, "llama_tiny", LARGE),
    "two micro steps": ("fp32", 1, False, 512, 2, "llama_tiny", LARGE),
    "divided parameters": ("bf16", 3, False, 512, 1, "llama_tiny", LARGE),
    "gpt2, fp32, recomputed": ("fp32", 2, True, 512, 1, "gpt2_tiny", {}),
    "experts": ("bf16", 2, False, 512, 1, None, {}),
    "experts, fp32": ("fp32", 1, False, 512, 1, None, {}),
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
            **{"prefix": "-", "index": "-", "micro_batch_tokens": tokens},
            "tokens_per_step": tokens * micro_steps * RANKS,
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
    architecture, chunk = model_configuration(config.model, 300), config.engine.loss_chunk_tokens
    with torch.device("meta"):
        model = build_model(config.model, architecture, backend="sdpa", seed=0, chunk_tokens=chunk)
    zero = deepspeed_configuration(config, ranks)["zero_optimization"]
    longest = config.data.micro_batch_tokens
    return estimate_memory(model, config, ranks, longest=longest, zero=zero)


def _tiny(tokens: int, ranks: int = 1, **sections: Any) -> MemoryEstimate:
    """Return the estimate for steps of 16 micro batches."""
    data = DataConfig(prefix="-", index="-", tokens_per_step=16 * tokens, micro_batch_tokens=tokens)
    model = ModelConfig(preset="llama_tiny")
    return _estimate(PretrainConfig(run_dir="-", model=model, data=data, **sections), ranks)


def test_estimate_equals_memory_of_deepspeed_engines(zygote: Zygote, tmp_path: Path) -> None:
    """Within a tenth of torch's memory tracker, on nine configurations."""
    written = {name: _write(name, tmp_path) for name in CASES}
    paths = json.dumps([[str(path), RANKS] for path, _ in written.values()])
    out = tmp_path / "peaks.json"
    zygote.start([WORKER, paths, str(out)], 1, tmp_path / "log").succeed()
    table = [f"{'':>24} {'tracked MiB':>12} {'estimated':>10} {'ratio':>6}"]
    ratios = {}
    peaks = json.loads(out.read_text())
    for (name, (_, config)), tracked in zip(written.items(), peaks, strict=True):
        found = _estimate(config, RANKS)
        ratios[name] = found.total / tracked
        row = f"{name:>24} {tracked / 2**20:12.2f} {found.total / 2**20:10.2f} {ratios[name]:6.3f}"
        table.append(f"{row}  { ({k: round(v / 2**20, 2) for k, v in found.parts.items()}) }")
    print("\n".join(table))
    ratios["experts, fp32"] -= 0.1  # counted in bfloat16, times 2
    assert all(0.9 <= ratio <= 1.1 for ratio in ratios.values()), "\n".join(table)


def test_zero_stages_divide_memory() -> None:
    def parts(stage: Any, ranks: int) -> dict[str, int]:
        average, engine = OptimizerConfig(ema_decay=0.9), EngineConfig(zero_stage=stage)
        return _tiny(256, ranks, optimizer=average, engine=engine).parts

    count = 82_240 + (384 - 128) * 64  # the vocabulary of 300 is padded to 384 rows
    alone = parts(1, 1)
    assert alone["parameters"] == 2 * count and alone["optimizer state"] == 8 * count
    divided = {stage: parts(stage, 8) for stage in (1, 2, 3)}
    for stage, found in divided.items():
        assert found["optimizer state"] == 2 * found["average of weights"] == count
        assert found["gradients"] == alone["gradients"] // (8 if stage >= 2 else 1)
        assert found["parameters"] == alone["parameters"] // (8 if stage == 3 else 1)
    assert divided[2]["reduce buckets"] == 2 * 500_000_000, "DeepSpeed's default"


def test_plan_states_when_gradients_are_reduced() -> None:
    def line(precision: Any, stage: Any, ranks: int = 8) -> str:
        engine = EngineConfig(precision=precision, zero_stage=stage)
        return describe_reduction(engine, 2**30, ranks, 4)

    assert line("bf16", "auto").startswith("ZeRO: stage 2 (auto); 4 GiB of gradients")
    assert "in each of 4 micro steps, during the backward" in line("bf16", "auto")
    assert line("fp32", "auto").startswith("ZeRO: stage 1 (auto)")
    assert line("fp32", "auto").endswith("once per step, during the last backward")
    assert "after the last backward, without overlap" in line("bf16", 1)
    assert line("bf16", 1, ranks=1) == "ZeRO: stage 1; one rank, nothing to reduce"
    kept = "one rank, nothing to reduce, but DeepSpeed allocates its reduce buckets"
    for precision, stage in (("bf16", 1), ("fp32", 0), ("fp32", 1), ("bf16", 2)):
        engine = EngineConfig(precision=precision, zero_stage=stage)  # type: ignore[arg-type]
        has_buckets = "reduce buckets" in _tiny(256, 1, engine=engine).parts
        assert (kept in line(precision, stage, ranks=1)) == has_buckets


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipes_are_valid_configurations(path: Path) -> None:
    """Recipes do not state their memory; the dry run computes it."""
    config = load_config(PretrainConfig, path)
    assert config.data.tokens_per_step % config.data.micro_batch_tokens == 0
    if config.model.preset is not None:
        assert model_configuration(config.model, 1000).vocab_size == 1024
    assert "megapack" not in config.run_dir
    assert not re.search(r"\d\s*GiB", path.read_text())


# ---- Offloaded inputs of layers: all of them, nothing else, and results do not change


LAYERS, WIDTH = 2, 64  # of the tiny presets


@pytest.mark.parametrize("preset", ["llama_tiny", "gpt2_tiny", "gpt2_tiny_alibi", "gemma2_tiny"])
def test_offload_hooks_get_the_inputs_of_layers_only(preset: str) -> None:
    """Layers share RoPE's table and cu_seqlens; the hooks get neither, nor tensors of the loss."""
    model = tiny_model(preset, backend="eager").train()
    entered: list[Tensor] = []
    for layer in model.layers:
        layer.register_forward_pre_hook(lambda _, given: entered.append(given[0].detach().clone()))
    saved: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    model.checkpoint_activations(lambda: saved_tensors_hooks(keep, lambda tensor: tensor))
    batch = pack_documents(documents([150, 41, 9]))
    model(**batch.arguments())
    assert len(entered) == LAYERS and entered[0].shape == (1, 200, WIDTH)
    assert len(saved) == LAYERS
    for given, kept in zip(entered, saved, strict=True):
        assert torch.equal(given, kept)
    assert not torch.equal(*saved)


@pytest.mark.parametrize(
    ("engine", "itemsize"),
    [
        ({"precision": "fp32", "zero_stage": 3, "mlp_chunk_tokens": 60}, 4),
        ({"precision": "bf16", "zero_stage": 0}, 4),  # autocast: between layers it is float32
        ({"precision": "bf16", "zero_stage": 2}, 2),
        ({"precision": "fp32", "zero_stage": 1, "sequence_parallel_size": 2}, 4),
    ],
    ids=lambda case: "_".join(map(str, case.values())) if isinstance(case, dict) else "",
)
def test_offloading_does_not_change_a_run(
    new_run: NewRun, engine: dict[str, Any], itemsize: int
) -> None:
    results = {}
    data = {"micro_batch_tokens": 64 if "sequence_parallel_size" in engine else 256}
    for offload in (False, True):
        kept = {"activation_checkpointing": True, "offload_activations": offload, **engine}
        results[offload] = new_run(f"{offload}", num_steps=3, data=data, engine=kept).worker(2)
    plain, offloaded = results[False], results[True]
    assert plain["offloaded"] == 0
    tokens_of_rank = 3 * 1024 // 2
    assert offloaded["offloaded"] == LAYERS * tokens_of_rank * WIDTH * itemsize
    assert offloaded["losses"] == plain["losses"] and offloaded["norms"] == plain["norms"]
    for part in ("grads", "weights"):
        for name, value in plain[part].items():
            assert torch.equal(offloaded[part][name], value), f"{part} of {name}"


def test_estimate_counts_offloaded_inputs_on_the_host() -> None:
    def estimate(**engine: Any) -> MemoryEstimate:
        return _tiny(200, engine=EngineConfig(activation_checkpointing=True, **engine))

    kept = estimate()
    less = estimate(offload_activations=True)
    each = 200 * WIDTH * 2  # bfloat16
    assert 0 < kept.parts["activations"] - less.parts["activations"] <= LAYERS * each
    assert kept.on_host == 0
    assert less.on_host == LAYERS * 2**15 and 2**14 < each < 2**15, "page-locked in powers of two"
    del kept.parts["activations"], less.parts["activations"]
    assert kept.parts == less.parts
    autocast = estimate(offload_activations=True, zero_stage=0)
    assert autocast.on_host == LAYERS * 2**16, "autocast: between layers it is float32"


def test_plan_states_host_memory(corpus: Corpus, tmp_path: Path) -> None:
    engine = {"activation_checkpointing": True, "offload_activations": True}
    plan = dry_run(load_config(PretrainConfig, corpus.config(tmp_path / "run", engine=engine)))
    assert re.search(r"and on its host: +\d+ KiB \(inputs of layers\)", plan)
