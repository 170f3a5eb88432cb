"""The lengths that are compared on, summarised for a report."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megapack.errors import DataError

__all__ = ["Corpus"]


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """The lengths that were compared on, summarised.

    Attributes:
        name: where they come from.
        num_documents, num_tokens, longest: of the lengths used.
        mean, median: tokens per document.
        sampled_from: documents of the whole dataset when only a sample was used, else None.
        edges: float64 (K + 1,), tokens; histogram interval k is [edges[k], edges[k + 1]).
        documents_per_interval, tokens_per_interval: int64 (K,).
    """

    name: str
    num_documents: int
    num_tokens: int
    longest: int
    mean: float
    median: float
    sampled_from: int | None
    edges: NDArray[np.float64]
    documents_per_interval: NDArray[np.int64]
    tokens_per_interval: NDArray[np.int64]

    @classmethod
    def of(
        cls, lengths: NDArray[np.integer[Any]], *, name: str, sampled_from: int | None = None
    ) -> Corpus:
        """Summary with four histogram intervals per doubling of the length."""
        if len(lengths) == 0 or int(lengths.max()) == 0:
            raise DataError(f"{name} holds no document with a token in it; nothing to compare")
        longest = int(lengths.max())
        edges = 2.0 ** (np.arange(0, 4 * np.ceil(np.log2(longest + 1)) + 1) / 4)
        documents = np.zeros(len(edges) - 1, np.int64)
        tokens = np.zeros(len(edges) - 1, np.int64)
        for begin in range(0, len(lengths), 1 << 22):
            part = lengths[begin : begin + (1 << 22)].astype(np.int64)
            interval = np.searchsorted(edges, part[part > 0], side="right") - 1
            documents += np.bincount(interval, minlength=len(documents))
            weights = part[part > 0].astype(np.float64)  # exact: sums stay below 2**53
            tokens += np.bincount(interval, weights, minlength=len(tokens)).astype(np.int64)
        num_tokens = int(lengths.sum(dtype=np.int64))
        return cls(
            name=name,
            num_documents=len(lengths),
            num_tokens=num_tokens,
            longest=longest,
            mean=num_tokens / len(lengths),
            median=float(np.median(lengths)),
            sampled_from=sampled_from,
            edges=edges,
            documents_per_interval=documents,
            tokens_per_interval=tokens,
        )
