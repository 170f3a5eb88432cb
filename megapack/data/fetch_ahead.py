"""Has what coming micro batches read of object stores fetched before they are gathered.

A store answers after tens of milliseconds, whatever it is asked for. So some tens of megabytes are
always on their way; and since it is known what they are, what lies side by side in a file is asked
for as one range although it belongs to several micro batches.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice

import numpy as np

from megapack.data.batch import MicroBatch
from megapack.data.remote_reads import RemoteReads

__all__ = ["fetching_ahead"]

_LEAST_BYTES = 1 << 14  # that a micro batch counts, also one that needs nothing from far away


def fetching_ahead(micro_batches: Iterable[MicroBatch], reads: RemoteReads) -> Iterator[MicroBatch]:
    """The micro batches; before each is given, what the next ones need is on its way.

    At first one is asked for, then two, four, ...: it is not kept waiting for later ones.
    """
    items = iter(micro_batches)
    coming: deque[tuple[MicroBatch, float]] = deque()  # and the bytes that it needs
    ahead, num_asked, half = 0.0, 1, reads.ahead_bytes / 2
    while True:
        if ahead <= half:
            group = list(islice(items, num_asked))
            if group:
                ids = np.concatenate([np.asarray(item.sample_ids, np.int64) for item in group])
                each = max(reads.want(ids) / len(group), _LEAST_BYTES)
                coming.extend((item, each) for item in group)
                ahead += each * len(group)
                num_asked = max(1, min(2 * num_asked, int(half / each)))
        if not coming:
            return
        item, num_bytes = coming.popleft()
        yield item
        ahead -= num_bytes
