"""What a step holds and how much arithmetic it is, from the index alone."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megapack.data import Schedule, Step
from megapack.data.window import cut_lengths
from megapack.training.model.flops import ModelFlops

__all__ = ["StepWork", "sample_digest", "segment_lengths"]


@dataclass(frozen=True, kw_only=True)
class StepWork:
    """What a step holds, from the index alone."""

    tokens: int
    """Padding included."""
    useful_tokens: int
    """Tokens of documents that are not masked."""
    flops: float
    """Of the model: every token of a document, attention inside segments and the window."""
    naive_flops: float
    """Had every sample been one document of its capacity: the figure that flatters packing."""

    @staticmethod
    def of(schedule: Schedule, step: Step, flops: ModelFlops) -> StepWork:
        """Count one step."""
        lengths = segment_lengths(schedule, step)
        samples = [np.full(len(d.sample_ids), d.capacity, np.int64) for d in step.draws]
        capacities = np.concatenate(samples)
        tokens = schedule.stage_at(step.index).config.tokens_per_step
        useful = int(lengths.sum())
        return StepWork(
            tokens=tokens,
            useful_tokens=useful,
            flops=flops.step(useful, lengths),
            naive_flops=flops.step(tokens, capacities),
        )


def segment_lengths(schedule: Schedule, step: Step) -> NDArray[np.int64]:
    """Lengths of all segments of a step, tokens, in any order, cut by its window; none masked."""
    lengths = schedule.samples.segment_lengths(step.sample_ids, step.num_lists)
    window = schedule.settings_at(step.index).window_at(step.index)
    return cut_lengths(lengths, window)


def sample_digest(content: Step) -> str:
    """Eight hexadecimal digits that change when the samples of a step do."""
    return f"{zlib.crc32(np.ascontiguousarray(content.sample_ids, np.int64).tobytes()):08x}"
