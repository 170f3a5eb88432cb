"""``pack``: document lengths in, SampleIndex out; ``check_packing`` only checks the options.

Four documents in buckets of 4 and 8 tokens; the third is longer than both buckets::

    index = pack([5, 3, 9, 2], "bucket", buckets=[4, 8])
    index.bucket_capacity, index.bucket_sample_offsets    # -> [4, 8], [0, 1, 3]
    index.metrics()["padding_ratio"]                      # -> 0.05: 20 positions for 19 tokens
"""

from __future__ import annotations

import numbers
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megapack import _core
from megapack.calls import checked_call, without_none
from megapack.errors import ConfigError, DataError
from megapack.packing.groups import Units, check_groups, groups_checksum, joined_segments
from megapack.packing.metrics import DocumentTotals, Lengths
from megapack.packing.sample_index import SampleIndex, WithRoom
from megapack.packing.second import (
    check_second,
    second_capacities,
    second_checksum,
    second_of_segments,
)
from megapack.packing.strategies import (
    PARAMETERS,
    STRATEGIES,
    Request,
    Strategy,
    find_strategy,
)
from megapack.packing.trees import DocumentTokens
from megapack.units import checked_integer

_INT32_MAX = (1 << 31) - 1


def matched_documents(num_documents: int, share: float, seed: int) -> NDArray[np.bool_]:
    """Choose the documents of a small proxy run that sees ``share`` of the real run's tokens.

    If every source is reduced like this, the proxy repeats each source as often as the real run;
    only then do mixtures found with proxies transfer (arXiv 2606.07597). A document is kept if its
    random number, a pure function of (seed, document), is below ``share``. So a larger share keeps
    everything that a smaller one keeps, and appended documents change nothing.

        matched_documents(10, 0.3, 0)     # -> document 7
        matched_documents(10, 0.6, 0)     # -> documents 0, 2, 3, 5, 6, 7, 9

    Returns:
        bool (num_documents,).
    """
    units = _core.random_units(_core.random_bits(seed, 5), num_documents)
    kept: NDArray[np.bool_] = units < share
    return kept


# ---- Alignment (for context parallelism) and room for fill-in-the-middle sentinels ---------------
# The strategy gets each length plus the room, rounded up to the alignment. Afterwards segments are
# cut back to the true lengths. Capacities are multiples of the alignment, so strategies cut only at
# multiples (windows of `seamless` begin anywhere, but each is a sample of one segment). So every
# segment can begin at a multiple, and the gaps between segments are ordinary padding.
# The room lies before the document's last token: 10 tokens with room for 3 are 9 tokens, room, and
# 1 token. If a strategy cuts inside the room, it cuts the document; an uncut document has its room.


def with_fim_room(lengths: Lengths, room: int, capacity: int) -> Lengths:
    """Add ``room`` to lengths above 1 that then do not exceed ``capacity``."""
    return np.where((lengths > 1) & (lengths <= capacity - room), lengths + room, lengths)


def with_true_lengths(
    arrays: Mapping[str, Any], lengths: Lengths, with_room: Lengths
) -> dict[str, Any]:
    """Cut segments to the true lengths; remove segments that lie entirely in the room. A strategy
    made ``arrays`` from the rounded lengths ``with_room``, both (num_documents,)."""
    documents = arrays["segment_document"]
    true_length, full_length = lengths[documents], with_room[documents]
    # Tokens before the room: all but the last one, if the document has room.
    before_room = true_length - (full_length > true_length)
    begin = arrays["segment_begin"]
    end = begin + arrays["segment_length"]
    end = np.where(end >= full_length, true_length, np.minimum(end, before_room))
    begin = np.minimum(begin, before_room).astype(begin.dtype)
    length = (end - begin).astype(np.int32)
    if not length.all():
        kept = length > 0
        arrays = _without_segments(arrays, kept)
        documents, begin, length = documents[kept], begin[kept], length[kept]
    # The strategy counted dropped and repeated tokens with rounding: count them again.
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
    """Remove the segments that are not kept, and samples without any left."""
    offsets = np.append(0, np.cumsum(kept))[arrays["sample_segment_offsets"]]
    filled = np.diff(offsets) > 0
    buckets = np.append(0, np.cumsum(filled))[arrays["bucket_sample_offsets"]]
    return {
        **arrays,
        "sample_segment_offsets": np.append(0, offsets[1:][filled]),
        "bucket_sample_offsets": buckets,
    }


