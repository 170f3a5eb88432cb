"""Functions that open and check files, write them under a temporary name, and lock them.

- ``open_regular``, ``read_array_blocks``: regular files only, in blocks; ``Identity``, ``is_at``
- ``check_target``, ``target_of``: decide whether a new file may replace an existing one
- ``AtomicFile``, ``atomic_write``, ``publish``: a temporary name, fsync, rename
- ``create_temporary``, ``remove_leftovers``: temporary names that prove that megapack made the file

A final name always holds a complete file, also after an exception, a full disk or kill -9::

    with atomic_write("x.samples") as file:     # x.samples.tmp-0f3a9c1e
        file.write(b"...")
    # -> x.samples; kill -9 leaves at most x.samples.tmp-0f3a9c1e

The writer locks its temporary file, and the kernel unlocks it when the process exits. So the next
writer of the same name detects a leftover and removes it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import io
import logging
import os
import re
import secrets
import stat
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple, Protocol, TypeAlias, TypeVar

import numpy as np
from numpy.typing import DTypeLike, NDArray

from megapack.errors import ConfigError, FormatError

logger = logging.getLogger(__name__)
T = TypeVar("T")

Buffer: TypeAlias = Any  # bytes, a memoryview, a contiguous array (typing.Buffer from 3.12 on)

BLOCK = 1 << 17  # elements: they stay in the CPU cache while they are summed, hashed, written
COPY_BLOCK = 1 << 22  # bytes
TEMPORARY_BYTES = len(".tmp-01234567")  # longer than the final name
_TEMPORARY = re.compile(r"(.+)\.tmp-([0-9a-z]{3})([0-9a-z]{5})", re.DOTALL)
_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"
_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFLNK: "a circular link",
}
# Errors of copy_file_range on other file systems, old kernels and special files.
_CANNOT_COPY_IN_KERNEL = {errno.EXDEV, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}
_CANNOT_COPY_IN_KERNEL |= {errno.ENOTSUP, errno.EBADF, errno.EPERM}
_MISSING = {errno.ENOENT, errno.ENOTDIR, errno.EBADF, errno.ELOOP}
NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL}


def open_regular(path: str | os.PathLike[str]) -> io.FileIO:
    """Open a file without a buffer. Raises FormatError if it is not a regular file (a FIFO would
    block, a device has no end)."""

    def opener(path: str, flags: int) -> int:
        descriptor = os.open(path, flags | os.O_NONBLOCK)
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            return descriptor
        os.close(descriptor)
        raise FormatError(f"{path} is not a regular file; data is read from files only")

    return io.FileIO(os.fspath(path), "rb", opener=opener)


def file_exists(path: str) -> bool:
    """Return ``Path(path).exists()``, in a third of the time."""
    try:
        os.stat(path)  # noqa: PTH116 (fast)
    except OSError as error:
        if error.errno not in _MISSING:
            raise
        return False
    except ValueError:  # NUL
        return False
    return True


class Identity(NamedTuple):
    """Identity of an open file; it changes when the file is modified or replaced."""

    device: int
    inode: int
    num_bytes: int
    changed_ns: int


def file_identity(file: io.FileIO) -> Identity:
    status = os.fstat(file.fileno())
    return Identity(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


def is_at(identity: Identity, path: str | os.PathLike[str]) -> bool:
    """Return whether a path still leads to the file with this identity."""
    try:
        with open_regular(path) as file:  # not os.stat: opening makes NFS ask its server
            return file_identity(file) == identity
    except FileNotFoundError:
        return False


class FileOnDisk(NamedTuple):
    """Size and time of a file when its directory was listed."""

    path: Path
    num_bytes: int  # allocated on the disk
    touched_at: float  # modification time, seconds


def files_below(directory: Path) -> Iterator[FileOnDisk]:
    """Yield all files below a directory, except those that disappear meanwhile."""
    for folder, _, names in os.walk(directory):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                path = Path(folder, name)
                status = path.stat()
                yield FileOnDisk(path, status.st_blocks * 512, status.st_mtime)


def read_array_blocks(
    file: io.FileIO, dtype: DTypeLike, count: int, block: int = BLOCK
) -> Iterator[NDArray[Any]]:
    """Yield ``count`` numbers from the file's current position, ``block`` at a time. Raises
    FormatError if the file is too short."""
    for begin in range(0, count, block):
        numbers = np.empty(min(block, count - begin), dtype)
        unread = numbers.view(np.uint8).data
        # np.fromfile would report a disk error as the end of the file.
        while unread and (num_bytes := file.readinto(unread)):
            unread = unread[num_bytes:]
        if unread:
            missing = count - begin - (numbers.nbytes - len(unread)) // numbers.itemsize
            raise FormatError(
                f"{file.name} ends {missing} numbers early: it is truncated, or became shorter"
            )
        yield numbers


# ---- Files that a new file may replace: one rule for everything that megapack writes ----------


def check_target(
    path: str | os.PathLike[str],
    *,
    overwrite: bool,
    difference: str | Callable[[], str | None] | None,
    name: str | None = None,
) -> bool:
    """Return whether to write a file at ``path``, before the work begins: True if the file does not
    exist or is to be replaced, False if an equal file exists.

    ``difference`` describes how the existing file differs from the new one, None if they are equal;
    a callable is called only if the file exists. ``name`` replaces the path in the message. Raises
    ConfigError if a different file exists without ``overwrite``, and the errors of ``target_of``.
    """
    if not target_of(path).exists():
        return True
    if callable(difference):
        difference = difference()
    if difference is None:
        return False
    if not overwrite:
        raise ConfigError(
            f"{name or os.fspath(path)} exists already: {difference}"
            f"{os.linesep if os.linesep in difference else '. '}Replace it with --overwrite "
            "(overwrite=True), or choose another name"
        )
    return True


def check_not_read(path: str | os.PathLike[str], reads: Iterable[str]) -> None:
    """Raise ConfigError if writing ``path`` would replace a file that the same command reads."""
    path = Path(path)
    if path.exists() and any(Path(other).exists() and path.samefile(other) for other in reads):
        raise ConfigError(f"{path} is an input and would be replaced: choose another output")


def target_of(path: str | os.PathLike[str]) -> Path:
    """Return the regular file that writing to ``path`` creates or replaces; links are followed.
    Raises ConfigError if the file is not regular (a device, ...), the directory is missing, or the
    name is too long to append a temporary ending."""
    target = Path(os.path.realpath(path))
    if not target.parent.is_dir():
        raise ConfigError(f"{os.fspath(path)}: directory {target.parent} does not exist; create it")
    try:
        max_bytes = os.pathconf(target.parent, "PC_NAME_MAX")
    except (OSError, ValueError):
        max_bytes = 255
    num_bytes = len(os.fsencode(target.name))
    if num_bytes > max_bytes - TEMPORARY_BYTES:
        raise ConfigError(
            f"the name {target.name} has {num_bytes} bytes; the limit is "
            f"{max_bytes - TEMPORARY_BYTES}, since a temporary name is longer: choose a shorter one"
        )
    try:
        mode = target.lstat().st_mode
    except FileNotFoundError:
        return target
    if not stat.S_ISREG(mode):
        kind = _KINDS.get(stat.S_IFMT(mode), "not a regular file")
        raise ConfigError(
            f"{os.fspath(path)} is {kind}; only a regular file can be replaced: choose another name"
        )
    return target


# ---- Files that are renamed when they are complete ----------------------------------------------


class Publishable(Protocol):
    """File under a temporary name."""

    path: Path

    def sync(self) -> None: ...

    def take_name(self) -> None: ...

    def discard(self) -> None: ...


class AtomicFile:
    """Binary file under a temporary name next to ``path`` until ``publish`` renames it.

    Deleting the object, leaving the interpreter and ``discard()`` remove an unpublished file; a
    forked child never removes its parent's. Raises the errors of ``target_of``, and OSError if the
    directory is not writable.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = target_of(path)
        remove_leftovers(self.path)
        self.temporary, descriptor = create_temporary_file(self.path)
        self.file = open(descriptor, "r+b", buffering=0)  # noqa: PTH123,SIM115
        self._discard = weakref.finalize(self, _discard, self.file, self.temporary, os.getpid())

    def write(self, data: Buffer) -> None:
        """Append all bytes of ``data``, or none. An OSError (disk full, ...) contains the path."""
        with self.all_or_nothing():
            remaining = memoryview(data).cast("B")
            while remaining:
                remaining = remaining[self.file.write(remaining) :]

    def copy_from(self, file: io.RawIOBase, num_bytes: int) -> None:
        """Append bytes of an unbuffered file from its position, inside the kernel if possible; if
        either file raises OSError, append nothing."""
        with self.all_or_nothing():
            remaining = num_bytes
            while remaining:
                copied = self._copy_some(file, remaining)
                if copied == 0:
                    raise OSError(errno.EIO, f"the file ended {remaining} bytes early")
                remaining -= copied

    def _copy_some(self, file: io.RawIOBase, count: int) -> int:
        try:
            copied = os.copy_file_range(file.fileno(), self.file.fileno(), count)
            if copied:
                return copied
        except OSError as error:
            if error.errno not in _CANNOT_COPY_IN_KERNEL:
                raise
        # On some file systems copy_file_range copies nothing without an error. Copy with a read,
        # which also detects the end of the file.
        data = os.read(file.fileno(), min(count, COPY_BLOCK))
        self.write(data)
        return len(data)

    @contextlib.contextmanager
    def all_or_nothing(self) -> Iterator[None]:
        """Undo the writes of a ``with`` block that raises; its OSErrors contain this path."""
        position = self.file.tell()
        try:
            with naming(self.path):
                yield
        except BaseException:
            self.file.truncate(position)
            self.file.seek(position)
            raise

    def sync(self) -> None:
        with naming(self.path):
            os.fsync(self.file.fileno())

    def take_name(self) -> None:
        """Rename the file to ``path``; ``publish`` calls this when everything is on the disk."""
        self.temporary.replace(self.path)  # before closing, which releases the lock
        self.file.close()
        self._discard.detach()

    def discard(self) -> None:
        """Remove the temporary file unless it was published. May be called twice."""
        self._discard()


