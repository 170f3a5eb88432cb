"""What was found in the runs of every host, for the summary below the tests."""

from __future__ import annotations

from tests.hosts.check import Findings

MATRIX: dict[str, dict[tuple[str, str], str]] = {}
"""Host -> (release, layout) -> calls, segments, violations."""


def note(host: str, release: str, layout: str, found: Findings) -> None:
    cell = f"{found.calls:,} / {found.segments:,} / {len(found.problems)}"
    MATRIX.setdefault(host, {})[release, layout] = cell
