"""Document lengths without documents."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megapack.errors import DataError

__all__ = ["read_lengths_file"]


def read_lengths_file(path: str | os.PathLike[str]) -> NDArray[Any]:
    """Tokens per document from a .npy file: ``(num_documents,)``, any integer dtype, mapped.

    Raises:
        DataError: the file holds something else.
        OSError: it cannot be read.
    """
    try:
        lengths = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise DataError(f"{path} is not a .npy file of numbers: {error}") from error
    if not isinstance(lengths, np.ndarray) or lengths.ndim != 1 or lengths.dtype.kind not in "iu":
        raise DataError(
            f"{path} does not hold a one-dimensional array of integers, tokens per document"
        )
    return lengths
