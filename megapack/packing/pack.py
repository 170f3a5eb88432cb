"""``pack``: document lengths in, SampleIndex out.

Four documents in buckets of 4 and 8 tokens, of which the third is longer than both::

    index = pack([5, 3, 9, 2], "bucket", buckets=[4, 8])
    index.bucket_capacity, index.bucket_sample_offsets    # -> [4, 8], [0, 1, 3]
    index.metrics()["padding_ratio"]                      # -> 0.05: 20 positions for 19 tokens
"""

from __future__ import annotations

import numbers
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megapack import _core
from megapack.errors import ConfigError, DataError
from megapack.packing.groups import Units, check_groups, groups_checksum, joined_segments
from megapack.packing.metrics import DocumentTotals, Lengths
from megapack.packing.sample_index import SampleIndex
from megapack.packing.strategies import Request, Strategy, find_strategy
from megapack.units import checked_integer

# ---- Room for segments that begin at multiples of a number, as context parallelism needs them, and
# for the sentinels of fill-in-the-middle
# A strategy is given every document length with room for sentinels, rounded up to the alignment,
# and afterwards the segments their true lengths. Capacities are multiples, so strategies cut at
# multiples only (the windows of `seamless` begin anywhere, but each is a sample by itself): a
# document ends inside of its last segment, every other one is full, and a sample whose rounded
# segments fit holds them with each at a multiple of the alignment. What lies between two of them is
# padding like any other.
# A document's room stands before its last token: 10 tokens with room for 3 are nine, room, and one
# behind it. So if a strategy cuts the room, the document is cut, and one that is not has its room.

_INT32_MAX = (1 << 31) - 1


def matched_documents(num_documents: int, share: float, seed: int) -> NDArray[np.bool_]:
    """Which documents a proxy run keeps that sees ``share`` of the tokens of the run it stands for.

    With every source cut down like that, the proxy repeats each as often as the run will: mixtures
    found by proxies carry over only then (arXiv 2606.07597). A document is kept if its number
    between 0 and 1, a pure function of (seed, document), is below ``share``: so all that a smaller
    share keeps, a larger one keeps, too, and documents that come later change nothing.

        matched_documents(10, 0.3, 0)     # -> document 7
        matched_documents(10, 0.6, 0)     # -> documents 0, 2, 3, 5, 6, 7, 9

    Returns:
        bool (num_documents,).
    """
    units = _core.random_units(_core.random_bits(seed, 5), num_documents)
    kept: NDArray[np.bool_] = units < share
    return kept


def with_fim_room(lengths: Lengths, room: int, capacity: int) -> Lengths:
    """Lengths of documents with ``room`` tokens more, where the largest bucket's capacity allows
    it and there is something to move, which are two tokens."""
    return np.where((lengths > 1) & (lengths <= capacity - room), lengths + room, lengths)


def with_true_lengths(
    arrays: Mapping[str, Any], lengths: Lengths, with_room: Lengths
) -> dict[str, Any]:
    """The samples that a strategy made of lengths with room and rounded, with segments cut to the
    true lengths; those that lay wholly in the room vanish.

    Args:
        arrays: of a strategy, or of ``Units.expand``.
        lengths: the documents' own.
        with_room: of ``with_fim_room``; the same where there is none.
    """
    documents = arrays["segment_document"]
    own, full = lengths[documents], with_room[documents]
    most = own - (full > own)  # in front of the last token, if there is room before it
    begin = arrays["segment_begin"]
    end = begin + arrays["segment_length"]
    end = np.where(end >= full, own, np.minimum(end, most))
    begin = np.minimum(begin, most).astype(begin.dtype)
    length = (end - begin).astype(np.int32)
    if not length.all():
        kept = length > 0
        arrays = _without_segments(arrays, kept)
        documents, begin, length = documents[kept], begin[kept], length[kept]
    # Dropped and repeated tokens were counted with the roundings.
    repeated = _repeated_tokens(documents, begin, length) if arrays["repeated_tokens"] else 0
    placed = int(length.sum(dtype=np.int64))
    return {
        **arrays,
        "segment_document": documents,
        "segment_begin": begin,
        "segment_length": length,
        "repeated_tokens": repeated,
        "dropped_tokens": int(lengths.sum(dtype=np.int64)) - placed + repeated,
    }


