"""Comparison of strategies that pack the same lengths.

* ``compare(lengths, cases, run=...)``: every case on the same lengths -> ``Comparison``
* ``Corpus``: summary of the lengths; ``measure_plans``: steps planned by documents instead

    compare(lengths, default_cases(buckets=[1024, 4096], capacities=[4096])[0], run=run)

Each index is measured and discarded before the next one is made.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megapack.calls import checked_call
from megapack.compare.cost import NUM_STEPS, TrainingRun, estimate_cost, measure_work
from megapack.compare.evaluation import Case, Evaluation, Recommendation, recommend
from megapack.config import check_range
from megapack.errors import ConfigError, DataError
from megapack.packing import pack
from megapack.planning import CriticalPath, plan_step
from megapack.planning.assignments import cut_documents

Numbers = NDArray[np.integer[Any]]
Lengths = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Summary of the lengths.

    Attributes:
        name: origin of the lengths.
        longest, mean, median: tokens per document.
        sampled_from: documents of the whole dataset if the lengths are a sample of it, else None.
        edges: float64 (K + 1,), tokens; histogram interval k is [edges[k], edges[k + 1]).
        documents_per_interval, tokens_per_interval: int64 (K,).
    """

    name: str
    num_documents: int
    num_tokens: int
    longest: int
    mean: float
    median: float
    sampled_from: int | None
    edges: NDArray[np.float64]
    documents_per_interval: NDArray[np.int64]
    tokens_per_interval: NDArray[np.int64]

    @classmethod
    def of(cls, lengths: Numbers, *, name: str, sampled_from: int | None = None) -> Corpus:
        """Return the summary, with four histogram intervals per doubling of the length."""
        if len(lengths) == 0 or int(lengths.max()) == 0:
            raise DataError(f"{name} holds no document with a token; give a corpus that has tokens")
        longest = int(lengths.max())
        edges = 2.0 ** (np.arange(0, 4 * np.ceil(np.log2(longest + 1)) + 1) / 4)
        documents = np.zeros(len(edges) - 1, np.int64)
        tokens = np.zeros(len(edges) - 1, np.int64)
        for begin in range(0, len(lengths), 1 << 22):
            part = lengths[begin : begin + (1 << 22)].astype(np.int64)
            interval = np.searchsorted(edges, part[part > 0], side="right") - 1
            documents += np.bincount(interval, minlength=len(documents))
            weights = part[part > 0].astype(np.float64)  # exact: sums stay below 2**53
            tokens += np.bincount(interval, weights, minlength=len(tokens)).astype(np.int64)
        num_tokens = int(lengths.sum(dtype=np.int64))
        return cls(
            name=name,
            num_documents=len(lengths),
            num_tokens=num_tokens,
            longest=longest,
            mean=num_tokens / len(lengths),
            median=float(np.median(lengths)),
            sampled_from=sampled_from,
            edges=edges,
            documents_per_interval=documents,
            tokens_per_interval=tokens,
        )


# ---- Steps planned by documents, without samples -------------------------------------------------
# ``plan_step`` assigns the documents of a step to ranks and micro batches: without sharing, as
# trainers of SFT and RL do, or with dynamic context parallelism. The remaining imbalance is
# estimated as in ``measure_work``, from seeded draws of documents.

_SEED = 20_241
_MOST_DOCUMENTS = 1 << 20  # of all steps together


@dataclass(frozen=True, kw_only=True)
class PlannedWork:
    """Means over steps that were planned by their documents.

    Attributes:
        max_context_parallel_size: ranks that may share a document.
        micro_batch_tokens: tokens of one rank.
        num_steps: drawn steps.
        split_ratio: share of all documents that are longer than ``max_context_parallel_size x
            micro_batch_tokens`` and were cut there.
        shared_ratio: share of tokens whose document is on several ranks, which costs communication.
        micro_batches, extra_micro_batches: per step, and those beyond what the tokens need.
        attention, model: critical path divided by the ideal, for attention alone and for the whole
            model.
    """

    max_context_parallel_size: int
    micro_batch_tokens: int
    num_steps: int
    split_ratio: float
    shared_ratio: float
    micro_batches: float
    extra_micro_batches: float
    attention: CriticalPath
    model: CriticalPath


