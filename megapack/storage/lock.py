"""One writer per name: a lock of the operating system that says who holds it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import warnings
import weakref
from pathlib import Path

from megapack.errors import LockedError, MegapackWarning
from megapack.storage.atomic import lock_file, naming
from megapack.storage.replace import target_of

__all__ = ["WriterLock"]


class WriterLock:
    """Held from construction to ``release()``, the end of a ``with`` block or of the process.

    The lock is the kernel's, on ``<path>.lock``; the file holds host, process and purpose, and is
    removed at the end (one that a kill left behind locks nobody out). A forked child shares the
    lock and never removes the file.

    Args:
        path: what is written: a file, a prefix or a directory; links are followed.
        what: the purpose, for whoever waits: ``"merge"``.
        shared: several may hold it so at once, and nobody holds it alone then.

    Raises:
        LockedError: another writer holds it; names its host and process.
        ConfigError: the directory does not exist, or the name is too long.
        OSError: the lock file cannot be made or written; names it.
    """

    def __init__(self, path: str | os.PathLike[str], *, what: str, shared: bool = False) -> None:
        self.path = target_of(f"{os.path.realpath(path)}.lock")
        descriptor = _acquire(self.path, os.fspath(path), shared)
        self._release = weakref.finalize(self, _release, descriptor, self.path, os.getpid())
        owner = f"process {os.getpid()} on {socket.gethostname()} ({what})\n"
        try:
            with naming(self.path):
                if not shared:
                    os.truncate(descriptor, 0)  # who stood there is gone
                os.write(descriptor, owner.encode())
        except OSError:
            self.release()
            raise

    def release(self) -> None:
        """Let the next writer in. May be called twice."""
        self._release()

    def __enter__(self) -> WriterLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def _acquire(path: Path, name: str, shared: bool) -> int:
    """An open descriptor of the file at ``path`` with the lock on it."""
    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        try:
            if lock_file(descriptor, path, kind):
                return descriptor
            os.close(descriptor)  # its owner removed the file between our opening and locking it
        except BlockingIOError:
            owners = os.pread(descriptor, 4096, 0).decode(errors="replace").split("\n")[:-1]
            os.close(descriptor)
            raise LockedError(
                f"{name} is being written by {'; '.join(owners) or 'another process'}; wait for "
                "it or end it"
            ) from None
        except NotImplementedError as error:
            warnings.warn(
                f"{path.parent} is on a file system without locks ({error}); make sure "
                f"that nobody else writes {name}",
                MegapackWarning,
                stacklevel=3,
            )
            return descriptor
        except OSError:
            os.close(descriptor)
            raise


def _release(descriptor: int, path: Path, owner: int) -> None:
    if os.getpid() == owner:
        with contextlib.suppress(OSError):  # others share it, or there are no locks
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # While nobody holds it: the next file is the next owner's.
            path.unlink(missing_ok=True)
    os.close(descriptor)
