"""Attention over a stream of segments: one function, one opaque operator, any backend.

- ``varlen_attention``: the attention function of documents.
- ``tree_attention``: the same for packed prefix trees, whose shared tokens are computed once.
- ``choose_backend``: chooses the backend of a run at start; ``refusals``: why others cannot serve.

``torch.compile`` does not trace ``megapack::varlen_attn``, so a model compiles to one graph for
all segment layouts, and no mask is ever built. ``cu_seqlens`` may repeat its last entry.

    choose_backend(AttentionNeeds(device=torch.device("cpu"), dtype=torch.float32, head_dim=64,
                                  num_heads=4, num_key_value_heads=2, softcap=True)).name
    # -> "eager"; without the soft cap "sdpa"
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megapack.attention import flex
from megapack.attention.flash import FLASH2, FLASH3, TORCH
from megapack.attention.problem import (
    AttentionNeeds,
    Backend,
    Forward,
    ScoreRule,
    TreeSegments,
    accumulator,
)
from megapack.attention.segmentwise import EAGER, SDPA
from megapack.errors import ConfigError

# In order of preference, fastest first. The last one supports everything.
BACKENDS: dict[str, Backend] = {
    backend.name: backend for backend in (FLASH3, FLASH2, TORCH, flex.BACKEND, SDPA, EAGER)
}


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Backend of a run and why it was chosen, for the log and the run directory."""

    name: str
    reason: str


def refusals(needs: AttentionNeeds) -> dict[str, str | None]:
    """Return for every backend, in order of preference, why it cannot serve, or None."""
    return {name: backend.why_not(needs) for name, backend in BACKENDS.items()}


def choose_backend(needs: AttentionNeeds, requested: str = "auto") -> Choice:
    """Return the requested backend, or for ``auto`` the first one that can serve ``needs``. Raises
    ConfigError if the requested one is unknown or cannot serve."""
    if requested not in ("auto", *BACKENDS):
        known = ", ".join(["auto", *BACKENDS])
        raise ConfigError(f"attention backend {requested!r} is unknown; choose one of {known}")
    reasons = refusals(needs)
    able = [name for name, reason in reasons.items() if reason is None]
    if requested == "auto":
        faster = [f"{name}: {reasons[name]}" for name in itertools.takewhile(reasons.get, reasons)]
        why = f"first that supports {needs.describe()}"
        return Choice(name=able[0], reason=why + (f" ({'; '.join(faster)})" if faster else ""))
    if reasons[requested] is not None:
        raise ConfigError(
            f"attention backend {requested!r} cannot serve {needs.describe()}: "
            f"{reasons[requested]}; available: {', '.join(able)}"
        )
    return Choice(name=requested, reason="requested")


def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    *,
    max_seqlen: int,
    backend: str,
    scale: float | None = None,
    causal: bool = True,
    window: int = 0,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
) -> Tensor:
    """Compute attention inside segments; return ``[T, H, D]`` in the dtype of ``query``.

    Raises ValueError for wrong shapes, for a rule that ``backend`` does not support and, with a CPU
    backend, for ``cu_seqlens`` that does not describe T tokens.

    Args:
        query: ``[T, H, D]``.
        key, value: ``[T, Hkv, D]``; Hkv divides H (grouped-query attention).
        cu_seqlens: ``[S + 1]`` int32 on the device of ``query``: 0, then the end of every segment;
            the last is T. Repeated entries are empty segments.
        max_seqlen: length of the longest segment in tokens, known on the CPU.
        backend: a name of ``BACKENDS``; see ``choose_backend``.
        scale: factor on the scores; None: ``D ** -0.5``.
        causal: position i attends only to j <= i.
        window: with w > 0, position i attends only to j with ``i - j < w``.
        softcap: with c > 0, scores become ``c * tanh(scores / c)``.
        alibi_slopes: ``[H]`` float32; adds ``-slope * (i - j)`` to the scores (Press et al. 2021).
    """
    return tree_attention(
        query,
        key,
        value,
        TreeSegments.of_documents(cu_seqlens, max_seqlen),
        backend=backend,
        scale=scale,
        causal=causal,
        window=window,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
    )


