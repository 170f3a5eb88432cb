"""Definition of the loss of a student with a teacher's most likely tokens, at one position."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def divergence(
    scores: Tensor, ids: Sequence[int], log_probabilities: Sequence[float], temperature: float
) -> Tensor:
    """Return T^2 KL(teacher || student) over the ids and the remainder, by autograd of scores."""
    student = scores.double().softmax(0)
    others = [token for token in range(len(scores)) if token not in set(ids)]
    ours = [student[token] for token in ids] + [student[others].sum()]
    theirs = [math.exp(x) for x in log_probabilities]
    theirs += [max(0.0, 1.0 - sum(theirs))]
    ours = [p ** (1 / temperature) for p in ours]
    theirs = [q ** (1 / temperature) for q in theirs]
    total = torch.zeros((), dtype=torch.float64)
    for p, q in zip(ours, theirs, strict=True):
        share = q / sum(theirs)
        if share > 0:
            total = total + share * (math.log(share) - (p / sum(ours)).log())
    return temperature**2 * total


def loss(
    scores: Tensor,
    label: int,
    ids: Sequence[int],
    log_probabilities: Sequence[float],
    *,
    alpha: float,
    temperature: float,
) -> Tensor:
    """Return the loss of one label; a positive first number means no teacher."""
    cross_entropy = -scores.double().log_softmax(0)[label]
    if log_probabilities[0] > 0:
        return cross_entropy
    apart = divergence(scores, ids, log_probabilities, temperature)
    return (1 - alpha) * cross_entropy + alpha * apart
