"""What a rank of a host with context parallelism holds in each micro batch of a plan.

A group of ranks has its documents as one row ("thd"), each document padded so that it divides into
``2 x local_cp_size`` chunks, of which a rank holds two, one early and one late: equal causal work.
Names and layout are Megatron-core's.

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
    """A row of documents, and one rank's part of it; a rank without documents has an empty row.

    What Megatron-core calls each (read in 0.19.0, main d98e8a64 and dev d48bd6be). dev forwards the
    whole row; hybrid context parallelism of 0.19 and main each of its documents alone.

    Attributes:
        documents: (documents,) int64, numbers in the plan, in the order of the row. Of all ranks
            this is ``sample_id_groups[micro batch][rank]``, which the schedulers of
            ``hybrid_cp_schedule.py`` (0.19, main) and ``data_schedule.py`` (dev) make.
        local_cp_size: ranks of the group, ``PackedSeqParams.local_cp_size``. ``cp_group`` is
            ``parallel_state.get_hybrid_data_context_parallel_groups(group_size=local_cp_size)``
            (None where it is 1), in dev ``get_dynamic_data_context_parallel_groups``.
        cp_rank: of this rank in the group, whose first rank is ``rank - cp_rank``.
        cu_seqlens: (documents + 1,) int32, without padding: ``cu_seqlens_q`` and ``cu_seqlens_kv``
            of dev.
        cu_seqlens_padded: (documents + 1,) int32, as the row is laid out: ``cu_seqlens_q_padded``
            and ``cu_seqlens_kv_padded``, outside of dev ``cu_seqlens_q`` and ``_kv``, too.
        max_seqlen: tokens of the longest document, padded: ``max_seqlen_q`` and ``max_seqlen_kv``.
        indices: (row tokens / local_cp_size,) int64, the positions of the row that this rank
            holds, in its order: Transformer Engine's ``thd_get_partitioned_indices``, by which
            Megatron cuts tokens, labels, loss_mask and position_ids.
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
    """One rank's part of every micro batch of a plan.

    A document that ranks share is padded to a multiple of ``2 x local_cp_size``, and every document
    to one of `align`. No rank then holds more than the plan's budget if the plan was made of
    lengths rounded up to a multiple of both `align` and ``2 x max_context_parallel_size``, and
    `lengths` are the true ones.

    Args:
        plan: of the step.
        rank: in the group of data and context parallelism together.
        lengths: (documents,) integers, tokens without padding; None: those of the plan.
        align: tokens. Megatron's sequence parallelism divides a rank's part by the size of tensor
            parallelism: ``2 x max_context_parallel_size`` times that is always enough.

    Returns:
        One for each micro batch.

    Raises:
        ValueError: there is no such rank, `align` is below 1, `lengths` are not those of the plan's
            documents, or a row is too long for int32.
    """
    if align < 1:
        raise ValueError(f"align is {align}; it must be at least 1")
    given = plan.lengths if lengths is None else np.asarray(lengths)
    true = given.astype(np.int64)
    if true.shape != plan.lengths.shape or (true != given).any() or (true < 1).any():
        raise ValueError(
            f"lengths has shape {given.shape} and dtype {given.dtype}, and the plan "
            f"{len(plan.lengths)} documents; each has a whole number of tokens, at least 1"
        )
    if (true > plan.lengths).any():
        i = int(np.flatnonzero(true > plan.lengths)[0])
        raise ValueError(
            f"document {i} has {true[i]} tokens and was planned with {plan.lengths[i]}; give "
            "plan_step the padded lengths, and these the true ones"
        )
    return [_of_rank(plan, rank, documents, true, align) for documents in plan.of_rank(rank)]


def _of_rank(
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
            f"a row of {bounds[-1]} tokens; boundaries are int32: plan with a smaller "
            "max_tokens_per_rank or max_context_parallel_size"
        )
    return bounds.astype(np.int32)


def context_parallel_indices(
    cu_seqlens: NDArray[np.integer], cp_size: int, cp_rank: int
) -> Integers:
    """Positions of a row that one context-parallel rank holds, in its order.

    The split of Transformer Engine's ``thd_get_partitioned_indices``, without Transformer Engine:
    every segment in ``2 * cp_size`` equal chunks, rank r takes chunks r and
    ``2 * cp_size - 1 - r``; a group of one takes all.

    Args:
        cu_seqlens: 1-D integers, each segment a multiple of ``2 * cp_size`` tokens long.
        cp_size, cp_rank: the context-parallel group.

    Returns:
        int64 ``(tokens / cp_size,)``.

    Raises:
        ValueError: a segment cannot be divided, or there is no such rank.
    """
    if not 0 <= cp_rank < cp_size:
        raise ValueError(f"cp_rank is {cp_rank} of {cp_size} ranks, which are counted from 0")
    bounds = np.asarray(cu_seqlens, np.int64)
    if cp_size == 1:
        return np.arange(bounds[0], bounds[-1])
    begins, lengths = bounds[:-1], np.diff(bounds)
    num_chunks = 2 * cp_size
    if (lengths % num_chunks).any():
        bad = int(lengths[lengths % num_chunks != 0][0])
        raise ValueError(
            f"a segment of {bad} tokens does not divide into {num_chunks} chunks for "
            f"context_parallel_size={cp_size}; build the rows with align={num_chunks}"
        )
    chunk = lengths // num_chunks
    first = begins + cp_rank * chunk
    second = begins + (num_chunks - 1 - cp_rank) * chunk
    starts = np.stack([first, second], axis=1).ravel()
    counts = chunk.repeat(2)
    offsets = counts.cumsum() - counts
    return np.repeat(starts - offsets, counts) + np.arange(counts.sum())
