"""get_batch and forward_step for megatron-core 0.16 and 0.17, whose own varlen path is broken.

The bugs of that path: cu_seqlens stays ``(1, n)``; tensor-parallel ranks enter different
collectives; cu_seqlens_padded never reaches context parallelism; middle pipeline stages get no
boundaries. From 0.18 on, Megatron's own get_batch reads the dataset's boundaries.

On every pipeline stage tensor-parallel rank 0 reads its own copy of the data (``install`` arranges
that) and broadcasts each micro batch once, so no stage sends boundaries to the next.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from megapack.data.batch import column_names
from megapack.errors import ConfigError
from megapack.integrations.dialects import join_ends
from megapack.integrations.hosts.megatron.host import device
from megapack.integrations.rows.dataset import ROW_KEYS
from megapack.planning import context_parallel_indices

# ---- From rows with cu_seqlens to the input of Megatron's attention: PackedSeqParams, one flat row
# In Megatron's format "thd" the micro batch is one row ``(1, tokens)``, ``cu_seqlens`` is 1-D
# int32, and attention and RoPE restart at every boundary. Context parallelism cuts each segment
# into ``2 * cp_size`` chunks and assigns each rank an early and a late one, so that causal work is
# equal; therefore segments are padded to a multiple of ``2 * cp_size``.


def flatten_rows(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Join the collated dataset rows of a micro batch (on the CPU) into one.

    Args:
        batch: tokens, labels, position_ids int64 and loss_mask float32 ``(mbs, row)``, cu_seqlens
            int32 ``(mbs, n)`` (the last value of a row may repeat), max_seqlen int32 ``(mbs,)``,
            and perhaps cu_seqlens_padded like cu_seqlens.

    Returns:
        The four row keys ``(1, mbs * row)``, columns ``(1, mbs * row, ...)``, cu_seqlens (and
            cu_seqlens_padded) 1-D int32 without repeated values, max_seqlen 0-d int32.
    """
    keys = (*ROW_KEYS, *column_names(batch))
    flat = {key: batch[key].flatten(0, 1)[None] for key in keys}
    for key in ("cu_seqlens", "cu_seqlens_padded"):
        if batch.get(key) is not None:
            flat[key] = join_ends(batch[key])
    flat["max_seqlen"] = batch["max_seqlen"].max()
    return flat


