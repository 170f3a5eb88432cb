"""What planning each step by its documents would give, beside the strategies' samples.

``plan_step`` deals the documents of a step themselves to ranks and micro batches: as trainers of
SFT and RL do (no document shared), or with dynamic context parallelism. What it leaves of unequal
work is estimated here as in ``workload``: by drawing steps, seeded, of documents in random order.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megapack.compare.cost import NUM_STEPS
from megapack.errors import ConfigError, DataError
from megapack.planning import CriticalPath, StepPlan, plan_step
from megapack.planning.dealers import cut_documents

__all__ = ["PlannedWork", "draw_steps", "measure_plans"]

_SEED = 20_241
_MOST_DOCUMENTS = 1 << 20  # of all steps together: fewer steps where one holds many

Lengths = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class PlannedWork:
    """Steps planned with groups of at most so many ranks; figures are means over the steps.

    Attributes:
        max_degree: ranks that may share a document.
        micro_batch_tokens: of one rank.
        num_steps: drawn.
        split_ratio: share of all documents that are longer than ``max_degree x
            micro_batch_tokens`` and were cut there.
        shared_ratio: tokens of documents that more than one rank holds, of all: communication.
        micro_batches: of a step.
        extra_micro_batches: of these, beyond what the tokens need.
        attention, model: critical path over the ideal, of attention alone and of the whole model.
    """

    max_degree: int
    micro_batch_tokens: int
    num_steps: int
    split_ratio: float
    shared_ratio: float
    micro_batches: float
    extra_micro_batches: float
    attention: CriticalPath
    model: CriticalPath


def measure_plans(
    lengths: NDArray[np.integer[Any]],
    *,
    num_ranks: int,
    tokens_per_rank: int,
    micro_batch_tokens: int,
    linear_length: float,
    num_steps: int = NUM_STEPS,
) -> list[PlannedWork]:
    """Plan the same steps without sharing, with the fewest ranks that hold the longest document,
    and with the largest power of two of ranks.

    Args:
        lengths: tokens per document; empty documents are left out.
        num_ranks: ranks of a step.
        tokens_per_rank, micro_batch_tokens: of one rank, in a step and in a micro batch.
        linear_length: of the model (``Model.linear_length``).
        num_steps: at most; fewer where all together would hold more than a million documents.

    Raises:
        ConfigError: a number below 1, or a micro batch of more tokens than the step.
        DataError: no document has a token.
    """
    if num_ranks < 1 or not 1 <= micro_batch_tokens <= tokens_per_rank:
        raise ConfigError(
            f"num_ranks is {num_ranks}, micro_batch_tokens {micro_batch_tokens} and "
            f"tokens_per_rank {tokens_per_rank}; all must be at least 1, and a micro batch has at "
            "most the tokens that a rank has in a step"
        )
    most = 1 << (num_ranks.bit_length() - 1)
    longest = int(lengths.max(initial=0))
    enough = 1 << (max(1, -(-longest // micro_batch_tokens)) - 1).bit_length()
    steps = draw_steps(
        lengths,
        tokens=num_ranks * tokens_per_rank,
        longest=most * micro_batch_tokens,
        num_steps=num_steps,
    )
    result = []
    for max_degree in sorted({1, min(enough, most), most}):
        limit = max_degree * micro_batch_tokens
        plans = [
            plan_step(
                cut_documents(step, limit),
                num_ranks=num_ranks,
                max_tokens_per_rank=micro_batch_tokens,
                max_degree=max_degree,
                linear_length=linear_length,
            )
            for step in steps
        ]
        needed = [-(-int(step.sum()) // (num_ranks * micro_batch_tokens)) for step in steps]
        num_micro_batches = fmean(plan.num_micro_batches for plan in plans)
        result.append(
            PlannedWork(
                max_degree=max_degree,
                micro_batch_tokens=micro_batch_tokens,
                num_steps=len(steps),
                split_ratio=int((lengths > limit).sum()) / len(lengths),
                shared_ratio=fmean(_shared(plan) for plan in plans),
                micro_batches=num_micro_batches,
                extra_micro_batches=num_micro_batches - fmean(needed),
                attention=_mean([plan.critical_path(0) for plan in plans]),
                model=_mean([plan.critical_path(linear_length) for plan in plans]),
            )
        )
    return result


def draw_steps(
    lengths: NDArray[np.integer[Any]], *, tokens: int, longest: int, num_steps: int
) -> list[Lengths]:
    """Documents drawn at random, with replacement: as many as ``tokens`` hold, and the next step.

    Those longer than ``longest`` (at most ``tokens``) are cut there. Raises DataError: no tokens.
    """
    mean = float(lengths.mean()) if len(lengths) else 0.0
    if mean == 0:
        raise DataError("no document has a token; there are no steps to plan")
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


def _shared(plan: StepPlan) -> float:
    return int(plan.lengths[plan.degree > 1].sum()) / int(plan.lengths.sum())


def _mean(paths: list[CriticalPath]) -> CriticalPath:
    return CriticalPath(
        per_micro_batch=fmean(path.per_micro_batch for path in paths),
        per_step=fmean(path.per_step for path in paths),
    )
