"""Tokens on their way into a .bin: checked, narrowed, buffered, summed, written.

- ``as_tokens``: ids from whatever holds them; ``TokenLimits``: those that a dataset accepts
- ``open_npy``: the array of a .npy file, for import, lists of documents, groups and weights
- ``as_loss_weights``: factors on the loss of tokens, as a dataset of weights stores them
- ``scan_tokens``: what a file of them holds
- ``TokenWriter``: a .bin without its name yet
- ``InputDataset``: one dataset as the input of another
"""

from __future__ import annotations

import contextlib
import io
import os
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from megapack import _core
from megapack.errors import ConfigError, DataError, FormatError
from megapack.storage.files import AtomicFile, open_regular, read_array_blocks
from megapack.storage.index_file import IndexFile, Tokens, dtype_of_code, path_of, prefix_of
from megapack.storage.metadata import (
    Checksum,
    TokenFacts,
    difference_from_files,
    file_checksum,
    read_meta,
)
from megapack.storage.survey import survey

BUFFER_BYTES = 1 << 19  # what is checked is still in the cache when it is narrowed and written


def as_tokens(tokens: Any) -> Tokens:
    """Tokens as a plain 1-D integer array, without a copy where they are one.

    Takes arrays, tensors of torch and its like, lists, and lists of numeric strings (Megatron's
    tools pass them).

    Raises:
        TypeError: floats, an array of booleans, or objects that are no numbers.
    """
    ids: Tokens = tokens if type(tokens) is np.ndarray else _to_array(tokens)
    dtype, flags = ids.dtype, ids.flags
    if dtype.kind not in "iu":
        raise TypeError(f"tokens have dtype {dtype}; token ids are integers")
    if ids.ndim == 1 and flags.c_contiguous and flags.aligned and dtype.isnative:
        return ids
    return np.require(ids.reshape(-1), dtype.newbyteorder("="), ["C", "A"])


def _to_array(tokens: Any) -> NDArray[Any]:
    if isinstance(tokens, list):
        try:
            return np.frombuffer(array("q", tokens), np.int64)  # twice as fast as np.array
        except (TypeError, OverflowError):
            pass  # strings, rows, large unsigned ids, or nothing that is an integer
    if hasattr(tokens, "detach"):  # torch.Tensor, without importing torch
        tokens = tokens.detach().cpu().numpy()
    values = np.asarray(tokens)
    if values.size == 0:
        return np.zeros(0, np.int64)
    if values.dtype.kind in "US":
        try:
            return values.astype(np.int64)
        except ValueError as error:
            raise TypeError(f"tokens are strings that are no numbers: {error}") from error
    return values


def open_npy(path: str | os.PathLike[str]) -> np.memmap[Any, Any]:
    """The array of a .npy file, mapped for reading.

    Raises:
        FormatError: it is none: another kind of file, cut off, of Python's objects, or followed by
            other bytes (a second array).
        OSError: it cannot be read.
    """
    try:
        array = np.lib.format.open_memmap(Path(path), mode="r")
    except OSError:
        raise
    except Exception as error:  # numpy evaluates the header as Python, which raises anything
        raise FormatError(f"{path} is not a .npy file of numbers: {error}") from error
    num_bytes = Path(path).stat().st_size
    if num_bytes != array.offset + array.nbytes:
        raise FormatError(
            f"{path} has {num_bytes - array.offset - array.nbytes} bytes behind its array of "
            f"{array.size} numbers: .npy files cannot be concatenated; join the arrays with "
            "numpy.concatenate"
        )
    return array


LOSS_WEIGHTS = {"loss_weights": "float16"}  # metadata by which a dataset of them is known
NUM_LOSS_WEIGHTS = 0x7C00  # bit patterns below those of infinity


def holds_weights(meta: Mapping[str, Any] | None) -> bool:
    """Whether a dataset's meta file says that it holds loss weights."""
    return LOSS_WEIGHTS.items() <= (meta or {}).items()


def as_loss_weights(weights: Any) -> Tokens:
    """Factors on the loss of tokens as a dataset of weights stores them.

    float16 because weights are factors around 1: it keeps 3 digits of them where bfloat16 keeps 2,
    and numpy reads it. What is stored are its bits, as uint16: a type that token files have.

        as_loss_weights([1, 0.5, 0]).view(np.float16)     # -> [1, 0.5, 0]

    Args:
        weights: numbers from 0 to 65504: an array, a tensor, a list.

    Returns:
        uint16, one dimension.

    Raises:
        DataError: a weight is no number, below 0 or too large; or above 0 and so small that it
            would be stored as 0 (below 3e-8).
    """
    if hasattr(weights, "detach"):  # torch.Tensor, without importing torch
        weights = weights.detach().cpu().numpy()
    try:
        values = np.asarray(weights, np.float64).reshape(-1)
    except (TypeError, ValueError) as error:
        raise DataError(f"loss weights are no numbers: {error}") from error
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        halves = values.astype(np.float16)
    fits = np.isfinite(halves) & (values >= 0) & ((halves > 0) == (values > 0))
    if not fits.all():
        at = int(np.flatnonzero(~fits)[0])
        raise DataError(
            f"loss weight {at} is {values[at]}; weights are 0, or from 6e-08 to 65504 (float16)"
        )
    return np.abs(halves).view(np.uint16)  # -0 has a bit that 0 has not


