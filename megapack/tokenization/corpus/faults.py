"""Documents that may not pass: named, counted, shown by place, and stopped at or skipped."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from megapack.errors import DataError

__all__ = ["Faults", "OnError", "Place", "fault_lines", "json_kind", "lacks_documents"]

OnError = Literal["fail", "skip"]

# What never stops a build: ordinary text has it, and nobody can do anything about it. Everything
# else stops it unless `--on-error skip` was given.
_BENIGN = frozenset(
    {"blank line", "chat without assistant", "empty document", "too few words", "too many words"}
)

_COUNT_BLOCK = 1 << 24


@dataclass(frozen=True, slots=True)
class Place:
    """Where a document comes from; prints as ``path:line`` (files), ``path row N`` (parquet)."""

    path: str
    unit: Literal["byte", "line", "row", "file"]
    position: int = 0

    def __str__(self) -> str:
        if self.unit == "file":
            return self.path
        if self.unit == "row":
            return f"{self.path} row {self.position}"
        line = self.position if self.unit == "line" else self._count_lines()
        return f"{self.path}:{line}"

    def _count_lines(self) -> int:
        # Readers enter large files in the middle and do not know the line number; it is needed
        # only for the few places that are shown.
        newlines = 0
        with Path(self.path).open("rb") as file:
            left = self.position
            while left > 0:
                block = file.read(min(left, _COUNT_BLOCK))
                if not block:
                    break
                newlines += block.count(b"\n")
                left -= len(block)
        return newlines + 1


@dataclass
class Faults:
    """Counts by kind, and the first few places of each kind in the order of the corpus."""

    on_error: OnError = "fail"
    max_places: int = 3
    counts: dict[str, int] = field(default_factory=dict)
    places: dict[str, list[Place]] = field(default_factory=dict)

    def record(self, kind: str, place: Place, detail: str = "") -> None:
        """Count one document. Raises DataError unless the kind is benign or skipping is asked for.

        Args:
            kind: what is wrong, in a few words ("malformed JSON"); counts are kept per kind.
            place: the document.
            detail: what exactly is wrong; shown only when the build stops here.
        """
        if kind not in _BENIGN and self.on_error == "fail":
            reason = f" ({detail})" if detail else ""
            raise DataError(
                f"{place}: {kind}{reason}; mend the input, or drop such documents with "
                "--on-error skip (they are counted and reported)"
            )
        self._add(kind, 1, [place])

    def record_rows(
        self,
        kind: str,
        rows: NDArray[np.intp],
        place: Callable[[int], Place],
        detail: Callable[[int], str] | None = None,
    ) -> None:
        """Count many documents of one kind. Raises as ``record``.

        Args:
            rows: of the documents.
            place, detail: of a row, as ``record`` takes them; asked of the few that are shown.
        """
        if len(rows):
            first = int(rows[0])
            stops = kind not in _BENIGN and self.on_error == "fail"
            self.record(kind, place(first), detail(first) if detail and stops else "")
            shown = rows[1 : self.max_places]
            self._add(kind, len(rows) - 1, [place(int(row)) for row in shown])

    def add(self, later: Faults) -> None:
        """Take over what was recorded later in the corpus."""
        for kind, count in later.counts.items():
            self._add(kind, count, later.places.get(kind, []))

    def _add(self, kind: str, count: int, places: Sequence[Place]) -> None:
        self.counts[kind] = self.counts.get(kind, 0) + count
        mine = self.places.setdefault(kind, [])
        mine += places[: self.max_places - len(mine)]


def lacks_documents(kinds: Iterable[str]) -> bool:
    """Whether some were left out that only ``--on-error skip`` leaves out."""
    return not _BENIGN.issuperset(kinds)


def json_kind(value: object) -> str:
    """What JSON calls a value that Python's json has read."""
    names = {type(None): "null", bool: "true or false", str: "a string", list: "a list"}
    return {**names, dict: "an object"}.get(type(value), "a number")


def fault_lines(counts: Mapping[str, int], places: Mapping[str, Sequence[object]]) -> list[str]:
    """One printable line per kind of fault, most frequent first."""
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return [
        f"{count:,} x {kind} (first: {', '.join(map(str, places.get(kind, ())))})"
        for kind, count in ordered
    ]
