"""What verify says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Finding"]


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
