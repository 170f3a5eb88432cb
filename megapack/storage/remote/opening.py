"""A remote dataset or file, opened: small files whole in the cache, .bin by ranges."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from numpy.typing import DTypeLike

from megapack.errors import FormatError
from megapack.storage.meta import checksum, read_meta
from megapack.storage.mmididx import path_of
from megapack.storage.remote.address import split
from megapack.storage.remote.cache import Cache, open_cache
from megapack.storage.remote.checksums import SUFFIX, BlockChecksums
from megapack.storage.remote.client import RemoteObject, find_object
from megapack.storage.remote.tokens import RemoteTokens

__all__ = ["RemotePair", "exists", "fetch_file", "open_remote_pair"]

log = logging.getLogger(__name__)

_SUFFIXES = (".idx", ".bin", ".meta.json", SUFFIX)


@dataclass(frozen=True, kw_only=True)
class RemotePair:
    """One version of a remote dataset.

    Attributes:
        local_prefix: where copies of .idx and, if there is one, .meta.json lie.
    """

    prefix: str
    local_prefix: str
    bin_object: RemoteObject
    checksums: BlockChecksums | None
    cache: Cache

    def tokens(self, dtype: DTypeLike, size: int) -> RemoteTokens:
        """The .bin as an array of ``size`` tokens."""
        path = path_of(self.local_prefix, ".bin")
        return RemoteTokens(
            self.bin_object,
            path,
            dtype=dtype,
            size=size,
            checksums=self.checksums,
            cache=self.cache,
        )


def open_remote_pair(prefix: str) -> RemotePair:
    """The objects of a dataset as they are now, all of one writer.

    A writer removes the old .idx first and gives the new one its name last (``upload``). So an .idx
    that is the same before and after belongs to all that was found in between.

    Raises:
        FileNotFoundError: there is no .idx or no .bin.
        FormatError: an object was replaced meanwhile, or is damaged.
        ConfigError, OSError: as of ``RemoteObject.read``.
    """
    cache = open_cache()
    before, bin_object, meta, sums = _find(f"{prefix}{suffix}" for suffix in _SUFFIXES)
    for found, suffix in ((before, ".idx"), (bin_object, ".bin")):
        if found is None:
            raise FileNotFoundError(f"{prefix}{suffix} does not exist (or is not visible)")
    assert before is not None and bin_object is not None
    _, name = split(prefix)
    entry = cache.entry(name, prefix, before, bin_object, meta, sums)
    local_prefix = str(entry / name)
    checksums = None
    if sums is not None:
        path = path_of(local_prefix, SUFFIX)
        cache.fetch(sums, path, BlockChecksums.read)
        checksums = BlockChecksums.read(path)
        _check_sizes(prefix, checksums, bin_object)
    if meta is not None:
        check = _is_file(checksums, ".meta.json")
        cache.fetch(meta, path_of(local_prefix, ".meta.json"), check)
    if not path_of(local_prefix, ".idx").exists():
        cache.fetch(before, path_of(local_prefix, ".idx"), _check_of_index(local_prefix, checksums))
        after = find_object(before.url)
        if after is None or after.version != before.version:
            raise FormatError(f"{prefix} was replaced while it was opened; open it again")
    if checksums is None:
        log.info(
            "%s has no %s: of what is read only lengths and versions are compared "
            "(`megapack-build upload` writes it)",
            prefix,
            SUFFIX,
        )
    return RemotePair(
        prefix=prefix,
        local_prefix=local_prefix,
        bin_object=bin_object,
        checksums=checksums,
        cache=cache,
    )


def fetch_file(url: str, check: Callable[[Path], object] = lambda _: None) -> Path:
    """A whole object in the cache, fetched once by one process of the node.

    Args:
        url: its address.
        check: raises FormatError where the file that it is given is damaged.

    Raises:
        FileNotFoundError: it is not there.
        FormatError, ConfigError, OSError: as of ``Cache.fetch``.
    """
    found = find_object(url)
    if found is None:
        raise FileNotFoundError(f"{url} does not exist (or is not visible)")
    cache = open_cache()
    _, name = split(url)
    path = cache.entry(name, url, found) / name
    cache.fetch(found, path, check)
    return path


def exists(prefix: str) -> bool:
    """Whether .idx and .bin of a remote dataset are there. Raises as ``RemoteObject.read``."""
    return all(_find(f"{prefix}{suffix}" for suffix in (".idx", ".bin")))


def _find(urls: Iterable[str]) -> list[RemoteObject | None]:
    with ThreadPoolExecutor(len(_SUFFIXES)) as pool:
        return list(pool.map(find_object, urls))


def _check_sizes(prefix: str, checksums: BlockChecksums, bin_object: RemoteObject) -> None:
    if checksums.bin_bytes != bin_object.num_bytes:
        raise FormatError(
            f"{prefix}{SUFFIX} is of a .bin of {checksums.bin_bytes:,} bytes, the one that is "
            f"there has {bin_object.num_bytes:,}: write it again (`megapack-build upload`)"
        )


def _check_of_index(
    local_prefix: str, checksums: BlockChecksums | None
) -> Callable[[Path], object]:
    """By the best that is known of it; without a meta file nothing is."""
    if checksums is not None:
        return _is_file(checksums, ".idx")
    meta = read_meta(local_prefix)
    return _has_checksum(None if meta is None else meta["idx"]["xxh3_128"])


def _is_file(checksums: BlockChecksums | None, suffix: str) -> Callable[[Path], object]:
    known = None if checksums is None else checksums.files.get(suffix)
    return _has_checksum(None if known is None else known[1])


def _has_checksum(expected: str | None) -> Callable[[Path], object]:
    def check(path: Path) -> None:
        if expected is not None and checksum(path) != expected:
            raise FormatError(
                f"{os.fspath(path.name)} came without the checksum that is written down for it: "
                "the object is damaged, or was replaced by itself"
            )

    return check
