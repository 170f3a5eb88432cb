"""What is carried out: a worker that builds shards one by one, and counts what it does."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol, TypeVar

__all__ = ["Counted", "Report", "Worker"]

R_co = TypeVar("R_co", covariant=True)


class Counted(NamedTuple):
    """Work that was done."""

    documents: int = 0
    text_bytes: int = 0
    tokens: int = 0

    def plus(self, more: Counted) -> Counted:
        return Counted(*(a + b for a, b in zip(self, more, strict=True)))


Report = Callable[[Counted], None]  # is told what was done since it was last called


class Worker(Protocol[R_co]):
    """Can be pickled; a process or task has one, and builds many shards with it."""

    @property
    def threads(self) -> int:
        """That one shard is worked at with."""

    def build(self, index: int, report: Report) -> R_co:
        """Build a shard, or find it finished; its record."""
