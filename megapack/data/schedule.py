"""What every optimizer step contains: a pure function of (index, configuration, step).

All ranks compute the same without talking to each other, and any step is computed without those
before it. Steps hold a constant number of tokens; what a step holds does not depend on the number
of ranks, the micro batch size or the number of workers, so a run may stop at any step and continue
with others. Nothing is dropped: a bucket is an endless stream (``megapack.data.bucket_order``) of
which
every draw takes the next ``k`` samples, and a draw that reaches the end of an epoch continues with
the next one.
"""

from __future__ import annotations

import copy
import logging
from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from fractions import Fraction
from functools import partial
from math import ceil
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from megapack.config import to_dict
from megapack.data import resume
from megapack.data.bucket_order import (
    CostWindows,
    Cursors,
    DrawOrder,
    Moves,
    Place,
    bucket_streams,
    fold_key,
    order_named,
    shuffle_key,
)
from megapack.data.program import (
    Draw,
    Program,
    ScheduleConfig,
    Stage,
    StageSettings,
    Step,
    resolve,
    spans,
    tokens_before,
)
from megapack.data.sample_order import BlockOrder, Epochs, ScoreOrder
from megapack.data.sources import HasSamples, SampleSource
from megapack.errors import ConfigError
from megapack.packing.sharded import SourceIndex

# ---- The draws of one stage: which samples each of them takes, computed without those before it -
# Every bucket of every source has one cursor, the number of its samples that were taken since the
# run began. A stage knows the cursors at its first draw, and inside it they follow from the order
# of
# draws and the blend, both in closed form; the next stage begins with those at its end. At cursor
# c a
# bucket of n samples gives element ``c mod n`` of the order of its epoch ``c div n``
# (``megapack.data.sample_order``). So inside an epoch of a source's bucket no sample is repeated
# or missed,
# whatever the stages do.
#
# In every stage the blend is exact: of the first n samples of a bucket a source has given n times
# its
# weight there, within 1.69 (``megapack.data.bucket_order``). Over k stages these errors add up, so
# what it
# has given is within 1.69 k of the sum of samples x weight over the stages; a stage that goes on
# after skipped steps counts twice, since it is bounded at both ends.

Ids = NDArray[np.int64]
log = logging.getLogger(__name__)


