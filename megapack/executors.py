"""Shards built by whom one chose: this process, several of this machine, or a Ray cluster.

- Worker: builds shards one by one, and reports what it does as Counted
- run_shards: the records of shards, by the executor that was chosen
- prepare_processes: starts what will fork the workers, while there is other work

    class Squares:
        threads = 1

        def build(self, index: int, report: Report) -> int:
            report(Counted(documents=1))
            return index * index

    run_shards(Squares(), range(4), report=print, num_processes=2)    # -> [0, 1, 4, 9]
"""

from __future__ import annotations

import contextlib
import fcntl
import multiprocessing
import multiprocessing.connection
import os
import queue
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

from megapack.errors import ConfigError, MegapackError, PrintableStream, require

R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)


class Counted(NamedTuple):
    """Work that was done."""

    documents: int = 0
    text_bytes: int = 0
    tokens: int = 0

    def plus(self, more: Counted) -> Counted:
        return Counted(*(a + b for a, b in zip(self, more, strict=True)))


Report = Callable[[Counted], None]  # is told what was done since it was last called


class Worker(Protocol[R_co]):
    """Can be pickled; a process or task has one, and builds many shards with it."""

    @property
    def threads(self) -> int:
        """That one shard is worked at with."""

    def build(self, index: int, report: Report) -> R_co:
        """Build a shard, or find it finished; its record."""


def run_shards(
    worker: Worker[R],
    indices: Sequence[int],
    report: Report,
    *,
    executor: Literal["local", "ray"] = "local",
    num_processes: int = 1,
    ray_address: str | None = None,
    remedy: str = "fewer --workers",
) -> list[R]:
    """Records of the shards, in the order of ``indices``.

    Args:
        executor: processes of this machine, or one task per shard of a Ray cluster.
        num_processes: of this machine; 1: this one.
        ray_address: as ``ray.init`` takes it; None is Ray's own rule (RAY_ADDRESS, or a cluster of
            this machine alone). A connection that exists already is used.
        remedy: what takes less memory, for the message.

    Raises:
        MegapackError: a worker, or the server that forks them, was killed (out of memory, as a
            rule), or ray is not installed.
        DataError, OSError: what a worker raised; the others stop at their next shard.
        KeyboardInterrupt: worker processes are killed in the middle of their shards.
    """
    if executor == "ray":
        return _run_ray(worker, indices, report, ray_address)
    if num_processes == 1:
        return [worker.build(index, report) for index in indices]
    return _run_processes(worker, indices, report, num_processes, remedy)


# ---- Worker processes of this machine -----------------------------------------------------------
# Shards go to whoever is free, so that one with long documents holds nobody up.

_POLL_SECONDS = 0.2


def _run_processes(
    worker: Worker[R], indices: Sequence[int], report: Report, num_processes: int, remedy: str
) -> list[R]:
    context = multiprocessing.get_context("forkserver")
    counters = context.Array("q", len(Counted._fields))
    alive, here = context.Pipe(duplex=False)  # nobody writes: it ends with this process
    start = (_start_worker, (worker, counters, alive))
    with here, ProcessPoolExecutor(num_processes, context, *start) as pool:
        try:
            try:
                with _uninterrupted():
                    forkserver.ensure_running()
                    futures = [pool.submit(_work, index) for index in indices]  # starts workers
            except (EOFError, ConnectionError) as error:  # of the server that forks them
                raise BrokenProcessPool("the server of the workers was killed") from error
            _watch(futures, counters, report)
            return [future.result() for future in futures]
        except BrokenProcessPool as error:
            raise MegapackError(
                f"a worker process was killed; the usual reason is memory: use {remedy}. Finished "
                "shards are kept; run the same command to go on"
            ) from error
        except KeyboardInterrupt:
            here.close()  # which ends the workers: shards may take minutes
            raise
        finally:
            pool.shutdown(cancel_futures=True)


