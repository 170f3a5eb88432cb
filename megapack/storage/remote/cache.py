"""The local cache of what lies far away, shared by all processes of a node.

- ``open_cache``: the one that the environment names; ``Cache``: its entries and whole files
- ``Chunks``: the blocks of one .bin that are here; ``make_room``: which of them go
- ``RangeLocks``: between processes; ``wait_for``, ``Patience``: waiting that is said and ends

Every version of a dataset or file has an entry, a directory that its address and the versions of
its objects name: what was replaced far away is never taken for what stands there now::

    ~/.cache/megapack/                 MEGAPACK_CACHE: on a disk of this node, or in /dev/shm
      locks  in_use                    empty: ranges of them are locked
      web-9e3779b97f4a7c15/web.idx     a whole file
      web-9e3779b97f4a7c15/web.bin.6b1d0f2e/     of this start of the machine
        0                              blocks 0 to 255 (16 KiB each, 4 MiB together), then 256
        17                             bytes: 1 where the block is here. Blocks 4352 to 4607

A block is added to a chunk when it is complete and checked. Eviction unlinks whole chunks, without
asking: a reader copies a batch's blocks into its own memory and fetches missing blocks again. Whole
files of 4 MiB would be simpler, but an unarranged source would read 500 bytes per byte used, not 4.

``MEGAPACK_CACHE_SIZE`` says what the cache may hold (``megapack.units``); all by default.
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
    until_right,
)
from megapack.units import parse_size, size

log = logging.getLogger(__name__)

# ---- Locks between the processes of a node: the kernel's, so a process that dies holds none -----

_POLL_SECONDS = 0.005
_FLOCK = struct.Struct("hhqqi4x")  # Linux: type, whence, begin, length, process


class RangeLocks:
    """Locks on ranges of numbers under a name, all in one file of which no byte is ever written.

    A name is a part of the file that its hash chooses; two names of one hash wait for each other
    now and then. The file is opened once and stays open: closing it anywhere would give all locks
    of the process back (POSIX). Nobody waits in the kernel: who waits can be told to stop.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._file = path, os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        # The kernel knows processes only; what threads of this one hold stands here.
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
        """Wait until nobody has a name for himself, and keep it so until it is given back as often
        as it was shared, or this process ends."""
        only = range(_begin(name), _begin(name) + 1)
        while True:
            with self._mutex:
                free = not self._is_ours(only)
                if only[0] in self._shared or (free and self._from_kernel(fcntl.LOCK_SH, only)):
                    self._shared[only[0]] += 1
                    return
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

    def _is_ours(self, wanted: range) -> bool:
        return any(wanted.start < ours.stop and ours.start < wanted.stop for ours in self._ours)

    def _from_kernel(self, kind: int, wanted: range) -> bool:
        try:
            fcntl.lockf(self._file, kind | fcntl.LOCK_NB, len(wanted), wanted.start)
        except (BlockingIOError, PermissionError):  # POSIX allows either
            return False
        except OSError as error:
            why = f"{error.strerror}: let MEGAPACK_CACHE name a directory on a disk with file locks"
            raise OSError(error.errno, why, str(self._path)) from error
        return True


def _begin(name: str) -> int:
    return (xxhash.xxh3_64_intdigest(name.encode()) & 0x3FFF_FFFF) << 32


# ---- Waiting for what is fetched: said aloud, never for ever, and not when the program ends -----
# Whoever waits for a request has no lock that a request takes, and nothing is called back: a
# request that is done has done all its work in its own thread.

WARN_SECONDS = 30.0  # between lines of what is waited for
STALLED_RETRIES = 5  # times the longest that a request is tried: by then it has come or failed

_FETCH_POLL_SECONDS = 1.0


