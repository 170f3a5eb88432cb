"""Micro batches that several ranks share, each a slice of the tokens.

A sample that is longer than the tokens of one rank's forward is held by a group of consecutive
ranks, which exchange what attention needs (``megapack.attention.sequence_parallel``). Shorter ones
are not shared: in one run the ranks of a group work apart on the short buckets and together on the
long ones. Every rank has ``micro_batch_tokens`` tokens in every forward either way.
"""

from __future__ import annotations

from megapack.data.batch import Batch
from megapack.errors import ConfigError

__all__ = ["check_group", "cut_slice", "ranks_per_micro_batch"]

_CUT = ("tokens", "labels", "loss_mask", "position_ids")


def ranks_per_micro_batch(
    capacity: int, micro_batch_tokens: int, sequence_parallel_size: int
) -> int:
    """Ranks that share a micro batch of samples of ``capacity`` tokens: one, or a whole group."""
    return 1 if capacity <= micro_batch_tokens else sequence_parallel_size


def check_group(size: int, num_ranks: int) -> None:
    """Refuse groups of ``size`` ranks that do not divide ``num_ranks``. Raises ConfigError."""
    if size < 1 or num_ranks % size:
        raise ConfigError(
            f"sequence_parallel_size is {size}, and {num_ranks} ranks cannot be divided into "
            "groups of it; choose a divisor"
        )


def cut_slice(batch: Batch, rank: int, size: int) -> Batch:
    """One rank's part of a shared micro batch.

    Args:
        batch: a stream; its tokens divide by ``size``.
        rank: of the group.
        size: of the group.

    Returns:
        ``tokens``, ``labels``, ``loss_mask`` and ``position_ids`` as (1, tokens / size); cu_seqlens
        and max_seqlen are those of the whole; and ``sequence_parallel_rank``,
        ``sequence_parallel_size``.
    """
    length = batch["tokens"].shape[1] // size
    begin = rank * length
    return {
        **batch,
        **{name: batch[name][:, begin : begin + length] for name in _CUT},
        "sequence_parallel_rank": rank,
        "sequence_parallel_size": size,
    }
