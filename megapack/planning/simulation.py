"""``simulate_step``: how long an assigned step takes on a cluster, compared with the ideal.

    simulate_step  one step on data x pipeline x context parallel ranks -> StepTime
    Cluster        number of ranks, pipeline schedule, and barriers of data-parallel ranks
    AssignedStep   work of every rank in every micro batch, from a plan or a schedule

Four equal micro batches on a pipeline of four stages: each GPU idles for three of seven slots. Four
ranks of which one has twice the work: the others wait.

    equal = np.full((4, 1), 12.0)                             # micro batches x ranks, attention
    step = AssignedStep.of_attention(equal)
    simulate_step(step, Cluster(pipeline_parallel=4)).bubble  # -> 0.428..., (P - 1) / (M + P - 1)
    step = AssignedStep.of_attention([[1.0, 1.0, 1.0, 2.0]])
    simulate_step(step, Cluster(data_parallel=4)).over_ideal  # -> 1.6

A model: time is predicted work (``StepPlan.cost``); a backward pass takes as long as two forward
passes; pipeline stages are equal; an exchange of keys and values overlaps with the attention of its
micro batch. The model ignores other communication, optimizer, input, memory, and kernels that are
slower on short documents.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megapack.calls import checked_call
from megapack.errors import ConfigError
from megapack.planning.step_plan import Integers, StepPlan
from megapack.planning.trees import TreePlan

__all__ = ["AssignedStep", "Cluster", "StepTime", "simulate_step"]

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Parallel sizes of a run, and its barriers.

    Attributes:
        data_parallel: groups of ranks that hold different documents.
        context_parallel: ranks that may share a document: a power of two.
        pipeline_parallel: stages with the schedule 1F1B.
        virtual_stages: parts of the model per stage (interleaved 1F1B). Empty micro batches are
            added up to a multiple of the stages.
        barrier: data-parallel ranks wait for each other at every ``micro_batch`` (FSDP and ZeRO-3
            gather parameters for each forward and backward), or once per ``step``.
    """

    data_parallel: int = 1
    context_parallel: int = 1
    pipeline_parallel: int = 1
    virtual_stages: int = 1
    barrier: Literal["micro_batch", "step"] = "micro_batch"

    def __post_init__(self) -> None:
        sizes = ("data_parallel", "context_parallel", "pipeline_parallel", "virtual_stages")
        for name in sizes:
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.context_parallel & (self.context_parallel - 1):
            raise ConfigError(f"context_parallel is {self.context_parallel}; choose a power of two")
        if self.virtual_stages > 1 and self.pipeline_parallel == 1:
            raise ConfigError(
                f"virtual_stages is {self.virtual_stages}, which needs pipeline_parallel above 1"
            )
        if self.barrier not in ("micro_batch", "step"):
            raise ConfigError(f"barrier is {self.barrier!r}; it must be micro_batch or step")

    @property
    def num_ranks(self) -> int:
        """Ranks of one stage: ``num_ranks`` of ``plan_step``."""
        return self.data_parallel * self.context_parallel

    @property
    def micro_batch_multiple(self) -> int:
        """Divisor that virtual stages require of the number of micro batches."""
        return self.pipeline_parallel if self.virtual_stages > 1 else 1


