"""Updates that were skipped because the gradient was not finite: counted, said, limited."""

from __future__ import annotations

import logging

__all__ = ["SkippedUpdates"]

logger = logging.getLogger("megapack")


class SkippedUpdates:
    """The same on all ranks, since all skip together.

    Args:
        limit: how many in a row are borne.
    """

    def __init__(self, limit: int) -> None:
        self.limit, self.in_a_row, self.total = limit, 0, 0

    def note(self, step: int, skipped: bool) -> str | None:
        """Count one step.

        Returns:
            Why the run must end, if it must.
        """
        self.in_a_row = self.in_a_row + 1 if skipped else 0
        self.total += skipped
        if skipped:
            logger.info(
                "the update of step %d is skipped: its gradient is not finite (%d in a row, %d "
                "since the start)",
                step,
                self.in_a_row,
                self.total,
            )
        if self.in_a_row <= self.limit:
            return None
        return (
            f"{self.in_a_row} updates in a row were skipped, optimizer.max_skipped allows "
            f"{self.limit}; the weights are those of before step {step + 1 - self.in_a_row}. "
            "Continue from the last checkpoint with a lower optimizer.lr, or look at these "
            "steps' samples (logging.batches)"
        )
