"""Documents in which every token of the corpus has a different id.

So batches alone show whether labels, masks, positions and boundaries are right.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megapack.storage import IndexedDataset, IndexedDatasetBuilder

BUCKETS = (32, 64, 128)
ROW = max(BUCKETS)
STEP_ROWS = 12  # of every run
LAYERS = 2  # of every model
WINDOW = 24  # of attention, tokens, in the first two steps of program.json
NUM_WEB = 150
NUM_FEW = 3
MASKED = range(0, NUM_WEB, 2)  # documents of web that are excluded from its third step on


@dataclass(frozen=True)
class Corpus:
    """Two sources, ``web`` and ``code``, and manifests: one source, a blend, a program; also
    ``few``, the first documents of ``code``."""

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
    for name, count in (("web", NUM_WEB), ("code", 60)):
        lengths = np.clip(rng.lognormal(3.4, 0.9, count).astype(int), 2, 300)
        with IndexedDatasetBuilder(folder / name, np.int32, overwrite=True) as builder:
            for length in lengths:
                builder.add_document(np.arange(first, first + length))
                begins.append(first)
                first += int(length)
    with IndexedDatasetBuilder(folder / "few", np.int32, overwrite=True) as builder:
        for begin, end in pairwise(begins[NUM_WEB : NUM_WEB + NUM_FEW + 1]):
            builder.add_document(np.arange(begin, end))
    np.save(folder / "masked.npy", np.array(MASKED))
    packing = {"buckets": BUCKETS, "rows_per_block": STEP_ROWS}
    blend = [
        {"name": name, "prefix": name, "weight": weight}
        for name, weight in (("web", 0.7), ("code", 0.3))
    ]
    stages = [
        {"from_step": 1, "weights": {"web": 0.2, "code": 0.8}},
        {"from_step": 2, "attention_window": 0, "exclude": {"web": "masked.npy"}},
    ]
    for name, manifest in (
        ("web.json", {"sources": [{"prefix": "web"}]}),
        ("mix.json", {"sources": blend}),
        ("program.json", {"sources": blend, "attention_window": WINDOW, "stages": stages}),
    ):
        (folder / name).write_text(json.dumps({**manifest, **packing}))
    return Corpus(folder, np.array([*begins, first]))


def write_short(corpus: Corpus, longest: int) -> list[NDArray[np.int32]]:
    """Documents of web that no row cuts, as ``short`` with its manifest ``short.json``; theirs."""
    web = IndexedDataset(corpus.path("web"))
    texts = [web[i] for i in range(NUM_WEB) if 1 < len(web[i]) <= longest][:40]
    with IndexedDatasetBuilder(corpus.path("short"), np.int32, overwrite=True) as builder:
        for text in texts:
            builder.add_document(text)
    manifest = {"sources": [{"prefix": "short"}], "buckets": BUCKETS}
    Path(corpus.path("short.json")).write_text(json.dumps(manifest))
    return texts