def measure_plans(
    lengths: Numbers,
    *,
    num_ranks: int,
    tokens_per_rank: int,
    micro_batch_tokens: int,
    linear_cost_tokens: float,
    num_steps: int = NUM_STEPS,
) -> list[PlannedWork]:
    """Plan the same steps with three limits of context parallelism: 1, the fewest ranks that hold
    the longest document, and the largest power of two of ranks.

    Args:
        lengths: tokens per document; empty documents are left out.
        num_ranks: ranks of a step.
        tokens_per_rank, micro_batch_tokens: tokens of one rank, per step and per micro batch.
        linear_cost_tokens: ``Model.linear_cost_tokens`` of the model.
        num_steps: at most; fewer if all steps would hold more than a million documents.

    Raises ConfigError for a number below 1, or a micro batch of more tokens than the step,
    DataError if no document has a token.
    """
    section = f"planned steps of {tokens_per_rank} tokens per rank"
    check_range(section, at_least=1, num_ranks=num_ranks)
    limits = {"at_least": 1, "at_most": tokens_per_rank}
    check_range(section, **limits, micro_batch_tokens=micro_batch_tokens)
    most = 1 << (num_ranks.bit_length() - 1)
    longest = int(lengths.max(initial=0))
    # The smallest power of two of ranks whose micro batches together hold the longest document.
    enough = 1 << (max(1, -(-longest // micro_batch_tokens)) - 1).bit_length()
    steps = draw_steps(
        lengths,
        tokens=num_ranks * tokens_per_rank,
        longest=most * micro_batch_tokens,
        num_steps=num_steps,
    )
    result = []
    for max_context_parallel_size in sorted({1, min(enough, most), most}):
        limit = max_context_parallel_size * micro_batch_tokens
        plans = [
            plan_step(
                cut_documents(step, limit),
                num_ranks=num_ranks,
                max_tokens_per_rank=micro_batch_tokens,
                max_context_parallel_size=max_context_parallel_size,
                linear_cost_tokens=linear_cost_tokens,
            )
            for step in steps
        ]
        needed = [-(-int(step.sum()) // (num_ranks * micro_batch_tokens)) for step in steps]
        num_micro_batches = fmean(plan.num_micro_batches for plan in plans)
        result.append(
            PlannedWork(
                max_context_parallel_size=max_context_parallel_size,
                micro_batch_tokens=micro_batch_tokens,
                num_steps=len(steps),
                split_ratio=int((lengths > limit).sum()) / len(lengths),
                shared_ratio=fmean(
                    int(plan.lengths[plan.degree > 1].sum()) / int(plan.lengths.sum())
                    for plan in plans
                ),
                micro_batches=num_micro_batches,
                extra_micro_batches=num_micro_batches - fmean(needed),
                attention=_mean([plan.critical_path(0) for plan in plans]),
                model=_mean([plan.critical_path(linear_cost_tokens) for plan in plans]),
            )
        )
    return result


def draw_steps(lengths: Numbers, *, tokens: int, longest: int, num_steps: int) -> list[Lengths]:
    """Draw documents at random, with replacement, for up to ``num_steps`` steps of ``tokens``.
    Documents longer than ``longest`` (at most ``tokens``) are cut there. Raises DataError if no
    document has a token."""
    mean = float(lengths.mean()) if len(lengths) else 0.0
    if mean == 0:
        raise DataError("no document has a token; give a corpus that has tokens")
    generator = np.random.default_rng((_SEED, tokens))
    count = math.ceil(tokens / mean)
    steps = []
    for _ in range(max(1, min(num_steps, _MOST_DOCUMENTS // count))):
        drawn = np.zeros(0, np.int64)
        while int(drawn.sum()) < tokens:
            more = lengths[generator.integers(0, len(lengths), count)].astype(np.int64)
            drawn = np.concatenate([drawn, cut_documents(more[more > 0], longest)])
        steps.append(drawn[: np.searchsorted(drawn.cumsum(), tokens, side="right")])
    return steps


def _mean(paths: list[CriticalPath]) -> CriticalPath:
    return CriticalPath(
        per_micro_batch=fmean(path.per_micro_batch for path in paths),
        per_step=fmean(path.per_step for path in paths),
    )


# ---- Comparison ----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Evaluations of all strategies, their assumptions and the recommendation.

    Attributes:
        planned: steps planned by documents; empty if they were not requested.
        left_out: label -> why it was not compared.
        grouped_by: value of --groups; None: no groups.
        second_by: value of --second; None: no second sizes.
    """

    corpus: Corpus
    run: TrainingRun
    num_ranks: int
    tokens_per_rank: int
    seed: int
    evaluations: list[Evaluation]
    planned: list[PlannedWork]
    left_out: dict[str, str]
    recommendation: Recommendation
    grouped_by: str | None = None
    second_by: str | None = None


@checked_call
def compare(
    lengths: Numbers,
    cases: Sequence[Case],
    *,
    run: TrainingRun,
    name: str = "lengths",
    sampled_from: int | None = None,
    num_ranks: int | None = None,
    tokens_per_rank: int = 49_152,
    micro_batch_tokens: int | None = None,
    seed: int = 0,
    threads: int = 1,
    left_out: Mapping[str, str] | None = None,
    groups: NDArray[np.int64] | None = None,
    grouped_by: str | None = None,
    second: NDArray[np.int64] | None = None,
    second_by: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Comparison:
    """Pack the same lengths in every case, and evaluate the results.

    Args:
        lengths: int32 or int64 (num_documents,), tokens per document.
        cases: strategies, in the order of the tables.
        run: model, hardware and assumptions of the cost estimate.
        name, sampled_from: as in ``Corpus``.
        num_ranks: data-parallel ranks of the imbalance estimate; None: ``run.num_gpus``.
        tokens_per_rank: tokens of one rank in one step.
        micro_batch_tokens: tokens of one rank in one micro batch, to plan steps by documents, too;
            None: do not plan them.
        seed, threads, groups, second: passed to ``pack``.
        left_out, grouped_by, second_by: as in ``Comparison``.
        progress: called with (work done, all work) a few times a second while packing.

    Raises:
        ConfigError: no case, or inconsistent numbers.
        DataError: the lengths have no token, or no case places one.
    """
    if not cases:
        raise ConfigError("no strategy to compare; name at least one")
    corpus = Corpus.of(lengths, name=name, sampled_from=sampled_from)
    num_ranks = run.num_gpus if num_ranks is None else num_ranks
    planned = []
    if micro_batch_tokens is not None:
        planned = measure_plans(
            lengths,
            num_ranks=num_ranks,
            tokens_per_rank=tokens_per_rank,
            micro_batch_tokens=micro_batch_tokens,
            linear_cost_tokens=run.model.linear_cost_tokens,
        )
    evaluations = []
    excluded = dict(left_out or {})
    for position, case in enumerate(cases):
        begin = time.perf_counter()
        index = pack(
            lengths,
            case.strategy,
            buckets=case.buckets,
            alignment=case.alignment,
            fim_room=case.fim_room,
            seed=seed,
            threads=threads,
            groups=groups,
            second=second,
            second_capacity=case.second_capacity,
            progress=progress and partial(_report_case, progress, position, len(cases)),
            **case.parameters,
        )
        seconds = time.perf_counter() - begin
        if index.num_samples == 0:
            excluded[case.label] = "it drops every token"
            continue
        work = measure_work(index, num_ranks=num_ranks, tokens_per_rank=tokens_per_rank)
        metrics = index.metrics()
        counts = {n: metrics[n] for n in ("num_tokens", "dropped_tokens", "repeated_tokens")}
        evaluations.append(
            Evaluation(
                case=case,
                metrics=metrics,
                decisions=index.decisions,
                work=work,
                breakdown=estimate_cost(work, **counts, run=run),
                seconds=seconds,
            )
        )
        del index  # free its memory before the next one is made
    if not evaluations:
        raise DataError(f"no strategy places a token of {name} in these buckets; give larger ones")
    return Comparison(
        corpus=corpus,
        run=run,
        num_ranks=num_ranks,
        tokens_per_rank=tokens_per_rank,
        seed=seed,
        evaluations=evaluations,
        planned=planned,
        left_out=excluded,
        recommendation=recommend(evaluations, run.attention),
        grouped_by=grouped_by,
        second_by=second_by,
    )


def _report_case(
    progress: Callable[[int, int], None], position: int, num_cases: int, done: int, total: int
) -> None:
    progress(1000 * position + 1000 * done // max(1, total), 1000 * num_cases)
