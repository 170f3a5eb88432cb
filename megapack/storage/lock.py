"""One writer per name: a lock of the operating system that says who holds it."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import warnings
import weakref
from pathlib import Path
from types import TracebackType

from megapack.errors import LockedError, MegapackWarning
from megapack.storage.replace import target_of

__all__ = ["WriterLock", "writer_lock"]

_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL}


class WriterLock:
    """Held from construction to ``release()``, the end of a ``with`` block or of the process.

    The lock is the kernel's, on ``<path>.lock``; the file holds host, process and purpose, and is
    removed at the end (one that a kill left behind locks nobody out). A forked child shares the
    lock and never removes the file.

    Args:
        path: what is written: a file, a prefix or a directory; links are followed.
        what: the purpose, for whoever waits: ``"merge"``.

    Raises:
        LockedError: another writer holds it; names its host and process.
        ConfigError: the directory does not exist, or the name is too long.
        OSError: the lock file cannot be made.
    """

    def __init__(self, path: str | os.PathLike[str], what: str) -> None:
        self.path = target_of(f"{os.path.realpath(path)}.lock")
        owner = f"process {os.getpid()} on {socket.gethostname()}"
        descriptor = _acquire(self.path, os.fspath(path))
        os.truncate(descriptor, 0)
        os.pwrite(descriptor, f"{owner} ({what})\n".encode(), 0)
        self._release = weakref.finalize(self, _release, descriptor, self.path, os.getpid())

    def release(self) -> None:
        """Let the next writer in. May be called twice."""
        self._release()

    def __enter__(self) -> WriterLock:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()


def writer_lock(path: str | os.PathLike[str], *, what: str) -> WriterLock:
    """``with writer_lock(path, what="merge"):`` (see ``WriterLock``)."""
    return WriterLock(path, what)


def _acquire(path: Path, name: str) -> int:
    """An open descriptor of the file at ``path`` with the lock on it."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(descriptor, 1000, 0).decode(errors="replace").strip()
            os.close(descriptor)
            raise LockedError(
                f"{name} is being written by {owner or 'another process'}; wait for it or end it"
            ) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                os.close(descriptor)
                raise
            warnings.warn(
                f"{path.parent} is on a file system without locks ({error.strerror}); make sure "
                f"that nobody else writes {name}",
                MegapackWarning,
                stacklevel=4,
            )
            return descriptor
        if _is_at(descriptor, path):
            return descriptor
        os.close(descriptor)  # its owner removed the file between our opening and locking it


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))  # noqa: PTH116
    except FileNotFoundError:
        return False


def _release(descriptor: int, path: Path, owner: int) -> None:
    if os.getpid() == owner:
        path.unlink(missing_ok=True)  # before the lock goes: the next file is the next owner's
    os.close(descriptor)
