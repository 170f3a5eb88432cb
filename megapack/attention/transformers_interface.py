"""The attention function of transformers models, registered under the name ``megapack``.

A model with ``attn_implementation="megapack"`` calls it with q, k, v and every keyword argument of
the model's forward. transformers' mask interface has no such name, so transformers builds no mask.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from megapack.attention.problem import TreeSegments
from megapack.attention.varlen import tree_attention

ATTENTION_NAME = "megapack"

Attention: TypeAlias = Callable[..., tuple[Tensor, None]]


# transformers' names of cu_seqlens and the longest segment.
ENDS = ("cu_seq_lens_q", "cu_seq_lens_k")
LONGEST = ("max_length_q", "max_length_k")


def varlen_arguments(
    cu_seqlens: Tensor, max_seqlen: int, sequence_parallel_size: int = 1
) -> dict[str, Any]:
    """Return arguments of a model's forward, in addition to ``input_ids`` and ``position_ids``.
    With ``sequence_parallel_size`` above 1, the rank forwards a slice of the tokens that
    ``cu_seqlens`` describes (``megapack.attention.sequence_parallel``)."""
    arguments: dict[str, Any] = {
        **dict.fromkeys(ENDS, cu_seqlens),
        **dict.fromkeys(LONGEST, max_seqlen),
        "use_cache": False,
    }
    if sequence_parallel_size > 1:
        arguments["sequence_parallel_size"] = sequence_parallel_size
    return arguments


def tree_arguments(segments: TreeSegments) -> dict[str, Any]:
    """Return arguments of a model's forward for packed trees, in addition to ``input_ids`` and
    ``position_ids``, which are depths (``TreeBatch``)."""
    return {
        **dict(zip(ENDS, segments[:2], strict=True)),
        **dict(zip(LONGEST, segments[3:], strict=True)),
        "kv_index": segments.kv_index,
        "use_cache": False,
    }


def add_segment_numbers(model: Any) -> None:
    """Add ``seq_idx``, int32 ``[1, T]``, to every call with cu_seq_lens_q, for recurrent layers.

    It is the number of each token's segment, which kernels of causal_conv1d and mamba_ssm read
    (kernels of fla read cu_seq_lens_q). ``check_architecture`` refuses models that ignore it.
    """
    # Look also at the modules of base classes: a user's class may derive from transformers'.
    names = {kind.__module__ for kind in type(model).__mro__}
    sources = (inspect.getsource(sys.modules[n]) for n in names if n.startswith("transformers"))
    base = getattr(model, "base_model", model)
    recurrent = any("from_hub_with_fallback(" in source for source in sources)
    if hasattr(base, "_segment_numbers_hook") or not recurrent:
        return

    def add(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        ends = kwargs.get(ENDS[0])
        if ends is not None and "seq_idx" not in kwargs:
            lengths = ends.diff().long()
            numbers = torch.arange(len(lengths), dtype=torch.int32, device=ends.device)
            kwargs = {**kwargs, "seq_idx": numbers.repeat_interleave(lengths)[None]}
        return args, kwargs

    base._segment_numbers_hook = base.register_forward_pre_hook(add, with_kwargs=True)


def register(backend: str, wrap: Callable[[Attention], Attention] | None = None) -> None:
    """Register varlen attention on ``backend``, wrapped by ``wrap``, as ``"megapack"``."""
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
        cu_seq_lens_k: Tensor | None = None,
        kv_index: Tensor | None = None,
        max_length_q: int | None = None,
        max_length_k: int | None = None,
        **unused: Any,
    ) -> tuple[Tensor, None]:
        """q ``[B, H, L, D]``, k ``[B, Hkv, L, D]``, v ``[B, Hkv, L, E]`` -> ``[B, L, H, E]``."""
        batch, heads, length, key_width = query.shape
        _refuse_unsupported(attention_mask, dropout, key, length, unused)
        if cu_seq_lens_q is None or max_length_q is None:
            # Plain rows without boundaries (as from an evaluation harness): each row is one
            # segment.
            cu_seq_lens_q = torch.arange(
                0, batch * length + 1, length, dtype=torch.int32, device=query.device
            )
            max_length_q = length
        if kv_index is None:  # no trees: a document's keys are its own tokens
            cu_seq_lens_k, max_length_k = cu_seq_lens_q, max_length_q
        elif cu_seq_lens_k is None or max_length_k is None:
            raise ValueError(
                "megapack attention got kv_index without cu_seq_lens_k or max_length_k; call the "
                "model with all of tree_arguments(segments)"
            )
        segments = TreeSegments(cu_seq_lens_q, cu_seq_lens_k, kv_index, max_length_q, max_length_k)
        kind = query.device.type
        if kind != "meta" and torch.is_autocast_enabled(kind):  # RoPE gives float32 q and k
            dtype = torch.get_autocast_dtype(kind)
            query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
        # Multi-head latent attention has keys and values of different widths, and the kernels take
        # one width: pad with zeros, which change no product.
        value_width = value.shape[-1]
        width = max(key_width, value_width)
        query, key, value = (
            x if x.shape[-1] == width else nn.functional.pad(x, (0, width - x.shape[-1]))
            for x in (query, key, value)
        )
        out = tree_attention(
            query.transpose(1, 2).reshape(batch * length, heads, width),
            key.transpose(1, 2).reshape(batch * length, -1, width),
            value.transpose(1, 2).reshape(batch * length, -1, width),
            segments,
            scale=key_width**-0.5 if scaling is None else scaling,
            causal=True,
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


def _refuse_unsupported(
    attention_mask: Tensor | None, dropout: float, key: Tensor, length: int, unused: dict[str, Any]
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
            f"there are {length} queries and {key.shape[2]} keys: megapack attention is for "
            "training and scoring, not for decoding with a cache; "
            "load the model with attn_implementation='sdpa'"
        )
    if "sequence_parallel_size" in unused:
        raise ValueError(
            "megapack attention got a slice of the tokens and no process group to exchange with; "
            "register it with megapack.attention.sequence_parallel.over_ranks"
        )
    if unused.get("s_aux") is not None:
        raise ValueError("attention sinks (s_aux) are not supported by megapack attention")