def tree_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: TreeSegments,
    *,
    backend: str,
    scale: float | None = None,
    causal: bool = True,
    window: int = 0,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
) -> Tensor:
    """Compute attention of every token of a packed prefix tree to its path; return ``[T, H, D]`` in
    the dtype of ``query``.

    The queries of a node are its tokens, its keys are its path. Masks, windows and ALiBi use the
    difference of depths, because kernels align the end of a node with the end of its path.

    Args:
        segments: nodes and their paths, on the device of ``query``. Padding is a root.

    Other arguments and the errors are those of ``varlen_attention``.
    """
    _check_shapes(query, key, value, segments, alibi_slopes)
    options: dict[str, Any] = {
        "max_seqlen_q": segments.max_seqlen_q,
        "max_seqlen_k": segments.max_seqlen_k,
        "scale": query.shape[-1] ** -0.5 if scale is None else scale,
        "causal": causal,
        "window": window,
        "softcap": softcap,
        "backend": _check_rule(backend, softcap, alibi_slopes),
    }
    tensors = (*segments[:3], alibi_slopes)
    out: Tensor
    if BACKENDS[backend].backward is None:
        chosen, segments, rule = _unpack(*tensors, **options)
        out = chosen.forward(query, key, value, segments, rule)
    else:
        out, _ = torch.ops.megapack.varlen_attn(query, key, value, *tensors, **options)
    return out


def _check_shapes(
    q: Tensor, k: Tensor, v: Tensor, segments: TreeSegments, alibi_slopes: Tensor | None
) -> None:
    if q.dim() != 3 or k.shape != v.shape or k.shape[::2] != q.shape[::2]:
        raise ValueError(
            f"query {tuple(q.shape)}, key {tuple(k.shape)} and value {tuple(v.shape)} must be "
            "[T, H, D], [T, Hkv, D] and [T, Hkv, D]"
        )
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"{q.shape[1]} query heads cannot share {k.shape[1]} key heads evenly")
    for name, x in zip(("cu_seqlens", "cu_seqlens_k", "kv_index"), segments[:3], strict=True):
        if x is not None and (x.dtype != torch.int32 or x.dim() != 1):
            shape = "[tokens of all paths]" if name == "kv_index" else "[segments + 1]"
            raise ValueError(
                f"{name} is {x.dtype} of shape {tuple(x.shape)}; it must be int32 of shape {shape}"
            )
    if segments.cu_seqlens_k.shape != segments.cu_seqlens_q.shape:
        raise ValueError(
            f"cu_seqlens_q has {len(segments.cu_seqlens_q)} entries and cu_seqlens_k "
            f"{len(segments.cu_seqlens_k)}; every node has one path"
        )
    if alibi_slopes is not None and alibi_slopes.shape != (q.shape[1],):
        raise ValueError(
            f"alibi_slopes has shape {tuple(alibi_slopes.shape)}; one slope per head is "
            f"({q.shape[1]},)"
        )


def _check_rule(backend: str, softcap: float, alibi_slopes: Tensor | None) -> str:
    if backend not in BACKENDS:
        known = ", ".join(BACKENDS)
        raise ValueError(f"attention backend {backend!r} is unknown; choose one of {known}")
    if softcap and not BACKENDS[backend].softcap:
        raise ValueError(f"attention backend {backend!r} cannot apply a soft cap ({softcap})")
    if alibi_slopes is not None and not BACKENDS[backend].alibi:
        raise ValueError(f"attention backend {backend!r} cannot apply ALiBi")
    return backend


def _unpack(
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    kv_index: Tensor | None,
    alibi_slopes: Tensor | None,
    *,
    backend: str,
    max_seqlen_q: int,
    max_seqlen_k: int,
    **rule: Any,
) -> tuple[Backend, TreeSegments, ScoreRule]:
    segments = TreeSegments(cu_seqlens_q, cu_seqlens_k, kv_index, max_seqlen_q, max_seqlen_k)
    return BACKENDS[backend], segments, ScoreRule(alibi_slopes=alibi_slopes, **rule)


