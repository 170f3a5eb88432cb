"""Training on CUDA equals training on a CPU, to the precision of bfloat16."""

from __future__ import annotations

import copy
import json
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from patience import PATIENCE
from torch import Tensor
from torch.autograd.graph import save_on_cpu
from torch.nn import functional as F

from megapack.attention import choose_backend
from megapack.training.engine.directory import RunDirectory, read_jsonl
from megapack.training.model.architecture import attention_needs
from megapack.training.model.loss import linear_cross_entropy
from megapack.training.model.training_model import TrainingModel

from .conftest import Corpus
from .packing_helpers import documents, pack_documents, tiny_model
from .processes import PRETRAIN, environment

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

LENGTHS = [37, 120, 1, 66]  # with 32 tokens of padding a stream of 256
ON_HOST = partial(save_on_cpu, pin_memory=True)
PRESETS: dict[str, dict[str, Any]] = {
    "llama_tiny": {},
    "qwen2_tiny": {},
    "gpt2_tiny": {},
    "gpt2_tiny_alibi": {},
    "gemma2_tiny": {"attn_logit_softcapping": 2.0, "sliding_window": 16},
}


def _error(got: Tensor, expected: Tensor) -> float:
    """Return the relative error of the whole tensor."""
    difference = got.detach().double().cpu() - expected.detach().double().cpu()
    return float(difference.norm() / expected.detach().double().norm().cpu())


