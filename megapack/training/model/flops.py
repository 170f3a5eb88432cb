"""How much arithmetic a step of a model is, so that speed can be stated as a share of the device's.

Recomputation counts nothing (model FLOPs, as in PaLM's MFU); see ``megapack.devices``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import nn

from megapack.devices import FLOPS_PER_WEIGHT, attention_flops, peak_flops
from megapack.training.model.sharding import whole_shape


def peak_of(device: torch.device) -> float | None:
    """16-bit operations per second that a device can do at best; None where it is not known."""
    return peak_flops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


@dataclass(frozen=True, kw_only=True)
class ModelFlops:
    """Operations of forward and backward, per token and per pair of tokens.

    Attributes:
        per_token: of all matrix multiplications except the scores: 6 per weight.
        full_layers: layers with full attention.
        window_layers: layers with a sliding window.
        window: its tokens.
        width: of all query heads together; the mean of keys and values.
    """

    per_token: float
    full_layers: int
    window_layers: int
    window: int
    width: int

    @staticmethod
    def of(model: nn.Module, configuration: Any) -> ModelFlops:
        """Count a causal language model of transformers."""
        active = _active_experts(configuration)
        tables, products = (
            {id(m.weight) for m in model.modules() if isinstance(m, kind)}
            for kind in (nn.Embedding, nn.Linear)
        )
        weights = sum(
            math.prod(whole_shape(p)) * (active if ".experts." in name else 1.0)
            for name, p in model.named_parameters()
            # Reading a row of a table is no multiplication; a tied one is the head.
            if len(whole_shape(p)) >= 2 and not (id(p) in tables and id(p) not in products)
        )
        kinds = getattr(configuration, "layer_types", None) or []
        windows = sum(kind == "sliding_attention" for kind in kinds)
        heads = configuration.num_attention_heads
        usual = getattr(configuration, "head_dim", None) or configuration.hidden_size // heads
        # Of latent attention (DeepSeek) keys are wider than values.
        keys, values = (
            getattr(configuration, name, None) or usual for name in ("qk_head_dim", "v_head_dim")
        )
        return ModelFlops(
            per_token=FLOPS_PER_WEIGHT * weights,
            full_layers=configuration.num_hidden_layers - windows,
            window_layers=windows,
            window=getattr(configuration, "sliding_window", None) or 0,
            width=heads * (keys + values) // 2,
        )

    def attention(self, lengths: ArrayLike) -> float:
        """Operations of causal attention inside segments of these lengths (tokens), all layers."""
        n: NDArray[np.float64] = np.asarray(lengths, dtype=np.float64)
        total = attention_flops(self.full_layers, self.width) * float((n * n).sum())
        if self.window_layers:
            visible = float((n * n - np.maximum(n - self.window, 0.0) ** 2).sum())
            total += attention_flops(self.window_layers, self.width) * visible
        return total

    @property
    def linear_cost_tokens(self) -> float:
        """Tokens of the segment whose attention costs as much as all else (``StepPlan.cost``);
        layers with a sliding window are counted as full ones."""
        return self.per_token / self.attention(1)

    def step(self, num_tokens: int, lengths: ArrayLike) -> float:
        """Operations of a step: tokens through the weights, segments through attention."""
        return self.per_token * num_tokens + self.attention(lengths)


def _active_experts(configuration: Any) -> float:
    """The share of a mixture's routed experts that a token goes through."""
    count = num_experts(configuration)
    chosen = getattr(configuration, "num_experts_per_tok", None)
    return chosen / count if chosen and count else 1.0


def num_experts(configuration: Any) -> int | None:
    """Routed experts of a layer of a transformers configuration; None: it has none."""
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    return next((n for n in (getattr(configuration, x, None) for x in names) if n), None)
