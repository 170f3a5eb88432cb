"""The micro batches of one rank, step after step, dealt for equal work.

- ``BucketBatchSampler``: the steps of a schedule -> the micro batches of a rank.
- ``deal``, ``equal_groups``: the samples of a draw -> ranks and micro batches.
- ``weigh_step``: how the losses of a step count.

    deal(np.array([9, 4, 4, 1]), num_ranks=2, num_micro_batches=2)
    # -> rank 0 has samples 0 and 3, rank 1 has 1 and 2: loads 10 and 8 (in order: 13 and 5)

Within one bucket all samples cost the linear layers the same; their attention differs, with the sum
of squared segment lengths. All ranks wait for the one that got most, so samples are dealt longest
first to the least loaded rank. It costs nothing at run time and changes no gradient.

The loss of a step is the sum of losses times ``loss_mask`` over ``step_label_weight``, over all
micro batches and ranks. Both follow from the index and the weights alone, so they are known before
the step and the same at any number of ranks. With w the weight of a token (``PREFIX.weights``; 1),
f that of its source (``loss_weight``; 1), W what the w of a sequence's labels add up to, M the sum
of f over the sequences of the step that have a label, and K that of f w over its labels:

    loss             loss_mask       step_label_weight
    token_mean       f w             K
    sequence_mean    f w / W         M       # a sequence: what a sample has of a document
    longalign        f w K / (W M)   K       # the same mean, for loops that divide by labels

(LongAlign, Bai et al. 2024, arXiv 2401.18058, section 3.3, weighs sequences in the last of these
ways, with all w and f 1.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal, NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Sampler

from megapack import _core
from megapack.config import check_range
from megapack.data.batch import Imbalance, MicroBatch
from megapack.data.report import check_epochs
from megapack.data.schedule import Draw, Schedule, StageDraws, Step
from megapack.data.sources import SampleSource
from megapack.data.steps import check_group, ranks_per_micro_batch
from megapack.errors import ConfigError, ResumeError

Ids = NDArray[np.int64]


class Deal(NamedTuple):
    """Samples of one draw, dealt to micro batches and ranks."""

    costs: Ids
    """(samples,) attention work."""
    order: Ids
    """Positions in the draw, rank after rank."""
    rank_begin: Ids
    """(ranks + 1,) where each rank's positions begin in ``order``."""
    samples_per_micro_batch: int
    balanced: bool
    """A rank's micro batches have like work, the costliest first; else as scheduled."""

    @property
    def loads(self) -> Ids:
        """(ranks,) attention work per rank."""
        return _sums(self.costs[self.order], self.rank_begin)

    def micro_batches(self, rank: int) -> list[Ids]:
        """Positions in the draw, one array per micro batch of this rank."""
        mine = self.order[self.rank_begin[rank] : self.rank_begin[rank + 1]]
        if self.balanced:
            return list(mine[equal_groups(self.costs[mine], self.samples_per_micro_batch)])
        return list(mine.reshape(-1, self.samples_per_micro_batch))

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
        undealt = _sums(self.costs, self.rank_begin)
        return Imbalance(_max_over_mean(self.loads), _max_over_mean(undealt))


