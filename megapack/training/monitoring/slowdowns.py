"""Causes of a slow run, from lines of its log: a slow rank, data wait, imbalance, padding.

``slowdowns`` computes the figures; ``Slowdowns`` logs each problem once. Needs no torch, because
``megapack-build report`` uses it, too.

    slowdowns(lines)[0]  # in the last line rank_forward is 1.1 s in the median, 1.65 s on rank 3
    # -> Slowdown("slow rank", 1.5, 1.2, "rank 3 on node1 computes 1.50 times as long as ...")
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

MAX_FORWARD = 1.2  # forward time of the slowest rank over the median
MAX_DATA_WAIT = 0.05  # share of the time that a rank waits for batches
MAX_IMBALANCE = 1.3
MAX_PADDING = 0.1
logger = logging.getLogger("megapack")


class Slowdown(NamedTuple):
    """Figure computed from some steps, with its limit."""

    what: str
    value: float
    limit: float
    sentence: str  # message for a value above the limit, with a remedy

    @property
    def passes(self) -> bool:
        return self.value > self.limit


def slowdowns(lines: Sequence[Mapping[str, Any]]) -> list[Slowdown]:
    """Return four figures; the last line must have ``rank_forward`` and ``rank_data_wait``."""
    # Steps end together on all ranks, so step times do not show a slow rank. The forward contains
    # no collective (except under ZeRO-3), and each rank waits for its own batches: compare these.
    forward, wait = lines[-1]["rank_forward"], lines[-1]["rank_data_wait"]
    slow = forward["most"] / forward["median"] if forward["median"] else 1.0
    share = wait["most"] / sum(line["seconds"] for line in lines)
    imbalance = sum(line["imbalance"] for line in lines) / len(lines)
    tokens, useful = (sum(x[name] for x in lines) for name in ("tokens", "useful_tokens"))
    padding = 1 - useful / tokens
    return [
        Slowdown(
            "slow rank",
            slow,
            MAX_FORWARD,
            f"rank {forward['rank']} on {forward['host']} computes {slow:.2f} times as long as "
            f"the median (limit {MAX_FORWARD:g}), and all ranks wait for it; look at its clocks "
            "and the other jobs on its host",
        ),
        Slowdown(
            "data wait",
            share,
            MAX_DATA_WAIT,
            f"rank {wait['rank']} on {wait['host']} waits for batches {share:.0%} of the time "
            f"(limit {MAX_DATA_WAIT:.0%}); look at its storage and at what else its cores do",
        ),
        Slowdown(
            "imbalance",
            imbalance,
            MAX_IMBALANCE,
            f"the busiest rank has {imbalance:.2f} times the attention work of the mean (limit "
            f"{MAX_IMBALANCE:g}); data.cost_window=16 brings samples of like cost together",
        ),
        Slowdown(
            "padding",
            padding,
            MAX_PADDING,
            f"{padding:.0%} of the tokens are padding (limit {MAX_PADDING:.0%}); "
            "megapack-build compare finds a packing with less",
        ),
    ]


class Slowdowns:
    """Logs once when a figure exceeds its limit, and once when it no longer does."""

    def __init__(self) -> None:
        self._passed: set[str] = set()

    def look(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Check lines of the log (see ``slowdowns``)."""
        for slowdown in slowdowns(lines):
            if slowdown.passes and slowdown.what not in self._passed:
                logger.warning("%s: %s", slowdown.what, slowdown.sentence)
                self._passed.add(slowdown.what)
            elif not slowdown.passes and slowdown.what in self._passed:
                logger.info("%s: within its limit again", slowdown.what)
                self._passed.remove(slowdown.what)
