"""FLOPs of a step of a model, to state its speed as a share of the device's (MFU).

Recomputation is not counted (model FLOPs, as in PaLM's MFU); see ``megapack.devices``.

    flops = ModelFlops.of(model, configuration)  # Qwen3-0.6B: per_token 3.58e9
    flops.step(4096, [1024, 3072])  # tokens through the weights, two segments through attention
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


def peak_of(device: torch.device) -> float | None:
    """Return the peak 16-bit operations per second of a device; None if unknown."""
    return peak_flops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


@dataclass(frozen=True, kw_only=True)
class ModelFlops:
    """Operations of the forward and backward passes, per token and per pair of tokens.

    Attributes:
        per_token: operations of all matrix multiplications except attention, 6 per weight.
        full_layers: layers with full attention.
        window_layers: layers with a sliding window.
        window: tokens of the sliding window.
        width: width of all query heads together; the mean of that of keys and values.
    """

    per_token: float
    full_layers: int
    window_layers: int
    window: int
    width: int

    @staticmethod
    def of(model: nn.Module, configuration: Any) -> ModelFlops:
        active = _active_experts(configuration)
        tables, products = (
            {id(m.weight) for m in model.modules() if isinstance(m, kind)}
            for kind in (nn.Embedding, nn.Linear)
        )
        weights = sum(
            math.prod(whole_shape(p)) * (active if ".experts." in name else 1.0)
            for name, p in model.named_parameters()
            # Embedding tables are only read and do not count, unless tied: then they are the head.
            if len(whole_shape(p)) >= 2 and not (id(p) in tables and id(p) not in products)
        )
        kinds = getattr(configuration, "layer_types", None) or []
        windows = sum(kind == "sliding_attention" for kind in kinds)
        heads = configuration.num_attention_heads
        head_dim = getattr(configuration, "head_dim", None) or configuration.hidden_size // heads
        # In latent attention (DeepSeek) keys are wider than values.
        keys, values = (
            getattr(configuration, name, None) or head_dim for name in ("qk_head_dim", "v_head_dim")
        )
        return ModelFlops(
            per_token=FLOPS_PER_WEIGHT * weights,
            full_layers=configuration.num_hidden_layers - windows,
            window_layers=windows,
            window=getattr(configuration, "sliding_window", None) or 0,
            width=heads * (keys + values) // 2,
        )

    def attention(self, lengths: ArrayLike, paths: ArrayLike | None = None) -> float:
        """Return the operations of causal attention in segments of these lengths, all layers; with
        ``paths``, each segment also attends to the path of so many tokens before it."""
        if paths is not None:
            return self.attention(np.add(lengths, paths)) - self.attention(paths)
        n: NDArray[np.float64] = np.asarray(lengths, dtype=np.float64)
        total = attention_flops(self.full_layers, self.width) * float((n * n).sum())
        if self.window_layers:
            visible = float((n * n - np.maximum(n - self.window, 0.0) ** 2).sum())
            total += attention_flops(self.window_layers, self.width) * visible
        return total

    @property
    def linear_cost_tokens(self) -> float:
        """Length of a segment whose attention costs as much as everything else (``StepPlan.cost``);
        sliding-window layers count as full ones."""
        return self.per_token / self.attention(1)

    def step(self, num_tokens: int, lengths: ArrayLike, paths: ArrayLike | None = None) -> float:
        """Return the operations of a step: tokens through weights, segments through attention."""
        return self.per_token * num_tokens + self.attention(lengths, paths)


def _active_experts(configuration: Any) -> float:
    """Return the share of a mixture's routed experts that process a token."""
    count = num_experts(configuration)
    chosen = getattr(configuration, "num_experts_per_tok", None)
    return chosen / count if chosen and count else 1.0


def whole_shape(parameter: nn.Parameter) -> tuple[int, ...]:
    """Return the shape of a parameter, also if ZeRO-3 has divided it."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def num_experts(configuration: Any) -> int | None:
    """Return the routed experts per layer of a transformers configuration; None if it has none."""
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    return next((n for n in (getattr(configuration, x, None) for x in names) if n), None)
