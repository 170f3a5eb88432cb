"""Documents that are masked from a step on (decontamination, takedowns), listed in files.

A list in force takes the segments of its documents out of the batch: a sample is then what it would
be had they never been packed, and their room is padding of it. Which samples a step draws stays as
it is, and so do shapes. Lists add up over the stages of a run.

Ids of samples know nothing of lists: beside them goes ``num_lists``, how many lists are in force at
a step, to whoever gathers samples, counts their labels or weighs their attention.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import xxhash
from numpy.typing import NDArray

from megapack.data.program import Stage
from megapack.errors import ConfigError
from megapack.storage.dataset import read_documents

__all__ = ["Exclusions", "read_exclusions"]

Ids = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Exclusions:
    """The lists of a run.

    Attributes:
        num_lists: stages that have some; list n is that of the n-th of them.
        documents: of every source, int64, ascending: all that some list has.
        lists: beside them, int64: the first list that has each, counted from 1.
    """

    num_lists: int
    documents: tuple[Ids, ...]
    lists: tuple[Ids, ...]

    @cached_property
    def sources(self) -> list[int]:
        """Numbers of those sources of which a list has documents."""
        return [source for source, own in enumerate(self.documents) if len(own)]

    def masks(self, source: int, documents: Ids, num_lists: int) -> NDArray[np.bool_]:
        """Whether each of some documents of a source is masked by the first ``num_lists`` lists."""
        known = self.documents[source]
        if not len(known):
            return np.zeros(len(documents), np.bool_)
        at = np.minimum(np.searchsorted(known, documents), len(known) - 1)
        found: NDArray[np.bool_] = (known[at] == documents) & (self.lists[source][at] <= num_lists)
        return found

    def of_documents(self, source: int, begin: int, end: int) -> tuple[Ids, Ids]:
        """Those of the documents [begin, end) of a source that are listed, counted from ``begin``
        on, and the first list that has each.
        """
        low, high = np.searchsorted(self.documents[source], [begin, end]).tolist()
        return self.documents[source][low:high] - begin, self.lists[source][low:high]

    def first_list(self, source: int, document: int) -> int | None:
        """The first list that has a document of a source; None: it is in none."""
        at = int(np.searchsorted(self.documents[source], document))
        known = self.documents[source][at : at + 1]
        return int(self.lists[source][at]) if known.tolist() == [document] else None

    def digests(self, num_lists: int, names: Sequence[str]) -> dict[str, str]:
        """Source name -> how many documents the first lists mask, and a digest of their ids."""
        result = {}
        for source in self.sources:
            own = self.documents[source][self.lists[source] <= num_lists]
            masked = np.ascontiguousarray(own, "<i8")
            if len(masked):
                digest = xxhash.xxh3_64_hexdigest(masked.tobytes())
                result[names[source]] = f"{len(masked)} documents, xxh3 {digest}"
        return result


def read_exclusions(
    stages: Sequence[Stage], names: Sequence[str], num_documents: Sequence[int]
) -> Exclusions:
    """The lists of all stages.

    Args:
        stages: of the run, in order.
        names, num_documents: of the sources.

    Raises:
        ConfigError: a source that does not exist, or a document that it does not have.
        FormatError, OSError: a file that is no list of documents, or cannot be read.
    """
    times = Counter(names)
    parts: dict[int, list[tuple[Ids, int]]] = {}
    num_lists = 0
    for stage in stages:
        if stage.exclude is None:
            continue
        num_lists += 1
        for name, path in stage.exclude.items():
            if times[name] != 1:
                there = ", ".join(names[:20])
                raise ConfigError(f"{stage} excludes documents of {name!r}; sources are {there}")
            source = names.index(name)
            listed = read_documents(path)
            if len(listed) and listed[-1] >= num_documents[source]:
                raise ConfigError(
                    f"{stage}: {path} excludes document {listed[-1]} of {name!r}, which has "
                    f"{num_documents[source]} (counted from 0); is it a list of another dataset?"
                )
            parts.setdefault(source, []).append((listed, num_lists))
    none = np.zeros(0, np.int64)
    documents, lists = [none] * len(names), [none] * len(names)
    for source, own in parts.items():
        documents[source], lists[source] = _joined(own)
    return Exclusions(num_lists, tuple(documents), tuple(lists))


def _joined(parts: Sequence[tuple[Ids, int]]) -> tuple[Ids, Ids]:
    """Documents of all lists of a source, ascending, and the first list that has each."""
    every = np.concatenate([documents for documents, _ in parts])
    listed = np.repeat([number for _, number in parts], [len(documents) for documents, _ in parts])
    documents, first = np.unique(every, return_index=True)  # the first of equals: lists ascend
    return documents, np.ascontiguousarray(listed[first], np.int64)