class StageDraws:
    """See the module.

    Args:
        settings: the stage.
        samples: of the whole run.
        before: the stage before, if there is one; its cursors after what this one passes over are
            those at the first draw.
        largest: capacity of the largest bucket of the stages before; the first draw takes a larger
            one, so that running out of memory happens at once.

    Attributes:
        begin: first step.
        config, weights, num_lists, ramping: those of the settings.
        buckets: streams of samples, by rising capacity.
        samples_per_draw: of every bucket.
        num_cycles: per epoch of the order.
        draws: the order of draws.

    Raises:
        ConfigError: capacities and tokens_per_step do not fit; the message names the remedy.
    """

    def __init__(
        self,
        settings: StageSettings,
        samples: SampleSource,
        before: StageDraws | None,
        largest: int,
    ) -> None:
        first = settings.begin + settings.skip_steps
        self.begin, self.config, self.weights = settings.begin, settings.config, settings.weights
        self.num_lists, self.ramping = settings.num_lists, settings.ramping
        self.samples = samples
        order = order_named(self.config.order)
        seed = self.config.seed
        if samples.score_orders and not order.shuffled:
            raise ConfigError(
                f"order {self.config.order} takes samples as the index has them, and a source has "
                "scores to order them by: leave out one of the two"
            )
        self._cursors: Cursors = before.cursors(first) if before else {}
        self._moves: Moves | None = None if before and self.config.cost_window > 1 else {}
        self._before, self._before_end = before, first
        self._key = fold_key(seed, 4, self.begin) if self.begin else seed
        self.buckets = bucket_streams(
            samples.buckets,
            self.weights,
            seed,
            shuffled=order.shuffled,
            starts=self._cursors,
            orders=self._orders,
            windows=self._windows,
            moves=self.moves_before,
        )
        self.samples_per_draw = [
            _samples_per_draw(self.config, stream.capacity) for stream in self.buckets
        ]
        self.num_cycles = self.config.num_cycles or order.num_cycles
        self.draws = DrawOrder(
            samples_per_epoch=tuple(stream.samples_per_epoch for stream in self.buckets),
            samples_per_draw=tuple(self.samples_per_draw),
            order=order,
            num_cycles=self.num_cycles,
            seed=self._key,
            largest_first=self.buckets[-1].capacity > largest,
        )
        self._first_draw = 0
        for stream, count in zip(self.buckets, self.samples_per_draw, strict=True):
            if stream.num_samples < count and not self.ramping:  # once for all pieces of a ramp
                log.warning(
                    "bucket %d has %d samples and a draw takes %d of them: it repeats samples. "
                    "Make steps smaller (tokens_per_step; elsewhere rows_per_block or the global "
                    "batch size), or pack without this bucket",
                    *(stream.capacity, stream.num_samples, count),
                )

    def __str__(self) -> str:
        """How messages about it begin."""
        return f"the stage from step {self.begin}: " if self.begin else ""

    def continued(self, settings: StageSettings) -> StageDraws:
        """The same draws, of which some steps may be passed over before the stage begins."""
        result = copy.copy(self)
        result.begin, result.num_lists = settings.begin, settings.num_lists
        result.ramping = settings.ramping
        result._first_draw = self.draw_of(settings.begin + settings.skip_steps)
        return result

    @property
    def steps_per_epoch(self) -> int:
        """Steps that see every sample at least once, beginning at the stage's first draw."""
        return -(-self.draws.begin(self.num_cycles) // self.config.draws_per_step)

    def draw_of(self, step: int) -> int:
        """The first draw of a step of the run."""
        return self._first_draw + (step - self.begin) * self.config.draws_per_step

    def step_of(self, draw: int) -> int | None:
        """The step of a draw; None: it was passed over."""
        step = self.begin + (draw - self._first_draw) // self.config.draws_per_step
        return step if draw >= self._first_draw else None

    def num_draws(self, step: int) -> Ids:
        """(buckets,) how often each is drawn from the stage's begin up to a step."""
        return self.draws.counts(self.draw_of(step)) - self.draws.counts(self._first_draw)

    def taken(self, step: int) -> Iterator[tuple[int, Ids, Ids]]:
        """Of every bucket: capacity, numbers of its indices, samples that each gives up to a step.

        Counted from the stage's begin; what was passed over is not among them.
        """
        first, last = (
            self.draws.counts(draw) * self.samples_per_draw
            for draw in (self._first_draw, self.draw_of(step))
        )
        for stream, begin, end in zip(self.buckets, first.tolist(), last.tolist(), strict=True):
            yield stream.capacity, stream.datasets, stream.taken(end) - stream.taken(begin)

    def cursors(self, step: int) -> Cursors:
        """Cursors before a step, also of those that the stage does not move."""
        result = dict(self._cursors)
        ends = self.draws.counts(self.draw_of(step)) * self.samples_per_draw
        none = np.zeros(len(self.samples.indices), np.int64)
        for stream, end in zip(self.buckets, ends.tolist(), strict=True):
            own = result.get(stream.capacity, none).copy()
            own[stream.datasets] = stream.starts + stream.taken(end)
            result[stream.capacity] = own
        return result

    def step_draws(self, step: int) -> tuple[Draw, ...]:
        """What a step of the run holds, if it is one of the stage."""
        first = self.draw_of(step)
        return tuple(self._draw(first + i) for i in range(self.config.draws_per_step))

    def _draw(self, draw: int) -> Draw:
        bucket, turn = self.draws.locate(draw)
        return Draw(bucket, self.buckets[bucket].capacity, self.ids(bucket, turn))

    def steps_of(self, sample: int, end: int) -> list[int]:
        """In which steps of the stage before ``end`` a global sample id is drawn, ascending."""
        capacity = self.samples.capacity_of(sample)
        dataset = self.samples.locate(np.array([sample]))[0][0]
        num_turns = self.draws.counts(self.draw_of(end)).tolist()
        found = [
            self.draws.draw_at(b, position // count)
            for b, (stream, count) in enumerate(
                zip(self.buckets, self.samples_per_draw, strict=True)
            )
            if stream.capacity == capacity and dataset in stream.datasets
            for position in stream.positions(sample, num_turns[b] * count)
        ]
        steps = [self.step_of(draw) for draw in sorted(found)]
        return [step for step in steps if step is not None and step < end]

    def ids(self, bucket: int, turn: int) -> Ids:
        """Samples of the ``turn``-th draw of a bucket."""
        count = self.samples_per_draw[bucket]
        return self.buckets[bucket].ids(turn * count, (turn + 1) * count)

    def last_step(self, source: int, capacity: int, samples: Ids, end: int) -> int:
        """The last step before ``end`` that draws one of some samples of a bucket of a source.

        Samples are counted from the bucket's first one; the stage draws one of them before ``end``.
        """
        [(b, i)] = self._where(source, capacity)
        count = self.samples_per_draw[b]
        turns = int(self.draws.counts(self.draw_of(end))[b])
        position = self.buckets[b].latest(i, samples, turns * count)
        step = self.step_of(self.draws.draw_at(b, position // count))
        assert step is not None
        return step

    def order_at(self, source: int, capacity: int, step: int) -> tuple[Epochs, int]:
        """The order of a bucket of a source as it is before a step, and the cursor there."""
        for b, i in self._where(source, capacity):
            end = int(self.draws.counts(self.draw_of(step))[b]) * self.samples_per_draw[b]
            return self.buckets[b].order_at(i, end), self.buckets[b].cursor(i, end)
        place = (source, capacity)
        [size] = [
            int(sizes[datasets == source][0])
            for of, datasets, _, sizes in self.samples.buckets
            if of == capacity
        ]
        shuffled = order_named(self.config.order).shuffled
        key = shuffle_key(self.config.seed, capacity, source) if shuffled else None
        taken = self._cursors.get(capacity)
        moves = self.moves_before().get(place, ())
        epochs = Epochs(size, key, self._orders.get(place), moves)
        return epochs, 0 if taken is None else int(taken[source])

    def moves_before(self) -> Moves:
        """What windows of the stages before moved of samples that come in this one or later."""
        waiting = [self]
        while waiting[-1]._moves is None:  # one after the other: there may be thousands of stages
            assert waiting[-1]._before is not None
            waiting.append(waiting[-1]._before)
        for stage in reversed(waiting[:-1]):
            before = stage._before
            assert before is not None and before._moves is not None
            ends = before.draws.counts(before.draw_of(stage._before_end)) * before.samples_per_draw
            moves = dict(before._moves)
            for stream, end in zip(before.buckets, ends.tolist(), strict=True):
                moves.update(stream.moves_at(end))
            stage._moves = {place: left for place, left in moves.items() if left}
        assert self._moves is not None
        return self._moves

    def _where(self, source: int, capacity: int) -> list[tuple[int, int]]:
        """The number of the bucket, and of the source in it; none where it is not drawn."""
        return [
            (b, int(stream.datasets.searchsorted(source)))
            for b, stream in enumerate(self.buckets)
            if stream.capacity == capacity and source in stream.datasets
        ]

    @property
    def _orders(self) -> Mapping[Place, ScoreOrder | BlockOrder]:
        return self.samples.orders if order_named(self.config.order).shuffled else {}

    def _windows(self, capacity: int) -> CostWindows | None:
        if self.config.cost_window == 1:
            return None
        return CostWindows(
            num_draws=self.config.cost_window,
            samples_per_draw=_samples_per_draw(self.config, capacity),
            key=fold_key(self._key, 3, capacity),
            cost=partial(self.samples.attention_cost, capacity=capacity, whole=False),
        )


def open_stages(program: Program, samples: SampleSource) -> list[StageDraws]:
    """The draws of every stage. Raises ConfigError as ``StageDraws`` does, naming the stage."""
    stages: list[StageDraws] = []
    largest = 0
    for before, settings in zip((None, *program[:-1]), program, strict=True):
        if before is None:
            stages.append(StageDraws(settings, samples, None, largest))
        elif settings.same_draws(before):
            stages.append(stages[-1].continued(settings))
        else:
            try:
                stages.append(StageDraws(settings, samples, stages[-1], largest))
            except ConfigError as error:
                raise ConfigError(f"the stage from step {settings.begin}: {error}") from error
        largest = max(largest, stages[-1].buckets[-1].capacity)
    return stages


def _samples_per_draw(config: ScheduleConfig, capacity: int) -> int:
    tokens, row = config.draw_tokens, config.row_tokens
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


class Schedule:
    """The steps of a run.

    Args:
        index: what to draw from: a ``SampleIndex``, a ``PackedDataset``, or several indices. A
            PackedDataset brings its blend weights and counts label tokens exactly; bare indices
            know where documents end as long as their strategy dropped no tokens.
        weights: shares of tokens of several indices; None: in proportion to their tokens.
        names: of the indices, for stages and reports.
        stages: what changes at later steps (``megapack.data.program``).

    The other arguments are those of ``ScheduleConfig``.

    Raises:
        ConfigError: capacities and tokens_per_step do not fit; the message names the remedy.
    """

    def __init__(
        self,
        index: SourceIndex | Sequence[SourceIndex] | HasSamples,
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
        names: Sequence[str] | None = None,
        stages: Sequence[Stage] = (),
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
        self.samples = SampleSource.of(index, weights, names, stages)
        shares = self.samples.weights or [None] * len(self.samples.indices)
        self.program = resolve(
            self.config,
            tuple(shares),
            self.samples.names,
            self.samples.stages,
            loss_weights=self.samples.loss_weights,
            attention_window=self.samples.attention_window,
        )
        self.stages = open_stages(self.program, self.samples)
        self.capacities = sorted({b.capacity for stage in self.stages for b in stage.buckets})

    @classmethod
    def from_config(
        cls,
        index: SourceIndex | Sequence[SourceIndex] | HasSamples,
        config: ScheduleConfig,
        *,
        weights: Sequence[float] | None = None,
    ) -> Schedule:
        """The same from a configuration read from YAML."""
        return cls(index, weights=weights, **to_dict(config))

    # --- counting -------------------------------------------------------------------------------

    def stage_at(self, step: int) -> StageDraws:
        """The stage that a step belongs to."""
        return self.stages[bisect_right(self.stages, step, key=lambda stage: stage.begin) - 1]

    def settings_at(self, step: int) -> StageSettings:
        """What the program says for a step, beside what it draws."""
        return self.program[bisect_right(self.program, step, key=lambda stage: stage.begin) - 1]

    @property
    def smallest_window(self) -> int | None:
        """The shortest attention window of any step, tokens; None: there is none."""
        windows = [stage.window for stage in self.program if stage.window is not None]
        return min((min(w.last, w.first or w.last) for w in windows), default=None)

    def spans(self, num_steps: int) -> Iterator[tuple[StageDraws, int]]:
        """The first stage and all that begin before ``num_steps``, and where each of them ends."""
        return spans(self.stages, num_steps)

    def tokens_before(self, step: int) -> int:
        """Tokens of the steps before ``step``, padding included."""
        return tokens_before(self.program, step)

    def epochs(self, num_steps: int) -> float:
        """How many epochs the first ``num_steps`` steps are, each stage measured by its own.

        An epoch of a blend is as many tokens as its datasets have together; what that means for
        each of them, ``plan_run`` tells.
        """
        return sum(((end - s.begin) / s.steps_per_epoch for s, end in self.spans(num_steps)), 0.0)

    def num_steps(self, num_epochs: int = 1) -> int:
        """Steps after which every sample was seen at least ``num_epochs`` times.

        At most ``samples_per_draw - 1`` samples per bucket are seen once more: the first of the
        next epoch, which fill the last draw. With several stages, the steps that ``epochs`` calls
        ``num_epochs``.
        """
        if len(self.stages) == 1:
            [stage] = self.stages
            draws = stage.draws.begin(num_epochs * stage.num_cycles)
            return -(-draws // stage.config.draws_per_step)
        missing = Fraction(num_epochs)
        for stage, following in zip(self.stages[:-1], self.stages[1:], strict=True):
            epochs = Fraction(following.begin - stage.begin, stage.steps_per_epoch)
            if missing <= epochs:
                return stage.begin + ceil(missing * stage.steps_per_epoch)
            missing -= epochs
        return self.stages[-1].begin + ceil(missing * self.stages[-1].steps_per_epoch)

    # --- the content of steps -------------------------------------------------------------------

    def step(self, i: int) -> Step:
        """Step ``i``, counted from 0; any step at any time."""
        if i < 0:
            raise IndexError(f"step {i}; steps are counted from 0")
        stage = self.stage_at(i)
        return Step(i, stage.step_draws(i), stage.num_lists, self.samples.count_labels)

    def steps_of(self, sample: int, num_steps: int) -> list[int]:
        """Which of the first ``num_steps`` steps draw a global sample id, without looking at them.

        The shuffle, the blend and the order of draws are inverted; a step comes twice where it
        draws the sample twice.
        """
        spans = self.spans(num_steps)
        return [step for stage, end in spans for step in stage.steps_of(sample, end)]

    def masked_from(self, source: int, document: int) -> int | None:
        """The first step from which a document of a source is masked; None: it never is."""
        first = self.samples.exclusions.first_list(source, document)
        if first is None:
            return None
        return next(stage.begin for stage in self.stages if stage.num_lists >= first)

    # --- resume ---------------------------------------------------------------------------------

    def identity(self) -> dict[str, Any]:
        """Everything that decides the order of samples: numbers, names and fingerprints (JSON)."""
        return resume.identity(self.program, self.samples)

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
