"""What a step consists of: its tokens, its buckets, and the ranks that share it.

- ``StepConfig``, ``ScheduleConfig``: the section ``data:`` of a configuration and every
  ``Schedule`` have their fields from here; what a stage changes are some of them (``blend.Stage``).
- ``check_group``, ``ranks_per_micro_batch``: ranks that share micro batches.

    StepConfig(tokens_per_step=65_536, mix="micro_step", micro_step_tokens=16_384).draw_tokens
    # -> 16384: four buckets in a step, one for every 16,384 tokens of all ranks
    ranks_per_micro_batch(32_768, micro_batch_tokens=16_384, sequence_parallel_size=4)    # -> 4
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megapack.config import check_positive, check_range
from megapack.data.bucket_order import order_named
from megapack.errors import ConfigError

Attention = Literal["document", "group", "sample"]
"""What a token attends to before it: of its document, of its group's documents, of the sample."""
Loss = Literal["token_mean", "sequence_mean", "longalign"]
"""What the loss of a step is the mean of (``megapack.data.sampler``)."""


@dataclass(frozen=True, kw_only=True)
class StepConfig:
    """What a step consists of, and how steps follow each other; all of it but the seed."""

    tokens_per_step: int
    """Tokens of one optimizer step over all ranks, padding included."""
    order: str = "proportional"
    """How buckets follow each other; a name of ``megapack.data.bucket_order.ORDERS``."""
    num_cycles: int | None = None
    """Times per epoch that a curriculum starts over; null takes the order's own number."""
    mix: Literal["step", "micro_step"] = "step"
    """One bucket per optimizer step, or one per ``micro_step_tokens``."""
    micro_step_tokens: int | None = None
    """With ``mix: micro_step``: tokens that all ranks take from one bucket at a time. Fixed here,
    not by the number of ranks, so that steps do not depend on it."""
    row_tokens: int | None = None
    """Rows of this many tokens hold ``n = row_tokens // capacity`` samples each, which begin at 0,
    s, 2 s, ..., with ``s = row_tokens // n`` (rounded down to the alignment); what a sample leaves
    of its s tokens, and the last one of the row, is padding. A row of 64 holds samples of 24 at 0
    and 32, samples of 10 at 0, 10, 20, 30, 40 and 50. Needed only when a capacity does not divide
    ``tokens_per_step``."""
    cost_window: int = 1
    """The samples that a source gives to this many consecutive draws of a bucket are put in order
    of attention cost, so that a draw holds samples of like cost (``megapack.data.bucket_streams``);
    for draws with one sample per rank, which no dealing can balance. Costs of steps differ as much
    more as those of ranks differ less, and sources of unlike costs stay unlike, since every draw
    has its exact share of each. 1: off."""

    def __post_init__(self) -> None:
        order_named(self.order)
        check_positive(
            "data",
            tokens_per_step=self.tokens_per_step,
            num_cycles=self.num_cycles,
            micro_step_tokens=self.micro_step_tokens,
            row_tokens=self.row_tokens,
            cost_window=self.cost_window,
        )
        if (self.mix == "micro_step") != (self.micro_step_tokens is not None):
            raise ConfigError("mix='micro_step' and micro_step_tokens go together: give both")
        if self.tokens_per_step % self.draw_tokens:
            raise ConfigError(
                f"micro_step_tokens {self.draw_tokens} does not divide tokens_per_step "
                f"{self.tokens_per_step}"
            )

    @property
    def draw_tokens(self) -> int:
        """Tokens that come from one bucket at a time."""
        return self.micro_step_tokens or self.tokens_per_step

    @property
    def draws_per_step(self) -> int:
        return self.tokens_per_step // self.draw_tokens

    def samples_per_draw(self, capacity: int) -> int:
        """Samples of one bucket that a draw holds. Raises ConfigError: they do not fill it."""
        tokens, row = self.draw_tokens, self.row_tokens
        if row is None:
            if tokens % capacity:
                above = tokens - tokens % capacity + capacity
                near = f"{above - capacity} or {above}" if above > capacity else f"{above}"
                raise ConfigError(
                    f"a draw of {tokens} tokens cannot consist of samples of {capacity}. Choose a "
                    f"multiple of {capacity} ({near}), or set row_tokens: a row holds as many "
                    "whole samples as fit, the rest of it is padding"
                )
            return tokens // capacity
        if tokens % row:
            raise ConfigError(f"row_tokens {row} does not divide the {tokens} tokens of a draw")
        if capacity > row:
            raise ConfigError(f"a row of {row} tokens cannot hold a sample of {capacity}")
        return tokens // row * (row // capacity)

    def check_micro_batches(
        self, num_ranks: int, tokens: int, uneven: Literal["error", "pad"], where: str = ""
    ) -> None:
        """Refuse ranks among which the micro batches of a draw cannot be dealt.

        Args:
            num_ranks: data-parallel size.
            tokens: of a micro batch, one forward of one rank.
            uneven: ``pad`` gives some ranks an empty micro batch.
            where: how the message begins.

        Raises:
            ConfigError: micro batches do not divide the draw, or ranks the micro batches; the
                message names sizes that do.
        """
        if tokens < 1 or self.draw_tokens % tokens:
            shared, rest = divmod(self.draw_tokens, 1 if uneven == "pad" else num_ranks)
            raise ConfigError(
                f"{where}micro_batch_tokens {tokens} does not divide the {self.draw_tokens} tokens "
                f"of a draw; with {num_ranks} ranks {'none' if rest else _divisors(shared)} would"
            )
        count = self.draw_tokens // tokens
        if count % num_ranks and uneven != "pad":
            raise ConfigError(
                f"{where}{num_ranks} ranks do not divide the {count} micro batches of {tokens} "
                f"tokens in a draw of {self.draw_tokens}; use {_divisors(count)} ranks, another "
                "micro_batch_tokens, or uneven='pad', which gives some ranks an empty micro batch"
            )


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig(StepConfig):
    """Everything, beside the samples, that decides what a step contains."""

    seed: int = 0
    """Seed of shuffles and of the order of buckets."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("run", at_least=0, seed=self.seed)


def _divisors(number: int) -> str:
    """A few divisors of a number of 1 or more, largest last, for a message."""
    found = [d for d in range(1, min(number, 4096) + 1) if number % d == 0]
    return ", ".join(map(str, found[-6:]))


def check_group(size: int, num_ranks: int) -> None:
    """Refuse groups of ``size`` ranks that do not divide ``num_ranks``. Raises ConfigError."""
    if size < 1 or num_ranks % size:
        raise ConfigError(
            f"sequence_parallel_size is {size}, and {num_ranks} ranks cannot be divided into "
            "groups of it; choose a divisor"
        )


def ranks_per_micro_batch(
    capacity: int, micro_batch_tokens: int, sequence_parallel_size: int
) -> int:
    """Ranks that share a micro batch of samples of ``capacity`` tokens: one, or a whole group.

    A sample longer than the tokens of one rank's forward is held by a group of consecutive ranks,
    which exchange what attention needs (``megapack.attention.sequence_parallel``): on short buckets
    the ranks of a group work apart, on long ones together, always ``micro_batch_tokens`` each.
    """
    return 1 if capacity <= micro_batch_tokens else sequence_parallel_size
