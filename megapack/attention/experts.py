"""The load-balancing loss of a mixture of experts.

transformers' architectures add it to the loss of their labels when ``output_router_logits`` is set:

    loss = mean over labels of the cross entropy + router_aux_loss_coef * balance
    balance = num_experts * sum over experts e of f(e) * P(e)

where, over all layers and tokens of a forward, ``f(e)`` is the number of choices of ``e`` per token
and ``P(e)`` its mean probability (Fedus et al., *Switch Transformers*, 2022, equations 4 to 6; the
choices have no gradient). Uniform routing gives ``experts_per_token``, its least value.

It is no sum over tokens, so the loss of a step must say over which tokens it is taken. Here a step
is the mean of its micro batches' training losses, weighted by their labels:

    sum over micro batches m of labels(m) * (cross entropy(m) + coefficient * balance(m))
    -------------------------------------------------------------------------------------
                            labels of the step, over all ranks

The first part is the mean over all labels however samples are dealt; the second depends on which
samples share a forward, as in every trainer that balances inside of a micro batch, and on nothing
else: neither on ranks, nor on the order of micro batches, nor on padding, which is not counted.
Over the tokens of the whole step no backward could begin before the last forward has ended.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class LoadBalancing:
    """The load-balancing loss of one architecture.

    Attributes:
        num_experts, experts_per_token: of a layer.
        coefficient: what the architecture multiplies it with.
    """

    num_experts: int
    experts_per_token: int
    coefficient: float

    @staticmethod
    def of(model: Any) -> LoadBalancing | None:
        """Load-balancing loss that a causal model of transformers adds in training, if asked for
        routers' logits; None: nothing. ``check_architecture`` finds one that adds more."""
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
        """``balance`` of one micro batch, a float32 scalar.

        Args:
            router_logits: ``[tokens, num_experts]`` of every layer.
            mask: bool ``[tokens]``, which of them count.
            group: ranks that hold a slice of the tokens each; None: they are all here. The sum of
                their results is ``balance`` of the whole; collective.
        """
        counted = mask.float().unsqueeze(1)
        chosen = probability = counted.new_zeros(self.num_experts)
        for logits in router_logits:
            # In the logits' own dtype, as transformers chooses.
            probabilities = logits.softmax(-1)
            experts = probabilities.topk(self.experts_per_token, dim=-1).indices
            votes = torch.zeros_like(probabilities, dtype=torch.float32).scatter_(1, experts, 1.0)
            chosen = chosen + (votes * counted).sum(0)
            probability = probability + (probabilities.float() * counted).sum(0)
        rows = counted.sum() * len(router_logits)
        if group is not None:
            of_all = torch.cat([chosen, rows.unsqueeze(0)])
            dist.all_reduce(of_all, group=group)
            chosen, rows = of_all[:-1], of_all[-1]
        rows = rows.clamp(min=1)  # an empty micro batch
        return self.num_experts * (chosen / rows * (probability / rows)).sum()


def token_mask(cu_seqlens: Tensor, dataset_ids: Tensor, num_tokens: int) -> Tensor:
    """bool ``[num_tokens]``: which tokens of a stream are of a document, and not padding.

    Args:
        cu_seqlens: int32 ``[entries]`` ascending from 0 to ``num_tokens``; it may repeat that.
        dataset_ids: int32, of every segment, -1 for padding.
        num_tokens: of the whole stream.
    """
    lengths = cu_seqlens.diff()[: len(dataset_ids)]
    return torch.repeat_interleave(dataset_ids >= 0, lengths, output_size=num_tokens)
