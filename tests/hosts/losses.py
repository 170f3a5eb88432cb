"""The loss that a host logs is the mean over all label tokens of the global batch."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

VALIDATION = re.compile(r" validation\S* loss at .*lm loss value: (\S+)")
ITERATION = re.compile(
    r"iteration\s+(\d+)/.*consumed samples:\s+(\d+).*lm loss: (\S+) .*grad norm: (\S+) "
)


def iterations(log: str) -> list[tuple[int, float, float]]:
    """Return for every iteration: rows consumed until its end, loss, norm of the gradient."""
    found = [match.groups() for match in map(ITERATION.search, log.splitlines()) if match]
    return [(int(rows), float(loss), float(norm)) for _, rows, loss, norm in found]


def wrong_losses(log: str, ranks: list[dict[str, Any]], first_row: int, row: int) -> Iterator[str]:
    """Compare the log with the losses that the model gave for every token.

    Args:
        ranks: records of the whole run; those of the last pipeline stage have losses.
        first_row: number of rows consumed before the run began.
        row: tokens of a row.
    """
    first = [rank for rank in ranks if rank["where"]["tensor"] == 0]
    computing = [_losses(rank) for rank in first if any("losses" in call for call in rank["calls"])]
    if not computing:
        yield "no rank has computed a loss"
        return
    consumed, before = first_row, 0.0
    for number, (rows, logged, _) in enumerate(iterations(log), start=1):
        total, count, taken = 0.0, 0.0, 0
        while taken < (rows - consumed) * row:
            for calls in computing:
                loss, labels, tokens = next(calls, (0.0, 0.0, rows * row))
                total, count, taken = total + loss, count + labels, taken + tokens
        mean = total / count
        # Megatron's second line of a run is the mean of two steps: the first clears no sum.
        expected = {mean, (before + mean) / 2} if number == 2 else {mean}
        if taken != (rows - consumed) * row or not any(
            abs(value - logged) <= 2e-6 * logged for value in expected
        ):
            yield f"iteration {number}: loss {logged}, mean over {count} labels {mean}"
        consumed, before = rows, mean


def _losses(rank: dict[str, Any]) -> Iterator[tuple[float, float, int]]:
    """Return for every training call: sum of losses, number of labels, number of tokens."""
    for call in rank["calls"]:
        if call["training"]:
            mask = call["loss_mask"].flatten().double()
            yield float((call["losses"] * mask).sum()), float(mask.sum()), mask.numel()
