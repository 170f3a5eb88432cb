"""megapack: documents to training batches.

``IndexedDataset`` and ``IndexedDatasetBuilder`` read and write documents (Megatron's .bin/.idx),
``pack`` turns document lengths into a ``SampleIndex``, and ``PackedDataset`` with
``BucketBatchSampler`` turns both into batches; ``plan_step`` assigns documents to the ranks of any
trainer. Names and the compiled core are imported on first use, so ``import megapack`` is fast and
needs no torch, and ``megapack.probe`` needs nothing but torch.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

# public name -> module
_HOME = {
    "BucketBatchSampler": "megapack.data",
    "IndexedDataset": "megapack.storage",
    "IndexedDatasetBuilder": "megapack.storage",
    "PackedDataset": "megapack.data",
    "SampleIndex": "megapack.packing",
    "Schedule": "megapack.data",
    "build_loader": "megapack.data",
    "pack": "megapack.packing",
    "plan_step": "megapack.planning",
}

__all__ = [
    "BucketBatchSampler",
    "IndexedDataset",
    "IndexedDatasetBuilder",
    "PackedDataset",
    "SampleIndex",
    "Schedule",
    "__version__",
    "build_loader",
    "pack",
    "plan_step",
]


def __getattr__(name: str) -> Any:
    if name == "_core":
        try:
            return importlib.import_module("megapack._core")
        except ImportError as error:
            raise ImportError(
                f"megapack's C++ extension could not be imported ({error}). Build it with "
                "`pip install .` (or `pip install -e .` in a checkout; a C++17 compiler is needed)."
            ) from error
    if name not in _HOME:
        raise AttributeError(f"module 'megapack' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
