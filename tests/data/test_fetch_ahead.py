"""How much of coming micro batches is asked for ahead, and in which order."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from megapack.data.loader import fetching_ahead

EACH = 1 << 20  # bytes that a micro batch needs
MOST = 64 * EACH
PORTION = MOST // 8


class Item:
    """Of a micro batch, what fetching ahead looks at."""

    def __init__(self, number: int) -> None:
        self.sample_ids = np.array([number])


class Reads:
    """Of a store's reads, what they are asked; it always or never has it in time."""

    ahead_bytes, num_open = MOST, 1

    def __init__(self, in_time: bool) -> None:
        self.in_time, self.asked, self.times_asked = in_time, 0, 0

    def want(self, sample_ids: NDArray[np.int64]) -> int:
        assert sample_ids.tolist() == list(range(self.asked, self.asked + len(sample_ids)))
        self.asked += len(sample_ids)
        self.times_asked += 1
        return EACH * len(sample_ids)

    def are_here(self, _sample_ids: NDArray[np.int64]) -> bool:
        return self.in_time


def asked_ahead(in_time: bool, count: int) -> list[int]:
    """Bytes asked for ahead of every micro batch when it is given."""
    reads: Any = Reads(in_time)
    items: Any = [Item(number) for number in range(count)]
    found = []
    for number, item in enumerate(fetching_ahead(items, reads)):
        assert item is items[number]
        found.append(EACH * (reads.asked - number))
    assert len(found) == reads.asked == count
    # By the portion: what lies side by side in a file is one request.
    assert reads.times_asked <= EACH * count / PORTION + 2
    return found


@pytest.mark.parametrize(("in_time", "share"), [(True, 0.25), (False, 1.0)])
def test_it_grows_by_what_is_taken_and_slowly_where_nobody_waits(
    in_time: bool, share: float
) -> None:
    """Too much on its way makes the request that is needed next wait for those after it; too
    little leaves the line idle. A portion or two lie between asking and the room for it."""
    found = asked_ahead(in_time, 1000)[:900]  # the end of a run has nothing more to ask for
    for number, ahead in enumerate(found):
        room = min(PORTION + share * EACH * number, 7 * PORTION)
        assert room - PORTION <= ahead <= room + 2 * PORTION
    assert found[0] <= 2 * PORTION and max(found) <= MOST + PORTION


def test_what_is_never_in_time_is_asked_for_sooner() -> None:
    """After a portion was taken, what is waited for has four times the growth."""
    slow, fast = asked_ahead(True, 200), asked_ahead(False, 200)
    assert all(a <= b for a, b in zip(slow, fast, strict=True)) and slow[40] + MOST // 4 < fast[40]
