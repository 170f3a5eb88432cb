"""Groups of related documents: each group is packed like one document.

- ``Units``: the units that a strategy packs in place of documents; ``Units.expand`` turns its
  samples of units into samples of documents.
- ``joined_segments``: marks segments that continue the group of the previous segment.
- ``read_groups``: group ids of a dataset's documents.

A strategy only needs lengths: it packs the lengths of units. Six documents in two groups (-1: in
no group), in buckets of 8 tokens:

    lengths    2 3 4 4 3 9      group ids    7 7 -1 5 7 5
    units      0 1 4 | 2 | 3 | 5             # 8, 4, 4 and 9 tokens; group 5 has 13, so it is cut
    expand: segment [0, 8) of unit 0         # -> documents 0, 1 and 4
    joined: 1 and 4 continue the group of the previous segment

A group longer than the largest bucket is cut at document boundaries, each unit as long as
possible. A document that is too long alone is one unit, which the strategy cuts. Documents of a
group keep their order; other documents may lie between them in the dataset.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megapack.errors import ConfigError, DataError
from megapack.packing.metrics import Lengths, array_checksum
from megapack.storage import IndexedDataset
from megapack.storage.index_file import GROUPS
from megapack.storage.tokens import open_npy

Ids = NDArray[np.int64]

# Metrics of an index with groups. They count groups with at least two nonempty documents.
GROUP_COUNTS = ("num_groups", "num_cut_groups", "num_groups_longer_than_largest_bucket")


def read_groups(groups: str, prefix: str, num_documents: int) -> Ids:
    """Return the group ids of all documents of a dataset. ``groups`` is the path of a .npy, or
    ``auto``: the dataset ``<prefix>.groups`` with one number per document (``tokenize
    --group-key``). Raises the errors of ``check_groups``, and FormatError or OSError if the file
    cannot be read."""
    if groups != "auto":
        return check_groups(np.array(open_npy(groups)), num_documents, groups)
    name = prefix + GROUPS
    if not IndexedDataset.exists(name):
        raise ConfigError(
            f"{name} does not exist: tokenize with --group-key, or give --groups a .npy of ids"
        )
    dataset = IndexedDataset(name)
    if dataset.num_tokens != dataset.num_documents:
        raise ConfigError(
            f"{name} has {dataset.num_tokens:,} numbers in {dataset.num_documents:,} documents; "
            "group ids are one number per document"
        )
    return check_groups(np.array(dataset.tokens), num_documents, name)


def check_groups(ids: ArrayLike, num_documents: int, name: str = "groups") -> Ids:
    """Return group ids as int64. Raises ConfigError if there is not one integer per document,
    DataError for ids above 2^63 - 1."""
    array = np.asarray(ids)
    if array.shape != (num_documents,) or (array.size and array.dtype.kind not in "iu"):
        raise ConfigError(
            f"{name} has dtype {array.dtype} and shape {array.shape}; it must be "
            f"({num_documents},) integers, the group of each document, negative for none"
        )
    if array.dtype == np.uint64 and array.max(initial=0) > np.iinfo(np.int64).max:
        raise DataError(f"{name} has id {array.max()}; the largest is 2^63 - 1")
    return array.astype(np.int64)


@dataclass(frozen=True, kw_only=True, eq=False)
class Units:
    """Documents in the order of their groups, divided into the units that a strategy packs."""

    documents: Ids  # (num_documents,), unit after unit
    ends: Ids  # (num_documents,), tokens up to the end of each of these documents
    begins: Ids  # (num_units,), tokens before each unit
    lengths: Ids  # (num_units,), tokens of each unit: input of the strategy
    whole: NDArray[np.bool_]  # (num_units,), the unit is a whole group of nonempty documents
    counts: Mapping[str, int]  # the GROUP_COUNTS that are known before packing

    @classmethod
    def of(cls, ids: Ids, lengths: Lengths, capacity: int) -> Units:
        """Divide documents into units: ids and lengths (num_documents,), capacity in tokens."""
        # A group's number is that of its first document, so groups keep the dataset's order.
        number = np.arange(len(ids))
        _, first, inverse = np.unique(ids, return_index=True, return_inverse=True)
        number = np.where(ids < 0, number, first[inverse.reshape(-1)] if len(ids) else number)
        documents = np.argsort(number, kind="stable")
        number, sizes = number[documents], lengths[documents].astype(np.int64)
        ends = np.cumsum(sizes)
        group_begins = np.flatnonzero(np.diff(number, prepend=-1))
        group_ends = np.append(group_begins, len(sizes))[1:]
        group_tokens, num_nonempty, tokens = sizes, sizes, sizes
        if len(sizes):  # reduceat refuses empty arrays
            group_tokens = np.add.reduceat(sizes, group_begins)
            num_nonempty = np.add.reduceat(sizes > 0, group_begins, dtype=np.int64)
        counted = num_nonempty > 1
        longer = counted & (group_tokens > capacity)
        bounds = np.stack([group_begins, group_ends], axis=1)[longer].tolist()
        cuts = [_cut(ends, begin, end, capacity) for begin, end in bounds]
        first_of_unit = np.sort(np.concatenate([group_begins, *cuts])).astype(np.int64)
        if len(sizes):
            tokens = np.add.reduceat(sizes, first_of_unit)
        whole = counted & (group_tokens <= capacity)
        return cls(
            documents=documents,
            ends=ends,
            begins=ends[first_of_unit] - sizes[first_of_unit],
            lengths=tokens,
            whole=np.isin(first_of_unit, group_begins[whole]),
            counts={
                "num_groups": int(counted.sum()),
                "num_groups_longer_than_largest_bucket": int(longer.sum()),
            },
        )

    def expand(
        self, arrays: Mapping[str, Any], lengths: Lengths
    ) -> tuple[dict[str, Any], dict[str, int]]:
        """Replace each segment of a unit by the segments of its documents. ``lengths``
        (num_documents,) are true lengths; those of units may be rounded (``alignment``). Returns
        the arrays with documents, and ``GROUP_COUNTS``."""
        unit = arrays["segment_document"].astype(np.int64)
        begin = arrays["segment_begin"].astype(np.int64)
        start = self.begins[unit] + begin  # positions in the sequence of all documents
        stop = start + arrays["segment_length"]
        # The documents of a segment are counts[i] consecutive ones from first[i] on.
        first = np.searchsorted(self.ends, start, side="right")
        counts = np.searchsorted(self.ends, stop, side="left") - first + 1
        segment = np.repeat(np.arange(len(unit)), counts)
        position = np.arange(len(segment)) - np.repeat(np.cumsum(counts) - counts - first, counts)
        tokens_before = np.append(0, self.ends)[position]
        low = np.maximum(start[segment], tokens_before)
        document_end = tokens_before + lengths[self.documents[position]]
        length = np.minimum(stop[segment], document_end) - low
        kept = length > 0  # drop empty documents and segments that lie in the rounding
        begin_in_document = (low - tokens_before)[kept]
        wide = begin_in_document.max(initial=0) > np.iinfo(np.int32).max
        offsets = np.append(0, np.cumsum(np.bincount(segment[kept], minlength=len(unit))))
        whole = self.whole[unit] & (begin == 0) & (stop - start == self.lengths[unit])
        num_whole = np.count_nonzero(np.bincount(unit[whole]))
        expanded = {
            **arrays,
            "sample_segment_offsets": offsets[arrays["sample_segment_offsets"]],
            "segment_document": self.documents[position[kept]],
            "segment_begin": begin_in_document.astype(np.int64 if wide else np.int32),
            "segment_length": length[kept].astype(np.int32),
        }
        num_cut = self.counts["num_groups"] - int(num_whole)
        return expanded, {**self.counts, "num_cut_groups": num_cut}


def joined_segments(ids: Ids, sample_segment_offsets: Ids, documents: Ids) -> NDArray[np.uint8]:
    """Return uint8 (num_segments,): 1 if the previous segment of the sample has the same group."""
    group = ids[documents]
    joined: NDArray[np.bool_] = (np.diff(group, prepend=-1) == 0) & (group >= 0)
    first = sample_segment_offsets[:-1]
    joined[first[first < len(joined)]] = False
    return joined.astype(np.uint8)


def _cut(ends: Ids, low: int, high: int, capacity: int) -> list[int]:
    """Return where the second and later units begin in documents [low, high) of a group. Each unit
    takes documents as long as they fit in the capacity, at least one."""
    cuts: list[int] = []
    begin = low
    while True:
        limit = (int(ends[begin - 1]) if begin else 0) + capacity
        begin = max(begin + 1, low + int(np.searchsorted(ends[low:high], limit, side="right")))
        if begin >= high:
            return cuts
        cuts.append(begin)


def groups_checksum(ids: Ids) -> str:
    """Return the checksum of group ids that an index records."""
    return array_checksum(np.ascontiguousarray(ids, "<i8"))
