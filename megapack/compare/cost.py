"""Cost of training on an index: floating-point operations, hours and money.

The arithmetic is simple enough to check by hand:

* a token costs ``6 N`` operations (2 forward, 4 backward per parameter that multiplies it);
* causal attention over a segment of s tokens costs ``7 layers width s^2``: 2 matrix products
  forward and 5 backward (FlashAttention recomputes the scores), each ``2 width s^2`` operations,
  halved by causality;
* a step lasts as long as its busiest rank;
* ``seconds = operations / (GPUs x peak x utilization)``; utilization includes communication, input
  and optimizer.

The ratio of attention to all other work reproduces the speeds by sequence length that BucketLLM
measured on 64 A800 (Table 3) within 3 %; `make bench-composition` prints both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from megapack import _core
from megapack.config import check_positive, check_range
from megapack.devices import FLOPS_PER_WEIGHT, PEAK_FLOPS, attention_flops
from megapack.errors import ConfigError
from megapack.packing import SampleIndex

# ---- Attention work of an index, and its imbalance over the ranks of a step ----------------------
# With attention inside documents, the work of a sample is the sum of its squared segment lengths;
# padding is a segment, too. All ranks of a step get samples of one bucket and equal
# numbers of tokens, so only attention work differs between them. The estimate draws steps and
# assigns their samples as training does (``megapack.data.sampler``).

AttentionScope = Literal["document", "sample"]
Dealing = Literal["balanced", "random"]

NUM_STEPS = 32  # drawn per bucket
_SEED = 20_240
_MOST_ASSIGNED = 64  # samples per rank; with more, the imbalance of longest first is below 0.1 %


@dataclass(frozen=True, kw_only=True)
class BucketWork:
    """Work of one bucket, in tokens and squared tokens.

    Attributes:
        capacity: tokens per sample.
        segment_squares: sum of squared segment lengths without padding.
        work: the same with the padding of each sample as one more segment.
        samples_per_rank: samples of one rank in one step.
        imbalance_random, imbalance_balanced: expected attention work of the busiest rank over the
            mean of all ranks, for random assignment and longest first.
    """

    capacity: int
    num_samples: int
    segment_squares: int
    work: int
    samples_per_rank: int
    imbalance_random: float
    imbalance_balanced: float

    @property
    def num_positions(self) -> int:
        """Computed token positions, with padding."""
        return self.num_samples * self.capacity

    @property
    def sample_squares(self) -> int:
        """Attention work if attention covers whole samples."""
        return self.num_samples * self.capacity**2

    def imbalance(self, dealing: Dealing) -> float:
        """Return the work of the busiest rank over the mean, for one assignment."""
        return self.imbalance_balanced if dealing == "balanced" else self.imbalance_random


def measure_work(
    index: SampleIndex,
    *,
    num_ranks: int = 64,
    tokens_per_rank: int = 49_152,
    num_steps: int = NUM_STEPS,
) -> list[BucketWork]:
    """Return the work of every non-empty bucket.

    Args:
        index: any packing without empty samples.
        num_ranks: data-parallel ranks of a step.
        tokens_per_rank: tokens of one rank in one step; a bucket of capacity L gives each rank
            ``max(1, tokens_per_rank // L)`` samples (BucketLLM, Table 3: 49,152 tokens).
        num_steps: steps drawn for the estimate, with replacement, seeded. Longest first is
            measured with at most 64 samples per rank.
    """
    counts = {"num_ranks": num_ranks, "tokens_per_rank": tokens_per_rank, "num_steps": num_steps}
    check_range("work of an index", at_least=1, **counts)
    squares = index.attention_cost()
    result = []
    for bucket, capacity in enumerate(index.bucket_capacity.tolist()):
        begin, end = map(int, index.bucket_sample_offsets[bucket : bucket + 2])
        if begin == end:
            continue
        work = _core.attention_cost_of(
            index.sample_segment_offsets,
            index.segment_length,
            np.arange(begin, end, dtype=np.int64),
            capacity,
            whole=False,
        )
        per_rank = max(1, tokens_per_rank // capacity)
        generator = np.random.default_rng((_SEED, capacity, num_ranks))
        picks = generator.integers(0, end - begin, (num_steps, num_ranks * per_rank))
        drawn = work[picks]
        result.append(
            BucketWork(
                capacity=capacity,
                num_samples=end - begin,
                segment_squares=int(squares[begin:end].sum()),
                work=int(work.sum()),
                samples_per_rank=per_rank,
                imbalance_random=_imbalance([row.reshape(num_ranks, -1).sum(1) for row in drawn]),
                imbalance_balanced=_imbalance(
                    [_rank_loads(row[: num_ranks * _MOST_ASSIGNED], num_ranks) for row in drawn]
                ),
            )
        )
    return result


def _rank_loads(work: NDArray[np.int64], num_ranks: int) -> NDArray[np.int64]:
    """Return loads ``(num_ranks,)`` as in training: longest first to the least loaded rank."""
    places = np.full(num_ranks, len(work) // num_ranks, np.int64)
    loads: NDArray[np.int64] = work[_core.assign_evenly(work, places)].reshape(num_ranks, -1).sum(1)
    return loads


def _imbalance(steps: list[NDArray[np.int64]]) -> float:
    """Return the expected load of the busiest rank over the expected mean load."""
    busiest = float(np.mean([loads.max() for loads in steps]))
    return busiest / float(np.mean([loads.mean() for loads in steps]))


@dataclass(frozen=True, kw_only=True)
class Model:
    """Sizes of a decoder that determine its cost.

    Attributes:
        parameters: parameters that multiply every token: the output head, but no embedding tables.
        num_layers: attention layers.
        attention_width: heads x head size (the hidden size in most models).
    """

    name: str
    parameters: float
    num_layers: int
    attention_width: int

    def __post_init__(self) -> None:
        sizes = {name: getattr(self, name) for name in ("num_layers", "attention_width")}
        check_positive(f"model {self.name!r}", parameters=self.parameters, **sizes)

    @property
    def flops_per_token(self) -> float:
        """Training operations of one token without attention: 6 N."""
        return FLOPS_PER_WEIGHT * self.parameters

    @property
    def flops_per_square(self) -> float:
        """Training operations of causal attention per squared token of segment length."""
        return attention_flops(self.num_layers, self.attention_width, recomputed=True)

    @property
    def linear_cost_tokens(self) -> float:
        """Length of a segment whose attention costs as much as all its other work, in tokens."""
        return self.flops_per_token / self.flops_per_square


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """Accelerator: name and dense 16-bit peak in operations per second (data sheets)."""

    name: str
    peak_flops: float

    def __post_init__(self) -> None:
        check_positive(f"GPU {self.name!r}", peak_flops=self.peak_flops)


MODELS: dict[str, Model] = {
    name: Model(name=name, parameters=parameters, num_layers=layers, attention_width=width)
    for name, parameters, layers, width in (
        ("125m", 0.124e9, 12, 768),  # GPT-2 small: tied head
        ("350m", 0.354e9, 24, 1024),
        ("1b", 1.24e9, 16, 2048),  # Llama 3.2 1B: tied head of 128k x 2048
        ("3b", 3.21e9, 28, 3072),  # Llama 3.2 3B
        ("7b", 6.61e9, 32, 4096),  # Llama 2 7B
        ("8b", 7.50e9, 32, 4096),  # Llama 3.1 8B
        ("13b", 12.85e9, 40, 5120),
        ("70b", 69.5e9, 80, 8192),
    )
}

GPUS: dict[str, Gpu] = {name: Gpu(name=name, peak_flops=peak) for name, peak in PEAK_FLOPS.items()}


@dataclass(frozen=True, kw_only=True)
class TrainingRun:
    """Assumptions about the training.

    Attributes:
        utilization: share of the peak that training reaches, 0 to 1 (MFU with attention).
        price_per_gpu_hour: in any currency; the report prints dollars.
        attention: `document` (inside each document) or `sample` (causal over the padded sample).
        dealing: assignment of samples to ranks in a step: `balanced` (longest first) or `random`.
        train_tokens: document tokens to train on; None: as many as the documents have. A strategy
            that drops tokens needs more than one pass for them.
    """

    model: Model
    gpu: Gpu
    num_gpus: int = 64
    price_per_gpu_hour: float = 2.0
    utilization: float = 0.4
    attention: AttentionScope = "document"
    dealing: Dealing = "balanced"
    train_tokens: float | None = None

    def __post_init__(self) -> None:
        check_range("training run", at_least=1, num_gpus=self.num_gpus)
        check_range("training run", above=0, at_most=1, utilization=self.utilization)
        check_range("training run", at_least=0, price_per_gpu_hour=self.price_per_gpu_hour)
        check_positive("training run", train_tokens=self.train_tokens)

    @property
    def flops_per_gpu_hour(self) -> float:
        """Operations of one GPU per hour, at the assumed utilization."""
        return 3600.0 * self.gpu.peak_flops * self.utilization


@dataclass(frozen=True, kw_only=True)
class Breakdown:
    """GPU hours by cause.

    Attributes:
        tokens: document tokens, each counted once.
        repeated: tokens that the strategy places again.
        padding: padding tokens.
        attention: attention inside segments.
        cross_attention: attention across segments and padding (attention over whole samples), or
            inside the padding (attention inside documents).
        waiting: ranks that wait for the busiest one.
        num_passes: passes over the data that `train_tokens` needs.
    """

    tokens: float
    repeated: float
    padding: float
    attention: float
    cross_attention: float
    waiting: float
    num_passes: float
    num_gpus: int
    price_per_gpu_hour: float

    @property
    def gpu_hours(self) -> float:
        tokens = self.tokens + self.repeated + self.padding
        return tokens + self.attention + self.cross_attention + self.waiting

    @property
    def critical_path(self) -> float:
        """GPU hours divided by the GPU hours without waiting."""
        return self.gpu_hours / (self.gpu_hours - self.waiting)

    @property
    def hours(self) -> float:
        return self.gpu_hours / self.num_gpus

    @property
    def cost(self) -> float:
        return self.gpu_hours * self.price_per_gpu_hour


def estimate_cost(
    buckets: Sequence[BucketWork],
    *,
    num_tokens: int,
    dropped_tokens: int,
    repeated_tokens: int,
    run: TrainingRun,
) -> Breakdown:
    """Return the GPU hours to train on an index.

    Args:
        buckets: work of every bucket (``measure_work``).
        num_tokens, dropped_tokens, repeated_tokens: tokens of all documents, tokens that the index
            leaves out, and tokens that it places again.
        run: model, hardware and assumptions.

    Raises ConfigError if the index holds no token, so no number of passes reaches `train_tokens`.
    """
    distinct_tokens = num_tokens - dropped_tokens
    if distinct_tokens <= 0:
        raise ConfigError("the index holds no document token; pack at least one token")
    target = num_tokens if run.train_tokens is None else run.train_tokens
    num_passes = target / distinct_tokens
    hours = num_passes / run.flops_per_gpu_hour
    per_token = run.model.flops_per_token * hours
    per_square = run.model.flops_per_square * hours

    positions = sum(b.num_positions for b in buckets)
    inside = sum(b.segment_squares for b in buckets)
    whole = sum(b.sample_squares if run.attention == "sample" else b.work for b in buckets)
    waiting = 0.0
    if run.attention == "document":
        waiting = sum(b.work * (b.imbalance(run.dealing) - 1.0) for b in buckets)
    return Breakdown(
        tokens=distinct_tokens * per_token,
        repeated=repeated_tokens * per_token,
        padding=(positions - distinct_tokens - repeated_tokens) * per_token,
        attention=inside * per_square,
        cross_attention=(whole - inside) * per_square,
        waiting=waiting * per_square,
        num_passes=num_passes,
        num_gpus=run.num_gpus,
        price_per_gpu_hour=run.price_per_gpu_hour,
    )
