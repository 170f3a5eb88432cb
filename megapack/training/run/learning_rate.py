"""Learning rates as a pure function of the step, so that a run resumes with one integer."""

from __future__ import annotations

import math

from megapack.training.config import LearningRateConfig

__all__ = ["learning_rate", "num_warmup_steps"]


def learning_rate(step: int, *, num_steps: int, peak: float, schedule: LearningRateConfig) -> float:
    """The learning rate of optimizer step ``step`` (the first one is 0) of ``num_steps``.

    Warmup rises linearly and reaches ``peak`` at its last step, so step 0 already learns. After it:
    ``constant``; ``linear`` and ``cosine`` fall from ``peak`` to ``min_ratio * peak`` at the last
    step; ``wsd`` (warmup, stable, decay) stays at ``peak`` and falls linearly over the last
    ``decay_fraction`` of all steps.
    """
    if not 0 <= step < num_steps:
        raise ValueError(f"step {step} is outside of the run's {num_steps} steps")
    warmup = num_warmup_steps(num_steps, schedule)
    if step < warmup:
        return peak * (step + 1) / warmup
    lowest = schedule.min_ratio * peak
    if schedule.kind == "constant":
        return peak
    if schedule.kind == "wsd":
        length = max(1, round(schedule.decay_fraction * num_steps))
        first = max(warmup, num_steps - length)
        if step < first:
            return peak
        return peak + (lowest - peak) * (step - first + 1) / (num_steps - first)
    # The peak was reached at the last step of the warmup; the lowest is reached at the last step.
    progress = (step - warmup + 1) / max(1, num_steps - warmup)
    if schedule.kind == "linear":
        return peak + (lowest - peak) * progress
    return lowest + (peak - lowest) * 0.5 * (1 + math.cos(math.pi * progress))


def num_warmup_steps(num_steps: int, schedule: LearningRateConfig) -> int:
    """Steps of warmup: given, or a fraction of the run; never more than the run has."""
    if schedule.warmup_steps is not None:
        return min(schedule.warmup_steps, num_steps)
    return min(round(schedule.warmup_fraction * num_steps), num_steps)
