"""The local cache, shared by all processes of a node: a directory, and what may lie in it.

Every version of a dataset or file has an entry of its own, a directory that its address and the
versions of its objects name: what was replaced far away is never taken for what stands there now.
Two environment variables reach every rank and every command:

- ``MEGAPACK_CACHE``: the directory, on a disk of this node (or in its memory: /dev/shm);
  ``~/.cache/megapack`` by default
- ``MEGAPACK_CACHE_SIZE``: what it may hold, a size (``megapack.units``); all by default
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from functools import cache
from pathlib import Path

import xxhash

from megapack.errors import ConfigError, FormatError
from megapack.storage.remote.client import RemoteObject, WrongBytesError, until_right
from megapack.storage.remote.locks import RangeLocks
from megapack.storage.remote.pool import FetchPool, Patience, wait_for
from megapack.storage.remote.sparse import SparseFile
from megapack.units import parse_size, size

__all__ = ["REQUEST_BYTES", "Cache", "bytes_on_disk", "open_cache"]

REQUEST_BYTES = 1 << 22  # of one range: long enough that its latency does not count
NUM_REQUESTS = 64  # at a time, of a process: at most 256 MiB wait for their disk
SMALLEST_SIZE = 1 << 28


def open_cache() -> Cache:
    """The one that the environment names.

    Raises:
        ConfigError: a variable cannot be what it is.
        OSError: the directory cannot be made.
    """
    directory = os.environ.get("MEGAPACK_CACHE") or Path.home() / ".cache" / "megapack"
    return _open_cache(os.path.realpath(directory), _limit(), os.getpid())


@cache
def _open_cache(directory: str, limit: int | None, _pid: int) -> Cache:
    """One per process: its locks are the process's."""
    return Cache(Path(directory), limit)


class Cache:
    """One directory.

    Attributes:
        limit: bytes it may hold, or None.
        locks: between the processes that use it; in_use: shared ones, on entries.
        pool: the threads of this process that fetch.
    """

    def __init__(self, directory: Path, limit: int | None) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory, self.limit = directory, limit
        self.locks = RangeLocks(directory / "locks")
        self.in_use = RangeLocks(directory / "in_use")
        self.pool = FetchPool(NUM_REQUESTS)
        self._files: weakref.WeakSet[SparseFile] = weakref.WeakSet()
        self._lock = threading.Lock()  # of what stands above and below
        self._written = SMALLEST_SIZE  # since the last look at all of it; at first look at once

    def entry(self, name: str, url: str, *objects: RemoteObject | None) -> Path:
        """The directory of these versions of objects, which stays as long as this process."""
        versions = [found.version if found else "none" for found in objects]
        digest = xxhash.xxh3_64_hexdigest("\n".join([url, *versions]).encode())
        entry = self.directory / f"{name}-{digest}"
        while True:
            entry.mkdir(exist_ok=True)
            self.in_use.share(str(entry))
            if entry.exists():
                return entry
            self.in_use.give_back(str(entry))  # it was removed in between, to make room

    def give_back(self, entry: Path) -> None:
        """Remove an entry, unless others have it open as well."""
        self.in_use.give_back(str(entry))
        with self.in_use.if_free(str(entry)) as free:
            if free:
                shutil.rmtree(entry, ignore_errors=True)

    def add_file(self, file: SparseFile) -> None:
        """One whose blocks may be dropped as long as this process has it open."""
        with self._lock:
            self._files.add(file)

    def open_files(self) -> list[SparseFile]:
        """Those that were added and are still open."""
        with self._lock:
            return list(self._files)

    def fetch(
        self, found: RemoteObject, path: Path, check: Callable[[Path], object] = lambda _: None
    ) -> None:
        """Have a whole object at a path, complete or not at all, fetched by one process.

        Args:
            found: the object.
            path: in an entry.
            check: raises FormatError where the file that it is given is not what it should be.

        Raises:
            FormatError: what came is wrong again and again.
            OSError: as of ``RemoteObject.read``, or the disk is full.
        """
        temporary = path.with_name(f"{path.name}.tmp")  # whoever died here left it

        def attempt() -> None:
            try:
                self._download(found, temporary)
                try:
                    check(temporary)
                except FormatError as error:
                    raise WrongBytesError(str(error)) from error
                temporary.replace(path)
            finally:
                temporary.unlink(missing_ok=True)

        def awaited() -> str:
            return f"{found.url}, which process {self.locks.owner(str(path))} of this node fetches"

        patience = Patience(awaited, lambda: bytes_on_disk(temporary))
        with self.locks.held(str(path), waiting=patience.check):
            if not path.exists():
                until_right(found.url, attempt)

    def _download(self, found: RemoteObject, path: Path) -> None:
        with self.naming_full_disk(), path.open("wb") as file:

            def fetch(begin: int) -> None:
                data = found.read(begin, min(begin + REQUEST_BYTES, found.num_bytes))
                if os.pwrite(file.fileno(), data, begin) != len(data):
                    raise OSError(errno.ENOSPC, "No space left on device", str(path))

            def awaited() -> str:
                return f"{found.url} ({size(bytes_on_disk(path))} of {size(found.num_bytes)} came)"

            begins = range(0, found.num_bytes, REQUEST_BYTES)
            requests = [self.pool.submit(fetch, begin) for begin in begins]
            try:
                wait_for(requests, Patience(awaited, lambda: bytes_on_disk(path)))
            finally:  # none may write when the file is closed
                for request in requests:
                    request.cancel()
                wait(request for request in requests if not request.cancelled())
            os.fsync(file.fileno())

    def will_write(self, num_bytes: int) -> bool:
        """Whether so much was written since the last time that somebody should look for room."""
        if self.limit is None:
            return False
        with self._lock:
            self._written += num_bytes
            if self._written < self.limit // 64:
                return False
            self._written = 0
            return True

    @contextlib.contextmanager
    def naming_full_disk(self) -> Iterator[None]:
        """An error of a full disk says which, and what to do."""
        try:
            yield
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise OSError(
                error.errno,
                f"the disk of the cache is full ({os.strerror(error.errno)}): free some, let "
                "MEGAPACK_CACHE name another, or set MEGAPACK_CACHE_SIZE to less than it has",
                str(self.directory),
            ) from error


def bytes_on_disk(path: Path) -> int:
    """Of a file; none where it is not there, or another process has just removed it."""
    try:
        return path.stat().st_blocks * 512
    except FileNotFoundError:
        return 0


def _limit() -> int | None:
    text = os.environ.get("MEGAPACK_CACHE_SIZE")
    if not text:
        return None
    try:
        limit = parse_size(text)
    except ConfigError as error:
        raise ConfigError(f"MEGAPACK_CACHE_SIZE: {error}") from error
    if limit < SMALLEST_SIZE:
        raise ConfigError(
            f"MEGAPACK_CACHE_SIZE is {text!r}; it must be at least {size(SMALLEST_SIZE)}"
        )
    return limit
