"""Micro batches of one rank, step after step, with attention work balanced over the ranks.

- ``BucketBatchSampler``: the steps of a schedule -> the micro batches of a rank.
- ``assign``, ``equal_groups``: the samples of a draw -> ranks and micro batches.
- ``weigh_step``: loss weights and loss denominator of a step.

    assign(np.array([9, 4, 4, 1]), num_ranks=2, num_micro_batches=2)
    # -> rank 0 has samples 0 and 3, rank 1 has 1 and 2: loads 10 and 8 (in order: 13 and 5)

Within one bucket all samples cost the linear layers the same; their attention work, the sum of
squared segment lengths, differs. All ranks wait for the busiest one, so the longest samples go
first, each to the least loaded rank. This costs nothing at run time and changes no gradient.

The loss of a step is the sum of losses times ``loss_mask`` over all micro batches and ranks,
divided by ``step_label_weight``. Both follow from the index and the weights, so they are known
before the step and do not depend on the number of ranks. With w the weight of a token
(column ``weights``, else 1), f that of its source (``loss_weight``, else 1), W the sum of w over
the labels of a sequence, M the sum of f over the sequences of the step with a label, and K the sum
of f w over all its labels:

    loss             loss_mask       step_label_weight
    token_mean       f w             K
    sequence_mean    f w / W         M       # a sequence: the part of a document in a sample
    longalign        f w K / (W M)   K       # the same mean, for loops that divide by labels

(LongAlign, Bai et al. 2024, arXiv 2401.18058, section 3.3, is the last row with all w and f 1.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal, NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from megapack import _core
from megapack.calls import checked_call
from megapack.config import check_range
from megapack.data.batch import Imbalance, MicroBatch
from megapack.data.report import check_epochs
from megapack.data.resume import refuse_damage
from megapack.data.schedule import Draw, Schedule, Step
from megapack.data.sources import SampleSource
from megapack.data.steps import check_group, check_micro_batches, ranks_per_micro_batch
from megapack.errors import ConfigError, ResumeError

Ids = NDArray[np.int64]


class Assignment(NamedTuple):
    """Assignment of the samples of one draw to ranks and micro batches."""

    costs: Ids  # (samples,) attention work
    order: Ids  # positions in the draw, rank after rank
    rank_begin: Ids  # (ranks + 1,) offset of each rank's positions in ``order``
    samples_per_micro_batch: int
    balanced: bool
    """True: a rank's micro batches have similar work, the costliest first; False: as scheduled."""

    @property
    def loads(self) -> Ids:
        """(ranks,) attention work per rank."""
        return _sums(self.costs[self.order], self.rank_begin)

    def micro_batches(self, rank: int) -> list[Ids]:
        """Return positions in the draw, one array per micro batch of this rank."""
        positions = self.order[self.rank_begin[rank] : self.rank_begin[rank + 1]]
        if self.balanced:
            return list(
                positions[equal_groups(self.costs[positions], self.samples_per_micro_batch)]
            )
        return list(positions.reshape(-1, self.samples_per_micro_batch))

    @property
    def loads_of_micro_batches(self) -> Ids:
        """(micro batches, ranks) attention work; 0 where a rank has one micro batch fewer."""
        batches = [self.micro_batches(rank) for rank in range(len(self.rank_begin) - 1)]
        loads = np.zeros((max(map(len, batches)), len(batches)), np.int64)
        for rank, of_rank in enumerate(batches):
            loads[: len(of_rank), rank] = [self.costs[batch].sum() for batch in of_rank]
        return loads

    @property
    def imbalance(self) -> Imbalance:
        in_order = _sums(self.costs, self.rank_begin)
        return Imbalance(_max_over_mean(self.loads), _max_over_mean(in_order))


