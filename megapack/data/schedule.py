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
from collections.abc import Collection, Iterator, Mapping, Sequence
from fractions import Fraction
from math import ceil
from typing import Any, Literal

from megapack.config import to_dict
from megapack.data import resume
from megapack.data.program import Stage, StageSettings, spans, tokens_before
from megapack.data.resolve import resolve
from megapack.data.source import HasSamples, SampleSource
from megapack.data.stage import StageDraws, open_stages
from megapack.data.step import ScheduleConfig, Step
from megapack.packing.shards import SourceIndex

__all__ = ["Schedule"]


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
