"""Files: opened, checked before they are replaced, renamed when they are complete.

- ``open_regular``, ``read_array_blocks``: regular files only, in blocks; ``Identity``, ``is_at``
- ``check_target``, ``target_of``: what may stand under a name before a file of ours takes it
- ``AtomicFile``, ``atomic_write``, ``publish``: a temporary name, fsync, rename
- ``create_temporary``, ``remove_leftovers``: temporary names that prove who made the file

Whatever happens before (an exception, a full disk, kill -9), nothing stands under the final name
that was not written to the end::

    with atomic_write("x.samples") as file:     # x.samples.tmp-0f3a9c1e
        file.write(b"...")
    # -> x.samples; after kill -9 at most x.samples.tmp-0f3a9c1e stays

Its writer holds the kernel's lock on a temporary file, which ends with the process: so the next
writer of the same name knows that it was left, and removes it.
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

BLOCK = 1 << 17  # elements: still in the cache when they are summed, hashed and written
COPY_BLOCK = 1 << 22  # bytes
TEMPORARY_BYTES = len(".tmp-01234567")  # what a temporary name adds to the final one
_TEMPORARY = re.compile(r"(.+)\.tmp-([0-9a-z]{3})([0-9a-z]{5})", re.DOTALL)
_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"
_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFLNK: "a link that leads in a circle",
}
# Other file systems, old kernels, special files.
_CANNOT_COPY_IN_KERNEL = {errno.EXDEV, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}
_CANNOT_COPY_IN_KERNEL |= {errno.ENOTSUP, errno.EBADF, errno.EPERM}
NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL}


def open_regular(path: str | os.PathLike[str]) -> io.FileIO:
    """A file opened without a buffer. A FIFO would wait for its writer, a device never ends.

    Raises:
        FormatError: it is no regular file.
        OSError: it cannot be opened.
    """
    return io.FileIO(os.fspath(path), "rb", opener=_open_regular)


def _open_regular(path: str, flags: int) -> int:
    descriptor = os.open(path, flags | os.O_NONBLOCK)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise FormatError(f"{path} is no regular file; data is read from files only")


class Identity(NamedTuple):
    """Identity of an open file: another file of its name, or itself changed, has another."""

    device: int
    inode: int
    num_bytes: int
    changed_ns: int


def file_identity(file: io.FileIO) -> Identity:
    """The identity of an open file."""
    status = os.fstat(file.fileno())
    return Identity(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


def is_at(identity: Identity, path: str | os.PathLike[str]) -> bool:
    """Whether that file stands at a name. Opened, not asked: so NFS asks its server, too."""
    try:
        with open_regular(path) as file:
            return file_identity(file) == identity
    except FileNotFoundError:
        return False


class FileOnDisk(NamedTuple):
    """What was there a moment ago."""

    path: Path
    num_bytes: int  # on the disk
    touched_at: float


def files_below(directory: Path) -> Iterator[FileOnDisk]:
    """All files in and below a directory; files and directories may come and go meanwhile, where
    ``Path.rglob`` raises."""
    for folder, _, names in os.walk(directory):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                path = Path(folder, name)
                status = path.stat()
                yield FileOnDisk(path, status.st_blocks * 512, status.st_mtime)


def read_array_blocks(
    file: io.FileIO, dtype: DTypeLike, count: int, block: int = BLOCK
) -> Iterator[NDArray[Any]]:
    """``count`` numbers from the file's position on, ``block`` at a time.

    Raises:
        FormatError: the file ends before.
        OSError: it cannot be read.
    """
    for begin in range(0, count, block):
        numbers = np.empty(min(block, count - begin), dtype)
        left = numbers.view(np.uint8).data
        # Not np.fromfile, which takes an error of the disk for the file's end.
        while left and (num_bytes := file.readinto(left)):
            left = left[num_bytes:]
        if left:
            missing = count - begin - (numbers.nbytes - len(left)) // numbers.itemsize
            raise FormatError(
                f"{file.name} ends {missing} numbers early: it is truncated, or became shorter "
                "while it was read"
            )
        yield numbers


# ---- What may stand under a name before a file of ours takes it: one rule for everything written


def check_target(
    path: str | os.PathLike[str],
    *,
    overwrite: bool,
    difference: str | Callable[[], str | None] | None,
    name: str | None = None,
) -> bool:
    """Whether a file is to be written; asked before any work.

    Args:
        path: the final name. A link stays; the file it leads to is meant.
        overwrite: replace a file that differs.
        difference: from what would be written, a sentence; None: there is none. A callable is
            asked only when a file stands there.
        name: what to call it, if it is a copy of what stands elsewhere.

    Returns:
        True: nothing stands there, or it is to be replaced; False: the same stands there already.

    Raises:
        ConfigError: another file stands there and ``overwrite`` is False; or as of ``target_of``.
    """
    if not target_of(path).exists():
        return True
    if callable(difference):
        difference = difference()
    if difference is None:
        return False
    if not overwrite:
        raise ConfigError(
            f"{name or os.fspath(path)} is there already: {difference}"
            f"{os.linesep if os.linesep in difference else '. '}Replace it with --overwrite "
            "(overwrite=True), or choose another name"
        )
    return True


def check_not_read(path: str | os.PathLike[str], reads: Iterable[str]) -> None:
    """Raises ConfigError: writing to ``path`` would replace a file that the same work reads."""
    path = Path(path)
    if path.exists() and any(Path(each).exists() and path.samefile(each) for each in reads):
        raise ConfigError(f"{path} is read here, and would be replaced: choose another name")


def target_of(path: str | os.PathLike[str]) -> Path:
    """The regular file, there or not, that writing to ``path`` replaces: links are followed.

    Raises:
        ConfigError: something else stands there (a device, a FIFO, a directory, ...), its
            directory does not exist, or there is no room for a temporary name.
    """
    target = Path(os.path.realpath(path))
    if not target.parent.is_dir():
        raise ConfigError(f"{os.fspath(path)}: there is no directory {target.parent}; create it")
    try:
        longest = os.pathconf(target.parent, "PC_NAME_MAX")
    except (OSError, ValueError):
        longest = 255
    num_bytes = len(os.fsencode(target.name))
    if num_bytes > longest - TEMPORARY_BYTES:
        raise ConfigError(
            f"the name {target.name} has {num_bytes} bytes; at most {longest - TEMPORARY_BYTES} "
            "leave room for a temporary name: choose a shorter one"
        )
    try:
        mode = target.lstat().st_mode
    except FileNotFoundError:
        return target
    if not stat.S_ISREG(mode):
        kind = _KINDS.get(stat.S_IFMT(mode), "no regular file")
        raise ConfigError(
            f"{os.fspath(path)} is {kind}; only regular files are replaced: choose another name"
        )
    return target


# ---- Files that get their name when they are complete -------------------------------------------


class Publishable(Protocol):
    """A file that waits under a temporary name."""

    path: Path

    def sync(self) -> None: ...

    def take_name(self) -> None: ...

    def discard(self) -> None: ...


class AtomicFile:
    """A binary file under a temporary name beside ``path`` until ``publish`` renames it.

    Dropping the object, or leaving the interpreter, discards an unpublished file; so does
    ``discard()``. A forked child never discards its parent's file.

    Raises:
        ConfigError: as of ``target_of``; links are followed.
        OSError: the directory is not writable.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = target_of(path)
        remove_leftovers(self.path)
        self.temporary, descriptor = create_temporary_file(self.path)
        self.file = open(descriptor, "r+b", buffering=0)  # noqa: PTH123,SIM115
        self._discard = weakref.finalize(self, _discard, self.file, self.temporary, os.getpid())

    def write(self, data: Buffer) -> None:
        """Append all bytes of ``data``, or none of them.

        Raises:
            OSError: the file, which it names, cannot be written (disk full, ...).
        """
        with self.all_or_nothing():
            remaining = memoryview(data).cast("B")
            while remaining:
                remaining = remaining[self.file.write(remaining) :]

    def copy_from(self, file: io.RawIOBase, num_bytes: int) -> None:
        """Append bytes of an unbuffered file from its position, inside the kernel if possible.

        Raises:
            OSError: either file fails; nothing is appended.
        """
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
        # Some file systems only say "nothing copied"; reading tells whether that is the end.
        data = os.read(file.fileno(), min(count, COPY_BLOCK))
        self.write(data)
        return len(data)

    @contextlib.contextmanager
    def all_or_nothing(self) -> Iterator[None]:
        """An error inside takes back what was written inside, and an OSError names this file."""
        position = self.file.tell()
        try:
            with naming(self.path):
                yield
        except BaseException:
            self.file.truncate(position)
            self.file.seek(position)
            raise

    def sync(self) -> None:
        """Bring everything written to disk."""
        with naming(self.path):
            os.fsync(self.file.fileno())

    def take_name(self) -> None:
        """Become the file at ``path``; ``publish`` does this when everything is on disk."""
        self.temporary.replace(self.path)  # before it is closed, which ends the lock
        self.file.close()
        self._discard.detach()

    def discard(self) -> None:
        """Remove the temporary file, unless it was published. May be called twice."""
        self._discard()


