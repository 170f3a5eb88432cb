"""Losses of a linear head, summed, without ever holding all logits: cross entropy, distillation.

The float32 logits of 48k positions and a vocabulary of 128k take 25 GB. So the positions are
processed in chunks. For each chunk, the logits and their loss are computed, then the gradient of
the logits, which overwrites them. Only the gradients of the hidden states and of the weight
(accumulated in float32) are kept for the backward pass.

    positions 48,000, vocabulary 128,000, chunk_tokens 2,048
    # -> 24 chunks; the logits of one exist at a time: 1.0 GB of float32 instead of 24.6

With a ``Teacher``, the loss of a label is ``(1 - alpha) * cross entropy + alpha * divergence``. The
divergence compares distributions over k + 1 buckets: the teacher's k most likely tokens, and all
other tokens together::

    student: p_1, ..., p_k, 1 - (p_1 + ... + p_k)    teacher: q_1, ..., q_k, 1 - (q_1 + ... + q_k)
    divergence = T^2 * KL(teacher^(1/T) || student^(1/T)), powers normalized to sum 1

T^2 keeps the size of its gradient independent of T (Hinton et al., *Distilling the Knowledge in a
Neural Network*, arXiv 1503.02531, section 2). One bucket for the remainder is the
``distillation_add_tail`` of Huebotter et al., *Reinforcement Learning via Self-Distillation*, arXiv
2601.20802; without it, a student could give all probability to tokens that the teacher excludes.
The temperature applies to the buckets, because only their probabilities are stored; if k is the
vocabulary size, this is Hinton's definition. ``top_log_probabilities`` computes a teacher's part.

    p = (.5, .2), q = (.6, .3), T = 1    # -> .6 ln(.6/.5) + .3 ln(.3/.2) + .1 ln(.1/.3) = .121
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

IGNORED_LABEL = -100
NO_TEACHER = 1.0  # replaces a row's first log-probability, which is never positive
_LEAST_REMAINDER = 1e-30  # of the student, so that its logarithm is finite


class Teacher(NamedTuple):
    """A teacher's most likely next tokens at every position, and how they count in the loss."""

    ids: Tensor
    """``[T, k]`` integers: token ids, all different in a row."""
    log_probabilities: Tensor
    """``[T, k]`` floats, at temperature 1, over the teacher's vocabulary. A positive first number
    (``NO_TEACHER``) means that the position has no teacher: its loss is the cross entropy."""
    alpha: float
    """Weight of the divergence; the cross entropy has the weight ``1 - alpha``."""
    temperature: float = 1.0


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    label_weights: Tensor | None = None,
    scale: float = 1.0,
    softcap: float = 0.0,
    z_loss: float = 0.0,
    teacher: Teacher | None = None,
    chunk_tokens: int = 2048,
    fused: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:
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
        teacher: mixes the divergence from a teacher into the loss of every label.
        chunk_tokens: positions whose logits exist at once.
        fused: compile the elementwise part of a chunk.

    Returns:
        The scaled and weighted sum, a scalar; the cross entropy of every position, ``[T]``; and its
        divergence, ``[T]``, None without a teacher. The last two are unscaled, unweighted, without
        a gradient, 0 without a label (or teacher). All are float32 (float64 for float64 inputs).
    """
    kind = hidden.device.type
    compute = weight.dtype
    if kind != "meta" and torch.is_autocast_enabled(kind):
        compute = torch.get_autocast_dtype(kind)
    hidden, weight = hidden.to(compute), weight.to(compute)
    gradients = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    loss, losses, divergences, _, _ = torch.ops.megapack.linear_cross_entropy(
        hidden,
        weight,
        labels,
        label_weights,
        [] if teacher is None else [teacher.ids, teacher.log_probabilities],
        alpha=0.0 if teacher is None else teacher.alpha,
        temperature=1.0 if teacher is None else teacher.temperature,
        scale=scale,
        softcap=softcap,
        z_loss=z_loss,
        chunk_tokens=chunk_tokens,
        gradients=gradients,
        fused=fused,
    )
    return loss, losses.detach(), None if teacher is None else divergences.detach()


@torch.no_grad()
def top_log_probabilities(
    hidden: Tensor, weight: Tensor, k: int, *, softcap: float = 0.0, chunk_tokens: int = 2048
) -> tuple[Tensor, Tensor]:
    """Return the k most likely tokens of every position, best first: ids ``[T, k]`` int32, and
    log-probabilities ``[T, k]`` float32 (float64 for float64 inputs). Arguments are those of
    ``linear_cross_entropy``; ``weight`` has at least k rows."""
    ids = hidden.new_empty(len(hidden), k, dtype=torch.int32)
    best = hidden.new_empty(len(hidden), k, dtype=_accumulator(hidden))
    for begin in range(0, len(hidden), chunk_tokens):
        rows = slice(begin, begin + chunk_tokens)
        scores = (hidden[rows].to(weight.dtype) @ weight.T).to(best.dtype)
        if softcap:
            scores = torch.tanh(scores / softcap) * softcap
        values, places = scores.topk(k, dim=1)
        best[rows], ids[rows] = values - scores.logsumexp(1, keepdim=True), places
    return ids, best


def _loss_and_slope(
    logits: Tensor,
    labels: Tensor,
    teacher: Teacher | None,
    softcap: float,
    z_loss: float,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Return cross entropies, trained losses and divergences, ``[chunk]``, and the derivative of
    the trained losses with respect to the logits, ``[chunk, vocabulary]``, in ``logits``."""
    squashed = torch.tanh(logits / softcap) if softcap else None
    scores = logits if squashed is None else squashed * softcap
    real = labels != IGNORED_LABEL
    target = labels.where(real, 0).unsqueeze(1)
    log_sum = scores.logsumexp(1, keepdim=True)
    trained = losses = (log_sum - scores.gather(1, target)).squeeze(1)
    log_probabilities, divergences = scores.sub_(log_sum), None
    if teacher is None:
        slope = log_probabilities.exp_()
        if z_loss:
            slope *= 1 + 2 * z_loss * log_sum
        slope.scatter_add_(1, target, torch.full_like(log_sum, -1.0))
    else:
        # A position without a teacher has the cross entropy alone.
        has_teacher = teacher.log_probabilities[:, :1] <= 0
        alpha = teacher.alpha * has_teacher.to(losses.dtype)
        weight = 1 - alpha + 2 * z_loss * log_sum
        divergences, slope = _divergence_and_slope(log_probabilities, teacher, weight, alpha)
        slope.scatter_add_(1, target, alpha - 1)
        divergences = divergences.where(real & has_teacher.squeeze(1), 0)
        trained = torch.lerp(losses, divergences, alpha.squeeze(1))
    if z_loss:
        trained = trained + z_loss * log_sum.squeeze(1).square()
    if squashed is not None:
        slope *= 1 - squashed.square()
    slope *= real.unsqueeze(1)
    return losses.where(real, 0), trained.where(real, 0), divergences, slope


