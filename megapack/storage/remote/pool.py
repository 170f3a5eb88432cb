"""Threads that fetch, and waiting for them: said aloud, never for ever, and not when the program
ends.

A program that ends waits for the requests that are on their way, not for those that are queued.
Whoever waits for a request has no lock that a request takes, and nothing is called back: a request
that is done has done all its work in its own thread.
"""

from __future__ import annotations

import atexit
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from typing import Any, TypeAlias

from megapack.storage.remote.client import ending, refuse_fork, retry_seconds

__all__ = ["FetchPool", "Patience", "wait_for"]

log = logging.getLogger(__name__)

WARN_SECONDS = 30.0  # between lines of what is waited for
STALLED_RETRIES = 5  # times the client's limit: by then every request has come or failed

_POLL_SECONDS = 1.0
_Task: TypeAlias = tuple["Future[Any]", Callable[..., Any], tuple[Any, ...]]


class FetchPool:
    """As concurrent.futures' pool, whose queue would be worked off before the interpreter leaves.

    Args:
        num_threads: that work at the same time; started by the first task.
    """

    def __init__(self, num_threads: int) -> None:
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._num_threads, self._threads = num_threads, list[threading.Thread]()
        self._lock = threading.Lock()  # of submitting and ending: no task comes behind the end

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Have ``function(*arguments)`` called by a thread.

        Raises:
            ConfigError: this process was forked from one that fetches.
            RuntimeError: the program ends.
        """
        refuse_fork()
        future: Future[Any] = Future()
        with self._lock:
            if ending.is_set():
                raise RuntimeError("nothing is fetched any more: the program ends")
            if not self._threads:
                atexit.register(self._end)
                for _ in range(self._num_threads):
                    thread = threading.Thread(target=self._work, name="megapack-fetch", daemon=True)
                    thread.start()
                    self._threads.append(thread)
            self._tasks.put((future, function, arguments))
        return future

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            future, function, arguments = task
            if ending.is_set():
                future.cancel()
            if not future.set_running_or_notify_cancel():  # which tells those who wait
                continue
            try:
                future.set_result(function(*arguments))
            except BaseException as error:  # raised again by whoever waits
                future.set_exception(error)

    def _end(self) -> None:
        """A thread in the client's code while the interpreter goes would take the process down."""
        with self._lock:
            ending.set()
        for _ in self._threads:
            self._tasks.put(None)
        for thread in self._threads:
            thread.join()


class Patience:
    """Of one who waits: says once per interval for what, and ends when nothing moves for long.

    Args:
        what: what is waited for now, as "block 7 (bytes [...)) of s3://...".
        moved: differs after every progress.
    """

    def __init__(self, what: Callable[[], str], moved: Callable[[], object]) -> None:
        self._what, self._moved = what, moved
        self._seen = moved()
        self._begin = self._moved_at = time.monotonic()
        self._next_line = self._begin + WARN_SECONDS

    def check(self) -> None:
        """Called about once a second while one waits.

        Raises:
            TimeoutError: nothing has moved for ``STALLED_RETRIES`` times the client's limit.
            RuntimeError: the program ends.
        """
        if ending.is_set():
            raise RuntimeError(f"not waiting any more for {self._what()}: the program ends")
        now, seen = time.monotonic(), self._moved()
        if seen != self._seen:
            self._seen, self._moved_at = seen, now
        limit = STALLED_RETRIES * retry_seconds()
        if now - self._moved_at > limit:
            raise TimeoutError(
                f"nothing came for {now - self._moved_at:,.0f} seconds (limit {limit:,.0f}, "
                f"{STALLED_RETRIES} times MEGAPACK_RETRY_SECONDS) of {self._what()}: start the run "
                "again, and look whether the store answers and other processes of this node live"
            )
        if now > self._next_line:
            self._next_line += WARN_SECONDS
            log.warning("waiting for %.0f seconds for %s", now - self._begin, self._what())


def wait_for(requests: Iterable[Future[Any]], patience: Patience) -> None:
    """Wait until requests are done. Raises what the first that fails raises, and as ``check``."""
    pending = set(requests)
    while pending:
        done, pending = wait(pending, min(_POLL_SECONDS, WARN_SECONDS), FIRST_EXCEPTION)
        for request in done:
            request.result()
        if pending:
            patience.check()
