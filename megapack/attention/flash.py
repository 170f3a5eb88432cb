"""The CUDA kernels that read ``cu_seqlens`` themselves: flash-attn 2, flash-attn 3, PyTorch's own.

Each pair of functions maps our rule to the kernel's arguments and nothing else. A window of w
positions is ``(w - 1, 0)`` in all three. PyTorch's bundled kernels are called below
``torch.nn.attention.varlen``, whose Python signature changed in 2.10, 2.11 and 2.12 while the
operators it calls stayed the same; ``activate_flash_attention_impl`` therefore reroutes them too.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import Any

import torch
from torch import Tensor

from megapack.attention.problem import AttentionNeeds, Forward, ScoreRule, Segments

__all__ = ["Flash2", "Flash3", "TorchFlash"]


def _common_refusal(needs: AttentionNeeds, *, oldest: int, newest: int | None) -> str | None:
    if needs.device.type != "cuda":
        return f"it runs on CUDA devices, not on {needs.device.type}"
    if needs.dtype not in (torch.float16, torch.bfloat16):
        return f"it takes float16 and bfloat16, not {str(needs.dtype).removeprefix('torch.')}"
    if needs.head_dim % 8 or needs.head_dim > 256:
        return f"head_dim {needs.head_dim} is not a multiple of 8 up to 256"
    major, minor = torch.cuda.get_device_capability(needs.device)
    if major < oldest or (newest is not None and major > newest):
        span = f"{oldest}.x" + ("" if newest == oldest else " or newer")
        return f"it needs compute capability {span}, this device has {major}.{minor}"
    return None


def _import(module: str) -> str | None:
    try:
        importlib.import_module(module)
    except (ImportError, OSError) as error:  # OSError: a wheel built for another CUDA
        return f"{module} cannot be imported ({error})"
    return None


def _too_old(package: str, oldest: tuple[int, int]) -> str | None:
    """Releases before ``oldest`` have the module and take other arguments."""
    found = importlib.metadata.version(package)
    if tuple(int(number) for number in found.split(".")[:2]) >= oldest:
        return None
    return f"{package} {found} is older than {'.'.join(map(str, oldest))}"


def _window(rule: ScoreRule) -> tuple[int, int]:
    return (rule.window - 1, 0) if rule.window else (-1, 0 if rule.causal else -1)


def _longest(segments: Segments) -> int:
    """At least 2: of length 1 the kernels make decoding, one query per *entry* of cu_seqlens."""
    return max(2, segments.max_seqlen)


# Named, because older builds of flash-attn 3 give these arguments no default.
_FLASH3_UNUSED = dict.fromkeys(
    (
        *("k_new", "v_new", "q_v", "out", "cu_seqlens_k_new", "seqused_q", "seqused_k"),
        *("page_table", "kv_batch_idx", "leftpad_k", "rotary_cos", "rotary_sin", "seqlens_rotary"),
        *("q_descale", "k_descale", "v_descale"),
    )
)


class Flash2:
    """flash-attn 2.8 and newer: GQA, window, soft cap and ALiBi, head_dim up to 256."""

    def refusal(self, needs: AttentionNeeds) -> str | None:
        """Why this backend cannot serve ``needs``; None when it can."""
        return (
            _common_refusal(needs, oldest=8, newest=None)
            or _import("flash_attn.flash_attn_interface")
            or _too_old("flash-attn", (2, 8))
        )

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, segments: Segments, rule: ScoreRule
    ) -> tuple[Tensor, Tensor]:
        """Output ``[T, H, D]`` and log-sum-exp ``[H, T]``."""
        out, lse, _, _ = _flash2()._flash_attn_varlen_forward(
            q=q,
            k=k,
            v=v,
            cu_seqlens_q=segments.cu_seqlens,
            cu_seqlens_k=segments.cu_seqlens,
            max_seqlen_q=_longest(segments),
            max_seqlen_k=_longest(segments),
            dropout_p=0.0,
            softmax_scale=rule.scale,
            causal=rule.causal,
            window_size_left=_window(rule)[0],
            window_size_right=_window(rule)[1],
            softcap=rule.softcap,
            alibi_slopes=rule.alibi_slopes,
        )
        return out, lse

    def backward(
        self, grad_out: Tensor, done: Forward, segments: Segments, rule: ScoreRule
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of ``forward`` for q, k and v."""
        q, k, v, out, lse = done
        grad_q, grad_k, grad_v = _empty_gradients(q, k, v)
        _flash2()._flash_attn_varlen_backward(
            dout=grad_out,
            q=q,
            k=k,
            v=v,
            out=out,
            softmax_lse=lse,
            dq=grad_q,
            dk=grad_k,
            dv=grad_v,
            cu_seqlens_q=segments.cu_seqlens,
            cu_seqlens_k=segments.cu_seqlens,
            max_seqlen_q=_longest(segments),
            max_seqlen_k=_longest(segments),
            dropout_p=0.0,
            softmax_scale=rule.scale,
            causal=rule.causal,
            window_size_left=_window(rule)[0],
            window_size_right=_window(rule)[1],
            softcap=rule.softcap,
            alibi_slopes=rule.alibi_slopes,
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )
        return grad_q, grad_k, grad_v


