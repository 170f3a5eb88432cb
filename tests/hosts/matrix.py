"""(release, layout) -> what was found, for the summary below the tests."""

from __future__ import annotations

MATRIX: dict[tuple[str, str], str] = {}