def publish(*files: Publishable, durable: bool = True) -> None:
    """Bring all files to disk, then give them their names in the order given.

    Args:
        durable: False leaves the first part to the system: after a crash of the machine (not of
            the process) a file may then have its name and not its content.

    Raises:
        OSError: a file could not be synced or renamed; none has its name then.
    """
    if durable:
        for file in files:
            file.sync()
    for i, file in enumerate(files):
        try:
            file.take_name()
        except OSError:  # no room in the directory
            for named in files[:i]:
                named.path.unlink(missing_ok=True)
            raise
    if durable:
        for directory in {file.path.parent for file in files}:
            _sync_directory(directory)


@contextlib.contextmanager
def atomic_write(
    path: str | os.PathLike[str],
    mode: Literal["wb", "w"] = "wb",
    *,
    durable: bool = True,
) -> Iterator[IO[Any]]:
    """``with atomic_write(path) as file``: ``path`` changes when the block ends without an error.

    Args:
        path: the final name; its directory must exist.
        mode: ``"wb"``, or ``"w"``: text, in UTF-8.
        durable: as of ``publish``.

    Raises:
        OSError: the file cannot be written (its name is in the message); nothing is left behind.
    """
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
    """Give an OSError of a file descriptor the name of the file it belongs to."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        text = error.strerror or os.strerror(error.errno)
        raise OSError(error.errno, f"{text} while writing", str(path)) from error


def create_temporary(target: Path, make: Callable[[Path], T]) -> tuple[Path, T]:
    """Create a file under a temporary name next to ``target`` that proves that megapack made it.

    The name contains a hash of the file's inode, which the name of a foreign file does not.

    Args:
        make: creates the file (or link) at a path, and fails if the path exists.

    Returns:
        (path, result of ``make``)
    """
    while True:
        draft = target.with_name(f"{target.name}.tmp-{secrets.token_hex(4)}")
        try:
            made = make(draft)
            break
        except FileExistsError:
            continue
    inode = draft.lstat().st_ino
    while True:
        salt = "".join(secrets.choice(_DIGITS) for _ in range(3))
        path = target.with_name(f"{target.name}.tmp-{salt}{_proof(target.name, salt, inode)}")
        if rename_to_new(draft, path):
            return path, made


def _proof(name: str, salt: str, inode: int) -> str:
    """Return five letters or digits that belong to an inode under a name."""
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
    """Return whether a process holds a temporary file; True if the file system has no locks."""
    try:
        with _locked(path):
            return False
    except OSError:
        return not path.is_symlink()  # an import needs its link for a moment only


# Directory -> final name -> leftovers when this process first wrote there. A directory is listed
# once only: it may hold a hundred thousand files, all of them written by this process.
_leftovers: dict[Path, dict[str, list[Path]]] = {}


def remove_leftovers(target: Path) -> None:
    """Remove temporary files of ``target`` whose writers were killed, and log each one.

    A file that a living process holds stays. Without file locks, every file stays.
    """
    of_name = _leftovers.get(target.parent)
    if of_name is None:
        of_name = _leftovers[target.parent] = {}
        with contextlib.suppress(OSError):  # a directory that may be written, but not listed
            for name, path in temporary_files(target.parent):
                of_name.setdefault(name, []).append(path)
    for path in of_name.pop(target.name, ()):
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
        # Not tempfile: its mode 0600 would survive the rename and shut out the rest of the team.
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
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # file systems without it
            raise
    finally:
        os.close(descriptor)


def lock_file(descriptor: int, path: Path, kind: int = fcntl.LOCK_EX) -> bool:
    """Take the kernel's lock on an open file, at once.

    Returns:
        Whether the file is at ``path`` still: it may have been removed before it was locked.

    Raises:
        BlockingIOError: another process, or another open file of this one, holds it.
        OSError: the file system has no locks (``NO_LOCKS``).
    """
    fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """A file with the lock on it; whether it is there still. Raises as lock_file and os.open."""
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(path, flags)
    try:
        yield lock_file(descriptor, path)
    finally:
        os.close(descriptor)