def _repeated_tokens(documents: Lengths, begin: Lengths, length: NDArray[np.int32]) -> int:
    """Count repetitions: a token in k segments counts k - 1 times."""
    order = np.lexsort((begin, documents))
    begins, ends = begin[order].astype(np.int64), (begin + length)[order].astype(np.int64)
    same_document = np.concatenate([[False], np.diff(documents[order]) == 0])
    # Largest end of the earlier segments of the same document: a running maximum over all segments.
    # Adding ``base`` lifts each document above all earlier ones, so that their ends do not count.
    base = np.cumsum(~same_document) * (ends.max(initial=0) + 1)
    earlier_end = np.roll(np.maximum.accumulate(base + ends), 1) - base
    overlap = np.minimum(ends, earlier_end) - begins
    return int(np.where(same_document, overlap, 0).clip(0).sum())


# Limits of the core. Each pool in progress has a histogram of 8 bytes per token of capacity.
MAX_CAPACITY = 1 << 24
MAX_THREADS = 1024


@dataclass(frozen=True, kw_only=True)
class PackingMethod(WithRoom):
    """Checked options of a packing, without documents and seed."""

    strategy: Strategy
    buckets: list[int]  # capacities in tokens, ascending
    # All parameters of the strategy, as the index records them; also ``alignment`` above 1,
    # ``fim_room`` above 0, ``match_repetition`` below 1, ``groups``, ``second_capacity``.
    parameters: dict[str, Any]


@checked_call
def check_packing(
    strategy: str,
    *,
    buckets: int | Iterable[int],
    alignment: int = 1,
    fim_room: int = 0,
    match_repetition: float = 1,
    groups: bool = False,
    second_capacity: int | Iterable[int] | None = None,
    preset: str | None = None,
    parameters: Mapping[str, Any] | None = None,
) -> PackingMethod:
    """Check the options of ``pack`` without documents; ``groups``: documents have groups. Raises
    ConfigError: unknown strategy, parameter or preset, a value out of range, bad buckets."""
    chosen = find_strategy(strategy)
    capacities = _check_buckets(buckets, chosen)
    resolved = chosen.resolve(parameters or {}, preset=preset, capacity=capacities[-1])
    alignment = checked_integer("alignment", alignment, 1, MAX_CAPACITY)
    # Strategies cut documents at multiples of these sizes, so alignment must divide them.
    cuts = [("bucket", capacity) for capacity in capacities]
    cuts += [(name, resolved.get(name) or 0) for name in ("atom_size", "min_bucket")]
    for name, tokens in cuts:
        if tokens % alignment:
            raise ConfigError(f"{name} {tokens:,} is not a multiple of the alignment {alignment:,}")
    if alignment > 1:
        resolved["alignment"] = alignment
    if checked_integer("fim_room", fim_room, 0, capacities[-1]):
        resolved["fim_room"] = int(fim_room)
    share: Any = match_repetition
    if not isinstance(share, numbers.Real) or not 0 < match_repetition <= 1:
        raise ConfigError(
            f"match_repetition is {share!r}; it must be above 0 and at most 1: tokens "
            "of the proxy run / tokens of the real run"
        )
    if match_repetition < 1:
        resolved["match_repetition"] = float(match_repetition)
    if groups:
        resolved["groups"] = True
    if second_capacity is not None:
        _check_two_capacities(chosen, groups, resolved)
        resolved["second_capacity"] = second_capacities(second_capacity, len(capacities))
    if chosen.check is not None:
        chosen.check(capacities, resolved)
    return PackingMethod(strategy=chosen, buckets=capacities, parameters=resolved)


# Names of the length of a sample in other programs.
_LENGTHS = [
    *("max_length", "max_seq_length", "max_seq_len", "seq_length", "seq_len", "sequence_length"),
    *("context_length", "block_size", "capacity", "capacities"),
]
_INSTEAD = dict.fromkeys(_LENGTHS, "samples have the lengths buckets, as in buckets=[1024, 2048]")


