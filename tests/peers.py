"""Packages that a test compares with and that `make test-data` leaves out: torch, Megatron, ...

Everywhere else a peer that is missing is an error: a comparison must not vanish in silence.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import warnings
from types import ModuleType

import pytest

__all__ = ["DATA_ONLY", "peer"]

DATA_ONLY = os.environ.get("MEGAPACK_TEST_DATA_ONLY") == "1"


def peer(name: str) -> ModuleType:
    """The module; skips the test, or the file at whose top it stands, where it is left out."""
    package = name.partition(".")[0]
    if DATA_ONLY and importlib.util.find_spec(package) is None:
        pytest.skip(f"compares with {package}", allow_module_level=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(name)
