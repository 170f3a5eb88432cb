"""Files that get their name when they are complete: temporary name, fsync, rename.

Whatever happens before (an exception, a full disk, kill -9), nothing stands under the final name
that was not written to the end. A kill leaves at most ``<name>.tmp-<hex>`` beside it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, TypeAlias

__all__ = ["AtomicFile", "Buffer", "atomic_write", "naming", "publish"]

Buffer: TypeAlias = Any  # bytes, a memoryview, a contiguous array (typing.Buffer from 3.12 on)


class AtomicFile:
    """A binary file under a temporary name beside ``path`` until ``publish`` renames it.

    Dropping the object, or leaving the interpreter, discards an unpublished file; so does
    ``discard()``. A forked child never discards its parent's file.

    Raises:
        OSError: the directory does not exist or is not writable.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.temporary = self.path.with_name(f"{self.path.name}.tmp-{secrets.token_hex(4)}")
        # Not tempfile: its 0600 would survive the rename and shut out the rest of the team.
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self.file = open(os.open(self.temporary, flags, 0o666), "r+b", buffering=0)  # noqa: PTH123,SIM115
        self._discard = weakref.finalize(self, _discard, self.file, self.temporary, os.getpid())

    def write(self, data: Buffer) -> None:
        """Write all bytes of ``data``; an OSError names the file that could not be written."""
        remaining = memoryview(data).cast("B")
        with naming(self.path):
            while remaining:
                remaining = remaining[self.file.write(remaining) :]

    def sync(self) -> None:
        """Bring everything written to disk."""
        with naming(self.path):
            os.fsync(self.file.fileno())

    def discard(self) -> None:
        """Remove the temporary file, unless it was published. May be called twice."""
        self._discard()


def publish(*files: AtomicFile) -> None:
    """Bring all files to disk, then give them their names in the order given.

    Raises:
        OSError: a file could not be synced or renamed; those after it keep no name.
    """
    for file in files:
        file.sync()
    for file in files:
        file.file.close()
        file.temporary.replace(file.path)
        file._discard.detach()
    for directory in {file.path.parent for file in files}:
        _sync_directory(directory)


@contextlib.contextmanager
def atomic_write(
    path: str | os.PathLike[str], mode: str = "wb", *, encoding: str | None = None
) -> Iterator[IO[Any]]:
    """``with atomic_write(path) as file``: ``path`` changes when the block ends without an error.

    Args:
        path: the final name; its directory must exist.
        mode: ``"wb"`` or ``"w"`` (text, UTF-8 unless ``encoding`` says otherwise).

    Raises:
        OSError: the file cannot be written (its name is in the message); nothing is left behind.
    """
    if mode not in ("wb", "w"):
        raise ValueError(f"mode is {mode!r}; atomic_write knows 'wb' and 'w'")
    target = AtomicFile(path)
    encoding = (encoding or "utf-8") if mode == "w" else None
    try:
        with (
            naming(target.path),
            open(target.file.fileno(), mode, encoding=encoding, closefd=False) as file,
        ):
            yield file
        publish(target)
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
