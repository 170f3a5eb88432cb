"""Compile and load a host's C++ helpers, which only the host's own datasets need."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

MODULE = "megatron.core.datasets.helpers_cpp"


def compile_helpers(tree: Path, folder: Path) -> Path:
    """Compile the helpers into ``folder``; return the path. Raises CalledProcessError."""
    including = subprocess.run(
        [sys.executable, "-m", "pybind11", "--includes"], check=True, capture_output=True, text=True
    )
    source = tree / "megatron" / "core" / "datasets" / "helpers.cpp"
    done = folder / "helpers_cpp.so"
    options = ["-O1", "-shared", "-std=c++17", "-fPIC", *including.stdout.split()]
    subprocess.run(["c++", *options, str(source), "-o", str(done)], check=True)
    return done


def load_helpers(path: str) -> None:
    """Load the compiled helpers under the name by which the host imports them."""
    spec = importlib.util.spec_from_file_location(MODULE, path)
    assert spec is not None and spec.loader is not None
    sys.modules[MODULE] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[MODULE])