def publish(*files: Publishable, durable: bool = True) -> None:
    """Flush all files to the disk, then rename them in the order given. If a file raises OSError,
    none has its final name. Without ``durable``, do not flush: after a crash of the machine (not of
    the process) a file may have its name without its content."""
    if durable:
        for file in files:
            file.sync()
    for i, file in enumerate(files):
        try:
            file.take_name()
        except OSError:  # e.g. the disk is full and the directory cannot grow
            for renamed in files[:i]:
                renamed.path.unlink(missing_ok=True)
            raise
    if durable:
        for directory in {file.path.parent for file in files}:
            _sync_directory(directory)


@contextlib.contextmanager
def atomic_write(
    path: str | os.PathLike[str], mode: Literal["wb", "w"] = "wb", *, durable: bool = True
) -> Iterator[IO[Any]]:
    """``with atomic_write(path) as file``: replace ``path`` when the block ends without an
    error. Mode ``"w"`` writes UTF-8 text; ``publish`` describes ``durable``. An OSError contains
    the path."""
    target = AtomicFile(path)
    encoding = "utf-8" if mode == "w" else None
    try:
        with (
            naming(target.path),
            open(target.file.fileno(), mode, encoding=encoding, closefd=False) as file,
        ):
            yield file
        publish(target, durable=durable)
    finally:
        target.discard()


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add the file's name to an OSError of its file descriptor."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        text = error.strerror or os.strerror(error.errno)
        raise OSError(error.errno, f"{text} while writing", str(path)) from error


