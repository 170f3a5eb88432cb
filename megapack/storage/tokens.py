"""Check, convert and write the tokens of a .bin.

- ``as_tokens``: ids from lists, arrays and tensors; ``TokenLimits``: accepted ids
- ``open_npy``: the array of a .npy file, for import, lists of documents, groups and columns
- ``scan_tokens``: checksum and range of the tokens in a file
- ``TokenWriter``: a .bin under a temporary name
- ``InputDataset``: a checked dataset whose tokens are copied to a new one
"""

from __future__ import annotations

import io
import os
from array import array
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from megapack import _core
from megapack.errors import ConfigError, DataError, FormatError
from megapack.storage.columns import ColumnWriter, column_entries, column_path
from megapack.storage.files import AtomicFile, file_identity, open_regular, read_array_blocks
from megapack.storage.index_file import IndexFile, Tokens, dtype_of_code, path_of, prefix_of
from megapack.storage.metadata import Checksum, TokenFacts, matching_meta, meta_path, read_meta
from megapack.storage.survey import remedy_for, survey

BUFFER_BYTES = 1 << 19  # small enough to stay in the CPU cache between check, conversion and write


def as_tokens(tokens: Any) -> Tokens:
    """Return tokens as a plain 1-D integer array; do not copy an array that is one already. Accepts
    arrays, tensors of torch and similar, lists, and lists of numeric strings (Megatron's tools pass
    them). Raises TypeError for floats, booleans, or objects that are not numbers."""
    ids: Tokens = tokens if type(tokens) is np.ndarray else _to_array(tokens)
    dtype, flags = ids.dtype, ids.flags
    if dtype.kind not in "iu":
        raise TypeError(f"tokens have dtype {dtype}; token ids are integers")
    if ids.ndim == 1 and flags.c_contiguous and flags.aligned and dtype.isnative:
        return ids
    return np.require(ids.reshape(-1), dtype.newbyteorder("="), ["C", "A"])


def _to_array(tokens: Any) -> NDArray[Any]:
    if isinstance(tokens, str | bytes):
        raise TypeError(f"tokens are {tokens!r:.50}; give token ids, not text")
    if isinstance(tokens, list):
        try:
            return np.frombuffer(array("q", tokens), np.int64)  # twice as fast as np.array
        except (TypeError, OverflowError):
            pass  # strings, rows, large unsigned ids, or not integers
    if hasattr(tokens, "detach"):  # torch.Tensor, without importing torch
        tokens = tokens.detach().cpu().numpy()
    values = np.asarray(tokens)
    if values.size == 0:
        return np.zeros(0, np.int64)
    if values.dtype.kind in "US":
        try:
            return values.astype(np.int64)
        except ValueError as error:
            raise TypeError(
                f"tokens are strings that are not numbers: {error}; give token ids, not text"
            ) from error
    return values


def open_npy(path: str | os.PathLike[str]) -> np.memmap[Any, Any]:
    """Map the array of a .npy file for reading. Raises FormatError if the file is not a .npy file,
    is truncated, contains Python objects, or continues after the array (a second array)."""
    open_regular(path).close()  # a FIFO would block
    try:
        array = np.lib.format.open_memmap(Path(path), mode="r")
    except OSError:
        raise
    except Exception as error:  # numpy evaluates the header as Python, which may raise anything
        reason = str(error).partition("\n")[0][:200]  # may quote the whole header
        raise FormatError(f"{path} is not a .npy file of numbers: {reason}") from error
    num_bytes = Path(path).stat().st_size
    if num_bytes != array.offset + array.nbytes:
        raise FormatError(
            f"{path} has {num_bytes - array.offset - array.nbytes} bytes after its array of "
            f"{array.size} numbers; join arrays with numpy.concatenate, not their files"
        )
    return array


def scan_tokens(
    path: str | os.PathLike[str],
    dtype: np.dtype[Any],
    num_tokens: int,
    look: Callable[[Tokens, int, int], object] | None = None,
    *,
    begin_byte: int = 0,
) -> TokenFacts:
    """Read ``num_tokens`` tokens of a file and return their facts. Call ``look`` with every block,
    its smallest and its largest id. Raises FormatError if the file is too short."""
    digest = xxhash.xxh3_128()
    lowest, highest = 2**63, -(2**63)
    with open_regular(path) as file:
        file.seek(begin_byte)
        for block in read_array_blocks(file, dtype, num_tokens):
            digest.update(block.data)
            low, high = _core.token_range(block)
            lowest, highest = min(lowest, low), max(highest, high)
            if look is not None:
                look(block, low, high)
    if num_tokens == 0:
        return TokenFacts(0, [], None)
    checksum = Checksum(num_tokens * dtype.itemsize, digest.hexdigest())
    return TokenFacts(num_tokens, [checksum], (lowest, highest))


