"""Attention over a stream of segments: one function, one opaque operator, any backend.

``megapack::varlen_attn`` is opaque to ``torch.compile``: a model compiles to one graph whatever
segments a batch holds, and no mask is ever built. ``cu_seqlens`` may be padded by repeating its
last entry, so that its shape is the same for every batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megapack.attention import eager, flex, sdpa
from megapack.attention.flash import Flash2, Flash3, TorchFlash
from megapack.attention.problem import AttentionNeeds, Forward, ScoreRule, Segments
from megapack.errors import ConfigError

# ---- The backends, and the choice of one: by name, or the first that can serve the model --------
# The choice is made once, at start, and says why; a step never asks again.


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """The forward and backward of one backend, and which rules it can apply."""

    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]
    refusal: Callable[[AttentionNeeds], str | None]
    softcap: bool
    alibi: bool


def _of(kernel: Flash2 | Flash3 | TorchFlash, *, softcap: bool, alibi: bool) -> Kernel:
    return Kernel(
        forward=kernel.forward,
        backward=kernel.backward,
        refusal=kernel.refusal,
        softcap=softcap,
        alibi=alibi,
    )


# Behind the opaque operator, fastest first.
KERNELS: dict[str, Kernel] = {
    "flash3": _of(Flash3(), softcap=True, alibi=False),
    "flash2": _of(Flash2(), softcap=True, alibi=True),
    "torch": _of(TorchFlash(), softcap=False, alibi=False),
    "sdpa": Kernel(
        forward=sdpa.forward,
        backward=sdpa.backward,
        refusal=sdpa.refusal,
        softcap=False,
        alibi=True,
    ),
    "eager": Kernel(
        forward=eager.forward,
        backward=eager.backward,
        refusal=eager.refusal,
        softcap=True,
        alibi=True,
    ),
}

# name -> one line; the order is the order of preference
BACKENDS: dict[str, str] = {
    "flash3": "flash-attn 3 (Hopper): window, soft cap",
    "flash2": "flash-attn 2: window, soft cap, ALiBi",
    "torch": "PyTorch's varlen attention (torch >= 2.10, CUDA): window",
    "flex": "FlexAttention (CUDA): window, soft cap, ALiBi; no wheel to install",
    "sdpa": "PyTorch's fused CPU attention per segment: window, ALiBi",
    "eager": "the formula per segment, any device: everything, slowly",
}


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The backend of a run and the reason, for the log and the run directory."""

    name: str
    reason: str


def survey(needs: AttentionNeeds) -> dict[str, str | None]:
    """For every backend, in order of preference: None when it can serve, else why it cannot."""
    refusals = {name: kernel.refusal for name, kernel in KERNELS.items()}
    refusals["flex"] = flex.refusal
    return {name: refusals[name](needs) for name in BACKENDS}


def choose_backend(needs: AttentionNeeds, requested: str = "auto") -> Choice:
    """The requested backend, or the first of ``BACKENDS`` that can serve ``needs``.

    Raises:
        ConfigError: the requested backend is unknown or cannot serve the model.
    """
    if requested != "auto" and requested not in BACKENDS:
        known = ", ".join(["auto", *BACKENDS])
        raise ConfigError(f"attention backend {requested!r} is unknown; choose one of {known}")
    found = survey(needs)
    if requested != "auto":
        problem = found[requested]
        if problem is not None:
            able = ", ".join(name for name, reason in found.items() if reason is None)
            raise ConfigError(
                f"attention backend {requested!r} cannot serve {needs.describe()}: {problem}; "
                f"able here: {able}"
            )
        return Choice(name=requested, reason="asked for")
    name = next(name for name, reason in found.items() if reason is None)
    refused = [f"{other}: {reason}" for other, reason in found.items() if reason is not None]
    better = [r for r in refused if list(BACKENDS).index(r.split(":")[0]) < _rank(name)]
    why = f"first able for {needs.describe()}"
    return Choice(name=name, reason=why + (f" ({'; '.join(better)})" if better else ""))


def _rank(name: str) -> int:
    return list(BACKENDS).index(name)


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
    """Attention in which a position sees only its own segment.

    Args:
        query: ``[T, H, D]``.
        key: ``[T, Hkv, D]``; Hkv divides H (grouped-query attention).
        value: ``[T, Hkv, D]``.
        cu_seqlens: ``[S + 1]`` int32 on the device of ``query``: 0, the end of every segment, T;
            repeated entries are empty segments.
        max_seqlen: length of the longest segment, known on the host (tokens).
        backend: a name of ``BACKENDS``; see ``choose_backend``.
        scale: factor on the scores; ``D ** -0.5`` when None.
        causal: position i sees j <= i.
        window: with w > 0, position i sees ``i - j < w`` only.
        softcap: with c > 0, scores become ``c * tanh(scores / c)``.
        alibi_slopes: ``[H]`` float32; adds ``-slope * (i - j)`` to the scores (Press et al. 2021).

    Returns:
        ``[T, H, D]`` in the dtype of ``query``.

    Raises:
        ValueError: shapes that do not fit, or a rule that ``backend`` cannot honour.
    """
    _check_shapes(query, key, value, cu_seqlens, alibi_slopes)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    if backend == "flex":
        rule = ScoreRule(
            scale=scale, causal=causal, window=window, softcap=softcap, alibi_slopes=alibi_slopes
        )
        return flex.attend(query, key, value, Segments(cu_seqlens, max_seqlen), rule)
    _check_rule(backend, softcap, alibi_slopes)
    out, _ = torch.ops.megapack.varlen_attn(
        query,
        key,
        value,
        cu_seqlens,
        alibi_slopes,
        max_seqlen=max_seqlen,
        scale=scale,
        causal=causal,
        window=window,
        softcap=softcap,
        backend=backend,
    )
    result: Tensor = out
    return result


