"""Token ids from whatever holds them, what a file of them holds, and the limits set to them."""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from megapack import _core
from megapack.errors import ConfigError, DataError
from megapack.storage.meta import Checksum, TokenFacts
from megapack.storage.mmididx import Tokens
from megapack.storage.opening import open_regular, read_blocks

__all__ = ["TokenLimits", "as_tokens", "scan_tokens"]


def as_tokens(tokens: Any) -> Tokens:
    """Tokens as a plain 1-D integer array, without a copy where they are one.

    Takes arrays, tensors of torch and its like, lists, and lists of numeric strings (Megatron's
    tools pass them).

    Raises:
        TypeError: floats, booleans, or objects that are no numbers.
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
        for block in read_blocks(file, dtype, num_tokens):
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
        """What to raise for an id that is not accepted."""
        return DataError(
            f"document {document}, position {position}: token id {token} is outside of "
            f"{self.describe()}"
        )

    def describe(self) -> str:
        """``[0, 65535] (uint16)``, for messages."""
        vocabulary = "" if self.vocab_size is None else f", vocab_size {self.vocab_size}"
        return f"[{self.low}, {self.high}] ({self.dtype.name}{vocabulary})"
