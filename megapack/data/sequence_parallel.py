"""Micro batches that several ranks share, each a slice of the tokens.

A sample that is longer than the tokens of one rank's forward is held by a group of consecutive
ranks, which exchange what attention needs (``megapack.attention.sequence_parallel``). Shorter ones
are not shared: in one run the ranks of a group work apart on the short buckets and together on the
long ones. Every rank has ``micro_batch_tokens`` tokens in every forward either way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from megapack.errors import ConfigError

if TYPE_CHECKING:  # torch, which nobody needs who only looks at sizes
    from megapack.data.batch import Batch

__all__ = ["check_group", "check_ranks", "cut_slice", "ranks_per_micro_batch"]

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


def check_ranks(
    num_ranks: int,
    *,
    draw_tokens: int,
    micro_batch_tokens: int,
    uneven: Literal["error", "pad"],
    where: str = "",
) -> None:
    """Refuse ranks among which the micro batches of a draw cannot be dealt.

    Args:
        num_ranks: data-parallel size.
        draw_tokens: that come from one bucket at a time, over all ranks.
        micro_batch_tokens: of one forward of one rank.
        uneven: ``pad`` gives some ranks an empty micro batch.
        where: how the message begins.

    Raises:
        ConfigError: micro batches do not divide the draw, or ranks the micro batches; the message
            names sizes that do.
    """
    if micro_batch_tokens < 1 or draw_tokens % micro_batch_tokens:
        raise ConfigError(
            f"{where}micro_batch_tokens {micro_batch_tokens} does not divide the {draw_tokens} "
            f"tokens of a draw; with {num_ranks} ranks {_divisors(draw_tokens // num_ranks)} would"
        )
    count = draw_tokens // micro_batch_tokens
    if count % num_ranks and uneven != "pad":
        raise ConfigError(
            f"{where}{num_ranks} ranks do not divide the {count} micro batches of "
            f"{micro_batch_tokens} tokens in a draw of {draw_tokens}; use {_divisors(count)} "
            "ranks, another micro_batch_tokens, or uneven='pad', which gives some ranks an empty "
            "micro batch"
        )


def _divisors(number: int) -> str:
    """A few divisors, largest last, for a message."""
    found = [d for d in range(1, min(number, 4096) + 1) if number % d == 0]
    return ", ".join(map(str, found[-6:])) or "none"


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
