"""A finished local dataset, copied to an address."""

from __future__ import annotations

import tempfile
from pathlib import Path

from megapack.storage.mmididx import path_of
from megapack.storage.remote.checksums import SUFFIX, write_checksums
from megapack.storage.remote.client import put_object, remove_object

__all__ = ["upload_dataset"]


def upload_dataset(prefix: str, address: str) -> None:
    """Copy a dataset, with checksums of its blocks, to the prefix at an address.

    Whoever looks at any moment finds the old dataset, none, or the new one: the old .idx goes
    first, and the new one comes last. One writer at a time: an object store has no locks.

    Args:
        prefix: of the local files.
        address: prefix of the objects.

    Raises:
        FormatError: .bin or .idx are not what the meta file says.
        ConfigError, OSError: a file cannot be read, or an object not be written.
    """
    with tempfile.TemporaryDirectory(prefix="megapack-") as folder:
        sums = Path(folder) / SUFFIX
        write_checksums(prefix, sums)
        remove_object(f"{address}.idx")
        put_object(f"{address}.bin", path_of(prefix, ".bin"))
        meta = path_of(prefix, ".meta.json")
        if meta.exists():
            put_object(f"{address}.meta.json", meta)
        else:
            remove_object(f"{address}.meta.json")  # of what stood there before
        put_object(f"{address}{SUFFIX}", sums)
        put_object(f"{address}.idx", path_of(prefix, ".idx"))
