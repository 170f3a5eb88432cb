"""The .bin of a dataset under construction: checked, narrowed, buffered, summed, written."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from megapack import _core
from megapack.errors import DataError
from megapack.storage.atomic import AtomicFile
from megapack.storage.input_dataset import InputDataset
from megapack.storage.meta import Checksum, TokenFacts
from megapack.storage.mmididx import Tokens
from megapack.storage.opening import read_blocks
from megapack.storage.tokens import TokenLimits

__all__ = ["TokenWriter"]

BUFFER_BYTES = 1 << 19  # what is checked is still in the cache when it is narrowed and written


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

            blocks = read_blocks(file, dataset.dtype, dataset.num_tokens, self._buffer.size)
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
