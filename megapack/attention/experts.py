"""The load-balancing loss of a mixture of experts.

transformers' architectures add it to the cross entropy when ``output_router_logits`` is set:

    loss = mean over labels of the cross entropy + router_aux_loss_coef * balance
    balance = num_experts * sum over experts e of f(e) * P(e)

where, over all layers and tokens of a forward pass, ``f(e)`` is the number of choices of ``e`` per
token and ``P(e)`` its mean probability (Fedus et al., *Switch Transformers*, 2022, equations 4 to
6; the choices have no gradient). Uniform routing gives the minimum, ``experts_per_token``.

``balance`` is not a sum over tokens, so it depends on the tokens of a forward pass. The loss of a
step is the mean of its micro batches' losses, weighted by their labels:

    sum over micro batches m of labels(m) * (cross entropy(m) + coefficient * balance(m))
    -------------------------------------------------------------------------------------
                            labels of the step, over all ranks

The first part is the mean over all labels, for any division into micro batches. The second depends
on which samples share a forward pass, but not on ranks, order or padding. (If ``balance`` were
computed over the tokens of the whole step, no backward pass could begin before the last forward
pass.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class LoadBalancing:
    """Load-balancing loss of one architecture; ``coefficient`` is its factor."""

    num_experts: int
    experts_per_token: int
    coefficient: float

    @staticmethod
    def of(model: Any) -> LoadBalancing | None:
        """Return the load-balancing loss that a causal transformers model adds in training if it
        outputs router logits; None: it adds none."""
        names = ("num_experts", "num_experts_per_tok", "router_aux_loss_coef")
        experts, chosen, coefficient = (getattr(model, name, None) for name in names)
        if experts is None or chosen is None or coefficient is None:
            return None
        return LoadBalancing(
            num_experts=experts, experts_per_token=chosen, coefficient=float(coefficient)
        )

    def __str__(self) -> str:
        return f"{self.coefficient:g} times the load-balancing loss of {self.num_experts} experts"

    def loss(self, router_logits: tuple[Tensor, ...], mask: Tensor, group: Any = None) -> Tensor:
        """Return ``balance`` of one micro batch, a float32 scalar.

        Args:
            router_logits: ``[tokens, num_experts]`` of every layer.
            mask: bool ``[tokens]``, True for tokens that count.
            group: ranks that each hold a slice of the tokens; their results add up to ``balance``
                (collective). None: this rank holds all tokens.
        """
        counted = mask.float().unsqueeze(1)
        chosen = probability = counted.new_zeros(self.num_experts)
        for logits in router_logits:
            # Softmax in the dtype of the logits, as transformers does.
            probabilities = logits.softmax(-1)
            experts = probabilities.topk(self.experts_per_token, dim=-1).indices
            votes = torch.zeros_like(probabilities, dtype=torch.float32).scatter_(1, experts, 1.0)
            chosen = chosen + (votes * counted).sum(0)
            probability = probability + (probabilities.float() * counted).sum(0)
        rows = counted.sum() * len(router_logits)
        if group is not None:
            totals = torch.cat([chosen, rows.unsqueeze(0)])
            dist.all_reduce(totals, group=group)
            chosen, rows = totals[:-1], totals[-1]
        rows = rows.clamp(min=1)  # an empty micro batch
        return self.num_experts * (chosen / rows * (probability / rows)).sum()


def token_mask(cu_seqlens: Tensor, dataset_ids: Tensor, num_tokens: int) -> Tensor:
    """Return bool ``[num_tokens]``, False for padding, from cu_seqlens (int32, perhaps with a
    repeated end) and the dataset id of every segment (int32, -1 for padding)."""
    lengths = cu_seqlens.diff()[: len(dataset_ids)]
    return torch.repeat_interleave(dataset_ids >= 0, lengths, output_size=num_tokens)