# The operator gathers keys and values along the paths, again in the backward pass. So autograd
# keeps one row per token between the passes, although paths may repeat a token many times.
def _gathered(x: Tensor, kv_index: Tensor | None) -> Tensor:
    return x if kv_index is None else x.index_select(0, kv_index)


def _scattered(grad: Tensor, like: Tensor, kv_index: Tensor | None) -> Tensor:
    """Add the gradients of all paths through a token, in the accumulator's dtype."""
    if kv_index is None:
        return grad.contiguous()
    total = like.new_zeros(like.shape, dtype=accumulator(like))
    return total.index_add_(0, kv_index, grad.to(total.dtype)).to(like.dtype)


_SEGMENTS = "Tensor cu_seqlens_q, Tensor cu_seqlens_k, Tensor? kv_index, Tensor? alibi_slopes"
_OPTIONS = (
    "SymInt max_seqlen_q, SymInt max_seqlen_k, float scale, bool causal, int window, "
    "float softcap, str backend"
)


@torch.library.custom_op(
    "megapack::varlen_attn",
    mutates_args=(),
    schema=f"(Tensor q, Tensor k, Tensor v, {_SEGMENTS}, *, {_OPTIONS}) -> (Tensor, Tensor)",
)
def _varlen_attn(
    q: Tensor, k: Tensor, v: Tensor, *tensors: Any, **options: Any
) -> tuple[Tensor, Tensor]:
    chosen, segments, rule = _unpack(*tensors, **options)
    keys, values = (_gathered(x, segments.kv_index) for x in (k, v))
    out, lse = chosen.forward(q, keys, values, segments, rule)
    return out.contiguous(), lse.contiguous()


@_varlen_attn.register_fake
def _varlen_attn_fake(
    q: Tensor, k: Tensor, v: Tensor, *tensors: Any, **options: Any
) -> tuple[Tensor, Tensor]:
    del k, v, tensors, options
    return q.new_empty(q.shape), q.new_empty((q.shape[1], q.shape[0]), dtype=accumulator(q))


@torch.library.custom_op(
    "megapack::varlen_attn_backward",
    mutates_args=(),
    schema="(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    f"{_SEGMENTS}, *, {_OPTIONS}) -> (Tensor, Tensor, Tensor)",
)
def _varlen_attn_backward(grad_out: Tensor, *tensors: Any, **options: Any) -> tuple[Tensor, ...]:
    q, k, v, out, lse = tensors[:5]
    chosen, segments, rule = _unpack(*tensors[5:], **options)
    assert chosen.backward is not None, "tree_attention calls such a backend directly"
    keys, values = (_gathered(x, segments.kv_index) for x in (k, v))
    done = Forward(q, keys, values, out, lse)
    grad_q, *grads = chosen.backward(grad_out.contiguous(), done, segments, rule)
    pairs = zip(grads, (k, v), strict=True)
    return grad_q.contiguous(), *(_scattered(g, x, segments.kv_index) for g, x in pairs)


@_varlen_attn_backward.register_fake
def _varlen_attn_backward_fake(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, *tensors: Tensor, **options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    del grad_out, tensors, options
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _setup_context(
    ctx: Any,
    inputs: tuple[Any, ...],
    keyword_only_inputs: dict[str, Any],
    output: tuple[Tensor, Tensor],
) -> None:
    q, k, v, *segments = inputs
    ctx.save_for_backward(q, k, v, *output, *segments)
    ctx.rest = keyword_only_inputs


def _backward(ctx: Any, grad_out: Tensor, grad_lse: Tensor) -> tuple[Tensor | None, ...]:
    del grad_lse  # callers do not get lse, so its gradient is always zero
    dq, dk, dv = torch.ops.megapack.varlen_attn_backward(grad_out, *ctx.saved_tensors, **ctx.rest)
    return dq, dk, dv, None, None, None, None


_varlen_attn.register_autograd(_backward, setup_context=_setup_context)
