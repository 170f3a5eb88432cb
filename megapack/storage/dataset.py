"""``IndexedDataset``: read documents from memory-mapped files without copying tokens.

- ``IndexedDataset``: Megatron's .bin/.idx pair, local or remote, and its columns
- ``read_document_lengths``, ``open_index``, ``read_lengths_file``: read lengths without tokens
- ``read_documents``: read a list of document ids from a file, to mask or pack those documents
- ``check_converted``: refuse labels and loss weights that earlier versions wrote

Two documents, [7, 8, 0] and [9, 0] ::

    ds = IndexedDataset("corpus")
    ds[0], ds[-1], ds.document_lengths    # -> [7, 8, 0], [9, 0], [3, 2]
    ds.tokens[2:4]                        # -> [0, 9]: all documents, concatenated
"""

from __future__ import annotations

import json
import operator
import os
from collections.abc import Container
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import DTypeLike, NDArray

from megapack import _core
from megapack.calls import checked_call
from megapack.errors import ConfigError, DataError, FormatError
from megapack.storage.address import is_remote
from megapack.storage.columns import INTERPRETED, Column, column_entries, column_path, open_column
from megapack.storage.files import file_exists, file_identity
from megapack.storage.index_file import (
    NAME_OF_CODE,
    IndexFile,
    dtype_of_code,
    map_file,
    name_of,
    open_pair,
    path_of,
    prefix_of,
)
from megapack.storage.metadata import difference_from_files, read_meta, sampled_checksum
from megapack.storage.remote.reader import RemotePair, RemoteRows, exists, open_remote_pair
from megapack.storage.tokens import open_npy
from megapack.units import counted


class BinReader:
    """Megatron's reader of .bin: ``read(dtype, count, offset)`` from the mapped tokens."""

    def __init__(self, tokens: NDArray[Any]) -> None:
        self._bytes = tokens.view(np.uint8).data

    def read(self, dtype: DTypeLike, count: int, offset: int) -> NDArray[Any]:
        return np.frombuffer(self._bytes, dtype, count, offset)