def _without_segments(arrays: Mapping[str, Any], kept: NDArray[np.bool_]) -> dict[str, Any]:
    """Without some segments, and without samples that had no other."""
    offsets = np.append(0, np.cumsum(kept))[arrays["sample_segment_offsets"]]
    filled = np.diff(offsets) > 0
    buckets = np.append(0, np.cumsum(filled))[arrays["bucket_sample_offsets"]]
    return {
        **arrays,
        "sample_segment_offsets": np.append(0, offsets[1:][filled]),
        "bucket_sample_offsets": buckets,
    }


def _repeated_tokens(documents: Lengths, begin: Lengths, length: NDArray[np.int32]) -> int:
    """How many tokens are in more than one segment, each counted once for every time but one."""
    order = np.lexsort((begin, documents))
    begins, ends = begin[order].astype(np.int64), (begin + length)[order].astype(np.int64)
    same = np.concatenate([[False], np.diff(documents[order]) == 0])
    # How far the segments before reach, counted in a place of its own for every document.
    base = np.cumsum(~same) * (ends.max(initial=0) + 1)
    reached = np.roll(np.maximum.accumulate(base + ends), 1) - base
    return int(np.where(same, np.minimum(ends, reached) - begins, 0).clip(0).sum())


# The core's limits. A histogram of 8 bytes per token of the largest capacity is kept for every pool
# in work.
MAX_CAPACITY = 1 << 24
MAX_THREADS = 1024


@dataclass(frozen=True, kw_only=True)
class PackingMethod:
    """How to pack, checked: everything of a packing but its documents and its seed.

    Attributes:
        strategy: of ``STRATEGIES``.
        buckets: capacities in tokens, ascending.
        parameters: all of the strategy's, as an index keeps them; ``alignment`` if it is above 1,
            ``fim_room`` above 0, ``match_repetition`` below 1, ``groups`` if there are some.
    """

    strategy: Strategy
    buckets: list[int]
    parameters: dict[str, Any]

    @property
    def alignment(self) -> int:
        return int(self.parameters.get("alignment", 1))

    @property
    def fim_room(self) -> int:
        return int(self.parameters.get("fim_room", 0))


def check_packing(
    strategy: str,
    *,
    buckets: int | Iterable[int],
    alignment: int = 1,
    fim_room: int = 0,
    match_repetition: float = 1,
    groups: bool = False,
    preset: str | None = None,
    parameters: Mapping[str, Any] | None = None,
) -> PackingMethod:
    """Refuse what ``pack`` refuses, before any document is looked at; the arguments are its own,
    ``groups`` whether there are some.

    Raises:
        ConfigError: unknown strategy, parameter or preset, a value out of range, bad buckets.
    """
    chosen = find_strategy(strategy)
    capacities = _check_buckets(buckets, chosen)
    resolved = chosen.resolve(parameters or {}, preset=preset, capacity=capacities[-1])
    alignment = checked_integer("alignment", alignment, 1, MAX_CAPACITY)
    # What documents are cut at; elsewhere than at multiples nothing may be cut.
    cuts = [("bucket", capacity) for capacity in capacities]
    cuts += [(name, resolved.get(name) or 0) for name in ("atom_size", "min_bucket")]
    for name, tokens in cuts:
        if tokens % alignment:
            raise ConfigError(f"{name} {tokens:,} is no multiple of the alignment {alignment:,}")
    if alignment > 1:
        resolved["alignment"] = alignment
    if checked_integer("fim_room", fim_room, 0, capacities[-1]):
        resolved["fim_room"] = int(fim_room)
    share: Any = match_repetition
    if not isinstance(share, numbers.Real) or not 0 < match_repetition <= 1:
        raise ConfigError(
            f"match_repetition is {share!r}; it must be above 0 and at most 1: tokens "
            "of the proxy run / tokens of the run it stands for"
        )
    if match_repetition < 1:
        resolved["match_repetition"] = float(match_repetition)
    if groups:
        resolved["groups"] = True
    if chosen.check is not None:
        chosen.check(capacities, resolved)
    return PackingMethod(strategy=chosen, buckets=capacities, parameters=resolved)


