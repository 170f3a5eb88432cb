"""Who builds the shards: this process, worker processes, or a Ray cluster.

Every executor gives the records in the order of the shards and calls ``report`` as work goes on.
Shards go to whoever is free, so that one with long documents holds nobody up.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import multiprocessing.connection
import os
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import forkserver
from typing import Any

from megapack.errors import MegapackError
from megapack.tokenization.coding import Coder
from megapack.tokenization.job import Job, open_coder
from megapack.tokenization.plan import Shard
from megapack.tokenization.record import ShardRecord
from megapack.tokenization.shard import Counted, build_shard

__all__ = ["Report", "prepare_processes", "run_here", "run_processes"]

Report = Callable[[Counted], None]

_POLL_SECONDS = 0.2


def run_here(job: Job, shards: Sequence[Shard], report: Report) -> list[ShardRecord]:
    """One after the other, in this process."""
    coder = open_coder(job)
    return [build_shard(job, shard, coder, report) for shard in shards]


def run_processes(
    job: Job, shards: Sequence[Shard], report: Report, *, workers: int
) -> list[ShardRecord]:
    """In ``workers`` processes of this machine.

    Raises:
        MegapackError: a worker was killed (out of memory, as a rule).
        DataError, OSError: what a worker raised; the others stop at their next shard.
    """
    context = multiprocessing.get_context("forkserver")
    counters = context.Array("q", len(Counted._fields))
    with ProcessPoolExecutor(
        workers, mp_context=context, initializer=_start_worker, initargs=(job, counters)
    ) as pool:
        futures = [pool.submit(_work, shard) for shard in shards]
        try:
            _watch(futures, counters, report)
            return [future.result() for future in futures]
        except BrokenProcessPool as error:
            raise MegapackError(
                "a worker process was killed; the usual reason is memory: use fewer --workers or "
                "smaller --block-bytes. Finished shards are kept; run the same command to go on"
            ) from error
        finally:
            pool.shutdown(cancel_futures=True)


def prepare_processes(backend: str) -> None:
    """Start what will fork the workers: a server without threads that imports what they need, while
    the build is still being planned. It leaves with this process.
    """
    packages = ["gigatoken", "awkward"] if backend in ("auto", "gigatoken") else []
    forkserver.set_forkserver_preload([__name__, *packages])
    forkserver.ensure_running()


def _watch(futures: Sequence[Future[ShardRecord]], counters: Any, report: Report) -> None:
    """Report what is counted until all shards are done. Raises what a worker raised."""
    done: queue.SimpleQueue[Future[ShardRecord]] = queue.SimpleQueue()
    for future in futures:
        future.add_done_callback(done.put)
    num_pending = len(futures)
    reported = Counted(0, 0, 0)
    while num_pending:
        with contextlib.suppress(queue.Empty):
            done.get(timeout=_POLL_SECONDS).result()
            num_pending -= 1
        with counters.get_lock():
            now = Counted(*counters)
        report(Counted(*(a - b for a, b in zip(now, reported, strict=True))))
        reported = now


# The worker process. One coder per process, loaded once.
_worker: _Worker


class _Worker:
    def __init__(self, job: Job, counters: Any) -> None:
        self.job = job
        self.counters = counters

    @functools.cached_property
    def coder(self) -> Coder:
        """Loaded by the first task: an error there reaches the parent, unlike one at the start."""
        return open_coder(self.job)

    def count(self, counted: Counted) -> None:
        with self.counters.get_lock():
            for i, value in enumerate(counted):
                self.counters[i] += value


def _start_worker(job: Job, counters: Any) -> None:
    global _worker  # noqa: PLW0603 (a pool offers no other place)
    threading.Thread(target=_die_with_parent, daemon=True).start()
    _worker = _Worker(job, counters)


def _work(shard: Shard) -> ShardRecord:
    return build_shard(_worker.job, shard, _worker.coder, _worker.count)


def _die_with_parent() -> None:
    """A parent that was killed cannot stop its workers; they notice and leave."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)