class Flash3:
    """flash-attn 3 on Hopper: GQA, window and soft cap; no ALiBi."""

    def refusal(self, needs: AttentionNeeds) -> str | None:
        """Why this backend cannot serve ``needs``; None when it can."""
        if needs.alibi:
            return "flash-attn 3 has no ALiBi"
        return _common_refusal(needs, oldest=9, newest=9) or _import("flash_attn_interface")

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, segments: Segments, rule: ScoreRule
    ) -> tuple[Tensor, Tensor]:
        """Output ``[T, H, D]`` and log-sum-exp ``[H, T]``."""
        out, lse, *_ = torch.ops.flash_attn_3.fwd(
            q=q,
            k=k,
            v=v,
            cu_seqlens_q=segments.cu_seqlens,
            cu_seqlens_k=segments.cu_seqlens,
            max_seqlen_q=_longest(segments),
            max_seqlen_k=_longest(segments),
            softmax_scale=rule.scale,
            is_causal=rule.causal and not rule.window,
            window_size_left=_window(rule)[0],
            window_size_right=_window(rule)[1],
            softcap=rule.softcap,
            num_splits=1,
            **_FLASH3_UNUSED,
        )
        return out, lse

    def backward(
        self, grad_out: Tensor, done: Forward, segments: Segments, rule: ScoreRule
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of ``forward`` for q, k and v."""
        q, k, v, out, lse = done
        grad_q, grad_k, grad_v = _empty_gradients(q, k, v)
        torch.ops.flash_attn_3.bwd(
            dout=grad_out,
            q=q,
            k=k,
            v=v,
            out=out,
            softmax_lse=lse,
            dq=grad_q,
            dk=grad_k,
            dv=grad_v,
            cu_seqlens_q=segments.cu_seqlens,
            cu_seqlens_k=segments.cu_seqlens,
            seqused_q=None,
            seqused_k=None,
            max_seqlen_q=_longest(segments),
            max_seqlen_k=_longest(segments),
            softmax_scale=rule.scale,
            is_causal=rule.causal and not rule.window,
            window_size_left=_window(rule)[0],
            window_size_right=_window(rule)[1],
            softcap=rule.softcap,
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )
        return grad_q, grad_k, grad_v


class TorchFlash:
    """The kernels of ``torch.nn.attention.varlen``: GQA and window; no soft cap, no ALiBi."""

    def refusal(self, needs: AttentionNeeds) -> str | None:
        """Why this backend cannot serve ``needs``; None when it can."""
        if needs.softcap:
            return "PyTorch's flash attention is built without the soft cap"
        if needs.alibi:
            return "PyTorch's flash attention is built without ALiBi"
        # The module came with the first release whose varlen backward is tested (2.10).
        return _common_refusal(needs, oldest=8, newest=None) or _import("torch.nn.attention.varlen")

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, segments: Segments, rule: ScoreRule
    ) -> tuple[Tensor, Tensor]:
        """Output ``[T, H, D]`` and log-sum-exp ``[H, T]``."""
        out, lse, _, _, _ = torch.ops.aten._flash_attention_forward(
            q,
            k,
            v,
            segments.cu_seqlens,
            segments.cu_seqlens,
            _longest(segments),
            _longest(segments),
            0.0,
            rule.causal and not rule.window,
            False,
            scale=rule.scale,
            window_size_left=_window(rule)[0],
            window_size_right=_window(rule)[1],
        )
        return out, lse

    def backward(
        self, grad_out: Tensor, done: Forward, segments: Segments, rule: ScoreRule
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of ``forward`` for q, k and v."""
        q, k, v, out, lse = done
        no_dropout = torch.zeros(2, dtype=torch.uint64, device=q.device)
        grads = torch.ops.aten._flash_attention_backward(
            grad_out,
            q,
            k,
            v,
            out,
            lse,
            segments.cu_seqlens,
            segments.cu_seqlens,
            _longest(segments),
            _longest(segments),
            0.0,
            rule.causal and not rule.window,
            no_dropout,
            torch.empty(0, device=q.device),
            scale=rule.scale,
            window_size_left=_window(rule)[0],
            window_size_right=_window(rule)[1],
        )
        return grads[0], grads[1], grads[2]


def _flash2() -> Any:
    return importlib.import_module("flash_attn.flash_attn_interface")


def _empty_gradients(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Contiguous, whatever the strides of q, k and v."""
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
