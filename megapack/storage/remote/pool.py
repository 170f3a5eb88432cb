"""Threads that fetch. A program that ends waits for what is on its way, not for what is queued."""

from __future__ import annotations

import atexit
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeAlias

from megapack.storage.remote.client import ending, refuse_fork

__all__ = ["FetchPool"]

_Task: TypeAlias = tuple["Future[Any]", Callable[..., Any], tuple[Any, ...]]


class FetchPool:
    """As concurrent.futures' pool, whose queue would be worked off before the interpreter leaves.

    Args:
        num_threads: that work at the same time; started by the first task.
    """

    def __init__(self, num_threads: int) -> None:
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._work, name="megapack-fetch", daemon=True)
            for _ in range(num_threads)
        ]
        self._start = threading.Lock()

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Have ``function(*arguments)`` called by a thread.

        Raises:
            ConfigError: this process was forked from one that fetches.
        """
        refuse_fork()
        with self._start:
            if self._threads[0].ident is None:
                for thread in self._threads:
                    thread.start()
                atexit.register(self._end)
        future: Future[Any] = Future()
        self._tasks.put((future, function, arguments))
        return future

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            future, function, arguments = task
            if ending.is_set() or not future.set_running_or_notify_cancel():
                future.cancel()
                continue
            try:
                future.set_result(function(*arguments))
            except BaseException as error:  # raised again by whoever waits
                future.set_exception(error)

    def _end(self) -> None:
        """A thread in the client's code while the interpreter goes would take the process down."""
        ending.set()
        for _ in self._threads:
            self._tasks.put(None)
        for thread in self._threads:
            thread.join()