def _check_shapes(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, alibi_slopes: Tensor | None
) -> None:
    if q.dim() != 3 or k.shape != v.shape or k.shape[::2] != q.shape[::2]:
        raise ValueError(
            f"query {tuple(q.shape)}, key {tuple(k.shape)} and value {tuple(v.shape)} must be "
            "[T, H, D], [T, Hkv, D] and [T, Hkv, D]"
        )
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"{q.shape[1]} query heads cannot share {k.shape[1]} key heads evenly")
    if cu_seqlens.dtype != torch.int32 or cu_seqlens.dim() != 1:
        raise ValueError(
            f"cu_seqlens is {cu_seqlens.dtype} of shape {tuple(cu_seqlens.shape)}; it must be "
            "int32 of shape [segments + 1]"
        )
    if alibi_slopes is not None and alibi_slopes.shape != (q.shape[1],):
        raise ValueError(
            f"alibi_slopes has shape {tuple(alibi_slopes.shape)}; one slope per head is "
            f"({q.shape[1]},)"
        )


def _check_rule(backend: str, softcap: float, alibi_slopes: Tensor | None) -> None:
    kernel = KERNELS.get(backend)
    if kernel is None:
        known = ", ".join([*KERNELS, "flex"])
        raise ValueError(f"attention backend {backend!r} is unknown; choose one of {known}")
    if softcap and not kernel.softcap:
        raise ValueError(f"attention backend {backend!r} cannot apply a soft cap ({softcap})")
    if alibi_slopes is not None and not kernel.alibi:
        raise ValueError(f"attention backend {backend!r} cannot apply ALiBi")


@torch.library.custom_op("megapack::varlen_attn", mutates_args=())
def _varlen_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    alibi_slopes: Tensor | None,
    *,
    max_seqlen: int,
    scale: float,
    causal: bool,
    window: int,
    softcap: float,
    backend: str,
) -> tuple[Tensor, Tensor]:
    rule = ScoreRule(
        scale=scale, causal=causal, window=window, softcap=softcap, alibi_slopes=alibi_slopes
    )
    out, lse = KERNELS[backend].forward(q, k, v, Segments(cu_seqlens, max_seqlen), rule)
    return out.contiguous(), lse.contiguous()


@_varlen_attn.register_fake
def _varlen_attn_fake(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, alibi_slopes: Tensor | None, **rest: Any
) -> tuple[Tensor, Tensor]:
    del k, v, cu_seqlens, alibi_slopes, rest
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty(q.shape), q.new_empty((q.shape[1], q.shape[0]), dtype=lse_dtype)


@torch.library.custom_op("megapack::varlen_attn_backward", mutates_args=())
def _varlen_attn_backward(  # noqa: PLR0917 (an operator's tensors are positional)
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seqlens: Tensor,
    alibi_slopes: Tensor | None,
    *,
    max_seqlen: int,
    scale: float,
    causal: bool,
    window: int,
    softcap: float,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    rule = ScoreRule(
        scale=scale, causal=causal, window=window, softcap=softcap, alibi_slopes=alibi_slopes
    )
    done, segments = Forward(q, k, v, out, lse), Segments(cu_seqlens, max_seqlen)
    dq, dk, dv = KERNELS[backend].backward(grad_out.contiguous(), done, segments, rule)
    return dq.contiguous(), dk.contiguous(), dv.contiguous()


@_varlen_attn_backward.register_fake
def _varlen_attn_backward_fake(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, *tensors: Tensor, **rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    del grad_out, tensors, rest
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _setup_context(
    ctx: Any,
    inputs: tuple[Any, ...],
    keyword_only_inputs: dict[str, Any],
    output: tuple[Tensor, Tensor],
) -> None:
    q, k, v, cu_seqlens, alibi_slopes = inputs
    ctx.save_for_backward(q, k, v, *output, cu_seqlens, alibi_slopes)
    ctx.rest = keyword_only_inputs


def _backward(ctx: Any, grad_out: Tensor, grad_lse: Tensor) -> tuple[Tensor | None, ...]:
    del grad_lse  # lse is never handed out, so this is always zero
    dq, dk, dv = torch.ops.megapack.varlen_attn_backward(grad_out, *ctx.saved_tensors, **ctx.rest)
    return dq, dk, dv, None, None


_varlen_attn.register_autograd(_backward, setup_context=_setup_context)
