"""The chunked loss and its gradient equal plain cross entropy for every chunk size."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, GPT2Config, MixtralConfig, OPTConfig

from megapack.errors import ConfigError
from megapack.training.config import (
    DataConfig,
    EngineConfig,
    LearningRateConfig,
    ModelConfig,
    PretrainConfig,
)
from megapack.training.model.architecture import model_configuration
from megapack.training.model.loss import _linear_cross_entropy, linear_cross_entropy
from megapack.training.model.memory import _activations
from megapack.training.model.opening import build_model, num_chunks, tile_mlps
from megapack.training.model.training_model import TrainingModel

from .packing_helpers import VOCAB, documents, pack_documents, tiny_model


def _inputs(num_tokens: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(num_tokens)
    hidden = torch.randn(num_tokens, 6, dtype=dtype, requires_grad=True)
    weight = torch.randn(11, 6, dtype=dtype, requires_grad=True)
    labels = torch.randint(0, 11, (num_tokens,))
    labels[torch.rand(num_tokens) < 0.3] = -100
    return hidden, weight, labels


def _each(hidden: Tensor, weight: Tensor, labels: Tensor, softcap: float, z: float = 0) -> Tensor:
    """Return the losses of all tokens."""
    logits = hidden @ weight.T
    if softcap:
        logits = torch.tanh(logits / softcap) * softcap
    penalty = z * logits.exp().sum(1).log().square() * (labels >= 0)
    return F.cross_entropy(logits, labels, reduction="none", ignore_index=-100) + penalty


@settings(max_examples=60)
@given(
    num_tokens=st.integers(1, 50),
    chunk=st.integers(1, 64),
    softcap=st.sampled_from([0.0, 0.5, 30.0]),
    scale=st.sampled_from([1.0, 0.01]),
    z_loss=st.sampled_from([0.0, 0.3]),
    weighted=st.booleans(),
)
def test_equals_cross_entropy_and_z_loss(
    num_tokens: int, chunk: int, softcap: float, scale: float, z_loss: float, weighted: bool
) -> None:
    """Weights multiply losses; the logged losses contain neither weights nor z-loss."""
    hidden, weight, _ = inputs = _inputs(num_tokens)
    factors = torch.rand(num_tokens) + 0.5 if weighted else None
    close = partial(torch.allclose, rtol=1e-6 if weighted else 1e-10, atol=1e-9)
    options: Any = {"softcap": softcap, "chunk_tokens": chunk, "scale": scale, "z_loss": z_loss}
    options["label_weights"] = factors
    expected = _each(*inputs, softcap, z_loss) * (1 if factors is None else factors)
    expected_grads = torch.autograd.grad(expected.sum() * scale * 3, (hidden, weight))
    loss, losses, _ = linear_cross_entropy(*inputs, **options)
    assert close(losses, _each(*inputs, softcap)) and not losses.requires_grad
    assert close(loss, expected.sum() * scale)
    grads = torch.autograd.grad(loss * 3, (hidden, weight))
    assert all(map(close, grads, expected_grads))
    with torch.no_grad():
        assert close(linear_cross_entropy(*inputs, **options)[0], expected.sum() * scale)


class _LargestTensor(TorchDispatchMode):
    """Records the largest output of any operation."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple) else (result,):
            if isinstance(tensor, Tensor):
                self.largest = max(self.largest, tensor.numel())
        return result


def test_logits_of_one_chunk_exist_at_a_time() -> None:
    num_tokens, vocab, width, chunk = 600, 5000, 8, 16
    hidden, weight = torch.randn(num_tokens, width), torch.randn(vocab, width)
    labels = torch.randint(0, vocab, (num_tokens,))
    how: Any = {"scale": 1.0, "softcap": 0.0, "z_loss": 0.0, "chunk_tokens": chunk, "fused": False}
    how |= {"alpha": 0.5, "temperature": 2.0}
    ids = torch.arange(4, dtype=torch.int32).expand(num_tokens, 4)
    for teacher, gradients in itertools.product([[], [ids, -3.0 - ids]], [True, False]):
        with _LargestTensor() as seen:
            given = (hidden, weight, labels, None, teacher)
            _linear_cross_entropy._init_fn(*given, gradients=gradients, **how)
        assert seen.largest == chunk * vocab, "all logits would be 37 times as many"