def _divergence_and_slope(
    log_probabilities: Tensor, teacher: Teacher, weight: Tensor, alpha: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the divergences, ``[chunk]``, and ``weight * probabilities + alpha * slope``, where
    ``slope`` is their derivative with respect to the scores. The second result overwrites
    ``log_probabilities [chunk, vocabulary]``.

    With tempered buckets s and t of student and teacher, the derivative with respect to the score
    of a token of bucket b is ``T * (s_b - t_b)`` times the token's share of the student's bucket,
    because s and t both sum to 1.
    """
    ids, temperature = teacher.ids.long(), teacher.temperature
    log_student = log_probabilities.gather(1, ids)
    slope = log_probabilities.exp_().scatter_(1, ids, 0.0)
    # Sum the small numbers: 1 minus the large ones would cancel if the student is certain.
    remainder = slope.sum(1, keepdim=True).clamp_min(_LEAST_REMAINDER)
    student = torch.cat([log_student, remainder.log()], 1).div(temperature).log_softmax(1)
    log_teacher = teacher.log_probabilities.to(slope.dtype)
    # Rounded numbers may sum to more than 1: then there is no remainder.
    log_rest = torch.log1p(-log_teacher.exp().sum(1, keepdim=True).clamp_max(1.0))
    target = torch.cat([log_teacher, log_rest], 1).div(temperature).softmax(1)
    divergences = temperature**2 * (torch.xlogy(target, target) - target * student).sum(1)
    by_bucket = temperature * (student.exp() - target)
    slope *= weight + alpha * by_bucket[:, -1:] / remainder
    slope.scatter_(1, ids, weight * log_student.exp() + alpha * by_bucket[:, :-1])
    return divergences, slope


@functools.cache
def _loss_and_slope_function(fused: bool) -> Callable[..., Any]:
    return torch.compile(_loss_and_slope) if fused else _loss_and_slope


@torch.library.custom_op("megapack::linear_cross_entropy", mutates_args=())
def _linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    label_weights: Tensor | None,
    teacher: Sequence[Tensor],
    *,
    alpha: float,
    temperature: float,
    scale: float,
    softcap: float,
    z_loss: float,
    chunk_tokens: int,
    gradients: bool,
    fused: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    accumulator = _accumulator(hidden)
    loss = hidden.new_zeros((), dtype=accumulator)
    losses = hidden.new_empty(hidden.shape[:1], dtype=accumulator)
    divergences = losses.new_empty(losses.shape if teacher else (0,))
    grad_hidden = hidden.new_empty(hidden.shape if gradients else (0,))
    grad_weight = hidden.new_zeros(weight.shape if gradients else (0,), dtype=accumulator)
    for begin in range(0, hidden.shape[0], chunk_tokens):
        rows = slice(begin, min(begin + chunk_tokens, hidden.shape[0]))
        logits = (hidden[rows] @ weight.T).to(accumulator)
        tables = [table[rows] for table in teacher]
        if not gradients and not tables:
            losses[rows], trained = _loss_only(logits, labels[rows], softcap, z_loss)
            loss += _weighted_sum(trained, label_weights, rows)
            continue
        losses[rows], trained, divergence, slope = _loss_and_slope_function(fused)(
            logits,
            labels[rows],
            Teacher(tables[0], tables[1], alpha, temperature) if tables else None,
            softcap,
            z_loss,
        )
        loss += _weighted_sum(trained, label_weights, rows)
        if divergence is not None:
            divergences[rows] = divergence
        del logits
        if not gradients:
            continue
        if label_weights is not None:
            slope *= label_weights[rows].unsqueeze(1)
        slope = slope.mul_(scale).to(hidden.dtype)
        grad_hidden[rows] = slope @ weight
        grad_weight += slope.T @ hidden[rows]
    return loss * scale, losses, divergences, grad_hidden, grad_weight.to(weight.dtype)


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
    _labels: Tensor,
    _label_weights: Tensor | None,
    teacher: Sequence[Tensor],
    *,
    gradients: bool,
    **_options: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    loss = hidden.new_empty((), dtype=_accumulator(hidden))
    losses = hidden.new_empty(hidden.shape[:1], dtype=loss.dtype)
    divergences = losses.new_empty(losses.shape if teacher else (0,))
    if not gradients:
        return loss, losses, divergences, hidden.new_empty((0,)), weight.new_empty((0,))
    grads = hidden.new_empty(hidden.shape), weight.new_empty(weight.shape)
    return loss, losses, divergences, *grads


def _setup_context(
    ctx: Any,
    inputs: tuple[Any, ...],
    keyword_only_inputs: dict[str, Any],
    output: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
) -> None:
    del keyword_only_inputs
    ctx.num_tables = len(inputs[4])
    ctx.save_for_backward(output[3], output[4])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad_loss: Tensor | None, *unused: Any) -> tuple[Any, ...]:
    del unused
    others = None, None, [None] * ctx.num_tables  # labels, label_weights, teacher
    if grad_loss is None:
        return None, None, *others
    grad_hidden, grad_weight = ctx.saved_tensors
    return (
        grad_hidden * grad_loss.to(grad_hidden.dtype),
        grad_weight * grad_loss.to(grad_weight.dtype),
        *others,
    )


_linear_cross_entropy.register_autograd(_backward, setup_context=_setup_context)
