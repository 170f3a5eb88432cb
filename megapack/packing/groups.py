"""Documents that belong together, packed as if a group of them was one document.

- ``Units``: what a strategy packs instead of documents; ``Units.expand``: its samples in documents.
- ``joined_segments``: which segments continue the group of the segment before them.
- ``read_groups``: group ids of a dataset's documents.

A strategy is given lengths, so lengths of groups will do: it makes segments of groups, and what
documents lie in them follows. Six documents in two groups and on their own, in buckets of 8 tokens:

    lengths    2 3 4 4 3 9      group ids    7 7 -1 5 7 5
    units      0 1 4 | 2 | 3 | 5             # 8, 4, 4 and 9 tokens; group 5 has 13, so it is cut
    expand: segment [0, 8) of unit 0         # -> documents 0, 1 and 4
    joined: 1 and 4 continue the group of the segment before them

A group longer than the largest bucket is cut at borders of documents, as late as they allow; a
document that is longer itself is a unit alone, which the strategy cuts. Documents of a group need
not stand together in the dataset; their order is the dataset's.
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

# What an index of groups counts beside the other metrics; only groups of two documents and more,
# empty ones left out.
GROUP_COUNTS = ("num_groups", "num_cut_groups", "num_groups_longer_than_largest_bucket")


def read_groups(groups: str, prefix: str, num_documents: int) -> Ids:
    """Group ids of all documents of a dataset.

    Args:
        groups: path of a .npy; ``auto``: the dataset ``<prefix>.groups`` of one number per document
            (``tokenize --group-key``).
        prefix: of the documents.

    Raises:
        ConfigError: there is no such dataset, or not one id for each document.
        DataError: an id is above 2^63 - 1.
        FormatError, OSError: a file is damaged or cannot be read.
    """
    if groups != "auto":
        return check_groups(np.array(open_npy(groups)), num_documents, groups)
    name = prefix + GROUPS
    if not IndexedDataset.exists(name):
        raise ConfigError(
            f"there is no {name}: tokenize with --group-key, or give --groups a .npy of ids"
        )
    dataset = IndexedDataset(name)
    if dataset.num_tokens != dataset.num_documents:
        raise ConfigError(
            f"{name} has {dataset.num_tokens:,} numbers in {dataset.num_documents:,} documents; "
            "group ids are one number for each"
        )
    return check_groups(np.array(dataset.tokens), num_documents, name)


def check_groups(ids: ArrayLike, num_documents: int, name: str = "groups") -> Ids:
    """Group ids as int64. Raises ConfigError: not one whole number per document; DataError: one
    is above 2^63 - 1."""
    found = np.asarray(ids)
    if found.shape != (num_documents,) or (found.size and found.dtype.kind not in "iu"):
        raise ConfigError(
            f"{name} is of dtype {found.dtype} and shape {found.shape}; it must be "
            f"({num_documents},) whole numbers, the group of every document, negative for those on "
            "their own"
        )
    if found.dtype == np.uint64 and found.max(initial=0) > np.iinfo(np.int64).max:
        raise DataError(f"{name} has id {found.max()}; the largest is 2^63 - 1")
    return found.astype(np.int64)


@dataclass(frozen=True, kw_only=True, eq=False)
class Units:
    """Documents in the order of their groups, and where units of them begin.

    Attributes:
        documents: int64 (num_documents,), unit after unit.
        ends: int64 (num_documents,), tokens of them up to the end of each.
        begins: int64 (num_units,), tokens before each unit.
        lengths: int64 (num_units,), tokens; what a strategy packs.
        whole: bool (num_units,), the unit is all of a group that counts.
        counts: of ``GROUP_COUNTS`` what is known before packing.
    """

    documents: Ids
    ends: Ids
    begins: Ids
    lengths: Ids
    whole: NDArray[np.bool_]
    counts: Mapping[str, int]

    @classmethod
    def of(cls, ids: Ids, lengths: Lengths, capacity: int) -> Units:
        """Units of documents of these lengths; ``capacity`` is the largest bucket's.

        Args:
            ids: (num_documents,) the group of each; negative: the document is on its own.
            lengths: (num_documents,) tokens.
        """
        # A group is numbered by its first document, so groups stand as these do in the dataset.
        number = np.arange(len(ids))
        _, first, which = np.unique(ids, return_index=True, return_inverse=True)
        number = np.where(ids < 0, number, first[which.reshape(-1)] if len(ids) else number)
        documents = np.argsort(number, kind="stable")
        number, sizes = number[documents], lengths[documents].astype(np.int64)
        ends = np.cumsum(sizes)
        begins_group = np.flatnonzero(np.diff(number, prepend=-1))
        of_group = np.add.reduceat(sizes, begins_group) if len(sizes) else sizes
        filled = np.add.reduceat(sizes > 0, begins_group, dtype=np.int64) if len(sizes) else sizes
        counted, longer = filled > 1, of_group > capacity
        group_ends = np.append(begins_group[1:], len(sizes))
        cuts = [
            _cut(ends, low, high, capacity)
            for low, high in zip(
                begins_group[longer & counted].tolist(),
                group_ends[longer & counted].tolist(),
                strict=True,
            )
        ]
        first_of_unit = np.sort(np.concatenate([begins_group, *cuts])).astype(np.int64)
        tokens = np.add.reduceat(sizes, first_of_unit) if len(sizes) else sizes
        return cls(
            documents=documents,
            ends=ends,
            begins=ends[first_of_unit] - sizes[first_of_unit],
            lengths=tokens,
            whole=np.isin(first_of_unit, begins_group[counted & ~longer]),
            counts={
                "num_groups": int(counted.sum()),
                "num_groups_longer_than_largest_bucket": int((longer & counted).sum()),
            },
        )

    def expand(
        self, arrays: Mapping[str, Any], lengths: Lengths
    ) -> tuple[dict[str, Any], dict[str, int]]:
        """Samples in documents: those that a strategy made of ``self.lengths``, with the documents
        of every segment in its place.

        Args:
            arrays: of the strategy.
            lengths: the documents' own, where units are of rounded ones (``pack``'s alignment).

        Returns:
            The arrays, and ``GROUP_COUNTS``.
        """
        unit = arrays["segment_document"].astype(np.int64)
        begin = arrays["segment_begin"].astype(np.int64)
        start = self.begins[unit] + begin
        stop = start + arrays["segment_length"]
        first = np.searchsorted(self.ends, start, side="right")
        counts = np.searchsorted(self.ends, stop, side="left") - first + 1
        owner = np.repeat(np.arange(len(unit)), counts)
        place = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts - first, counts)
        before = np.append(0, self.ends)[place]  # tokens before each document
        low = np.maximum(start[owner], before)
        length = np.minimum(stop[owner], before + lengths[self.documents[place]]) - low
        kept = length > 0  # the others are empty documents, and what rounding added
        owner, place, low, before = owner[kept], place[kept], low[kept], before[kept]
        offsets = np.append(0, np.cumsum(np.bincount(owner, minlength=len(unit))))
        within = low - before
        wide = within.max(initial=0) > np.iinfo(np.int32).max
        whole = self.whole[unit] & (begin == 0) & (stop - start == self.lengths[unit])
        num_whole = np.count_nonzero(np.bincount(unit[whole]))
        expanded = {
            **arrays,
            "sample_segment_offsets": offsets[arrays["sample_segment_offsets"]],
            "segment_document": self.documents[place],
            "segment_begin": within.astype(np.int64 if wide else np.int32),
            "segment_length": length[kept].astype(np.int32),
        }
        return expanded, {
            **self.counts,
            "num_cut_groups": self.counts["num_groups"] - int(num_whole),
        }


def joined_segments(ids: Ids, sample_segment_offsets: Ids, documents: Ids) -> NDArray[np.uint8]:
    """Return 1 for every segment whose document is of the same group as that of the segment before
    it in its sample, else 0; uint8 (num_segments,).

    Args:
        ids: (num_documents,) the group of each; negative: the document is on its own.
        sample_segment_offsets: (num_samples + 1,) the first segment of each sample.
        documents: (num_segments,) the document of each segment.
    """
    group = ids[documents]
    joined: NDArray[np.bool_] = (np.diff(group, prepend=-1) == 0) & (group >= 0)
    first = sample_segment_offsets[:-1]
    joined[first[first < len(joined)]] = False
    return joined.astype(np.uint8)


def _cut(ends: Ids, low: int, high: int, capacity: int) -> list[int]:
    """Where units begin in documents [low, high) of a group, but the first: as late as the next
    document would exceed the capacity."""
    found: list[int] = []
    begin = low
    while True:
        room = (int(ends[begin - 1]) if begin else 0) + capacity
        begin = max(begin + 1, low + int(np.searchsorted(ends[low:high], room, side="right")))
        if begin >= high:
            return found
        found.append(begin)


def groups_checksum(ids: Ids) -> str:
    """Checksum of group ids, by which an index knows its groups."""
    return array_checksum(np.ascontiguousarray(ids, "<i8"))
