"""Distributions of document lengths: draw the lengths of a corpus of any size, or write it to disk.

Every law is ``law(n, seed=0) -> int32 (n,)``, tokens per document, end-of-document token included.
Lengths are drawn in blocks of 2**18 documents, each from its own generator seeded by
``(seed, block)``. So every machine draws the same numbers, and the first million of ten million
lengths are the same as those of a draw of one million.

The parameters reproduce published tables:

* ``fineweb_edu_like``: log-normal body, Pareto tail, fitted to the truncation ratios of
  concatenate-and-cut at 1024 ... 16384 (BucketLLM, Table 1) and to the mean that its concatenation
  ratios imply. Mean 999, median 603, 0.184 % longer than 16384;
  ``tests/test_composition.py`` compares it with the table.
* ``pubmed``, ``bbc_news``, ``finance``: the histograms of Seamless Packing, Tables 13 and 14
  (uniform inside an interval); the open last interval is a shifted exponential whose mean gives the
  token totals of its Table 16. None of the three has a document below its first interval.
* ``web_800``: log-normal with mean 800, the "typical web corpus" of the bin-packing blog.
* ``web_blog_table``: two log-normals that reproduce the blog's row of padding waste. That row needs
  a mean of about 4,800 tokens; a mean of 800 cannot give it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from megapack.storage import IndexedDataset, IndexedDatasetBuilder

BUCKETS = [1024, 2048, 4096, 8192, 16384]  # as in BucketLLM, whose steps have:
RANKS, TOKENS_PER_RANK = 64, 49_152

Lengths = NDArray[np.int32]
Law = Callable[..., Lengths]
_BLOCK = 1 << 18
_LONGEST = 1 << 27


def draw(
    n: int, seed: int, block_law: Callable[[np.random.Generator, int], NDArray[np.float64]]
) -> Lengths:
    """Draw ``n`` lengths in blocks; ``block_law(generator, count)`` returns float lengths."""
    out = np.empty(n, np.int32)
    for block, begin in enumerate(range(0, n, _BLOCK)):
        generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence((seed, block))))
        values = block_law(generator, _BLOCK)[: n - begin]
        out[begin : begin + _BLOCK] = np.clip(values, 2, _LONGEST)
    return out


def fineweb_edu_like(
    n: int, seed: int = 0, *, shortest: int = 56, longest: int = 131_072
) -> Lengths:
    """Draw lengths of educational web pages of 50 to 100,000 words, FineWeb's limits (56 to
    131,072 tokens)."""
    tail_share, tail_start, tail_exponent = 0.013752164, 6029.594594, 2.025752463
    mu, sigma = 6.386387422, 0.852338181
    # Inverse of the Pareto law cut at `longest`.
    tail_mass = 1.0 - (tail_start / longest) ** tail_exponent

    def block(generator: np.random.Generator, count: int) -> NDArray[np.float64]:
        body = np.exp(mu + sigma * generator.standard_normal(count))
        in_tail = generator.random(count) < tail_share
        tail = tail_start * (1.0 - tail_mass * generator.random(count)) ** (-1.0 / tail_exponent)
        values = np.rint(np.where(in_tail, tail, body))
        # Reflect lengths below the limit, so that the density near it stays smooth.
        return np.minimum(np.where(values < shortest, 2 * shortest - values, values), longest)

    return draw(n, seed, block)


def _histogram(first: int, width: int, counts: list[int], last_mean: float) -> Law:
    """Return the law of a published histogram of intervals (edge, edge + width], the last open."""
    cumulative = np.cumsum(counts) / np.sum(counts)
    edges = first + width * np.arange(len(counts))

    def block(generator: np.random.Generator, count: int) -> NDArray[np.float64]:
        interval = np.searchsorted(cumulative[:-1], generator.random(count), side="right")
        inside = width * generator.random(count)
        beyond = generator.exponential(last_mean - edges[-1], count)
        is_last = interval == len(counts) - 1
        return np.floor(edges[interval] + 1 + np.where(is_last, beyond, inside))

    return lambda n, seed=0: draw(n, seed, block)


def web_800(n: int, seed: int = 0) -> Lengths:
    """Draw log-normal lengths, mean 800, sigma 1."""

    def block(generator: np.random.Generator, count: int) -> NDArray[np.float64]:
        return np.rint(np.exp(np.log(800.0) - 0.5 + generator.standard_normal(count)))

    return draw(n, seed, block)


def web_blog_table(n: int, seed: int = 0) -> Lengths:
    """Draw lengths with the blog's padding: one document per sample of 512 ... 16384 tokens leaves
    18/32/48/62/74/83 % padding."""

    def block(generator: np.random.Generator, count: int) -> NDArray[np.float64]:
        wide = generator.random(count) < 0.84445
        z = generator.standard_normal(count)
        return np.rint(np.exp(np.where(wide, 6.95398 + 1.82259 * z, 6.48004 + 0.39254 * z)))

    return draw(n, seed, block)


PUBMED = [3906, 4095, 1789, 763, 355, 150, 73, 47, 90]  # texts of (2k, 4k], (4k, 6k], ... tokens
LAWS: dict[str, Law] = {
    "fineweb_edu_like": fineweb_edu_like,
    "pubmed": _histogram(2048, 2048, PUBMED, 27_638),
    "bbc_news": _histogram(512, 512, [3533, 6556, 1323, 330, 97, 49, 27, 22, 29], 12_483),
    "finance": _histogram(512, 512, [7790, 4161, 1012, 397, 274, 234, 212, 195, 1252], 8_100),
    "web_800": web_800,
    "web_blog_table": web_blog_table,
}


def write_documents(
    prefix: Path,
    lengths: ArrayLike,
    *,
    vocabulary: int,
    dtype: DTypeLike = np.uint16,
    end: int | None = None,
    seed: int = 0,
) -> IndexedDataset:
    """Write documents of random tokens below ``vocabulary``, each ending with ``end``."""
    offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    tokens = np.random.default_rng(seed).integers(1, vocabulary, offsets[-1]).astype(dtype)
    if end is not None:
        tokens[offsets[1:] - 1] = end
    with IndexedDatasetBuilder(prefix, dtype, vocab_size=vocabulary) as builder:
        builder.add_documents(tokens, offsets)
    return IndexedDataset(prefix)


def write_index(prefix: Path, lengths: NDArray[np.int32]) -> None:
    """Write the .idx of documents, and a sparse .bin of the right size."""
    pointers = np.concatenate([[0], np.cumsum(2 * lengths.astype(np.int64))])
    with Path(f"{prefix}.idx").open("wb") as file:
        file.write(b"MMIDIDX\x00\x00" + (1).to_bytes(8, "little") + bytes([8]))
        file.write(np.array([len(lengths), len(pointers)], np.int64).tobytes())
        for array in (lengths, pointers[:-1], np.arange(len(pointers))):
            array.tofile(file)
    with Path(f"{prefix}.bin").open("wb") as file:
        file.truncate(int(pointers[-1]))
