"""Samples of a proxy: whole documents that represent a packed source at a smaller scale.

- ``NestedOrder``: order of documents; the first ones have the length distribution of all.
- ``shrink``: a packed source and a share -> ``ProxySamples``, which ``save`` writes.

A proxy must repeat every source as often as the run does, else mixtures found with it do not
transfer (arXiv 2606.07597). So all sources shrink by the same factor as the run's tokens. Units,
which are documents or whole groups, are sorted by length. The order visits their places in the
sequence of van der Corput (Niederreiter 1992, section 3.1), scrambled: of 2^j equal parts of all
places, each contains exactly one of the first 2^j visits, and the seed chooses which. A unit that
would be a large part of a small proxy waits for a larger one: its turn comes when the units before
it have 8 times its tokens. A proxy takes the first units of this order, so the larger of two
proxies of a source contains the smaller.

    lengths = [5, 30, 7, 80, 6, 9, 35, 90]
    NestedOrder(lengths, seed=0).first(20)    # -> documents 0, 2, 5: 21 of 262 tokens
    NestedOrder(lengths, seed=0).first(65)    # -> documents 0, 1, 2, 4, 5: 57 tokens
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megapack import _core
from megapack.errors import ConfigError, DataError
from megapack.packing.groups import groups_checksum, read_groups
from megapack.packing.metrics import array_checksum
from megapack.packing.pack import pack
from megapack.packing.sample_index import SampleIndex, describe_source
from megapack.packing.shard_packing import describe_shard
from megapack.packing.sharded import (
    PLAN,
    SUFFIX,
    ShardedIndex,
    SourceIndex,
    plain,
    save_shards,
)
from megapack.packing.trees import tokens_of
from megapack.storage import IndexedDataset
from megapack.storage.index_file import GROUPS
from megapack.units import checked_integer

Ids = NDArray[np.int64]
_LONG = 8  # a document waits until those before it have this many times its tokens
_TRIES = 8  # at most so many packings in search of the documents
_CLOSE = 1e-3  # the search ends at this error of the samples' tokens, or one small sample
_EXACT = 0.01  # the report lists larger errors


class NestedOrder:
    """Order in which proxies take the documents of a source.

    Args:
        lengths: (num_documents,) tokens per document; documents of 0 tokens are never taken.
        seed: seed of the choice within each part.
        groups: (num_documents,) group of each document, negative for none; a group is taken whole.
    """

    def __init__(self, lengths: ArrayLike, seed: int, groups: Ids | None = None) -> None:
        self.lengths = np.asarray(lengths)
        self.seed = checked_integer("seed", seed, 0, (1 << 64) - 1)
        documents = np.flatnonzero(self.lengths)
        self._unit, self._tokens = None, self.lengths[documents]
        if groups is not None:
            ids = np.where(groups < 0, -1 - np.arange(len(groups)), groups)[documents]
            _, self._unit = np.unique(ids, return_inverse=True)
            self._tokens = np.bincount(self._unit, self._tokens).astype(np.int64)
        self._documents = documents
        # Sort by 16 bits of the length (its 8 leading binary digits and their number), which numpy
        # does by radix. Units of nearly equal length stay in the order of the dataset, so that
        # all its regions are sampled, too.
        codes = self._tokens.astype(np.float32).view(np.uint32) >> np.uint32(15)
        self._sorted = np.argsort(codes.astype(np.uint16), kind="stable")
        self.num_tokens = int(self._tokens.sum(dtype=np.int64))
        self._take(0)

    def first(self, tokens: float) -> Ids:
        """Return the documents, ascending, of the first units: at least one, and as many as
        bring their sum of tokens nearest to ``tokens``."""
        count = len(self._sorted) * tokens / self.num_tokens
        while self._ends[-1] < min(tokens, self.num_tokens):
            count *= 1.25
            self._take(int(count))
        after = max(1, min(int(np.searchsorted(self._ends, tokens)), len(self._order)))
        is_nearer = tokens - self._ends[after - 1] < self._ends[after] - tokens
        units = self._order[: max(1, after - bool(is_nearer))]
        if self._unit is None:
            return np.sort(self._documents[units])
        taken = np.zeros(len(self._tokens), np.bool_)
        taken[units] = True
        return self._documents[taken[self._unit]]

    def scale_for(self, share: float, half_sample: float) -> int:
        """Return the largest k below 1 / ``share`` for which 1 / k of the tokens is met within 1 %
        by whole units, and by samples of twice ``half_sample`` tokens; 1 if no k meets it."""
        self._take(len(self._sorted))
        k = np.arange(1, max(2, math.ceil(1 / share)))
        wanted = self.num_tokens / k
        after = np.searchsorted(self._ends, wanted).clip(1, len(self._order))
        error = np.minimum(wanted - self._ends[after - 1], abs(self._ends[after] - wanted))
        fits = np.maximum(error, half_sample) <= _EXACT * wanted
        return int(k[fits].max(initial=1))

    def _take(self, count: int) -> None:
        """Compute the first units, at least ``count`` if there are so many, and their tokens."""
        size = len(self._sorted)
        bits = max(1, (size - 1).bit_length())
        number = np.arange(min(1 << bits, 64 + (count << bits) // max(1, size)), dtype=np.uint64)
        # x += c, x ^= c x with even c: a bit of x depends on itself and on lower bits only, so the
        # first 2^j numbers permute their j lowest bits, which become the highest of the place.
        number += np.uint64(_core.random_bits(self.seed, 5))
        for counter in range(6, 10):
            number ^= number * np.uint64(_core.random_bits(self.seed, counter) & ~1)
        for shift, mask in ((1, 0x55), (2, 0x33), (4, 0x0F)):  # reverse the bits of every byte
            every = np.uint64(mask * 0x0101010101010101)
            number = ((number >> np.uint64(shift)) & every) | ((number & every) << np.uint64(shift))
        places = (number.byteswap() >> np.uint64(64 - bits)).astype(np.int64)
        order = self._sorted[places[places < size]]
        tokens = self._tokens[order].astype(np.int64)
        ends = np.cumsum(tokens)
        turns = np.maximum(ends - tokens, _LONG * tokens)
        by_turn = np.argsort(turns, kind="stable")
        if len(order) < size:  # the turns of later units are ends[-1] or more
            by_turn = by_turn[turns[by_turn] <= ends[-1]]
        self._order = order[by_turn]
        self._ends = np.append(0, np.cumsum(tokens[by_turn]))


# ---- A packed source -> its samples in a proxy ---------------------------------------------------


@dataclass(frozen=True, kw_only=True, eq=False)
class _Shard:
    """A dataset, and how it was packed."""

    dataset: IndexedDataset
    index: SampleIndex
    lengths: NDArray[Any]  # tokens per document, 0 for those that were not packed
    groups: Ids | None  # of every document; None: packed without groups
    group_file: str | None  # file that had them, or "auto"
    second: Ids | None  # second size of every document; None: packed without

    @classmethod
    def open(cls, prefix: str, index: SampleIndex, files: Sequence[str]) -> _Shard:
        dataset = IndexedDataset(prefix)
        index.check_source(dataset)
        lengths = dataset.document_lengths
        # `pack --documents`, `pack --match-repetition`
        if "documents" in (index.source or {}) or "match_repetition" in index.parameters:
            is_packed = np.zeros(len(lengths), np.bool_)
            is_packed[np.asarray(index.segment_document)] = True
            lengths = lengths * is_packed
        file = groups = second = None
        if index.groups is not None:
            file, groups = _groups_of(dataset, index, files)
        if index.segment_second is not None:
            second = np.zeros(len(lengths), np.int64)
            second[np.asarray(index.segment_document)] = np.asarray(index.segment_second)
        return cls(
            dataset=dataset,
            index=index,
            lengths=lengths,
            groups=groups,
            group_file=file,
            second=second,
        )

    def pack(self, taken: NDArray[np.bool_], threads: int) -> SampleIndex:
        """Return the samples of the documents that are taken, packed as the index was."""
        index, parameters = self.index, {**self.index.parameters}
        for name in ("groups", "match_repetition"):  # ``lengths`` and ``groups`` have them
            parameters.pop(name, None)
        for name, decision in index.decisions.items():  # of the whole source, as in "on: ..."
            if parameters.get(name) == "auto":
                parameters[name] = decision.partition(":")[0]
        packed = pack(
            self.lengths * taken,
            index.strategy,
            buckets=index.buckets,
            seed=index.seed,
            threads=threads,
            groups=self.groups,
            second=self.second,
            **tokens_of(self.dataset, index.strategy),
            **parameters,
        )
        source = index.source or describe_source(self.dataset, self.dataset.prefix)
        return replace(
            packed, source={**source, "documents": array_checksum(np.flatnonzero(taken))}
        )


def _groups_of(
    dataset: IndexedDataset, index: SampleIndex, files: Sequence[str]
) -> tuple[str, Ids]:
    """Return the groups that an index was packed with, which its checksum identifies, and the file
    that has them."""
    assert index.groups is not None
    default = ["auto"] if IndexedDataset.exists(dataset.prefix + GROUPS) else []
    for name in (*files, *default):
        try:
            ids = read_groups(name, dataset.prefix, len(dataset.document_lengths))
        except (ConfigError, DataError):  # groups of another source: another number of documents
            if name == "auto":
                raise
            continue
        if groups_checksum(ids) == index.groups["ids"]:
            return name, ids
    raise ConfigError(
        f"{index.path} was packed with groups that are neither in {dataset.prefix}{GROUPS} nor in "
        "a --group-file: add --group-file FILE.npy, the file that `pack --groups` read"
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class ProxySamples:
    """Samples of a source in a proxy."""

    index: SourceIndex  # at the path of its file
    shards: tuple[SampleIndex, ...]
    group_files: frozenset[str]  # files that had groups of its documents, or "auto"
    num_documents: int
    num_tokens: int
    of_tokens: int  # tokens of all documents of the source
    error: float
    """Tokens of the samples, with padding, / the requested share of the source's, minus 1."""
    exact_scale: int | None
    """1 / the smallest larger scale at which the error is below 1 %; None: it already is."""

    def save(self, *, overwrite: bool) -> None:
        """Write the files, unless they exist already with these samples. Raises ConfigError if they
        exist with others."""
        if isinstance(self.index, SampleIndex):
            assert self.index.path is not None
            self.index.save(self.index.path, source=self.index.source, overwrite=overwrite)
            return
        for row, shard in zip(self.index.shards, self.shards, strict=True):
            Path(row.samples).parent.mkdir(exist_ok=True)
            shard.save(row.samples, source=shard.source, overwrite=overwrite)
        plan = {name: plain(getattr(self.index, name)) for name in PLAN}
        save_shards(self.index.path, plan, self.index.shards)


