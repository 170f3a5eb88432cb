"""Cross entropy of a linear head, summed, without ever holding all logits.

The float32 logits of 48k positions and a vocabulary of 128k take 25 GB. So the positions are
processed in chunks. For each chunk, the logits and their loss are computed, then the gradient of
the logits, which overwrites them. Only the gradients of the hidden states and of the weight
(accumulated in float32) are kept for the backward.

    positions 48,000, vocabulary 128,000, chunk_tokens 2,048
    # -> 24 chunks; the logits of one exist at a time: 1.0 GB of float32 instead of 24.6
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

IGNORED_LABEL = -100


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    label_weights: Tensor | None = None,
    scale: float = 1.0,
    softcap: float = 0.0,
    z_loss: float = 0.0,
    chunk_tokens: int = 2048,
    fused: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return ``scale * sum(-log softmax(cap(hidden @ weight.T))[label])``, and all losses.

    It returns a sum, not a mean: the number of labels is known only for the whole step, and the
    engine divides by it. A micro batch without labels gives loss 0 and zero gradients.

    Args:
        hidden: ``[T, width]``, the states before the head.
        weight: ``[vocabulary, width]``.
        labels: ``[T]`` int64; -100: no label.
        label_weights: ``[T]`` float32, factors on the loss of every label; None: 1.
        scale: factor on the loss, applied to the gradient in float32, before it becomes bfloat16.
        softcap: with c > 0, logits become ``c * tanh(logits / c)`` (Gemma-2).
        z_loss: coefficient of the square of the logits' logsumexp, which is added to the loss of
            every label (PaLM, arXiv 2204.02311, section 5), under the same weights and scale.
        chunk_tokens: positions whose logits exist at once.
        fused: compile the elementwise part of a chunk.

    Returns:
        The scaled and weighted sum, a scalar, and the cross entropy of every position, ``[T]``,
        unscaled, unweighted, without a gradient, 0 without a label; both float32 (float64 for
        float64 inputs).
    """
    kind = hidden.device.type
    compute = weight.dtype
    if kind != "meta" and torch.is_autocast_enabled(kind):
        compute = torch.get_autocast_dtype(kind)
    hidden, weight = hidden.to(compute), weight.to(compute)
    gradients = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    loss, losses, _, _ = torch.ops.megapack.linear_cross_entropy(
        hidden,
        weight,
        labels,
        label_weights,
        scale=scale,
        softcap=softcap,
        z_loss=z_loss,
        chunk_tokens=chunk_tokens,
        gradients=gradients,
        fused=fused,
    )
    return loss, losses.detach()


