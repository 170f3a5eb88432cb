"""Content of every optimizer step: a pure function of (samples, configuration, step).

- ``Schedule``: step -> samples, and samples -> steps, computed without the steps before.
- ``Step``, ``Draw``: content of a step.
- ``StageDraws``: the draws of one stage of the program.

    Schedule(index, tokens_per_step=256, seed=1).step(3).draws
    # -> (Draw(bucket=0, capacity=64, sample_ids=[17, 4, 30, 9]),)

All ranks compute the same without communication. Steps have a constant number of tokens, for any
number of ranks and any micro batch size. Nothing is dropped: a bucket is an endless stream
(``megapack.data.bucket_streams``) of which every draw takes the next ``k`` samples, and a draw that
reaches the end of an epoch continues with the next one.

Every bucket of every source has one cursor, the number of its samples taken since the run began. A
stage knows the cursors at its first draw; within it they follow from the order of draws and the
blend, both in closed form; the next stage begins with the cursors at its end. So within an epoch of
a source's bucket no sample is repeated or missed, also across stages.

In every stage the blend is exact: of the first n samples of a bucket, each source provides n times
its weight, with an error below 1.69. Over k stages these errors add up to at most 1.69 k; a stage
after skipped steps counts twice, since it has this error at its first and at its last draw.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
import os
import zlib
from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property, partial
from math import ceil
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from megapack.calls import checked_call, without_none
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
from megapack.data.picture import Bar, picture
from megapack.data.program import resolve
from megapack.data.sample_order import Epochs
from megapack.data.sources import HasSamples, SampleSource, check_tokens_once
from megapack.data.stage_settings import Program, StageSettings, spans, tokens_before
from megapack.data.steps import DrawOrder, ScheduleConfig, StepView, fold_key, order_named
from megapack.errors import ArgumentError, ConfigError
from megapack.packing.sharded import SourceIndex, is_shard_manifest
from megapack.units import counted

Ids = NDArray[np.int64]
log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Draw:
    """Samples of one bucket that go through the model together.

    Attributes:
        bucket: number of the bucket among those that have samples, by ascending capacity.
        capacity: tokens per sample.
        sample_ids: (samples,) int64, global ids; fewer where a finite schedule ends.
        view: requirements of the step on these samples.
    """

    bucket: int
    capacity: int
    sample_ids: Ids
    view: StepView


@dataclass(frozen=True, eq=False)
class Step:
    """One optimizer step of all ranks; ``mix="step"`` has one draw, ``micro_step`` several.

    Attributes:
        index: number of the step, counted from 0.
        draws: draws of the step, in order.
        samples: the samples that the draws are of.
    """

    index: int
    draws: tuple[Draw, ...]
    samples: SampleSource = field(repr=False)

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
        """Sample ids of all draws, int64."""
        return np.concatenate([draw.sample_ids for draw in self.draws])

    @property
    def checksum(self) -> str:
        """CRC-32 of ``sample_ids``, 8 hexadecimal digits; ``log.jsonl`` records it."""
        return f"{zlib.crc32(np.ascontiguousarray(self.sample_ids, np.int64).tobytes()):08x}"

    @cached_property
    def view(self) -> StepView:
        """Requirements of the step on its samples, in the order of ``sample_ids``."""
        return StepView.concatenate([draw.view for draw in self.draws])

    @cached_property
    def label_counts(self) -> Ids:
        """Tokens of every sample that have a label, in the order of ``sample_ids``; int64."""
        return self.samples.count_labels(self.sample_ids, self.view)

    @property
    def num_label_tokens(self) -> int:
        """Tokens of the step that have a label: its loss denominator."""
        return int(self.label_counts.sum())

    def _repr_html_(self) -> str:
        bars = (
            Bar(f"{draw.capacity:,}: sample {i}", draw.capacity, self._lengths(i, draw.view))
            for draw in self.draws
            for i in draw.sample_ids.tolist()
        )
        return picture(f"step {self.index:,}", bars, len(self.sample_ids))

    def _lengths(self, sample: int, view: StepView) -> list[int]:
        return [length for _, _, length in self.samples.segments(sample, view)[1]]


class StageDraws:
    """Draws of one stage, each computed independently.

    Args:
        before: the stage that draws the steps before the first draw, if any: the previous stage, or
            the last stage of the skipped steps.
        first: the step of ``before`` at which this stage takes over the cursors.
        largest: capacity of the largest bucket of earlier stages. If this stage has a larger one,
            its first draw takes it, so that running out of memory happens at once.
        finite: see ``Schedule``.

    Attributes:
        settings: settings of the stage; ``begin``, ``config`` and ``view`` are among them.
        skipped: draws of the stages that the stage skips.
        buckets: streams of samples, by ascending capacity.
        samples_per_draw: samples in a draw, for every bucket.
        num_cycles: cycles of the order per epoch.
        draws: the order of draws.
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
        self.settings, self.samples = settings, samples
        self.skipped: list[StageDraws] = []
        self.begin, self.config, self.view = settings.begin, settings.config, settings.view
        order, seed = order_named(self.config.order), self.config.seed
        if any(samples.mixture.scores or ()) and not order.shuffled and not finite:
            raise ConfigError(
                f"order {self.config.order} draws samples in the order of the index, and a source "
                "has scores for another order: leave out one of the two"
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
                settings.weights,
                seed,
                shuffled=order.shuffled,
                starts=self._cursors,
                orders=self._orders,
                windows=self._windows,
            )
        )
        self.samples_per_draw = self.config.samples_per_draw([b.capacity for b in self.buckets])
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
            # Warn once for all pieces of a ramp.
            if stream.num_samples < count and not (finite or settings.ramping):
                log.warning(
                    "bucket %d has %s and a draw needs %d: every draw repeats samples. "
                    "Make steps smaller (tokens_per_step; elsewhere rows_per_block or the global "
                    "batch size), or pack without this bucket",
                    *(stream.capacity, counted(stream.num_samples, "sample"), count),
                )

    def __str__(self) -> str:
        """Return the prefix of messages about the stage."""
        return f"the stage from step {self.begin}: " if self.begin else ""

    def continued(self, settings: StageSettings, first: int) -> StageDraws:
        """Return a stage that continues with the draws of step ``first`` of this one."""
        result = copy.copy(self)
        result.settings, result.skipped = settings, []
        result.begin, result.view = settings.begin, settings.view
        result._first_draw = self.draw_of(first)
        return result

    def skipped_steps(self) -> Iterator[tuple[Draw, ...]]:
        """Yield the draws of every step that is skipped before the stage, in order."""
        end = self.begin + self.settings.skip_steps
        for stage, stop in spans(self.skipped, end) if self.skipped else ():
            yield from stage.skipped_steps()
            yield from map(stage.step_draws, range(stage.begin, stop))

    @property
    def steps_per_epoch(self) -> int:
        """Steps from the stage's first draw until every sample was drawn at least once."""
        return -(-self.draws.begin(self.num_cycles) // self.config.draws_per_step)

    def draw_of(self, step: int) -> int:
        """Return the first draw of a step of the run."""
        return self._first_draw + (step - self.begin) * self.config.draws_per_step

    def num_draws(self, step: int) -> Ids:
        """Return (buckets,) the draws of each bucket from the start of the stage up to a step."""
        return self.draws.counts(self.draw_of(step)) - self.draws.counts(self._first_draw)

    def step_draws(self, step: int, view: StepView | None = None) -> tuple[Draw, ...]:
        """Return the draws of a step of this stage; ``view`` applies to all its samples."""
        first, view = self.draw_of(step), view or self.view
        return tuple(self._draw(first + i, view) for i in range(self.config.draws_per_step))

    def _draw(self, draw: int, view: StepView) -> Draw:
        bucket, number = self.draws.locate(draw)
        stream, count = self.buckets[bucket], self.samples_per_draw[bucket]
        begin, end = number * count, (number + 1) * count
        ids = stream.ids(begin, end)
        if self.settings.fim_rates is not None:
            rates = np.array(self.settings.fim_rates, np.float64)[self.samples.locate(ids)[0]]
            view = replace(view, epochs=stream.epochs(begin, end), fim_rates=rates)
        return Draw(bucket, stream.capacity, ids, view)

    # --- cursors --------------------------------------------------------------------------------

    def taken(self, step: int) -> Iterator[tuple[int, Ids, Ids]]:
        """Yield (capacity, sources, samples drawn from each before a step) of every bucket, from
        the start of the stage, without skipped steps."""
        firsts, ends = self._ends(self._first_draw), self._ends(self.draw_of(step))
        for stream, first, end in zip(self.buckets, firsts, ends, strict=True):
            taken = stream.taken(end) - stream.taken(first)
            yield stream.capacity, stream.sources, taken

    def cursors(self, step: int) -> Cursors:
        """Return all cursors before a step, also those of sources that the stage does not draw."""
        result = dict(self._cursors)
        zeros = np.zeros(len(self.samples.indices), np.int64)
        for stream, end in zip(self.buckets, self._ends(self.draw_of(step)), strict=True):
            of_bucket = result.get(stream.capacity, zeros).copy()
            of_bucket[stream.sources] = stream.starts + stream.taken(end)
            result[stream.capacity] = of_bucket
        return result

    def order_at(self, source: int, capacity: int, step: int) -> tuple[Epochs, int]:
        """Return the order of a bucket of a source before a step, and its cursor."""
        for b, i in self._stream_of(source, capacity):
            end = self._ends(self.draw_of(step))[b]
            return self.buckets[b].order_at(i, end), self.buckets[b].cursor(i, end)
        # The stage does not draw the source.
        [bucket] = [bucket for bucket in self.samples.buckets if bucket.capacity == capacity]
        [size] = bucket.sizes[bucket.sources == source].tolist()
        cursors, key = self._cursors.get(capacity), None
        if order_named(self.config.order).shuffled:
            key = int(shuffle_keys(self.config.seed, capacity, np.array([source]))[0])
        order = self._orders.get((source, capacity))
        epochs = Epochs(size, key, order, self._moves_before().get((source, capacity)))
        return epochs, 0 if cursors is None else int(cursors[source])

    def _ends(self, draw: int) -> list[int]:
        """Return the position of every stream before a draw."""
        ends: list[int] = (self.draws.counts(draw) * self.samples_per_draw).tolist()
        return ends

    def _stream_of(self, source: int, capacity: int) -> list[tuple[int, int]]:
        """Return [(number of the bucket, source in it)]; [] if the stage does not draw it."""
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
            samples_per_draw=self.config.samples_per_draw([capacity])[0],
            key=fold_key(self._key, 3, capacity),
            cost=partial(self.samples.attention_cost, capacity=capacity, whole=False),
            moves=self._moves_before,
        )

    def _moves_before(self) -> Moves:
        """Return the moves of cost windows of earlier stages that concern samples not yet drawn."""
        stages = [self]
        while stages[-1]._moves is None:  # a loop: thousands of stages exceed the recursion limit
            before, _ = stages[-1]._before
            assert before is not None
            stages.append(before)
        moves = stages.pop()._moves or {}
        for stage in reversed(stages):
            before, end = stage._before
            assert before is not None
            moves = dict(moves)
            positions = before._ends(before.draw_of(end))
            for stream, position in zip(before.buckets, positions, strict=True):
                moves |= stream.moves_at(position)
            cursors = stage._cursors
            moves = {(d, c): move for (d, c), move in moves.items() if move.end > cursors[c][d]}
            stage._moves = moves
        return moves

    # --- the inverse ----------------------------------------------------------------------------

    def steps_of(self, sample: int, end: int) -> list[int]:
        """Return the steps of the stage before ``end`` that draw a global sample id, ascending."""
        capacity = self.samples.capacity_of(sample)
        source = int(self.samples.locate(np.array([sample]))[0][0])
        draws = []
        for b, _ in self._stream_of(source, capacity):
            positions = self.buckets[b].positions(sample, self._ends(self.draw_of(end))[b])
            count = self.samples_per_draw[b]
            draws = sorted(self.draws.draw_at(b, position // count) for position in positions)
        steps = [self._step_of(draw) for draw in draws if draw >= self._first_draw]
        return [step for step in steps if step < end]

    def last_step(self, source: int, capacity: int, samples: Ids, end: int) -> int:
        """Return the last step before ``end`` that draws one of ``samples`` of a source's bucket,
        numbered within the bucket; the stage must draw one of them before ``end``."""
        [(b, i)] = self._stream_of(source, capacity)
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
    """Return the draws of every stage; ``before``, ``largest``: see ``StageDraws``. Raises
    ConfigError, which names the stage, if capacities and tokens_per_step do not fit."""
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


_INSTEAD = {
    "config": "give a number by its name, as in tokens_per_step=32_768",
    "batch_size": "the size of a step is tokens_per_step: give that",
    "shuffle": "a schedule shuffles; order and seed change it: leave it out",
}


class Schedule:
    """Steps of a run.

    Args:
        index: a ``SampleIndex``, several, or a ``PackedDataset`` (or its ``samples``), which has
            its ``Mixture`` and counts label tokens exactly. Bare indices can count them only if
            their strategy dropped no tokens.
        config: settings of the steps; None: create it from its fields, below.
        weights: shares of tokens of several indices; None: in proportion to their tokens.
        names: names of the indices, for stages and reports.
        stages: changes at later steps (``megapack.data.program``).
        finite: for evaluation: every sample of all sources once, in the order of the indices,
            without weights and stages. The last draw of a bucket may have fewer samples, later
            draws are empty; ``num_steps()`` is the end. Indices must not drop or repeat tokens.
        tokens_per_step .. cost_window: fields of ``ScheduleConfig``; None: its default. Without
            config, tokens_per_step is required.

    Raises:
        ConfigError: capacities and tokens_per_step do not fit; the message names the remedy.
    """

    @partial(checked_call, instead=_INSTEAD)
    def __init__(
        self,
        index: SourceIndex | Sequence[SourceIndex] | SampleSource | HasSamples,
        config: ScheduleConfig | None = None,
        *,
        weights: Sequence[float] | None = None,
        names: Sequence[str] | None = None,
        stages: Sequence[Stage] = (),
        finite: bool = False,
        tokens_per_step: int | None = None,
        seed: int | None = None,
        order: str | None = None,
        num_cycles: int | None = None,
        mix: Literal["step", "micro_step"] | None = None,
        micro_step_tokens: int | None = None,
        row_tokens: int | None = None,
        cost_window: int | None = None,
    ) -> None:
        fields = without_none(
            locals(), (field.name for field in dataclasses.fields(ScheduleConfig))
        )
        if config is not None and fields:
            raise ConfigError(
                f"{', '.join(fields)} are given next to config, which contains them: give one of "
                "the two (dataclasses.replace changes a config)"
            )
        if config is None and tokens_per_step is None:
            raise ArgumentError("Schedule: missing argument 'tokens_per_step'; pass it, or config")
        self.config = config or ScheduleConfig(**fields)
        source = index if isinstance(index, SampleSource) else getattr(index, "samples", None)
        if source is None:
            several = isinstance(index, Sequence) and not isinstance(index, str)
            indices: Any = index if several else [index]
            for item in indices:
                if isinstance(item, str | os.PathLike):
                    name = os.fspath(item)
                    remedy = f"PackedDataset({name!r}, {name + '.samples'!r})"
                    if name.endswith(".samples"):
                        remedy = f"SampleIndex.load({name!r})"
                    elif is_shard_manifest(name):
                        remedy = f"PackedDataset(None, {name!r})"
                    raise ConfigError(f"{name!r} is the name of a file: give {remedy}")
                if not isinstance(item, SourceIndex):
                    raise ArgumentError(
                        f"Schedule: index is {item!r:.200}; give a SampleIndex, a list of them, or "
                        "a PackedDataset"
                    )
            mixture = Mixture(weights=weights, names=names, stages=stages)
            source = SampleSource(indices, mixture)
        elif weights is not None or names or stages:
            raise ConfigError(
                "weights, names and stages belong to the PackedDataset; give them to it"
            )
        self.samples: SampleSource = source
        mixture = self.samples.mixture
        if finite:
            check_tokens_once(self.samples.shards)
            mixture = mixture.every_sample_once()
        self.finite = finite
        self.program = resolve(self.config, mixture, self.samples.tokens_per_epoch.tolist())
        self.stages = open_stages(self.program, self.samples, finite=finite)
        self.capacities = sorted({b.capacity for stage in self.stages for b in stage.buckets})

    def __repr__(self) -> str:
        buckets = f"{self.capacities[0]:,} to {self.capacities[-1]:,}"
        return (
            f"Schedule({self.config.tokens_per_step:,} tokens per step of buckets {buckets}, "
            f"{counted(self.num_steps(), 'step')} per epoch)"
        )

    # --- counting -------------------------------------------------------------------------------

    def stage_at(self, step: int) -> StageDraws:
        return self.stages[bisect_right(self.stages, step, key=lambda stage: stage.begin) - 1]

    def settings_at(self, step: int) -> StageSettings:
        return self.program[bisect_right(self.program, step, key=lambda stage: stage.begin) - 1]

    @property
    def smallest_window(self) -> int | None:
        """The shortest attention window of any step, tokens; None without windows."""
        windows = [stage.window for stage in self.program if stage.window is not None]
        return min((min(w.last, w.first or w.last) for w in windows), default=None)

    def spans(self, num_steps: int) -> Iterator[tuple[StageDraws, int]]:
        """Return the first stage and all that begin before ``num_steps``, with their ends."""
        return spans(self.stages, num_steps)

    def tokens_before(self, step: int) -> int:
        """Return the tokens of the steps before ``step``, padding included."""
        return tokens_before(self.program, step)

    def epochs(self, num_steps: int) -> float:
        """Return the number of epochs in the first ``num_steps`` steps. An epoch of a blend has as
        many tokens as all its sources; ``plan_run`` counts the epochs of every source."""
        return sum(((end - s.begin) / s.steps_per_epoch for s, end in self.spans(num_steps)), 0.0)

    def num_steps(self, num_epochs: int = 1) -> int:
        """Return the steps after which every sample was seen at least ``num_epochs`` times. To fill
        the last draw, at most ``samples_per_draw - 1`` samples per bucket are seen once more. With
        several stages, ``epochs`` of the result is ``num_epochs``."""
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
        """Return step ``i``, counted from 0."""
        if i < 0:
            raise IndexError(f"step {i} does not exist; steps are counted from 0")
        stage = self.stage_at(i)
        view = replace(stage.view, window=self.settings_at(i).window_at(i))
        return Step(i, stage.step_draws(i, view), self.samples)

    def shortest_step(self, begin: int, end: int) -> int:
        """Return the first of steps ``[begin, end)`` with samples of their smallest bucket. Its
        rows hold the most documents; a probe of a model needs such a step."""
        capacities = [min(draw.capacity for draw in self.step(i).draws) for i in range(begin, end)]
        return begin + capacities.index(min(capacities))

    def steps_of(self, sample: int, num_steps: int) -> list[int]:
        """Return which of the first ``num_steps`` steps draw a global sample id. Inverts the
        shuffle, the blend and the order of draws, so the cost does not depend on the number of
        steps. A step that draws the sample twice is listed twice."""
        spans = self.spans(num_steps)
        return [step for stage, end in spans for step in stage.steps_of(sample, end)]

    def masked_from(self, source: int, document: int) -> int | None:
        """Return the first step that masks a document of a source; None if no step does."""
        masks, ids = self.samples.exclusions.masks, np.array([document])
        return next((s.begin for s in self.stages if masks(source, ids, s.view).all()), None)

    # --- resume ---------------------------------------------------------------------------------

    def identity(self) -> dict[str, Any]:
        """Return everything that decides the order of samples (JSON); see ``resume.identity``."""
        return resume.identity(self.program, self.samples)

    def state_dict(self, step: int) -> dict[str, Any]:
        """Return the state for a checkpoint before ``step``: the step and ``identity``; JSON."""
        return {"step": int(step), **self.identity()}

    def check_state(
        self, state: Mapping[str, Any], allow_change: Collection[str] = ()
    ) -> list[str]:
        """Check that a state has the same order of samples; see ``resume.check_state``."""
        return resume.check_state(self.identity(), state, allow_change)

    def resume_step(self, state: Mapping[str, Any], allow_change: Collection[str] = ()) -> int:
        """Return the step to continue with. Raises ResumeError as ``check_state`` does."""
        return resume.resume_step(self.identity(), state, allow_change)