def pack(
    lengths: ArrayLike,
    strategy: str = "bucket",
    *,
    buckets: int | Iterable[int],
    seed: int = 0,
    threads: int = 1,
    alignment: int = 1,
    fim_room: int = 0,
    match_repetition: float = 1,
    groups: ArrayLike | None = None,
    preset: str | None = None,
    progress: Callable[[int, int], None] | None = None,
    **parameters: Any,
) -> SampleIndex:
    """Pack documents into samples.

    A pure function of its arguments: ``threads`` changes the time, never the result.

    Args:
        lengths: (num_documents,) integers, tokens per document, its end-of-document token
            included. Documents of length 0 give no segment. int32 is taken without a copy; the
            index keeps nothing of the array.
        strategy: a name of ``megapack.packing.STRATEGIES``.
        buckets: capacities in tokens; one for the strategies of fixed length.
        seed: every random choice comes from it; 0 to 2**64 - 1.
        threads: how many threads to use.
        alignment: samples have room for every segment to begin at a multiple of this (2 x context
            parallel size), so that ``PackedDataset(alignment=...)`` can place them so. Capacities
            are multiples of it.
        fim_room: samples have room for every document that they hold whole to grow by this many
            tokens, the sentinels of fill-in-the-middle, if it has at least two and that fits the
            largest bucket; the others have none.
        match_repetition: only this share of the documents is packed (``matched_documents``); the
            others give no segment.
        groups: (num_documents,) integers, the group of every document, negative for those on their
            own. A group is packed as one document would be, its documents in their order
            (``megapack.packing.groups``); None: every document is on its own.
        preset: the parameters of a paper, where the strategy has them (``"paper"``).
        progress: called with (work done, all work) a few times a second.
        **parameters: those of the strategy, see its entry in ``STRATEGIES``.

    Returns:
        The index, in memory; ``save`` writes it.

    Raises:
        ConfigError: unknown strategy, parameter or preset, a value out of range, bad buckets.
        DataError: lengths that are no integers of one dimension, a negative length, or more than
            2**62 tokens in all.
    """
    method = check_packing(
        strategy,
        buckets=buckets,
        alignment=alignment,
        fim_room=fim_room,
        match_repetition=match_repetition,
        groups=groups is not None,
        preset=preset,
        parameters=parameters,
    )
    seed = checked_integer("seed", seed, 0, (1 << 64) - 1)
    threads = checked_integer("threads", threads, 1, MAX_THREADS)
    documents, checked = _check_lengths(lengths, method.buckets[-1])
    ids = None if groups is None else check_groups(groups, len(documents))
    # The array may be the caller's, who may change it later: these totals are all that is kept.
    totals = DocumentTotals.of(documents, checked)
    decisions: dict[str, str] = {}
    if match_repetition < 1:
        kept = matched_documents(len(documents), match_repetition, seed)
        documents = documents * kept  # the others have no tokens
        checked = _core.DocumentLengths(documents, capacity=method.buckets[-1])
        whole, identity = totals.num_tokens, totals.lengths_fingerprint
        totals = replace(DocumentTotals.of(documents, checked), lengths_fingerprint=identity)
        decisions["match_repetition"] = (
            f"{int(kept.sum()):,} of {len(kept):,} documents, "
            f"{100 * totals.num_tokens / max(1, whole):.4g} % of the tokens"
        )
    step, room = method.alignment, method.fim_room
    with_room = rounded = documents
    if room:
        with_room = rounded = with_fim_room(documents, room, method.buckets[-1])
    if step > 1:
        if documents.max(initial=0) > _INT32_MAX - step:
            documents, with_room = documents.astype(np.int64), with_room.astype(np.int64)
        rounded = (with_room + (step - 1)) // step * step
    units = None if ids is None else Units.of(ids, rounded, method.buckets[-1])
    if units is not None or step > 1 or room:
        checked = _core.DocumentLengths(rounded if units is None else units.lengths)
    arrays = method.strategy.run(
        Request(
            lengths=checked,
            buckets=method.buckets,
            parameters={p.name: method.parameters[p.name] for p in method.strategy.parameters},
            seed=seed,
            threads=threads,
            progress=progress,
        )
    )
    of_groups: dict[str, Any] | None = None
    if units is not None and ids is not None:
        arrays, counts = units.expand(arrays, with_room)
        of_groups = {**counts, "ids": groups_checksum(ids)}
    if len(documents) <= _INT32_MAX:  # the core is wide in both if it is wide in one
        arrays["segment_document"] = arrays["segment_document"].astype(np.int32, copy=False)
    if step > 1 or room:
        arrays = with_true_lengths(arrays, documents, with_room)
    if ids is not None:  # by the documents' own ids: a border between units may lie inside a group
        arrays["segment_joined"] = joined_segments(
            ids, arrays["sample_segment_offsets"], arrays["segment_document"]
        )
    if room:
        totals = replace(totals, num_with_fim_room=_count_with_room(arrays, documents, with_room))
    index = SampleIndex(
        **{**arrays, "decisions": {**decisions, **arrays.get("decisions", {})}},
        strategy=strategy,
        parameters=method.parameters,
        buckets=method.buckets,
        seed=seed,
        documents=totals,
        groups=of_groups,
    )
    if index.dropped_tokens:  # its arrays alone do not tell which documents lost tokens
        whole = _core.whole_documents(*index.segment_arrays(), documents)
        index = replace(index, documents=replace(totals, num_whole=whole))
    return index