def _loss_and_slope(
    logits: Tensor, labels: Tensor, softcap: float, z_loss: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return cross entropies and trained losses, ``[chunk]``, and the derivative of the latter by
    the logits, ``[chunk, vocabulary]``, which overwrites ``logits``."""
    squashed = torch.tanh(logits / softcap) if softcap else None
    scores = logits if squashed is None else squashed * softcap
    real = labels != IGNORED_LABEL
    target = labels.where(real, 0).unsqueeze(1)
    log_sum = scores.logsumexp(1, keepdim=True)
    losses = (log_sum - scores.gather(1, target)).squeeze(1)
    trained = losses + z_loss * log_sum.squeeze(1).square() if z_loss else losses
    slope = scores.sub_(log_sum).exp_()
    if z_loss:
        slope *= 1 + 2 * z_loss * log_sum
    slope.scatter_add_(1, target, torch.full_like(log_sum, -1.0))
    if squashed is not None:
        slope *= 1 - squashed.square()
    slope *= real.unsqueeze(1)
    return losses.where(real, 0), trained.where(real, 0), slope


@functools.cache
def _loss_and_slope_function(fused: bool) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    return torch.compile(_loss_and_slope) if fused else _loss_and_slope


@torch.library.custom_op("megapack::linear_cross_entropy", mutates_args=())
def _linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    label_weights: Tensor | None,
    *,
    scale: float,
    softcap: float,
    z_loss: float,
    chunk_tokens: int,
    gradients: bool,
    fused: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    accumulator = _accumulator(hidden)
    loss = hidden.new_zeros((), dtype=accumulator)
    losses = hidden.new_empty(hidden.shape[:1], dtype=accumulator)
    grad_hidden = hidden.new_empty(hidden.shape if gradients else (0,))
    grad_weight = hidden.new_zeros(weight.shape if gradients else (0,), dtype=accumulator)
    for begin in range(0, hidden.shape[0], chunk_tokens):
        rows = slice(begin, min(begin + chunk_tokens, hidden.shape[0]))
        logits = (hidden[rows] @ weight.T).to(accumulator)
        if not gradients:
            losses[rows], trained = _loss_only(logits, labels[rows], softcap, z_loss)
            loss += _weighted_sum(trained, label_weights, rows)
            continue
        losses[rows], trained, slope = _loss_and_slope_function(fused)(
            logits, labels[rows], softcap, z_loss
        )
        loss += _weighted_sum(trained, label_weights, rows)
        del logits
        if label_weights is not None:
            slope *= label_weights[rows].unsqueeze(1)
        slope = slope.mul_(scale).to(hidden.dtype)
        grad_hidden[rows] = slope @ weight
        grad_weight += slope.T @ hidden[rows]
    return loss * scale, losses, grad_hidden, grad_weight.to(weight.dtype)


def _weighted_sum(part: Tensor, label_weights: Tensor | None, rows: slice) -> Tensor:
    return part.sum() if label_weights is None else (part * label_weights[rows]).sum()


def _loss_only(
    logits: Tensor, labels: Tensor, softcap: float, z_loss: float
) -> tuple[Tensor, Tensor]:
    if softcap:
        logits = torch.tanh(logits / softcap) * softcap
    losses = torch.nn.functional.cross_entropy(
        logits, labels, ignore_index=IGNORED_LABEL, reduction="none"
    )
    if not z_loss:
        return losses, losses
    penalty = z_loss * logits.logsumexp(1).square()
    return losses, losses + penalty.where(labels != IGNORED_LABEL, 0)


def _accumulator(hidden: Tensor) -> torch.dtype:
    return torch.float64 if hidden.dtype == torch.float64 else torch.float32


@_linear_cross_entropy.register_fake
def _linear_cross_entropy_fake(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    label_weights: Tensor | None,
    *,
    scale: float,
    softcap: float,
    z_loss: float,
    chunk_tokens: int,
    gradients: bool,
    fused: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    del labels, label_weights, scale, softcap, z_loss, chunk_tokens, fused
    loss = hidden.new_empty((), dtype=_accumulator(hidden))
    losses = hidden.new_empty(hidden.shape[:1], dtype=_accumulator(hidden))
    if not gradients:
        return loss, losses, hidden.new_empty((0,)), weight.new_empty((0,))
    return loss, losses, hidden.new_empty(hidden.shape), weight.new_empty(weight.shape)


def _setup_context(
    ctx: Any,
    inputs: tuple[Any, ...],
    keyword_only_inputs: dict[str, Any],
    output: tuple[Tensor, Tensor, Tensor, Tensor],
) -> None:
    del inputs, keyword_only_inputs
    ctx.save_for_backward(output[2], output[3])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad_loss: Tensor | None, *unused: Any) -> tuple[Tensor | None, ...]:
    del unused
    if grad_loss is None:
        return None, None, None
    grad_hidden, grad_weight = ctx.saved_tensors
    return (
        grad_hidden * grad_loss.to(grad_hidden.dtype),
        (grad_weight * grad_loss.to(grad_weight.dtype)),
        None,
        None,
    )


_linear_cross_entropy.register_autograd(_backward, setup_context=_setup_context)
