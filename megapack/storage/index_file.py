"""Open Megatron's .bin/.idx pair: names, header and arrays.

- ``path_of``, ``prefix_of``, ``COMPANIONS``: names; ``pick_dtype``, ``dtype_of_code``: token types
- ``IndexFile``: one .idx, memory-mapped; ``read_header``: its first 34 bytes
- ``open_pair``: an .idx and the .bin of the same writer, even while another writer replaces them
- ``map_file``, ``block_checksums``, ``CheckedArray``: mapped files, and checks of what is read

csrc/core/storage/mmididx.hpp describes the byte layout and parses it. Two sequences of 3 and 2
uint16 tokens, each a document, have an .idx of these 82 bytes::

    4d4d49444944580000 1:u64 8:u8 2:u64 3:u64      # magic, version, dtype, sequences, documents + 1
    3:i32 2:i32   0:i64 6:i64   0:i64 1:i64 2:i64  # lengths, pointers (bytes), document indices
"""

from __future__ import annotations

import errno
import io
import operator
import os
import struct
import time
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import IO, Any, TypeAlias

import numpy as np
import xxhash
from numpy.lib.mixins import NDArrayOperatorsMixin
from numpy.typing import DTypeLike, NDArray

from megapack import _core
from megapack.errors import ConfigError, FormatError, MegapackError
from megapack.storage.address import is_normal, is_remote
from megapack.storage.files import Identity, file_exists, file_identity, is_at, open_regular

# ---- Memory-mapped files: the system reads a page when it is touched; all processes share it -----
# Comparing a whole file with one checksum would read all of it at opening. So every block has a
# checksum, compared when something in the block is read for the first time:
#
#     sums = block_checksums(written)            # "f1c3...": 16 hexadecimal digits per 64 KiB
#     array = CheckedArray.of(mapped, sums, name="x.samples: array segment_length", remedy="...")
#     array[1000:1010]                           # FormatError if the block is damaged

# Attributes of an ndarray that can be returned without reading its elements.
_WITHOUT_READING = {"dtype", "flags", "itemsize", "nbytes", "ndim", "shape", "size"}


def map_file(file: IO[Any]) -> NDArray[np.uint8]:
    """Return the bytes of an open file, read-only; the file may be closed afterwards. Raises
    MegapackError if this process has reached the system's limit of mappings."""
    size = os.fstat(file.fileno()).st_size
    if size == 0:
        return np.zeros(0, np.uint8)
    # Python's mmap keeps a descriptor per file, and a source may have tens of thousands of files.
    try:
        return _core.map_file(file.fileno(), size)
    except OSError as error:
        if error.errno == errno.ENOMEM:
            raise MegapackError(
                f"{file.name} cannot be mapped: this process has reached the limit of mappings; "
                "raise vm.max_map_count (3 per file of a source, and 1 per column), or merge files"
            ) from error
        raise OSError(error.errno, error.strerror, file.name) from None


def block_checksums(array: NDArray[Any]) -> str:
    """Return the xxh64 of every block of an array's bytes, 16 hexadecimal digits each."""
    numbers = _core.block_checksums(np.ascontiguousarray(array).view(np.uint8))
    return numbers.astype(">u8").tobytes().hex()


class CheckedArray(_core.CheckedArray, NDArrayOperatorsMixin):
    """One-dimensional array in a file, compared with checksums when it is read: indexing checks the
    indexed blocks, other uses the whole array. Raises FormatError if a checksum differs. numpy's
    functions and the core accept it like an ndarray. Threads may share it."""

    @classmethod
    def of(cls, array: NDArray[Any], checksums: str, *, name: str, remedy: str) -> CheckedArray:
        """Wrap a mapped array and its ``block_checksums``; ``name`` and ``remedy`` are for errors.
        Raises FormatError if the checksums do not belong to an array of this size."""
        try:
            numbers = np.frombuffer(bytes.fromhex(checksums), ">u8").astype(np.uint64)
        except ValueError as error:
            raise FormatError(f"{name}: its checksums are not hexadecimal; {remedy}") from error
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
        self.require(0, len(self))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        self.verify()
        array = np.asarray(self.unchecked, dtype)
        return array.copy() if copy else array

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


