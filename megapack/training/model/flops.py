"""How much arithmetic a step is, so that speed can be stated as a share of the device's.

A matrix multiplication of m x k and k x n counts 2 m k n operations; backward twice the forward;
recomputation counts nothing (model FLOPs, as in PaLM's MFU). Attention of one document of n tokens
is ``6 * layers * width * n^2`` over forward and backward, causal: only half of the scores exist.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import nn

from megapack.training.model.sharding import whole_shape

__all__ = ["ModelFlops", "peak_by_name", "peak_flops"]

# Dense bfloat16 tensor operations per second, from the vendors' data sheets.
_PEAKS = {
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H800": 989e12,
    "H20": 148e12,
    "B200": 2250e12,
    "A100": 312e12,
    "A800": 312e12,
    "L40S": 362e12,
    "L20": 119.5e12,
    "A10": 125e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
}


def peak_flops(device: torch.device) -> float | None:
    """bfloat16 operations per second the device can do at best; None when it is not known."""
    if device.type != "cuda":
        return None
    return peak_by_name(torch.cuda.get_device_name(device))


def peak_by_name(name: str) -> float | None:
    """The same by a name that contains a model's, as in "NVIDIA H100 80GB HBM3"."""
    known = [key for key in _PEAKS if key.lower() in name.lower()]
    return _PEAKS[max(known, key=len)] if known else None  # "H100 PCIe" before "H100"


@dataclass(frozen=True, kw_only=True)
class ModelFlops:
    """Operations of forward and backward, per token and per pair of tokens.

    Attributes:
        per_token: of all matrix multiplications except the scores: 6 per weight.
        full_layers: layers with full attention.
        window_layers: layers with a sliding window.
        window: its tokens.
        width: of all query heads together.
    """

    per_token: float
    full_layers: int
    window_layers: int
    window: int
    width: int

    @staticmethod
    def of(model: nn.Module, configuration: Any) -> ModelFlops:
        """Count a causal language model of transformers."""
        embedding = configuration.vocab_size * configuration.hidden_size
        active = _active_experts(configuration)
        weights = sum(
            math.prod(whole_shape(p)) * (active if ".experts." in name else 1.0)
            for name, p in model.named_parameters()
            if len(whole_shape(p)) >= 2
        )
        if not configuration.tie_word_embeddings:
            weights -= embedding  # reading a row is no multiplication; a tied table is the head
        if configuration.model_type == "gpt2":
            weights -= configuration.n_positions * configuration.hidden_size
        kinds = getattr(configuration, "layer_types", None) or []
        windows = sum(kind == "sliding_attention" for kind in kinds)
        heads = configuration.num_attention_heads
        head_dim = getattr(configuration, "head_dim", None) or configuration.hidden_size // heads
        return ModelFlops(
            per_token=6.0 * weights,
            full_layers=configuration.num_hidden_layers - windows,
            window_layers=windows,
            window=getattr(configuration, "sliding_window", None) or 0,
            width=heads * head_dim,
        )

    def attention(self, lengths: ArrayLike) -> float:
        """Of causal attention inside segments of these lengths (tokens), all layers."""
        n: NDArray[np.float64] = np.asarray(lengths, dtype=np.float64)
        # 2 products x 2 operations x width x n^2 / 2 pairs, three times (backward is double).
        total = 6.0 * self.width * self.full_layers * float((n * n).sum())
        if self.window_layers:
            outside = np.maximum(n - self.window, 0.0)
            visible = n * n - outside * outside
            total += 6.0 * self.width * self.window_layers * float(visible.sum())
        return total

    @property
    def linear_length(self) -> float:
        """Tokens of the segment whose attention costs as much as all else (``StepPlan.cost``);
        layers with a sliding window are counted as full ones."""
        return self.per_token / self.attention(1)

    def step(self, num_tokens: int, lengths: ArrayLike) -> float:
        """Of a step: every token through the weights, every segment through attention."""
        return self.per_token * num_tokens + self.attention(lengths)


def _active_experts(configuration: Any) -> float:
    """The share of a mixture's routed experts that a token goes through."""
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    count = next((n for n in (getattr(configuration, x, None) for x in names) if n), None)
    chosen = getattr(configuration, "num_experts_per_tok", None)
    return chosen / count if chosen and count else 1.0
