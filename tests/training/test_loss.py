"""The chunked loss is plain cross entropy, to the gradient, whatever the chunk."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from megapack.training.model.loss import _linear_cross_entropy, linear_cross_entropy


def _inputs(num_tokens: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(num_tokens)
    hidden = torch.randn(num_tokens, 6, dtype=dtype, requires_grad=True)
    weight = torch.randn(11, 6, dtype=dtype, requires_grad=True)
    labels = torch.randint(0, 11, (num_tokens,))
    labels[torch.rand(num_tokens) < 0.3] = -100
    return hidden, weight, labels


def _plain(hidden: Tensor, weight: Tensor, labels: Tensor, softcap: float) -> Tensor:
    logits = hidden @ weight.T
    if softcap:
        logits = torch.tanh(logits / softcap) * softcap
    return F.cross_entropy(logits, labels, reduction="sum", ignore_index=-100)


@settings(max_examples=40)
@given(
    num_tokens=st.integers(1, 50),
    chunk=st.integers(1, 64),
    softcap=st.sampled_from([0.0, 0.5, 30.0]),
    scale=st.sampled_from([1.0, 0.01]),
)
def test_equals_cross_entropy(num_tokens: int, chunk: int, softcap: float, scale: float) -> None:
    hidden, weight, labels = _inputs(num_tokens)
    expected = _plain(hidden, weight, labels, softcap) * scale
    expected_grads = torch.autograd.grad(expected * 3, (hidden, weight))
    loss, _ = linear_cross_entropy(
        hidden, weight, labels, softcap=softcap, chunk_tokens=chunk, scale=scale
    )
    grads = torch.autograd.grad(loss * 3, (hidden, weight))
    assert torch.allclose(loss, expected, rtol=1e-12)
    for mine, theirs in zip(grads, expected_grads, strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-10, atol=1e-12)
    with torch.no_grad():
        again, _ = linear_cross_entropy(
            hidden, weight, labels, softcap=softcap, chunk_tokens=chunk, scale=scale
        )
    assert torch.allclose(again, expected, rtol=1e-12)


@settings(max_examples=20)
@given(num_tokens=st.integers(1, 50), chunk=st.integers(1, 64))
def test_weights_are_factors_on_single_losses(num_tokens: int, chunk: int) -> None:
    hidden, weight, labels = _inputs(num_tokens)
    factors = torch.rand(num_tokens) + 0.5
    plain = F.cross_entropy(hidden @ weight.T, labels, reduction="none", ignore_index=-100)
    expected = (plain * factors).sum() * 0.25
    expected_grads = torch.autograd.grad(expected, (hidden, weight))
    for grads in (True, False):
        with torch.set_grad_enabled(grads):
            loss, losses = linear_cross_entropy(
                hidden, weight, labels, label_weights=factors, scale=0.25, chunk_tokens=chunk
            )
        assert torch.allclose(loss, expected, rtol=1e-6)
        assert torch.allclose(losses, plain, rtol=1e-12) and not losses.requires_grad
        if grads:
            for mine, theirs in zip(
                torch.autograd.grad(loss, (hidden, weight)), expected_grads, strict=True
            ):
                assert torch.allclose(mine, theirs, rtol=1e-6, atol=1e-9)


class _LargestTensor(TorchDispatchMode):
    """Remembers the most elements any operation ever gave out."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple) else (result,):
            if isinstance(tensor, Tensor):
                self.largest = max(self.largest, tensor.numel())
        return result


def test_no_more_logits_than_a_chunk_has_ever_exist() -> None:
    num_tokens, vocab, width, chunk = 600, 5000, 8, 16
    hidden, weight = torch.randn(num_tokens, width), torch.randn(vocab, width)
    labels = torch.randint(0, vocab, (num_tokens,))
    for gradients in (True, False):
        with _LargestTensor() as seen:
            _linear_cross_entropy._init_fn(
                hidden,
                weight,
                labels,
                None,
                scale=1.0,
                softcap=0.0,
                chunk_tokens=chunk,
                gradients=gradients,
                fused=False,
            )
        assert seen.largest == chunk * vocab, "all logits would be 37 times as many"


def test_no_labels_give_zero_loss_and_zero_gradients() -> None:
    hidden, weight, labels = _inputs(9)
    loss, _ = linear_cross_entropy(hidden, weight, torch.full_like(labels, -100))
    loss.backward()
    assert loss.item() == 0.0
    assert hidden.grad is not None and hidden.grad.abs().max() == 0
    assert weight.grad is not None and weight.grad.abs().max() == 0


def test_the_weight_gradient_of_many_bfloat16_chunks_is_accumulated_in_float32() -> None:
    hidden, weight, labels = _inputs(4096, torch.float32)
    half_hidden = hidden.detach().bfloat16().requires_grad_()
    half_weight = weight.detach().bfloat16().requires_grad_()
    exact = _plain(half_hidden.double(), half_weight.double(), labels, 0.0)
    (expected,) = torch.autograd.grad(exact, half_weight)
    loss, _ = linear_cross_entropy(half_hidden, half_weight, labels, chunk_tokens=16)
    (grad,) = torch.autograd.grad(loss, half_weight)
    assert loss.dtype == torch.float32 and grad.dtype == torch.bfloat16
    assert loss.item() == pytest.approx(exact.item(), rel=2e-3)
    error = (grad.double() - expected.double()).abs().max() / expected.double().abs().max()
    assert error < 0.01  # 256 roundings to bfloat16 would lose more than one


def test_autocast_decides_the_dtype_of_the_products() -> None:
    hidden, weight, labels = _inputs(20, torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss, _ = linear_cross_entropy(hidden, weight, labels)
    loss.backward()
    assert loss.dtype == torch.float32
    assert weight.grad is not None and weight.grad.dtype == torch.float32
    assert loss.item() == pytest.approx(_plain(hidden, weight, labels, 0.0).item(), rel=2e-2)


def test_the_fused_form_computes_the_same() -> None:
    hidden, weight, labels = _inputs(24, torch.float32)
    plain, _ = linear_cross_entropy(hidden, weight, labels, chunk_tokens=8)
    fused, _ = linear_cross_entropy(hidden, weight, labels, chunk_tokens=8, fused=True)
    assert fused.item() == pytest.approx(plain.item(), rel=1e-6)
    expected = torch.autograd.grad(plain, (hidden, weight))
    got = torch.autograd.grad(fused, (hidden, weight))
    for mine, theirs in zip(got, expected, strict=True):
        assert torch.allclose(mine, theirs, atol=1e-5)
