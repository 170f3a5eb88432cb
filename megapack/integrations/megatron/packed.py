"""From rows with cu_seqlens to what Megatron's attention reads: PackedSeqParams, one flat row.

Megatron calls the format "thd": the micro batch is one row ``(1, tokens)``, ``cu_seqlens`` is 1-D
int32, and attention and RoPE restart at every boundary. With context parallelism each segment is
cut into ``2 * cp_size`` chunks of which a rank holds two, one early and one late, so that causal
work is equal; that is why segments are padded to a multiple of ``2 * cp_size``.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from megapack import planning

__all__ = ["context_parallel_indices", "flatten_rows", "to_packed_seq_params"]

ROW_KEYS = ("tokens", "labels", "loss_mask", "position_ids")


def flatten_rows(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Join the rows of a micro batch into one.

    Args:
        batch: what ``default_collate`` makes of dataset rows: tokens, labels, position_ids int64
            and loss_mask float32 ``(mbs, row)``, cu_seqlens int32 ``(mbs, n)`` (each row's tail
            may repeat its last value), max_seqlen int32 ``(mbs,)``, and, when segments are
            aligned, cu_seqlens_padded like cu_seqlens. CPU tensors: lengths are read.

    Returns:
        The four row keys ``(1, mbs * row)``, cu_seqlens (and cu_seqlens_padded) 1-D int32
        without repeated values, max_seqlen 0-d int32.
    """
    flat = {key: batch[key].reshape(1, -1) for key in ROW_KEYS}
    flat["cu_seqlens"] = _join(batch["cu_seqlens"])
    if batch.get("cu_seqlens_padded") is not None:
        flat["cu_seqlens_padded"] = _join(batch["cu_seqlens_padded"])
    flat["max_seqlen"] = batch["max_seqlen"].max()
    return flat


def _join(cu_seqlens: Tensor) -> Tensor:
    """``(mbs, n)`` boundaries that start at 0 in every row -> one 1-D list of boundaries."""
    lengths = cu_seqlens.diff(dim=-1).flatten()
    lengths = lengths[lengths > 0]  # the repeated tail; a segment is never empty
    zero = lengths.new_zeros(1)
    return torch.cat([zero, lengths.cumsum(0)]).to(torch.int32)


def to_packed_seq_params(
    cu_seqlens: Tensor,
    max_seqlen: int | Tensor,
    cu_seqlens_padded: Tensor | None = None,
    *,
    total_tokens: int | None = None,
) -> PackedSeqParams:
    """The "thd" parameters of megatron-core for one flat row.

    Args:
        cu_seqlens: 1-D int32, or ``(1, n)`` as collated; on the device of the attention.
        max_seqlen: the longest segment in tokens. A tensor is read, so pass it from the CPU.
        cu_seqlens_padded: boundaries with the alignment padding; None where there is none.
        total_tokens: of the whole row. From 0.17 on Megatron makes of it the ``seq_idx`` by which
            Mamba layers tell segments apart; older ones have no place for it.

    Returns:
        PackedSeqParams. RoPE and attention restart at ``cu_seqlens_padded`` where given.

    Raises:
        ValueError: more than one row, or not int32.
    """
    boundaries = _one_dimensional("cu_seqlens", cu_seqlens)
    padded = None
    if cu_seqlens_padded is not None:
        padded = _one_dimensional("cu_seqlens_padded", cu_seqlens_padded)
        if padded.numel() != boundaries.numel():
            raise ValueError(
                f"cu_seqlens has {boundaries.numel()} entries and cu_seqlens_padded "
                f"{padded.numel()}; they describe the same segments"
            )
    longest = int(max_seqlen)
    known = "total_tokens" in PackedSeqParams.__dataclass_fields__
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=boundaries,
        cu_seqlens_kv=boundaries,
        cu_seqlens_q_padded=padded,
        cu_seqlens_kv_padded=padded,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        **({"total_tokens": total_tokens} if known else {}),
    )


def _one_dimensional(name: str, boundaries: Tensor) -> Tensor:
    if boundaries.dim() == 2 and boundaries.shape[0] == 1:
        boundaries = boundaries[0]
    if boundaries.dim() != 1:
        raise ValueError(
            f"{name} has shape {tuple(boundaries.shape)}; one flat row has a 1-D list of "
            "boundaries (flatten_rows joins the rows of a micro batch)"
        )
    if boundaries.dtype != torch.int32:
        raise ValueError(f"{name} is {boundaries.dtype}; attention kernels read int32")
    return boundaries


def context_parallel_indices(cu_seqlens: Tensor, cp_size: int, cp_rank: int) -> Tensor:
    """``megapack.planning.context_parallel_indices`` of tensors on the CPU."""
    return torch.from_numpy(planning.context_parallel_indices(cu_seqlens.numpy(), cp_size, cp_rank))
