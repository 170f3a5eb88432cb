"""A step replayed on a cluster: how long it lasts over the ideal, and what ranks do meanwhile.

    simulate_step  one assigned step on data x pipeline x context parallel ranks -> StepTime
    Cluster        the ranks, how pipelines run, and when data-parallel ranks meet
    AssignedStep      what every rank holds in every micro batch: of a plan, or of a run's schedule

Four micro batches of equal work on a pipeline of four stages: every GPU idles for three of seven
turns, and three of four ranks wait where one holds twice the work.

    equal = np.full((4, 1), 12.0)                             # micro batches x ranks, tokens each
    step = AssignedStep.of_attention(equal)
    simulate_step(step, Cluster(pipeline_parallel=4)).bubble  # -> 0.428..., (P - 1) / (M + P - 1)
    step = AssignedStep.of_attention([[1.0, 1.0, 1.0, 2.0]])
    simulate_step(step, Cluster(data_parallel=4)).over_ideal  # -> 1.6

It is a model: time is predicted work (``StepPlan.cost``), a backward is two forwards, the stages of
a pipeline are equal, an exchange of context parallelism hides behind the attention of the same
micro batch as far as that lasts. Nothing else is counted: no other communication, no optimizer, no
input, no memory, and no kernel that is slower on short documents.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megapack.errors import ConfigError
from megapack.planning.step_plan import Integers, StepPlan

__all__ = ["AssignedStep", "Cluster", "StepTime", "simulate_step"]

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Ranks and how they run a step.

    Attributes:
        data_parallel: groups of ranks that hold different documents.
        context_parallel: ranks that may share a document: a power of two.
        pipeline_parallel: stages, one forward one backward in turns (1F1B).
        virtual_stages: parts of the model that each stage has (interleaved 1F1B); the number of
            micro batches is filled up with empty ones to a multiple of the stages.
        barrier: data-parallel ranks meet at every ``micro_batch`` (parameters are gathered for each
            forward and backward: FSDP, ZeRO-3), or once in a ``step``.

    Raises:
        ValueError: a number below 1, or context_parallel is no power of two.
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
            raise ConfigError(
                f"context_parallel is {self.context_parallel}; plans share documents among powers "
                "of two: 1, 2, 4, ..."
            )
        if self.virtual_stages > 1 and self.pipeline_parallel == 1:
            raise ConfigError(
                f"virtual_stages is {self.virtual_stages} and pipeline_parallel 1; only a pipeline "
                "has virtual stages"
            )
        if self.barrier not in ("micro_batch", "step"):
            raise ConfigError(f"barrier is {self.barrier!r}; it must be micro_batch or step")

    @property
    def num_ranks(self) -> int:
        """Ranks of one stage, as ``plan_step`` counts them."""
        return self.data_parallel * self.context_parallel


# ---- What ranks hold -----------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, eq=False)
class AssignedStep:
    """Work of every rank of a stage in every micro batch; arrays are (micro batches, ranks).

    Attributes:
        tokens: of a rank, padding included; of a shared document its part.
        attention: squared lengths over the ranks that share the document.
        exchanged: tokens whose keys and values a rank gets from others, n (d - 1) / d of a document
            of n tokens on d ranks; none where d is 1.
        first_rank: int64, the first of the ranks that share the rank's documents.
        useful_tokens, useful_attention: of the documents alone, over all ranks.
    """

    tokens: Floats
    attention: Floats
    exchanged: Floats
    first_rank: Integers
    useful_tokens: float
    useful_attention: float

    @classmethod
    def of_plan(cls, plan: StepPlan, documents: Integers | None = None) -> AssignedStep:
        """A plan's; `documents` are the true lengths where the plan's hold padding or cuts."""
        true = plan.lengths if documents is None else documents
        shape = (plan.num_micro_batches, plan.num_ranks)
        first = np.tile(np.arange(plan.num_ranks), (shape[0], 1))
        shared = np.flatnonzero(plan.degree > 1)
        exchanged = np.zeros(shape)
        for i in shared.tolist():
            begin, degree = int(plan.first_rank[i]), int(plan.degree[i])
            place = (plan.micro_batch[i], slice(begin, begin + degree))
            first[place] = begin
            exchanged[place] += plan.lengths[i] * (degree - 1) / degree
        return cls(
            tokens=plan.tokens,
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
        """Rows of one size, as a schedule of buckets deals them.

        Args:
            attention: (micro batches, ranks) of each rank.
            tokens: of each rank in each micro batch.
            degree: (micro batches,) ranks that share a row; None: each has its own.
            documents: lengths; None: all tokens and attention are useful.
        """
        work = np.asarray(attention, np.float64)
        shared = np.ones(len(work), np.int64) if degree is None else degree
        filled = np.full(work.shape, float(tokens))
        ranks = np.arange(work.shape[1])
        return cls(
            tokens=filled,
            attention=work,
            exchanged=filled * (shared - 1)[:, None],
            first_rank=ranks // shared[:, None] * shared[:, None],
            useful_tokens=float((filled if documents is None else documents).sum()),
            useful_attention=float((work if documents is None else np.square(documents)).sum()),
        )


# ---- The clock -----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """A step in units of ``StepPlan.cost``, and where the time of its GPUs went.

    Attributes:
        time: of the step.
        ideal: if all GPUs did equal parts of the useful work, and nothing else.
        extra: share of the GPUs' time for padding, attention between documents and exchanges.
        bubble: share in which a GPU waits for another stage of its pipeline.
        waiting: share in which it waits for other ranks: at a barrier, in a group that shares
            documents, at the end of the step. With the useful work the three make 1.
        num_micro_batches: of every rank.
        empty: pairs of rank and micro batch that hold nothing.
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
        """1.0 is perfect."""
        return self.time / self.ideal if self.ideal else 1.0