class TokenLimits:
    """Accepted token ids, ``[low, high]``, for a dtype and, if known, a vocabulary size. Raises
    ConfigError if vocab_size does not fit the dtype, or an unsigned dtype has
    ``allow_negative``."""

    def __init__(
        self, dtype: np.dtype[Any], vocab_size: int | None = None, allow_negative: bool = False
    ) -> None:
        info = np.iinfo(dtype)
        self.dtype, self.vocab_size = dtype, vocab_size
        if vocab_size is not None and not 0 < vocab_size <= int(info.max) + 1:
            raise ConfigError(
                f"vocab_size is {vocab_size}; {dtype.name} has ids 0 to {info.max}: choose int32"
            )
        if allow_negative and dtype.kind == "u":
            raise ConfigError(f"{dtype.name} has no negative values; choose int32")
        self.low = int(info.min) if allow_negative else 0
        self.high = int(info.max) if vocab_size is None else vocab_size - 1

    def hold(self, low: int, high: int) -> bool:
        """Return whether all ids from ``low`` to ``high`` are accepted (low > high: no ids)."""
        return low >= self.low and high <= self.high

    def first_outside(self, tokens: Tokens) -> int:
        """Return the position of the first id that is not accepted; one must exist."""
        return int(((tokens < self.low) | (tokens > self.high)).argmax())

    def error(self, document: int | str, position: int, token: int) -> DataError:
        where = f"document {document}, position {position}"
        return DataError(f"{where}: token id {token} is outside {self.describe()}")

    def describe(self) -> str:
        """Return ``[0, 65535] (uint16)``, for messages."""
        vocabulary = "" if self.vocab_size is None else f", vocab_size {self.vocab_size}"
        return f"[{self.low}, {self.high}] ({self.dtype.name}{vocabulary})"


class InputDataset:
    """Dataset whose index was checked by reading it once. Its files are never mapped, so a merge
    can have thousands of inputs. Raises FormatError for negative lengths, wrong pointers, documents
    that do not end at the last sequence, a .bin that is too short, an unknown dtype code, or
    ``multimodal`` without modes."""

    def __init__(self, prefix: str | os.PathLike[str], multimodal: bool = False) -> None:
        self.prefix = prefix_of(prefix)
        self.idx_path, self.bin_path = path_of(self.prefix, ".idx"), path_of(self.prefix, ".bin")
        facts = survey(self.idx_path, self.bin_path, multimodal=multimodal)
        self.layout = facts.layout
        self.dtype: np.dtype[Any] = dtype_of_code(self.layout.header.dtype_code, self.idx_path)
        for finding in facts.findings():
            # Without document indices, every sequence is a document.
            if finding.severity == "error" and finding.code != "documents-lost":
                raise FormatError(f"{finding.message} -> {remedy_for(finding, self.prefix)}")
        self.num_tokens = facts.num_tokens
        self.num_bytes = facts.num_tokens * self.dtype.itemsize
        self.meta = matching_meta(self.prefix, self.dtype.name, self.layout.header, self.num_tokens)
        # Facts about .bin; None if no meta file matches the .idx.
        self.facts = None if self.meta is None else TokenFacts.of_meta(self.meta)
        self.columns = column_entries(self.meta, meta_path(self.prefix))

    def open_tokens(self) -> io.FileIO:
        return self._open(self.bin_path)

    def copy_column(self, writer: ColumnWriter) -> None:
        """Append the dataset's column of the writer's name and type; the kernel copies it. Raises
        FormatError if its size is wrong, or if it was replaced after the index was read."""
        entry = self.columns[writer.name]
        with self._open(column_path(self.prefix, writer.name)) as file:
            num_bytes = file_identity(file).num_bytes
            if num_bytes != entry.bytes:
                raise FormatError(
                    f"{file.name} has {num_bytes} bytes, not {entry.bytes}: restore it"
                )
            if read_meta(self.prefix) != self.meta:
                raise FormatError(f"{self.prefix} was changed while it was read; start again")
            writer.append_file(file, entry)

    def _open(self, path: Path) -> io.FileIO:
        file = open_regular(path)
        if not self.layout.has_its_name():
            file.close()
            raise FormatError(f"{self.prefix} was replaced while it was read; start again")
        return file


