"""A generator run ahead of its consumer in a thread of its own."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

__all__ = ["ahead"]

T = TypeVar("T")


def ahead(items: Generator[T, None, None], *, depth: int = 2) -> Generator[T, None, None]:
    """The same items in the same order, made while the consumer works on earlier ones.

    Reading, encoding and writing spend their time outside of the interpreter's lock, so that three
    of these in a row keep a core busy while another waits for the disk.

    Closing it, as an error in the consumer does, closes ``items`` as well.

    Args:
        depth: finished items that may wait; memory follows it.
    """
    with ThreadPoolExecutor(1, "megapack-ahead") as pool:
        made = deque(pool.submit(_next, items) for _ in range(depth + 1))
        try:
            while item := made.popleft().result():
                made.append(pool.submit(_next, items))
                yield item[0]
        finally:
            for future in made:
                future.cancel()
            pool.submit(items.close).result()  # in the thread that runs it


def _next(items: Generator[T, None, None]) -> tuple[T] | None:
    """None at the end."""
    for item in items:
        return (item,)
    return None
