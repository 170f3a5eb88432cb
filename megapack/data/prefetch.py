"""Batches ahead of time: a thread that prepares them, a CUDA stream that carries them over.

The gather holds no GIL, so a thread of the training process prepares batches while the trainer runs
Python; nothing is pickled and nothing is copied between processes.
"""

from __future__ import annotations

import atexit
import queue
import threading
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, Generic, TypeVar

import torch

from megapack.data.batch import Batch

__all__ = ["ThreadPrefetcher", "to_device"]

T = TypeVar("T")

_POLL_SECONDS = 0.5  # between looks of a thread that waits for room whether anybody is left


class ThreadPrefetcher(Iterator[T], Generic[T]):
    """Runs an iterable in a thread, at most ``depth`` items ahead.

    An exception of the iterable is raised where its item would have been. ``close`` (also called
    at the end and on an exception) stops the thread and joins it; a thread whose iterator is
    collected stops by itself, since the collector may run in a thread that it waits for.
    """

    def __init__(self, items: Iterable[T], depth: int) -> None:
        self._queue: queue.Queue[tuple[bool, T | BaseException | None]] = queue.Queue(depth)
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=_produce, args=(items, self._queue, self._stop), name="megapack-prefetch"
        )
        self._thread.daemon = True  # an interpreter that exits does not wait for batches
        self._thread.start()
        _running.add(self)

    def __next__(self) -> T:
        if self._stop.is_set():
            raise StopIteration
        is_item, value = self._queue.get()
        if is_item:
            return value  # type: ignore[return-value]
        self.close()
        if value is None:
            raise StopIteration
        assert isinstance(value, BaseException)
        raise value

    def close(self) -> None:
        """Stop and join the thread; harmless when it has ended."""
        self._stop.set()
        while self._thread.is_alive():  # it may wait for room in the queue
            try:
                self._queue.get_nowait()
            except queue.Empty:
                self._thread.join(0.01)

    def __del__(self) -> None:
        self._stop.set()


# A thread that is inside C++ when the interpreter goes away would take the process down.
_running: weakref.WeakSet[ThreadPrefetcher[Any]] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for prefetcher in list(_running):
        prefetcher.close()


def _produce(
    items: Iterable[T],
    out: queue.Queue[tuple[bool, T | BaseException | None]],
    stop: threading.Event,
) -> None:
    """The thread's function. It holds the queue and not the iterator, so that an iterator that
    nobody uses any more is collected while its thread runs."""
    try:
        for item in items:
            if not _put(out, (True, item), stop):
                return
        _put(out, (False, None), stop)
    except BaseException as error:  # raised again by the consumer
        _put(out, (False, error), stop)


def _put(out: queue.Queue[Any], item: tuple[bool, Any], stop: threading.Event) -> bool:
    """Wait for room and put an item; whether somebody is still there to take it."""
    while not stop.is_set():
        try:
            out.put(item, timeout=_POLL_SECONDS)
            return True
        except queue.Full:
            continue
    return False


def to_device(batches: Iterable[Batch], device: torch.device) -> Iterator[Batch]:
    """Batches with their tensors on ``device``, one batch ahead on a stream of its own.

    On the CPU batches pass as they are. Tensors should be pinned, or the copies wait.
    """
    if device.type != "cuda":
        yield from batches
        return
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    ahead: tuple[Batch, torch.cuda.Event] | None = None
    for batch in batches:
        with torch.cuda.stream(stream):
            copied = _copy(batch, device), stream.record_event()
        if ahead is not None:
            yield _hand_over(*ahead, device)
        ahead = copied
    if ahead is not None:
        yield _hand_over(*ahead, device)


def _copy(batch: Batch, device: torch.device) -> Batch:
    return {
        name: value.to(device, non_blocking=True)
        if isinstance(value, torch.Tensor) and name not in ("sample_ids", "source")
        else value
        for name, value in batch.items()
    }


def _hand_over(batch: Batch, copied: torch.cuda.Event, device: torch.device) -> Batch:
    """The trainer's stream waits for this batch's copies, and they live as long as it uses them."""
    current = torch.cuda.current_stream(device)
    current.wait_event(copied)
    for value in batch.values():
        if isinstance(value, torch.Tensor) and value.is_cuda:
            value.record_stream(current)
    return batch
