"""Boundaries for hosts that have no argument for them: GPT-NeoX and Megatron-DeepSpeed.

Their batches carry ``text`` alone, and their attention is one causal row. Three small wraps close
the gap: ``broadcast_data`` carries boundaries, positions and loss mask beside ``text`` to all
tensor-parallel ranks; ``get_ltor_masks_and_position_ids`` returns that mask and those positions;
and flash-attn's functions, called for the row, are answered segment by segment.

What lies between the calls is the micro batch in flight, so forward, recomputation and backward of
one micro batch must be over before the next is read. That is so without pipeline parallelism and
in a pipeline of one stage; ``require_one_stage`` refuses the others.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megapack.errors import ConfigError

__all__ = [
    "SIDE_KEYS",
    "CurrentBatch",
    "clear",
    "current",
    "require_one_stage",
    "side_channel",
    "wrap_broadcast_data",
    "wrap_flash_attn_func",
    "wrap_flash_attn_varlen_func",
    "wrap_masks_and_positions",
]

# Beside "text" in every sample, all int64 (the one dtype of broadcast_data).
BOUNDARIES, POSITIONS, MASK = "megapack_cu_seqlens", "megapack_position_ids", "megapack_loss_mask"
SIDE_KEYS = (BOUNDARIES, POSITIONS, MASK)


@dataclass
class CurrentBatch:
    """What the host's calls for one micro batch have no argument for."""

    cu_seqlens: Tensor
    """int32 (segments + 1,), of all rows one behind the other, on the device."""
    max_seqlen: int
    position_ids: Tensor
    """int64 (mbs, row)."""
    loss_mask: Tensor
    """float32 (mbs, row)."""
    attended: bool = False
    """Whether attention was handed the boundaries."""

    @property
    def num_tokens(self) -> int:
        return self.position_ids.numel()


_current: CurrentBatch | None = None


def current() -> CurrentBatch | None:
    """The micro batch that was read last, None before the first."""
    return _current


def clear() -> None:
    """Forget the micro batch, for generation or anything else that is not a packed row."""
    _set(None)


def _set(batch: CurrentBatch | None) -> None:
    global _current  # noqa: PLW0603 - the host gives us no object to keep it in
    _current = batch


def side_channel(row: Mapping[str, Tensor], entries: int) -> dict[str, Tensor]:
    """What a sample carries beside ``text``.

    Args:
        row: cu_seqlens, position_ids and loss_mask of one row.
        entries: boundaries are filled up to this many with their last value, so that rows stack.
    """
    cu_seqlens = row["cu_seqlens"].long()
    fill = cu_seqlens[-1:].expand(entries - cu_seqlens.numel())
    return {
        BOUNDARIES: torch.cat([cu_seqlens, fill]),
        POSITIONS: row["position_ids"],
        MASK: row["loss_mask"].long(),
    }


def wrap_broadcast_data(stock: Callable[..., Any]) -> Callable[..., Any]:
    """``broadcast_data(keys, data, datatype)`` that brings the side channel along with ``text``.

    It raises ConfigError where no attention asked for the boundaries of the micro batch before, and
    where a micro batch has no label.
    """

    @functools.wraps(stock)
    def broadcast_data(keys: Sequence[str], data: Any, datatype: torch.dtype) -> Any:
        if "text" not in keys:
            return stock(keys, data, datatype)
        if _current is not None and not _current.attended:
            raise ConfigError(
                "the model's attention was not handed the boundaries of the last micro batch, so "
                "its documents saw each other: switch on flash attention in every layer, and call "
                "install() before the model's modules are imported; or install(varlen=False)"
            )
        received = stock([*keys, *SIDE_KEYS], data, datatype)
        if not received[MASK].any():
            raise ConfigError(
                "a micro batch has no label (a stage excludes its documents, or they have one "
                "token each): the host divides its loss by their number, and NaN would reach every "
                "weight; take larger micro batches, or leave those documents out when packing"
            )
        boundaries = received[BOUNDARIES]
        lengths = boundaries.diff(dim=1).flatten()
        lengths = lengths[lengths > 0]
        cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
        _set(
            CurrentBatch(
                cu_seqlens=cu_seqlens,
                max_seqlen=int(lengths.max()),
                position_ids=received[POSITIONS],
                loss_mask=received[MASK].float(),
            )
        )
        return received

    return broadcast_data


def wrap_masks_and_positions(stock: Callable[..., Any]) -> Callable[..., Any]:
    """``get_ltor_masks_and_position_ids`` with our loss mask (times theirs) and positions."""

    @functools.wraps(stock)
    def get_ltor_masks_and_position_ids(*args: Any, **kwargs: Any) -> Any:
        mask, loss_mask, position_ids = stock(*args, **kwargs)
        batch = _current
        if batch is None:
            return mask, loss_mask, position_ids
        if position_ids.shape != batch.position_ids.shape:
            raise ConfigError(
                f"the host cut a micro batch of {tuple(batch.position_ids.shape)} to "
                f"{tuple(position_ids.shape)}: packed rows and a sequence length curriculum of "
                "the host exclude each other (megapack's schedule has its own: order in the "
                "manifest)"
            )
        return mask, loss_mask * batch.loss_mask, batch.position_ids

    return get_ltor_masks_and_position_ids


def wrap_flash_attn_func(
    stock: Callable[..., Tensor], varlen: Callable[..., Tensor]
) -> Callable[..., Tensor]:
    """``flash_attn_func`` of a row, answered by ``flash_attn_varlen_func`` of its segments."""

    @functools.wraps(stock)
    def flash_attn_func(
        q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, *args: Any, **kwargs: Any
    ) -> Tensor:
        batch = _current
        if batch is None:
            return stock(q, k, v, dropout_p, *args, **kwargs)
        _check_row(q.shape[0] * q.shape[1], batch)
        flat = [tensor.flatten(0, 1) for tensor in (q, k, v)]
        bounds = (batch.cu_seqlens, batch.cu_seqlens, batch.max_seqlen, batch.max_seqlen)
        return varlen(*flat, *bounds, dropout_p, *args, **kwargs).view(*q.shape[:3], v.shape[-1])

    return flash_attn_func


def wrap_flash_attn_varlen_func(stock: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``flash_attn_varlen_func`` called with one boundary per row, with ours instead."""

    @functools.wraps(stock)
    def flash_attn_varlen_func(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        batch = _current
        if batch is not None:
            _check_row(q.shape[0], batch)
            cu_seqlens_q = cu_seqlens_k = batch.cu_seqlens
            max_seqlen_q = max_seqlen_k = batch.max_seqlen
        return stock(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *args, **kwargs
        )

    return flash_attn_varlen_func


def _check_row(num_tokens: int, batch: CurrentBatch) -> None:
    batch.attended = True
    if num_tokens != batch.num_tokens:
        raise ConfigError(
            f"attention over {num_tokens} tokens, but the micro batch in flight has "
            f"{batch.num_tokens}: for generation call megapack.integrations.segments.clear() first"
        )


def require_one_stage(pipeline_parallel_size: int) -> None:
    """Refuse pipelines in which several micro batches are in flight at once.

    Raises:
        ConfigError: more than one stage.
    """
    if pipeline_parallel_size > 1:
        raise ConfigError(
            f"pipeline_parallel_size is {pipeline_parallel_size}; segment-wise attention works "
            "with one stage (several micro batches are in flight otherwise). Use tensor "
            "parallelism, or varlen=False for rows without boundaries"
        )
