"""Packages that tests compare with: torch, Megatron, ...

Only `make test-data` may skip a missing one; anywhere else it is an error, so that no comparison is
skipped silently.
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
    """Import a package; under `make test-data` skip the test, or the file, if it is missing."""
    package = name.partition(".")[0]
    if DATA_ONLY and importlib.util.find_spec(package) is None:
        pytest.skip(f"compares with {package}", allow_module_level=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(name)