def scan_tokens(
    path: str | os.PathLike[str],
    dtype: np.dtype[Any],
    num_tokens: int,
    look: Callable[[Tokens, int, int], object] | None = None,
    *,
    begin_byte: int = 0,
) -> TokenFacts:
    """Read ``num_tokens`` tokens of a file; ``look`` is shown every block, its smallest and its
    largest id.

    Raises:
        FormatError: the file is shorter.
        OSError: it cannot be read.
    """
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
    """The ids a dataset accepts: ``[low, high]``.

    Args:
        dtype: of the tokens on disk.
        vocab_size: number of token ids, None when unknown.
        allow_negative: accept what the dtype has below zero.

    Raises:
        ConfigError: vocab_size is not positive or exceeds the dtype, or negative values in an
            unsigned dtype.
    """

    def __init__(
        self, dtype: np.dtype[Any], vocab_size: int | None = None, allow_negative: bool = False
    ) -> None:
        info = np.iinfo(dtype)
        self.dtype, self.vocab_size = dtype, vocab_size
        if vocab_size is not None and not 0 < vocab_size <= int(info.max) + 1:
            raise ConfigError(
                f"vocab_size is {vocab_size}; {dtype.name} holds ids from 0 to {info.max}: "
                "choose int32"
            )
        if allow_negative and dtype.kind == "u":
            raise ConfigError(f"{dtype.name} has no negative values; choose int32")
        self.low = int(info.min) if allow_negative else 0
        self.high = int(info.max) if vocab_size is None else vocab_size - 1

    def hold(self, low: int, high: int) -> bool:
        """Whether ids from ``low`` to ``high`` are accepted (any, when low > high: none)."""
        return low >= self.low and high <= self.high

    def first_outside(self, tokens: Tokens) -> int:
        """Position of the first id that is not accepted; there is one."""
        return int(((tokens < self.low) | (tokens > self.high)).argmax())

    def error(self, document: int | str, position: int, token: int) -> DataError:
        """The error for an id that is not accepted."""
        return DataError(
            f"document {document}, position {position}: token id {token} is outside of "
            f"{self.describe()}"
        )

    def describe(self) -> str:
        """``[0, 65535] (uint16)``, for messages."""
        vocabulary = "" if self.vocab_size is None else f", vocab_size {self.vocab_size}"
        return f"[{self.low}, {self.high}] ({self.dtype.name}{vocabulary})"


# ---- One dataset as the input of another: checked, never mapped, so that thousands can take part


class InputDataset:
    """A dataset whose index was read once from end to end and found sound.

    Args:
        prefix: with or without ``.idx``.
        multimodal: the modes of its sequences are wanted.

    Raises:
        FormatError: negative lengths, pointers that do not follow from them, documents that do
            not end with the sequences, a .bin that is too short, an unknown dtype code.
        OSError: a file is missing or cannot be read.
    """

    def __init__(self, prefix: str | os.PathLike[str], multimodal: bool = False) -> None:
        self.prefix = prefix_of(prefix)
        self.idx_path, self.bin_path = path_of(self.prefix, ".idx"), path_of(self.prefix, ".bin")
        facts = survey(self.idx_path, self.bin_path, multimodal=multimodal)
        self.layout = facts.layout
        self.dtype: np.dtype[Any] = dtype_of_code(self.layout.header.dtype_code, self.idx_path)
        for found in facts.findings():
            # Without documents every sequence is one.
            if found.severity == "error" and found.code != "documents-lost":
                raise FormatError(f"{found.message} -> {found.remedy}")
        self.num_tokens = facts.num_tokens
        self.num_bytes = facts.num_tokens * self.dtype.itemsize
        self.meta = self._trusted_meta()
        # What .bin holds, None when nobody vouches for it.
        self.facts = None if self.meta is None else TokenFacts.of_meta(self.meta)

    @property
    def holds_weights(self) -> bool:
        """Whether its meta file says that it holds loss weights."""
        return holds_weights(self.meta)

    def open_tokens(self) -> io.FileIO:
        """The .bin that belongs to the index.

        Raises:
            FormatError: a writer replaced the dataset since its index was read.
        """
        file = open_regular(self.bin_path)
        if not self.layout.has_its_name():
            file.close()
            raise FormatError(f"{self.prefix} was replaced while it was read; start again")
        return file

    def document_at(self, position: int) -> tuple[int, int]:
        """The document that holds the token at a position of .bin, and the position inside."""
        offsets = IndexFile(self.idx_path).document_offsets(self.dtype.itemsize)
        document = int(np.searchsorted(offsets, position, side="right")) - 1
        return document, position - int(offsets[document])

    def _trusted_meta(self) -> dict[str, Any] | None:
        """The meta file, unless the .idx it describes is not the one that stands beside it."""
        meta = read_meta(self.prefix)
        if meta is None or difference_from_files(
            meta, self.dtype.name, self.layout.header, self.num_tokens
        ):
            return None
        return meta if file_checksum(self.idx_path) == meta["idx"]["xxh3_128"] else None