class Patience:
    """Patience of a waiting reader: says now and then what it waits for, and gives up in the end.

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
            TimeoutError: nothing has moved for ``STALLED_RETRIES`` times as long as the client
                tries a request again and its last attempt may take.
            RuntimeError: the program ends.
        """
        if ending.is_set():
            raise RuntimeError(f"not waiting any more for {self._what()}: the program ends")
        now, seen = time.monotonic(), self._moved()
        if seen != self._seen:
            self._seen, self._moved_at = seen, now
        limit = STALLED_RETRIES * (retry_seconds() + REQUEST_TIMEOUT.total_seconds())
        if now - self._moved_at > limit:
            raise TimeoutError(
                f"nothing came for {now - self._moved_at:,.0f} seconds (limit {limit:,.0f}, "
                f"{STALLED_RETRIES} times MEGAPACK_RETRY_SECONDS and a request's "
                f"{REQUEST_TIMEOUT.total_seconds():.0f}) of {self._what()}: start the run again, "
                "and look whether the store answers and other processes of this node live"
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


# ---- The blocks of one .bin that are here -------------------------------------------------------

CHUNK_BLOCKS = 256  # of a file, 4 MiB; a request is of one: its latency does not count then

Blocks: TypeAlias = NDArray[np.int64]  # numbers of blocks, ascending, each once


class Chunks:
    """Files of ``CHUNK_BLOCKS`` blocks each, in a folder beside where the .bin would lie.

    What was written before the machine's last start may never have reached the disk: it is not
    looked at, and removed with the entry's next use.
    """

    def __init__(self, bin_path: Path) -> None:
        self.folder = bin_path.with_name(f"{bin_path.name}.{_boot()}")

    def copy(self, blocks: Blocks, data: NDArray[np.uint8] | None) -> Blocks:
        """Copy the blocks that are here to their places in ``data``, all of the .bin's bytes (None:
        only look); returns the others."""
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
                os.utime(file)  # which ``make_room`` goes by
                here = _marks(file)[part % CHUNK_BLOCKS] == 1
                absent.append(part[~here])
                for begin, end in runs_of(part[here]) if data is not None else ():
                    assert data is not None
                    into = data[begin * BLOCK_BYTES : end * BLOCK_BYTES].data
                    if os.preadv(file, [into], begin % CHUNK_BLOCKS * BLOCK_BYTES) != into.nbytes:
                        why = "became shorter: something else writes into the cache"
                        raise OSError(errno.EIO, why, str(path))
            finally:
                os.close(file)
        return np.concatenate(absent)

    def write(self, first: int, data: memoryview) -> None:
        """Add blocks of one chunk, from block ``first`` on. The caller holds their lock.

        Raises:
            OSError: the disk is full.
        """
        chunk, at = divmod(first, CHUNK_BLOCKS)
        path, flags = self.folder / str(chunk), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        while True:
            with contextlib.suppress(FileNotFoundError):  # removed by whoever wants room
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
    """Half-open ranges that hold ascending numbers, over gaps of up to so many others."""
    for run in np.split(numbers, np.flatnonzero(np.diff(numbers) > gap + 1) + 1):
        if run.size:
            yield int(run[0]), int(run[-1]) + 1


def requests_of(blocks: Blocks, gap: int) -> Iterator[tuple[int, int]]:
    """Requests that bring blocks: their runs, cut where a chunk ends."""
    for begin, end in runs_of(blocks, gap):
        ends_of_chunks = range((begin // CHUNK_BLOCKS + 1) * CHUNK_BLOCKS, end, CHUNK_BLOCKS)
        yield from pairwise([begin, *ends_of_chunks, end])


def _marks(file: int) -> NDArray[np.uint8]:
    """A byte for each block of a chunk's file: 1, it is here."""
    marks = os.pread(file, CHUNK_BLOCKS, CHUNK_BLOCKS * BLOCK_BYTES)
    return np.frombuffer(marks.ljust(CHUNK_BLOCKS, b"\0"), np.uint8)


def _write_at(file: int, data: memoryview, at: int) -> None:
    while data:
        written = os.pwrite(file, data, at)
        data, at = data[written:], at + written


def _boot() -> str:
    """Of this start of the machine, 8 hexadecimal digits."""
    number = Path("/proc/sys/kernel/random/boot_id").read_bytes().strip()
    return xxhash.xxh3_64_hexdigest(number)[:8]


# ---- The cache: a directory, its entries, and the threads that fetch ----------------------------

NUM_REQUESTS = 64  # at a time, of a process: at most 256 MiB wait for their disk
SMALLEST_SIZE = 1 << 28
FREE_PART = 8  # one in so many bytes is freed at once
READ_SECONDS = 600  # after which what was asked for has been read
_CHUNKS = re.compile(r".+\.bin\.[0-9a-f]{8}")  # name of a folder of chunks in an entry


def open_cache() -> Cache:
    """The one that the environment names.

    Raises:
        ConfigError: a variable cannot be what it is.
        OSError: the directory cannot be made.
    """
    directory = os.environ.get("MEGAPACK_CACHE") or Path.home() / ".cache" / "megapack"
    limit = _limit()
    opened = _open_cache(os.path.realpath(directory), os.getpid())
    opened.limit = limit
    return opened


@cache
def _open_cache(directory: str, _pid: int) -> Cache:
    """One per process: its locks are the process's."""
    return Cache(Path(directory))


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


class Cache:
    """Cache in one directory.

    Attributes:
        limit: bytes it may hold, or None.
        locks: between the processes that use it; in_use: shared ones, on entries.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.limit: int | None = None
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self.locks = RangeLocks(directory / "locks")
            self.in_use = RangeLocks(directory / "in_use")
        except OSError as error:
            why = f"{error.strerror}: let MEGAPACK_CACHE name a directory where this user may write"
            raise OSError(error.errno, why, str(directory)) from error
        self._pool = ThreadPoolExecutor(NUM_REQUESTS, "megapack-fetch")
        # Before the interpreter waits for the pool's threads: else all that is queued was fetched.
        threading._register_atexit(self._end)  # type: ignore[attr-defined]
        self._lock = threading.Lock()
        self._written = SMALLEST_SIZE  # since the last look at all of it; at first look at once

    def _end(self) -> None:
        ending.set()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Have ``function(*arguments)`` called by one of the threads that fetch.

        Raises:
            ConfigError: this process was forked from one that fetches.
            RuntimeError: the program ends.
        """
        refuse_fork()
        return self._pool.submit(function, *arguments)

    def entry(self, name: str, url: str, *objects: RemoteObject | None) -> Path:
        """The directory of these versions of objects, which stays as long as this process."""
        versions = [found.version if found else "none" for found in objects]
        digest = xxhash.xxh3_64_hexdigest("\n".join([url, *versions]).encode())
        entry = self.directory / f"{name}-{digest}"
        while True:
            self.directory.mkdir(parents=True, exist_ok=True)
            make_own_folder(entry)
            with self.in_use.if_free(str(entry)) as unused:
                if unused:  # also by other machines: home directories are shared
                    _remove_earlier_chunks(entry)
            self.in_use.share(str(entry))
            if entry.exists():
                return entry
            self.in_use.give_back(str(entry))  # it was removed in between, to make room

    def give_back(self, entry: Path) -> None:
        """Remove an entry, unless others have it open as well."""
        self.in_use.give_back(str(entry))
        with self.in_use.if_free(str(entry)) as free:
            if free:
                remove_own_folder(entry)

    def fetch(
        self,
        found: RemoteObject,
        path: Path,
        check: Callable[[Path], object] = lambda _: None,
        progress: Callable[[], object] = lambda: None,
    ) -> None:
        """Have a whole object at a path, complete or not at all, fetched by one process.

        Args:
            found: the object.
            path: in an entry, or any other; its directory is created.
            check: raises FormatError or WrongBytesError where the file that it is given is not what
                it should be.
            progress: called for every part that came, by any thread.

        Raises:
            FormatError: what came is wrong again and again.
            OSError: as of ``RemoteObject.read``, or the disk is full.
        """

        def attempt() -> None:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = AtomicFile(path)
            try:
                self._download(found, file, progress)
                try:
                    check(file.temporary)
                except FormatError as error:
                    text = str(error).replace(str(file.temporary), found.url)
                    raise WrongBytesError(text.replace(file.temporary.name, path.name)) from error
                file.take_name()
            except FileNotFoundError as error:  # of the object, or of the folder
                if error.filename is None or Path(error.filename) != file.temporary:
                    raise
                why = f"something else empties the cache {self.directory} (see MEGAPACK_CACHE)"
                raise WrongBytesError(why) from error
            finally:
                file.discard()

        def bytes_here() -> int:
            """Return how much the process that downloads the file has written."""
            with contextlib.suppress(FileNotFoundError):
                files = temporary_files(path.parent)
                return sum(bytes_on_disk(file) for name, file in files if name == path.name)
            return 0

        def awaited() -> str:
            return f"{found.url}, which process {self.locks.owner(str(path))} of this node fetches"

        patience = Patience(awaited, bytes_here)
        with self.locks.held(str(path), waiting=patience.check):
            if not path.exists():
                until_right(found.url, attempt)

    def _download(
        self, found: RemoteObject, file: AtomicFile, progress: Callable[[], object]
    ) -> None:
        request_bytes, path = CHUNK_BLOCKS * BLOCK_BYTES, file.temporary
        with self.naming_full_disk():

            def fetch(begin: int) -> None:
                end = min(begin + request_bytes, found.num_bytes)
                _write_at(file.file.fileno(), found.read(begin, end), begin)
                progress()

            def awaited() -> str:
                return f"{found.url} ({size(bytes_on_disk(path))} of {size(found.num_bytes)} came)"

            begins = range(0, found.num_bytes, request_bytes)
            requests = [self.submit(fetch, begin) for begin in begins]
            try:
                wait_for(requests, Patience(awaited, lambda: bytes_on_disk(path)))
            finally:  # none may write when the file is closed
                for request in requests:
                    request.cancel()
                wait(request for request in requests if not request.cancelled())
            file.sync()

    def will_write(self, num_bytes: int) -> None:
        """Make room, if so much was written since the last time that somebody should look."""
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


def make_room(cache: Cache) -> int:
    """Free an eighth of a cache with a limit if it is nearly full; return the bytes freed.

    Entries that no process uses go first, oldest first. Then chunks that were not requested or read
    in the last ten minutes, newest first: the schedule needs those last, an epoch later. Then the
    other chunks, some of which are still to be read, in the order of their requests.
    """
    assert cache.limit is not None
    freed = 0
    with cache.locks.if_free("eviction") as free:
        if not free:
            return 0
        # Other files in the directory are neither counted nor removed.
        entries = [path for path in cache.directory.glob("*") if is_own_folder(path)]
        files = {entry: list(files_below(entry)) for entry in entries}
        used = sum(file.num_bytes for found in files.values() for file in found)
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

        def turn(chunk: FileOnDisk) -> tuple[bool, float]:
            at = chunk.touched_at
            return (False, -at) if at < long_ago else (True, at)

        chunks = (f for e in files for f in files[e] if _is_chunk(f, e))
        for chunk in sorted(chunks, key=turn):
            if freed >= excess:
                break
            freed += chunk.num_bytes
            chunk.path.unlink(missing_ok=True)
    return freed


def _is_chunk(file: FileOnDisk, entry: Path) -> bool:
    folder = file.path.parent
    return folder.parent == entry and _CHUNKS.fullmatch(folder.name) is not None


def _remove_earlier_chunks(entry: Path) -> None:
    """Those of earlier starts of the machine."""
    with contextlib.suppress(FileNotFoundError):
        for folder in entry.iterdir():
            if _CHUNKS.fullmatch(folder.name) and not folder.name.endswith(f".{_boot()}"):
                shutil.rmtree(folder, ignore_errors=True)


def bytes_on_disk(path: Path) -> int:
    """Bytes of a file on the disk; 0 if another process has just removed it."""
    try:
        return path.stat().st_blocks * 512
    except FileNotFoundError:
        return 0
