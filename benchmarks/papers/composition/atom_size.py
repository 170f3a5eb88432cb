"""Atom-size paper (Optimizing Packing and Shuffling Strategies): what lengths alone decide."""

from __future__ import annotations

from functools import partial

import numpy as np
from papers.composition.rows import Row, compared

from megapack.packing import pack

NUM_DOCUMENTS = 803_000  # A.1: 1.81M rows less 55.62 %
NUM_TOKENS = 114_400_095  # A.5: per epoch
STEPS = {  # Table 3; MSL: batch, steps of concat, steps of padding
    32: (256, 28_120, 31_816),
    64: (256, 14_058, 17_308),
    128: (128, 14_056, 20_496),
}


def table_3_steps() -> list[Row]:
    """Table 3: training steps of two epochs, concat and padding, atom size = MSL.

    Padding there cuts a document in pieces of MSL - 1 tokens and ends each with EOS: a document of
    n tokens becomes one of n + ceil(n / (MSL - 1)), cut at MSL. The paper prints the number and the
    mean of the lengths; their shape here is a gamma law (shape 2) from 40 on.
    """
    generator = np.random.default_rng(0)
    lengths = 40 + generator.gamma(2.0, (NUM_TOKENS / NUM_DOCUMENTS - 40) / 2, NUM_DOCUMENTS)
    lengths = np.rint(lengths * NUM_TOKENS / lengths.sum()).astype(np.int32)
    row = partial(compared, "Atom size Table 3", "WikiText-like, mean 142")
    rows = []
    for capacity, (batch, concat_steps, padding_steps) in STEPS.items():
        pieces = -(-lengths // (capacity - 1))
        joined = pack(lengths + 1, "concat", buckets=[capacity]).num_samples
        padded = pack(lengths + pieces, "pad", buckets=[capacity]).num_samples
        ratio = padding_steps / concat_steps
        item = f"MSL {capacity}"
        rows += [
            row(f"{item}, concat", "steps, 2 epochs", (concat_steps, 2 * joined / batch)),
            row(f"{item}, padding", "steps, 2 epochs", (padding_steps, 2 * padded / batch)),
            row(item, "padding / concat", (ratio, padded / joined)),
        ]
    return rows
