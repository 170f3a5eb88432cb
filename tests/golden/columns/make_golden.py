"""Writes the golden files of a dataset with columns; a change of them is a change of the format.

python tests/golden/columns/make_golden.py
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from megapack.storage import IndexedDatasetBuilder
from megapack.storage.columns import ColumnSpec

COLUMNS = {
    "advantages": ColumnSpec(dtype="float32", of="target"),
    "experts": ColumnSpec(dtype="uint8", shape=(2,), fill=255),
    "logits": ColumnSpec(dtype="bfloat16", shape=(1, 2), fill=-0.5, of="target"),
}
DOCUMENTS = [
    ([7, 8, 0], [0, 0.5, -1.25], [[0, 1], [2, 3], [4, 5]], [[[1, 2]], [[0.1, -3]], [[1e30, 0]]]),
    ([], [], [], []),
    ([9, 0], [2, 3], [[6, 7], [8, 254]], [[[4, 5]], [[6, 7]]]),
]


def write(prefix: Path) -> None:
    with IndexedDatasetBuilder(prefix, np.uint16, vocab_size=10, columns=COLUMNS) as builder:
        for tokens, *rows in DOCUMENTS:
            builder.add_document(tokens, columns=dict(zip(COLUMNS, rows, strict=True)))


if __name__ == "__main__":
    write(Path(sys.argv[1] if sys.argv[1:] else Path(__file__).parent / "data"))