class IndexedDataset:
    """Megatron's .bin/.idx pair, memory-mapped and read-only.

    ``len(ds)`` is the number of sequences; ``ds[i]`` is sequence i as a 1-D view of the mapping
    (copy it before you change it), ``ds[a:b]`` a list of views. Documents are ranges of sequences,
    usually one each. Pickling stores the prefix only, so data loader workers map the files again.

    An open dataset does not change when a builder replaces its files. Never change a mapped file in
    place: if it becomes shorter (``cp`` over it, ``truncate``), every process that reads the
    removed part is killed by SIGBUS, without a traceback. Write a new file and rename it.

    A prefix may be an address (``s3://bucket/folder/name``, see ``docs/guides/object_storage.md``).
    Then .idx is copied to a local cache, tokens are fetched when they are read; slices are copies.

    Args:
        prefix: the files' common name, without (or with) ``.idx``.
        multimodal: the .idx has a mode per sequence (it does not record this); ``ds[i]`` is then
            ``(tokens, mode)``.
        mmap, fast_cache_load, sequences_per_dataset, dtype_code: ignored, accepted for
            compatibility with Megatron; files are always mapped and their header is always read.
        object_storage_config, s3_config: not supported; MEGAPACK_CACHE names the cache's folder.

    Raises:
        FormatError: the .idx is damaged, .bin is too short for it, or both were replaced again and
            again while they were opened.
        OSError: a file is missing or cannot be read.
    """

    @checked_call
    def __init__(
        self,
        prefix: str | os.PathLike[str],
        multimodal: bool = False,
        mmap: bool = True,  # noqa: ARG002
        *,
        object_storage_config: Any = None,
        s3_config: Any = None,
        fast_cache_load: bool = False,  # noqa: ARG002
        sequences_per_dataset: Any = None,  # noqa: ARG002
        dtype_code: int | None = None,  # noqa: ARG002
    ) -> None:
        if object_storage_config is not None or s3_config is not None:
            raise ValueError(
                f"{prefix}: object_storage_config and s3_config are not supported: leave them out; "
                "the environment configures the client, and MEGAPACK_CACHE the cache"
            )
        self.prefix = prefix_of(prefix)
        self.multimodal = multimodal
        self._pair: RemotePair | None = None
        if is_remote(self.prefix):
            self._open_remote()
            return
        self._files = self.prefix  # local prefix of .idx and .meta.json
        self._index, bin_file = open_pair(self.prefix)
        with bin_file:
            self._take_index()
            name, num_bytes = str(bin_file.name), file_identity(bin_file).num_bytes
            count = self._count_tokens(name, num_bytes)
            # An empty file cannot be mapped.
            mapped = map_file(bin_file) if count else np.zeros(0, np.uint8)
            self.tokens: Any = mapped[: count * self.dtype.itemsize].view(self.dtype)

    def _open_remote(self) -> None:
        pair = self._pair = open_remote_pair(self.prefix)
        self._files = pair.local_prefix
        self._index = IndexFile(path_of(self._files, ".idx"))
        self._take_index()
        size = self._count_tokens(pair.bin_object.url, pair.bin_object.num_bytes)
        self.tokens = pair.open_tokens(self.dtype, size)

    def _take_index(self) -> None:
        code = self._index.header.dtype_code
        self.dtype: np.dtype[Any] = dtype_of_code(code, self._index.name)
        # Detect the dtype table of another tool: its token width differs, and so do the pointers.
        lengths, pointers = self._index.first_sequences(64)
        expected = (np.cumsum(lengths, dtype=np.int64) - lengths) * self.dtype.itemsize
        for i in np.flatnonzero(pointers != expected).tolist():
            raise FormatError(
                f"{self._index.name}: sequence {i} points at byte {pointers[i]}, "
                f"but {self.dtype.name} sequences before it end at {expected[i]}; "
                "run `megapack-build verify` for the reason"
            )
        self._modes = self._index.modes() if self.multimodal else None

    def _count_tokens(self, name: str, bin_bytes: int) -> int:
        """Return the number of tokens that the index describes; .bin may be longer."""
        last = self._index.num_sequences - 1
        itemsize = self.dtype.itemsize
        needed = self._index.pointer(last) + self._index.length(last) * itemsize if last >= 0 else 0
        if not 0 <= needed <= bin_bytes:
            raise FormatError(
                f"{name} has {bin_bytes} bytes, but its .idx ({self.dtype.name} tokens) "
                f"ends at byte {needed}: .bin is truncated, or the .idx belongs to another "
                "file or another dtype table; run `megapack-build verify` for the reason"
            )
        return needed // itemsize

    @property
    def mapped_tokens(self) -> NDArray[Any]:
        """All tokens, (num_tokens,), without a copy, for C++. In a remote dataset only the tokens
        that are being read have values."""
        return self.tokens.mapped if isinstance(self.tokens, RemoteRows) else self.tokens

    def __len__(self) -> int:
        return self._index.num_sequences

    def __getitem__(self, i: Any) -> Any:
        if isinstance(i, slice):
            return self._slice(i)
        begin, length = self._extent(i)
        tokens = self.tokens[begin : begin + length]
        return tokens if self._modes is None else (tokens, self._modes[i])

    def _slice(self, rows: slice) -> Any:
        start, stop, step = rows.indices(len(self))
        if step != 1:
            raise ValueError(f"slice step is {step}; slices of an IndexedDataset are contiguous")
        extents = (self._extent(i) for i in range(start, stop))
        views = [self.tokens[begin : begin + length] for begin, length in extents]
        return views if self._modes is None else (views, self._modes[rows])

    def get(self, idx: int, offset: int = 0, length: int | None = None) -> Any:
        """Return tokens ``[offset, offset + length)`` of one sequence, by default up to its end.
        Raises IndexError if the sequence or the range does not exist."""
        begin, available = self._extent(idx)
        length = available - offset if length is None else length
        if offset < 0 or length < 0 or offset + length > available:
            raise IndexError(
                f"tokens [{offset}, {offset + length}) are outside sequence {idx} of {available}"
            )
        tokens = self.tokens[begin + offset : begin + offset + length]
        return tokens if self._modes is None else (tokens, self._modes[idx])

    def _extent(self, i: Any) -> tuple[int, int]:
        """Return first token and number of tokens of one sequence."""
        try:
            i = operator.index(i)
        except TypeError:
            raise TypeError(f"index is {i!r}; it must be an integer or a slice") from None
        count = self._index.num_sequences
        if not -count <= i < count:
            raise IndexError(f"sequence {i} does not exist; {self.prefix} has {count}")
        i %= count
        length = self._index.length(i)
        begin, remainder = divmod(self._index.pointer(i), self.dtype.itemsize)
        if remainder or begin < 0 or length < 0 or begin + length > self.tokens.size:
            raise FormatError(
                f"{self._index.name}: sequence {i} is outside .bin; run `megapack-build verify`"
            )
        return begin, length

    @property
    def sequence_modes(self) -> NDArray[np.int8] | None:
        """int8 (num_sequences,) if multimodal, else None."""
        return self._modes

    @cached_property
    def sequence_lengths(self) -> NDArray[np.int32]:
        """int32 (num_sequences,), tokens."""
        return _frozen(_core.sequence_lengths(self._index.bytes, self._index.name))

    @cached_property
    def sequence_pointers(self) -> NDArray[np.int64]:
        """int64 (num_sequences,), bytes."""
        return _frozen(_core.sequence_pointers(self._index.bytes, self._index.name))

    @cached_property
    def document_indices(self) -> NDArray[np.int64]:
        """int64 (num_documents + 1,), the sequence at which each document begins."""
        return _frozen(_core.document_indices(self._index.bytes, self._index.name))

    @cached_property
    def document_lengths(self) -> NDArray[np.int32] | NDArray[np.int64]:
        """(num_documents,), tokens; int64 only if a document has more than 2^31 - 1."""
        return _frozen(self._index.document_lengths())

    @cached_property
    def document_offsets(self) -> NDArray[np.int64]:
        """int64 (num_documents + 1,): document d is ``tokens[offsets[d]:offsets[d + 1]]``."""
        return _frozen(self._index.document_offsets(self.dtype.itemsize))

    @property
    def index_bytes(self) -> Any:
        return self._index.bytes

    @property
    def num_documents(self) -> int:
        return self._index.num_documents

    @property
    def num_tokens(self) -> int:
        return int(self.tokens.size)

    @cached_property
    def meta(self) -> dict[str, Any] | None:
        """Contents of ``<prefix>.meta.json``; None if it does not exist (datasets of other tools).
        Raises FormatError if it is damaged, or does not describe the open files."""
        meta = read_meta(self._files)
        if meta is None:
            return None
        if not self._index.has_its_name():
            raise FormatError(f"{self.prefix} was replaced after it was opened; open it again")
        header = self._index.header
        dtype = NAME_OF_CODE[header.dtype_code]
        difference = difference_from_files(meta, dtype, header, self.num_tokens)
        if difference is not None:
            raise FormatError(f"{self.prefix}: {difference}")
        return meta

    @cached_property
    def columns(self) -> dict[str, Column]:
        """Columns by name, in alphabetical order; empty without a meta file. Raises FormatError if
        the meta file or a .col is damaged, missing or was replaced; for a remote dataset, also the
        errors of ``RemoteObject.read``."""
        entries = column_entries(self.meta, f"{self.prefix}.meta.json")
        if self._pair is not None:
            return self._pair.open_columns(entries)
        columns = {name: open_column(self._files, name, e) for name, e in entries.items()}
        # A writer removes a column from the meta file before it replaces the column's file.
        if columns and read_meta(self._files) != self.meta:
            raise FormatError(f"{self.prefix} was replaced after it was opened; open it again")
        return columns

    @property
    def vocab_size(self) -> int | None:
        """Number of the tokenizer's token ids; None if unknown."""
        return None if self.meta is None else self.meta.get("vocab_size")

    @property
    def fingerprint(self) -> str:
        """Digest of dtype, lengths and documents (``IndexFile.fingerprint``), not of tokens."""
        return self._index.fingerprint

    @cached_property
    def content_digest(self) -> list[str | None]:
        """Two digests of the token values: the ``sampled_checksum`` of .bin, and a checksum of the
        meta file's entry for .bin (None without a meta file). Reads at most 1 MiB of .bin; for a
        remote dataset with a meta file, reads nothing and the first digest is None."""
        width = self.dtype.itemsize

        def read(begin: int, end: int) -> bytes:
            tokens = self.tokens[begin // width : -(-end // width)]
            return bytes(np.ascontiguousarray(tokens).tobytes())

        recorded = None
        if self.meta is not None:
            recorded = xxhash.xxh3_64_hexdigest(json.dumps(self.meta["bin"]).encode())
        if is_remote(self.prefix) and recorded is not None:
            return [None, recorded]
        return [sampled_checksum(self.num_tokens * width, read), recorded]

    @property
    def idx_checksums(self) -> str:
        return self._index.idx_checksums

    def verify_reads(self, idx_checksums: str) -> None:
        self._index.verify_reads(idx_checksums)

    # Names of Megatron, Megatron-DeepSpeed and GPT-NeoX.
    path_prefix = property(attrgetter("prefix"))
    index = property(lambda self: self)  # Megatron's reader of .idx: dtype, sequence_lengths, ...
    bin_reader = property(lambda self: BinReader(self.tokens))
    sizes = property(attrgetter("sequence_lengths"))
    sequence_count = property(lambda self: int(self.sequence_lengths.size))
    document_count = property(lambda self: int(self.document_indices.size))  # documents + 1
    doc_idx = property(attrgetter("document_indices"))
    supports_prefetch = property(lambda _: False)

    def get_document_indices(self) -> NDArray[np.int64]:
        return self.document_indices

    get_doc_idx = get_document_indices

    def set_document_indices(self, document_indices: NDArray[np.int64]) -> None:
        """Replace ``document_indices`` in memory only, as in Megatron."""
        self.__dict__["document_indices"] = document_indices

    @staticmethod
    def exists(prefix: str | os.PathLike[str]) -> bool:
        """Return whether both files exist."""
        base = prefix_of(prefix)
        if is_remote(base):
            return exists(base)
        return file_exists(name_of(base, ".idx")) and file_exists(name_of(base, ".bin"))

    def __getstate__(self) -> tuple[str, bool, str]:
        # Make the path absolute: a worker may have another working directory.
        prefix = self.prefix if is_remote(self.prefix) else str(Path(self.prefix).absolute())
        return prefix, self.multimodal, self.fingerprint

    def __setstate__(self, state: tuple[str, bool, str]) -> None:
        prefix, multimodal, fingerprint = state
        IndexedDataset.__init__(self, prefix, multimodal)
        if self.fingerprint != fingerprint:
            raise FormatError(f"{prefix} was replaced after it was pickled; start the run again")

    def __repr__(self) -> str:
        numbers = {"document": self.num_documents, "sequence": len(self)}
        numbers[f"{self.dtype.name} token"] = self.num_tokens
        counts = ", ".join(counted(number, noun) for noun, number in numbers.items())
        return f"IndexedDataset({self.prefix!r}: {counts})"


def _frozen(array: NDArray[Any]) -> NDArray[Any]:
    array.flags.writeable = False
    return array


# ---- Document lengths without documents ---------------------------------------------------------


def read_document_lengths(prefix: str | os.PathLike[str]) -> NDArray[np.int32] | NDArray[np.int64]:
    """Return tokens per document from the .idx, without reading .bin: int32 ``(num_documents,)``,
    int64 only if a document has more than 2^31 - 1 tokens. ``prefix`` may end in ``.idx`` and may
    be an address. Raises FormatError or OSError if the .idx is damaged or cannot be read."""
    return open_index(prefix).document_lengths()


def open_index(prefix: str | os.PathLike[str]) -> IndexFile:
    """Open the .idx of a dataset, local or remote, with the errors of ``read_document_lengths``."""
    files = prefix_of(prefix)
    if is_remote(files):
        files = open_remote_pair(files).local_prefix
    return IndexFile(path_of(files, ".idx"))


MAX_DOCUMENT_TOKENS = 1 << 40  # a larger number cannot be a document's length


def read_lengths_file(path: str | os.PathLike[str]) -> NDArray[Any]:
    """Map tokens per document from a .npy file: (num_documents,), any integer dtype. Raises
    FormatError if it is not a .npy file, and DataError if it does not contain 1-D integers, or a
    document has over 2^40 tokens."""
    lengths = open_npy(path)
    if lengths.ndim != 1 or lengths.dtype.kind not in "iu":
        raise DataError(f"{path} has {lengths.dtype} of shape {lengths.shape}; give 1-D integers")
    if (longest := lengths.max(initial=0)) > MAX_DOCUMENT_TOKENS:
        raise DataError(
            f"{path}: a document has {longest} tokens; the limit is {MAX_DOCUMENT_TOKENS} (2^40)"
        )
    return lengths


# ---- Document ids in a file, to mask or to pack them ---------------------------------------------


def read_documents(path: str | Path) -> NDArray[np.int64]:
    """Return the document ids in a file, sorted and unique, int64: a .npy file of integers in one
    dimension, or text with one id per line. Raises FormatError if it contains anything else."""
    path = Path(path)
    if path.suffix == ".npy":
        ids: NDArray[Any] = open_npy(path)
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise FormatError(f"{path} has {ids.dtype} of shape {ids.shape}; ids are 1-D integers")
    else:
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
        for number, line in enumerate(lines, 1):
            if line.strip() and not (line.strip().isascii() and line.strip().isdecimal()):
                raise FormatError(
                    f"{path}, line {number}: {line[:40]!r} is not a document id; write one number "
                    "per line, counted from 0"
                )
        ids = np.array([int(line) for line in lines if line.strip()], object)
    if len(ids) and not (ids.min() >= 0 and ids.max() < 1 << 62):
        raise FormatError(f"{path} has ids {ids.min()} to {ids.max()}, not 0 to 2^62 - 1")
    return np.unique(ids.astype(np.int64))


# ---- Labels and loss weights as earlier versions wrote them --------------------------------------


def check_converted(prefix: str, columns: Container[str]) -> None:
    """Check that no labels or loss weights would be ignored.

    ``columns`` are those of the dataset. Raises ConfigError if earlier versions wrote others, the
    datasets ``<prefix>.labels`` and ``<prefix>.weights``, with the command that makes a column; and
    FormatError if the file of such a column exists that the meta file does not list.
    """
    for name in INTERPRETED:
        if name in columns:
            continue
        old = f"{prefix}.{name}"
        if not is_remote(prefix) and file_exists(name_of(prefix, f".{name}.col")):
            raise FormatError(
                f"{column_path(prefix, name)} exists, but the meta file does not list column "
                f"{name}: restore the meta file from a copy, write the column again, or delete "
                "this file"
            )
        if IndexedDataset.exists(old):
            first = "download both datasets and, where they are, " if is_remote(prefix) else ""
            raise ConfigError(
                f"{old} is a dataset, as earlier versions of megapack wrote {name}: {first}make it "
                f"a column with `megapack-build column add {prefix} {name} {old}`, then delete "
                f"{old}.*"
            )
