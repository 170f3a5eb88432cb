"""What a run reads: its documents, their samples, and the order of its steps."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from megapack.data import Batch, PackedDataset, PackedLoader, Schedule, load_blend
from megapack.errors import ConfigError
from megapack.packing import SampleIndex
from megapack.training.config import DataConfig, PretrainConfig
from megapack.training.judge.validation import open_validation

__all__ = ["Inputs", "TimedBatches", "check_positions", "open_inputs"]


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """Open files of a run."""

    data: PackedDataset
    schedule: Schedule
    valid: PackedDataset | None
    num_steps: int
    """Of the whole run."""
    steps_per_epoch: int
    vocab_size: int

    @property
    def capacities(self) -> list[int]:
        """Tokens per sample of every bucket, ascending."""
        return [stream.capacity for stream in self.schedule.buckets]

    def fingerprints(self) -> dict[str, Any]:
        """Identities of documents and samples, for the run directory."""
        return {
            "documents": [dataset.fingerprint for dataset in self.data.datasets],
            "samples": list(self.schedule.samples.fingerprints),
        }


def open_inputs(config: PretrainConfig) -> Inputs:
    """Open training and validation data and compute the length of the run.

    Raises:
        ConfigError: sizes that do not fit, or an unknown vocabulary.
        IndexMismatchError: an index of other documents.
        FormatError, OSError: a file is damaged or missing.
    """
    data = _open_training_data(config.data)
    schedule = Schedule(
        data,
        tokens_per_step=config.data.tokens_per_step,
        seed=config.seed,
        order=config.data.order,
        num_cycles=config.data.num_cycles,
        mix=config.data.mix,
        micro_step_tokens=config.data.micro_step_tokens,
        row_tokens=config.data.row_tokens,
        cost_window=config.data.cost_window,
    )
    valid = None
    if config.data.valid_prefix is not None:
        buckets = config.evaluation.buckets or [stream.capacity for stream in schedule.buckets]
        valid = open_validation(
            config.data.valid_prefix,
            config.data.valid_index,
            buckets=buckets,
            positions="document" if config.data.positions == "document" else "segment",
        )
    return Inputs(
        data=data,
        schedule=schedule,
        valid=valid,
        num_steps=config.num_steps or schedule.num_steps(config.num_epochs),
        steps_per_epoch=schedule.num_steps(1),
        vocab_size=_vocab_size(config, data),
    )


def _open_training_data(config: DataConfig) -> PackedDataset:
    options: dict[str, Any] = {
        "positions": config.positions,
        "attention": config.attention,
        "labels": config.labels,
    }
    if config.blend is not None:
        return load_blend(config.blend).open(**options)
    assert config.prefix is not None and config.index is not None  # DataConfig checked it
    return PackedDataset(config.prefix, config.index, **options)


def _vocab_size(config: PretrainConfig, data: PackedDataset) -> int:
    if config.model.vocab_size is not None:
        return config.model.vocab_size
    sizes = [dataset.vocab_size for dataset in data.datasets]
    known = [size for size in sizes if size is not None]
    if len(known) < len(sizes) and config.model.pretrained is None:
        nameless = data.datasets[sizes.index(None)].prefix
        raise ConfigError(
            f"{nameless}.meta.json does not tell the size of the vocabulary; set model.vocab_size"
        )
    return max(known, default=1)


def check_positions(inputs: Inputs, positions: str, limit: int | None) -> None:
    """Refuse positions that a model with learned position embeddings does not have.

    Raises:
        ConfigError: some position would reach ``limit``.
    """
    if limit is None:
        return
    valid = "document" if positions == "document" else "segment"
    for data, kind in ((inputs.data, positions), (inputs.valid, valid)):
        indices = [] if data is None else data.samples.indices
        longest = max((_longest_position(index, kind) for index in indices), default=0)
        if longest > limit:
            raise ConfigError(
                f"the model has {limit} positions and {data} needs {longest} (positions: {kind}); "
                f"pack into buckets of at most {limit}, or take a model with RoPE or ALiBi"
            )


def _longest_position(index: SampleIndex, positions: str) -> int:
    """One more than the highest position id of an index."""
    if positions == "sample":
        return int(index.bucket_capacity.max())
    ends = np.asarray(index.segment_length, dtype=np.int64)
    if positions == "document":
        ends = ends + index.segment_begin
    return int(ends.max(initial=0))


class TimedBatches:
    """Batches of a loader, step by step, and how long the trainer waited for them."""

    def __init__(self, loader: PackedLoader) -> None:
        self._loader = loader
        self._waited = 0.0
        self.imbalance = 1.0
        """Of the step before: largest over mean attention work of the ranks."""

    def steps(self) -> Iterator[tuple[int, Iterator[Batch]]]:
        """Every step with its micro batches of this rank, each gathered when it is asked for."""
        return itertools.groupby(self._batches(), key=lambda batch: int(batch["step"]))

    def _batches(self) -> Iterator[Batch]:
        batches = iter(self._loader)
        while True:
            begin = time.perf_counter()
            batch = next(batches, None)
            self._waited += time.perf_counter() - begin
            if batch is None:
                return
            self.imbalance = batch["imbalance"]
            yield batch

    def waited(self) -> float:
        """Seconds waited since this was last asked."""
        waited, self._waited = self._waited, 0.0
        return waited