def create_temporary(target: Path, make: Callable[[Path], T]) -> tuple[Path, T]:
    """Create a file or link with ``make`` under a temporary name that proves that megapack made it:
    the name contains a hash of the inode. Return (path, result of ``make``, which raises
    FileExistsError if the path exists)."""
    while True:
        draft = target.with_name(f"{target.name}.tmp-{secrets.token_hex(4)}")
        try:
            made = make(draft)
            break
        except FileExistsError:
            pass
    inode = draft.lstat().st_ino
    while True:
        salt = "".join(secrets.choice(_DIGITS) for _ in range(3))
        path = target.with_name(f"{target.name}.tmp-{salt}{_proof(target.name, salt, inode)}")
        if rename_to_new(draft, path):
            return path, made


def _proof(name: str, salt: str, inode: int) -> str:
    digest = hashlib.blake2b(os.fsencode(f"{name}/{salt}/{inode}"), digest_size=8).digest()
    number, letters = int.from_bytes(digest, "little"), ""
    for _ in range(5):
        number, digit = divmod(number, len(_DIGITS))
        letters += _DIGITS[digit]
    return letters


def rename_to_new(old: Path, new: Path) -> bool:
    """Rename a file or link unless ``new`` exists; return whether it was renamed."""
    try:
        os.link(old, new, follow_symlinks=False)
    except FileExistsError:
        return False
    except OSError:  # a file system without hard links, or a directory
        if os.path.lexists(new):
            return False
        old.rename(new)
        return True
    old.unlink()
    return True