# ---- Names and dtypes of the pair, and one .idx opened for reading -------------------------------

Tokens: TypeAlias = NDArray[Any]

MAGIC = b"MMIDIDX\x00\x00"
HEADER_BYTES = 34

# Codes with one meaning in Megatron, GPT-NeoX and Megatron-DeepSpeed; megapack writes no others.
# (In DeepSpeed's own data_pipeline 8 is uint64; codes 6 and 7 have three meanings in four tools.)
CODE_OF_DTYPE = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "uint16": 8}
NAME_OF_CODE = {code: name for name, code in CODE_OF_DTYPE.items()}
DTYPE_OF_CODE = {code: np.dtype(name) for name, code in CODE_OF_DTYPE.items()}

_OPENING_BYTES = 512  # opening reads at most this much of an array; the fingerprint covers it
_SPREAD_BLOCKS = 16  # blocks in the fingerprint that are spread evenly over the file
_LENGTH = struct.Struct("<i")
_POINTER = struct.Struct("<q")

GROUPS = ".groups"  # ending of a companion dataset: a group per document
# Also those of datasets that earlier versions wrote: label and loss weight per token.
COMPANIONS = (GROUPS, ".labels", ".weights")


def path_of(prefix: str | os.PathLike[str], suffix: str) -> Path:
    """Return ``prefix + suffix``; a prefix may contain dots. Raises ConfigError if the prefix is an
    address, since the caller needs local files."""
    if is_remote(prefix):
        raise ConfigError(f"{os.fspath(prefix)} is not a local file; copy the dataset first")
    return Path(os.fspath(prefix) + suffix)


def name_of(prefix: str | os.PathLike[str], suffix: str) -> str:
    """Return ``str(path_of(prefix, suffix))``, usually in a tenth of the time."""
    text = os.fspath(prefix) + suffix
    if is_remote(prefix) or not is_normal(text):
        return str(path_of(prefix, suffix))
    return text


def prefix_of(path: str | os.PathLike[str]) -> str:
    """Return the prefix of a dataset from the prefix or the path of its .idx or .bin. Raises
    ConfigError if ``path`` is an invalid address (see ``is_remote``) or a directory."""
    text = os.fspath(path)
    if not is_remote(text) and text.rpartition("/")[2] in ("", ".", ".."):
        raise ConfigError(
            f"prefix {text!r} is a directory: give the path of .bin or .idx without its ending, as "
            f"{text.rstrip('/') or '.'}/corpus"
        )
    for suffix in (".idx", ".bin"):
        if text.endswith(suffix):
            return text[: -len(suffix)]
    return text


def dtype_of_code(code: int, name: str | os.PathLike[str]) -> np.dtype[Any]:
    """Return the token type of Megatron's dtype code. Raises FormatError for an unknown code."""
    if code not in DTYPE_OF_CODE:
        raise FormatError(
            f"{os.fspath(name)} has dtype code {code}; token files have one of "
            f"{sorted(DTYPE_OF_CODE)}. Codes 6 and 7 are floats in Megatron and integers in "
            "DeepSpeed's table: `megapack-build repair` decides by the size of .bin"
        )
    return DTYPE_OF_CODE[code]


def pick_dtype(dtype: DTypeLike) -> np.dtype[Any]:
    """Return a dtype if token files can have it. Raises ConfigError for other dtypes."""
    if isinstance(dtype, str) and dtype in CODE_OF_DTYPE:  # numpy makes a name slowly
        return np.dtype(dtype)
    try:
        result = np.dtype(dtype)
        name = str(result)  # ">u2" differs from "uint16"
    except TypeError:
        name = str(dtype)
    if name not in CODE_OF_DTYPE:
        raise ConfigError(
            f"dtype is {name}; token files have one of {', '.join(CODE_OF_DTYPE)} (little-endian)"
        )
    return result