@partial(checked_call, instead=_INSTEAD)
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
    second: ArrayLike | None = None,
    second_capacity: int | Iterable[int] | None = None,
    tokens: tuple[ArrayLike, ArrayLike] | None = None,
    preset: str | None = None,
    progress: Callable[[int, int], None] | None = None,
    atom_size: int | None = None,
    extra_capacity: int | None = None,
    last: Literal["pad", "drop"] | None = None,
    max_depth: int | None = None,
    max_segments: int | None = None,
    min_bucket: int | None = None,
    padding_threshold: float | None = None,
    placement: Literal["exact", "paper", "published"] | None = None,
    pool: Literal["drain", "stream"] | None = None,
    pool_size: int | None = None,
    promote: Literal["auto", "on", "lookahead", "off"] | None = None,
    r_max: float | None = None,
    refine: bool | None = None,
    shuffle: bool | None = None,
) -> SampleIndex:
    """Pack documents into samples: a pure function of its arguments, except ``threads``.

    Args:
        lengths: (num_documents,) integers, tokens per document, including the end-of-document
            token. Documents of length 0 get no segment. int32 arrays are neither copied nor kept.
        strategy: a name of ``megapack.packing.STRATEGIES``.
        buckets: capacities in tokens; a single one for strategies of one sample length.
        seed: seed of all random choices; 0 to 2**64 - 1.
        threads: number of threads; the result does not depend on it.
        alignment: leave room for every segment to begin at a multiple of this (2 x context
            parallel size), for ``PackedDataset(alignment=...)``. Must divide all capacities.
        fim_room: tokens by which fill-in-the-middle may lengthen a document that is one segment.
            Documents with less than 2 tokens, or that would exceed the largest bucket, get none.
        match_repetition: pack only this share of the documents (``matched_documents``).
        groups: (num_documents,) integers, the group of each document, negative for documents
            without one. A group is packed like one document (``megapack.packing.groups``).
        second: (num_documents,) integers, a second size of each document (images, frames, bytes),
            for strategies with two capacities; with ``second_capacity``.
        second_capacity: limit of the sum of second sizes in a sample: one number, or one for each
            bucket in ascending order. Each segment of a cut document counts in full.
        tokens: for strategy ``tree``: the tokens of all documents, one after the other, and the
            (num_documents + 1,) offsets of the documents in them.
        preset: use the parameters of a paper, if the strategy has them (``"paper"``).
        progress: called with (work done, all work) a few times a second.
        atom_size .. shuffle: parameters of strategies, see ``STRATEGIES``; None: their defaults.

    Returns:
        The index, in memory; ``save`` writes it.

    Raises:
        ConfigError: unknown strategy, parameter or preset, a value out of range, bad buckets.
        DataError: lengths are not a one-dimensional array of integers, one is negative, or they
            sum to more than 2**62 tokens; a second size exceeds the largest bucket.
    """
    parameters = without_none(locals(), PARAMETERS)
    method = check_packing(
        strategy,
        buckets=buckets,
        alignment=alignment,
        fim_room=fim_room,
        match_repetition=match_repetition,
        groups=groups is not None,
        second_capacity=second_capacity,
        preset=preset,
        parameters=parameters,
    )
    seed = checked_integer("seed", seed, 0, (1 << 64) - 1)
    threads = checked_integer("threads", threads, 1, MAX_THREADS)
    documents, checked = _check_lengths(lengths, method.buckets[-1])
    ids = None if groups is None else check_groups(groups, len(documents))
    # Keep only totals: the caller may change the array later.
    totals = DocumentTotals.of(documents, checked)
    decisions: dict[str, str] = {}
    if match_repetition < 1:
        kept = matched_documents(len(documents), match_repetition, seed)
        documents = documents * kept  # documents that are not kept become empty
        checked = _core.DocumentLengths(documents, capacity=method.buckets[-1])
        all_tokens, identity = totals.num_tokens, totals.lengths_fingerprint
        totals = replace(DocumentTotals.of(documents, checked), lengths_fingerprint=identity)
        decisions["match_repetition"] = (
            f"{int(kept.sum()):,} of {len(kept):,} documents, "
            f"{100 * totals.num_tokens / max(1, all_tokens):.4g} % of the tokens"
        )
    capacities = method.parameters.get("second_capacity")
    sizes = check_second(second, documents, capacities)
    step, room = method.alignment, method.fim_room
    documents, with_room, rounded = _rounded(documents, step, room, method.buckets[-1])
    compared, units = None, None
    if method.strategy.needs_tokens:
        compared = DocumentTokens.of(tokens, documents, ids)
    elif ids is not None:
        units = Units.of(ids, rounded, method.buckets[-1])
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
            tokens=compared,
            second=sizes,
            second_capacities=capacities,
        )
    )
    group_facts: dict[str, Any] | None = None
    if units is not None and ids is not None:
        arrays, counts = units.expand(arrays, with_room)
        group_facts = {**counts, "ids": groups_checksum(ids)}
    elif ids is not None:
        group_facts = {**arrays.pop("groups"), "ids": groups_checksum(ids)}
    if len(documents) <= _INT32_MAX:  # the core returns int64 documents if begins need int64
        names = [name for name in ("segment_document", "end_document") if name in arrays]
        arrays |= {name: arrays[name].astype(np.int32, copy=False) for name in names}
    if step > 1 or room:
        arrays = with_true_lengths(arrays, documents, with_room)
    if (
        units is not None and ids is not None
    ):  # compare ids, not units: a long group consists of several units
        arrays["segment_joined"] = joined_segments(
            ids, arrays["sample_segment_offsets"], arrays["segment_document"]
        )
    if room:
        totals = replace(totals, num_with_fim_room=_count_with_room(arrays, documents, with_room))
    if sizes is not None:
        arrays["segment_second"] = second_of_segments(sizes, arrays["segment_document"])
    index = SampleIndex(
        **{**arrays, "decisions": {**decisions, **arrays.get("decisions", {})}},
        strategy=strategy,
        parameters=method.parameters,
        buckets=method.buckets,
        seed=seed,
        documents=totals,
        groups=group_facts,
        second=None if second is None else second_checksum(second),
    )
    if index.dropped_tokens:  # which documents lost tokens depends on their lengths, too
        num_whole = _core.whole_documents(*index.segment_arrays(), documents)
        index = replace(index, documents=replace(totals, num_whole=num_whole))
    return index


