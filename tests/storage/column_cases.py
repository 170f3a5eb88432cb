"""Datasets with a float column of targets and an integer column of shape (2, 3)."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from megapack.storage import IndexedDataset, IndexedDatasetBuilder
from megapack.storage.columns import ColumnSpec
from storage.strategies import errors

REWARDS = ColumnSpec(dtype="float32", of="target")
EXPERTS = ColumnSpec(dtype="uint8", shape=(2, 3), fill=255)
BOTH = {"rewards": REWARDS, "experts": EXPERTS}


def rows_of(spec: ColumnSpec, lengths: list[int], seed: int = 0) -> list[np.ndarray]:
    """Return random rows of each document."""
    random = np.random.default_rng(seed)
    sizes = [(length, *spec.shape) for length in lengths]
    return [random.integers(0, 200, size).astype(spec.numpy_dtype) for size in sizes]


def build(prefix: Path, lengths: list[int], seed: int = 0, specs: dict = BOTH) -> None:
    values = {name: rows_of(spec, lengths, seed) for name, spec in specs.items()}
    with IndexedDatasetBuilder(prefix, np.uint16, columns=specs, overwrite=True) as builder:
        for i, length in enumerate(lengths):
            rows = {name: value[i] for name, value in values.items()}
            builder.add_document(np.arange(length), columns=rows)


def contents(prefix: Path) -> dict[str, bytes] | None:
    """Return tokens and columns of a dataset; None without one. It must be valid."""
    if not IndexedDataset.exists(prefix):
        return None
    assert not errors(prefix)
    dataset = IndexedDataset(prefix)
    found = {"tokens": dataset.tokens.tobytes(), "lengths": dataset.document_lengths.tobytes()}
    return found | {name: column.rows.tobytes() for name, column in dataset.columns.items()}
