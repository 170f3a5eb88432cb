"""The load-balancing loss of a mixture of experts, token by token."""

from __future__ import annotations

import math
from collections.abc import Sequence

Logits = Sequence[Sequence[float]]


def load_balancing_loss(layers: Sequence[Logits], chosen_per_token: int) -> float:
    """``experts * sum over e of f(e) * P(e)``, over the tokens of all layers.

    Args:
        layers: of every layer, of every token that counts, the router's logits.
        chosen_per_token: experts that a token goes to: those of the largest logits.
    """
    tokens = [logits for layer in layers for logits in layer]
    num_experts = len(tokens[0])
    choices = [0] * num_experts
    probability = [0.0] * num_experts
    for logits in tokens:
        weights = [math.exp(x - max(logits)) for x in logits]
        for expert in range(num_experts):
            probability[expert] += weights[expert] / sum(weights)
        for expert in sorted(range(num_experts), key=lambda e: -logits[e])[:chosen_per_token]:
            choices[expert] += 1
    pairs = zip(choices, probability, strict=True)
    return num_experts * sum(f / len(tokens) * p / len(tokens) for f, p in pairs)
