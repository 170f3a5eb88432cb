"""pytest plugin under which a host's own data tests run on the CPU, with our parts or without.

``SWAPPED``: ``stock``, ``storage`` (``rebind_storage()``) or ``datasets`` (``install()`` as well).
``HELPERS``: the host's C++ helpers, compiled outside of its tree.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

from cpu import on_cpu
from helpers import load_helpers

on_cpu()


def pytest_configure() -> None:
    """Before any test of the host is imported."""
    load_helpers(os.environ["HELPERS"])
    importlib.import_module("megatron.core.datasets.utils").compile_helpers = _nothing
    if os.environ["SWAPPED"] != "stock":
        importlib.import_module("megapack.integrations.hosts.megatron").rebind_storage()
    if os.environ["SWAPPED"] == "datasets":
        importlib.import_module("megapack.integrations.hosts.megatron").install()
    # Their conftest would download what these tests do not read.
    assets = importlib.import_module("tests.test_utils.python_scripts.download_unit_tests_dataset")
    assets.download_and_extract_asset = _nothing


def _nothing(*args: Any, **kwargs: Any) -> None: ...
