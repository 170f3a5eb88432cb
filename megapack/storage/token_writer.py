"""The .bin of a dataset under construction: checked, narrowed, buffered, summed, written."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from megapack import _core
from megapack.storage.atomic import AtomicFile, Buffer
from megapack.storage.meta import Piece
from megapack.storage.mmididx import Tokens
from megapack.storage.tokens import TokenLimits

__all__ = ["TokenWriter"]

BUFFER_BYTES = 1 << 21


class TokenWriter:
    """Appends tokens to a file that has no name yet. A call that raises has written nothing.

    Args:
        path: the final name of the .bin.
        limits: the ids it may hold; also its dtype.
    """

    def __init__(self, path: str | os.PathLike[str], limits: TokenLimits) -> None:
        self.limits = limits
        self.num_tokens = 0
        self.max_token_id = -1
        self.target = AtomicFile(path)
        self._pieces: list[Piece] = []
        self._hasher = xxhash.xxh3_128()
        self._hashed_bytes = 0
        self._buffer: Tokens = np.empty(BUFFER_BYTES // limits.dtype.itemsize, limits.dtype)
        self._fill = 0

    def append(
        self, tokens: Tokens, offsets: NDArray[Any] | None = None, *, first_document: int
    ) -> None:
        """Write tokens (from ``as_tokens``); the other arguments serve the error message.

        Raises:
            DataError: an id outside of the limits.
            OSError: the file cannot be written.
        """
        if tokens.size > self._buffer.size - self._fill:
            self._append_many(tokens, offsets, first_document)
            return
        low, high = self._store(tokens)
        if not self.limits.hold(low, high):
            raise self.limits.refuse(tokens, offsets, first_document)
        self._count(tokens.size, high)

    def finish(self) -> list[Piece]:
        """Write what is buffered; the checksums of everything written, in order."""
        self.flush()
        if self._hashed_bytes:
            self._pieces.append((self._hashed_bytes, self._hasher.hexdigest()))
            self._hasher, self._hashed_bytes = xxhash.xxh3_128(), 0
        return self._pieces

    def flush(self) -> None:
        self._write(self._buffer[: self._fill])
        self._fill = 0

    def _append_many(
        self, tokens: Tokens, offsets: NDArray[Any] | None, first_document: int
    ) -> None:
        low, high = _core.token_range(tokens)
        if not self.limits.hold(low, high):
            raise self.limits.refuse(tokens, offsets, first_document)
        self.flush()
        if tokens.dtype == self.limits.dtype:
            self._write(tokens)
        else:
            for begin in range(0, tokens.size, self._buffer.size):
                chunk = tokens[begin : begin + self._buffer.size]
                self._store(chunk)
                self._fill = chunk.size
                self.flush()
            self._fill = 0
        self.num_tokens += tokens.size
        self.max_token_id = max(self.max_token_id, high)

    def _store(self, tokens: Tokens) -> tuple[int, int]:
        return _core.store_tokens(
            tokens, self._buffer, self._fill, self.limits.low, self.limits.high
        )

    def _count(self, num_tokens: int, high: int) -> None:
        self._fill += num_tokens
        self.num_tokens += num_tokens
        if num_tokens and high > self.max_token_id:
            self.max_token_id = high

    def _write(self, data: Buffer) -> None:
        self.target.write(data)
        self._hasher.update(data)
        self._hashed_bytes += memoryview(data).nbytes
