"""Varlen attention for Megatron models without Transformer Engine (``--transformer-impl local``).

megatron-core's local DotProductAttention refuses packed_seq_params. ``PackedCoreAttention``
replaces it in a layer spec and calls ``megapack.attention``, on GPUs and CPUs.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor

from megapack.attention import AttentionNeeds, choose_backend, varlen_attention
from megapack.errors import ConfigError
from megapack.integrations.host import check_options


class PackedCoreAttention(MegatronModule):  # type: ignore[misc]  # megatron-core has no stubs
    """``core_attention`` of a megatron-core layer, for rows with and without boundaries.
    Raises ConfigError for dropout, context parallelism, cross attention and attention sinks."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        **unused: Any,
    ) -> None:
        super().__init__(config=config)
        del attn_mask_type, unused
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        softmax = getattr(config, "softmax_type", "vanilla")
        engine = "others need Transformer Engine (--transformer-impl transformer_engine)"
        check_options({
            "attention_dropout": (dropout, 0.0, "packed attention has no dropout"),
            "context_parallel_size": (config.context_parallel_size, 1, engine),
            "softmax_type": (softmax, "vanilla", engine),
            "attention_type": (attention_type, "self", "packed attention is self-attention"),
        })  # fmt: skip
        self.softmax_scale = softmax_scale
        self.window = 0
        if is_layer_window_attention(
            config.window_size, getattr(config, "window_attn_skip_freq", None), layer_number
        ):
            self.window = config.window_size[0] + 1  # Megatron's window excludes the token itself
        self._backend: str | None = None

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """Compute attention inside segments.

        With ``packed_seq_params``, query, key and value are ``(tokens, heads, dim)``, and the
        result is ``(tokens, heads * dim)``. Without, they are ``(row, mbs, heads, dim)``, every row
        is one causal segment, and the result is ``(row, mbs, heads * dim)``. Masks are ignored.
        """
        del attention_mask, attn_mask_type
        if attention_bias is not None:
            raise ValueError("attention_bias is set; packed attention has none")
        if packed_seq_params is not None:
            out = self._attend(
                query, key, value, packed_seq_params.cu_seqlens_q, packed_seq_params.max_seqlen_q
            )
            return out.flatten(1)
        row, mbs = query.shape[:2]
        boundaries = torch.arange(0, row * mbs + 1, row, dtype=torch.int32, device=query.device)
        flat_query, flat_key, flat_value = (
            tensor.transpose(0, 1).flatten(0, 1) for tensor in (query, key, value)
        )
        out = self._attend(flat_query, flat_key, flat_value, boundaries, row)
        return out.view(mbs, row, -1).transpose(0, 1).contiguous()

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, boundaries: Tensor, longest: int
    ) -> Tensor:
        if self._backend is None:
            needs = AttentionNeeds(
                device=query.device,
                dtype=query.dtype,
                head_dim=query.shape[-1],
                num_heads=query.shape[1],
                num_key_value_heads=key.shape[1],
                window=self.window > 0,
            )
            self._backend = choose_backend(needs).name
        return varlen_attention(
            query,
            key,
            value,
            boundaries,
            max_seqlen=longest,
            scale=self.softmax_scale,
            window=self.window,
            backend=self._backend,
        )


def with_packed_attention(layer_spec: Any) -> Any:
    """Return a copy of a decoder layer spec (a layer's ModuleSpec, or a block's submodules with
    ``layer_specs``) with ``PackedCoreAttention`` in self attention. Raises ConfigError if a layer
    has no self attention with a ``core_attention``."""
    result = copy.deepcopy(layer_spec)
    for layer in getattr(result, "layer_specs", None) or [result]:
        attention = getattr(layer.submodules, "self_attention", None)
        submodules = getattr(attention, "submodules", None)
        if submodules is None or not hasattr(submodules, "core_attention"):
            raise ConfigError(f"layer spec {layer.module} has no self attention to replace")
        submodules.core_attention = PackedCoreAttention
    return result
