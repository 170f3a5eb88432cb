"""Files opened for reading: regular ones only, and read in blocks."""

from __future__ import annotations

import io
import os
import stat
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

from megapack.errors import FormatError

__all__ = ["BLOCK", "Identity", "identity_of", "is_at", "open_regular", "read_blocks"]

BLOCK = 1 << 17  # elements: still in the cache when they are summed, hashed and written


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
    """What tells an open file from another that takes its name, or from itself changed."""

    device: int
    inode: int
    num_bytes: int
    changed_ns: int


def identity_of(file: io.FileIO) -> Identity:
    """Of an open file."""
    status = os.fstat(file.fileno())
    return Identity(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


def is_at(identity: Identity, path: str | os.PathLike[str]) -> bool:
    """Whether that file stands at a name. Opened, not asked: so NFS asks its server, too."""
    try:
        with open_regular(path) as file:
            return identity_of(file) == identity
    except FileNotFoundError:
        return False


def read_blocks(
    file: io.FileIO, dtype: DTypeLike, count: int, block: int = BLOCK
) -> Iterator[NDArray[Any]]:
    """``count`` numbers from the file's position on, ``block`` at a time.

    Raises:
        FormatError: the file ends before.
        OSError: it cannot be read.
    """
    for begin in range(0, count, block):
        wanted = min(block, count - begin)
        numbers = np.fromfile(file, dtype, wanted)
        if numbers.size != wanted:
            raise FormatError(
                f"{file.name} ends {count - begin - numbers.size} numbers early: it is truncated, "
                "or became shorter while it was read"
            )
        yield numbers
