"""The matrix of what was run, below the tests' own summary."""

from __future__ import annotations

from typing import Any

from tests.hosts.matrix import MATRIX


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if not MATRIX:
        return
    releases = list(dict.fromkeys(release for release, _ in MATRIX))
    layouts = list(dict.fromkeys(layout for _, layout in MATRIX))
    terminalreporter.section("checked calls of GPTModel, segments, violations")
    for row in [
        ["layout", *releases],
        ["---"] * (1 + len(releases)),
        *([layout, *(MATRIX.get((r, layout), "-") for r in releases)] for layout in layouts),
    ]:
        terminalreporter.write_line(f"| {' | '.join(row)} |")
