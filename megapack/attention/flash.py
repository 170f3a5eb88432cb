"""CUDA attention kernels that take ``cu_seqlens``: flash-attn 2, flash-attn 3, PyTorch's own.

Each pair of functions translates a ``ScoreRule`` into the arguments of one kernel. A window of w
positions is ``(w - 1, 0)`` in all three.

    kernel       package                    compute capability    soft cap    ALiBi
    flash3       flash_attn_interface       9.x (Hopper)          yes         no
    flash2       flash-attn 2.8 and newer   8.x and newer         yes         yes
    torch        torch 2.10 and newer       8.x and newer         no          no

All take float16 and bfloat16, grouped heads, windows, and a head_dim of 8 to 256. All align causal
masks, windows and ALiBi to the ends of queries and keys, as paths of trees require.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import Any

import torch
from torch import Tensor

from megapack.attention.problem import AttentionNeeds, Backend, Forward, ScoreRule, TreeSegments


def _refusal(needs: AttentionNeeds, module: str, oldest: int, newest: int | None) -> str | None:
    """Return why the kernel cannot be used; ``oldest`` and ``newest`` bound the device's major
    compute capability."""
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
    except (ImportError, OSError) as error:  # OSError: the wheel was built for another CUDA version
        return f"{module} cannot be imported ({error})"
    return None


def _refusal2(needs: AttentionNeeds) -> str | None:
    if problem := _refusal(needs, "flash_attn.flash_attn_interface", 8, None):
        return problem
    version = importlib.metadata.version("flash-attn")
    if tuple(int(number) for number in version.split(".")[:2]) >= (2, 8):
        return None
    return f"flash-attn {version} is older than 2.8"  # older versions take other arguments


def _longest(segments: TreeSegments) -> tuple[int, int]:
    # With max_seqlen 1 the kernels switch to decoding: one query per entry of cu_seqlens.
    return max(2, segments.max_seqlen_q), max(2, segments.max_seqlen_k)


def _window(rule: ScoreRule) -> dict[str, int]:
    left, right = (rule.window - 1, 0) if rule.window else (-1, 0 if rule.causal else -1)
    return {"window_size_left": left, "window_size_right": right}


def _arguments(segments: TreeSegments, rule: ScoreRule) -> dict[str, Any]:
    """Return the arguments that have one name in flash-attn 2 and 3, forward and backward."""
    longest_q, longest_k = _longest(segments)
    return {
        "cu_seqlens_q": segments.cu_seqlens_q,
        "cu_seqlens_k": segments.cu_seqlens_k,
        "max_seqlen_q": longest_q,
        "max_seqlen_k": longest_k,
        "softmax_scale": rule.scale,
        "softcap": rule.softcap,
        **_window(rule),
    }


def _gradients(grad_out: Tensor, done: Forward) -> tuple[dict[str, Any], tuple[Tensor, ...]]:
    """Return the tensor arguments of a backward kernel, and the gradients that it fills."""
    q, k, v, out, lse = done
    # Contiguous even if q, k and v are not: the kernels require it.
    gradients = q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
    inputs = {"dout": grad_out, "q": q, "k": k, "v": v, "out": out, "softmax_lse": lse}
    deterministic = torch.are_deterministic_algorithms_enabled()
    outputs = dict(zip(("dq", "dk", "dv"), gradients, strict=True))
    return {**inputs, **outputs, "deterministic": deterministic}, gradients


def _forward2(q: Tensor, k: Tensor, v: Tensor, segments: TreeSegments, rule: ScoreRule) -> Any:
    functions = importlib.import_module("flash_attn.flash_attn_interface")
    options = {"causal": rule.causal, "alibi_slopes": rule.alibi_slopes, "dropout_p": 0.0}
    out, lse, _, _ = functions._flash_attn_varlen_forward(
        q=q, k=k, v=v, **options, **_arguments(segments, rule)
    )
    return out, lse


def _backward2(grad_out: Tensor, done: Forward, segments: TreeSegments, rule: ScoreRule) -> Any:
    functions = importlib.import_module("flash_attn.flash_attn_interface")
    options = {"causal": rule.causal, "alibi_slopes": rule.alibi_slopes, "dropout_p": 0.0}
    tensors, gradients = _gradients(grad_out, done)
    functions._flash_attn_varlen_backward(**tensors, **options, **_arguments(segments, rule))
    return gradients


# Older builds of flash-attn 3 have no defaults for these arguments.
_UNUSED3 = dict.fromkeys(
    (
        *("k_new", "v_new", "q_v", "out", "cu_seqlens_k_new", "seqused_q", "seqused_k"),
        *("page_table", "kv_batch_idx", "leftpad_k", "rotary_cos", "rotary_sin", "seqlens_rotary"),
        *("q_descale", "k_descale", "v_descale"),
    )
)


def _forward3(q: Tensor, k: Tensor, v: Tensor, segments: TreeSegments, rule: ScoreRule) -> Any:
    options = {"is_causal": rule.causal and not rule.window, "num_splits": 1, **_UNUSED3}
    out, lse, *_ = torch.ops.flash_attn_3.fwd(
        q=q, k=k, v=v, **options, **_arguments(segments, rule)
    )
    return out, lse


def _backward3(grad_out: Tensor, done: Forward, segments: TreeSegments, rule: ScoreRule) -> Any:
    options = {"is_causal": rule.causal and not rule.window, "seqused_q": None, "seqused_k": None}
    tensors, gradients = _gradients(grad_out, done)
    torch.ops.flash_attn_3.bwd(**tensors, **options, **_arguments(segments, rule))
    return gradients


def _positional(segments: TreeSegments) -> tuple[Any, ...]:
    """Return cu_seqlens and max_seqlen of queries and keys, and a dropout of 0."""
    return segments.cu_seqlens_q, segments.cu_seqlens_k, *_longest(segments), 0.0


# These functions call the operators that torch.nn.attention.varlen calls, because its Python
# signature changed in 2.10, 2.11 and 2.12. activate_flash_attention_impl also redirects these
# operators.
def _forward_torch(q: Tensor, k: Tensor, v: Tensor, segments: TreeSegments, rule: ScoreRule) -> Any:
    out, lse, _, _, _ = torch.ops.aten._flash_attention_forward(
        *(q, k, v, *_positional(segments), rule.causal and not rule.window, False),
        scale=rule.scale,
        **_window(rule),
    )
    return out, lse


def _backward_torch(
    grad_out: Tensor, done: Forward, segments: TreeSegments, rule: ScoreRule
) -> Any:
    no_dropout = torch.zeros(2, dtype=torch.uint64, device=grad_out.device)
    unused = torch.empty(0, device=grad_out.device)
    causal = rule.causal and not rule.window
    return torch.ops.aten._flash_attention_backward(
        *(grad_out, *done, *_positional(segments), causal, no_dropout, unused),
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
# torch 2.10 introduced the module; backward passes of older varlen kernels are untested.
TORCH = Backend(
    name="torch",
    title="PyTorch's flash attention",
    forward=_forward_torch,
    backward=_backward_torch,
    refusal=lambda needs: _refusal(needs, "torch.nn.attention.varlen", 8, None),
    softcap=False,
    alibi=False,
)
