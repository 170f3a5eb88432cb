"""Segments for models without varlen attention: ids per token, a dense mask, FlexAttention.

All of them follow from cu_seqlens alone and run on its device; none loops over segments.
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["block_diagonal_mask", "flex_block_mask", "segment_ids"]


def segment_ids(cu_seqlens: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """Number of the segment that every token lies in.

    Args:
        cu_seqlens: int32 (entries,), or (rows, entries) counted from each row's begin; fill at the
            end is harmless.
        num_tokens: tokens of the stream, or of a row.

    Returns:
        int32 (num_tokens,) or (rows, num_tokens), counted from 0 in every row.
    """
    positions = torch.arange(num_tokens, dtype=torch.int32, device=cu_seqlens.device)
    ends = cu_seqlens[..., 1:].contiguous()
    positions = positions.expand(*ends.shape[:-1], num_tokens).contiguous()
    return torch.searchsorted(ends, positions, right=True, out_int32=True)


def block_diagonal_mask(segments: torch.Tensor, *, causal: bool = True) -> torch.Tensor:
    """Dense mask in which a token sees its own segment.

    Args:
        segments: of ``segment_ids``, (tokens,) or (rows, tokens).
        causal: and only what stands before it, itself included.

    Returns:
        bool (rows, 1, tokens, tokens), True where attention is allowed (as torch's
        scaled_dot_product_attention has it; Megatron's masks are the inverse). Quadratic in
        memory: for short rows and for checking other backends.
    """
    rows = segments if segments.dim() == 2 else segments[None]
    mask = rows[:, :, None] == rows[:, None, :]
    if causal:
        mask = mask.tril()
    return mask[:, None]


def flex_block_mask(segments: torch.Tensor, *, causal: bool = True, **options: Any) -> Any:
    """The same as a BlockMask of ``torch.nn.attention.flex_attention``.

    Args:
        segments: of ``segment_ids``, (tokens,) or (rows, tokens).
        causal: as above.
        **options: of ``create_block_mask``, such as ``BLOCK_SIZE``.
    """
    from torch.nn.attention.flex_attention import create_block_mask  # noqa: PLC0415 (torch >= 2.5)

    rows = segments if segments.dim() == 2 else segments[None]

    def visible(b: Any, h: Any, q: Any, k: Any) -> Any:  # noqa: ARG001
        same = rows[b, q] == rows[b, k]
        return same & (q >= k) if causal else same

    tokens = rows.shape[1]
    return create_block_mask(
        visible, rows.shape[0], None, tokens, tokens, device=str(rows.device), **options
    )
