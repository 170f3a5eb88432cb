"""Which rank is slow, and what else slows a run: found at every log line, said when it begins.

Steps end together on all ranks, so their times say nothing. The forward has no collective in it
(but under ZeRO-3, which gathers parameters there), and a rank waits for its own batches: these two
are compared.
"""

from __future__ import annotations

import logging
from statistics import median_low
from typing import Any

from megapack.training.run.world import World

__all__ = ["RankTimes", "Slowdowns"]

logger = logging.getLogger("megapack")

MAX_FORWARD = 1.2  # slowest rank over the median
MAX_DATA_WAIT = 0.05  # of the time, on any rank
MAX_IMBALANCE = 1.3
MAX_PADDING = 0.1


class RankTimes:
    """Forward and data wait of all ranks since it was last asked."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._hosts = world.gather(world.host)

    def gather(self, forward: float, waited: float) -> dict[str, Any]:
        """Collective.

        Args:
            forward: seconds that this rank computed forwards.
            waited: seconds that it waited for batches.

        Returns:
            For a log line: ``rank_forward`` and ``rank_data_wait``, each with the ``median`` and
            the ``most`` over the ranks (seconds) and the ``rank`` and ``host`` that took most.
        """
        times = self.world.gather((forward, waited))
        names = ("rank_forward", "rank_data_wait")
        return {name: self._of([t[i] for t in times]) for i, name in enumerate(names)}

    def _of(self, seconds: list[float]) -> dict[str, Any]:
        most = max(seconds)
        rank = seconds.index(most)
        return {
            "median": median_low(seconds),
            "most": most,
            "rank": rank,
            "host": self._hosts[rank],
        }


class Slowdowns:
    """Says once when something begins to slow the run, and once when it no longer does."""

    def __init__(self) -> None:
        self._passed: set[str] = set()

    def look(self, lines: list[dict[str, Any]]) -> None:
        """At lines of the log, the last of which has what ``RankTimes`` found."""
        seconds = sum(line["seconds"] for line in lines)
        forward, wait = lines[-1]["rank_forward"], lines[-1]["rank_data_wait"]
        slow = forward["most"] / forward["median"] if forward["median"] else 1.0
        self._say(
            "slow rank",
            slow > MAX_FORWARD,
            f"rank {forward['rank']} on {forward['host']} computes {slow:.2f} times as long as "
            f"the median (limit {MAX_FORWARD:g}), and all wait for it; look at its clocks and "
            "neighbours",
        )
        share = wait["most"] / seconds
        self._say(
            "data wait",
            share > MAX_DATA_WAIT,
            f"rank {wait['rank']} on {wait['host']} waits for batches {share:.0%} of the time "
            f"(limit {MAX_DATA_WAIT:.0%}); look at its storage and at what else its cores do",
        )
        imbalance = sum(line["imbalance"] for line in lines) / len(lines)
        self._say(
            "imbalance",
            imbalance > MAX_IMBALANCE,
            f"the busiest rank has {imbalance:.2f} times the attention work of the mean (limit "
            f"{MAX_IMBALANCE:g}); data.cost_window=16 brings samples of like cost together",
        )
        tokens = sum(line["tokens"] for line in lines)
        padding = 1 - sum(line["useful_tokens"] for line in lines) / tokens
        self._say(
            "padding",
            padding > MAX_PADDING,
            f"{padding:.0%} of the tokens are padding (limit {MAX_PADDING:.0%}); "
            "megapack-build compare finds a packing with less",
        )

    def _say(self, what: str, passes: bool, sentence: str) -> None:
        if passes and what not in self._passed:
            logger.warning("%s: %s", what, sentence)
            self._passed.add(what)
        elif not passes and what in self._passed:
            logger.info("%s: within its limit again", what)
            self._passed.remove(what)
