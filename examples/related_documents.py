"""Related documents in one sample: write group ids by BM25 (bm25s).

    pip install bm25s
    python examples/related_documents.py corpus --output related.npy --group-tokens 8192
    megapack-build pack corpus --buckets 8192 --groups related.npy --output related.samples

Only useful with attention across documents, ``attention: group`` of the run (in ``data:``, or
``PackedDataset(attention="group")``). In-Context Pretraining (arXiv 2310.10638), BM25Chunk
(2402.13991) and SPLiCe (2312.17296) pack like this. If documents have natural groups (files of a
repository, parts of a book), use a key of the text: `megapack-build tokenize --group-key`.

A group begins with the first document without a group. It then repeatedly gets the free document
most similar to its last one, among the nearest neighbors of that one, until the group has the
tokens of a sample. Words are token ids, so nothing is decoded.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megapack.storage import IndexedDataset

try:
    import bm25s
except ModuleNotFoundError:
    raise SystemExit("related_documents.py needs the package bm25s: pip install bm25s") from None

QUERY_TOKENS = 512  # first tokens of a document, the query for its neighbors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("prefix", help="dataset PREFIX.bin/.idx")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE.npy")
    parser.add_argument("--group-tokens", type=int, default=8192, help="most tokens of a group")
    parser.add_argument("--neighbours", type=int, default=32, help="number to search per document")
    args = parser.parse_args()
    dataset = IndexedDataset(args.prefix)
    nearest = neighbours_of(dataset, args.neighbours)
    ids = chained(nearest, dataset.document_lengths.tolist(), args.group_tokens)
    np.save(args.output, ids)
    sizes = np.bincount(ids)
    print(
        f"{args.output}: {len(ids):,} documents in {len(sizes):,} groups, {sizes.mean():.1f} on "
        f"average; {(sizes == 1).sum():,} groups have one document"
    )


def neighbours_of(dataset: IndexedDataset, count: int) -> NDArray[np.int64]:
    """Return each document's BM25 neighbors, nearest first, with itself: (documents, count)."""
    bounds = dataset.document_offsets
    texts = [dataset.tokens[a:b].tolist() for a, b in pairwise(bounds.tolist())]
    words = sorted({word for text in texts for word in text})
    number = {word: i for i, word in enumerate(words)}
    numbered = [[number[word] for word in text] for text in texts]
    vocabulary = {str(word): i for word, i in number.items()}
    index = bm25s.BM25()
    index.index((numbered, vocabulary), show_progress=False)
    queries = bm25s.tokenization.Tokenized(
        ids=[list(dict.fromkeys(text[:QUERY_TOKENS])) for text in numbered], vocab=vocabulary
    )
    found, _ = index.retrieve(queries, k=min(count, len(texts)), show_progress=False)
    return np.asarray(found, np.int64)


def chained(
    nearest: NDArray[np.int64], lengths: Sequence[int], group_tokens: int
) -> NDArray[np.int64]:
    """Return the group of every document."""
    group = np.full(len(lengths), -1, np.int64)
    number = 0
    for first in range(len(lengths)):
        if group[first] >= 0:
            continue
        last, room = first, group_tokens - lengths[first]
        group[first] = number
        while True:
            free = [d for d in nearest[last].tolist() if group[d] < 0 and lengths[d] <= room]
            if not free:
                break
            last = free[0]
            group[last] = number
            room -= lengths[last]
        number += 1
    return group


if __name__ == "__main__":
    main()