def _on_device(lengths: list[int], padding: int = 0) -> dict[str, Any]:
    """Return the arguments of a model for documents."""
    batch = pack_documents(documents(lengths), padding).arguments()
    return {k: v.cuda() if isinstance(v, Tensor) else v for k, v in batch.items()}


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("softcap", [0.0, 5.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chunked_loss_is_cross_entropy(dtype: torch.dtype, softcap: float, fused: bool) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(700, 128, device="cuda").to(dtype).requires_grad_()
    weight = (torch.randn(5000, 128, device="cuda") * 0.3).to(dtype).requires_grad_()
    labels = torch.randint(0, 5000, (700,), device="cuda")
    labels[::5] = -100
    ours, *_ = linear_cross_entropy(
        hidden, weight, labels, scale=0.01, softcap=softcap, chunk_tokens=256, fused=fused
    )
    grads = torch.autograd.grad(ours, (hidden, weight))
    wide = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    logits = wide[0] @ wide[1].T
    logits = torch.tanh(logits / softcap) * softcap if softcap else logits
    expected = 0.01 * F.cross_entropy(logits, labels, reduction="sum")
    expected_grads = torch.autograd.grad(expected, wide)
    tolerance = {torch.float32: 1e-4, torch.bfloat16: 2e-2}[dtype]
    assert ours.dtype == torch.float32
    for got, wanted in zip((ours, *grads), (expected, *expected_grads), strict=True):
        assert _error(got, wanted) < tolerance


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("preset", PRESETS)
def test_packed_bfloat16_stream_equals_its_documents(preset: str, compiled: bool) -> None:
    """Compare with float32 and transformers' attention; a leak would be an error near 1."""
    if compiled and preset not in ("llama_tiny", "gpt2_tiny_alibi"):
        pytest.skip("two architectures stand for all")
    torch.manual_seed(0)
    packed = _model(preset).cuda()
    reference = copy.deepcopy(packed)
    packed.cast(torch.bfloat16)
    if compiled:
        for layer in packed.layers:
            layer.compile(fullgraph=True, dynamic=False)
    on_device = _on_device(LENGTHS, padding=32)
    loss, *_ = packed(**on_device)
    loss.backward()
    reference.model.set_attn_implementation("eager")  # type: ignore[operator]
    losses = []
    for doc in documents(LENGTHS):
        logits = reference.model(input_ids=doc[None].cuda(), use_cache=False).logits[0]
        losses.append(F.cross_entropy(logits[:-1], doc[1:].cuda(), reduction="sum"))
    expected = torch.stack(losses).sum()
    expected.backward()
    assert _error(loss, expected) < 2e-2
    ours = torch.cat([p.grad.flatten().double() for p in packed.parameters() if p.grad is not None])
    theirs = [p.grad.flatten().double() for p in reference.parameters() if p.grad is not None]
    assert _error(ours, torch.cat(theirs)) < 0.1


@pytest.mark.parametrize("keeping", ["activations", "inputs", "inputs on the host"])
@pytest.mark.parametrize("preset", PRESETS)
def test_forward_and_backward_do_not_synchronize(preset: str, keeping: str) -> None:
    model = _model(preset).cuda().cast(torch.bfloat16)
    if keeping != "activations":
        model.checkpoint_activations(ON_HOST if keeping == "inputs on the host" else None)
    on_device = _on_device(LENGTHS, padding=32)
    model(**on_device)[0].backward()  # compilation and setup may synchronize
    torch.cuda.set_sync_debug_mode("error")
    try:
        model(**on_device)[0].backward()
        with pytest.raises(RuntimeError, match="synchroniz"):  # the check itself works
            on_device["cu_seqlens"].tolist()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_offloaded_inputs_reduce_device_memory() -> None:
    layers, tokens, width = 12, 32_768, 64
    torch.manual_seed(0)
    on_device = _on_device([tokens // 8] * 8)
    peak, losses, grads = {}, {}, {}
    for saving in (None, ON_HOST):
        model = _model("llama_tiny", num_hidden_layers=layers).cuda().cast(torch.bfloat16)
        model.checkpoint_activations(saving)
        torch.cuda.reset_peak_memory_stats()
        loss, *_ = model(**on_device)
        loss.backward()
        peak[saving] = torch.cuda.max_memory_allocated()
        losses[saving] = loss.item()
        grads[saving] = torch.cat([p.grad.flatten() for p in model.parameters()])
        del model, loss
    inputs = layers * tokens * width * 2
    assert peak[None] - peak[ON_HOST] > 0.7 * inputs, peak
    assert losses[ON_HOST] == pytest.approx(losses[None], rel=1e-6)
    assert _error(grads[ON_HOST], grads[None]) < 1e-2  # attention sums in any order


def _model(preset: str, **more: Any) -> TrainingModel:
    overrides = {**PRESETS[preset], **more}
    model = tiny_model(preset, backend="sdpa", overrides=overrides)
    needs = attention_needs(model.configuration, torch.device("cuda"), torch.bfloat16)
    chosen = choose_backend(needs).name
    assert chosen != "eager"
    model = tiny_model(preset, backend=chosen, overrides=overrides)
    with torch.no_grad():  # small initial weights would hide attention
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape), alpha=0.05)
    return model


@pytest.mark.parametrize("engine", [{}, {"zero_stage": 0}, {"compile": True}])
def test_resumed_run_keeps_its_curve(
    corpus: Corpus, tmp_path: Path, engine: dict[str, Any]
) -> None:
    pytest.importorskip("deepspeed")
    run_dir = tmp_path / "run"
    config = corpus.config(
        run_dir,
        num_steps=20,
        engine={"precision": "bf16", **engine},
        checkpoint={"every": 10, "keep": 2, "export": False},
    )
    first = _pretrain(config, run_dir)
    assert [line["step"] for line in first] == list(range(20))
    assert first[-1]["loss"] < first[0]["loss"] - 0.05
    assert all(line["memory_gib"] > 0 for line in first)
    newest = sorted(p for p in RunDirectory(run_dir).checkpoints.iterdir() if p.is_dir())[-1]
    shutil.rmtree(newest)  # the run stopped after step 10
    again = _pretrain(config, run_dir)
    for before, after in zip(first, again, strict=True):
        assert before["samples"] == after["samples"] and before["lr"] == after["lr"]
        assert after["loss"] == pytest.approx(before["loss"], rel=2e-2)
    assert json.dumps(again[:10]) == json.dumps(first[:10])  # resumed, not restarted


def _pretrain(config: Path, run_dir: Path) -> list[dict[str, Any]]:
    env = environment()
    for name in ("DS_ACCELERATOR", "CUDA_VISIBLE_DEVICES"):
        env.pop(name)
    command = [sys.executable, str(PRETRAIN), "--config", str(config)]
    how: dict[str, Any] = {"capture_output": True, "text": True, "timeout": PATIENCE}
    done = subprocess.run(command, env=env, check=False, **how)
    assert done.returncode == 0, done.stderr[-4000:]
    return list(read_jsonl(run_dir / "log.jsonl"))
