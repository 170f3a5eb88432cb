"""Run Python code in a forked child process with limits on CPU time and memory.

    for text in run_limited(render(chats), seconds=10, num_bytes=2 << 30):
        ...    # render is a generator; it runs in the child, which sends its items

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
from collections.abc import Iterable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

from megapack.errors import MegapackError

T = TypeVar("T")

_WALL_FACTOR = 30  # limit of elapsed time / of CPU time: a deadlock uses no CPU time
_seconds = 0.0  # CPU time limit of this process; 0: none


class LimitError(MegapackError):
    """The child exceeded a limit or was killed. The message is a clause that states the reason."""


def run_limited(items: Iterable[T], *, seconds: float, num_bytes: int) -> Iterator[T]:
    """Yield ``items``, which a child process computes. Closing the iterator ends the child.

    Args:
        seconds: limit of CPU time per item; ``renew_time_limit`` restarts it.
        num_bytes: limit of the child's memory, in addition to what this process has mapped.

    Raises:
        LimitError: the child exceeded a limit, or died.
        Exception: any exception that ``items`` raises.
    """
    reader, writer = multiprocessing.Pipe(duplex=False)
    with warnings.catch_warnings():
        # Python warns that other threads may hold locks. The child does not acquire these locks.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        try:
            reader.close()
            _send_items(items, writer, seconds, num_bytes)
        finally:
            os._exit(0)
    writer.close()
    status = None
    try:
        while True:
            try:
                item, error = reader.recv()
            except EOFError:
                status = os.waitpid(child, 0)[1]
                raise LimitError(_reason(status, seconds)) from None
            if isinstance(error, MemoryError):
                raise LimitError(f"it needs more than {num_bytes / 2**30:g} GiB of memory")
            if isinstance(error, StopIteration):
                return
            if error is not None:
                raise error
            yield item
    finally:
        reader.close()
        if status is None:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def renew_time_limit() -> None:
    """Restart the time limit in a child of ``run_limited``; do nothing in other processes."""
    if _seconds:
        signal.setitimer(signal.ITIMER_PROF, _seconds)
        signal.setitimer(signal.ITIMER_REAL, _WALL_FACTOR * _seconds)


def _send_items(items: Iterable[Any], writer: Connection, seconds: float, num_bytes: int) -> None:
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
    iterator, error = iter(items), None
    while error is None:
        renew_time_limit()
        item = None
        try:
            item = next(iterator)
        except BaseException as raised:
            error = raised
        signal.setitimer(signal.ITIMER_REAL, 0)  # do not limit the wait for a slow parent
        try:
            writer.send((item, error))
        except MemoryError as raised:  # pickling needs memory, too
            item, error = None, raised
            writer.send((item, error))


def _reason(status: int, seconds: float) -> str:
    number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    if number == signal.SIGPROF:
        return f"it needs more than {seconds:g} s of CPU time"
    if number == signal.SIGALRM:
        return f"it does not end within {_WALL_FACTOR * seconds:g} s"
    if number == signal.SIGKILL:
        return "the system killed its process; the usual reason is memory"
    return "it ended the process that tried it"