def deal(
    costs: Ids,
    *,
    num_ranks: int,
    num_micro_batches: int,
    how: Literal["balanced", "in_order"] = "balanced",
) -> Deal:
    """Deal the samples of a draw; the same on every rank that computes it.

    Args:
        costs: (samples,) int64 attention work; samples divide evenly among micro batches.
        num_ranks: data-parallel ranks. Where they do not divide the micro batches, the first ranks
            have one more.
        num_micro_batches: of all ranks together.
        how: ``balanced``, or ``in_order`` of the schedule.
    """
    size = len(costs) // num_micro_batches
    ranks = np.arange(num_ranks)
    samples = (num_micro_batches // num_ranks + (ranks < num_micro_batches % num_ranks)) * size
    balanced = how == "balanced"
    order = _core.assign_evenly(costs, samples) if balanced else np.arange(len(costs))
    return Deal(costs, order, np.concatenate([[0], np.cumsum(samples)]), size, balanced)


def equal_groups(costs: Ids, size: int) -> Ids:
    """Positions in groups of ``size`` that have like work, the heaviest group first.

    Groups beside each other differ least, so whoever takes any number of them in turn has like
    work. Shape (len(costs) // size, size), int64.
    """
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


class BucketBatchSampler(Sampler[MicroBatch]):
    """Deals the steps of a schedule to ranks and yields one rank's micro batches in order.

    Every rank takes the same number of micro steps, and at each of them all ranks have the same
    bucket. An item is a ``MicroBatch``, a sequence of sample ids: the sampler serves as the
    ``batch_sampler`` of torch's (or torchdata's stateful) DataLoader, and as its ``sampler`` with
    ``batch_size=None``.

    Args:
        schedule: the same on all ranks.
        data_parallel_rank, data_parallel_size: this rank, of how many; those of a group that
            shares samples (``sequence_parallel_size``) are counted one by one.
        micro_batch_tokens: tokens of one forward of one rank, padding included.
        start_step: first step, counted from the beginning of the run.
        num_steps: how many; None: to the end of the first epoch.
        dealing: ``balanced``: equal attention work per rank; ``in_order``: as scheduled.
        pad_last: if the ranks do not divide the micro batches of a step, give some ranks an empty
            micro batch at the end (all padding, no labels), so that a run can continue on fewer
            nodes; False: refuse such sizes. Like torch's ``drop_last``, but nothing is dropped.
        sequence_parallel_size: consecutive ranks that share the samples longer than
            micro_batch_tokens (``ranks_per_micro_batch``).
        samples: of the dataset that gathers them; None: the schedule's.
        weighted_loss: the caller multiplies losses by ``loss_mask`` and divides their sum by
            ``step_label_weight``. Without that a run with loss weights, of sources or tokens, or
            with another ``loss`` than token_mean is refused.

    Raises:
        ConfigError: the sizes do not fit; the message names those that do. Or the run has loss
            weights, and nobody uses them.
    """

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
                f"data_parallel_rank is {data_parallel_rank} of {data_parallel_size} ranks, which "
                "are counted from 0"
            )
        check_group(sequence_parallel_size, data_parallel_size)
        if start_step < 0:
            raise ConfigError(f"start_step is {start_step}; steps are counted from 0")
        check_range("sampler", at_least=0, num_steps=num_steps)
        if dealing not in ("balanced", "in_order"):
            raise ConfigError(f"dealing is {dealing!r}; it must be 'balanced' or 'in_order'")
        self.schedule = schedule
        self.data_parallel_rank = data_parallel_rank
        self.data_parallel_size = data_parallel_size
        self.micro_batch_tokens = micro_batch_tokens
        self.sequence_parallel_size = sequence_parallel_size
        self.start_step = start_step
        self.num_steps = (
            max(0, schedule.num_steps() - start_step) if num_steps is None else num_steps
        )
        self.dealing = dealing
        self._samples = samples or schedule.samples
        for stage in schedule.stages:
            self._check_sizes(stage, pad_last=pad_last)
        check_epochs(schedule, self.start_step + self.num_steps)
        if not weighted_loss:
            for settings in schedule.program:
                if settings.loss_weights is not None:
                    _refuse_weights(
                        f"from step {settings.begin} on sources have loss weights", "loss_weight"
                    )
            refuse_token_weights(self._samples, _refuse_weights)

    def _check_sizes(self, stage: StageDraws, *, pad_last: bool) -> None:
        tokens = self.micro_batch_tokens
        stage.config.check_micro_batches(
            self.data_parallel_size, tokens, pad_last=pad_last, where=str(stage)
        )
        count = stage.config.draw_tokens // tokens
        row = stage.config.row_tokens
        for stream, samples in zip(stage.buckets, stage.samples_per_draw, strict=True):
            shared = self.ranks_per_micro_batch(stream.capacity)
            whole = tokens * shared
            fits = count % shared == 0 and samples % (count // shared) == 0
            if not fits or (row is not None and whole % row):
                unit = row or stream.capacity
                group = f" of {shared} ranks" if shared > 1 else ""
                raise ConfigError(
                    f"{stage}a micro batch of {whole} tokens{group} cannot hold whole samples of "
                    f"{stream.capacity}: make micro_batch_tokens a multiple of "
                    f"{-(-unit // shared)}, or sequence_parallel_size larger"
                )

    def ranks_per_micro_batch(self, capacity: int) -> int:
        """Consecutive ranks that share a micro batch of samples of ``capacity`` tokens."""
        return ranks_per_micro_batch(capacity, self.micro_batch_tokens, self.sequence_parallel_size)

    def num_micro_steps(self, step: int) -> int:
        """Micro steps of an optimizer step, the same on all ranks."""
        config = self.schedule.stage_at(step).config
        per_draw = -(-config.draw_tokens // (self.micro_batch_tokens * self.data_parallel_size))
        return per_draw * config.draws_per_step

    def num_positions(self, step: int) -> int:
        """Tokens of all forwards of an optimizer step, of all ranks; with uneven ranks more than
        it holds, padding included."""
        return self.num_micro_steps(step) * self.micro_batch_tokens * self.data_parallel_size

    @property
    def launch(self) -> dict[str, Any]:
        """Settings that decide how a step is dealt, beside the schedule."""
        return {
            "data_parallel_size": self.data_parallel_size,
            "micro_batch_tokens": self.micro_batch_tokens,
            "dealing": self.dealing,
            "sequence_parallel_size": self.sequence_parallel_size,
        }

    def __len__(self) -> int:
        """Micro batches of this rank from start_step on."""
        return sum(
            max(0, end - max(stage.begin, self.start_step)) * self.num_micro_steps(stage.begin)
            for stage, end in self.schedule.spans(self.start_step + self.num_steps)
        )

    def __iter__(self) -> MicroBatchIterator:
        return MicroBatchIterator(self)

    def micro_batches(self, step: int) -> list[MicroBatch]:
        """This rank's micro batches of one step; ``num_micro_steps(step)`` of them."""
        content = self.schedule.step(step)
        source, _ = self.schedule.samples.locate(content.sample_ids)
        weights = weigh_step(self.schedule, content, self._samples)
        view = replace(content.view, loss_weight=weights.of_samples)
        num_micro_steps = self.num_micro_steps(step)
        per_draw = num_micro_steps // len(content.draws)
        result: list[MicroBatch] = []
        begin = 0  # of the draw in the step
        for draw, dealt in self._deals(content):
            shared = self.ranks_per_micro_batch(draw.capacity)
            num_samples = len(draw.sample_ids)
            positions = dealt.micro_batches(self.data_parallel_rank // shared)
            positions = [mine[mine < num_samples] for mine in positions]
            positions += [np.zeros(0, np.int64)] * (per_draw - len(positions))
            result += [
                MicroBatch(
                    sample_ids=draw.sample_ids[mine],
                    capacity=draw.capacity,
                    bucket=draw.bucket,
                    step=step,
                    micro_step=len(result) + m,
                    num_micro_steps=num_micro_steps,
                    num_step_label_tokens=weights.num_labels,
                    imbalance=dealt.imbalance,
                    source=source[begin + mine],
                    view=view.of(begin + mine),
                    step_label_weight=weights.label_weight,
                    sequence_parallel_size=shared,
                )
                for m, mine in enumerate(positions)
            ]
            begin += num_samples
        return result

    def _deals(self, content: Step) -> Iterator[tuple[Draw, Deal]]:
        stage = self.schedule.stage_at(content.index)
        draw_tokens = stage.config.draw_tokens
        cost = self.schedule.samples.attention_cost
        for draw in content.draws:
            shared = self.ranks_per_micro_batch(draw.capacity)
            costs = cost(draw.sample_ids, draw.capacity, draw.view)
            missing = stage.samples_per_draw[draw.bucket] - len(costs)  # at a finite end
            yield (
                draw,
                deal(
                    np.pad(costs, (0, missing)),
                    num_ranks=self.data_parallel_size // shared,
                    num_micro_batches=draw_tokens // (self.micro_batch_tokens * shared),
                    how=self.dealing,
                ),
            )

    def imbalance(self, step: int) -> list[Imbalance]:
        """Work of the ranks at a step, one entry per draw."""
        return [dealt.imbalance for _, dealt in self._deals(self.schedule.step(step))]

    def attention_of_ranks(self, step: int) -> NDArray[np.float64]:
        """(micro steps, ranks) attention work; ranks that share a micro batch have equal parts."""
        rows = []
        for draw, dealt in self._deals(self.schedule.step(step)):
            shared = self.ranks_per_micro_batch(draw.capacity)
            rows.append(np.repeat(dealt.loads_of_micro_batches / shared, shared, axis=1))
        return np.concatenate(rows)


class StepWeights(NamedTuple):
    """How the losses of a step count."""

    num_labels: int
    of_samples: NDArray[np.float32] | None
    """``StepView.loss_weight`` of its samples, in the order of ``Step.sample_ids``."""
    label_weight: float | None
    """``MicroBatch.step_label_weight``."""


def weigh_step(schedule: Schedule, content: Step, samples: SampleSource) -> StepWeights:
    """What losses of a step are multiplied with and divided by.

    Args:
        schedule: of the run.
        content: of the step.
        samples: of the dataset that gathers them.
    """
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
    """Have a run refused whose loss masks hold more than which labels there are.

    Args:
        samples: of the run.
        refuse: raises, given what the run has and what to leave out.
    """
    having = [name for name, of in zip(samples.names, samples.token_weights, strict=True) if of]
    if having:
        refuse(f"source {having[0]!r} has loss weights per token (PREFIX.weights)", "token_weights")
    if samples.mixture.loss != "token_mean":
        refuse(f"loss is {samples.mixture.loss}", "loss")


def _refuse_weights(what: str, option: str) -> NoReturn:
    remedy = "say token_weights: none" if option == "token_weights" else f"leave {option} out"
    raise ConfigError(
        f"{what}, and this loop takes the plain mean of its labels: {remedy}, train with "
        "megapack-pretrain, or in a loop of your own multiply losses by loss_mask, divide by "
        "step_label_weight and say weighted_loss=True"
    )


class MicroBatchIterator(Iterator[MicroBatch]):
    """Micro batches from one on; torchdata's StatefulDataLoader keeps its state."""

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
        """The schedule's state and how far the step has come."""
        return {
            **self._sampler.schedule.state_dict(self._step),
            "micro_step": self._micro_step,
            "launch": self._sampler.launch,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue there.

        Raises:
            ResumeError: another order of samples, or ranks and micro batches of another size in
                the midst of a step (between steps they may change).
        """
        begun = state["micro_step"] > 0  # then the step itself is of the past
        self._sampler.schedule.check_state({**state, "step": int(state["step"]) + begun})
        if state["micro_step"] and state["launch"] != self._sampler.launch:
            raise ResumeError(
                f"the state stands at micro step {state['micro_step']} of a step dealt with "
                f"{state['launch']}, and this run deals with {self._sampler.launch}: save between "
                "steps to change them"
            )
        self._step, self._micro_step = int(state["step"]), int(state["micro_step"])
        self._content = []
