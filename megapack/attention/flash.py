"""The CUDA kernels that read ``cu_seqlens`` themselves: flash-attn 2, flash-attn 3, PyTorch's own.

Each pair of functions maps our rule to the kernel's arguments and nothing else; what the kernels
call alike is told once (``_arguments``). A window of w positions is ``(w - 1, 0)`` in all three.
PyTorch's bundled kernels are called below ``torch.nn.attention.varlen``, whose Python signature
changed in 2.10, 2.11 and 2.12 while the operators it calls stayed the same;
``activate_flash_attention_impl`` therefore reroutes them too.

    kernel       package                    compute capability    soft cap    ALiBi
    flash3       flash_attn_interface       9.x (Hopper)          yes         no
    flash2       flash-attn 2.8 and newer   8.x and newer         yes         yes
    torch        torch 2.10 and newer       8.x and newer         no          no

All take float16 and bfloat16, grouped heads, windows, and a head_dim of 8 to 256.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import Any

import torch
from torch import Tensor

from megapack.attention.problem import AttentionNeeds, Backend, Forward, ScoreRule, Segments


def _refusal(needs: AttentionNeeds, module: str, oldest: int, newest: int | None) -> str | None:
    """Why a kernel refuses, or that its ``module`` is missing; capabilities are major ones."""
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
    try:
        importlib.import_module(module)
    except (ImportError, OSError) as error:  # OSError: a wheel built for another CUDA
        return f"{module} cannot be imported ({error})"
    return None


def _refusal2(needs: AttentionNeeds) -> str | None:
    if problem := _refusal(needs, "flash_attn.flash_attn_interface", 8, None):
        return problem
    found = importlib.metadata.version("flash-attn")
    if tuple(int(number) for number in found.split(".")[:2]) >= (2, 8):
        return None
    return f"flash-attn {found} is older than 2.8"  # has the module, and takes other arguments


def _longest(segments: Segments) -> int:
    """At least 2: of length 1 the kernels make decoding, one query per *entry* of cu_seqlens."""
    return max(2, segments.max_seqlen)


def _window(rule: ScoreRule) -> dict[str, int]:
    left, right = (rule.window - 1, 0) if rule.window else (-1, 0 if rule.causal else -1)
    return {"window_size_left": left, "window_size_right": right}


def _arguments(segments: Segments, rule: ScoreRule) -> dict[str, Any]:
    """Arguments that flash-attn 2 and 3 name alike, forward and backward."""
    return {
        "cu_seqlens_q": segments.cu_seqlens,
        "cu_seqlens_k": segments.cu_seqlens,
        "max_seqlen_q": _longest(segments),
        "max_seqlen_k": _longest(segments),
        "softmax_scale": rule.scale,
        "softcap": rule.softcap,
        **_window(rule),
    }


def _gradients(grad_out: Tensor, done: Forward) -> tuple[dict[str, Any], tuple[Tensor, ...]]:
    """The tensors of a backward, and those it fills: contiguous, whatever q, k and v are."""
    q, k, v, out, lse = done
    filled = q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
    given = {"dout": grad_out, "q": q, "k": k, "v": v, "out": out, "softmax_lse": lse}
    deterministic = torch.are_deterministic_algorithms_enabled()
    named = dict(zip(("dq", "dk", "dv"), filled, strict=True))
    return {**given, **named, "deterministic": deterministic}, filled


def _forward2(q: Tensor, k: Tensor, v: Tensor, segments: Segments, rule: ScoreRule) -> Any:
    functions = importlib.import_module("flash_attn.flash_attn_interface")
    own = {"causal": rule.causal, "alibi_slopes": rule.alibi_slopes, "dropout_p": 0.0}
    out, lse, _, _ = functions._flash_attn_varlen_forward(
        q=q, k=k, v=v, **own, **_arguments(segments, rule)
    )
    return out, lse


def _backward2(grad_out: Tensor, done: Forward, segments: Segments, rule: ScoreRule) -> Any:
    functions = importlib.import_module("flash_attn.flash_attn_interface")
    own = {"causal": rule.causal, "alibi_slopes": rule.alibi_slopes, "dropout_p": 0.0}
    tensors, filled = _gradients(grad_out, done)
    functions._flash_attn_varlen_backward(**tensors, **own, **_arguments(segments, rule))
    return filled


# Named, because older builds of flash-attn 3 give these arguments no default.
_UNUSED3 = dict.fromkeys(
    (
        *("k_new", "v_new", "q_v", "out", "cu_seqlens_k_new", "seqused_q", "seqused_k"),
        *("page_table", "kv_batch_idx", "leftpad_k", "rotary_cos", "rotary_sin", "seqlens_rotary"),
        *("q_descale", "k_descale", "v_descale"),
    )
)


def _forward3(q: Tensor, k: Tensor, v: Tensor, segments: Segments, rule: ScoreRule) -> Any:
    own = {"is_causal": rule.causal and not rule.window, "num_splits": 1, **_UNUSED3}
    out, lse, *_ = torch.ops.flash_attn_3.fwd(q=q, k=k, v=v, **own, **_arguments(segments, rule))
    return out, lse


def _backward3(grad_out: Tensor, done: Forward, segments: Segments, rule: ScoreRule) -> Any:
    own = {"is_causal": rule.causal and not rule.window, "seqused_q": None, "seqused_k": None}
    tensors, filled = _gradients(grad_out, done)
    torch.ops.flash_attn_3.bwd(**tensors, **own, **_arguments(segments, rule))
    return filled


def _places(segments: Segments) -> tuple[Any, ...]:
    """cu_seqlens and the longest segment of queries and keys, and no dropout."""
    ends, longest = segments.cu_seqlens, _longest(segments)
    return ends, ends, longest, longest, 0.0


def _forward_torch(q: Tensor, k: Tensor, v: Tensor, segments: Segments, rule: ScoreRule) -> Any:
    out, lse, _, _, _ = torch.ops.aten._flash_attention_forward(
        *(q, k, v, *_places(segments), rule.causal and not rule.window, False),
        scale=rule.scale,
        **_window(rule),
    )
    return out, lse


def _backward_torch(grad_out: Tensor, done: Forward, segments: Segments, rule: ScoreRule) -> Any:
    no_dropout = torch.zeros(2, dtype=torch.uint64, device=grad_out.device)
    unused = torch.empty(0, device=grad_out.device)
    causal = rule.causal and not rule.window
    return torch.ops.aten._flash_attention_backward(
        *(grad_out, *done, *_places(segments), causal, no_dropout, unused),
        scale=rule.scale,
        **_window(rule),
    )


FLASH3 = Backend(
    name="flash3",
    title="flash-attn 3",
    forward=_forward3,
    backward=_backward3,
    refusal=lambda needs: _refusal(needs, "flash_attn_interface", 9, 9),
    alibi=False,
)
FLASH2 = Backend(
    name="flash2",
    title="flash-attn 2",
    forward=_forward2,
    backward=_backward2,
    refusal=_refusal2,
)
# The module came with the first release whose varlen backward is tested (2.10).
TORCH = Backend(
    name="torch",
    title="PyTorch's flash attention",
    forward=_forward_torch,
    backward=_backward_torch,
    refusal=lambda needs: _refusal(needs, "torch.nn.attention.varlen", 8, None),
    softcap=False,
    alibi=False,
)
