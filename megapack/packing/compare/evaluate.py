"""Pack the same lengths with many strategies and keep what can be said about each.

An index lives only while its numbers are taken, so memory is that of one strategy at a time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray

from megapack.errors import ConfigError
from megapack.packing import STRATEGIES, pack
from megapack.packing.compare.cost import Breakdown, TrainingRun, estimate
from megapack.packing.compare.recommend import Recommendation, recommend
from megapack.packing.compare.workload import BucketWork, measure_work

__all__ = ["Case", "Comparison", "Corpus", "Evaluation", "compare", "default_cases", "parse_case"]

DEFAULT_BUCKETS = (1024, 2048, 4096, 8192, 16384)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One strategy with its capacities and the parameters that differ from the defaults."""

    strategy: str
    buckets: tuple[int, ...]
    parameters: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_fixed_length(self) -> bool:
        """One shape for all samples."""
        return len(self.buckets) == 1

    @property
    def label(self) -> str:
        """Name in tables: ``concat@4096``, ``bucket``, ``seamless@2048 r_max=0.3``."""
        place = f"@{self.buckets[0]}" if self.is_fixed_length else ""
        return " ".join([self.strategy + place, *(f"{k}={v}" for k, v in self.parameters.items())])


def parse_case(text: str, *, buckets: Sequence[int], capacities: Sequence[int]) -> list[Case]:
    """Read ``NAME[@CAPACITY[+CAPACITY...]][:KEY=VALUE[,KEY=VALUE...]]``.

    Args:
        text: for instance ``bucket``, ``concat@4096``, ``seamless@2048:r_max=0.3,last=drop``.
        buckets: capacities of a bucket strategy that names none.
        capacities: a fixed-length strategy that names none becomes one case for each of these.

    Raises:
        ConfigError: the text is not of this form or names no strategy.
    """
    head, _, tail = text.partition(":")
    name, at, places = head.partition("@")
    if name not in STRATEGIES:
        raise ConfigError(f"no strategy {name!r}; choose from {', '.join(STRATEGIES)}")
    parameters: dict[str, Any] = {}
    for item in filter(None, tail.split(",")):
        key, equals, value = item.partition("=")
        if not equals:
            raise ConfigError(f"strategy {text!r}: {item!r} is not of the form key=value")
        parameters[key.strip()] = yaml.safe_load(value)
    if at:
        try:
            given = tuple(int(place) for place in places.split("+"))
        except ValueError:
            raise ConfigError(
                f"strategy {text!r}: {places!r} is no capacity; write {name}@4096 or "
                f"{name}@1024+2048"
            ) from None
        return [Case(strategy=name, buckets=given, parameters=parameters)]
    if not STRATEGIES[name].fixed_length:
        return [Case(strategy=name, buckets=tuple(buckets), parameters=parameters)]
    return [
        Case(strategy=name, buckets=(capacity,), parameters=parameters) for capacity in capacities
    ]


def default_cases(*, buckets: Sequence[int], capacities: Sequence[int]) -> list[Case]:
    """Every strategy of the registry with its default parameters."""
    return [
        case
        for name in STRATEGIES
        for case in parse_case(name, buckets=buckets, capacities=capacities)
    ]


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
            raise ConfigError(f"{name} holds no document with a token in it; nothing to compare")
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
class Evaluation:
    """Everything known about one case.

    Attributes:
        metrics: ``SampleIndex.metrics()``, unchanged.
        work: per non-empty bucket, ascending capacity.
        breakdown: GPU-hours and money.
        seconds: time to pack (not to measure), one thread unless asked otherwise.
        truncation_floor: share of documents that cannot be whole in the largest bucket.
    """

    case: Case
    metrics: dict[str, Any]
    work: list[BucketWork]
    breakdown: Breakdown
    seconds: float
    truncation_floor: float

    @property
    def label(self) -> str:
        """Name in tables."""
        return self.case.label


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The whole answer: what was compared, under which assumptions, and what is recommended."""

    corpus: Corpus
    run: TrainingRun
    num_ranks: int
    tokens_per_rank: int
    seed: int
    evaluations: list[Evaluation]
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
    seed: int = 0,
    threads: int = 1,
    progress: Callable[[str], None] | None = None,
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
        seed, threads: passed to ``pack``.
        progress: called with a line of text before each case.

    Raises:
        ConfigError: no case, no token, or parameters that a strategy refuses.
    """
    if not cases:
        raise ConfigError("no strategy to compare; name at least one")
    corpus = Corpus.of(lengths, name=name, sampled_from=sampled_from)
    num_ranks = run.num_gpus if num_ranks is None else num_ranks
    evaluations = []
    for position, case in enumerate(cases, 1):
        if progress is not None:
            progress(f"{position}/{len(cases)} {case.label}")
        begin = time.perf_counter()
        index = pack(
            lengths,
            case.strategy,
            buckets=list(case.buckets),
            seed=seed,
            threads=threads,
            **case.parameters,
        )
        seconds = time.perf_counter() - begin
        metrics = index.metrics()
        work = measure_work(index, num_ranks=num_ranks, tokens_per_rank=tokens_per_rank)
        evaluations.append(
            Evaluation(
                case=case,
                metrics=metrics,
                work=work,
                breakdown=estimate(
                    work,
                    distinct_tokens=metrics["num_tokens"] - metrics["dropped_tokens"],
                    repeated_tokens=metrics["repeated_tokens"],
                    run=run,
                ),
                seconds=seconds,
                truncation_floor=float(np.mean(lengths > max(case.buckets))),
            )
        )
        del index
    return Comparison(
        corpus=corpus,
        run=run,
        num_ranks=num_ranks,
        tokens_per_rank=tokens_per_rank,
        seed=seed,
        evaluations=evaluations,
        recommendation=recommend(evaluations),
    )
