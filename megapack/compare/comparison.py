"""Pack the same lengths with many strategies and keep what can be said about each.

An index lives only while its numbers are taken, so memory is that of one strategy at a time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megapack.compare.cases import Case
from megapack.compare.cost import TrainingRun, measure_work
from megapack.compare.evaluation import Evaluation, Recommendation, recommend
from megapack.compare.planned import PlannedWork, measure_plans
from megapack.errors import ConfigError, DataError
from megapack.packing import pack

# ---- The lengths that are compared on, summarised for a report ----------------------------------


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """The lengths that were compared on, summarised.

    Attributes:
        name: where they come from.
        num_documents, num_tokens, longest: of the lengths used.
        mean, median: tokens per document.
        sampled_from: documents of the whole dataset when only a sample was used, else None.
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
    def of(
        cls, lengths: NDArray[np.integer[Any]], *, name: str, sampled_from: int | None = None
    ) -> Corpus:
        """Summary with four histogram intervals per doubling of the length."""
        if len(lengths) == 0 or int(lengths.max()) == 0:
            raise DataError(f"{name} holds no document with a token in it; nothing to compare")
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


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The whole answer: what was compared, under which assumptions, and what is recommended.

    Attributes:
        planned: steps planned by documents instead; empty if they were not asked for.
        left_out: label -> why it was not compared.
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


def compare(
    lengths: NDArray[np.integer[Any]],
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
    progress: Callable[[int, int], None] | None = None,
) -> Comparison:
    """Run every case on the same lengths.

    Args:
        lengths: int32 or int64 (num_documents,), tokens per document.
        cases: what to run, in the order of the tables.
        run: model, hardware and habits of the cost estimate.
        name: where the lengths come from, for the report.
        sampled_from: documents of the whole dataset if ``lengths`` is a sample of it.
        num_ranks: data-parallel ranks of the imbalance estimate; None is ``run.num_gpus``.
        tokens_per_rank: tokens of one rank in one step.
        micro_batch_tokens: of one rank in one micro batch, to plan steps by documents, too; None:
            they are not.
        seed, threads: passed to ``pack``.
        left_out: cases that were refused (``default_cases``), for the report.
        progress: called with (work done, all work) a few times a second while packing.

    Raises:
        ConfigError: no case, or numbers that do not fit.
        DataError: no token, or none that a case places.
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
            linear_length=run.model.linear_length,
        )
    evaluations = []
    without = dict(left_out or {})
    for position, case in enumerate(cases):
        begin = time.perf_counter()
        index = pack(
            lengths,
            case.strategy,
            buckets=case.buckets,
            alignment=case.alignment,
            seed=seed,
            threads=threads,
            progress=_share_of(progress, position, len(cases)),
            **case.parameters,
        )
        seconds = time.perf_counter() - begin
        if index.num_samples == 0:
            without[case.label] = "it drops every token"
            continue
        work = measure_work(index, num_ranks=num_ranks, tokens_per_rank=tokens_per_rank)
        evaluations.append(Evaluation.of(case, index, work, run, seconds))
        del index  # before the next one is made
    if not evaluations:
        raise DataError(f"no strategy places a token of {name} in buckets of this size")
    return Comparison(
        corpus=corpus,
        run=run,
        num_ranks=num_ranks,
        tokens_per_rank=tokens_per_rank,
        seed=seed,
        evaluations=evaluations,
        planned=planned,
        left_out=without,
        recommendation=recommend(evaluations, run.attention),
    )


def _share_of(
    progress: Callable[[int, int], None] | None, position: int, num_cases: int
) -> Callable[[int, int], None] | None:
    """Progress of one case as progress of all, in thousandths of a case."""
    if progress is None:
        return None
    return lambda done, total: progress(
        1000 * position + 1000 * done // max(1, total), 1000 * num_cases
    )
