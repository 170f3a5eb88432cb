"""What every optimizer step contains: a pure function of (index, configuration, step).

All ranks compute the same without talking to each other, and any step is computed without those
before it. Steps hold a constant number of tokens; what a step holds does not depend on the number
of ranks, the micro batch size or the number of workers, so a run may stop at any step and continue
with others. Nothing is dropped: a bucket is an endless stream (``megapack.data.streams``) of which
every draw takes the next ``k`` samples, and a draw that reaches the end of an epoch continues with
the next one.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from megapack import _core
from megapack.config import to_dict
from megapack.data import resume
from megapack.data.draws import DrawOrder
from megapack.data.order import order_named
from megapack.data.source import HasSamples, SampleSource
from megapack.data.step import Draw, ScheduleConfig, Step
from megapack.data.streams import BucketStream, bucket_streams, fold_key
from megapack.errors import ConfigError
from megapack.packing import SampleIndex

__all__ = ["Schedule"]

Ids = NDArray[np.int64]

log = logging.getLogger(__name__)

_WINDOWS = 4  # remembered: a run needs one, a look back two


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
        index: SampleIndex | Sequence[SampleIndex] | HasSamples,
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
        named = order_named(order)
        self.num_cycles = num_cycles or named.num_cycles
        self.samples = SampleSource.of(index, weights)
        self.buckets: list[BucketStream] = bucket_streams(
            self.samples.indices, self.samples.weights, seed, shuffled=named.shuffled
        )
        self.samples_per_draw = [self._samples_per_draw(b.capacity) for b in self.buckets]
        self.draws = DrawOrder(
            samples_per_epoch=tuple(stream.samples_per_epoch for stream in self.buckets),
            samples_per_draw=tuple(self.samples_per_draw),
            order=named,
            num_cycles=self.num_cycles,
            seed=seed,
        )
        for stream, count in zip(self.buckets, self.samples_per_draw, strict=True):
            if stream.num_samples < count:
                log.warning(
                    "bucket %d has %d samples and a draw takes %d of them: it repeats samples. "
                    "Make steps smaller (tokens_per_step; elsewhere rows_per_block or the global "
                    "batch size), or pack without this bucket",
                    *(stream.capacity, stream.num_samples, count),
                )
        self._windows: OrderedDict[tuple[int, int], Ids] = OrderedDict()

    @classmethod
    def from_config(
        cls,
        index: SampleIndex | Sequence[SampleIndex] | HasSamples,
        config: ScheduleConfig,
        *,
        weights: Sequence[float] | None = None,
    ) -> Schedule:
        """The same from a configuration read from YAML."""
        return cls(index, weights=weights, **to_dict(config))

    def _samples_per_draw(self, capacity: int) -> int:
        tokens, row = self.config.draw_tokens, self.config.row_tokens
        if row is None:
            if tokens % capacity:
                raise ConfigError(
                    f"a draw of {tokens} tokens cannot consist of samples of {capacity}. Choose a "
                    f"multiple of {capacity} ({tokens // capacity * capacity} or "
                    f"{(tokens // capacity + 1) * capacity}), or set row_tokens: a row holds as "
                    "many whole samples as fit, the rest of it is padding"
                )
            return tokens // capacity
        if tokens % row:
            raise ConfigError(f"row_tokens {row} does not divide the {tokens} tokens of a draw")
        if capacity > row:
            raise ConfigError(f"a row of {row} tokens cannot hold a sample of {capacity}")
        return tokens // row * (row // capacity)

    # --- counting -------------------------------------------------------------------------------

    def num_steps(self, num_epochs: int = 1) -> int:
        """Steps after which every sample was seen at least ``num_epochs`` times.

        At most ``samples_per_draw - 1`` samples per bucket are seen once more: the first of the
        next epoch, which fill the last draw. An epoch of a blend is as many tokens as its datasets
        have together; what that means for each of them, ``plan_run`` tells.
        """
        return -(-self.draws.begin(num_epochs * self.num_cycles) // self.config.draws_per_step)

    def tokens_before(self, step: int) -> int:
        """Tokens of the first ``step`` steps, padding included."""
        return step * self.config.tokens_per_step

    def num_draws(self, step: int) -> Ids:
        """(num_buckets,) how often every bucket is drawn in the first ``step`` steps."""
        return self.draws.counts(step * self.config.draws_per_step)

    def bucket_of_draws(self, begin: int, end: int) -> NDArray[np.int32]:
        """Bucket of draws ``[begin, end)``; with ``mix="step"`` draws are steps."""
        return self.draws.buckets(begin, end)

    # --- the content of steps -------------------------------------------------------------------

    def step(self, i: int) -> Step:
        """Step ``i``, counted from 0; any step at any time."""
        if i < 0:
            raise IndexError(f"step {i}; steps are counted from 0")
        n = self.config.draws_per_step
        draws = tuple(self._draw(j) for j in range(i * n, (i + 1) * n))
        return Step(i, draws, self.samples.count_labels)

    def _draw(self, draw: int) -> Draw:
        bucket, turn = self.draws.locate(draw)
        return Draw(bucket, self.buckets[bucket].capacity, self._samples(bucket, turn))

    def _samples(self, bucket: int, turn: int) -> Ids:
        """Samples of the ``turn``-th draw of a bucket."""
        stream, count = self.buckets[bucket], self.samples_per_draw[bucket]
        if self.config.cost_window == 1:
            return stream.ids(turn * count, (turn + 1) * count)
        begin, end = self.draws.window(bucket, turn, self.config.cost_window)
        rows: Ids = self._window(bucket, begin, end)[turn - begin]
        return rows

    def _window(self, bucket: int, begin: int, end: int) -> Ids:
        """(end - begin, samples) ids of some draws, sorted by cost, draws in random order."""
        known = self._windows.get((bucket, begin))
        if known is not None:
            return known
        stream, count = self.buckets[bucket], self.samples_per_draw[bucket]
        ids = stream.ids(begin * count, end * count)
        by_cost = np.argsort(self.samples.attention_cost(ids, stream.capacity), kind="stable")
        key = fold_key(self.config.seed, 3, bucket, begin)
        order = _core.permute_range(key, end - begin, 0, end - begin)
        rows: Ids = ids[by_cost].reshape(end - begin, count)[order]
        self._windows[bucket, begin] = rows
        while len(self._windows) > _WINDOWS:  # threads may do so at once: nothing is lost
            with suppress(KeyError):
                self._windows.popitem(last=False)
        return rows

    # --- resume ---------------------------------------------------------------------------------

    def identity(self) -> dict[str, Any]:
        """Everything that decides the order of samples: numbers, names and fingerprints (JSON)."""
        return {
            "order_version": resume.ORDER_VERSION,
            **to_dict(self.config),
            "num_cycles": self.num_cycles,
            "indices": list(self.samples.fingerprints),
            "weights": self.samples.weights,
        }

    def state_dict(self, step: int) -> dict[str, Any]:
        """What a checkpoint keeps before ``step`` is taken: that number and ``identity``; JSON."""
        return {"step": int(step), **self.identity()}

    def check_state(
        self, state: Mapping[str, Any], allow_change: Collection[str] = ()
    ) -> list[str]:
        """Refuse a state of another order of samples; see ``megapack.data.resume.check_state``."""
        return resume.check_state(self.identity(), state, allow_change)

    def resume_step(self, state: Mapping[str, Any], allow_change: Collection[str] = ()) -> int:
        """The step to continue with. Raises ResumeError as ``check_state`` does."""
        return resume.resume_step(self.identity(), state, allow_change)
