"""Rows of a plan for trainers with context parallelism, in Megatron-core's layout and names.

A group of ranks has its documents as one row ("thd"). Each document is padded and divided into
``2 x local_cp_size`` equal chunks; a rank holds an early and a late one, so causal work is equal.

    context_parallel_indices(np.array([0, 4, 12]), cp_size=2, cp_rank=0)  # documents of 4 and 8
    # -> [0, 3, 4, 5, 10, 11]: chunks 0 and 3 of 4 of each document; rank 1 holds chunks 1 and 2
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megapack.planning.step_plan import Integers, StepPlan

__all__ = ["RankMicroBatch", "context_parallel_indices", "rank_micro_batches"]


@dataclass(frozen=True, kw_only=True, eq=False)
class RankMicroBatch:
    """A row of documents and one rank's part of it; empty for a rank without documents.

    Names in Megatron-core 0.19.0, main (d98e8a64) and dev (d48bd6be): dev forwards the whole row;
    hybrid context parallelism of 0.19 and main forwards each document separately.

    Attributes:
        documents: (documents,) int64, document numbers of the plan: an entry of
            ``sample_id_groups[micro batch][rank]`` of the schedulers in ``hybrid_cp_schedule.py``
            (0.19, main) and ``data_schedule.py`` (dev).
        local_cp_size: ranks of the group, ``PackedSeqParams.local_cp_size``. ``cp_group`` is
            ``parallel_state.get_hybrid_data_context_parallel_groups(group_size=local_cp_size)``
            (None for 1), in dev ``get_dynamic_data_context_parallel_groups``.
        cp_rank: number of this rank in the group; the group's first rank is ``rank - cp_rank``.
        cu_seqlens: (documents + 1,) int32, without padding; ``cu_seqlens_q``, ``_kv`` in dev.
        cu_seqlens_padded: (documents + 1,) int32, with padding: ``cu_seqlens_q_padded`` and
            ``cu_seqlens_kv_padded``; in 0.19 and main also ``cu_seqlens_q`` and ``_kv``.
        max_seqlen: tokens of the longest padded document, ``max_seqlen_q`` and ``max_seqlen_kv``.
        indices: (row tokens / local_cp_size,) int64, positions of the row that this rank holds:
            Transformer Engine's ``thd_get_partitioned_indices``, with which Megatron slices tokens,
            labels, loss_mask and position_ids.
    """

    documents: Integers
    local_cp_size: int
    cp_rank: int
    cu_seqlens: NDArray[np.int32]
    cu_seqlens_padded: NDArray[np.int32]
    max_seqlen: int
    indices: Integers


def rank_micro_batches(
    plan: StepPlan, rank: int, *, lengths: ArrayLike | None = None, align: int = 1
) -> list[RankMicroBatch]:
    """Return one rank's part of every micro batch of a plan.

    A shared document is padded to a multiple of ``2 x local_cp_size``, every document to a multiple
    of `align`. To keep every rank within the plan's budget, give ``plan_step`` lengths rounded up
    to multiples of `align` and ``2 x max_context_parallel_size``, and give true `lengths` here.

    Args:
        rank: rank in the group of data and context parallelism together.
        lengths: (documents,) integers, tokens without padding; None: the plan's lengths.
        align: tokens. Megatron's sequence parallelism divides a rank's part by the tensor parallel
            size; the tensor parallel size times ``2 x max_context_parallel_size`` always suffices.

    Raises:
        ValueError: `rank` or `align` is out of range, `lengths` do not match the plan, or a row is
            too long for int32.
    """
    if align < 1:
        raise ValueError(f"align is {align}; it must be at least 1")
    given = plan.lengths if lengths is None else np.asarray(lengths)
    true = given.astype(np.int64)
    if true.shape != plan.lengths.shape or (true != given).any() or (true < 1).any():
        raise ValueError(
            f"lengths has shape {given.shape} and dtype {given.dtype}; the plan has "
            f"{len(plan.lengths)} documents: give an integer of at least 1 for each"
        )
    if (true > plan.lengths).any():
        i = int(np.flatnonzero(true > plan.lengths)[0])
        raise ValueError(
            f"document {i} has {true[i]} tokens but was planned with {plan.lengths[i]}; give "
            "padded lengths to plan_step and true lengths here"
        )
    return [_row_of_rank(plan, rank, documents, true, align) for documents in plan.of_rank(rank)]


def _row_of_rank(
    plan: StepPlan, rank: int, documents: Integers, lengths: Integers, align: int
) -> RankMicroBatch:
    degree = int(plan.degree[documents[0]]) if documents.size else 1
    cp_rank = rank - int(plan.first_rank[documents[0]]) if documents.size else 0
    multiple = math.lcm(align, 2 * degree if degree > 1 else 1)
    padded = -(-lengths[documents] // multiple) * multiple
    bounds = _bounds(padded)
    return RankMicroBatch(
        documents=documents,
        local_cp_size=degree,
        cp_rank=cp_rank,
        cu_seqlens=_bounds(lengths[documents]),
        cu_seqlens_padded=bounds,
        max_seqlen=int(padded.max(initial=0)),
        indices=context_parallel_indices(bounds, degree, cp_rank),
    )


def _bounds(lengths: Integers) -> NDArray[np.int32]:
    bounds = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    if bounds[-1] > np.iinfo(np.int32).max:
        raise ValueError(
            f"a row has {bounds[-1]} tokens; int32 boundaries allow 2^31 - 1: plan with a smaller "
            "max_tokens_per_rank or max_context_parallel_size"
        )
    return bounds.astype(np.int32)


def context_parallel_indices(
    cu_seqlens: NDArray[np.integer], cp_size: int, cp_rank: int
) -> Integers:
    """Return the positions of a row that one rank holds: int64 (tokens / cp_size,).

    Same as Transformer Engine's ``thd_get_partitioned_indices``: each segment is divided into
    ``2 * cp_size`` equal chunks, and rank r takes chunks r and ``2 * cp_size - 1 - r``.

    Args:
        cu_seqlens: 1-D integers; each segment is a multiple of ``2 * cp_size`` tokens long.

    Raises:
        ValueError: a segment is not such a multiple, or `cp_rank` is out of range.
    """
    if not 0 <= cp_rank < cp_size:
        raise ValueError(f"cp_rank is {cp_rank}; it must be from 0 to {cp_size - 1}")
    bounds = np.asarray(cu_seqlens, np.int64)
    if cp_size == 1:
        return np.arange(bounds[0], bounds[-1])
    begins, lengths = bounds[:-1], np.diff(bounds)
    num_chunks = 2 * cp_size
    if (lengths % num_chunks).any():
        odd_length = int(lengths[lengths % num_chunks != 0][0])
        raise ValueError(
            f"a segment of {odd_length} tokens does not divide into {num_chunks} chunks for "
            f"context_parallel_size={cp_size}; build the rows with align={num_chunks}"
        )
    chunk = lengths // num_chunks
    first = begins + cp_rank * chunk
    second = begins + (num_chunks - 1 - cp_rank) * chunk
    starts = np.stack([first, second], axis=1).ravel()
    counts = chunk.repeat(2)
    offsets = counts.cumsum() - counts
    return np.repeat(starts - offsets, counts) + np.arange(counts.sum())