@dataclass(frozen=True, kw_only=True, eq=False)
class AssignedStep:
    """Work of every rank of a stage in every micro batch; arrays are (micro batches, ranks).

    Attributes:
        tokens: tokens of a rank, with padding; its share of shared documents.
        attention: squared document lengths, divided by the ranks that share the document.
        exchanged: tokens whose keys and values a rank receives: n (d - 1) / d for a document of n
            tokens on d ranks.
        first_rank: int64, first of the ranks that share the rank's documents.
        useful_tokens, useful_attention: sums over all ranks, without padding.
    """

    tokens: Floats
    attention: Floats
    exchanged: Floats
    first_rank: Integers
    useful_tokens: float
    useful_attention: float

    @classmethod
    def of_plan(cls, plan: StepPlan | TreePlan, documents: Integers | None = None) -> AssignedStep:
        """Return the work of a plan; ``documents``: true lengths, if the plan has padded ones.

        The useful work of trees is that of their sequences in rows, so trees can have less work.
        """
        true = plan.lengths if documents is None else documents
        shape = (plan.num_micro_batches, plan.num_ranks)
        first = np.tile(np.arange(plan.num_ranks), (shape[0], 1))
        exchanged = np.zeros(shape)
        if isinstance(plan, TreePlan):
            tokens = plan.num_tokens.astype(np.float64)
        else:
            tokens = plan.tokens
            for i in np.flatnonzero(plan.degree > 1).tolist():
                begin, degree = int(plan.first_rank[i]), int(plan.degree[i])
                group = (plan.micro_batch[i], slice(begin, begin + degree))
                first[group] = begin
                exchanged[group] += plan.lengths[i] * (degree - 1) / degree
        return cls(
            tokens=tokens,
            attention=plan.attention,
            exchanged=exchanged,
            first_rank=first,
            useful_tokens=float(true.sum()),
            useful_attention=float((true.astype(np.float64) ** 2).sum()),
        )

    @classmethod
    def of_attention(
        cls,
        attention: ArrayLike,
        *,
        tokens: float = 0.0,
        degree: Integers | None = None,
        documents: Integers | None = None,
    ) -> AssignedStep:
        """Return the work of a schedule of buckets, whose rows all have the same size.

        Args:
            attention: (micro batches, ranks).
            tokens: tokens of each rank in each micro batch.
            degree: (micro batches,) ranks that share a row; None: 1.
            documents: document lengths; None: all tokens and attention are useful.
        """
        work = np.asarray(attention, np.float64)
        sharing = np.ones((len(work), 1), np.int64) if degree is None else degree[:, None]
        row_tokens = np.full(work.shape, float(tokens))
        ranks = np.arange(work.shape[1])
        return cls(
            tokens=row_tokens,
            attention=work,
            exchanged=row_tokens * (sharing - 1),
            first_rank=ranks // sharing * sharing,
            useful_tokens=float((row_tokens if documents is None else documents).sum()),
            useful_attention=float((work if documents is None else np.square(documents)).sum()),
        )


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Duration of a step, in units of ``StepPlan.cost``, and shares of its GPU time.

    Attributes:
        time: duration of the step.
        ideal: duration if all GPUs did equal parts of the useful work and nothing else.
        extra: share for padding, attention across documents, and exchanges.
        bubble: share of waiting for another pipeline stage.
        waiting: share of waiting for other ranks: at a barrier, in a group that shares documents,
            at the end of the step. The remaining share is useful work.
        num_micro_batches: micro batches of every rank.
        empty: pairs of rank and micro batch without documents.
    """

    time: float
    ideal: float
    extra: float
    bubble: float
    waiting: float
    num_micro_batches: int
    empty: int

    @property
    def over_ideal(self) -> float:
        """Duration of the step divided by the ideal; with prefix trees it can be below 1."""
        return self.time / self.ideal if self.ideal else 1.0


@checked_call
def simulate_step(
    assigned: AssignedStep,
    cluster: Cluster,
    *,
    linear_cost_tokens: float = 0.0,
    exchange_cost_tokens: float = 0.0,
) -> StepTime:
    """Simulate every forward and backward of every stage on all ranks.

    An operation begins when its GPU is free, its input has arrived from the previous or next stage,
    and the ranks that execute it together (a group that shares documents; with
    ``barrier="micro_batch"`` all ranks of the stage) are ready.

    Args:
        linear_cost_tokens: tokens, as in ``StepPlan.cost``.
        exchange_cost_tokens: tokens; exchanging the keys and values of a token costs as much as
            attention over this many tokens. Only the part beyond the micro batch's attention
            counts.

    Raises:
        ValueError: the step was assigned to another number of ranks.
    """
    stages, parts = cluster.pipeline_parallel, cluster.virtual_stages
    count, ranks = assigned.tokens.shape
    if ranks != cluster.num_ranks:
        raise ValueError(f"the step has {ranks} ranks, but the cluster has {cluster.num_ranks}")
    overlapped = np.maximum(assigned.attention, exchange_cost_tokens * assigned.exchanged)
    cost = (linear_cost_tokens * assigned.tokens + overlapped) / (stages * parts)
    if parts > 1:
        cost = np.pad(cost, ((0, -count % stages), (0, 0)))
    clock, bubble, waiting = (np.zeros((stages, ranks)) for _ in range(3))
    ended: dict[_Operation, Floats] = {}
    programs = [list(_operations(stage, cluster, len(cost))) for stage in range(stages)]
    done = [0] * stages
    while any(at < len(program) for at, program in zip(done, programs, strict=True)):
        for stage, program in enumerate(programs):
            while done[stage] < len(program):
                operation = program[done[stage]]
                needed = _needed(operation, cluster)
                if needed is not None and needed not in ended:
                    break
                m = operation.micro_batch
                arrival = clock[stage] if needed is None else ended[needed]
                ready = np.maximum(clock[stage], arrival)
                begin = _together(ready, assigned, m, cluster)
                bubble[stage] += ready - clock[stage]
                waiting[stage] += begin - ready
                share = 2 / 3 if operation.backward else 1 / 3
                clock[stage] = ended[operation] = begin + share * cost[m]
                done[stage] += 1
    bubble += clock.max(axis=0) - clock
    waiting += clock.max() - clock.max(axis=0)
    time, gpus = float(clock.max()), stages * ranks
    useful = linear_cost_tokens * assigned.useful_tokens + assigned.useful_attention
    work = float(cost.sum()) * stages * parts
    gpu_time = time * gpus if time else 1.0
    return StepTime(
        time=time,
        ideal=useful / gpus,
        extra=max(0.0, work - useful) / gpu_time,
        bubble=float(bubble.sum()) / gpu_time,
        waiting=float(waiting.sum()) / gpu_time,
        num_micro_batches=len(cost),
        empty=int((assigned.tokens + assigned.attention == 0).sum()) + (len(cost) - count) * ranks,
    )


@dataclass(frozen=True)
class _Operation:
    """Forward or backward of one micro batch through one part of the model."""

    stage: int
    part: int
    micro_batch: int
    backward: bool


def _operations(stage: int, cluster: Cluster, num_micro_batches: int) -> Iterator[_Operation]:
    """Yield a stage's operations in order: 1F1B (Narayanan et al. 2021, section 2.2). With several
    parts it is interleaved: each part processes as many micro batches as there are stages, then the
    next part processes them."""
    stages, parts = cluster.pipeline_parallel, cluster.virtual_stages
    count = num_micro_batches * parts
    later_stages = stages - stage - 1
    warmup = min(count, later_stages if parts == 1 else 2 * later_stages + (parts - 1) * stages)

    def nth(n: int, backward: bool) -> _Operation:
        part = n % (stages * parts) // stages
        micro_batch = n // (stages * parts) * stages + n % stages
        return _Operation(stage, parts - 1 - part if backward else part, micro_batch, backward)

    yield from (nth(n, False) for n in range(warmup))
    for n in range(count - warmup):
        yield nth(warmup + n, False)
        yield nth(n, True)
    yield from (nth(n, True) for n in range(count - warmup, count))


def _needed(operation: _Operation, cluster: Cluster) -> _Operation | None:
    """Return the operation that must end first: the same micro batch in the previous part."""
    stages, parts = cluster.pipeline_parallel, cluster.virtual_stages
    m, backward = operation.micro_batch, operation.backward
    depth = operation.part * stages + operation.stage + (1 if backward else -1)
    if depth == stages * parts:  # the last part: its own forward
        return _Operation(operation.stage, operation.part, m, False)
    return None if depth < 0 else _Operation(depth % stages, depth // stages, m, backward)


def _together(ready: Floats, assigned: AssignedStep, m: int, cluster: Cluster) -> Floats:
    """Return when each rank begins: with its whole stage, or with ranks that share documents."""
    if cluster.barrier == "micro_batch":
        return np.full_like(ready, ready.max())
    if m >= len(assigned.first_rank):  # an empty micro batch that was added for virtual stages
        return ready
    _, begins, group = np.unique(assigned.first_rank[m], return_index=True, return_inverse=True)
    latest: Floats = np.maximum.reduceat(ready, begins)[group]
    return latest
