"""Plugin of pytest, installed with megapack: the fixture ``no_leaks``.

def test_packing(no_leaks):
    no_leaks(model, batch)        # fails with the report if documents depend on each other
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from megapack.probe.report import Report


@pytest.fixture
def no_leaks() -> Callable[..., Report]:
    """Return ``probe``, but raise LeakError if documents depend on each other."""

    def check(target: Any, batch: Any, **options: Any) -> Report:
        from megapack.probe import probe  # noqa: PLC0415  # torch: only for tests that ask

        report = probe(target, batch, **options)
        report.raise_if_leaking()
        return report

    return check