@dataclass(frozen=True)
class IndexHeader:
    """First 34 bytes of an .idx, and the byte offsets of its arrays."""

    dtype_code: int
    num_sequences: int
    num_document_indices: int
    num_documents: int
    lacks_document_indices: bool  # lost in a GPT-NeoX merge: every sequence is one document
    lengths_at: int
    pointers_at: int
    document_indices_at: int
    modes_at: int
    identity: Identity

    @property
    def file_bytes(self) -> int:
        return self.identity.num_bytes

    @property
    def has_modes(self) -> bool:
        """True if the file is long enough to contain a mode per sequence."""
        return self.file_bytes >= self.modes_at + self.num_sequences


def read_header(path: str | os.PathLike[str]) -> IndexHeader:
    """Read the header of an .idx and check it against the file's size. Raises FormatError if the
    file is not an .idx, has another version, or is truncated."""
    with open_regular(path) as file:
        head = np.frombuffer(file.read(HEADER_BYTES), np.uint8)
        return _parse_header(head, file_identity(file), os.fspath(path))


def _parse_header(head: NDArray[np.uint8], identity: Identity, name: str) -> IndexHeader:
    return IndexHeader(**_core.index_header(head, identity.num_bytes, name), identity=identity)


class IndexFile:
    """One .idx, memory-mapped; arrays are copied, since they are not aligned in the file."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.name = os.fspath(path)
        try:
            file = open_regular(path)
        except FileNotFoundError as error:
            remedy = "give the prefix of a dataset, which has an .idx"
            text = self.name.removesuffix(".idx")
            if Path(text).is_file():
                remedy = f"a dataset is the result of `megapack-build tokenize --input {text} ...`"
            error.strerror = f"{error.strerror} ({remedy})"
            raise
        with file:
            identity = file_identity(file)
            mapped = map_file(file)
        self._mapped = mapped
        self._buffer = mapped.data  # for struct: faster than the array
        self._checked: CheckedArray | None = None
        self.header = _parse_header(mapped, identity, self.name)
        self.num_sequences = self.header.num_sequences
        self.num_documents = self.header.num_documents

    def has_its_name(self) -> bool:
        return is_at(self.header.identity, self.name)

    @property
    def bytes(self) -> Any:
        """The whole file as uint8, without a copy; a ``CheckedArray`` after ``verify_reads``."""
        return self._mapped if self._checked is None else self._checked

    @cached_property
    def fingerprint(self) -> str:
        """xxh3_128 (hexadecimal) of the file's size and of the checksums of some 64 KiB blocks:
        those in which the arrays begin and end, and 16 spread evenly over the file (all blocks of a
        small file). Pointers are running sums of lengths, so a changed length changes every later
        block of pointers. After ``verify_reads``, reading checks the remaining blocks."""
        header, size = self.header, self.header.file_bytes
        last = (size - 1) // _core.BLOCK_BYTES
        blocks = {last * i // (_SPREAD_BLOCKS - 1) for i in range(_SPREAD_BLOCKS)}
        starts = (0, header.pointers_at, header.document_indices_at, header.modes_at, size)
        for begin, end in pairwise(starts):
            if begin < end:
                near = (begin, min(begin + _OPENING_BYTES, end - 1), end - 1)
                blocks |= {at // _core.BLOCK_BYTES for at in near}
        digest = xxhash.xxh3_128(str(size).encode())
        for block in sorted(blocks):
            begin = block * _core.BLOCK_BYTES
            digest.update(block_checksums(self._mapped[begin : begin + _core.BLOCK_BYTES]).encode())
        return digest.hexdigest()

    @property
    def idx_checksums(self) -> str:
        """``block_checksums`` of the whole file; reads all of it."""
        return block_checksums(self._mapped)

    def verify_reads(self, checksums: str) -> None:
        """Check every later read against the expected ``idx_checksums``. Raises FormatError if they
        belong to a file of a different size; later reads raise it if a block differs."""
        if self._checked is None:
            remedy = "restore the file that was packed, or pack the dataset again"
            self._checked = CheckedArray.of(self._mapped, checksums, name=self.name, remedy=remedy)

    def length(self, sequence: int) -> int:
        return self._number(_LENGTH, self.header.lengths_at + 4 * sequence)

    def pointer(self, sequence: int) -> int:
        return self._number(_POINTER, self.header.pointers_at + 8 * sequence)

    def first_sequences(self, count: int) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """Return lengths and pointers of the first ``count`` sequences, or of all."""
        count = min(count, self.num_sequences)
        lengths, pointers = self.header.lengths_at, self.header.pointers_at
        return (
            self.bytes[lengths : lengths + 4 * count].view(np.int32),
            self.bytes[pointers : pointers + 8 * count].view(np.int64),
        )

    def _number(self, layout: struct.Struct, at: int) -> int:
        if self._checked is not None:
            self._checked.require(at, at + layout.size)
        return int(layout.unpack_from(self._buffer, at)[0])

    def document_lengths(self) -> NDArray[np.int32] | NDArray[np.int64]:
        """Return tokens per document, (num_documents,); int64 only if a document has 2^31 or more.
        Raises FormatError if pointers overflowed 32 bits, as in files of old Megatron releases."""
        header, last = self.header, self.num_sequences - 1
        dtype = DTYPE_OF_CODE.get(header.dtype_code)
        if last >= 0 and dtype is not None:
            begin, end = header.lengths_at, header.lengths_at + 4 * self.num_sequences
            lengths = self.bytes[begin:end].view(np.int32)
            expected = int(lengths.sum(dtype=np.int64) - lengths[-1]) * dtype.itemsize
            pointer = self.pointer(last)  # pointers grow: if any overflowed, the last one did
            if pointer != expected and (pointer - expected) % 2**32 == 0:
                raise FormatError(
                    f"{self.name}: pointers overflowed 32 bits: sequence {last} points at byte "
                    f"{pointer} instead of {expected}; `megapack-build repair "
                    f"{prefix_of(self.name)}` recomputes them"
                )
        return _core.document_lengths(self.bytes, self.name)

    def document_offsets(self, itemsize: int) -> NDArray[np.int64]:
        """Return the token of .bin at which each document begins, and the end of the last one:
        int64, (num_documents + 1,)."""
        return _core.document_offsets(self.bytes, self.name, itemsize)

    def modes(self) -> NDArray[np.int8]:
        """Return the modes of a multimodal dataset, int8 (num_sequences,). Raises FormatError if
        the file is too short for modes; it does not record whether it has them."""
        if not self.header.has_modes:
            raise FormatError(f"{self.name} has no modes; it was not built with multimodal=True")
        at = self.header.modes_at
        modes: NDArray[np.int8] = self.bytes[at : at + self.num_sequences].view(np.int8)
        return modes


PATIENCE = 5.0  # seconds; a writer needs milliseconds between two renames


def open_pair(prefix: str) -> tuple[IndexFile, io.FileIO]:
    """Open .idx and .bin of the same writer.

    A writer removes the old .idx before it renames its .bin, and renames its .idx last
    (``publish``). So if the path still leads to the opened .idx after .bin was opened, both come
    from one writer; otherwise open both again. Raises FormatError if the .idx is damaged or writers
    kept replacing the files, and OSError if one is missing.
    """
    idx_path, bin_path = name_of(prefix, ".idx"), name_of(prefix, ".bin")
    deadline = time.monotonic() + PATIENCE
    while True:
        timed_out = time.monotonic() > deadline
        try:
            index, tokens = IndexFile(idx_path), open_regular(bin_path)
            if index.has_its_name():
                return index, tokens
            tokens.close()
        except FileNotFoundError:
            # A writer holds its lock until it has renamed both files: wait for the second one.
            is_written = file_exists(name_of(prefix, ".lock")) or file_exists(idx_path)
            if timed_out or not (is_written and file_exists(bin_path)):
                raise
        if timed_out:
            raise FormatError(
                f"writers kept replacing {prefix} for {PATIENCE:.0f} seconds; open it when they end"
            )
        time.sleep(0.001)
