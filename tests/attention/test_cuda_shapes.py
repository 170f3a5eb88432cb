"""Calls on CUDA, traced without CUDA: dtypes, devices, shapes, and no wait for the device.

FakeTensorMode gives tensors on "cuda" that hold no values. An access to a value (``.item()``,
``.tolist()``, ``if tensor``, a shape that depends on data) raises, as does an operation on tensors
of two devices. Autograd and indexing need a device that this torch was built for, so whole models
are traced on "meta", where a look at a value raises as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from megapack.attention import flex
from megapack.attention.flash import TORCH
from megapack.attention.problem import Forward, ScoreRule, TreeSegments
from megapack.attention.segmentwise import formula_forward
from megapack.training.config import ModelConfig
from megapack.training.model.architecture import model_configuration
from megapack.training.model.opening import build_model

# preset -> a backend of the opaque operator that serves it on CUDA
MODELS = {
    "llama_tiny": "torch",
    "qwen2_tiny": "flash3",
    "gpt2_tiny": "torch",
    "gemma2_tiny": "flash2",
    "gpt2_tiny_alibi": "flash2",
}


@pytest.fixture
def fake() -> Iterator[None]:
    with FakeTensorMode():
        yield


@pytest.mark.parametrize("window", [0, 16])
@pytest.mark.parametrize("causal", [True, False])
def test_torch_flash_operators_accept_our_arguments(fake: None, window: int, causal: bool) -> None:
    q = torch.empty(40, 8, 64, dtype=torch.bfloat16, device="cuda")
    k = torch.empty(40, 2, 64, dtype=torch.bfloat16, device="cuda")
    ends = torch.empty(4, dtype=torch.int32, device="cuda")
    rule = ScoreRule(scale=0.1, causal=causal or bool(window), window=window)
    paths = torch.empty(70, 2, 64, dtype=torch.bfloat16, device="cuda")  # of a tree, gathered
    for keys, segments in (
        (k, TreeSegments.of_documents(ends, 20)),
        (paths, TreeSegments(ends, ends, ends, 20, 30)),
    ):
        out, lse = TORCH.forward(q, keys, keys, segments, rule)
        assert (out.shape, lse.shape, lse.dtype) == (q.shape, (8, 40), torch.float32)
        grads = TORCH.backward(out, Forward(q, keys, keys, out, lse), segments, rule)
        assert [g.shape for g in grads] == [q.shape, keys.shape, keys.shape]
        assert {(t.device.type, t.dtype) for t in (out, *grads)} == {("cuda", torch.bfloat16)}


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("preset", MODELS)
def test_model_step_reads_no_value_and_gives_gradients(preset: str, checkpointing: bool) -> None:
    config = ModelConfig(preset=preset)
    how: Any = {"backend": MODELS[preset], "seed": 0, "chunk_tokens": 64}
    with torch.device("meta"):
        model = build_model(config, model_configuration(config, 256), **how)
        tokens, bounds = torch.zeros(1, 160, dtype=torch.int64), torch.zeros(6, dtype=torch.int32)
    model = model.cast(torch.bfloat16)
    if checkpointing:
        model.checkpoint_activations()
    loss = model(tokens, tokens, tokens, bounds, max_seqlen=90, scale=0.5)[0]
    assert (loss.dtype, loss.shape) == (torch.float32, ())
    loss.backward()
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        assert grad is not None, name
        assert (grad.shape, grad.dtype) == (parameter.shape, torch.bfloat16), name


@pytest.mark.parametrize("window", [0, 16])
def test_block_mask_is_created_without_reading_segments(window: int) -> None:
    bounds = torch.empty(9, dtype=torch.int32, device="meta")
    index = torch.empty(900, dtype=torch.int32, device="meta")
    for segments in (
        TreeSegments.of_documents(bounds, 700),
        TreeSegments(bounds, bounds, index, 700, 700),
    ):
        mask, _ = flex._make_block_mask(segments, 700, ScoreRule(scale=1.0, window=window))
        assert mask.shape == (1, 1, 700, 700)
        assert mask.kv_num_blocks.shape == (1, 1, 6) and mask.kv_num_blocks.device.type == "meta"


def test_the_trace_detects_waits_and_cpu_tensors(fake: None) -> None:
    """Without this the tests above could not fail."""
    q = torch.empty(8, 2, 16, dtype=torch.bfloat16, device="cuda")
    rule = ScoreRule(scale=1.0)
    here = TreeSegments.of_documents(torch.empty(3, dtype=torch.int32, device="cuda"), 8)
    with pytest.raises(DataDependentOutputException):
        formula_forward(q, q, q, here, rule)  # the formula reads cu_seqlens, hence its last place
    on_host = TreeSegments.of_documents(torch.empty(3, dtype=torch.int32), 8)
    with pytest.raises(RuntimeError, match=r"same device|two different devices"):
        TORCH.forward(q, q, q, on_host, rule)
