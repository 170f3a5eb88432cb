"""Has what coming micro batches read of object stores fetched before they are gathered.

A store answers after tens of milliseconds, whatever it is asked for. So some tens of megabytes are
always here or on their way; and since it is known what they are, what lies side by side in a file
is asked for as one range although it belongs to several micro batches. They are asked for in
portions, so that the line does not rest in between.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice

import numpy as np

from megapack.data.batch import MicroBatch
from megapack.data.remote_reads import RemoteReads

__all__ = ["fetching_ahead"]

_PORTIONS = 8
_IN_TIME = 0.25  # of what is taken, where nobody waited for it: so much more is asked for
_LEAST_BYTES = 1 << 14  # that a micro batch counts, also one that needs nothing from far away


def fetching_ahead(micro_batches: Iterable[MicroBatch], reads: RemoteReads) -> Iterator[MicroBatch]:
    """The micro batches; before each is given, what the next ones need is on its way.

    It begins with one portion, and adds to it what is taken, a quarter of it where it was there in
    time: whatever is on its way shares the line, never quite fairly, and what is needed next shall
    not wait for what is needed last. Nor for shards that later ones have opened.
    """
    items = iter(micro_batches)
    coming: deque[tuple[MicroBatch, float]] = deque()  # and the bytes that it needs
    portion = reads.ahead_bytes / _PORTIONS
    ahead, room, num_asked = 0.0, portion, 1
    while True:
        while ahead <= room and (group := list(islice(items, num_asked))):
            num_open = reads.num_open
            ids = np.concatenate([np.asarray(item.sample_ids, np.int64) for item in group])
            each = max(reads.want(ids) / len(group), _LEAST_BYTES)
            coming.extend((item, each) for item in group)
            ahead += each * len(group)
            most = max(1, int(portion / each))
            if reads.num_open > num_open:
                num_asked = min(2 * num_asked, most)
                break
            num_asked = most
        if not coming:
            return
        item, num_bytes = coming.popleft()
        growth = num_bytes * (_IN_TIME if reads.are_here(item.sample_ids) else 1)
        yield item
        ahead -= num_bytes
        room = min(room + growth, (_PORTIONS - 1) * portion)
