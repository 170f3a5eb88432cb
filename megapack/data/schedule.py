"""What every optimizer step contains: a pure function of (samples, configuration, step).

- ``Schedule``: step -> samples, and samples -> steps, computed without what lies before.
- ``Step``, ``Draw``: what a step holds.
- ``StageDraws``: the draws of one stage of the program.

    Schedule(index, tokens_per_step=256, seed=1).step(3).draws
    # -> (Draw(bucket=0, capacity=64, sample_ids=[17, 4, 30, 9]),)

All ranks compute the same without talking to each other. Steps hold a constant number of tokens;
what a step holds does not depend on the number of ranks, the micro batch size or the number of
workers, so a run may stop at any step and continue with others. Nothing is dropped: a bucket is an
endless stream (``megapack.data.bucket_streams``) of which every draw takes the next ``k`` samples,
and a draw that reaches the end of an epoch continues with the next one.

Every bucket of every source has one cursor, the number of its samples that were taken since the run
began. A stage knows the cursors at its first draw, and inside it they follow from the order of
draws and the blend, both in closed form; the next stage begins with those at its end. At cursor c a
bucket of n samples gives element ``c mod n`` of the order of its epoch ``c div n``
(``megapack.data.sample_order``). So inside an epoch of a source's bucket no sample is repeated or
missed, whatever the stages do.

In every stage the blend is exact: of the first n samples of a bucket a source has given n times its
weight there, within 1.69. Over k stages these errors add up, so what it has given is within 1.69 k
of the sum of samples x weight over the stages; a stage that goes on after skipped steps counts
twice, since it is bounded at both ends.
"""

from __future__ import annotations

import copy
import logging
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property, partial
from math import ceil
from os import PathLike
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megapack.data import resume
from megapack.data.blend import Mixture, Stage
from megapack.data.bucket_streams import (
    CostWindows,
    Cursors,
    FiniteStream,
    Moves,
    bucket_streams,
    shuffle_keys,
)
from megapack.data.program import resolve
from megapack.data.sample_order import Epochs
from megapack.data.sources import HasSamples, SampleSource, Shards
from megapack.data.stage_settings import Program, StageSettings, spans, tokens_before
from megapack.data.steps import DrawOrder, ScheduleConfig, StepView, fold_key, order_named
from megapack.errors import ConfigError
from megapack.packing.sharded import SourceIndex

Ids = NDArray[np.int64]
log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Draw:
    """Samples of one bucket that go through the model together.

    Attributes:
        bucket: number of the bucket among those that have samples, by rising capacity.
        capacity: tokens per sample.
        sample_ids: (samples,) int64, global ids; fewer where a finite schedule ends.
        view: what the step requires of these samples.
    """

    bucket: int
    capacity: int
    sample_ids: Ids
    view: StepView


@dataclass(frozen=True, eq=False)
class Step:
    """One optimizer step of all ranks; ``mix="step"`` has one draw, ``micro_step`` several.

    Attributes:
        index: of the step, counted from 0.
        draws: what it holds.
        count_labels: (sample ids, view) -> tokens of each sample that have a label.
    """

    index: int
    draws: tuple[Draw, ...]
    count_labels: Callable[[Ids, StepView], Ids] = field(repr=False)

    @property
    def bucket(self) -> int:
        """The bucket of the first draw."""
        return self.draws[0].bucket

    @property
    def capacity(self) -> int:
        """Tokens per sample of the first draw."""
        return self.draws[0].capacity

    @cached_property
    def sample_ids(self) -> Ids:
        """Those of all draws, int64."""
        return np.concatenate([draw.sample_ids for draw in self.draws])

    @cached_property
    def view(self) -> StepView:
        """Requirements of the step on its samples, in the order of ``sample_ids``."""
        return StepView.concatenate([draw.view for draw in self.draws])

    @cached_property
    def label_counts(self) -> Ids:
        """Tokens of every sample that have a label, in the order of ``sample_ids``; int64."""
        return self.count_labels(self.sample_ids, self.view)

    @property
    def num_label_tokens(self) -> int:
        """Tokens of the step that have a label: its loss denominator."""
        return int(self.label_counts.sum())


