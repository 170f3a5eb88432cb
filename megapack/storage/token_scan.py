"""One pass over tokens that somebody else wrote: checksum, smallest and largest id."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from megapack import _core
from megapack.errors import FormatError
from megapack.storage.meta import TokenFacts
from megapack.storage.mmididx import Tokens

__all__ = ["scan_tokens"]

BLOCK_BYTES = 1 << 20


def scan_tokens(
    path: str | os.PathLike[str],
    dtype: np.dtype[Any],
    num_tokens: int,
    look: Callable[[Tokens], object] | None = None,
    *,
    begin_byte: int = 0,
) -> TokenFacts:
    """Read ``num_tokens`` tokens of a file; ``look`` is shown every block of them.

    Raises:
        FormatError: the file is shorter.
        OSError: it cannot be read.
    """
    digest, remaining = xxhash.xxh3_128(), num_tokens
    lowest, highest = 2**63, -(2**63)
    with Path(path).open("rb", buffering=0) as file:
        file.seek(begin_byte)
        while remaining:
            block = np.fromfile(file, dtype, min(BLOCK_BYTES // dtype.itemsize, remaining))
            if block.size == 0:
                raise FormatError(f"{os.fspath(path)} ends {remaining} tokens early")
            digest.update(block.data)
            low, high = _core.token_range(block)
            lowest, highest = min(lowest, low), max(highest, high)
            if look is not None:
                look(block)
            remaining -= block.size
    if num_tokens == 0:
        return TokenFacts(0, [], None, None)
    pieces = [(num_tokens * dtype.itemsize, digest.hexdigest())]
    return TokenFacts(num_tokens, pieces, lowest, highest)