def _rounded(
    documents: Lengths, step: int, room: int, capacity: int
) -> tuple[Lengths, Lengths, Lengths]:
    """Return three arrays: the lengths; the lengths with room for fill-in-the-middle; and these
    rounded up to ``step``. All are int64 if int32 is too narrow."""
    with_room = with_fim_room(documents, room, capacity) if room else documents
    if step == 1:
        return documents, with_room, with_room
    if documents.max(initial=0) > _INT32_MAX - step:
        documents, with_room = documents.astype(np.int64), with_room.astype(np.int64)
    return documents, with_room, (with_room + (step - 1)) // step * step


def _count_with_room(arrays: Mapping[str, Any], lengths: Lengths, with_room: Lengths) -> int:
    """Count documents that are one segment and have room."""
    documents = arrays["segment_document"]
    true_length = lengths[documents]
    whole = (arrays["segment_length"] == true_length) & (with_room[documents] > true_length)
    return len(np.unique(documents[whole]))


def _check_two_capacities(strategy: Strategy, groups: bool, parameters: Mapping[str, Any]) -> None:
    if not strategy.two_capacities:
        names = " or ".join(name for name, other in STRATEGIES.items() if other.two_capacities)
        raise ConfigError(f"strategy {strategy.name!r} has no second capacity; choose {names}")
    promote = parameters["promote"]
    unsupported = {"groups": groups, "refine": parameters["refine"]}
    unsupported[f"promote={promote!r}"] = promote not in ("auto", "on", "off")
    for name, used in unsupported.items():
        if used:
            raise ConfigError(f"{name} does not work with a second capacity; leave out one of them")


def _check_buckets(buckets: int | Iterable[int], strategy: Strategy) -> list[int]:
    given = list(buckets) if isinstance(buckets, Iterable) else [buckets]
    if not given:
        raise ConfigError("buckets is empty; give at least one capacity in tokens")
    capacities = sorted(
        {checked_integer("bucket", capacity, 1, MAX_CAPACITY) for capacity in given}
    )
    if len(capacities) != len(given):
        raise ConfigError(f"buckets is {given}; each capacity must be given once")
    if len(capacities) > 1 and not strategy.many_buckets:
        raise ConfigError(
            f"strategy {strategy.name!r} has samples of one length; buckets is {given}: give one"
        )
    return capacities


def _check_lengths(lengths: ArrayLike, capacity: int) -> tuple[Lengths, _core.DocumentLengths]:
    """Return the lengths as int32, or as int64 if one needs it, and the core's checked view of
    them."""
    if isinstance(lengths, str):
        raise DataError(
            f"lengths is {lengths!r}; it must be tokens per document: for a dataset on disk, give "
            f"IndexedDataset({lengths!r}).document_lengths"
        )
    array = np.asarray(lengths)
    if array.size == 0:
        array = array.astype(np.int32)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise DataError(
            f"lengths has dtype {array.dtype} and shape {array.shape}; it must be a "
            "one-dimensional array of integers, tokens per document"
        )
    if array.dtype not in (np.int32, np.int64, np.uint64):
        array = array.astype(np.int64)
    array = np.require(array, requirements=["C", "A"])  # unaligned in an .idx (byte 34)
    checked = _core.DocumentLengths(array, capacity=capacity)
    if array.dtype == np.int32:
        return array, checked
    array = array.astype(np.int32 if checked.longest <= _INT32_MAX else np.int64)
    return array, _core.DocumentLengths(array, capacity=capacity)
