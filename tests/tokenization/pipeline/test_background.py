"""A generator that runs ahead gives what it would give, and ends with its consumer."""

from __future__ import annotations

import gc
import itertools
import threading
from collections.abc import Generator

import pytest

from megapack.tokenization.pipeline.worker import ahead


def counting(closed: list[bool], fail_at: int = 1000) -> Generator[int, None, None]:
    try:
        for i in itertools.count():
            if i == fail_at:
                raise OSError("the disk")
            yield i
    finally:
        closed.append(True)


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("megapack-ahead")]


def test_items_come_in_order_and_an_error_comes_behind_them() -> None:
    closed: list[bool] = []
    seen = []
    with pytest.raises(OSError, match="the disk"):
        for item in ahead(ahead(counting(closed, fail_at=50))):
            seen.append(item)
    assert seen == list(range(50)) and closed and not threads()


def test_a_consumer_that_stops_ends_it() -> None:
    closed: list[bool] = []
    items = ahead(counting(closed))
    assert next(items) == 0 and threads()
    items.close()
    assert closed and not threads()


def test_garbage_in_a_cycle_ends_it() -> None:
    """A failed build is one: its traceback holds the frames that hold the generator."""
    closed: list[bool] = []
    items = ahead(counting(closed))
    next(items)
    cycle: list[object] = [items]
    cycle.append(cycle)
    del items, cycle
    gc.collect()
    assert closed and not threads()
