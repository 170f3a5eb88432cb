"""Writes the golden files with megatron-core (not with megapack): run it where 0.16.1 is installed.

    python tests/golden/mmididx/make_golden.py

The files are committed; a change of them is a change of the format.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

HERE = Path(__file__).parent
# Documents of sequences: one sequence, several, none, an empty one.
CORPUS = [[[1, 2, 3]], [[40_000], [5, 6]], [], [[]], [[7, 8, 9, 10], [11]]]
MODES = [[0], [1, 2], [], [3], [-1, 0]]
NAMES = {"uint16": np.uint16, "int32": np.int32, "multimodal": np.int32}


def main() -> None:
    for name, dtype in NAMES.items():
        multimodal = name == "multimodal"
        builder = IndexedDatasetBuilder(f"{HERE}/{name}.bin", dtype, multimodal=multimodal)
        for document, modes in zip(CORPUS, MODES, strict=True):
            tokens = [token for sequence in document for token in sequence]
            lengths = [len(sequence) for sequence in document]
            builder.add_document(tokens, lengths, modes if multimodal else None)
        builder.finalize(f"{HERE}/{name}.idx")


if __name__ == "__main__":
    main()