def to_packed_seq_params(
    cu_seqlens: Tensor,
    max_seqlen: int | Tensor,
    cu_seqlens_padded: Tensor | None = None,
    *,
    total_tokens: int | None = None,
) -> PackedSeqParams:
    """Return the "thd" parameters of megatron-core for one flat row. RoPE and attention restart at
    ``cu_seqlens_padded`` if given. Raises ValueError for several rows, or boundaries not int32.

    Args:
        cu_seqlens: 1-D int32, or ``(1, n)`` as collated; on the device of the attention.
        max_seqlen: length of the longest segment in tokens; a tensor should be on the CPU.
        cu_seqlens_padded: boundaries with alignment padding; None if segments are not aligned.
        total_tokens: tokens of the row. From 0.17 on, Megatron computes ``seq_idx`` from it, which
            Mamba layers use to separate segments; ignored for older releases.
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


Batch = tuple[
    Tensor | None, Tensor | None, Tensor | None, None, Tensor | None, PackedSeqParams | None
]


def get_batch(data_iterator: Iterator[Any] | None, vp_stage: int | None = None) -> Batch:
    """Return the next micro batch of this rank, in the order in which pretrain_gpt.py unpacks it:
    tokens, labels, loss_mask, attention_mask (None), position_ids, packed_seq_params.

    The tensors are ``(1, mbs * row / cp_size)`` on the rank's device, and None on pipeline stages
    that neither embed nor compute the loss. ``data_iterator`` yields collated dataset rows on
    tensor-parallel rank 0 of every pipeline stage; it may be None on other ranks. Raises
    ConfigError if rank 0 has no data, or if a micro batch has several rows with pipeline
    parallelism, whose buffers are ``(row, mbs)``.
    """
    rows = None
    if parallel_state.get_tensor_model_parallel_rank() == 0:
        if data_iterator is None:
            raise ConfigError(
                "tensor-parallel rank 0 of this pipeline stage has no data; all stages read packed "
                "rows: build the dataset where get_tensor_model_parallel_rank() is 0"
            )
        collated = next(data_iterator)
        num_rows = collated["tokens"].shape[0]
        if num_rows > 1 and parallel_state.get_pipeline_model_parallel_world_size() > 1:
            raise ConfigError(
                f"micro_batch_size={num_rows} with pipeline parallelism: packed rows need "
                "--micro-batch-size 1 here (use longer rows for larger micro batches)"
            )
        carried = column_names(collated)
        if carried:
            raise ConfigError(
                f"the data has columns {', '.join(carried)}, and Megatron's get_batch returns no "
                "further values: read them in a forward step of your own (flatten_rows of what "
                "data_iterator yields), or leave columns out of the manifest"
            )
        rows = flatten_rows(collated)
    batch = _broadcast(rows)
    # Transformer Engine needs the aligned boundaries in both places (as Megatron's main does);
    # under a causal mask no token attends to the padding after its segment.
    boundaries = batch.get("cu_seqlens_padded", batch["cu_seqlens"])
    params = to_packed_seq_params(
        boundaries,
        batch["max_seqlen"],
        batch.get("cu_seqlens_padded"),
        total_tokens=batch["tokens"].numel(),
    )
    if not _embeds_or_computes_loss(vp_stage):
        return None, None, None, None, None, params
    cp_size = parallel_state.get_context_parallel_world_size()
    if cp_size > 1:
        cp_rank = parallel_state.get_context_parallel_rank()
        indices = context_parallel_indices(boundaries.cpu().numpy(), cp_size, cp_rank)
        held = torch.from_numpy(indices).to(batch["tokens"].device, non_blocking=True)
        batch = {key: batch[key].index_select(1, held) for key in ROW_KEYS}
    tokens, labels, loss_mask, position_ids = (batch[key] for key in ROW_KEYS)
    return tokens, labels, loss_mask, None, position_ids, params


def _broadcast(rows: dict[str, Tensor] | None) -> dict[str, Tensor]:
    """Send the micro batch of the tensor-parallel group's first rank to the devices of all its
    ranks; max_seqlen stays on the CPU."""
    group, box = parallel_state.get_tensor_model_parallel_group(), [rows]
    if dist.get_world_size(group) > 1:
        source = parallel_state.get_tensor_model_parallel_src_rank()
        dist.broadcast_object_list(box, source, group=group)
    assert box[0] is not None, "the first rank has read it"
    moved = {key: value.to(device(), non_blocking=True) for key, value in box[0].items()}
    return moved | {"max_seqlen": box[0]["max_seqlen"]}


def _embeds_or_computes_loss(vp_stage: int | None) -> bool:
    if parallel_state.get_pipeline_model_parallel_world_size() == 1:
        return True
    # With virtual stages, Megatron needs the stage of this call.
    virtual = {"ignore_virtual": vp_stage is None, "vp_stage": vp_stage}
    return bool(
        parallel_state.is_pipeline_first_stage(**virtual)
        or parallel_state.is_pipeline_last_stage(**virtual)
    )


def loss_func(loss_mask: Tensor | None, output: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return the summed loss, its number of label tokens, and the report that megatron-core 0.16
    averages. Run with ``--calculate-per-token-loss``: without it, the loss of every micro batch is
    divided by its own number of label tokens, so tokens weigh more in micro batches with few."""
    assert loss_mask is not None, "only the last pipeline stage computes a loss"
    mask = loss_mask.flatten().float()
    loss = (output.flatten().float() * mask).sum()
    num_tokens = mask.sum().detach().to(torch.int)
    report = torch.cat([loss.detach().reshape(1), num_tokens.reshape(1)])
    return loss, num_tokens, {"lm loss": report}


def forward_step(data_iterator: Iterator[Any] | None, model: Any) -> tuple[Tensor, Any]:
    """Run a forward step with ``get_batch``, for scripts that have no forward step."""
    tokens, labels, loss_mask, mask, position_ids, params = get_batch(
        data_iterator, _virtual_stage(model)
    )
    given = {"labels": labels, "packed_seq_params": params}
    if getattr(getattr(model, "config", None), "mtp_num_layers", None):
        # Without it, losses of multi-token prediction count tokens whose label is masked.
        given["loss_mask"] = loss_mask
    output = model(tokens, position_ids, mask, **given)
    return output, partial(loss_func, loss_mask)


def _virtual_stage(model: Any) -> int | None:
    while model is not None:
        if hasattr(model, "vp_stage"):
            stage: int | None = model.vp_stage
            return stage
        model = getattr(model, "module", None)
    return None