def shrink(
    source: SourceIndex,
    prefix: str | None,
    share: float,
    output: Path,
    *,
    seed: int = 0,
    groups: Sequence[str] = (),
    threads: int = 1,
) -> ProxySamples:
    """Return samples of whole documents with a given share of a source's tokens.

    They are packed by the strategy, parameters, buckets and seed that the source records. A small
    packing has more padding. So the documents are those whose samples, with padding, have the share
    of the source's samples: then the run and its proxy repeat the source equally often.

    Args:
        prefix: the source's dataset; None: a shard manifest names the datasets.
        share: above 0, at most 1.
        output: files of the samples, OUTPUT.samples or OUTPUT.shards.json; ``save`` writes them.
        groups: .npy files with groups of documents (``pack --groups``); a source with groups
            finds its file by the checksum, else it reads PREFIX.groups ("auto").

    Raises ConfigError if the source cannot shrink, IndexMismatchError for another dataset.
    """
    names = [prefix] if prefix is not None else []
    if isinstance(source, ShardedIndex):
        names = [shard.prefix for shard in source.shards]
        if source.arranged is not None:
            raise ConfigError(
                f"{source.path} was arranged in the order of a run: give the source that it was "
                "made from"
            )
    opened = [_Shard.open(name, source.open(i), groups) for i, name in enumerate(names)]
    lengths = np.concatenate([shard.lengths for shard in opened])
    order = NestedOrder(lengths, seed, _joined(opened))
    if not order.num_tokens:
        raise ConfigError(f"{source.path} has no tokens: leave the source out")
    begins = np.cumsum([0, *(len(shard.lengths) for shard in opened)])[:-1]
    wanted = share * positions(source)
    tokens, best, taken = share * order.num_tokens, list[SampleIndex](), np.zeros(0, np.bool_)
    error = math.inf
    for _ in range(_TRIES):
        is_first = np.zeros(len(lengths), np.bool_)
        is_first[order.first(tokens)] = True
        masks = np.split(is_first, begins[1:])
        parts = [shard.pack(mask, threads) for shard, mask in zip(opened, masks, strict=True)]
        ratio = sum(map(positions, parts)) / wanted
        if abs(ratio - 1) < abs(error):
            best, taken, error = parts, is_first, ratio - 1
        if abs(error) * wanted <= max(_CLOSE * wanted, min(source.buckets)):
            break
        tokens /= ratio
    index: SourceIndex = replace(best[0], path=output.with_name(f"{output.name}.samples"))
    if isinstance(source, ShardedIndex):
        folder = output.with_name(f"{output.name}.shards")
        rows = (
            describe_shard(shard.dataset, folder / f"{number:06}.samples", part)
            for number, (shard, part) in enumerate(zip(opened, best, strict=True))
        )
        path = output.with_name(f"{output.name}{SUFFIX}")
        plan = {name: getattr(source, name) for name in PLAN}
        index = ShardedIndex(path=path, shards=tuple(rows), **plan)
    exact_scale = None
    if abs(error) > _EXACT:
        exact_scale = order.scale_for(share, max(source.buckets) / 2)
    return ProxySamples(
        index=index,
        shards=tuple(best),
        group_files=frozenset(shard.group_file for shard in opened if shard.group_file),
        num_documents=int(taken.sum()),
        num_tokens=int(lengths[taken].sum(dtype=np.int64)),
        of_tokens=order.num_tokens,
        error=error,
        exact_scale=exact_scale,
    )


def positions(index: SourceIndex) -> int:
    """Return the tokens of all samples, padding included."""
    return int(np.diff(index.bucket_sample_offsets) @ np.asarray(index.bucket_capacity))


def _joined(shards: Sequence[_Shard]) -> Ids | None:
    """Return the groups of all shards, numbered apart; None: no shard has groups."""
    if all(shard.groups is None for shard in shards):
        return None
    parts, first = [], 0
    for shard in shards:
        numbers = np.full(len(shard.lengths), -1, np.int64)
        if shard.groups is not None:
            has_one = shard.groups >= 0
            _, number = np.unique(shard.groups[has_one], return_inverse=True)
            numbers[has_one] = first + number.reshape(-1)
        parts.append(numbers)
        first += len(numbers)
    return np.concatenate(parts)
