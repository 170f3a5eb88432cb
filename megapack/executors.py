"""Execution of shards in this process, in several processes, or on a Ray cluster.

- Worker: builds shards one by one, and reports its work as Counted
- run_shards: run a worker on shards and return its records
- prepare_processes: start the server that forks the workers, in the background

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
    """Amounts of finished work."""

    documents: int = 0
    text_bytes: int = 0
    tokens: int = 0

    def plus(self, more: Counted) -> Counted:
        return Counted(*(a + b for a, b in zip(self, more, strict=True)))


Report = Callable[[Counted], None]  # called with the work since the last call


class Worker(Protocol[R_co]):
    """Builder of shards. It must be picklable: every process or task gets one copy."""

    @property
    def threads(self) -> int:
        """Threads that build one shard."""

    def build(self, index: int, report: Report) -> R_co:
        """Build a shard, unless it is finished already, and return its record."""


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
    """Build shards and return their records, in the order of ``indices``.

    Args:
        executor: processes of this machine, or one task per shard on a Ray cluster.
        num_processes: processes on this machine; 1: build in the calling process.
        ray_address: as for ``ray.init``; None is Ray's own rule (RAY_ADDRESS, or a cluster on this
            machine). An existing connection is reused.
        remedy: how to use less memory, for the message.

    Raises MegapackError if a worker, or the server that forks them, was killed (usually out of
    memory), or ray is not installed, and the errors of workers: the others stop at their next
    shard. At KeyboardInterrupt, worker processes are killed in the middle of their shards.
    """
    if executor == "ray":
        return _run_ray(worker, indices, report, ray_address)
    if num_processes == 1:
        return [worker.build(index, report) for index in indices]
    return _run_processes(worker, indices, report, num_processes, remedy)


# ---- Worker processes on this machine ------------------------------------------------------------
# An idle process takes the next shard, so a shard with long documents delays no other.

_POLL_SECONDS = 0.2


def _run_processes(
    worker: Worker[R], indices: Sequence[int], report: Report, num_processes: int, remedy: str
) -> list[R]:
    context = multiprocessing.get_context("forkserver")
    counters = context.Array("q", len(Counted._fields))
    # Nothing is written to the pipe: when it closes, workers know that this process has ended.
    reader, writer = context.Pipe(duplex=False)
    start = (_start_worker, (worker, counters, reader))
    with writer, ProcessPoolExecutor(num_processes, context, *start) as pool:
        try:
            try:
                with _uninterrupted():
                    forkserver.ensure_running()
                    futures = [pool.submit(_work, index) for index in indices]  # starts workers
            except (EOFError, ConnectionError) as error:  # from the server that forks workers
                raise BrokenProcessPool("the server of the workers was killed") from error
            _watch(futures, counters, report)
            return [future.result() for future in futures]
        except BrokenProcessPool as error:
            raise MegapackError(
                f"a worker process was killed, usually for lack of memory: use {remedy}. Finished "
                "shards are kept; run the same command to resume"
            ) from error
        except KeyboardInterrupt:
            writer.close()  # ends the workers, whose shards may take minutes
            raise
        finally:
            pool.shutdown(cancel_futures=True)


def prepare_processes(modules: Sequence[str]) -> None:
    """Start the server that forks workers, while the build is still being planned. It has no
    threads, imports the modules that workers need, and ends with this process."""
    forkserver.set_forkserver_preload([__name__, *modules])
    with _uninterrupted():
        forkserver.ensure_running()


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Delay Ctrl-C until the end of the block; processes started in the block never receive it."""
    if threading.current_thread() is not threading.main_thread():  # only the main one gets signals
        yield
        return
    resource_tracker.ensure_running()  # first, because its start unblocks signals
    received: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: received.append(number))
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # inherited by processes
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGINT, before)
        if received:
            signal.raise_signal(signal.SIGINT)


def _watch(futures: Sequence[Future[R]], counters: Any, report: Report) -> None:
    """Report the counters until all shards are done. Raises the errors of workers."""
    done: queue.SimpleQueue[Future[R]] = queue.SimpleQueue()
    for future in futures:
        future.add_done_callback(done.put)
    num_pending, lock = len(futures), counters.get_lock()
    reported, is_current = Counted(), True
    while num_pending or not is_current:
        with contextlib.suppress(queue.Empty):
            done.get(timeout=_POLL_SECONDS if num_pending else 0).result()
            num_pending -= 1
        is_current = lock.acquire(timeout=_POLL_SECONDS)  # a killed worker may hold it
        if is_current:
            now = Counted(*counters)
            lock.release()
            report(Counted(*(a - b for a, b in zip(now, reported, strict=True))))
            reported = now


# State of a worker process. The first task loads what the worker needs, because an error in a task
# reaches the parent, unlike one at the start.
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
    """End this process when the process at the other end of the pipe ends, for any reason. Linux
    kills it at once; a thread would wait for the interpreter's lock. PR_SET_PDEATHSIG would refer
    to the server that forked this process instead."""
    if hasattr(fcntl, "F_SETSIG"):
        with contextlib.suppress(OSError):  # no /proc
            # The workers share one open file, which signals only one process: open it again.
            pipe = os.open(f"/proc/self/fd/{parent.fileno()}", os.O_RDONLY | os.O_NONBLOCK)
            fcntl.fcntl(pipe, fcntl.F_SETOWN, os.getpid())
            fcntl.fcntl(pipe, fcntl.F_SETSIG, signal.SIGKILL)
            fcntl.fcntl(pipe, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)

    def wait_for_end() -> None:
        multiprocessing.connection.wait([parent])
        os._exit(1)

    threading.Thread(target=wait_for_end, daemon=True).start()


# ---- Shards on a Ray cluster: one task each, retried if a node dies ------------------------------
# Every node must see the inputs and the output directory under the same paths.

_RETRIES = 10  # of a task whose process or node died; an error in the data is not retried


def _run_ray(
    worker: Worker[R], indices: Sequence[int], report: Report, address: str | None
) -> list[R]:
    ray = require("ray", "--executor ray")
    own_connection = not ray.is_initialized()
    if own_connection:
        ray.init(address=address, log_to_driver=False)
    pending: list[Any] = []
    try:
        # A task that requests more cores than any node has would wait forever.
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
            f"{error} The task ran {1 + _RETRIES} times; usually it ran out of memory: use fewer "
            "--num-cpus with `ray start`. Finished shards are kept; run the same command to resume"
        ) from error
    finally:
        for reference in pending:
            ray.cancel(reference)
        if own_connection:
            ray.shutdown()


# Ray uses one process for many tasks; it keeps its worker.
_ray_worker: Worker[Any] | None = None


def _build(worker: Worker[R], index: int, folder: Path) -> tuple[R, Counted]:
    """Build a shard; return its record and the work."""
    global _ray_worker  # noqa: PLW0603 (no other state outlives a task)
    with contextlib.suppress(OSError):  # a node may lack the folder if all paths are absolute
        os.chdir(folder)  # relative paths refer to the folder of the command
    _ray_worker = _ray_worker if _ray_worker == worker else worker  # with its tokenizer loaded
    done = [Counted()]
    try:
        record = _ray_worker.build(index, lambda more: done.append(done.pop().plus(more)))
    except (OSError, ConfigError) as error:  # a mount or a package may be missing on one node
        error.args = (f"{error} (on {socket.gethostname()})",)
        raise
    return record, done[0]
