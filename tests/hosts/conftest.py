"""The matrix of what was run, below the tests' own summary."""

from __future__ import annotations

from typing import Any

from tests.hosts.matrix import MATRIX


def pytest_terminal_summary(terminalreporter: Any) -> None:
    for host, cells in MATRIX.items():
        releases = list(dict.fromkeys(release for release, _ in cells))
        layouts = list(dict.fromkeys(layout for _, layout in cells))
        terminalreporter.section(f"{host}: checked calls of the model, segments, violations")
        for row in [
            ["layout", *releases],
            ["---"] * (1 + len(releases)),
            *([layout, *(cells.get((r, layout), "-") for r in releases)] for layout in layouts),
        ]:
            terminalreporter.write_line(f"| {' | '.join(row)} |")
