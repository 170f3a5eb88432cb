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
from megapack.packing.compare.cost import Breakdown, Dealing, TrainingRun, estimate
from megapack.packing.compare.recommend import Recommendation, recommend
from megapack.packing.compare.workload import BucketWork, measure_work
from megapack.packing.engine import pack
from megapack.packing.strategies import STRATEGIES, find_strategy

__all__ = ["Case", "Comparison", "Corpus", "Evaluation", "compare", "default_cases", "parse_case"]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One strategy with its capacities and the parameters that differ from the defaults.

    Attributes:
        label: name in tables: ``concat@4096``, ``bucket``, ``seamless@2048 r_max=0.3``.
        strategy: name in ``STRATEGIES``.
        buckets: capacities, ascending.
        parameters: keywords of ``pack``; ``preset`` is one of them.
    """

    label: str
    strategy: str
    buckets: tuple[int, ...]
    parameters: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse what ``pack`` would refuse, before anything else of a comparison has run."""
        strategy = find_strategy(self.strategy)
        values = dict(self.parameters)
        preset = values.pop("preset", None)
        strategy.resolve(values, preset=preset, capacity=max(self.buckets))
        if len(self.buckets) > 1 and not strategy.many_buckets:
            raise ConfigError(
                f"{self.label}: strategy {self.strategy!r} has samples of one length; "
                f"give one capacity instead of {list(self.buckets)}"
            )

    @property
    def is_fixed_length(self) -> bool:
        """One shape for all samples."""
        return len(self.buckets) == 1


def parse_case(text: str, *, buckets: Sequence[int], capacities: Sequence[int]) -> list[Case]:
    """Read ``NAME[@CAPACITY[+CAPACITY...]][:KEY=VALUE[,KEY=VALUE...]]``.

    Args:
        text: for instance ``bucket``, ``concat@4096``, ``seamless@2048:preset=paper,last=drop``.
        buckets: capacities of a bucket strategy that names none.
        capacities: a fixed-length strategy that names none becomes one case for each of these.

    Raises:
        ValueError: the text is not of this form, or names no strategy or no parameter of it.
    """
    head, _, tail = text.partition(":")
    name, at, places = head.partition("@")
    many = find_strategy(name).many_buckets
    parameters = _parse_parameters(tail, text)
    suffix = "".join(f" {key}={value}" for key, value in parameters.items())
    if at:
        chosen = [(head, _parse_capacities(places, text))]
    elif many:
        chosen = [(name, tuple(sorted(buckets)))]
    else:
        chosen = [(f"{name}@{capacity}", (capacity,)) for capacity in capacities]
    return [
        Case(label=label + suffix, strategy=name, buckets=given, parameters=parameters)
        for label, given in chosen
    ]


def _parse_parameters(text: str, whole: str) -> dict[str, Any]:
    parameters: dict[str, Any] = {}
    for item in filter(None, text.split(",")):
        key, equals, value = item.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"strategy {whole!r}: {item!r} is not of the form key=value")
        # YAML reads on and off as booleans; a parameter that has them as words means the words.
        parameters[key.strip()] = value if value in ("on", "off") else yaml.safe_load(value)
    return parameters


def _parse_capacities(text: str, whole: str) -> tuple[int, ...]:
    try:
        return tuple(sorted(int(place) for place in text.split("+")))
    except ValueError:
        raise ConfigError(
            f"strategy {whole!r}: {text!r} is no capacity; write @4096, or @1024+2048 for buckets"
        ) from None


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
        decisions: what the strategy decided by itself, and why.
        work: per non-empty bucket, ascending capacity.
        breakdown: GPU-hours and money.
        seconds: time to pack (not to measure), one thread unless asked otherwise.
    """

    case: Case
    metrics: dict[str, Any]
    decisions: dict[str, str]
    work: list[BucketWork]
    breakdown: Breakdown
    seconds: float

    @property
    def label(self) -> str:
        """Name in tables."""
        return self.case.label

    @property
    def num_positions(self) -> int:
        """Token positions that are computed, padding included."""
        return sum(bucket.num_positions for bucket in self.work)

    @property
    def mean_context(self) -> float:
        """Attention inside documents: mean squared segment length per position, in tokens."""
        return sum(bucket.work for bucket in self.work) / self.num_positions

    @property
    def mean_sample_context(self) -> float:
        """Attention over whole samples: mean squared capacity per position, in tokens."""
        return sum(bucket.sample_squares for bucket in self.work) / self.num_positions

    def imbalance(self, dealing: Dealing) -> float:
        """Busiest rank over mean rank, buckets weighted by their attention work."""
        total = sum(bucket.work for bucket in self.work)
        return sum(bucket.work * bucket.imbalance(dealing) for bucket in self.work) / total


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
                decisions=index.decisions,
                work=work,
                breakdown=estimate(
                    work,
                    distinct_tokens=metrics["num_tokens"] - metrics["dropped_tokens"],
                    repeated_tokens=metrics["repeated_tokens"],
                    run=run,
                ),
                seconds=seconds,
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