class StageDraws:
    """The draws of one stage, any of them computed by itself.

    Args:
        settings: the stage.
        samples: of the whole run.
        before: the stage that drew the steps before the first draw, if there is one: the stage
            before, or the last one of what this one skips.
        first: the step of ``before`` whose cursors are those at the first draw.
        largest: capacity of the largest bucket of the stages before; the first draw takes a larger
            one, so that running out of memory happens at once.
        finite: see ``Schedule``.

    Attributes:
        begin: first step.
        config, weights, ramping, fim_rates: those of the settings.
        view: exclusion lists in force; the part of the steps' views that all steps share.
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
        first: int,
        largest: int,
        *,
        finite: bool = False,
    ) -> None:
        self.settings = settings
        self.skipped: list[StageDraws] = []
        self.begin, self.config, self.weights = settings.begin, settings.config, settings.weights
        self._take_settings(settings)
        self.samples = samples
        order, seed = order_named(self.config.order), self.config.seed
        if any(samples.mixture.scores or ()) and not order.shuffled and not finite:
            raise ConfigError(
                f"order {self.config.order} takes samples as the index has them, and a source has "
                "scores to order them by: leave out one of the two"
            )
        self._orders = samples.orders if order.shuffled else {}
        self._before = (before, first)
        self._cursors: Cursors = before.cursors(first) if before else {}
        self._moves: Moves | None = None if before and self.config.cost_window > 1 else {}
        self._key = fold_key(seed, 4, self.begin) if self.begin else seed
        self.buckets = (
            [FiniteStream(bucket) for bucket in samples.buckets]
            if finite
            else bucket_streams(
                samples.buckets,
                self.weights,
                seed,
                shuffled=order.shuffled,
                starts=self._cursors,
                orders=self._orders,
                windows=self._windows,
            )
        )
        self.samples_per_draw = [self.config.samples_per_draw(b.capacity) for b in self.buckets]
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
            repeats = not (finite or self.ramping)  # once for all pieces of a ramp
            if stream.num_samples < count and repeats:
                log.warning(
                    "bucket %d has %d samples and a draw takes %d of them: it repeats samples. "
                    "Make steps smaller (tokens_per_step; elsewhere rows_per_block or the global "
                    "batch size), or pack without this bucket",
                    *(stream.capacity, stream.num_samples, count),
                )

    def __str__(self) -> str:
        """How messages about it begin."""
        return f"the stage from step {self.begin}: " if self.begin else ""

    def _take_settings(self, settings: StageSettings) -> None:
        self.ramping, self.fim_rates = settings.ramping, settings.fim_rates
        self.view = settings.view

    def continued(self, settings: StageSettings, first: int) -> StageDraws:
        """Return a stage that continues with the draws of step ``first`` of this one."""
        result = copy.copy(self)
        result.settings, result.skipped = settings, []
        result.begin = settings.begin
        result._take_settings(settings)
        result._first_draw = self.draw_of(first)
        return result

    def skipped_steps(self) -> Iterator[tuple[Draw, ...]]:
        """The draws of every step that is skipped before the stage begins, in their order."""
        end = self.begin + self.settings.skip_steps
        for stage, stop in spans(self.skipped, end) if self.skipped else ():
            yield from stage.skipped_steps()
            yield from map(stage.step_draws, range(stage.begin, stop))

    @property
    def steps_per_epoch(self) -> int:
        """Steps that see every sample at least once, beginning at the stage's first draw."""
        return -(-self.draws.begin(self.num_cycles) // self.config.draws_per_step)

    def draw_of(self, step: int) -> int:
        """The first draw of a step of the run."""
        return self._first_draw + (step - self.begin) * self.config.draws_per_step

    def num_draws(self, step: int) -> Ids:
        """(buckets,) how often each is drawn from the stage's begin up to a step."""
        return self.draws.counts(self.draw_of(step)) - self.draws.counts(self._first_draw)

    def step_draws(self, step: int, view: StepView | None = None) -> tuple[Draw, ...]:
        """Return the draws of a step of this stage; ``view``: what all its samples share."""
        first, view = self.draw_of(step), view or self.view
        return tuple(self._draw(first + i, view) for i in range(self.config.draws_per_step))

    def _draw(self, draw: int, view: StepView) -> Draw:
        bucket, turn = self.draws.locate(draw)
        stream, count = self.buckets[bucket], self.samples_per_draw[bucket]
        begin, end = turn * count, (turn + 1) * count
        ids = stream.ids(begin, end)
        if self.fim_rates is not None:
            rates = np.array(self.fim_rates, np.float64)[self.samples.locate(ids)[0]]
            view = replace(view, epochs=stream.epochs(begin, end), fim_rates=rates)
        return Draw(bucket, stream.capacity, ids, view)

    # --- cursors --------------------------------------------------------------------------------

    def taken(self, step: int) -> Iterator[tuple[int, Ids, Ids]]:
        """For every bucket its capacity, its sources, and the samples each gave before a step.

        Counted from the stage's begin; what was passed over is not among them.
        """
        firsts, ends = self._ends(self._first_draw), self._ends(self.draw_of(step))
        for stream, first, end in zip(self.buckets, firsts, ends, strict=True):
            taken = stream.taken(end) - stream.taken(first)
            yield stream.capacity, stream.sources, taken

    def cursors(self, step: int) -> Cursors:
        """Cursors before a step, also of those that the stage does not move."""
        result = dict(self._cursors)
        none = np.zeros(len(self.samples.indices), np.int64)
        for stream, end in zip(self.buckets, self._ends(self.draw_of(step)), strict=True):
            own = result.get(stream.capacity, none).copy()
            own[stream.sources] = stream.starts + stream.taken(end)
            result[stream.capacity] = own
        return result

    def order_at(self, source: int, capacity: int, step: int) -> tuple[Epochs, int]:
        """The order of a bucket of a source as it is before a step, and the cursor there."""
        for b, i in self._where(source, capacity):
            end = self._ends(self.draw_of(step))[b]
            return self.buckets[b].order_at(i, end), self.buckets[b].cursor(i, end)
        [bucket] = [own for own in self.samples.buckets if own.capacity == capacity]
        [size] = bucket.sizes[bucket.sources == source].tolist()
        place, taken = (source, capacity), self._cursors.get(capacity)
        key = None
        if order_named(self.config.order).shuffled:
            key = int(shuffle_keys(self.config.seed, capacity, np.array([source]))[0])
        epochs = Epochs(size, key, self._orders.get(place), self._moves_before().get(place))
        return epochs, 0 if taken is None else int(taken[source])

    def _ends(self, draw: int) -> list[int]:
        """Positions of the streams that the draws before one have taken."""
        ends: list[int] = (self.draws.counts(draw) * self.samples_per_draw).tolist()
        return ends

    def _where(self, source: int, capacity: int) -> list[tuple[int, int]]:
        """The number of the bucket, and of the source in it; none where it is not drawn."""
        return [
            (b, int(stream.sources.searchsorted(source)))
            for b, stream in enumerate(self.buckets)
            if stream.capacity == capacity and source in stream.sources
        ]

    def _windows(self, capacity: int) -> CostWindows | None:
        if self.config.cost_window == 1:
            return None
        return CostWindows(
            num_draws=self.config.cost_window,
            samples_per_draw=self.config.samples_per_draw(capacity),
            key=fold_key(self._key, 3, capacity),
            cost=partial(self.samples.attention_cost, capacity=capacity, whole=False),
            moves=self._moves_before,
        )

    def _moves_before(self) -> Moves:
        """Moves that windows of earlier stages left for samples of this stage or later."""
        waiting = [self]
        while waiting[-1]._moves is None:  # one after the other: there may be thousands of stages
            before, _ = waiting[-1]._before
            assert before is not None
            waiting.append(before)
        moves = waiting.pop()._moves or {}
        for stage in reversed(waiting):
            before, end = stage._before
            assert before is not None
            moves = dict(moves)
            for stream, position in zip(
                before.buckets, before._ends(before.draw_of(end)), strict=True
            ):
                moves |= stream.moves_at(position)
            cursors = stage._cursors
            moves = {(d, c): move for (d, c), move in moves.items() if move.end > cursors[c][d]}
            stage._moves = moves
        return moves

    # --- the inverse ----------------------------------------------------------------------------

    def steps_of(self, sample: int, end: int) -> list[int]:
        """In which steps of the stage before ``end`` a global sample id is drawn, ascending."""
        capacity = self.samples.capacity_of(sample)
        source = int(self.samples.locate(np.array([sample]))[0][0])
        found = []
        for b, _ in self._where(source, capacity):
            position = self._ends(self.draw_of(end))[b]
            count = self.samples_per_draw[b]
            turns = [at // count for at in self.buckets[b].positions(sample, position)]
            found = sorted(self.draws.draw_at(b, turn) for turn in turns)
        steps = [self._step_of(draw) for draw in found if draw >= self._first_draw]
        return [step for step in steps if step < end]

    def last_step(self, source: int, capacity: int, samples: Ids, end: int) -> int:
        """The last step before ``end`` that draws one of some samples of a bucket of a source.

        Samples are counted from the bucket's first one; the stage draws one of them before ``end``.
        """
        [(b, i)] = self._where(source, capacity)
        position = self.buckets[b].latest(i, samples, self._ends(self.draw_of(end))[b])
        return self._step_of(self.draws.draw_at(b, position // self.samples_per_draw[b]))

    def _step_of(self, draw: int) -> int:
        return self.begin + (draw - self._first_draw) // self.config.draws_per_step


def open_stages(
    program: Program,
    samples: SampleSource,
    *,
    finite: bool = False,
    before: StageDraws | None = None,
    largest: int = 0,
) -> list[StageDraws]:
    """The draws of every stage. Raises ConfigError as ``StageDraws`` does, naming the stage.

    Args:
        before: the stage that draws the steps before the program.
        largest: see ``StageDraws``.
    """
    stages: list[StageDraws] = []
    for settings in program:
        previous, first = (stages[-1] if stages else before), settings.begin
        skipped: list[StageDraws] = []
        if settings.skipped:
            skipped = open_stages(settings.skipped, samples, before=previous, largest=largest)
            previous, first = skipped[-1], first + settings.skip_steps
        if previous is not None and settings.same_draws(previous.settings):
            stage = previous.continued(settings, first)
        else:
            try:
                stage = StageDraws(settings, samples, previous, first, largest, finite=finite)
            except ConfigError as error:
                where = f"the stage from step {settings.begin}: " if settings.begin else ""
                raise ConfigError(f"{where}{error}") from error
        stage.skipped = skipped
        stages.append(stage)
        largest = max(largest, stage.buckets[-1].capacity)
    return stages


def _check_tokens_once(shards: Shards) -> None:
    """Refuse what a finite schedule cannot have: ConfigError names the index and the strategy."""
    for index in map(shards.index, range(len(shards))):
        if index.dropped_tokens or index.repeated_tokens:
            raise ConfigError(
                f"{index.path or 'the index'}: strategy {index.strategy!r} has dropped "
                f"{index.dropped_tokens:,} tokens and repeated {index.repeated_tokens:,}; evaluate "
                "with an index that places every token once (strategy bucket)"
            )


class Schedule:
    """The steps of a run.

    Args:
        index: what to draw from: a ``SampleIndex``, several, or a ``PackedDataset`` (or its
            ``samples``), which brings its ``Mixture`` and counts label tokens exactly. Bare indices
            know where documents end as long as their strategy dropped no tokens.
        config: what a step contains; None: made of ``fields``.
        weights: shares of tokens of several indices; None: in proportion to their tokens.
        names: of the indices, for stages and reports.
        stages: what changes at later steps (``megapack.data.program``).
        finite: every sample of all sources once, whatever the weights and stages, in the order of
            the indices; the last draw of a bucket has what is left, later ones nothing. For
            evaluation: ``num_steps()`` is where it ends. An index that drops or repeats tokens is
            refused.
        fields: of ``ScheduleConfig``: tokens_per_step, seed, order, num_cycles, mix, ...

    Raises:
        ConfigError: capacities and tokens_per_step do not fit; the message names the remedy.
    """

    def __init__(
        self,
        index: SourceIndex | Sequence[SourceIndex] | SampleSource | HasSamples,
        config: ScheduleConfig | None = None,
        *,
        weights: Sequence[float] | None = None,
        names: Sequence[str] | None = None,
        stages: Sequence[Stage] = (),
        finite: bool = False,
        **fields: Any,
    ) -> None:
        if config is not None and fields:
            raise ConfigError(
                f"config says what a step contains, and {', '.join(fields)} too: give one of the "
                "two (dataclasses.replace changes a config)"
            )
        self.config = config or ScheduleConfig(**fields)
        for name in [index, *index] if isinstance(index, Sequence) else [index]:
            if isinstance(name, str | PathLike):
                raise ConfigError(
                    f"{name!r} is a file's name: give SampleIndex.load({str(name)!r})"
                )
        source = index if isinstance(index, SampleSource) else getattr(index, "samples", None)
        if source is None:
            indices: Any = index if isinstance(index, Sequence) else [index]
            mixture = Mixture(weights=weights, names=names, stages=stages)
            source = SampleSource(indices, mixture)
        elif weights is not None or names or stages:
            raise ConfigError(
                "a PackedDataset brings its weights, names and stages; give them when it is made"
            )
        self.samples: SampleSource = source
        mixture = self.samples.mixture
        if finite:
            _check_tokens_once(self.samples.shards)
            mixture = replace(mixture, weights=None, stages=(), decided=(), run_tokens=None)
            mixture = replace(mixture, fim=None, fim_rates=None)  # documents as they are
        self.finite = finite
        self.program = resolve(self.config, mixture, self.samples.tokens_per_epoch.tolist())
        self.stages = open_stages(self.program, self.samples, finite=finite)
        self.capacities = sorted({b.capacity for stage in self.stages for b in stage.buckets})

    # --- counting -------------------------------------------------------------------------------

    def stage_at(self, step: int) -> StageDraws:
        """The stage that a step belongs to."""
        return self.stages[bisect_right(self.stages, step, key=lambda stage: stage.begin) - 1]

    def settings_at(self, step: int) -> StageSettings:
        """Settings of the program at a step, beside its draws."""
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

        An epoch of a blend is as many tokens as its sources have together; what that means for
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
        view = replace(stage.view, window=self.settings_at(i).window_at(i))
        return Step(i, stage.step_draws(i, view), self.samples.count_labels)

    def shortest_step(self, begin: int, end: int) -> int:
        """The first of steps ``[begin, end)`` that has samples of the smallest bucket there is in
        them: where most documents share a row, and a probe of a model sees most."""
        capacities = [min(draw.capacity for draw in self.step(i).draws) for i in range(begin, end)]
        return begin + capacities.index(min(capacities))

    def steps_of(self, sample: int, num_steps: int) -> list[int]:
        """Which of the first ``num_steps`` steps draw a global sample id, without looking at them.

        The shuffle, the blend and the order of draws are inverted; a step comes twice where it
        draws the sample twice.
        """
        spans = self.spans(num_steps)
        return [step for stage, end in spans for step in stage.steps_of(sample, end)]

    def masked_from(self, source: int, document: int) -> int | None:
        """The first step from which a document of a source is masked; None: it never is."""
        masks, ids = self.samples.exclusions.masks, np.array([document])
        return next((s.begin for s in self.stages if masks(source, ids, s.view).all()), None)

    # --- resume ---------------------------------------------------------------------------------

    def identity(self) -> dict[str, Any]:
        """Everything that decides the order of samples: numbers, names and fingerprints (JSON)."""
        return resume.identity(self.program, self.samples)

    def state_dict(self, step: int) -> dict[str, Any]:
        """State for a checkpoint before ``step`` is taken: that number and ``identity``; JSON."""
        return {"step": int(step), **self.identity()}

    def check_state(
        self, state: Mapping[str, Any], allow_change: Collection[str] = ()
    ) -> list[str]:
        """Refuse a state of another order of samples; see ``megapack.data.resume.check_state``."""
        return resume.check_state(self.identity(), state, allow_change)

    def resume_step(self, state: Mapping[str, Any], allow_change: Collection[str] = ()) -> int:
        """The step to continue with. Raises ResumeError as ``check_state`` does."""
        return resume.resume_step(self.identity(), state, allow_change)
