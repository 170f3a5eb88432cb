"""Validation: perplexity of held-out documents. Each token is scored once, within its document.

Every token but the first of a document has a label, also if a segment begins inside a document. So
the same tokens are scored for every capacity, and the results are comparable. With
``engine.sequence_parallel_size``, ranks share samples that are too long for the forward pass of one
rank, as in training; each then sums the losses of its slices.

    validate(model, data, world=world, config=config, micro_batch_tokens=16384).report()
    # -> {"loss": 2.87, "perplexity": 17.6, "label_tokens": 1043210, "bucket_loss": {...}}
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from megapack.data import BatchLayout, PackedDataset
from megapack.data.batch import cut_slice
from megapack.data.steps import ranks_per_micro_batch
from megapack.packing import pack
from megapack.storage import IndexedDataset
from megapack.training.config import EngineConfig
from megapack.training.engine.world import World
from megapack.training.model.training_model import on_device

logger = logging.getLogger("megapack")

_SECONDS_BETWEEN_LINES = 30.0  # of a long validation


@dataclass(frozen=True, kw_only=True)
class ValidationResult:
    """Summed losses and numbers of label tokens by capacity."""

    loss_sums: dict[int, float]
    label_tokens: dict[int, int]
    sources: dict[str, ValidationResult] = field(default_factory=dict)
    """Results by source, for sources of a blend with held-out documents."""

    @staticmethod
    def together(results: Iterable[ValidationResult]) -> ValidationResult:
        sums: dict[int, float] = {}
        counts: dict[int, int] = {}
        for result in results:
            for capacity, count in result.label_tokens.items():
                sums[capacity] = sums.get(capacity, 0.0) + result.loss_sums[capacity]
                counts[capacity] = counts.get(capacity, 0) + count
        return ValidationResult(loss_sums=dict(sorted(sums.items())), label_tokens=counts)

    @property
    def loss(self) -> float:
        """Mean over all label tokens, in nats per token; nan if there are none."""
        count = sum(self.label_tokens.values())
        return sum(self.loss_sums.values()) / count if count else math.nan

    @property
    def perplexity(self) -> float:
        return math.inf if self.loss >= 700 else math.exp(self.loss)

    def report(self) -> dict[str, Any]:
        """Return the log line: loss, perplexity, label tokens, loss by bucket and source."""
        scored = {c: n for c, n in self.label_tokens.items() if n}
        by_source = {
            "source_loss": {name: result.loss for name, result in self.sources.items()},
            "source_perplexity": {name: r.perplexity for name, r in self.sources.items()},
        }
        return {
            "loss": self.loss,
            "perplexity": self.perplexity,
            "label_tokens": sum(self.label_tokens.values()),
            "bucket_loss": {str(c): self.loss_sums[c] / n for c, n in scored.items()},
            **(by_source if self.sources else {}),
        }


def validate(
    model: Any,
    data: PackedDataset,
    *,
    world: World,
    config: EngineConfig,
    micro_batch_tokens: int,
    max_tokens: int | None = None,
) -> ValidationResult:
    """Score samples on all ranks together; collective. All ranks get the same result.

    Args:
        model: a ``TrainingModel``, or the DeepSpeed engine of one.
        data: result of ``open_validation``.
        micro_batch_tokens: tokens of a rank's forward pass (at least one sample or its slice).
        max_tokens: largest number of tokens to score per bucket; None: all.
    """
    capacities = [int(c) for c in data.samples.indices[0].bucket_capacity]
    sums = torch.zeros(2, len(capacities), dtype=torch.float64, device=world.device)
    how: Any = {"world": world, "config": config, "micro_batch_tokens": micro_batch_tokens}
    training, next_line = model.training, time.monotonic() + _SECONDS_BETWEEN_LINES
    model.eval()
    try:
        with torch.no_grad():
            for number, capacity in enumerate(capacities):
                ids = _sample_ids(data, capacity, max_tokens)
                for done, batch in enumerate(_batches(data, ids, capacity, **how)):
                    world.progress.at(f"validation, bucket {capacity}")
                    if world.is_first and time.monotonic() > next_line:
                        logger.info("validating: bucket %d, %d micro batches done", capacity, done)
                        next_line = time.monotonic() + _SECONDS_BETWEEN_LINES
                    loss, *_ = model(**on_device(batch, world.device, config))
                    sums[0, number] += loss
                    sums[1, number] += int((batch["labels"] >= 0).sum())
    finally:
        model.train(training)
    dist.all_reduce(sums)
    losses, counts = sums.tolist()
    return ValidationResult(
        loss_sums=dict(zip(capacities, losses, strict=True)),
        label_tokens={c: int(n) for c, n in zip(capacities, counts, strict=True)},
    )


def num_scored(datasets: Iterable[PackedDataset], max_tokens: int | None) -> int:
    """Return the number of samples that ``validate`` scores in all datasets."""
    buckets = ((data, int(c)) for data in datasets for c in data.samples.indices[0].bucket_capacity)
    return sum(len(_sample_ids(data, capacity, max_tokens)) for data, capacity in buckets)


def validate_sources(
    model: Any, data: PackedDataset | None, sources: Mapping[str, PackedDataset], **how: Any
) -> ValidationResult:
    """Score ``data`` and every source; collective. Without ``data``, the result sums up all
    sources. ``how``: further arguments of ``validate``."""
    results = {name: validate(model, source, **how) for name, source in sources.items()}
    if data is None:
        return replace(ValidationResult.together(results.values()), sources=results)
    return replace(validate(model, data, **how), sources=results)


def perplexity_by_context(
    model: Any, dataset: IndexedDataset, contexts: Sequence[int], **how: Any
) -> dict[int, ValidationResult]:
    """Score the same documents with different context lengths (BucketLLM, Figure 3): a document
    longer than context C is scored in chunks of C tokens. ``how``: arguments of ``validate``."""
    result = {}
    for context in contexts:
        samples = pack(dataset.document_lengths, "bucket", buckets=[context])
        result[context] = validate(model, PackedDataset(dataset, samples), **how)
    return result


def _batches(
    data: PackedDataset,
    ids: NDArray[np.int64],
    capacity: int,
    *,
    world: World,
    config: EngineConfig,
    micro_batch_tokens: int,
) -> Iterator[Any]:
    """Yield this rank's micro batches of one bucket; all ranks have the same number."""
    shared = ranks_per_micro_batch(capacity, micro_batch_tokens, config.sequence_parallel_size)
    layout = _layout(capacity, micro_batch_tokens, shared, config)
    size = layout.num_samples(capacity)
    groups, group = world.size // shared, world.rank // shared
    rounds = -(-len(ids) // (size * groups))
    for i in range(rounds):
        # Past the end, a group scores an empty batch: ZeRO-3 needs all ranks in every forward pass.
        begin = (i * groups + group) * size
        batch = data.micro_batch(ids[begin : begin + size], layout=layout, capacity=capacity)
        if shared > 1:
            batch = cut_slice(batch, world.rank % shared, shared)
        yield {**batch, "capacity": capacity, "row_tokens": layout.row_tokens}


def _layout(
    capacity: int, micro_batch_tokens: int, shared: int, config: EngineConfig
) -> BatchLayout:
    """Return the layout of a stream that is cut into ``shared`` equal slices."""
    row = -(-capacity // shared) * shared
    size = max(1, micro_batch_tokens * shared // row)
    # Compiled layers need ``cu_seqlens`` of constant shape.
    kind: Literal["padded", "exact"] = "padded" if config.compile else "exact"
    return BatchLayout(micro_batch_tokens=size * row, row_tokens=row, cu_seqlens=kind)


def _sample_ids(data: PackedDataset, capacity: int, max_tokens: int | None) -> NDArray[np.int64]:
    index = data.samples.indices[0]
    bucket = [int(c) for c in index.bucket_capacity].index(capacity)
    begin, end = (int(x) for x in index.bucket_sample_offsets[bucket : bucket + 2])
    count = end - begin
    if max_tokens is not None:
        count = min(count, max(1, max_tokens // capacity))
    # Evenly spaced, because neighbors in an index have similar lengths.
    return np.linspace(begin, end, count, endpoint=False).astype(np.int64)
