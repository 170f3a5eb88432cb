"""Size of a step, and the bucket of each of its draws.

- ``ORDERS``: orders of the buckets: in proportion, by a curriculum, one after the other.
- ``StepConfig``, ``ScheduleConfig``: fields of every ``Schedule`` and of the section ``data:`` of a
  configuration; a stage (``blend.Stage``) can change some of them.
- ``StepView``: what a step requires of its samples; the schedule passes it to the gather.
- ``check_group``, ``ranks_per_micro_batch``: ranks that share micro batches.
- ``DrawOrder``: the endless sequence of draws, draw -> bucket and (bucket, number) -> draw.

    StepConfig(tokens_per_step=65_536, mix="micro_step", micro_step_tokens=16_384).draw_tokens
    # -> 16384: four buckets in a step, one for every 16,384 tokens of all ranks
    ranks_per_micro_batch(32_768, micro_batch_tokens=16_384, sequence_parallel_size=4)    # -> 4

An epoch has ``num_cycles`` cycles. After c cycles bucket b has been drawn

    drawn(b, c) = ceil(c * samples_per_epoch[b] / (num_cycles * samples_per_draw[b]))

times, just enough to cover its samples of those cycles. So cycle c consists of draws
``[drawn(b, c), drawn(b, c + 1))`` of every bucket b, sorted by an ``Order``. With 5 samples of 16
tokens, 2 of 32 and draws of 64 tokens (4 and 2 samples), one cycle per epoch:

    drawn(0, c) = ceil(5 c / 4), drawn(1, c) = c          # -> 2 and 1 draws, then 1 and 1, ...

``megapack.data.bucket_streams`` determines the samples of a draw.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import islice
from math import isqrt, lcm
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from megapack import _core
from megapack.calls import checked_call, nearest
from megapack.config import whole_numbers
from megapack.errors import ConfigError

# ---- Orders of buckets ---------------------------------------------------------------------------

Odds = Callable[[int], list[float]]


@dataclass(frozen=True)
class Order:
    """Order of the draws of a cycle. All orders visit the same samples, at different times.

    Within a cycle every bucket has odds: with odds ``o`` it is used up after a share ``1 / o`` of
    the time of a bucket with odds 1 (Dataset Decomposition, arXiv 2405.13226, "sampling odds").

    Attributes:
        meaning: description in one line.
        odds: number of buckets -> odds of each, shortest first.
        num_cycles: default number of cycles per epoch; each starts the order over.
        times: times of the draws: stratified (``spread``), random, or bucket after bucket.
    """

    meaning: str
    odds: Odds = lambda num_buckets: [1.0] * num_buckets
    num_cycles: int = 1
    times: Literal["spread", "random", "consecutive"] = "spread"

    def __reduce__(self) -> tuple[Callable[[str], Order], tuple[str]]:
        # Pickle the name, since the odds may be a lambda.
        return order_named, (next(name for name, order in ORDERS.items() if order is self),)

    @property
    def shuffled(self) -> bool:
        """True if samples are shuffled and the largest bucket comes first."""
        return self.times != "consecutive"

    def cycle(
        self, counts: NDArray[np.int64], key: int, *, largest_first: bool
    ) -> _core.CycleOrder:
        """Return a cycle in which bucket b is drawn ``counts[b]`` times."""
        odds = np.array(self.odds(len(counts)), np.float64)
        return _core.CycleOrder(counts, odds, key, self.times, largest_first and self.shuffled)


def _linear(num_buckets: int) -> list[float]:
    return [float(num_buckets - i) for i in range(num_buckets)]


_MOST_ODDS = 1 << 900  # the product with the draws of a cycle is a finite float64


def _power(base: int) -> Odds:
    return lambda num_buckets: [
        float(min(base ** (num_buckets - 1 - i), _MOST_ODDS)) for i in range(num_buckets)
    ]


def _reverse(odds: Odds) -> Odds:
    return lambda num_buckets: odds(num_buckets)[::-1]


ORDERS = {
    "proportional": Order("every window holds the buckets in proportion to their tokens"),
    "uniform": Order("all draws of an epoch in random order (odds 1:1:1)", times="random"),
    "grow-linear": Order("short buckets earlier, odds ..., 3, 2, 1", _linear, 8),
    "grow-p2": Order("short buckets earlier, odds ..., 4, 2, 1", _power(2), 8),
    "grow-p100": Order("short buckets earlier, odds ..., 10000, 100, 1", _power(100), 8),
    "shrink-linear": Order("long buckets earlier, odds 1, 2, 3, ...", _reverse(_linear), 8),
    "shrink-p2": Order("long buckets earlier, odds 1, 2, 4, ...", _reverse(_power(2)), 8),
    "shrink-p100": Order("long buckets earlier, odds 1, 100, ...", _reverse(_power(100)), 8),
    "sequential": Order(
        "bucket after bucket, samples as the index has them (debugging)", times="consecutive"
    ),
}


def order_named(name: str) -> Order:
    """Return the order with this name. Raises ConfigError, which lists all names."""
    if name not in ORDERS:
        known = ", ".join(ORDERS)
        raise ConfigError(f"order is {name!r}; it must be one of {known}{nearest(name, ORDERS)}")
    return ORDERS[name]


# ---- Size of a step ------------------------------------------------------------------------------

MOST_TOKENS = 1 << 53  # limit of a run and thus of a step
Attention = Literal["document", "group", "sample", "tree"]
"""Earlier tokens that a token attends to: those of its document, group, or sample."""
Loss = Literal["token_mean", "sequence_mean", "longalign"]
"""How the loss of a step is averaged (``megapack.data.sampler``)."""


@checked_call
@dataclass(frozen=True, kw_only=True)
class StepConfig:
    """Size and order of steps; everything except the seed."""

    tokens_per_step: int
    """Tokens of one optimizer step over all ranks, padding included."""
    order: str = "proportional"
    """Order of the buckets; a name of ``ORDERS``."""
    num_cycles: int | None = None
    """Cycles of a curriculum per epoch; null: the default of the order."""
    mix: Literal["step", "micro_step"] = "step"
    """One bucket per optimizer step, or one per ``micro_step_tokens``."""
    micro_step_tokens: int | None = None
    """With ``mix: micro_step``: tokens that all ranks take from one bucket at a time. Steps do not
    depend on the number of ranks, so this does not either."""
    row_tokens: int | None = None
    """Rows of this many tokens hold ``n = row_tokens // capacity`` samples each, which begin at 0,
    s, 2 s, ..., with ``s = row_tokens // n`` (rounded down to the alignment); the remainder of
    every sample's s tokens and of the row is padding. A row of 64 holds samples of 24 at 0 and 32,
    samples of 10 at 0, 10, 20, 30, 40 and 50. Needed only if a capacity does not divide
    ``tokens_per_step``."""
    cost_window: int = 1
    """Number of consecutive draws of a bucket whose samples are sorted by attention cost, so that a
    draw holds samples of similar cost (``megapack.data.bucket_streams``). For draws with one sample
    per rank, which cannot be balanced otherwise. Costs of ranks differ less, but costs of steps
    differ more. Every draw keeps its exact share of each source. 1: off."""

    def __post_init__(self) -> None:
        order_named(self.order)
        names = ("tokens_per_step", "num_cycles", "micro_step_tokens", "row_tokens")
        whole_numbers("data", self, *names, above=0, at_most=MOST_TOKENS)
        whole_numbers("data", self, "cost_window", above=0, at_most=2**32)
        if (self.mix == "micro_step") != (self.micro_step_tokens is not None):
            raise ConfigError("mix='micro_step' and micro_step_tokens go together: give both")
        if self.tokens_per_step % self.draw_tokens:
            total, draw = self.tokens_per_step, self.draw_tokens
            unit, remedies = self._draw_unit, []
            if draw % unit == 0:
                remedies.append(f"tokens_per_step to {_multiple(total, draw)}")
            if total % unit == 0:
                fitting = unit * _divisors(total // unit, draw / unit)[0]
                remedies.append(f"micro_step_tokens to {fitting}")
            both = f"tokens_per_step and micro_step_tokens to {_multiple(total, unit)}"
            raise ConfigError(
                f"micro_step_tokens {draw} does not divide tokens_per_step {total}; set "
                f"{', or '.join(remedies) or both}"
            )

    @property
    def _draw_unit(self) -> int:
        """Tokens of which a draw must be a multiple."""
        return 1

    @property
    def draw_tokens(self) -> int:
        """Tokens of one draw, all from one bucket."""
        return self.micro_step_tokens or self.tokens_per_step

    @property
    def draws_per_step(self) -> int:
        return self.tokens_per_step // self.draw_tokens

    def samples_per_draw(self, capacities: Sequence[int]) -> list[int]:
        """Return the number of samples in a draw of each bucket. Raises ConfigError, which names
        sizes that fit all of them, if some do not fill it."""
        tokens, row, largest = self.draw_tokens, self.row_tokens, max(capacities)
        unfit = [capacity for capacity in capacities if tokens % capacity]
        if row is None and unfit:
            problem = f"a draw of {tokens} tokens cannot consist of samples of {unfit[0]}"
        elif row is not None and largest > row:
            problem = f"a row of {row} tokens cannot hold a sample of {largest}"
        elif row is not None and tokens % row:
            problem = f"row_tokens {row} does not divide the {tokens} tokens of a draw"
        else:
            return [tokens // (row or c) * ((row or c) // c) for c in capacities]
        raise ConfigError(f"{problem}; {self._fitting(capacities)}")

    def _fitting(self, capacities: Sequence[int]) -> str:
        """Return the remedy if buckets do not fit a draw: sizes that all of them fit."""
        tokens, largest, total = self.draw_tokens, max(capacities), self.tokens_per_step
        unit, remedies = lcm(*capacities), []
        if self.row_tokens is None and unit <= max(64 * total, largest):
            multiple = _multiple(total, unit)
            remedy = f"tokens_per_step to {multiple}" if multiple != total else ""
            if self.micro_step_tokens is not None:
                draw = unit * _divisors(multiple // unit, tokens / unit)[0]
                remedy += f"{' and ' if remedy else ''}micro_step_tokens to {draw}"
            remedies.append(remedy)
        rows = [row for row in _divisors(tokens, largest) if row >= largest]
        if rows:
            remedies.append(f"row_tokens to {rows[0]}")
        elif self.micro_step_tokens is None:
            remedies.append(f"tokens_per_step and row_tokens to {largest}")
        row = rows[0] if rows else largest
        padding = max(row % capacity for capacity in capacities) / row
        rest = f" (a row holds as many whole samples as fit; up to {100 * padding:.2g}% is padding)"
        is_padded = padding > 0 and "row_tokens" in remedies[-1]
        return f"set {', or '.join(remedies)}{rest if is_padded else ''}"

    def micro_batch_problem(self, num_ranks: int, tokens: int, pad_last: bool) -> str | None:
        """Return why a draw cannot be split into micro batches of ``tokens`` for every rank."""
        name = "tokens_per_step" if self.micro_step_tokens is None else "micro_step_tokens"
        if tokens < 1 or self.draw_tokens % tokens:
            return f"micro_batch_tokens {tokens} does not divide {name} {self.draw_tokens}"
        count = self.draw_tokens // tokens
        if count % num_ranks and not pad_last:
            return (
                f"{num_ranks} ranks do not divide the {count} micro batches of {tokens} tokens in "
                f"{name} {self.draw_tokens}"
            )
        return None

    def whole_samples_problem(
        self, samples_per_draw: Mapping[int, int], tokens: int, sequence_parallel_size: int
    ) -> str | None:
        """Return which samples a micro batch of ``tokens`` cannot hold, or None.

        Args:
            samples_per_draw: capacity of each bucket -> samples in a draw of it.
            tokens: a divisor of ``draw_tokens``.
        """
        count = self.draw_tokens // tokens
        for capacity, samples in samples_per_draw.items():
            shared = ranks_per_micro_batch(capacity, tokens, sequence_parallel_size)
            whole = tokens * shared
            fits = count % shared == 0 and samples % (count // shared) == 0
            if not fits or (self.row_tokens is not None and whole % self.row_tokens):
                group = f" of {shared} ranks" if shared > 1 else ""
                return (
                    f"a micro batch of {whole} tokens{group} cannot hold whole samples of "
                    f"{capacity}"
                )
        return None


def check_micro_batches(
    problem: Callable[[int, int, bool], str | None],
    configs: Sequence[StepConfig],
    *,
    num_ranks: int,
    sequence_parallel_size: int,
    tokens: int,
    pad_last: bool,
) -> None:
    """Raise ConfigError if ranks cannot share a draw; the message names sizes that fit.

    Args:
        problem: (ranks, micro_batch_tokens, pad_last) -> why they do not fit, or None.
        configs: those of all stages.
        num_ranks: data-parallel size, a multiple of ``sequence_parallel_size``.
        tokens: tokens of a micro batch, one forward pass of one rank.
        pad_last: True if some ranks may get an empty micro batch.
    """
    misfit = problem(num_ranks, tokens, pad_last)
    if misfit is None:
        return
    config, draw_tokens = configs[0], configs[0].draw_tokens
    sizes, group = _divisors(draw_tokens, tokens), sequence_parallel_size
    fewer = range(num_ranks - group, 0, -group)
    fitting = [f"micro_batch_tokens to {n}" for n in sizes if not problem(num_ranks, n, pad_last)]
    ranks_that_fit = (n for n in fewer if not problem(n, tokens, pad_last))
    remedies = fitting[:1] + [f"the number of ranks to {n}" for n in islice(ranks_that_fit, 1)]
    if problem(num_ranks, tokens, True) is None:  # only the number of ranks does not fit
        if len({(each.tokens_per_step, each.draw_tokens) for each in configs}) == 1:
            draw = _multiple(draw_tokens, lcm(num_ranks * tokens, config.row_tokens or 1))
            remedy = f"tokens_per_step to {draw}"
            if config.micro_step_tokens is not None:
                total = _multiple(config.tokens_per_step, draw)
                remedy = f"tokens_per_step to {total} and micro_step_tokens to {draw}"
            remedies.insert(0, remedy)
        idle = -(draw_tokens // tokens) % num_ranks
        remedies.append(
            f"pad_last to true, which gives {idle} of {num_ranks} ranks an empty micro batch"
        )
    if not remedies:
        pairs = ((n, size) for n in fewer for size in sizes if not problem(n, size, pad_last))
        ranks, size = next(pairs, (group, draw_tokens))
        remedies = [f"the number of ranks to {ranks} and micro_batch_tokens to {size}"]
    raise ConfigError(f"{misfit}; set {', or '.join(remedies)}")


@checked_call
@dataclass(frozen=True, kw_only=True)
class ScheduleConfig(StepConfig):
    """All settings that determine the content of a step, except the samples."""

    seed: int = 0
    """Seed of shuffles and of the order of buckets."""

    def __post_init__(self) -> None:
        super().__post_init__()
        whole_numbers("run", self, "seed", at_least=0, below=1 << 64)


def _divisors(number: int, near: float) -> list[int]:
    """Return divisors of a number of 1 or more; the nearest to ``near``, by ratio, comes first."""
    small = [d for d in range(1, min(isqrt(number), 1 << 16) + 1) if number % d == 0]
    near = max(near, 1)
    return sorted({*small, *(number // d for d in small)}, key=lambda d: max(d / near, near / d))


def _multiple(number: int, unit: int) -> int:
    """Return the nearest multiple of a unit, at least one."""
    return max(1, round(number / unit)) * unit


def check_group(size: int, num_ranks: int) -> None:
    """Raise ConfigError if groups of ``size`` ranks do not divide ``num_ranks``."""
    if size < 1 or num_ranks % size:
        raise ConfigError(
            f"sequence_parallel_size is {size}, and {num_ranks} ranks cannot be divided into "
            "groups of that size; choose a divisor"
        )


def ranks_per_micro_batch(
    capacity: int, micro_batch_tokens: int, sequence_parallel_size: int
) -> int:
    """Return the number of ranks that share a micro batch of samples of ``capacity`` tokens.

    A group of consecutive ranks shares samples longer than one rank's forward
    (``megapack.attention.sequence_parallel``). On shorter buckets every rank of the group has its
    own micro batch; each computes ``micro_batch_tokens`` in both cases.
    """
    return 1 if capacity <= micro_batch_tokens else sequence_parallel_size


# ---- Requirements of a step on its samples -------------------------------------------------------


@dataclass(frozen=True, eq=False, kw_only=True)
class StepView:
    """Requirements of a step on the samples that it reads.

    The schedule creates a view for each step, a micro batch gets the part for its samples (``of``),
    and the gather reads it.

    Attributes:
        window: attention window, tokens; None: attention is not limited.
        num_lists: exclusion lists in force; their documents become padding
            (``megapack.data.exclusions.Exclusions``).
        loss_weight: (samples,) float32, factors on the loss masks; None: 1.
        epochs, fim_rates: (samples,) int64 and float64, for fill-in-the-middle: the epoch of each
            sample within its source, and the share of documents to transform; None: transform none.
        seed: the run's seed, for fill-in-the-middle.
    """

    window: int | None = None
    num_lists: int = 0
    loss_weight: NDArray[np.float32] | None = None
    epochs: NDArray[np.int64] | None = None
    fim_rates: NDArray[np.float64] | None = None
    seed: int = 0

    def of(self, positions: Any) -> StepView:
        """Return the view of some of the samples; ``positions`` is a slice or an array."""
        arrays = self._arrays()
        if not arrays:
            return self
        changed: dict[str, Any] = {name: array[positions] for name, array in arrays.items()}
        return replace(self, **changed)

    @property
    def has_exclusions(self) -> bool:
        """True if a list is in force."""
        return self.num_lists > 0

    def excludes(self, first_lists: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return which documents are excluded, given the first list that contains each."""
        excluded: NDArray[np.bool_] = first_lists <= self.num_lists
        return excluded

    def each(self, count: int) -> list[StepView]:
        """Return the views of ``count`` samples, one by one."""
        return [self.of(slice(i, i + 1)) if self._arrays() else self for i in range(count)]

    @staticmethod
    def concatenate(views: Sequence[StepView]) -> StepView:
        """Return the view of several draws of one step, one after the other."""
        arrays = [view._arrays() for view in views]
        changed: dict[str, Any] = {n: np.concatenate([a[n] for a in arrays]) for n in arrays[0]}
        return replace(views[0], **changed) if changed else views[0]

    @cached_property
    def core(self) -> _core.StepView:
        """View for the gather. Raises ValueError if a factor of ``loss_weight`` is not finite."""
        factors = self.loss_weight
        if factors is not None:
            factors = np.ascontiguousarray(factors, np.float32)
            if not np.isfinite(factors).all():
                raise ValueError(f"loss_weight is {self.loss_weight}; factors must be finite")
        return _core.StepView(self.num_lists, factors, self.epochs, self.fim_rates, self.seed)

    def _arrays(self) -> dict[str, NDArray[Any]]:
        fields = vars(self)
        names = ("loss_weight", "epochs", "fim_rates")
        return {name: fields[name] for name in names if fields[name] is not None}

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "core"}


