"""Asks the system for what coming micro batches will read, instead of waiting at every page of it.

Which samples come is known, so their documents' pages can be on their way from the disk, many at a
time, while earlier batches are made. And only they: left to itself a system reads 128 KiB or more
around every page that is missing. Advice changes when bytes are read and nothing else.
"""

from __future__ import annotations

import resource
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice

from megapack import _core
from megapack.data.batch import MicroBatch
from megapack.data.dataset import PackedDataset

__all__ = ["read_indices", "reading_ahead"]

_CHUNK_BYTES = 64 << 20
_WHOSE = getattr(resource, "RUSAGE_THREAD", resource.RUSAGE_SELF)  # only Linux counts per thread
# A request for what is in memory already costs about a microsecond per document. So after this many
# micro batches for which no disk was read none is asked for, until one has to wait.
_QUIET = 256


def reading_ahead(
    micro_batches: Iterable[MicroBatch], dataset: PackedDataset, depth: int
) -> Iterator[MicroBatch]:
    """The micro batches; before each is given, the documents of the next ``depth`` are asked for.

    Between two of them the caller is to gather the first, in the thread that iterates: whether a
    disk was read meanwhile decides whether asking goes on.
    """
    dataset.read_exactly()
    coming: deque[MicroBatch] = deque()
    items = iter(micro_batches)
    quiet = reach = 0
    while True:
        before = _reads()
        for item in islice(items, reach + 1 - len(coming)):
            coming.append(item)
            if quiet < _QUIET:
                dataset.will_need(item.sample_ids)
        if not coming:
            return
        yield coming.popleft()
        was_read = _reads() > before
        if was_read and quiet >= _QUIET:
            for item in coming:
                dataset.will_need(item.sample_ids)
        quiet = 0 if was_read else quiet + 1
        reach = min(depth, 2 * reach + 1)  # the first batch is not kept waiting for later ones


def _reads() -> int:
    """Grows with what this thread has read from disks: pages it waited for, blocks it asked for."""
    usage = resource.getrusage(_WHOSE)
    return usage.ru_majflt + usage.ru_inblock


def read_indices(dataset: PackedDataset) -> Iterator[None]:
    """Have the indices read into memory, in order, a chunk per ``next``.

    A step looks up thousands of segments at random; from a cold disk that is one read each, and the
    whole index read in order costs less than a few steps of it. Shards that are not open are left.
    """
    shards = dataset.samples.shards
    for shard in filter(shards.is_open, range(len(shards))):
        documents = dataset.documents(shard)
        for array in (*shards.index(shard).segment_arrays(), documents.index_bytes):
            for begin in range(0, array.nbytes, _CHUNK_BYTES):
                _core.will_need(array, begin, _CHUNK_BYTES)
                yield
