"""Offline distillation: the loss equals its definition, the dump equals the teacher itself."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import distillation as definition
from torch import Tensor

from megapack.training.model.loss import (
    NO_TEACHER,
    Teacher,
    linear_cross_entropy,
    top_log_probabilities,
)

# ---- The loss


def _teacher(num_tokens: int, vocab: int, k: int, seed: int, **how: Any) -> Teacher:
    """Return the most likely tokens of random scores; some positions have no teacher."""
    random = torch.Generator().manual_seed(seed)
    scores = 3 * torch.randn(num_tokens, vocab, generator=random, dtype=torch.float64)
    values, ids = scores.log_softmax(1).topk(k)
    values[torch.rand(num_tokens, generator=random) < 0.2] = NO_TEACHER
    return Teacher(ids.int(), values, **how)


@settings(max_examples=60, deadline=None)
@given(
    num_tokens=st.integers(1, 20),
    k=st.integers(1, 10),
    chunk=st.integers(1, 24),
    alpha=st.sampled_from([0.0, 0.3, 1.0]),
    temperature=st.sampled_from([1.0, 2.5, 0.5]),
    softcap=st.sampled_from([0.0, 2.0]),
    z_loss=st.sampled_from([0.0, 0.3]),
    weighted=st.booleans(),
)
def test_loss_and_gradient_equal_the_definition(
    num_tokens: int,
    k: int,
    chunk: int,
    alpha: float,
    temperature: float,
    softcap: float,
    z_loss: float,
    weighted: bool,
) -> None:
    torch.manual_seed(num_tokens)
    hidden = torch.randn(num_tokens, 6, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(11, 6, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(0, 11, (num_tokens,))
    labels[torch.rand(num_tokens) < 0.3] = -100
    factors = torch.rand(num_tokens, dtype=torch.float64) + 0.5 if weighted else None
    teacher = _teacher(num_tokens, 11, k, num_tokens, alpha=alpha, temperature=temperature)
    logits = hidden @ weight.T
    logits = torch.tanh(logits / softcap) * softcap if softcap else logits
    expected = torch.zeros((), dtype=torch.float64)
    apart = torch.zeros(num_tokens, dtype=torch.float64)
    for i, label in enumerate(labels.tolist()):
        ids, numbers = teacher.ids[i].tolist(), teacher.log_probabilities[i].tolist()
        if label >= 0:
            how: Any = {"alpha": alpha, "temperature": temperature}
            loss = definition.loss(logits[i], label, ids, numbers, **how)
            loss = loss + z_loss * logits[i].exp().sum().log().square()
            expected = expected + loss * (1 if factors is None else factors[i])
            if numbers[0] <= 0:
                apart[i] = definition.divergence(logits[i], ids, numbers, temperature)
    close = partial(torch.testing.assert_close, rtol=1e-9, atol=1e-9)
    options: Any = {"label_weights": factors, "scale": 0.5, "softcap": softcap, "z_loss": z_loss}
    options |= {"chunk_tokens": chunk, "teacher": teacher}
    loss, losses, divergences = linear_cross_entropy(hidden, weight, labels, **options)
    assert divergences is not None and not divergences.requires_grad
    close(loss, 0.5 * expected)
    close(divergences, apart.detach())
    close(losses, linear_cross_entropy(hidden, weight, labels, softcap=softcap)[1])
    if (labels >= 0).any():
        ours = torch.autograd.grad(loss * 2, (hidden, weight))
        close(ours, torch.autograd.grad(expected, (hidden, weight)))
    with torch.no_grad():
        close(linear_cross_entropy(hidden, weight, labels, **options)[0], 0.5 * expected)


def test_a_sure_student_has_an_exact_remainder_in_float32() -> None:
    """1 minus the sum of its probabilities would be 0 or a multiple of 6e-8."""
    scores = torch.tensor([[20.0, 3.0, 1.0, 0.0, -1.0]])
    teacher = Teacher(torch.tensor([[0, 1]]), torch.tensor([[-0.5, -1.5]]), alpha=1.0)
    weight = scores.T.contiguous().requires_grad_()
    loss, *_ = linear_cross_entropy(torch.ones(1, 1), weight, torch.tensor([0]), teacher=teacher)
    exact = scores.double().squeeze(0).requires_grad_()
    expected = definition.divergence(exact, [0, 1], [-0.5, -1.5], 1.0)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    (grad,), (slope,) = (
        torch.autograd.grad(loss, (weight,)),
        torch.autograd.grad(expected, (exact,)),
    )
    torch.testing.assert_close(grad.squeeze(1).double(), slope, rtol=1e-5, atol=1e-7)


def test_rounded_probabilities_above_one_leave_no_remainder() -> None:
    numbers = torch.tensor([[0.0, -6.0]])  # sum 1.0025
    teacher = Teacher(torch.tensor([[2, 0]]), numbers, alpha=1.0, temperature=2.0)
    weight = torch.tensor([[0.3], [-1.0], [0.8], [0.1]], requires_grad=True)
    loss, *_ = linear_cross_entropy(torch.ones(1, 1), weight, torch.tensor([1]), teacher=teacher)
    expected = definition.divergence(weight.detach().squeeze(1), [2, 0], [0.0, -6.0], 2.0)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    loss.backward()
    assert weight.grad is not None and weight.grad.isfinite().all()


def test_the_compiled_loss_is_the_same() -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(40, 6, requires_grad=True), torch.randn(11, 6)
    labels, results = torch.randint(0, 11, (40,)), []
    teacher = _teacher(40, 11, 3, 0, alpha=0.6, temperature=2.0)
    teacher = teacher._replace(log_probabilities=teacher.log_probabilities.bfloat16())
    for fused in (False, True):
        loss, *_ = linear_cross_entropy(hidden, weight, labels, teacher=teacher, fused=fused)
        results.append((loss.detach(), *torch.autograd.grad(loss, (hidden,))))
    torch.testing.assert_close(results[0], results[1])


@given(vocab=st.integers(1, 30), tokens=st.integers(1, 9), chunk=st.integers(1, 9))
def test_most_likely_tokens(vocab: int, tokens: int, chunk: int) -> None:
    torch.manual_seed(vocab)
    hidden, weight = torch.randn(tokens, 4), torch.randn(vocab, 4)
    k = (vocab + 1) // 2
    ids, best = top_log_probabilities(hidden, weight, k, softcap=5.0, chunk_tokens=chunk)
    scores = (torch.tanh(hidden @ weight.T / 5) * 5).log_softmax(1)
    expected: Tensor = scores.sort(1, descending=True)[0][:, :k]
    torch.testing.assert_close(best, expected)
    torch.testing.assert_close(scores.gather(1, ids.long()), best)
