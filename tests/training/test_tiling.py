"""MLPs in chunks compute the same and keep less; what chunks would get wrong is refused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, GPT2Config, MixtralConfig, OPTConfig

from megapack.errors import ConfigError
from megapack.training.config import DataConfig, EngineConfig, ModelConfig, PretrainConfig
from megapack.training.model.architecture import model_configuration
from megapack.training.model.memory import _activations
from megapack.training.model.opening import build_model, num_chunks, tile_mlps
from megapack.training.model.training_model import TrainingModel

from .packing_helpers import VOCAB, documents, pack_documents, tiny_model


@given(tokens=st.integers(1, 300), chunk=st.integers(1, 300))
def test_as_many_chunks_as_torch_makes(tokens: int, chunk: int) -> None:
    """TiledMLP reduces a gradient with the last chunk that it was told of: there must be one."""
    found = torch.zeros(tokens).chunk(num_chunks(tokens, chunk))
    assert len(found) == num_chunks(tokens, chunk)
    assert max(map(len, found)) <= chunk


@pytest.mark.parametrize("preset", ["llama_tiny", "gpt2_tiny", "qwen2_tiny", "gemma2_tiny"])
def test_chunks_change_no_loss_and_no_gradient(preset: str) -> None:
    batch = pack_documents(documents([150, 41, 9]))
    found = []
    for chunk in (None, 7):
        model = tiny_model(preset, backend="eager", seed=3).train()
        if chunk is not None:
            tile_mlps(model.layers, chunk)
        loss, *_ = model(**batch.arguments())
        loss.backward()
        found.append((loss.detach(), {n: p.grad for n, p in model.named_parameters()}))
    (loss, grads), (in_chunks, grads_in_chunks) = found
    torch.testing.assert_close(in_chunks, loss)
    for name, grad in grads.items():
        torch.testing.assert_close(grads_in_chunks[name], grad, rtol=1e-4, atol=1e-5)


def test_only_one_chunk_of_activations_is_kept() -> None:
    def kept(chunk: int | None) -> int:
        config = ModelConfig(preset="llama_tiny")
        with torch.device("meta"):
            model = build_model(config, model_configuration(config, VOCAB), backend="sdpa", seed=0)
        if chunk is not None:
            tile_mlps(model.layers, chunk)
        data = DataConfig(prefix="-", index="-", tokens_per_step=512, micro_batch_tokens=512)
        engine = EngineConfig(precision="fp32", zero_stage=1)
        run = PretrainConfig(run_dir="-", model=config, data=data, engine=engine)
        return _activations(model, run, 512)[0][0]

    # Of each layer SwiGLU keeps gate, its activation, up and their product: 4 x 128 float32.
    assert kept(None) - kept(32) == 2 * 512 * 4 * 128 * 4
    assert kept(512) == kept(None)


@pytest.mark.parametrize(
    ("configuration", "problem"),
    [
        (MixtralConfig(num_local_experts=2), "in its"),
        (GPT2Config(n_embd=32, n_head=2, resid_pdrop=0.1), "has dropout 0.1 in its GPT2MLP"),
        (OPTConfig(ffn_dim=64, hidden_size=32, num_attention_heads=2), "has no mlp"),
    ],
    ids=["experts", "dropout", "without mlp"],
)
def test_layers_unfit_for_chunks_are_refused(configuration: object, problem: str) -> None:
    small = {"num_hidden_layers": 1, "vocab_size": 64}
    for name, value in small.items():
        setattr(configuration, name, value)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(configuration)
    with pytest.raises(ConfigError, match=f"mlp_chunk_tokens is 8.*{problem}.*set it to null"):
        tile_mlps(TrainingModel(model, chunk_tokens=8).layers, 8)
