"""What a schedule is made with, ScheduleConfig, and what it is made of, steps and draws."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from megapack.config import check_positive, check_range
from megapack.data.order import order_named
from megapack.errors import ConfigError

__all__ = ["Draw", "ScheduleConfig", "Step", "StepConfig"]


@dataclass(frozen=True, kw_only=True)
class StepConfig:
    """What a step consists of, and how steps follow each other; all of it but the seed."""

    tokens_per_step: int
    """Tokens of one optimizer step over all ranks, padding included."""
    order: str = "proportional"
    """How buckets follow each other; a name of ``megapack.data.order.ORDERS``."""
    num_cycles: int | None = None
    """Times per epoch that a curriculum starts over; null takes the order's own number."""
    mix: Literal["step", "micro_step"] = "step"
    """One bucket per optimizer step, or one per ``micro_step_tokens``."""
    micro_step_tokens: int | None = None
    """Of ``mix: micro_step``: tokens that all ranks take from one bucket at a time. It is fixed
    here, and not by the ranks there are, so that steps stay independent of them."""
    row_tokens: int | None = None
    """Rows of this many tokens hold ``n = row_tokens // capacity`` samples each, which begin at 0,
    s, 2 s, ..., with ``s = row_tokens // n`` (rounded down to the alignment); what a sample leaves
    of its s tokens, and the last one of the row, is padding. A row of 64 holds samples of 24 at 0
    and 32, samples of 10 at 0, 10, 20, 30, 40 and 50. Needed only when a capacity does not divide
    ``tokens_per_step``."""
    cost_window: int = 1
    """The samples that a source gives to this many consecutive draws of a bucket are put in order
    of attention cost, so that a draw holds samples of like cost (``megapack.data.streams``); for
    draws with one sample per rank, which no dealing can balance. Costs of steps differ as much more
    as those of ranks differ less, and sources of unlike costs stay unlike, since every draw has its
    exact share of each. 1: off."""

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


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig(StepConfig):
    """Everything, beside the index, that decides what a step contains."""

    seed: int = 0
    """Of shuffles and of the order of buckets."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("run", at_least=0, seed=self.seed)


@dataclass(frozen=True, eq=False)
class Draw:
    """Samples of one bucket that go through the model together.

    Attributes:
        bucket: number of the bucket among those that have samples, by rising capacity.
        capacity: tokens per sample.
        sample_ids: (samples,) int64, global ids.
    """

    bucket: int
    capacity: int
    sample_ids: NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Step:
    """One optimizer step of all ranks; ``mix="step"`` has one draw, ``micro_step`` several.

    Attributes:
        index: of the step, counted from 0.
        draws: what it holds.
        num_lists: of excluded documents in force.
        count_labels: (sample ids, num_lists) -> tokens of each sample that have a label.
    """

    index: int
    draws: tuple[Draw, ...]
    num_lists: int
    count_labels: Callable[[NDArray[np.int64], int], NDArray[np.int64]] = field(repr=False)

    @property
    def bucket(self) -> int:
        """Of the first draw."""
        return self.draws[0].bucket

    @property
    def capacity(self) -> int:
        """Of the first draw, tokens per sample."""
        return self.draws[0].capacity

    @cached_property
    def sample_ids(self) -> NDArray[np.int64]:
        """Of all draws, int64."""
        return np.concatenate([draw.sample_ids for draw in self.draws])

    @cached_property
    def label_counts(self) -> NDArray[np.int64]:
        """Of every sample, in the order of ``sample_ids``, tokens that have a label; int64."""
        return self.count_labels(self.sample_ids, self.num_lists)

    @property
    def num_label_tokens(self) -> int:
        """Tokens of the step that have a label: its loss denominator."""
        return int(self.label_counts.sum())