def prepare_processes(modules: Sequence[str]) -> None:
    """Start what will fork the workers: a server without threads that imports what they need, while
    the build is still being planned. It leaves with this process.
    """
    forkserver.set_forkserver_preload([__name__, *modules])
    with _uninterrupted():
        forkserver.ensure_running()


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Ctrl-C waits for the end of the block, and never reaches the processes that it starts: their
    parent decides what becomes of them.
    """
    if threading.current_thread() is not threading.main_thread():  # it gets no signals
        yield
        return
    resource_tracker.ensure_running()  # first: its start ends by letting signals through
    met: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: met.append(number))
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # is inherited
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGINT, before)
        if met:
            signal.raise_signal(signal.SIGINT)


def _watch(futures: Sequence[Future[R]], counters: Any, report: Report) -> None:
    """Report what is counted until all shards are done. Raises what a worker raised."""
    done: queue.SimpleQueue[Future[R]] = queue.SimpleQueue()
    for future in futures:
        future.add_done_callback(done.put)
    num_pending, lock = len(futures), counters.get_lock()
    reported, is_told = Counted(), True
    while num_pending or not is_told:
        with contextlib.suppress(queue.Empty):
            done.get(timeout=_POLL_SECONDS if num_pending else 0).result()
            num_pending -= 1
        is_told = lock.acquire(timeout=_POLL_SECONDS)  # a worker that was killed may hold it
        if is_told:
            now = Counted(*counters)
            lock.release()
            report(Counted(*(a - b for a, b in zip(now, reported, strict=True))))
            reported = now


# The worker process, and what it counts. What the worker needs is loaded by the first task: an
# error there reaches the parent, unlike one at the start.
_worker: Worker[Any]
_counters: Any


def _start_worker(worker: Worker[Any], counters: Any, parent: Connection) -> None:
    global _worker, _counters
    _end_with(parent)
    _worker, _counters = worker, counters
    sys.stdout, sys.stderr = map(PrintableStream, (sys.stdout, sys.stderr))


def _work(index: int) -> Any:
    return _worker.build(index, _count)


def _count(counted: Counted) -> None:
    with _counters.get_lock():
        _counters[:] = Counted(*_counters).plus(counted)


def _end_with(parent: Connection) -> None:
    """End this process when the one that holds the other end of the pipe ends, in whatever way.

    Linux ends it at once, whatever it is busy with: a thread would have to wait for the
    interpreter's lock. PR_SET_PDEATHSIG would follow the server that forked this process instead.
    """
    if hasattr(fcntl, "F_SETSIG"):
        with contextlib.suppress(OSError):  # no /proc
            # The workers share one open file, and an open file signals one process: open it again.
            own = os.open(f"/proc/self/fd/{parent.fileno()}", os.O_RDONLY | os.O_NONBLOCK)
            fcntl.fcntl(own, fcntl.F_SETOWN, os.getpid())
            fcntl.fcntl(own, fcntl.F_SETSIG, signal.SIGKILL)
            fcntl.fcntl(own, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)

    def wait_for_end() -> None:
        multiprocessing.connection.wait([parent])
        os._exit(1)

    threading.Thread(target=wait_for_end, daemon=True).start()


# ---- Shards on a Ray cluster: one task each, tried again where a node dies ----------------------
# Every node must see the inputs and the output directory under the same paths.

_RETRIES = 10  # of a task whose process or node died; an error in the data is not tried again


def _run_ray(
    worker: Worker[R], indices: Sequence[int], report: Report, address: str | None
) -> list[R]:
    ray = require("ray", "--executor ray")
    own_connection = not ray.is_initialized()
    if own_connection:
        ray.init(address=address, log_to_driver=False)
    pending: list[Any] = []
    try:
        # A task that asks for more than any node has would wait for ever.
        most = max((int(node["Resources"].get("CPU", 0)) for node in ray.nodes()), default=0)
        task = ray.remote(num_cpus=min(worker.threads, most) or 1, max_retries=_RETRIES)(_build)
        everywhere = ray.put(worker)
        running = pending = [task.remote(everywhere, index, Path.cwd()) for index in indices]
        while pending:
            done, pending = ray.wait(pending)
            for _, counted in ray.get(done):
                report(counted)
        return [record for record, _ in ray.get(running)]
    except ray.exceptions.RayTaskError as error:
        cause = error.cause
        raise (cause if isinstance(cause, Exception) else error) from None
    except ray.exceptions.RayError as error:
        raise MegapackError(
            f"{error} It was tried {1 + _RETRIES} times; the usual reason is memory: `ray start` "
            "with fewer --num-cpus. Finished shards are kept; run the same command to go on"
        ) from error
    finally:
        for reference in pending:
            ray.cancel(reference)
        if own_connection:
            ray.shutdown()


# Of a process, which Ray uses for many tasks.
_ray_worker: Worker[Any] | None = None


def _build(worker: Worker[R], index: int, folder: Path) -> tuple[R, Counted]:
    """The record, and what was done."""
    global _ray_worker  # noqa: PLW0603 (a task has no other place that outlives it)
    with contextlib.suppress(OSError):  # a node need not have it where all paths are absolute
        os.chdir(folder)  # of the command, to which paths are relative
    _ray_worker = _ray_worker if _ray_worker == worker else worker  # its tokenizer is loaded
    done = [Counted()]
    try:
        record = _ray_worker.build(index, lambda more: done.append(done.pop().plus(more)))
    except (OSError, ConfigError) as error:  # a mount or a package may be missing on one node
        error.args = (f"{error} (on {socket.gethostname()})",)
        raise
    return record, done[0]
