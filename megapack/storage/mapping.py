"""Whole files in memory, as the system maps them: read when touched, shared by all processes."""

from __future__ import annotations

import errno
import os
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from megapack import _core
from megapack.errors import MegapackError

__all__ = ["map_file"]


def map_file(file: IO[Any]) -> NDArray[np.uint8]:
    """The bytes of an open file, read-only; the file itself may be closed.

    Python's mmap would keep a descriptor for every file, and a source may have tens of thousands.

    Raises:
        MegapackError: the system maps no more files in one process; says how to let it.
        OSError: the file cannot be mapped.
    """
    size = os.fstat(file.fileno()).st_size
    if size == 0:
        return np.zeros(0, np.uint8)
    try:
        return _core.map_file(file.fileno(), size)
    except OSError as error:
        if error.errno == errno.ENOMEM:
            raise MegapackError(
                f"{file.name} cannot be mapped: this process has as many mappings as the system "
                "allows. Raise vm.max_map_count (3 for every file of a source, 4 with labels), or "
                "merge files"
            ) from error
        raise OSError(error.errno, error.strerror, file.name) from None