def simulate_step(
    assigned: AssignedStep,
    cluster: Cluster,
    *,
    linear_cost_tokens: float = 0.0,
    exchange_cost_tokens: float = 0.0,
) -> StepTime:
    """Replay a step: every forward and backward of every stage, on all ranks at once.

    An operation begins when its GPU is free, when what it needs has come from the stage before or
    after it, and when those that do it together (a group that shares documents; with
    ``barrier="micro_batch"`` all ranks of the stage) can begin, too.

    Args:
        assigned: documents on ``cluster.num_ranks`` ranks.
        cluster: of which they are.
        linear_cost_tokens: tokens, as in ``StepPlan.cost``.
        exchange_cost_tokens: tokens; to exchange the keys and values of a token costs as much as
            its attention over so many. An exchange lasts on only where it outlasts the attention
            of its micro batch.

    Raises:
        ValueError: the step was assigned to another number of ranks.
    """
    stages, parts = cluster.pipeline_parallel, cluster.virtual_stages
    count, ranks = assigned.tokens.shape
    if ranks != cluster.num_ranks:
        raise ValueError(f"the step is assigned to {ranks} ranks, and the cluster has {cluster}")
    hidden = np.maximum(assigned.attention, exchange_cost_tokens * assigned.exchanged)
    cost = (linear_cost_tokens * assigned.tokens + hidden) / (stages * parts)
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
                there = clock[stage] if needed is None else ended[needed]
                ready = np.maximum(clock[stage], there)
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
    spent = time * gpus if time else 1.0
    return StepTime(
        time=time,
        ideal=useful / gpus,
        extra=max(0.0, work - useful) / spent,
        bubble=float(bubble.sum()) / spent,
        waiting=float(waiting.sum()) / spent,
        num_micro_batches=len(cost),
        empty=int((assigned.tokens + assigned.attention == 0).sum()) + (len(cost) - count) * ranks,
    )


@dataclass(frozen=True)
class _Operation:
    """A forward or backward of one micro batch through one of a stage's parts of the model."""

    stage: int
    part: int
    micro_batch: int
    backward: bool


def _operations(stage: int, cluster: Cluster, num_micro_batches: int) -> Iterator[_Operation]:
    """What a stage does, in its order: 1F1B (Narayanan et al. 2021, section 2.2), interleaved where
    stages have several parts: each part takes as many micro batches as there are stages, then the
    next part takes them."""
    stages, parts = cluster.pipeline_parallel, cluster.virtual_stages
    count = num_micro_batches * parts
    ahead = stages - stage - 1
    warmup = min(count, ahead if parts == 1 else 2 * ahead + (parts - 1) * stages)

    def nth(n: int, backward: bool) -> _Operation:
        part = n % (stages * parts) // stages
        turn = n // (stages * parts) * stages + n % stages
        return _Operation(stage, parts - 1 - part if backward else part, turn, backward)

    yield from (nth(n, False) for n in range(warmup))
    for n in range(count - warmup):
        yield nth(warmup + n, False)
        yield nth(n, True)
    yield from (nth(n, True) for n in range(count - warmup, count))


def _needed(operation: _Operation, cluster: Cluster) -> _Operation | None:
    """The work that must be done first: the same micro batch in the part of the model before it."""
    stages, parts = cluster.pipeline_parallel, cluster.virtual_stages
    m, backward = operation.micro_batch, operation.backward
    depth = operation.part * stages + operation.stage + (1 if backward else -1)
    if depth == stages * parts:  # the last part: its own forward
        return _Operation(operation.stage, operation.part, m, False)
    return None if depth < 0 else _Operation(depth % stages, depth // stages, m, backward)


def _together(ready: Floats, assigned: AssignedStep, m: int, cluster: Cluster) -> Floats:
    """When each rank begins: with all of its stage, or with those that share its documents."""
    if cluster.barrier == "micro_batch":
        return np.full_like(ready, ready.max())
    if m >= len(assigned.first_rank):  # an empty micro batch that fills up a virtual pipeline
        return ready
    _, begins, group = np.unique(assigned.first_rank[m], return_index=True, return_inverse=True)
    latest: Floats = np.maximum.reduceat(ready, begins)[group]
    return latest
