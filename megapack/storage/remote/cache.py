"""Room in a cache of a given size, made by what is known of the future.

A run knows what it will read next, and that a sample that it has read is needed an epoch later at
the earliest. So entries that nobody uses go first; then blocks that were used, the last used first,
since they are needed again last (what was used within the last seconds waits: a peer on this node
may be about to read it); then planned blocks, those needed last first. That is the best there is
where a block holds one sample or those of an arranged source; others of a block come sooner.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import errno
import fcntl
import logging
import mmap
import os
import queue
import shutil
import struct
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import xxhash
from numpy.typing import NDArray

from megapack.errors import ConfigError, FormatError
from megapack.storage.remote.checksums import BLOCK_BYTES
from megapack.storage.remote.client import (
    RemoteObject,
    WrongBytesError,
    ending,
    raise_if_ending,
    refuse_fork,
    retry_seconds,
    until_right,
)
from megapack.units import parse_size, size

# ---- Locks between the processes of a node: the kernel's, so a process that dies holds none -----

_POLL_SECONDS = 0.005
_FLOCK = struct.Struct("hhqqi4x")  # Linux: type, whence, begin, length, process


class RangeLocks:
    """Locks on ranges of numbers under a name, all in one file of which no byte is ever written.

    A name is a part of the file that its hash chooses; two names of one hash wait for each other
    now and then. The file is opened once and stays open: closing it anywhere would give all locks
    of the process back (POSIX). Nobody waits in the kernel: who waits can be told to stop.

    Args:
        path: of the file.
    """

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        # The kernel knows processes only; what threads of this one hold stands here.
        self._ours: list[tuple[int, int]] = []
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
        """Wait for numbers ``[first, first + count)`` of a name and keep everybody else away.

        Args:
            waiting: called again and again until they are free; what it raises ends it.
        """
        while True:
            with self.if_free(name, first, count) as free:
                if free:
                    yield
                    return
            waiting()
            time.sleep(_POLL_SECONDS)

    @contextlib.contextmanager
    def if_free(self, name: str, first: int = 0, count: int = 1) -> Iterator[bool]:
        """The same without waiting: whether they were free, and are held now."""
        begin = _begin(name) + first
        free = self._lock(begin, begin + count)
        try:
            yield free
        finally:
            if free:
                self._unlock(begin, begin + count)

    def share(self, name: str) -> None:
        """Wait until nobody has a name for himself, and keep it so until it is given back as often
        as it was shared, or this process ends."""
        begin = _begin(name)
        while not self._share(begin):
            raise_if_ending()
            time.sleep(_POLL_SECONDS)

    def give_back(self, name: str) -> None:
        """What ``share`` took."""
        begin = _begin(name)
        with self._mutex:
            self._shared[begin] -= 1
            if not self._shared[begin]:
                del self._shared[begin]
                fcntl.lockf(self._file, fcntl.LOCK_UN, 1, begin)

    def owner(self, name: str, first: int = 0) -> int | None:
        """The id of another process that holds a number of a name, if one does."""
        question = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, _begin(name) + first, 1, 0)
        kind, *_, process = _FLOCK.unpack(fcntl.fcntl(self._file, fcntl.F_GETLK, question))
        return None if kind == fcntl.F_UNLCK else int(process)

    def _lock(self, begin: int, end: int) -> bool:
        with self._mutex:
            if begin in self._shared or self._is_ours(begin, end):
                return False
            if not self._from_kernel(fcntl.LOCK_EX, begin, end):
                return False
            self._ours.append((begin, end))
            return True

    def _unlock(self, begin: int, end: int) -> None:
        with self._mutex:
            self._ours.remove((begin, end))
            fcntl.lockf(self._file, fcntl.LOCK_UN, end - begin, begin)

    def _share(self, begin: int) -> bool:
        with self._mutex:
            if self._is_ours(begin, begin + 1):
                return False
            if begin not in self._shared and not self._from_kernel(fcntl.LOCK_SH, begin, begin + 1):
                return False
            self._shared[begin] += 1
            return True

    def _is_ours(self, begin: int, end: int) -> bool:
        return any(begin < theirs_end and their < end for their, theirs_end in self._ours)

    def _from_kernel(self, kind: int, begin: int, end: int) -> bool:
        try:
            fcntl.lockf(self._file, kind | fcntl.LOCK_NB, end - begin, begin)
        except (BlockingIOError, PermissionError):  # POSIX allows either
            return False
        return True


def _begin(name: str) -> int:
    return (xxhash.xxh3_64_intdigest(name.encode()) & 0x3FFF_FFFF) << 32


# ---- Threads that fetch, and waiting for them: said aloud, never for ever, and not when the progra
# ends.
#
# A program that ends waits for the requests that are on their way, not for those that are queued.
# Whoever waits for a request has no lock that a request takes, and nothing is called back: a
# request
# that is done has done all its work in its own thread.

log = logging.getLogger(__name__)

WARN_SECONDS = 30.0  # between lines of what is waited for
STALLED_RETRIES = 5  # times the client's limit: by then every request has come or failed

_FETCH_POLL_SECONDS = 1.0
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
        done, pending = wait(pending, min(_FETCH_POLL_SECONDS, WARN_SECONDS), FIRST_EXCEPTION)
        for request in done:
            request.result()
        if pending:
            patience.check()


# ---- A file of which only some blocks are here, shared by all processes that map it -------------
# Beside the file lies its state, two uint32 per block, mapped and written by everybody:
#
# - ``changes`` counts how often the block came or went: odd, it is here, whole and checked
# - ``stamps``: seconds since 1970. In the past: when it was last used. In the future: it is planned
#   for; the later it is needed, the larger the stamp.
#
# Readers take no lock. They look at ``changes``, read, and look again: where a block went
# meanwhile,
# its count differs and what was read is thrown away (a sequence lock). Writers hold a range lock,
# so
# a count is raised by one of them at a time. One that dies leaves its blocks even: not here.

PLANNED_SECONDS = 600  # how far in the future the stamp of a planned block is

_HEADER = struct.Struct("<8s36sxxxxqq")  # magic, boot, size of the file, bytes of a block
_MAGIC = b"MEGASTAT"
_KEEP_SIZE, _PUNCH_HOLE = 1, 2  # of Linux's fallocate
_libc = ctypes.CDLL(None, use_errno=True)


class SparseFile:
    """One of them, mapped.

    Args:
        path: of the file; the state is ``<path>.state``.
        num_bytes: its size.
        locks: of the cache.

    Attributes:
        data: uint8 (num_bytes,), read-only; what is not here reads as zeros.
        changes, stamps: uint32 (num_blocks,), shared.

    Raises:
        OSError: the files cannot be made.
    """

    def __init__(self, path: Path, num_bytes: int, locks: RangeLocks) -> None:
        self.path, self.num_bytes, self.name = path, num_bytes, str(path)
        self.num_blocks = -(-num_bytes // BLOCK_BYTES)
        self._locks = locks
        state_path = path.with_name(f"{path.name}.state")
        with locks.held(f"{self.name}.state"):
            if not _is_valid(state_path, num_bytes):
                self._create(state_path)
            with path.open("rb") as file:
                self._identity = _identity(file.fileno())
                self.data: NDArray[np.uint8] = _mapped(file.fileno(), num_bytes, mmap.PROT_READ)
        with state_path.open("r+b") as file:
            size = _HEADER.size + 8 * self.num_blocks
            state = _mapped(file.fileno(), size, mmap.PROT_READ | mmap.PROT_WRITE)
        self.changes, self.stamps = state[_HEADER.size :].view(np.uint32).reshape(2, -1)

    def _create(self, state_path: Path) -> None:
        """Both files, empty. What an earlier boot left may never have reached the disk."""
        self.path.unlink(missing_ok=True)
        with self.path.open("xb") as file:
            file.truncate(self.num_bytes)
        temporary = state_path.with_name(f"{state_path.name}.tmp")
        with temporary.open("wb") as file:
            file.write(_HEADER.pack(_MAGIC, _boot(), self.num_bytes, BLOCK_BYTES))
            # All of it now: a full disk would else end whoever writes to the mapping (SIGBUS).
            os.posix_fallocate(file.fileno(), 0, _HEADER.size + 8 * max(self.num_blocks, 1))
        temporary.replace(state_path)

    def is_here(self, first: int, last: int) -> NDArray[np.bool_]:
        """(last - first,) of blocks ``[first, last)``."""
        here: NDArray[np.bool_] = self.changes[first:last] % 2 == 1
        return here

    def put(self, first: int, last: int, data: memoryview) -> None:
        """Write those of blocks ``[first, last)`` that are not here. The caller holds their lock.

        Raises:
            OSError: the disk is full, or the file was removed.
        """
        file = self._open()
        try:
            for begin, end in runs_of(np.flatnonzero(~self.is_here(first, last))):
                part = data[begin * BLOCK_BYTES : end * BLOCK_BYTES]
                at = (first + begin) * BLOCK_BYTES
                while part:
                    written = os.pwrite(file, part, at)
                    part, at = part[written:], at + written
                stamps = self.stamps[first + begin : first + end]
                stamps[:] = np.maximum(stamps, int(time.time()))  # what is planned stays so
                self.changes[first + begin : first + end] += 1
        finally:
            os.close(file)

    def drop(self, blocks: NDArray[np.int64]) -> None:
        """Give the disk space of blocks back, but of those that somebody writes just now."""
        file = self._open()
        try:
            for begin, end in runs_of(blocks):
                with self._locks.if_free(self.name, begin, end - begin) as free:
                    if free:
                        here = np.flatnonzero(self.is_here(begin, end))
                        self.changes[begin + here] += 1  # first: who reads now sees it afterwards
                        _punch(file, begin * BLOCK_BYTES, (end - begin) * BLOCK_BYTES)
        finally:
            os.close(file)

    def _open(self) -> int:
        file = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
        if _identity(file) != self._identity:
            os.close(file)
            raise FileNotFoundError(
                errno.ENOENT, "removed from the cache while it was in use", self.name
            )
        return file


def runs_of(numbers: NDArray[np.int64], gap: int = 0) -> list[tuple[int, int]]:
    """Half-open ranges that hold ascending numbers, over gaps of up to so many others."""
    if not numbers.size:
        return []
    breaks = np.flatnonzero(np.diff(numbers) > 1 + gap)
    begins = numbers[np.concatenate([[0], breaks + 1])]
    ends = numbers[np.concatenate([breaks, [numbers.size - 1]])] + 1
    return list(zip(begins.tolist(), ends.tolist(), strict=True))


def _is_valid(state_path: Path, num_bytes: int) -> bool:
    try:
        with state_path.open("rb") as file:
            return file.read(_HEADER.size) == _HEADER.pack(_MAGIC, _boot(), num_bytes, BLOCK_BYTES)
    except FileNotFoundError:
        return False


def _boot() -> bytes:
    """What differs after every start of the machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_bytes().strip()


