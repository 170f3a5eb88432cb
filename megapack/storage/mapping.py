"""Whole files in memory, as the system maps them: read when touched, shared by all processes.

A file that is opened in a moment, whatever its size, cannot be compared with a checksum of all of
it then. So there is one for each of its blocks, and a block is compared when something of it is
read for the first time:

    sums = block_checksums(written)            # "f1c3...": 16 hexadecimal digits per 64 KiB
    array = CheckedArray.of(mapped, sums, name="x.samples: array segment_length", remedy="...")
    array[1000:1010]                           # FormatError if the block is damaged
"""

from __future__ import annotations

import errno
import operator
import os
from typing import IO, Any

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin
from numpy.typing import NDArray

from megapack import _core
from megapack.errors import FormatError, MegapackError

__all__ = ["CheckedArray", "block_checksums", "map_file"]

# What an ndarray says of itself without reading a number.
_WITHOUT_READING = {"dtype", "flags", "itemsize", "nbytes", "ndim", "shape", "size"}


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


def block_checksums(array: NDArray[Any]) -> str:
    """xxh64 of every block of an array's bytes, 16 hexadecimal digits each."""
    numbers = _core.block_checksums(np.ascontiguousarray(array).view(np.uint8))
    return numbers.astype(">u8").tobytes().hex()


class CheckedArray(_core.CheckedArray, NDArrayOperatorsMixin):
    """A one-dimensional array of a file; whatever is read of it is compared with its checksums, by
    indexing the blocks that are indexed, by anything else all of it. FormatError where they differ.

    It stands for an ndarray with numpy's functions and the core's. Threads may share it.
    """

    @classmethod
    def of(cls, array: NDArray[Any], checksums: str, *, name: str, remedy: str) -> CheckedArray:
        """
        Args:
            array: what is mapped.
            checksums: ``block_checksums`` of what it should be.
            name, remedy: of what an error says.

        Raises:
            FormatError: these are no checksums of an array of this size.
        """
        try:
            numbers = np.frombuffer(bytes.fromhex(checksums), ">u8").astype(np.uint64)
        except ValueError as error:
            raise FormatError(f"{name}: its checksums are no hexadecimal numbers") from error
        return cls(array, numbers, name=name, remedy=remedy)

    def __len__(self) -> int:
        return len(self.unchecked)

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, slice):
            rows = range(*key.indices(len(self)))
            if rows:
                self.require(min(rows[0], rows[-1]), max(rows[0], rows[-1]) + 1)
        elif isinstance(key, np.ndarray) and key.dtype.kind in "iu":
            self.require_at(np.ascontiguousarray(key, np.int64).ravel())
        elif isinstance(key, (int, np.integer)):
            self.require_at(np.array([operator.index(key)], np.int64))
        else:
            self.verify()
        return self.unchecked[key]

    def verify(self) -> None:
        """Compare all of it."""
        self.require(0, len(self))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        self.verify()
        found = np.asarray(self.unchecked, dtype)
        return found.copy() if copy else found

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        whole = [np.asarray(x) if isinstance(x, CheckedArray) else x for x in inputs]
        return getattr(ufunc, method)(*whole, **options)

    def __getattr__(self, name: str) -> Any:
        if name not in _WITHOUT_READING:
            self.verify()
        return getattr(self.unchecked, name)

    def __iter__(self) -> Any:
        return iter(np.asarray(self))

    def __repr__(self) -> str:
        return f"CheckedArray({self.dtype}, {len(self)})"

    def __reduce__(self) -> tuple[Any, ...]:
        return np.array, (np.asarray(self),)