class TokenWriter:
    """Appends tokens to a file that has no name yet. A call that raises has written nothing.

    Args:
        path: the final name of the .bin.
        limits: the ids it may hold; also its dtype.
    """

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
        """Write tokens (from ``as_tokens``).

        Args:
            tokens: of one document, or of many.
            offsets: of the documents, when they are many.
            first_document: its number; both for the error message.

        Raises:
            DataError: an id outside of the limits.
            OSError: the file cannot be written.
        """

        def error_at(position: int, token: int) -> DataError:
            document = first_document
            if offsets is not None:
                inside = int(np.searchsorted(offsets, position, side="right")) - 1
                document, position = document + inside, position - int(offsets[inside])
            return self.limits.error(document, position, token)

        room = self._buffer.size
        if tokens.size > room - self._fill:
            blocks = (tokens[begin : begin + room] for begin in range(0, tokens.size, room))
            self._append_blocks(blocks, error_at)
            return
        low, high = self._store(tokens, self._fill)
        if not self.limits.hold(low, high):
            outside = self.limits.first_outside(tokens)
            raise error_at(outside, tokens[outside])
        self._fill += tokens.size
        self._count(tokens.size, low, high)

    def append_dataset(self, dataset: InputDataset) -> None:
        """Write the tokens of another dataset: inside the kernel when its meta file vouches for
        their range and checksums and the dtype is the same, else read, checked and converted.

        Raises:
            DataError: an id outside of the limits.
            OSError: either file fails.
        """
        with dataset.open_tokens() as file:
            facts = dataset.facts
            if dataset.dtype == self.limits.dtype and facts is not None and facts.token_range:
                low, high = facts.token_range
                if not self.limits.hold(low, high):
                    raise DataError(
                        f"{dataset.prefix} has token ids from {low} to {high}, outside of "
                        f"{self.limits.describe()}"
                    )
                self.flush()
                self.target.copy_from(file, dataset.num_bytes)
                self._end_checksum()
                self._checksums += facts.checksums
                self._count(dataset.num_tokens, low, high)
                return

            def error_at(position: int, token: int) -> DataError:
                document, inside = dataset.document_at(position)
                return self.limits.error(f"{document} of {dataset.prefix}", inside, token)

            blocks = read_array_blocks(file, dataset.dtype, dataset.num_tokens, self._buffer.size)
            self._append_blocks(blocks, error_at)

    def flush(self) -> None:
        """Write what is buffered."""
        self._write(self._buffer[: self._fill])
        self._fill = 0

    def finish(self) -> TokenFacts:
        """Write what is buffered; what the file then holds."""
        self.flush()
        self._end_checksum()
        return TokenFacts(self.num_tokens, self._checksums, self._range)

    def _append_blocks(
        self, blocks: Iterable[Tokens], error_at: Callable[[int, int], DataError]
    ) -> None:
        """Write all blocks, or none when one has an id outside of the limits."""
        self.flush()
        done, lowest, highest = 0, 2**63, -(2**63)
        with self._all_or_nothing():
            for block in blocks:
                same_dtype = block.dtype == self.limits.dtype
                low, high = _core.token_range(block) if same_dtype else self._store(block, 0)
                if not self.limits.hold(low, high):
                    outside = self.limits.first_outside(block)
                    raise error_at(done + outside, block[outside])
                self._write(block if same_dtype else self._buffer[: block.size])
                done, lowest, highest = done + block.size, min(lowest, low), max(highest, high)
        self._count(done, lowest, highest)

    @contextlib.contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        hasher, hashed_bytes = self._hasher.copy(), self._hashed_bytes
        try:
            with self.target.all_or_nothing():
                yield
        except BaseException:
            self._hasher, self._hashed_bytes = hasher, hashed_bytes
            raise

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
