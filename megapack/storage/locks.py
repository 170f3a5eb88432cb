"""Lock files and folders that megapack creates and removes; each contains megapack's mark.

- ``WriterLock``: one writer per path, enforced by a kernel lock
- ``make_own_folder``, ``remove_own_folder``: folders that megapack may remove as a whole

    with WriterLock("shared/corpus", what="merge"):  # shared/corpus.lock
        ...  # another writer gets LockedError: ... being written by process 12 on host-3 (merge)
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import socket
import stat
import warnings
import weakref
from pathlib import Path

from megapack.errors import ConfigError, LockedError, MegapackWarning
from megapack.storage.files import (
    NO_LOCKS,
    create_temporary_file,
    lock_file,
    naming,
    remove_leftovers,
    rename_to_new,
    target_of,
)

_LOCK_MARK = b"megapack lock: "


class WriterLock:
    """Lock on a path, held from construction until ``release()`` or the end of the process;
    ``shared`` lets others share it.

    The lock is a kernel lock on the file ``<path>.lock``, which contains host, process and purpose
    (``what``). The file is locked before it gets its name, and the process that holds the lock
    removes it, never a forked child. The lock file of a killed process has no effect. A file of
    that name that does not begin with megapack's mark is never changed or removed. The lock follows
    links.

    Raises LockedError, which names host and process, if another writer holds the lock; ConfigError
    if another program's file has the lock's name, the directory does not exist, or the name is too
    long; and OSError if the lock file cannot be created or written.
    """

    def __init__(self, path: str | os.PathLike[str], *, what: str, shared: bool = False) -> None:
        name = os.fspath(path)
        self.path = Path(f"{os.path.realpath(path)}.lock")
        if not os.path.lexists(self.path):
            target_of(self.path)  # directory and length of the name
        owner = f"process {os.getpid()} on {socket.gethostname()} ({what})\n".encode()
        content = _LOCK_MARK + owner
        descriptor = None
        while descriptor is None:
            if os.path.lexists(self.path):
                descriptor = _join_lock(self.path, name, content, shared)
            else:
                descriptor = _new_lock(self.path, name, content, shared)
        self._release = weakref.finalize(self, _release, descriptor, self.path, os.getpid())

    def release(self) -> None:
        """Release the lock and remove its file. May be called twice."""
        self._release()

    def __enter__(self) -> WriterLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def _new_lock(path: Path, name: str, content: bytes, shared: bool) -> int | None:
    """Create the lock file; return its descriptor, or None if another process was first."""
    remove_leftovers(path)
    temporary, descriptor = create_temporary_file(path)
    with contextlib.ExitStack() as undo:
        undo.callback(temporary.unlink, missing_ok=True)
        undo.callback(os.close, descriptor)
        with naming(path):
            os.write(descriptor, content)
        try:
            fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            warnings.warn(
                f"{path.parent} is on a file system without locks ({error.strerror}); make "
                f"sure that no other process writes {name}",
                MegapackWarning,
                stacklevel=4,
            )
        if rename_to_new(temporary, path):
            undo.pop_all()
            return descriptor
    return None


def _join_lock(path: Path, name: str, content: bytes, shared: bool) -> int | None:
    """Lock the file that exists; return its descriptor, or None if its owner removed it.

    Raises LockedError if another process holds the lock, ConfigError if it is not a lock file."""
    try:
        if not stat.S_ISREG(path.lstat().st_mode):
            raise _not_our_lock(path, name)
        # Open for reading until the mark is checked.
        flags = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        readable = os.open(path, os.O_RDONLY | flags)
        try:
            status = os.fstat(readable)
            if not os.pread(readable, len(_LOCK_MARK), 0).startswith(_LOCK_MARK):
                raise _not_our_lock(path, name)
            # NFS locks files that are open for writing only.
            writable = os.open(path, os.O_RDWR | os.O_APPEND | flags)
        finally:
            os.close(readable)
    except FileNotFoundError:
        return None
    with contextlib.ExitStack() as undo:
        undo.callback(os.close, writable)
        kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        try:
            is_same = os.path.samestat(status, os.fstat(writable))
            if not (is_same and lock_file(writable, path, kind)):
                return None
        except BlockingIOError:
            text = os.pread(writable, 4096, 0).removeprefix(_LOCK_MARK).decode(errors="replace")
            owners = "; ".join(text.split("\n")[:-1])
            raise LockedError(
                f"{name} is being written by {owners or 'another process'}; wait for it or end it"
            ) from None
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            undo.pop_all()
            return writable  # the process that created the file has logged a warning
        undo.pop_all()
    try:
        with naming(path):
            if not shared:  # its owners have exited; the mark stays in place
                os.truncate(writable, len(_LOCK_MARK))
            os.write(writable, content.removeprefix(_LOCK_MARK))
    except OSError:
        _release(writable, path, os.getpid())
        raise
    return writable


def _not_our_lock(path: Path, name: str) -> ConfigError:
    return ConfigError(
        f"{path} is not a lock file of megapack, which needs that name to lock {name}: move the "
        "file, or choose another output"
    )


def _release(descriptor: int, path: Path, owner: int) -> None:
    if os.getpid() == owner:
        with contextlib.suppress(OSError):  # others share the lock, or the system has no locks
            # Remove it only while no other process holds it, and only if it is still this file.
            if lock_file(descriptor, path):
                path.unlink(missing_ok=True)
    os.close(descriptor)


# ---- Folders that megapack fills and removes ---------------------------------------------------

FOLDER_MARK = ".megapack"  # file in every folder that megapack may remove with its contents


def is_own_folder(path: Path) -> bool:
    return (path / FOLDER_MARK).is_file()


def make_own_folder(path: Path) -> None:
    """Create a marked folder, or check that the existing one is marked. Raises ConfigError if
    something that megapack did not make has that name."""
    while not is_own_folder(path):
        # Another process may create the folder, with its mark, or remove it between two checks.
        if os.path.lexists(path) and not is_own_folder(path) and os.path.lexists(path):
            raise ConfigError(
                f"{path} exists and was not made by megapack, which would write and remove files "
                "in it: move it, or choose another name"
            )
        draft = path.with_name(f"{path.name}.tmp-{secrets.token_hex(4)}")
        draft.mkdir()
        (draft / FOLDER_MARK).touch()
        try:
            # The rename makes the folder appear together with its mark. It fails if another process
            # created the folder first.
            draft.rename(path)
        except OSError:
            shutil.rmtree(draft)
            if not os.path.lexists(path):
                raise


def remove_own_folder(path: Path) -> None:
    """Remove a folder and its contents if megapack made it; otherwise do nothing."""
    if is_own_folder(path):
        shutil.rmtree(path, ignore_errors=True)