PLAIN = StepView()

# ---- Bucket of every draw ------------------------------------------------------------------------


def fold_key(seed: int, *parts: int) -> int:
    """Return a 64-bit key from a seed and numbers that identify its use. The first number is 1 for
    shuffles of samples, 2 cycles, 3 cost windows, 4 stages, 5 shuffles of packing, 6 arranged
    sources and fill-in-the-middle."""
    key = seed % (1 << 64)
    for part in parts:
        key = _core.random_bits(key, part)
    return key


@dataclass(frozen=True, kw_only=True)
class DrawOrder:
    """Endless sequence of draws, numbered from 0.

    Attributes:
        samples_per_epoch: samples of every bucket in an epoch, by ascending capacity.
        samples_per_draw: samples in a draw, for every bucket.
        order: order of the draws inside a cycle.
        num_cycles: cycles per epoch.
        seed: seed of the order.
        largest_first: draw 0 is of the largest bucket if the order is shuffled.
    """

    samples_per_epoch: tuple[int, ...]
    samples_per_draw: tuple[int, ...]
    order: Order
    num_cycles: int
    seed: int
    largest_first: bool = True

    def locate(self, draw: int) -> tuple[int, int]:
        """Return (bucket of a draw, number of earlier draws of that bucket)."""
        cycle = self._cycle_of(draw)
        bucket, rank = _cycle(self, cycle).at(draw - self.begin(cycle))
        return bucket, self.drawn(bucket, cycle) + rank

    def draw_at(self, bucket: int, number: int) -> int:
        """Return draw ``number`` (from 0) of a bucket, the inverse of ``locate``."""
        cycle = number * self.num_cycles * self.samples_per_draw[bucket]
        cycle //= self.samples_per_epoch[bucket]  # the last one with drawn(bucket, cycle) <= number
        rank = number - self.drawn(bucket, cycle)
        return self.begin(cycle) + _cycle(self, cycle).position(bucket, rank)

    def drawn(self, bucket: int, cycles: int) -> int:
        """Return how often a bucket is drawn in the first ``cycles`` cycles."""
        samples = cycles * self.samples_per_epoch[bucket]
        return -(-samples // (self.num_cycles * self.samples_per_draw[bucket]))

    def begin(self, cycle: int) -> int:
        """Return the first draw of a cycle."""
        return sum(self.drawn(b, cycle) for b in range(len(self.samples_per_draw)))

    def buckets(self, begin: int, end: int) -> NDArray[np.int32]:
        """Return the buckets of draws ``[begin, end)``."""
        parts = [np.zeros(0, np.int32)]
        while begin < end:
            cycle = self._cycle_of(begin)
            first, order = self.begin(cycle), _cycle(self, cycle)
            last = min(end, first + len(order))
            parts.append(order.range(begin - first, last - first))
            begin = last
        return np.concatenate(parts)

    def counts(self, end: int) -> NDArray[np.int64]:
        """Return (num_buckets,) the number of draws of every bucket in ``[0, end)``."""
        cycle = self._cycle_of(end)
        before = [self.drawn(b, cycle) for b in range(len(self.samples_per_draw))]
        return np.array(before, np.int64) + _cycle(self, cycle).counts(end - sum(before))

    def _cycle_of(self, draw: int) -> int:
        """Return the cycle of a draw: the largest c with begin(c) <= draw."""
        draws_per_cycle = sum(
            samples / (self.num_cycles * per_draw)
            for samples, per_draw in zip(self.samples_per_epoch, self.samples_per_draw, strict=True)
        )
        # begin(c) is in [draws_per_cycle * c, draws_per_cycle * c + num_buckets).
        low = max(0, int((draw - len(self.samples_per_draw)) / draws_per_cycle) - 1)
        high = int((draw + 1) / draws_per_cycle) + 2
        return low + bisect_right(range(low, high), draw, key=self.begin) - 1


@lru_cache(maxsize=8)  # creation sorts random times; a run needs one cycle at a time, a query two
def _cycle(draws: DrawOrder, cycle: int) -> _core.CycleOrder:
    buckets = range(len(draws.samples_per_draw))
    counts = np.array([draws.drawn(b, cycle + 1) - draws.drawn(b, cycle) for b in buckets])
    key = fold_key(draws.seed, 2, cycle)
    return draws.order.cycle(counts, key, largest_first=cycle == 0 and draws.largest_first)
