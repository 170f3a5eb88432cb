"""Inputs of layers that wait on the host: all of them, nothing else, and no bit changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

from megapack.config import load_config
from megapack.training.config import DataConfig, EngineConfig, ModelConfig, PretrainConfig
from megapack.training.dry_run import dry_run
from megapack.training.model.architecture import model_configuration
from megapack.training.model.memory import MemoryEstimate, estimate_memory
from megapack.training.model.opening import build_model

from .conftest import Corpus
from .packing_helpers import VOCAB, documents, pack_documents, tiny_model
from .processes import Zygote, run_worker

LAYERS, WIDTH = 2, 64  # of the tiny presets


@pytest.mark.parametrize("preset", ["llama_tiny", "gpt2_tiny", "gpt2_tiny_alibi", "gemma2_tiny"])
def test_hooks_get_the_input_of_every_layer_and_nothing_else(preset: str) -> None:
    """Not RoPE's table, which is one for all layers, nor cu_seqlens, nor what the loss keeps."""
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


@pytest.mark.parametrize("preset", ["llama_tiny", "gpt2_tiny"])
def test_losses_and_gradients_are_the_same_bits(preset: str) -> None:
    batch = pack_documents(documents([150, 41, 9]))
    found = []
    for saving in (None, save_on_cpu):
        model = tiny_model(preset, backend="sdpa", seed=3).train()
        model.checkpoint_activations(saving)
        loss, *_ = model(**batch.arguments())
        loss.backward()
        found.append((loss.detach(), {n: p.grad for n, p in model.named_parameters()}))
    (loss, grads), (offloaded, grads_offloaded) = found
    assert torch.equal(offloaded, loss)
    for name, grad in grads.items():
        assert grad is not None and grad.any() and torch.equal(grads_offloaded[name], grad), name


@pytest.mark.parametrize(
    ("engine", "itemsize"),
    [
        ({"precision": "fp32", "zero_stage": 0}, 4),
        ({"precision": "fp32", "zero_stage": 3, "mlp_chunk_tokens": 9}, 4),
        ({"precision": "bf16", "zero_stage": 0}, 4),  # autocast: between layers it is float32
        ({"precision": "bf16", "zero_stage": 2}, 2),
        ({"precision": "fp32", "zero_stage": 1, "sequence_parallel_size": 2}, 4),
    ],
    ids=lambda case: "_".join(map(str, case.values())) if isinstance(case, dict) else "",
)
def test_a_run_is_the_same_and_its_inputs_went_through_the_host(
    zygote: Zygote, corpus: Corpus, tmp_path: Path, engine: dict[str, Any], itemsize: int
) -> None:
    results = {}
    for offload in (False, True):
        config = corpus.config(
            tmp_path / f"{offload}",
            num_steps=3,
            data={"micro_batch_tokens": 64 if "sequence_parallel_size" in engine else 256},
            engine={
                "activation_checkpointing": True,
                "offload_activations": offload,
                **engine,
            },
        )
        results[offload] = run_worker(zygote, config, 2)
    plain, offloaded = results[False], results[True]
    assert plain["offloaded"] == 0
    tokens_of_rank = 3 * 1024 // 2
    assert offloaded["offloaded"] == LAYERS * tokens_of_rank * WIDTH * itemsize
    assert offloaded["losses"] == plain["losses"] and offloaded["norms"] == plain["norms"]
    for part in ("grads", "weights"):
        for name, value in plain[part].items():
            assert torch.equal(offloaded[part][name], value), f"{part} of {name}"


def test_the_estimate_moves_the_inputs_to_the_host() -> None:
    def estimate(**engine: Any) -> MemoryEstimate:
        config = PretrainConfig(
            run_dir="-",
            model=ModelConfig(preset="llama_tiny"),
            data=DataConfig(prefix="-", index="-", tokens_per_step=200, micro_batch_tokens=200),
            engine=EngineConfig(**engine),
        )
        with torch.device("meta"):
            architecture = model_configuration(config.model, VOCAB)
            model = build_model(config.model, architecture, backend="sdpa", seed=0)
        zero = {"reduce_bucket_size": 1000}
        return estimate_memory(model, config, 1, longest=200, zero=zero)

    kept = estimate(activation_checkpointing=True)
    less = estimate(activation_checkpointing=True, offload_activations=True)
    each = 200 * WIDTH * 2  # bfloat16
    assert 0 < kept.parts["activations"] - less.parts["activations"] <= LAYERS * each
    assert kept.on_host == 0
    assert less.on_host == LAYERS * 2**15 and 2**14 < each < 2**15, "page-locked in powers of two"
    del kept.parts["activations"], less.parts["activations"]
    assert kept.parts == less.parts
    autocast = estimate(activation_checkpointing=True, offload_activations=True, zero_stage=0)
    assert autocast.on_host == LAYERS * 2**16, "autocast: between layers it is float32"


def test_the_plan_names_the_memory_of_the_host(corpus: Corpus, tmp_path: Path) -> None:
    engine = {"activation_checkpointing": True, "offload_activations": True}
    plan = dry_run(load_config(PretrainConfig, corpus.config(tmp_path / "run", engine=engine)))
    assert "and on its host:     0.00 GiB (inputs of layers)" in plan
    del engine["offload_activations"]
    plan = dry_run(load_config(PretrainConfig, corpus.config(tmp_path / "run", engine=engine)))
    assert "on its host" not in plan