def _count_with_room(arrays: Mapping[str, Any], lengths: Lengths, with_room: Lengths) -> int:
    """Documents that are one segment and have room."""
    documents = arrays["segment_document"]
    own = lengths[documents]
    whole = (arrays["segment_length"] == own) & (with_room[documents] > own)
    return len(np.unique(documents[whole]))


def _check_buckets(buckets: int | Iterable[int], strategy: Strategy) -> list[int]:
    given = list(buckets) if isinstance(buckets, Iterable) else [buckets]
    if not given:
        raise ConfigError("buckets is empty; give at least one capacity in tokens")
    capacities = sorted(
        {checked_integer("bucket", capacity, 1, MAX_CAPACITY) for capacity in given}
    )
    if len(capacities) != len(given):
        raise ConfigError(f"buckets {given} names a capacity twice")
    if len(capacities) > 1 and not strategy.many_buckets:
        raise ConfigError(
            f"strategy {strategy.name!r} has samples of one length; buckets is {given}"
        )
    return capacities


def _check_lengths(lengths: ArrayLike, capacity: int) -> tuple[Lengths, _core.DocumentLengths]:
    """The lengths as int32, or int64 where one needs it, and their one check in the core."""
    array = np.asarray(lengths)
    if array.size == 0:
        array = array.astype(np.int32)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise DataError(
            f"lengths is of dtype {array.dtype} and shape {array.shape}; it must be a "
            "one-dimensional array of integers, tokens per document"
        )
    if array.dtype not in (np.int32, np.int64, np.uint64):
        array = array.astype(np.int64)
    array = np.require(array, requirements=["C", "A"])  # those of an .idx lie at byte 34
    checked = _core.DocumentLengths(array, capacity=capacity)
    if array.dtype == np.int32:
        return array, checked
    array = array.astype(np.int32 if checked.longest <= _INT32_MAX else np.int64)
    return array, _core.DocumentLengths(array, capacity=capacity)
