"""Local cache of remote objects, shared by all processes of a node.

- ``open_cache``: the cache that environment variables configure
- ``Cache``: its entries and whole files; ``make_room``: evict entries and blocks
- ``Chunks``: the cached blocks of one .bin or .col
- ``RangeLocks``: locks between processes; ``wait_for``, ``Patience``: waits with a timeout

Every version of a dataset or file has its own entry, a directory named by the address and the
versions of its objects. So an object is never confused with the one that it replaced::

    ~/.cache/megapack/                 MEGAPACK_CACHE: on a disk of this node, or in /dev/shm
      locks  in_use                    empty files; processes lock ranges in them
      web-9e3779b97f4a7c15/web.idx     a whole file
      web-9e3779b97f4a7c15/web.bin.6b1d0f2e/     chunks written since this boot of the machine
        0                              blocks 0 to 255 (16 KiB each, 4 MiB together), then a byte
                                       for each of them, 1 if it is cached
        17                             the same for blocks 4352 to 4607

A block is added to a chunk after it was checked. Eviction removes whole chunks at any time: readers
copy the blocks of a batch into their own memory and fetch missing blocks again. (Fetching whole
chunks of an unarranged source would fetch 500 bytes per byte used instead of 4.)

``MEGAPACK_CACHE_SIZE`` limits the cache (format: ``megapack.units``); by default there is no limit.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import re
import shutil
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import xxhash
from numpy.typing import NDArray

from megapack.errors import ConfigError, FormatError
from megapack.storage.files import AtomicFile, FileOnDisk, files_below, temporary_files
from megapack.storage.locks import is_own_folder, make_own_folder, remove_own_folder
from megapack.storage.remote.checksums import BLOCK_BYTES
from megapack.storage.remote.client import (
    REQUEST_TIMEOUT,
    RemoteObject,
    WrongBytesError,
    ending,
    raise_if_ending,
    refuse_fork,
    retry_seconds,
    retry_wrong_bytes,
)
from megapack.units import parse_size, size

log = logging.getLogger(__name__)

# ---- Locks between the processes of a node; the kernel releases them when a process exits --------

_POLL_SECONDS = 0.005
_FLOCK = struct.Struct("hhqqi4x")  # Linux: type, whence, begin, length, process


class RangeLocks:
    """Locks on ranges of numbers under a name, all in one empty file. The hash of a name selects
    its part of the file; in the rare case of equal hashes, two names wait for each other."""

    def __init__(self, path: Path) -> None:
        # POSIX locks: only these report the process id of their owner. Closing any descriptor of
        # the file would release all locks of the process, so this one stays open.
        self._path, self._file = path, os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        # The kernel does not distinguish the threads of a process: record their locks here.
        self._ours: list[range] = []
        self._shared: Counter[int] = Counter()
        self._mutex = threading.Lock()

    @contextlib.contextmanager
    def held(
        self,
        name: str,
        first: int = 0,
        count: int = 1,
        *,
        waiting: Callable[[], object] = raise_if_ending,
    ) -> Iterator[None]:
        """Wait for numbers ``[first, first + count)`` of a name, and lock them exclusively during
        the ``with`` block. ``waiting`` is called repeatedly meanwhile; it may raise."""
        while True:
            with self.if_free(name, first, count) as free:
                if free:
                    yield
                    return
            waiting()
            time.sleep(_POLL_SECONDS)

    @contextlib.contextmanager
    def if_free(self, name: str, first: int = 0, count: int = 1) -> Iterator[bool]:
        """Lock the same numbers as ``held`` if they are free; yield whether they were."""
        begin = _begin(name) + first
        wanted = range(begin, begin + count)
        with self._mutex:
            free = begin not in self._shared and not self._is_ours(wanted)
            if free := free and self._from_kernel(fcntl.LOCK_EX, wanted):
                self._ours.append(wanted)
        try:
            yield free
        finally:
            if free:
                with self._mutex:
                    self._ours.remove(wanted)
                    fcntl.lockf(self._file, fcntl.LOCK_UN, count, begin)

    def share(self, name: str) -> None:
        """Wait for the end of an exclusive lock on a name, then share it until this process ends or
        has called ``give_back`` once per ``share``."""
        numbers = range(_begin(name), _begin(name) + 1)
        while True:
            with self._mutex:
                free = not self._is_ours(numbers)
                if numbers[0] in self._shared or (
                    free and self._from_kernel(fcntl.LOCK_SH, numbers)
                ):
                    self._shared[numbers[0]] += 1
                    return
            raise_if_ending()
            time.sleep(_POLL_SECONDS)

    def give_back(self, name: str) -> None:
        begin = _begin(name)
        with self._mutex:
            self._shared[begin] -= 1
            if not self._shared[begin]:
                del self._shared[begin]
                fcntl.lockf(self._file, fcntl.LOCK_UN, 1, begin)

    def owner(self, name: str, first: int = 0) -> int | None:
        """Return the id of another process that has locked a number of a name, or None."""
        question = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, _begin(name) + first, 1, 0)
        kind, *_, process = _FLOCK.unpack(fcntl.fcntl(self._file, fcntl.F_GETLK, question))
        return None if kind == fcntl.F_UNLCK else int(process)

    def _is_ours(self, wanted: range) -> bool:
        return any(wanted.start < ours.stop and ours.start < wanted.stop for ours in self._ours)

    def _from_kernel(self, kind: int, wanted: range) -> bool:
        try:
            fcntl.lockf(self._file, kind | fcntl.LOCK_NB, len(wanted), wanted.start)
        except (BlockingIOError, PermissionError):  # POSIX allows either
            return False
        except OSError as error:
            why = f"{error.strerror}: set MEGAPACK_CACHE to a directory on a disk with file locks"
            raise OSError(error.errno, why, str(self._path)) from error
        return True


def _begin(name: str) -> int:
    return (xxhash.xxh3_64_intdigest(name.encode()) & 0x3FFF_FFFF) << 32


# ---- Waiting for requests: logged, limited, and cancelled when the program ends ------------------
# To avoid deadlocks, a reader that waits for a request holds no lock that requests need. Requests
# have no callbacks: when a request is finished, its thread has done all its work.

WARN_SECONDS = 30.0  # between two log lines of one wait
STALLED_RETRIES = 5  # timeout, in multiples of the longest time that a request can take

_FETCH_POLL_SECONDS = 1.0


class Patience:
    """Timeout and log lines of a waiting reader. ``what`` returns a description of the awaited
    data, such as "block 7 (bytes [...)) of s3://..."; ``moved`` returns a value that changes
    whenever there is progress."""

    def __init__(self, what: Callable[[], str], moved: Callable[[], object]) -> None:
        self._what, self._moved = what, moved
        self._progress = moved()
        self._begin = self._moved_at = time.monotonic()
        self._next_line = self._begin + WARN_SECONDS

    def check(self) -> None:
        """Check the timeout; call this about once a second. Raises TimeoutError if there was no
        progress for ``STALLED_RETRIES`` times the longest time of a request with retries, and
        RuntimeError if the program is ending."""
        if ending.is_set():
            raise RuntimeError(f"stopped waiting for {self._what()}: the program is ending")
        now, progress = time.monotonic(), self._moved()
        if progress != self._progress:
            self._progress, self._moved_at = progress, now
        limit = STALLED_RETRIES * (retry_seconds() + REQUEST_TIMEOUT.total_seconds())
        if now - self._moved_at > limit:
            raise TimeoutError(
                f"received nothing of {self._what()} for {now - self._moved_at:,.0f} seconds "
                f"(limit {limit:,.0f}, {STALLED_RETRIES} times MEGAPACK_RETRY_SECONDS plus a "
                f"request's {REQUEST_TIMEOUT.total_seconds():.0f}): check that the store "
                "answers and that other processes of this node run, then start the run again"
            )
        if now > self._next_line:
            self._next_line += WARN_SECONDS
            log.warning("waited %.0f seconds so far for %s", now - self._begin, self._what())


def wait_for(requests: Iterable[Future[Any]], patience: Patience) -> None:
    """Wait for all requests. Raises the first error of a request or of ``Patience.check``."""
    pending = set(requests)
    while pending:
        done, pending = wait(pending, min(_FETCH_POLL_SECONDS, WARN_SECONDS), FIRST_EXCEPTION)
        for request in done:
            request.result()
        if pending:
            patience.check()


# ---- Cached blocks of one .bin or .col ----------------------------------------------------------

CHUNK_BLOCKS = 256  # per file, 4 MiB; a request is for one file: its latency is negligible

Blocks: TypeAlias = NDArray[np.int64]  # block numbers, sorted and unique


class Chunks:
    """Files of ``CHUNK_BLOCKS`` blocks each, in a folder next to ``path``, of a .bin or .col.
    Chunks from before the last boot of the machine may be incomplete on the disk: they are ignored,
    and removed when the entry is used again."""

    def __init__(self, path: Path) -> None:
        self.folder = path.with_name(f"{path.name}.{_boot()}")

    def copy(self, blocks: Blocks, data: NDArray[np.uint8] | None) -> Blocks:
        """Copy cached blocks to their positions in ``data``, an array of the size of the file; if
        it is None, copy nothing. Return the blocks that are not cached."""
        absent = [np.zeros(0, np.int64)]
        for part in np.split(blocks, np.flatnonzero(np.diff(blocks // CHUNK_BLOCKS)) + 1):
            if not part.size:
                continue
            path = self.folder / str(part[0] // CHUNK_BLOCKS)
            try:
                file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                absent.append(part)
                continue
            try:
                os.utime(file)  # ``make_room`` evicts by this time
                marks = os.pread(file, CHUNK_BLOCKS, CHUNK_BLOCKS * BLOCK_BYTES)
                marks = marks.ljust(CHUNK_BLOCKS, b"\0")
                is_cached = np.frombuffer(marks, np.uint8)[part % CHUNK_BLOCKS] == 1
                absent.append(part[~is_cached])
                for begin, end in runs_of(part[is_cached]) if data is not None else ():
                    assert data is not None
                    into = data[begin * BLOCK_BYTES : end * BLOCK_BYTES].data
                    if os.preadv(file, [into], begin % CHUNK_BLOCKS * BLOCK_BYTES) != into.nbytes:
                        why = "was truncated: another program writes into the cache"
                        raise OSError(errno.EIO, why, str(path))
            finally:
                os.close(file)
        return np.concatenate(absent)

    def write(self, first: int, data: memoryview) -> None:
        """Write blocks of one chunk, beginning with block ``first``. The caller must have locked
        them. Raises OSError if the disk is full."""
        chunk, at = divmod(first, CHUNK_BLOCKS)
        path, flags = self.folder / str(chunk), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        while True:
            with contextlib.suppress(FileNotFoundError):  # eviction removed the folder
                self.folder.mkdir(parents=True, exist_ok=True)
                file = os.open(path, flags, 0o666)
                break
        try:
            _write_at(file, data, at * BLOCK_BYTES)
            marks = b"\1" * -(-len(data) // BLOCK_BYTES)
            _write_at(file, memoryview(marks), CHUNK_BLOCKS * BLOCK_BYTES + at)
        finally:
            os.close(file)


def runs_of(numbers: Blocks, gap: int = 0) -> Iterator[tuple[int, int]]:
    """Yield the half-open ranges of sorted numbers; fill gaps of up to ``gap`` numbers."""
    for run in np.split(numbers, np.flatnonzero(np.diff(numbers) > gap + 1) + 1):
        if run.size:
            yield int(run[0]), int(run[-1]) + 1


def requests_of(blocks: Blocks, gap: int) -> Iterator[tuple[int, int]]:
    """Yield the ranges of blocks to request: those of ``runs_of``, split at chunk boundaries."""
    for begin, end in runs_of(blocks, gap):
        boundaries = range((begin // CHUNK_BLOCKS + 1) * CHUNK_BLOCKS, end, CHUNK_BLOCKS)
        yield from pairwise([begin, *boundaries, end])


def _write_at(file: int, data: memoryview, at: int) -> None:
    while data:
        written = os.pwrite(file, data, at)
        data, at = data[written:], at + written


def _boot() -> str:
    number = Path("/proc/sys/kernel/random/boot_id").read_bytes().strip()
    return xxhash.xxh3_64_hexdigest(number)[:8]


# ---- The cache: a directory, its entries, and the threads that fetch ----------------------------

NUM_REQUESTS = 64  # concurrent, per process: at most 256 MiB wait for the disk
NUM_COPIES = 8  # concurrent requests of chunks that are copied ahead
SMALLEST_SIZE = 1 << 28
FREE_PART = 8  # eviction frees 1/8 of the cache
READ_SECONDS = 600  # blocks requested longer ago have been read
_CHUNKS = re.compile(r".+\.(bin|col)\.[0-9a-f]{8}")  # a folder of chunks in an entry


def open_cache() -> Cache:
    """Return the cache that the environment configures. Raises ConfigError if it is invalid."""
    directory = os.environ.get("MEGAPACK_CACHE") or Path.home() / ".cache" / "megapack"
    text = os.environ.get("MEGAPACK_CACHE_SIZE")
    try:
        limit = parse_size(text) if text else None
    except ConfigError as error:
        raise ConfigError(f"MEGAPACK_CACHE_SIZE: {error}") from error
    if limit is not None and limit < SMALLEST_SIZE:
        raise ConfigError(f"MEGAPACK_CACHE_SIZE is {text!r}; the least is {size(SMALLEST_SIZE)}")
    opened = _open_cache(os.path.realpath(directory), os.getpid())
    opened.limit = limit
    return opened


@cache
def _open_cache(directory: str, _pid: int) -> Cache:  # per process: locks belong to processes
    return Cache(Path(directory))


class Cache:
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.limit: int | None = None  # maximum size in bytes
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self.locks = RangeLocks(directory / "locks")
            self.in_use = RangeLocks(directory / "in_use")  # shared locks on entries
        except OSError as error:
            why = f"{error.strerror}: set MEGAPACK_CACHE to a directory where this user may write"
            raise OSError(error.errno, why, str(directory)) from error
        self._pool = ThreadPoolExecutor(NUM_REQUESTS, "megapack-fetch")
        # A second pool: copies and thousands of small requests do not wait for each other.
        self._copy_pool = ThreadPoolExecutor(NUM_COPIES, "megapack-copy")
        # Without this, the interpreter would fetch all queued blocks before it exits.
        threading._register_atexit(self._end)  # type: ignore[attr-defined]
        self._lock = threading.Lock()
        self._written = SMALLEST_SIZE  # bytes since the last size check; large: check soon

    def _end(self) -> None:
        ending.set()
        for pool in (self._pool, self._copy_pool):
            pool.shutdown(wait=False, cancel_futures=True)

    def has_room(self, num_bytes: int) -> bool:
        """Return whether an object may be copied in advance: the cache has no size limit, and twice
        as many bytes are free."""
        return self.limit is None and shutil.disk_usage(self.directory).free > 2 * num_bytes

    def submit(
        self, function: Callable[..., Any], *arguments: Any, copy: bool = False
    ) -> Future[Any]:
        """Call ``function(*arguments)`` in a fetching (or copying) thread. Raises ConfigError if
        this process was forked from one that fetches, and RuntimeError if the program is ending."""
        refuse_fork()
        return (self._copy_pool if copy else self._pool).submit(function, *arguments)

    def entry(self, name: str, url: str, *objects: RemoteObject | None) -> Path:
        """Return the directory for these versions of objects; it exists until ``give_back``."""
        versions = [each.version if each else "none" for each in objects]
        digest = xxhash.xxh3_64_hexdigest("\n".join([url, *versions]).encode())
        entry = self.directory / f"{name}-{digest}"
        while True:
            self.directory.mkdir(parents=True, exist_ok=True)
            make_own_folder(entry)
            with self.in_use.if_free(str(entry)) as unused:
                if unused:  # also by other machines, which may share the home directory
                    _remove_earlier_chunks(entry)
            self.in_use.share(str(entry))
            if entry.exists():
                return entry
            self.in_use.give_back(str(entry))  # eviction removed it meanwhile

    def give_back(self, entry: Path) -> None:
        """Remove an entry unless another process or thread uses it."""
        self.in_use.give_back(str(entry))
        with self.in_use.if_free(str(entry)) as free:
            if free:
                remove_own_folder(entry)

    def fetch(
        self,
        remote_object: RemoteObject,
        path: Path,
        check: Callable[[Path], object] = lambda _: None,
        progress: Callable[[], object] = lambda: None,
    ) -> None:
        """Fetch a whole object to a path, complete or not at all; do nothing if the path exists. If
        several processes need it, one of them fetches it and the others wait.

        ``check`` is called with the file and raises FormatError or WrongBytesError if it is
        damaged; any thread may call ``progress``, once per received part. Raises FormatError if the
        received bytes are repeatedly wrong, OSError if the disk is full, TimeoutError if nothing
        arrives (``Patience``), and the errors of ``RemoteObject.read``.
        """

        def attempt() -> None:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = AtomicFile(path)
            try:
                self._download(remote_object, file, progress)
                try:
                    check(file.temporary)
                except FormatError as error:
                    text = str(error).replace(str(file.temporary), remote_object.url)
                    raise WrongBytesError(text.replace(file.temporary.name, path.name)) from error
                file.take_name()
            except FileNotFoundError as error:  # the object or the folder is missing
                if error.filename is None or Path(error.filename) != file.temporary:
                    raise
                why = f"another program empties the cache {self.directory} (see MEGAPACK_CACHE)"
                raise WrongBytesError(why) from error
            finally:
                file.discard()

        def bytes_here() -> int:  # written by the downloading process
            with contextlib.suppress(FileNotFoundError):
                files = temporary_files(path.parent)
                return sum(bytes_on_disk(file) for name, file in files if name == path.name)
            return 0

        def awaited() -> str:
            owner = self.locks.owner(str(path))
            return f"{remote_object.url}, which process {owner} of this node fetches"

        patience = Patience(awaited, bytes_here)
        with self.locks.held(str(path), waiting=patience.check):
            if not path.exists():
                retry_wrong_bytes(remote_object.url, attempt)

    def _download(
        self, remote_object: RemoteObject, file: AtomicFile, progress: Callable[[], object]
    ) -> None:
        request_bytes, path = CHUNK_BLOCKS * BLOCK_BYTES, file.temporary
        with self.naming_full_disk():

            def fetch(begin: int) -> None:
                end = min(begin + request_bytes, remote_object.num_bytes)
                _write_at(file.file.fileno(), remote_object.read(begin, end), begin)
                progress()

            def awaited() -> str:
                received = f"{size(bytes_on_disk(path))} of {size(remote_object.num_bytes)}"
                return f"{remote_object.url} ({received} received)"

            begins = range(0, remote_object.num_bytes, request_bytes)
            requests = [self.submit(fetch, begin) for begin in begins]
            try:
                wait_for(requests, Patience(awaited, lambda: bytes_on_disk(path)))
            finally:  # no request may write after the file is closed
                for request in requests:
                    request.cancel()
                wait(request for request in requests if not request.cancelled())
            file.sync()

    def will_write(self, num_bytes: int) -> None:
        """Announce a write; check for eviction if many bytes were written since the last check."""
        if self.limit is None:
            return
        with self._lock:
            self._written += num_bytes
            if self._written < self.limit // 64:
                return
            self._written = 0
        make_room(self)

    @contextlib.contextmanager
    def naming_full_disk(self) -> Iterator[None]:
        """Add the directory and a remedy to the OSErrors of a full disk."""
        try:
            yield
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise OSError(
                error.errno,
                f"the disk of the cache is full ({os.strerror(error.errno)}): free space, set "
                "MEGAPACK_CACHE to another disk, or set MEGAPACK_CACHE_SIZE to less than its size",
                str(self.directory),
            ) from error


def make_room(cache: Cache) -> int:
    """If a cache with a limit is nearly full, free an eighth of it; return the bytes freed.

    Remove unused entries first, oldest first. Then chunks that were not requested or read for ten
    minutes, newest first: the schedule will need the newest last, an epoch later. Then the other
    chunks, which may still be needed, in the order of their last use.
    """
    assert cache.limit is not None
    freed = 0
    with cache.locks.if_free("eviction") as free:
        if not free:
            return 0
        # Other files in the directory are neither counted nor removed.
        entries = [path for path in cache.directory.glob("*") if is_own_folder(path)]
        files = {entry: list(files_below(entry)) for entry in entries}
        used = sum(file.num_bytes for files_of_entry in files.values() for file in files_of_entry)
        excess = used - cache.limit * (FREE_PART - 1) // FREE_PART
        if excess <= cache.limit // (2 * FREE_PART):
            return 0
        for entry in sorted(files, key=lambda e: max((f.touched_at for f in files[e]), default=0)):
            if freed >= excess:
                break
            with cache.in_use.if_free(str(entry)) as unused:
                if unused:
                    freed += sum(file.num_bytes for file in files.pop(entry))
                    remove_own_folder(entry)
        long_ago = time.time() - READ_SECONDS

        def eviction_order(chunk: FileOnDisk) -> tuple[bool, float]:
            at = chunk.touched_at
            return (False, -at) if at < long_ago else (True, at)

        chunks = (f for e in files for f in files[e] if _CHUNKS.fullmatch(f.path.parent.name))
        for chunk in sorted(chunks, key=eviction_order):
            if freed >= excess:
                break
            freed += chunk.num_bytes
            chunk.path.unlink(missing_ok=True)
    return freed


def _remove_earlier_chunks(entry: Path) -> None:
    """Remove the chunks that were written before the last boot of the machine."""
    with contextlib.suppress(FileNotFoundError):
        for folder in entry.iterdir():
            if _CHUNKS.fullmatch(folder.name) and not folder.name.endswith(f".{_boot()}"):
                shutil.rmtree(folder, ignore_errors=True)


def bytes_on_disk(path: Path) -> int:
    """Return how many bytes a file uses on the disk; 0 if another process has just removed it."""
    with contextlib.suppress(FileNotFoundError):
        return path.stat().st_blocks * 512
    return 0
