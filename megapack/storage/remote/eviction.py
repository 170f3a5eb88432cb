"""Room in a cache of a given size, made by what is known of the future.

A run knows what it will read next, and that a sample that it has read is needed an epoch later at
the earliest. So entries that nobody uses go first; then blocks that were used, the last used first,
since they are needed again last (what was used within the last seconds waits: a peer on this node
may be about to read it); then planned blocks, those needed last first. That is the best there is
where a block holds one sample or those of an arranged source; others of a block come sooner.
"""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megapack.storage.remote.cache import Cache, bytes_on_disk
from megapack.storage.remote.checksums import BLOCK_BYTES
from megapack.storage.remote.sparse import SparseFile

__all__ = ["make_room"]

FREE_PART = 8  # one in so many bytes is freed at once
PEER_SECONDS = 5


def make_room(cache: Cache) -> None:
    """Free a part of a cache with a limit, if it is nearly full. Of files that others have open
    and this process has not, nothing is freed.

    Raises:
        ConfigError: its file system cannot free parts of files.
        OSError: it cannot be read.
    """
    assert cache.limit is not None
    with cache.locks.if_free("eviction") as free:
        if not free:
            return
        excess = _used_bytes(cache.directory) - cache.limit * (FREE_PART - 1) // FREE_PART
        if excess <= cache.limit // (2 * FREE_PART):
            return
        excess -= _remove_unused(cache, excess)
        if excess > 0:
            _drop_blocks(cache.open_files(), -(-excess // BLOCK_BYTES))


def _used_bytes(directory: Path) -> int:
    """Of all files in it and below; entries may come and go meanwhile."""
    return sum(
        bytes_on_disk(Path(folder, name))
        for folder, _, names in os.walk(directory)
        for name in names
    )


def _remove_unused(cache: Cache, excess: int) -> int:
    """Entries that no process has open, the oldest first; bytes that were freed."""
    freed = 0
    entries = [path for path in cache.directory.iterdir() if path.is_dir()]
    for entry in sorted(entries, key=_age):
        if freed >= excess:
            break
        with cache.in_use.if_free(str(entry)) as free:
            if free:
                freed += _used_bytes(entry)
                shutil.rmtree(entry, ignore_errors=True)
    return freed


def _age(entry: Path) -> float:
    try:
        return entry.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _drop_blocks(files: list[SparseFile], num_blocks: int) -> None:
    here = [np.flatnonzero(file.is_here(0, file.num_blocks)) for file in files]
    owner = np.repeat(np.arange(len(files)), [blocks.size for blocks in here])
    blocks = np.concatenate([*here, np.zeros(0, np.int64)])
    stamps = np.concatenate([file.stamps[own] for file, own in zip(files, here, strict=True)])
    chosen = np.argsort(_turn(stamps, int(time.time())), kind="stable")[:num_blocks]
    for number, file in enumerate(files):
        file.drop(np.sort(blocks[chosen[owner[chosen] == number]]))


def _turn(stamps: NDArray[np.uint32], now: int) -> NDArray[np.int64]:
    """Whose turn comes earlier, smaller."""
    stamp = stamps.astype(np.int64)
    used = now - stamp
    return np.where(used > PEER_SECONDS, used, np.where(used >= 0, 2**33 - used, 2**35 - stamp))
