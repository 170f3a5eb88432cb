"""An .idx and the .bin that belongs to it, although a writer may replace them meanwhile."""

from __future__ import annotations

import io
import time

from megapack.errors import FormatError
from megapack.storage.mmididx import IndexFile, path_of
from megapack.storage.opening import open_regular

__all__ = ["open_pair"]

PATIENCE = 5.0  # seconds; a writer stands between two names for milliseconds


def open_pair(prefix: str) -> tuple[IndexFile, io.FileIO]:
    """Both files of a dataset, opened so that neither is older or newer than the other.

    A writer removes the old .idx before it names its .bin, and names its .idx last (``publish``).
    So when the .idx that was opened still has its name after .bin was opened, both are one
    writer's; else both are opened again.

    Raises:
        FormatError: the .idx is damaged, or writers replaced the files all the time.
        OSError: a file is missing or cannot be read.
    """
    idx_path, bin_path = path_of(prefix, ".idx"), path_of(prefix, ".bin")
    deadline = time.monotonic() + PATIENCE
    while True:
        late = time.monotonic() > deadline
        try:
            index = IndexFile(idx_path)
            tokens = open_regular(bin_path)
            if index.has_its_name():
                return index, tokens
            tokens.close()
        except FileNotFoundError:
            # Missing for good, or between a writer's two names? It holds its lock until both stand.
            is_written = path_of(prefix, ".lock").exists() or idx_path.exists()
            if late or not (is_written and bin_path.exists()):
                raise
        if late:
            raise FormatError(
                f"{prefix} was replaced again and again for {PATIENCE:.0f} seconds while it was "
                "opened; open it when nobody writes it any more"
            )
        time.sleep(0.001)
