"""The one attention function of transformers models: registered by name, no mask, no device wait.

A model whose ``attn_implementation`` is ``"megapack"`` hands q, k and v here, with every keyword
its forward was called with. The name is not in transformers' mask interface, so no mask is built.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from megapack.attention.varlen import varlen_attention

ATTENTION_NAME = "megapack"

Attention: TypeAlias = Callable[..., tuple[Tensor, None]]


# What a transformers model's attention calls cu_seqlens and the longest segment.
ENDS = ("cu_seq_lens_q", "cu_seq_lens_k")
LONGEST = ("max_length_q", "max_length_k")


def varlen_arguments(
    cu_seqlens: Tensor, max_seqlen: int, sequence_parallel_size: int = 1
) -> dict[str, Any]:
    """Arguments of a model's forward beside ``input_ids`` and ``position_ids``.

    With ``sequence_parallel_size`` above 1 these are a slice of the tokens that ``cu_seqlens``
    divides (``megapack.attention.sequence_parallel``).
    """
    shared = {"sequence_parallel_size": sequence_parallel_size}
    return {
        **(shared if sequence_parallel_size > 1 else {}),
        **dict.fromkeys(ENDS, cu_seqlens),
        **dict.fromkeys(LONGEST, max_seqlen),
        "use_cache": False,
    }


def tell_recurrent_layers(model: Any) -> None:
    """Let recurrent layers know segments: every call that has cu_seq_lens_q is given seq_idx,
    int32 ``[1, T]``, the number of each token's segment.

    Kernels of causal_conv1d and mamba_ssm read it (those of fla read cu_seq_lens_q), and where one
    is not installed transformers says which. A model that hands it to none is found by the check.
    """
    # A class of somebody's own is told by those of transformers that it is made from.
    names = {kind.__module__ for kind in type(model).__mro__}
    sources = (inspect.getsource(sys.modules[n]) for n in names if n.startswith("transformers"))
    base = getattr(model, "base_model", model)
    if hasattr(base, "_tells_segments") or not any("from_hub_with_fallback(" in s for s in sources):
        return

    def add(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        ends = kwargs.get(ENDS[0])
        if ends is not None and "seq_idx" not in kwargs:
            lengths = ends.diff().long()
            numbers = torch.arange(len(lengths), dtype=torch.int32, device=ends.device)
            kwargs = {**kwargs, "seq_idx": numbers.repeat_interleave(lengths)[None]}
        return args, kwargs

    base._tells_segments = base.register_forward_pre_hook(add, with_kwargs=True)


def register(backend: str, wrap: Callable[[Attention], Attention] | None = None) -> None:
    """Make ``attn_implementation="megapack"`` mean varlen attention on ``backend``, wrapped."""
    from transformers import AttentionInterface  # noqa: PLC0415

    attend = _attention_function(backend)
    AttentionInterface.register(ATTENTION_NAME, attend if wrap is None else wrap(attend))


def _attention_function(backend: str) -> Attention:
    def megapack_attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        dropout: float = 0.0,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        cu_seq_lens_q: Tensor | None = None,
        max_length_q: int | None = None,
        **unused: Any,
    ) -> tuple[Tensor, None]:
        """q ``[B, H, L, D]``, k ``[B, Hkv, L, D]``, v ``[B, Hkv, L, E]`` -> ``[B, L, H, E]``."""
        batch, heads, length, key_width = query.shape
        _refuse_what_we_ignore(attention_mask, dropout, key, length, unused)
        if cu_seq_lens_q is None or max_length_q is None:
            # Plain rows, as a generation harness sends them: every row is one segment.
            cu_seq_lens_q = torch.arange(
                0, batch * length + 1, length, dtype=torch.int32, device=query.device
            )
            max_length_q = length
        kind = query.device.type
        if kind != "meta" and torch.is_autocast_enabled(kind):  # rotated q and k are float32
            compute = torch.get_autocast_dtype(kind)
            query, key, value = query.to(compute), key.to(compute), value.to(compute)
        # Values as wide as keys are not (multi-head latent attention): the kernels want one width,
        # and zeros change no product.
        value_width = value.shape[-1]
        width = max(key_width, value_width)
        query, key, value = (
            x if x.shape[-1] == width else nn.functional.pad(x, (0, width - x.shape[-1]))
            for x in (query, key, value)
        )
        out = varlen_attention(
            query.transpose(1, 2).reshape(batch * length, heads, width),
            key.transpose(1, 2).reshape(batch * length, -1, width),
            value.transpose(1, 2).reshape(batch * length, -1, width),
            cu_seq_lens_q,
            max_seqlen=max_length_q,
            scale=key_width**-0.5 if scaling is None else scaling,
            window=sliding_window or 0,
            softcap=softcap or 0.0,
            alibi_slopes=_slopes(module),
            backend=backend,
        )
        return out.view(batch, length, heads, width)[..., :value_width], None

    return megapack_attention


def _slopes(module: nn.Module) -> Tensor | None:
    slopes = getattr(module, "alibi_slopes", None)
    if slopes is None and getattr(getattr(module, "config", None), "alibi_slopes", None):
        raise ValueError(
            "the model's configuration has alibi_slopes and its attention layers have none; load "
            "it with megapack.training.model's build_model, or with attn_implementation='sdpa'"
        )
    return slopes


def _refuse_what_we_ignore(
    attention_mask: Tensor | None,
    dropout: float,
    key: Tensor,
    length: int,
    unused: dict[str, Any],
) -> None:
    if attention_mask is not None:
        raise ValueError(
            "megapack attention got an attention_mask; segments come from cu_seq_lens_q. Call the "
            "model without attention_mask (labels of padding are -100), or load it with "
            "attn_implementation='sdpa'"
        )
    if dropout:
        raise ValueError(
            f"attention dropout is {dropout}; varlen attention has none: set the model's "
            "attention_dropout (GPT-2: attn_pdrop) to 0"
        )
    if key.shape[2] != length:
        raise ValueError(
            f"{length} queries meet {key.shape[2]} keys: megapack attention serves training and "
            "scoring, not decoding with a cache; load the model with attn_implementation='sdpa'"
        )
    if "sequence_parallel_size" in unused:
        raise ValueError(
            "megapack attention got a slice of the tokens and no group of ranks to exchange with; "
            "register it with megapack.attention.sequence_parallel's over_ranks"
        )
    if unused.get("s_aux") is not None:
        raise ValueError("attention sinks (s_aux) are not supported by megapack attention")
