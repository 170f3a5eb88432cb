"""Numbers of documents in a file: those to mask, or to pack."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megapack.errors import FormatError

__all__ = ["read_documents"]


def read_documents(path: str | Path) -> NDArray[np.int64]:
    """Document ids of a file, ascending, each once, int64.

    Args:
        path: a .npy file of integers in one dimension, or text with one id per line.

    Raises:
        FormatError, OSError: it holds something else, or cannot be read.
    """
    path = Path(path)
    if path.suffix == ".npy":
        try:
            found = np.load(path, allow_pickle=False)
        except ValueError as error:
            raise FormatError(f"{path} is no .npy file of integers: {error}") from error
        if found.ndim != 1 or found.dtype.kind not in "iu":
            raise FormatError(
                f"{path} holds {found.dtype} of shape {found.shape}; document ids are integers in "
                "one dimension"
            )
    else:
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
        for number, line in enumerate(lines, 1):
            if line.strip() and not (line.strip().isascii() and line.strip().isdecimal()):
                raise FormatError(
                    f"{path}, line {number}: {line[:40]!r} is no document id; write one number, "
                    "counted from 0, per line"
                )
        found = np.array([int(line) for line in lines if line.strip()], object)
    if len(found) and not (found.min() >= 0 and found.max() < 1 << 62):
        raise FormatError(f"{path} has ids from {found.min()} to {found.max()}; ids are 0 or more")
    return np.unique(found.astype(np.int64))