def temporary_files(directory: Path) -> Iterator[tuple[str, Path]]:
    """Yield (final name, path) of megapack's temporary files in a directory, in order."""
    for name in sorted(os.listdir(directory)):  # noqa: PTH208 (a tenth of the time)
        if (match := _TEMPORARY.fullmatch(name)) is not None:
            path = directory / name
            with contextlib.suppress(FileNotFoundError):
                if match[3] == _proof(match[1], match[2], path.lstat().st_ino):
                    yield match[1], path


def is_being_written(path: Path) -> bool:
    """Return whether a process still locks a temporary file; True if no locks are supported."""
    try:
        with _locked(path):
            return False
    except OSError:
        # links cannot be locked; import creates and renames one at once
        return not path.is_symlink()


# Directory -> final name -> leftovers when this process first wrote there. Each directory is listed
# once: it may contain a hundred thousand files, all written by this process.
_leftovers: dict[Path, dict[str, list[Path]]] = {}


def remove_leftovers(target: Path) -> None:
    """Remove temporary files of ``target`` that killed writers left, and log each one. Files that a
    process has locked are kept, or all if the file system has no locks."""
    by_name = _leftovers.get(target.parent)
    if by_name is None:
        by_name = _leftovers[target.parent] = {}
        with contextlib.suppress(OSError):  # the directory may be writable but not readable
            for name, path in temporary_files(target.parent):
                by_name.setdefault(name, []).append(path)
    for path in by_name.pop(target.name, ()):
        with contextlib.suppress(OSError):
            if path.is_symlink():
                path.unlink()
                continue
            with _locked(path) as is_there:
                if is_there:
                    size = path.stat().st_size
                    path.unlink()
                    logger.warning("removed %s (%d bytes), left by a killed process", path, size)


def create_temporary_file(target: Path) -> tuple[Path, int]:
    """Create a temporary file, locked where the file system has locks; return path, descriptor."""

    def make(path: Path) -> int:
        # Not tempfile: its mode 0600 would survive the rename, and other users could not read it.
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
        return descriptor

    return create_temporary(target, make)


def _discard(file: IO[bytes], temporary: Path, owner: int) -> None:
    file.close()
    if os.getpid() == owner:
        temporary.unlink(missing_ok=True)


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # the file system has no fsync
            raise
    finally:
        os.close(descriptor)


def lock_file(descriptor: int, path: Path, kind: int = fcntl.LOCK_EX) -> bool:
    """Lock an open file without waiting; return whether ``path`` still leads to it (another process
    may have removed it before). Raises BlockingIOError if another descriptor holds the lock, and
    OSError if the file system has no locks (``NO_LOCKS``)."""
    fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """Hold the lock on a file; yield and raise as ``lock_file``."""
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(path, flags)
    try:
        yield lock_file(descriptor, path)
    finally:
        os.close(descriptor)