def test_the_weight_gradient_of_many_bfloat16_chunks_is_accumulated_in_float32() -> None:
    hidden, weight, labels = _inputs(4096, torch.float32)
    half_hidden = hidden.detach().bfloat16().requires_grad_()
    half_weight = weight.detach().bfloat16().requires_grad_()
    exact = _each(half_hidden.double(), half_weight.double(), labels, 0.0).sum()
    (expected,) = torch.autograd.grad(exact, half_weight)
    loss, *_ = linear_cross_entropy(half_hidden, half_weight, labels, chunk_tokens=16)
    (grad,) = torch.autograd.grad(loss, half_weight)
    assert loss.dtype == torch.float32 and grad.dtype == torch.bfloat16
    assert loss.item() == pytest.approx(exact.item(), rel=2e-3)
    error = (grad.double() - expected.double()).abs().max() / expected.double().abs().max()
    assert error < 0.01  # 256 roundings to bfloat16 would lose more than one


def test_autocast_decides_the_dtype_of_the_products() -> None:
    hidden, weight, labels = _inputs(20, torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss, *_ = linear_cross_entropy(hidden, weight, labels)
    loss.backward()
    assert loss.dtype == torch.float32
    assert weight.grad is not None and weight.grad.dtype == torch.float32
    assert loss.item() == pytest.approx(_each(hidden, weight, labels, 0.0).sum().item(), rel=2e-2)


# ---- MLPs in chunks: equal results, less memory; unsuitable layers are refused


@given(tokens=st.integers(1, 300), chunk=st.integers(1, 300))
def test_number_of_chunks_equals_torch(tokens: int, chunk: int) -> None:
    """TiledMLP reduces a gradient at the last of the announced chunks, which must exist."""
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

    # In each layer SwiGLU keeps gate, its activation, up and their product: 4 x 128 float32.
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
    for name, value in (("num_hidden_layers", 1), ("vocab_size", 64)):
        setattr(configuration, name, value)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(configuration)
    with pytest.raises(ConfigError, match=f"mlp_chunk_tokens is 8.*{problem}.*set it to null"):
        tile_mlps(TrainingModel(model, chunk_tokens=8).layers, 8)


# ---- Learning rates are a pure, continuous function of the step


KINDS = ["cosine", "linear", "wsd", "constant"]


def _rates(num_steps: int, **fields: object) -> list[float]:
    rate = LearningRateConfig(**fields)  # type: ignore[arg-type]
    return [rate.at(i, num_steps=num_steps, peak=2.0) for i in range(num_steps)]


@given(
    kind=st.sampled_from(KINDS),
    num_steps=st.integers(1, 300),
    warmup=st.integers(0, 100),
    min_ratio=st.floats(0, 1),
)
def test_rates_rise_then_fall(kind: str, num_steps: int, warmup: int, min_ratio: float) -> None:
    rates = _rates(num_steps, kind=kind, warmup_steps=warmup, min_ratio=min_ratio)
    warmup = min(warmup, num_steps)
    assert all(0 <= rate <= 2.0 + 1e-12 for rate in rates) and max(rates[:-1], default=1) > 0
    assert all(a < b for a, b in itertools.pairwise(rates[:warmup]))
    if warmup:
        assert rates[warmup - 1] == pytest.approx(2.0)
    after = rates[warmup:]
    assert all(a >= b - 1e-12 for a, b in itertools.pairwise(after))
    if kind != "constant" and num_steps > warmup:
        assert rates[-1] == pytest.approx(2.0 * min_ratio, abs=1e-9)


def test_each_kind_in_numbers() -> None:
    assert _rates(4, kind="linear", warmup_steps=0, min_ratio=0.0) == [1.5, 1.0, 0.5, 0.0]
    cosine = _rates(4, kind="cosine", warmup_steps=2, min_ratio=0.0)
    assert cosine == pytest.approx([1.0, 2.0, 1.0, 0.0])
    wsd = _rates(10, kind="wsd", warmup_steps=1, min_ratio=0.5, decay_fraction=0.2)
    assert wsd == pytest.approx([2.0] * 8 + [1.5, 1.0])
    assert _rates(3, kind="constant", warmup_fraction=0.0) == [2.0] * 3


def test_warmup_is_given_in_steps_or_as_a_fraction() -> None:
    assert LearningRateConfig(warmup_fraction=0.05).warmup(1000) == 50
    assert LearningRateConfig(warmup_steps=7).warmup(1000) == 7
    assert LearningRateConfig(warmup_steps=7).warmup(5) == 5


def test_step_outside_the_run_is_refused() -> None:
    with pytest.raises(ValueError, match="step 3 is outside"):
        LearningRateConfig().at(3, num_steps=3, peak=1.0)