def assign(
    costs: Ids,
    *,
    num_ranks: int,
    num_micro_batches: int,
    how: Literal["balanced", "in_order"] = "balanced",
) -> Assignment:
    """Assign the samples of a draw; every rank computes the same.

    Args:
        costs: (samples,) int64 attention work; a multiple of ``num_micro_batches`` samples.
        num_ranks: data-parallel ranks. If they do not divide the micro batches, the first ranks
            have one more.
        num_micro_batches: number of micro batches of all ranks together.
        how: ``balanced``, or ``in_order`` of the schedule.
    """
    size = len(costs) // num_micro_batches
    ranks = np.arange(num_ranks)
    samples = (num_micro_batches // num_ranks + (ranks < num_micro_batches % num_ranks)) * size
    balanced = how == "balanced"
    order = _core.assign_evenly(costs, samples) if balanced else np.arange(len(costs))
    return Assignment(costs, order, np.concatenate([[0], np.cumsum(samples)]), size, balanced)


def equal_groups(costs: Ids, size: int) -> Ids:
    """Return positions in groups of ``size`` with similar work, the heaviest group first.
    Neighboring groups differ least, so any run of consecutive groups has similar work. Shape
    (len(costs) // size, size), int64."""
    num_groups = len(costs) // size
    if num_groups == 0:
        return np.zeros((0, size), np.int64)
    groups = _core.assign_evenly(costs, np.full(num_groups, size, np.int64)).reshape(-1, size)
    falling: Ids = groups[np.argsort(-costs[groups].sum(axis=1), kind="stable")]
    return falling


def _sums(costs: Ids, begin: Ids) -> Ids:
    return np.diff(np.concatenate([[0], np.cumsum(costs)])[begin])


def _max_over_mean(loads: Ids) -> float:
    mean = loads.mean()
    return float(loads.max() / mean) if mean else 1.0


class BucketBatchSampler(Iterable[MicroBatch]):
    """Sampler of one rank's micro batches, in order.

    Every rank takes the same number of micro steps, and at each of them all ranks have the same
    bucket. An item is a ``MicroBatch``, a sequence of sample ids: use the sampler as
    ``batch_sampler`` of torch's (or torchdata's stateful) DataLoader, or as ``sampler`` with
    ``batch_size=None``.

    Args:
        schedule: the same on all ranks.
        data_parallel_rank, data_parallel_size: this rank and the number of ranks; each rank of a
            group that shares samples (``sequence_parallel_size``) counts.
        micro_batch_tokens: tokens of one forward pass of one rank, padding included.
        start_step: first step, counted from the beginning of the run.
        num_steps: number of steps; None: to the end of the first epoch.
        dealing: ``balanced``: equal attention work per rank; ``in_order``: as scheduled.
        pad_last: if the micro batches of a step are not a multiple of the ranks, give some ranks an
            empty micro batch at the end (all padding, no labels), so that a run can continue on
            fewer nodes; False: refuse such sizes. Unlike torch's ``drop_last``, it drops nothing.
        sequence_parallel_size: consecutive ranks that share the samples longer than
            micro_batch_tokens (``ranks_per_micro_batch``).
        samples: samples of the dataset that gathers them; None: those of the schedule.
        weighted_loss: the caller multiplies losses by ``loss_mask`` and divides their sum by
            ``step_label_weight``. Required if sources or tokens have loss weights, or if ``loss``
            is not token_mean.

    Raises:
        ConfigError: the sizes do not fit; the message names those that do. Or the run has loss
            weights that the caller does not apply.
    """

    @checked_call
    def __init__(
        self,
        schedule: Schedule,
        *,
        data_parallel_rank: int,
        data_parallel_size: int,
        micro_batch_tokens: int,
        start_step: int = 0,
        num_steps: int | None = None,
        dealing: Literal["balanced", "in_order"] = "balanced",
        pad_last: bool = False,
        sequence_parallel_size: int = 1,
        samples: SampleSource | None = None,
        weighted_loss: bool = False,
    ) -> None:
        if not 0 <= data_parallel_rank < data_parallel_size:
            raise ConfigError(
                f"data_parallel_rank is {data_parallel_rank}; it must be at least 0 and below "
                f"data_parallel_size, {data_parallel_size}"
            )
        check_group(sequence_parallel_size, data_parallel_size)
        if start_step < 0:
            raise ConfigError(f"start_step is {start_step}; steps are counted from 0")
        check_range("sampler", at_least=0, num_steps=num_steps)
        if (num_steps is None or schedule.finite) and start_step > (count := schedule.num_steps()):
            remedy = f"set start_step to at most {count}"
            if not schedule.finite:
                remedy += ", or give num_steps, the steps to take, to repeat the data"
            raise ConfigError(
                f"start_step is {start_step}, and the schedule has {count} steps"
                f"{'' if schedule.finite else ' per epoch'}; {remedy}"
            )
        self.schedule = schedule
        self.data_parallel_rank = data_parallel_rank
        self.data_parallel_size = data_parallel_size
        self.micro_batch_tokens = micro_batch_tokens
        self.sequence_parallel_size = sequence_parallel_size
        self.start_step = start_step
        self.num_steps = schedule.num_steps() - start_step if num_steps is None else num_steps
        self.dealing: Literal["balanced", "in_order"] = dealing
        self._samples = samples or schedule.samples
        if self._samples.attention == "tree" and sequence_parallel_size > 1:
            raise ConfigError(
                f"sequence_parallel_size is {sequence_parallel_size} with attention: tree, and "
                "ranks cannot share the paths of a tree: set it to 1"
            )
        check_micro_batches(
            self._problem,
            [stage.config for stage in schedule.stages],
            num_ranks=data_parallel_size,
            sequence_parallel_size=sequence_parallel_size,
            tokens=micro_batch_tokens,
            pad_last=pad_last,
        )
        check_epochs(schedule, self.start_step + self.num_steps)
        if not weighted_loss:
            for settings in schedule.program:
                if settings.loss_weights is not None:
                    _refuse_weights(
                        f"from step {settings.begin} on sources have loss weights", "loss_weight"
                    )
            refuse_token_weights(self._samples, _refuse_weights)

    def __repr__(self) -> str:
        end = self.start_step + self.num_steps
        return (
            f"BucketBatchSampler(rank {self.data_parallel_rank} of {self.data_parallel_size}, "
            f"steps {self.start_step:,} to {end:,}, {self.micro_batch_tokens:,} tokens each)"
        )

    def _problem(self, num_ranks: int, tokens: int, pad_last: bool) -> str | None:
        """Return why ranks cannot share the draws of a stage, or None."""
        for stage in self.schedule.stages:
            capacities = [stream.capacity for stream in stage.buckets]
            samples = dict(zip(capacities, stage.samples_per_draw, strict=True))
            size = self.sequence_parallel_size
            problem = stage.config.micro_batch_problem(num_ranks, tokens, pad_last)
            if problem or (problem := stage.config.whole_samples_problem(samples, tokens, size)):
                return f"{stage}{problem}"
        return None

    def ranks_per_micro_batch(self, capacity: int) -> int:
        """Return the number of ranks that share a micro batch of samples of ``capacity`` tokens."""
        return ranks_per_micro_batch(capacity, self.micro_batch_tokens, self.sequence_parallel_size)

    def num_micro_steps(self, step: int) -> int:
        """Return the number of micro steps of an optimizer step, the same on all ranks."""
        config = self.schedule.stage_at(step).config
        per_draw = -(-config.draw_tokens // (self.micro_batch_tokens * self.data_parallel_size))
        return per_draw * config.draws_per_step

    def num_positions(self, step: int) -> int:
        """Return the tokens of all forwards of an optimizer step, of all ranks, with padding. With
        ``pad_last`` these are more than the tokens of the step."""
        return self.num_micro_steps(step) * self.micro_batch_tokens * self.data_parallel_size

    @property
    def launch(self) -> dict[str, Any]:
        """Settings that decide the assignment of a step to ranks, except the schedule's."""
        return {
            "data_parallel_size": self.data_parallel_size,
            "micro_batch_tokens": self.micro_batch_tokens,
            "dealing": self.dealing,
            "sequence_parallel_size": self.sequence_parallel_size,
        }

    def __len__(self) -> int:
        return sum(
            max(0, end - max(stage.begin, self.start_step)) * self.num_micro_steps(stage.begin)
            for stage, end in self.schedule.spans(self.start_step + self.num_steps)
        )

    def __iter__(self) -> MicroBatchIterator:
        return MicroBatchIterator(self)

    def micro_batches(self, step: int) -> list[MicroBatch]:
        """Return this rank's micro batches of one step; ``num_micro_steps(step)`` of them."""
        content = self.schedule.step(step)
        source, _ = self.schedule.samples.locate(content.sample_ids)
        weights = weigh_step(self.schedule, content, self._samples)
        view = content.view
        if weights.of_samples is not None:
            view = replace(view, loss_weight=weights.of_samples)
        num_micro_steps = self.num_micro_steps(step)
        per_draw = num_micro_steps // len(content.draws)
        result: list[MicroBatch] = []
        begin = 0  # of the draw in the step
        for draw, assignment in self._assignments(content):
            shared = self.ranks_per_micro_batch(draw.capacity)
            num_samples = len(draw.sample_ids)
            of_draw = slice(begin, begin + num_samples)
            source_of_draw, view_of_draw = source[of_draw], view.of(of_draw)
            positions = assignment.micro_batches(self.data_parallel_rank // shared)
            imbalance = assignment.imbalance
            # The last draw of a finite schedule has fewer samples; pad_last adds empty batches.
            positions = [of_batch[of_batch < num_samples] for of_batch in positions]
            positions += [np.zeros(0, np.int64)] * (per_draw - len(positions))
            result += [
                MicroBatch(
                    sample_ids=draw.sample_ids[of_batch],
                    capacity=draw.capacity,
                    bucket=draw.bucket,
                    step=step,
                    micro_step=len(result) + m,
                    num_micro_steps=num_micro_steps,
                    num_step_label_tokens=weights.num_labels,
                    imbalance=imbalance,
                    source=source_of_draw[of_batch],
                    view=view_of_draw.of(of_batch),
                    step_label_weight=weights.label_weight,
                    sequence_parallel_size=shared,
                )
                for m, of_batch in enumerate(positions)
            ]
            begin += num_samples
        return result

    def _assignments(self, content: Step) -> Iterator[tuple[Draw, Assignment]]:
        stage = self.schedule.stage_at(content.index)
        draw_tokens = stage.config.draw_tokens
        cost = self.schedule.samples.attention_cost
        for draw in content.draws:
            shared = self.ranks_per_micro_batch(draw.capacity)
            costs = cost(draw.sample_ids, draw.capacity, draw.view)
            missing = stage.samples_per_draw[draw.bucket] - len(costs)  # end of a finite schedule
            yield (
                draw,
                assign(
                    np.pad(costs, (0, missing)),
                    num_ranks=self.data_parallel_size // shared,
                    num_micro_batches=draw_tokens // (self.micro_batch_tokens * shared),
                    how=self.dealing,
                ),
            )

    def imbalance(self, step: int) -> list[Imbalance]:
        """Return the imbalance of the ranks at a step, one entry per draw."""
        content = self.schedule.step(step)
        return [assignment.imbalance for _, assignment in self._assignments(content)]

    def attention_of_ranks(self, step: int) -> NDArray[np.float64]:
        """Return (micro steps, ranks) attention work; a shared micro batch is divided equally."""
        rows = []
        for draw, assignment in self._assignments(self.schedule.step(step)):
            shared = self.ranks_per_micro_batch(draw.capacity)
            rows.append(np.repeat(assignment.loads_of_micro_batches / shared, shared, axis=1))
        return np.concatenate(rows)


class StepWeights(NamedTuple):
    """Loss weights and loss denominator of a step."""

    num_labels: int
    of_samples: NDArray[np.float32] | None
    """``StepView.loss_weight`` of its samples, in the order of ``Step.sample_ids``."""
    label_weight: float | None  # ``MicroBatch.step_label_weight``


def weigh_step(schedule: Schedule, content: Step, samples: SampleSource) -> StepWeights:
    """Return the factors and the denominator of the losses of a step; ``samples``: those of the
    dataset that gathers them."""
    totals = samples.label_totals(content.sample_ids, content.view)
    num_labels, loss = int(totals.labels.sum()), samples.mixture.loss
    of_sources = schedule.settings_at(content.index).loss_weights
    factors = None
    if of_sources is not None:
        factors = np.asarray(of_sources, np.float32)[samples.locate(content.sample_ids)[0]]
    elif not samples.weighs_tokens:
        return StepWeights(num_labels, None, None)
    ones = np.ones(len(totals.labels))
    of_samples = ones if factors is None else factors.astype(np.float64)
    weight, sequences = float(of_samples @ totals.weight), float(of_samples @ totals.sequences)
    if loss == "sequence_mean":
        return StepWeights(num_labels, factors, sequences)
    if loss == "longalign" and sequences:
        factors = (of_samples * (weight / sequences)).astype(np.float32)
    return StepWeights(num_labels, factors, weight)


def refuse_token_weights(samples: SampleSource, refuse: Callable[[str, str], NoReturn]) -> None:
    """Call ``refuse(problem, option to leave out)``, which must raise, if loss masks carry weights.
    For callers that only count labels."""
    weighted = [
        n for n, weights in zip(samples.names, samples.token_weights, strict=True) if weights
    ]
    if weighted:
        problem = f"source {weighted[0]!r} has loss weights per token (column weights)"
        refuse(problem, "token_weights")
    if samples.attention == "tree":
        refuse("tokens of prefix trees have the loss weights of all their documents", "tree")
    if samples.mixture.loss != "token_mean":
        refuse(f"loss is {samples.mixture.loss}", "loss")


def _refuse_weights(problem: str, option: str) -> NoReturn:
    remedy = "set token_weights: none" if option == "token_weights" else f"leave {option} out"
    raise ConfigError(
        f"{problem}, and this loop takes the plain mean of its labels: {remedy}, train with "
        "megapack-pretrain, or multiply losses by loss_mask, divide by step_label_weight and set "
        "weighted_loss=True"
    )


class MicroBatchIterator(Iterator[MicroBatch]):
    """Iterator over micro batches with a state, which torchdata's StatefulDataLoader saves."""

    def __init__(self, sampler: BucketBatchSampler) -> None:
        self._sampler = sampler
        self._step = sampler.start_step
        self._micro_step = 0
        self._content: list[MicroBatch] = []

    def __next__(self) -> MicroBatch:
        sampler = self._sampler
        if self._step >= sampler.start_step + sampler.num_steps:
            raise StopIteration
        if not self._content:
            self._content = sampler.micro_batches(self._step)
        micro_batch = self._content[self._micro_step]
        self._micro_step += 1
        if self._micro_step == len(self._content):
            self._step, self._micro_step, self._content = self._step + 1, 0, []
        return micro_batch

    def state_dict(self) -> dict[str, Any]:
        """Return the schedule's state and the micro step."""
        return {
            **self._sampler.schedule.state_dict(self._step),
            "micro_step": self._micro_step,
            "launch": self._sampler.launch,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at a state. Raises ResumeError for another order of samples; or, within a step,
        for another number of ranks or size of micro batches (between steps they may change)."""
        with refuse_damage("the saved state of the sampler"):
            step, micro_step, launch = int(state["step"]), int(state["micro_step"]), state["launch"]
            has_begun = micro_step > 0  # then the samples of the step must not change
            self._sampler.schedule.check_state({**state, "step": step + has_begun})
        if has_begun and launch != self._sampler.launch:
            raise ResumeError(
                f"the state was saved at micro step {micro_step} of a step assigned with "
                f"{launch}, and this run has {self._sampler.launch}: restore the former "
                "values, or change them at a state saved between steps"
            )
        self._step, self._micro_step = step, micro_step
        self._content = []