def _identity(file: int) -> tuple[int, int]:
    status = os.fstat(file)
    return status.st_dev, status.st_ino


def _mapped(file: int, num_bytes: int, access: int) -> NDArray[Any]:
    if num_bytes == 0:
        return np.zeros(0, np.uint8)
    return np.frombuffer(mmap.mmap(file, num_bytes, mmap.MAP_SHARED, access), np.uint8)


def _punch(file: int, begin: int, num_bytes: int) -> None:
    offset, length = ctypes.c_longlong(begin), ctypes.c_longlong(num_bytes)
    if _libc.fallocate(file, _KEEP_SIZE | _PUNCH_HOLE, offset, length) != 0:
        code = ctypes.get_errno()
        if code == errno.EOPNOTSUPP:
            raise ConfigError(
                "the cache's file system cannot free parts of a file (punch holes): put "
                "MEGAPACK_CACHE on ext4, xfs, btrfs or tmpfs, or leave out MEGAPACK_CACHE_SIZE"
            )
        raise OSError(code, os.strerror(code))


# ---- The local cache, shared by all processes of a node: a directory, and what may lie in it ----
# Every version of a dataset or file has an entry of its own, a directory that its address and the
# versions of its objects name: what was replaced far away is never taken for what stands there now.
# Two environment variables reach every rank and every command:
#
# - ``MEGAPACK_CACHE``: the directory, on a disk of this node (or in its memory: /dev/shm);
#   ``~/.cache/megapack`` by default
# - ``MEGAPACK_CACHE_SIZE``: what it may hold, a size (``megapack.units``); all by default

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


