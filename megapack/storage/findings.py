"""What verify says."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

__all__ = ["Finding", "has_errors"]


@dataclass(frozen=True)
class Finding:
    """Something to know about a dataset.

    ``error``: it cannot be read or trusted; ``warning``: it can, but somebody should look;
    ``note``: nothing is wrong.
    """

    severity: Literal["error", "warning", "note"]
    code: str  # stable, for scripts
    message: str
    remedy: str = ""


def has_errors(findings: Iterable[Finding]) -> bool:
    return any(finding.severity == "error" for finding in findings)
