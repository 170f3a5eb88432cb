"""One pass over tokens that somebody else wrote: checksum, smallest and largest id."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import xxhash

from megapack import _core
from megapack.storage.meta import TokenFacts
from megapack.storage.mmididx import Tokens
from megapack.storage.opening import open_regular, read_blocks

__all__ = ["scan_tokens"]


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
    digest = xxhash.xxh3_128()
    lowest, highest = 2**63, -(2**63)
    with open_regular(path) as file:
        file.seek(begin_byte)
        for block in read_blocks(file, dtype, num_tokens):
            digest.update(block.data)
            low, high = _core.token_range(block)
            lowest, highest = min(lowest, low), max(highest, high)
            if look is not None:
                look(block)
    if num_tokens == 0:
        return TokenFacts(0, [], None, None)
    pieces = [(num_tokens * dtype.itemsize, digest.hexdigest())]
    return TokenFacts(num_tokens, pieces, lowest, highest)