FREE_PART = 8  # one in so many bytes is freed at once
PEER_SECONDS = 5


def make_room(cache: Cache) -> None:
    """Free a part of a cache with a limit, if it is nearly full. Of files that others have open
    and this process has not, nothing is freed.

    Raises:
        ConfigError: its file system cannot free parts of files.
        OSError: it cannot be read.
    """
    assert cache.limit is not None
    with cache.locks.if_free("eviction") as free:
        if not free:
            return
        excess = _used_bytes(cache.directory) - cache.limit * (FREE_PART - 1) // FREE_PART
        if excess <= cache.limit // (2 * FREE_PART):
            return
        excess -= _remove_unused(cache, excess)
        if excess > 0:
            _drop_blocks(cache.open_files(), -(-excess // BLOCK_BYTES))


def _used_bytes(directory: Path) -> int:
    """Of all files in it and below; entries may come and go meanwhile."""
    return sum(
        bytes_on_disk(Path(folder, name))
        for folder, _, names in os.walk(directory)
        for name in names
    )


def _remove_unused(cache: Cache, excess: int) -> int:
    """Entries that no process has open, the oldest first; bytes that were freed."""
    freed = 0
    entries = [path for path in cache.directory.iterdir() if path.is_dir()]
    for entry in sorted(entries, key=_age):
        if freed >= excess:
            break
        with cache.in_use.if_free(str(entry)) as free:
            if free:
                freed += _used_bytes(entry)
                shutil.rmtree(entry, ignore_errors=True)
    return freed


def _age(entry: Path) -> float:
    try:
        return entry.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _drop_blocks(files: list[SparseFile], num_blocks: int) -> None:
    here = [np.flatnonzero(file.is_here(0, file.num_blocks)) for file in files]
    owner = np.repeat(np.arange(len(files)), [blocks.size for blocks in here])
    blocks = np.concatenate([*here, np.zeros(0, np.int64)])
    stamps = np.concatenate([file.stamps[own] for file, own in zip(files, here, strict=True)])
    chosen = np.argsort(_turn(stamps, int(time.time())), kind="stable")[:num_blocks]
    for number, file in enumerate(files):
        file.drop(np.sort(blocks[chosen[owner[chosen] == number]]))


def _turn(stamps: NDArray[np.uint32], now: int) -> NDArray[np.int64]:
    """Whose turn comes earlier, smaller."""
    stamp = stamps.astype(np.int64)
    used = now - stamp
    return np.where(used > PEER_SECONDS, used, np.where(used >= 0, 2**33 - used, 2**35 - stamp))
