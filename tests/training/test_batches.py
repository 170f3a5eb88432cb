"""What the trainer asks of the loader, and when."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megapack.training.trainer import TimedBatches


def test_the_next_steps_batch_is_not_waited_for_before_this_steps_update() -> None:
    """A slow loader would delay every update, and waits and imbalance would be a step late."""
    asked = []

    def loader() -> Iterator[Any]:
        for step in range(3):
            for micro_step in range(2):
                asked.append((step, micro_step))
                about = {"step": step, "micro_step": micro_step, "num_micro_steps": 2}
                yield {**about, "imbalance": 1.0 + step}

    batches = TimedBatches(loader())  # type: ignore[arg-type]
    seen = []
    for step, micro_batches in batches.steps():
        seen += [(step, batch["micro_step"]) for batch in micro_batches]
        assert asked == seen, "asked for more than the step has"
        assert batches.imbalance == 1.0 + step
    assert seen == [(step, micro_step) for step in range(3) for micro_step in range(2)]