class TokenWriter:
    """Writer of a .bin under a temporary name. A method that raises writes nothing."""

    def __init__(self, path: str | os.PathLike[str], limits: TokenLimits) -> None:
        self.limits = limits
        self.num_tokens = 0
        self._range: tuple[int, int] | None = None
        self.target = AtomicFile(path)
        self._checksums: list[Checksum] = []
        self._hasher = xxhash.xxh3_128()
        self._hashed_bytes = 0
        self._buffer: Tokens = np.empty(BUFFER_BYTES // limits.dtype.itemsize, limits.dtype)
        self._fill = 0

    def append(
        self, tokens: Tokens, offsets: NDArray[Any] | None = None, *, first_document: int
    ) -> None:
        """Write tokens (from ``as_tokens``) of one document, or of several with ``offsets``. Raises
        DataError if an id is outside the limits; its message numbers documents from
        ``first_document``."""

        def error_at(position: int, token: int) -> DataError:
            document = first_document
            if offsets is not None:
                index = int(np.searchsorted(offsets, position, side="right")) - 1
                document, position = document + index, position - int(offsets[index])
            return self.limits.error(document, position, token)

        max_tokens = self._buffer.size
        if tokens.size > max_tokens - self._fill:
            begins = range(0, tokens.size, max_tokens)
            self._append_blocks((tokens[at : at + max_tokens] for at in begins), error_at)
            return
        low, high = self._store(tokens, self._fill)
        if not self.limits.hold(low, high):
            outside = self.limits.first_outside(tokens)
            raise error_at(outside, tokens[outside])
        self._fill += tokens.size
        self._count(tokens.size, low, high)

    def append_dataset(self, dataset: InputDataset) -> None:
        """Write the tokens of another dataset. The kernel copies them if the dtype is the same and
        the other meta file has their range and checksums; otherwise read, check and convert them.
        Raises DataError if an id is outside the limits."""
        with dataset.open_tokens() as file:
            facts = dataset.facts
            if dataset.dtype == self.limits.dtype and facts is not None and facts.token_range:
                low, high = facts.token_range
                if not self.limits.hold(low, high):
                    ids = f"token ids from {low} to {high}"
                    raise DataError(f"{dataset.prefix} has {ids}, outside {self.limits.describe()}")
                self.flush()
                self.target.copy_from(file, dataset.num_bytes)
                self._end_checksum()
                self._checksums += facts.checksums
                self._count(dataset.num_tokens, low, high)
                return

            def error_at(position: int, token: int) -> DataError:
                offsets = IndexFile(dataset.idx_path).document_offsets(dataset.dtype.itemsize)
                document = int(np.searchsorted(offsets, position, side="right")) - 1
                position -= int(offsets[document])
                return self.limits.error(f"{document} of {dataset.prefix}", position, token)

            blocks = read_array_blocks(file, dataset.dtype, dataset.num_tokens, self._buffer.size)
            self._append_blocks(blocks, error_at)

    def flush(self) -> None:
        self._write(self._buffer[: self._fill])
        self._fill = 0

    def finish(self) -> TokenFacts:
        self.flush()
        self._end_checksum()
        return TokenFacts(self.num_tokens, self._checksums, self._range)

    def _append_blocks(
        self, blocks: Iterable[Tokens], error_at: Callable[[int, int], DataError]
    ) -> None:
        """Write all blocks, or none if one has an id outside the limits."""
        self.flush()
        done, lowest, highest = 0, 2**63, -(2**63)
        hasher, hashed_bytes = self._hasher.copy(), self._hashed_bytes
        try:
            with self.target.all_or_nothing():
                for block in blocks:
                    same_dtype = block.dtype == self.limits.dtype
                    low, high = _core.token_range(block) if same_dtype else self._store(block, 0)
                    if not self.limits.hold(low, high):
                        outside = self.limits.first_outside(block)
                        raise error_at(done + outside, block[outside])
                    self._write(block if same_dtype else self._buffer[: block.size])
                    done, lowest, highest = done + block.size, min(lowest, low), max(highest, high)
        except BaseException:
            self._hasher, self._hashed_bytes = hasher, hashed_bytes
            raise
        self._count(done, lowest, highest)

    def _store(self, tokens: Tokens, begin: int) -> tuple[int, int]:
        return _core.store_tokens(tokens, self._buffer, begin, self.limits.low, self.limits.high)

    def _count(self, num_tokens: int, low: int, high: int) -> None:
        if num_tokens:
            self.num_tokens += num_tokens
            lowest, highest = self._range or (low, high)
            self._range = min(low, lowest), max(high, highest)

    def _write(self, data: Tokens) -> None:
        self.target.write(data)
        self._hasher.update(data.data)
        self._hashed_bytes += data.nbytes

    def _end_checksum(self) -> None:
        if self._hashed_bytes:
            self._checksums.append(Checksum(self._hashed_bytes, self._hasher.hexdigest()))
            self._hasher, self._hashed_bytes = xxhash.xxh3_128(), 0
