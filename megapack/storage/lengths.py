"""Document lengths without documents."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megapack.errors import DataError
from megapack.storage.mmididx import IndexFile, path_of, prefix_of
from megapack.storage.remote import is_remote
from megapack.storage.remote.opening import open_remote_pair

__all__ = ["open_index", "read_document_lengths", "read_lengths_file"]


def read_document_lengths(
    prefix: str | os.PathLike[str],
) -> NDArray[np.int32] | NDArray[np.int64]:
    """Tokens per document, straight from the .idx; .bin is not read.

    Args:
        prefix: of the dataset, with or without ``.idx``; an address, too.

    Returns:
        int32 ``(num_documents,)``; int64 only when a document has more than 2^31 - 1 tokens.

    Raises:
        FormatError: the .idx is damaged.
        OSError: it cannot be read.
    """
    return open_index(prefix).document_lengths()


def open_index(prefix: str | os.PathLike[str]) -> IndexFile:
    """The .idx of a dataset, near or far; .bin is not read. Raises as read_document_lengths."""
    files = prefix_of(prefix)
    if is_remote(files):
        files = open_remote_pair(files).local_prefix
    return IndexFile(path_of(files, ".idx"))


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
