"""Run Python code in a forked child process with limits on CPU time and memory.

    for text in run_limited(render, chats, seconds=10, num_bytes=2 << 30):
        ...    # render(chat) of every chat, computed in the child

Python cannot interrupt a loop inside C or Rust code, and a library may abort the process. A child
process can be killed; if it dies, this process raises an error of one line.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import resource
import signal
import warnings
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TypeVar

from megapack.errors import MegapackError

A = TypeVar("A")
T = TypeVar("T")

_WALL_FACTOR = 30  # limit of elapsed time / of CPU time: a deadlock uses no CPU time
_seconds = 0.0  # CPU time limit of this process; 0: none


class LimitError(MegapackError):
    """The child exceeded a limit or was killed. The message is a clause that states the reason."""


def run_limited(
    function: Callable[[A], T],
    arguments: Sequence[A],
    *,
    seconds: float,
    num_bytes: int,
    batch: int = 64,
    meanwhile: Callable[[], object] = lambda: None,
) -> Iterator[T]:
    """Yield ``function`` of every argument, computed in a child process until the iterator closes.

    ``seconds`` limits the CPU time per argument (``renew_time_limit`` restarts it), ``num_bytes``
    the child's memory in addition to what this process has mapped. ``batch`` is the number of
    results per message: a message costs as much as several short conversations. ``meanwhile`` is
    called in this process while the child works on the first argument. Raises LimitError if the
    child exceeded a limit or died at the next argument, and the exceptions of ``function``.
    """
    reader, writer = multiprocessing.Pipe(duplex=False)
    with warnings.catch_warnings():
        # Python warns that other threads may hold locks. The child does not acquire these locks.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        try:
            reader.close()
            _set_limits(seconds, num_bytes)
            _send_results(function, arguments, batch, writer)
        finally:
            os._exit(0)
    writer.close()
    status, num_done = None, 0
    error: BaseException | None = None
    try:
        meanwhile()
        while error is None:
            try:
                results, error = reader.recv()
            except EOFError:
                status = os.waitpid(child, 0)[1]
                results, error = [], LimitError(_reason(status, seconds))
            yield from results
            num_done += len(results)
    finally:
        reader.close()
        if status is None:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    if isinstance(error, MemoryError):
        error = LimitError(f"it needs more than {num_bytes / 2**30:g} GiB of memory")
    if isinstance(error, LimitError) and batch > 1 and num_done + 1 < len(arguments):
        # The child may have lost finished results of its last batch: send them one by one.
        unfinished = arguments[num_done:]
        yield from run_limited(function, unfinished, seconds=seconds, num_bytes=num_bytes, batch=1)
    elif not isinstance(error, StopIteration):
        raise error


def renew_time_limit() -> None:
    """Restart the time limit in a child of ``run_limited``; do nothing in other processes."""
    if _seconds:
        signal.setitimer(signal.ITIMER_PROF, _seconds)
        signal.setitimer(signal.ITIMER_REAL, _WALL_FACTOR * _seconds)


def _set_limits(seconds: float, num_bytes: int) -> None:
    global _seconds  # noqa: PLW0603 (of this process)
    _seconds = seconds
    for number in (signal.SIGPROF, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)  # the signal ends the process, even in C code
    try:
        mapped = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGESIZE")
        resource.setrlimit(resource.RLIMIT_AS, (mapped + num_bytes,) * 2)
    except (OSError, ValueError):
        pass  # this system has no such limit
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # Discard stderr: a library that aborts prints several lines, and so does Python.
    faulthandler.disable()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def _send_results(
    function: Callable[[A], T], arguments: Sequence[A], batch: int, writer: Connection
) -> None:
    """Send (list of results, exception that ends them or None) until all are sent."""
    results: list[T] = []
    remaining, error = iter(arguments), None
    while error is None:
        renew_time_limit()
        try:
            results.append(function(next(remaining)))
        except BaseException as raised:
            error = raised
        if error is None and len(results) < batch:
            continue
        signal.setitimer(signal.ITIMER_REAL, 0)  # do not limit the wait for a slow parent
        try:
            writer.send((results, error))
        except MemoryError as raised:  # pickling needs memory, too
            error = raised
            writer.send(([], error))
        results = []


def _reason(status: int, seconds: float) -> str:
    number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    if number == signal.SIGPROF:
        return f"it needs more than {seconds:g} s of CPU time"
    if number == signal.SIGALRM:
        return f"it does not end within {_WALL_FACTOR * seconds:g} s"
    if number == signal.SIGKILL:
        return "the system killed its process; the usual reason is memory"
    return "the process that ran it exited"
