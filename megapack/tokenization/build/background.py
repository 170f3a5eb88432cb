"""A generator run ahead of its consumer in a thread of its own."""

from __future__ import annotations

import queue
import threading
from collections.abc import Generator
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
    waiting: queue.Queue[tuple[bool, T | BaseException | None]] = queue.Queue(depth)
    stopped = threading.Event()

    def produce() -> None:
        try:
            for item in items:
                if not _put(waiting, (True, item), stopped):
                    return
            _put(waiting, (False, None), stopped)
        except BaseException as error:  # raised again in the consumer, where it can be handled
            _put(waiting, (False, error), stopped)
        finally:
            items.close()  # here, in the thread that runs it

    thread = threading.Thread(target=produce, name="megapack-ahead", daemon=True)
    thread.start()
    try:
        while True:
            more, item = waiting.get()
            if not more:
                if isinstance(item, BaseException):
                    raise item
                return
            yield item  # type: ignore[misc]
    finally:
        stopped.set()
        thread.join()


def _put(waiting: queue.Queue[T], item: T, stopped: threading.Event) -> bool:
    """Whether the item was taken before the consumer went away."""
    while not stopped.is_set():
        try:
            waiting.put(item, timeout=0.1)
        except queue.Full:
            continue
        return True
    return False
