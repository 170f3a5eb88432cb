"""Documents that are masked from a step on (decontamination, takedowns), listed in files.

- ``Exclusions``: the listed documents of every source, and which of them a step masks.
- ``read_exclusions``: reads the lists of all stages.

    stages:
    - {from_step: 1200, exclude: {web: takedowns.npy}}      # list 1
    - {from_step: 5000, exclude: {web: more.txt}}           # list 2; both are in force from here on
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import xxhash
from numpy.typing import NDArray

from megapack.data.blend import Stage
from megapack.data.program import numbered
from megapack.data.steps import StepView
from megapack.errors import ConfigError
from megapack.storage.dataset import read_documents

Ids = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Exclusions:
    """Listed documents of all sources.

    The segments of a masked document become padding of their sample. The samples of a step and the
    shapes stay the same. Lists add up over the stages of a run.

    Attributes:
        documents: for every source, all documents of any list, int64, ascending.
        first_lists: number of the first list with each of these documents, int64; list n (from 1)
            belongs to the n-th stage with a list.
    """

    documents: tuple[Ids, ...]
    first_lists: tuple[Ids, ...]

    @cached_property
    def sources(self) -> list[int]:
        return [source for source, documents in enumerate(self.documents) if len(documents)]

    def masks(self, source: int, documents: Ids, view: StepView) -> NDArray[np.bool_]:
        """Return for each document of a source whether a list in force excludes it."""
        listed = self.documents[source]
        if not len(listed):
            return np.zeros(len(documents), np.bool_)
        i = np.minimum(np.searchsorted(listed, documents), len(listed) - 1)
        is_listed = listed[i] == documents
        masked: NDArray[np.bool_] = is_listed & view.excludes(self.first_lists[source][i])
        return masked

    def of_documents(self, source: int, begin: int, end: int) -> tuple[Ids, Ids]:
        """Return the listed documents among [begin, end) of a source, relative to ``begin``,
        and the first list of each."""
        low, high = np.searchsorted(self.documents[source], [begin, end]).tolist()
        return self.documents[source][low:high] - begin, self.first_lists[source][low:high]

    def digests(self, view: StepView, names: Sequence[str]) -> dict[str, str]:
        """Return source name -> number of documents that a step masks, and a digest of the ids."""
        result = {}
        for source in self.sources:
            documents = self.documents[source]
            masked = np.ascontiguousarray(documents[self.masks(source, documents, view)], "<i8")
            if len(masked):
                digest = xxhash.xxh3_64_hexdigest(masked.tobytes())
                result[names[source]] = f"{len(masked)} documents, xxh3 {digest}"
        return result


def read_exclusions(
    stages: Sequence[Stage], names: Sequence[str], num_documents: Sequence[int]
) -> Exclusions:
    """Read the exclusion lists of all stages, in order. Raises ConfigError if a source or a
    document does not exist, FormatError or OSError if a file is not such a list or unreadable."""
    files_of_source: dict[int, list[tuple[Ids, int]]] = {}
    for number, stage in enumerate((s for s in stages if s.exclude is not None), 1):
        files = numbered(stage.exclude or {}, names, f"{stage} excludes documents of")
        for source, path in files.items():
            listed = read_documents(path)
            if len(listed) and listed[-1] >= num_documents[source]:
                raise ConfigError(
                    f"{stage}: {path} excludes document {listed[-1]} of {names[source]!r}, which "
                    f"has {num_documents[source]} (counted from 0); is it another dataset's list?"
                )
            files_of_source.setdefault(source, []).append((listed, number))
    empty = np.zeros(0, np.int64)
    documents, first_lists = [empty] * len(names), [empty] * len(names)
    for source, files_and_lists in files_of_source.items():
        contents, numbers = zip(*files_and_lists, strict=True)
        documents[source], first = np.unique(np.concatenate(contents), return_index=True)
        of_each = np.repeat(numbers, [len(listed) for listed in contents])
        first_lists[source] = np.ascontiguousarray(of_each[first], np.int64)
    return Exclusions(tuple(documents), tuple(first_lists))
