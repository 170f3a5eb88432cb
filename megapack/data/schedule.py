"""What every optimizer step contains: a pure function of (index, configuration, step).

All ranks compute the same without talking to each other, and any step is computed without those
before it. Steps hold a constant number of tokens; what a step holds does not depend on the number
of ranks, the micro batch size or the number of workers, so a run may stop at any step and continue
with others. Nothing is dropped: a bucket is an endless stream (``megapack.data.streams``) of which
every draw takes the next ``k`` samples, and a draw that reaches the end of an epoch continues with
the next one.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from megapack import _core
from megapack.data.order import order_named
from megapack.data.streams import BucketStream, bucket_streams, fold_key
from megapack.errors import ConfigError
from megapack.packing import SampleIndex

__all__ = ["Draw", "Schedule", "ScheduleConfig", "Step"]


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """Everything, beside the index, that decides what a step contains.

    Attributes:
        tokens_per_step: tokens of one optimizer step over all ranks, padding included.
        seed: of shuffles and of the order of buckets.
        order: a name of ``megapack.data.order.ORDERS``.
        num_cycles: times per epoch that a curriculum starts over; None: what the order has.
        mix: ``step``: one bucket per optimizer step; ``micro_step``: one per micro step.
        micro_step_tokens: for ``mix="micro_step"``, tokens of one micro step over all ranks. A fixed
            number and not "whatever the ranks make of it", so that steps stay independent of them.
        row_tokens: rows of this many tokens hold ``row_tokens // capacity`` samples each. Needed
            only when a capacity does not divide tokens_per_step; the rest of a row is padding.
        cost_window: order the samples of this many consecutive draws of a bucket by attention cost,
            so that a draw holds samples of like cost; for draws with one sample per rank, which no
            dealing can balance. 1: off.
    """

    tokens_per_step: int
    seed: int = 0
    order: str = "proportional"
    num_cycles: int | None = None
    mix: Literal["step", "micro_step"] = "step"
    micro_step_tokens: int | None = None
    row_tokens: int | None = None
    cost_window: int = 1

    def __post_init__(self) -> None:
        order_named(self.order)
        for name in ("tokens_per_step", "num_cycles", "micro_step_tokens", "row_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}; it must be positive")
        if self.cost_window < 1:
            raise ConfigError(f"cost_window is {self.cost_window}; it must be 1 (off) or more")
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


@dataclass(frozen=True)
class Draw:
    """Samples of one bucket that go through the model together.

    Attributes:
        bucket: number of the bucket, by rising capacity.
        capacity: tokens per sample.
        sample_ids: (samples,) int64, global ids.
    """

    bucket: int
    capacity: int
    sample_ids: NDArray[np.int64]


@dataclass(frozen=True)
class Step:
    """One optimizer step of all ranks; ``mix="step"`` has one draw, ``micro_step`` several."""

    index: int
    draws: tuple[Draw, ...]
    count_labels: Callable[[NDArray[np.int64]], NDArray[np.int64]] = field(repr=False)

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
    def num_label_tokens(self) -> int:
        """Tokens of the step that have a label: the divisor of its loss."""
        return int(self.count_labels(self.sample_ids).sum())


class Schedule:
    """The steps of a run.

    Args:
        index: what to draw from: a ``SampleIndex``, a ``PackedDataset``, or several indices. A
            PackedDataset brings its blend weights and counts label tokens exactly; bare indices
            know where documents end as long as their strategy dropped no tokens.
        weights: shares of tokens of several indices; None: in proportion to their tokens.

    The other arguments are those of ``ScheduleConfig``.

    Raises:
        ConfigError: capacities and tokens_per_step do not fit; the message names the remedy.
    """

    def __init__(
        self,
        index: SampleIndex | Sequence[SampleIndex] | IndexHolder,
        *,
        tokens_per_step: int,
        seed: int = 0,
        order: str = "proportional",
        num_cycles: int | None = None,
        mix: Literal["step", "micro_step"] = "step",
        micro_step_tokens: int | None = None,
        row_tokens: int | None = None,
        cost_window: int = 1,
        weights: Sequence[float] | None = None,
    ) -> None:
        self.config = ScheduleConfig(
            tokens_per_step=tokens_per_step,
            seed=seed,
            order=order,
            num_cycles=num_cycles,
            mix=mix,
            micro_step_tokens=micro_step_tokens,
            row_tokens=row_tokens,
            cost_window=cost_window,
        )
