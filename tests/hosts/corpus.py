"""Documents whose tokens say where they stand: every token of the corpus has an id of its own."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megapack.storage import IndexedDatasetBuilder

BUCKETS = (32, 64, 128)


@dataclass(frozen=True)
class Corpus:
    """Two sources, ``web`` and ``code``, and a manifest of each kind."""

    folder: Path
    begins: NDArray[np.int64]
    """First token id of every document, and the end. Id 0 is padding."""

    @property
    def vocabulary(self) -> int:
        return int(self.begins[-1])

    def path(self, name: str) -> str:
        return str(self.folder / name)


def write_corpus(folder: Path) -> Corpus:
    """Documents of 2 to 300 tokens: shorter than a bucket, and longer than a row."""
    rng = np.random.default_rng(5)
    first, begins = 1, []
    for name, count in (("web", 150), ("code", 60)):
        lengths = np.clip(rng.lognormal(3.4, 0.9, count).astype(int), 2, 300)
        with IndexedDatasetBuilder(folder / name, np.int32, overwrite=True) as builder:
            for length in lengths:
                builder.add_document(np.arange(first, first + length))
                begins.append(first)
                first += int(length)
    packing = {"buckets": BUCKETS, "rows_per_block": 12}
    for name, sources in (
        ("web.json", [{"prefix": "web"}]),
        ("mix.json", [{"prefix": "web", "weight": 0.7}, {"prefix": "code", "weight": 0.3}]),
    ):
        (folder / name).write_text(json.dumps({"sources": sources, **packing}))
    return Corpus(folder, np.array([*begins, first]))
