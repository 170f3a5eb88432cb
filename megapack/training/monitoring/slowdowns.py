"""Which rank, and what else, slows a run: found in lines of its log, said once.

``slowdowns`` looks at lines; ``Slowdowns`` remembers what was said already. Needs no torch: the
page of a run (``megapack-build report``) asks, too.

    slowdowns(lines)[0]  # the last of which has rank_forward 1.1 s in the median, 1.65 s of rank 3
    # -> Slowdown("slow rank", 1.5, 1.2, "rank 3 on node1 computes 1.50 times as long as ...")
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

MAX_FORWARD = 1.2  # slowest rank over the median
MAX_DATA_WAIT = 0.05  # of the time, on any rank
MAX_IMBALANCE = 1.3
MAX_PADDING = 0.1
logger = logging.getLogger("megapack")


class Slowdown(NamedTuple):
    """One figure of some steps that has a limit."""

    what: str
    value: float
    limit: float
    sentence: str
    """With the limit and a remedy, for when the value passes it."""

    @property
    def passes(self) -> bool:
        return self.value > self.limit


def slowdowns(lines: Sequence[Mapping[str, Any]]) -> list[Slowdown]:
    """All four figures of lines of the log, the last of which has ``rank_forward`` and
    ``rank_data_wait``.

    Steps end together on all ranks, so their times say nothing. The forward has no collective in it
    (but under ZeRO-3, which gathers parameters there), and a rank waits for its own batches: these
    two are compared.
    """
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
            f"the median (limit {MAX_FORWARD:g}), and all wait for it; look at its clocks and "
            "neighbours",
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
    """Says once when something begins to slow the run, and once when it no longer does."""

    def __init__(self) -> None:
        self._passed: set[str] = set()

    def look(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """At lines of the log, as ``slowdowns``."""
        for found in slowdowns(lines):
            if found.passes and found.what not in self._passed:
                logger.warning("%s: %s", found.what, found.sentence)
                self._passed.add(found.what)
            elif not found.passes and found.what in self._passed:
                logger.info("%s: within its limit again", found.what)
                self._passed.remove(found.what)
