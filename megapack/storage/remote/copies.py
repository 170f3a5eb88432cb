"""Copy whole datasets and files between addresses and this machine, for code that needs files.

- ``local_copy``: a dataset to read; ``local_output``, ``local_output_file``: outputs to write
- ``upload_dataset``: copy a finished dataset to an address

Both directions use the cache: whole inputs are fetched into it, and outputs are written there
before the upload. Local prefixes and paths are used directly.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

from megapack.errors import FormatError, MegapackError
from megapack.storage.address import is_remote, split_address
from megapack.storage.columns import column_entries
from megapack.storage.index_file import path_of, prefix_of
from megapack.storage.metadata import read_meta
from megapack.storage.remote.cache import open_cache
from megapack.storage.remote.checksums import (
    BLOCK_BYTES,
    SUFFIX,
    BlockChecksums,
    DatasetChecksums,
    write_checksums,
)
from megapack.storage.remote.client import RemoteObject, find_object, put_object, remove_object
from megapack.storage.remote.reader import RemotePair, exists, fetch_file, open_remote_pair

_CHECKED_BLOCKS = 256  # number of blocks to read and check at a time


@contextlib.contextmanager
def local_copy(prefix: str | os.PathLike[str], *, tokens: bool = True) -> Iterator[str]:
    """Yield the local prefix of a dataset while the ``with`` block runs.

    A remote dataset is fetched with its columns, checked against its checksums, and removed at the
    end. Without ``tokens``, files of zeros of the same sizes replace a remote .bin and columns.
    Raises FileNotFoundError if .idx or .bin does not exist, and the errors of ``open_remote_pair``,
    ``RemotePair.open_columns`` and ``Cache.fetch``.
    """
    prefix = prefix_of(prefix)
    if not is_remote(prefix):
        yield prefix
        return
    pair = open_remote_pair(prefix)
    cache = pair.cache
    name = Path(pair.local_prefix).name
    # The entry belongs to these versions of the objects, so files of other versions are never used.
    local = cache.entry(f"{name}.{'whole' if tokens else 'sizes'}", pair.local_prefix)
    files = str(local / name)
    try:
        for suffix in (".idx", ".meta.json"):
            small = path_of(pair.local_prefix, suffix)
            if small.exists():
                with contextlib.suppress(FileExistsError):
                    path_of(files, suffix).hardlink_to(small)
        for remote_object in _large_objects(pair):
            path = path_of(files, remote_object.url.removeprefix(prefix))
            if tokens:
                sums = pair.sums_of(remote_object)
                check = partial(_check_blocks, sums) if sums else lambda _: None
                cache.fetch(remote_object, path, check)
            else:
                _write_size(path, remote_object)
        yield files
    finally:
        cache.give_back(local)


def _large_objects(pair: RemotePair) -> list[RemoteObject]:
    entries = column_entries(read_meta(pair.local_prefix), f"{pair.prefix}.meta.json")
    return [pair.bin_object, *pair.column_objects(entries)]


def _check_blocks(sums: BlockChecksums, path: Path) -> None:
    with path.open("rb") as file:
        for first in itertools.count(0, _CHECKED_BLOCKS):
            if not (data := file.read(_CHECKED_BLOCKS * BLOCK_BYTES)):
                return
            sums.check(first, memoryview(data))


@contextlib.contextmanager
def local_output(
    prefix: str | os.PathLike[str], outputs: Iterable[str] | None = None, *, overwrite: bool
) -> Iterator[str]:
    """Yield the local prefix at which the ``with`` block writes a dataset.

    For an address, unless ``overwrite``, first copy the existing .idx and meta file and create .bin
    and columns of zeros of the same sizes, so that the block detects an equal or a different
    dataset. After the block, upload every new dataset and the manifest of a build; readers find
    each dataset complete or not at all. If the block or the upload fails, the files stay in the
    cache for the next run. Another process of this node with the same output waits. ``outputs`` are
    the prefixes of all datasets that the block writes; by default ``prefix``. Raises the errors of
    ``open_remote_pair`` and ``upload_dataset``.
    """
    prefix = prefix_of(prefix)
    if not is_remote(prefix):
        yield prefix
        return
    folder, name = split_address(prefix)
    cache = open_cache()
    with cache.locks.held(prefix):
        local = cache.entry(f"{name}.output", prefix)
        try:
            copied = [] if overwrite else _copy_existing(local, [prefix, *(outputs or ())])
            yield str(local / name)
            for idx in sorted(_written(local.glob("*.idx"), copied)):
                upload_dataset(prefix_of(idx), f"{folder}/{idx.stem}")
            for manifest in _written(local.glob("*.manifest.json"), copied):
                put_object(f"{folder}/{manifest.name}", manifest)
        except BaseException as error:
            if isinstance(error, MegapackError):  # name the object instead of the local file
                error.args = (str(error).replace(str(local), folder),)
            cache.in_use.give_back(str(local))  # without removing its files
            raise
        cache.give_back(local)


@contextlib.contextmanager
def local_output_file(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield the local path at which the ``with`` block writes one file.

    For an address, first copy the existing object; after the block, upload the file if it is new.
    The local file is removed at the end. Another process of this node with the same output waits.
    Raises the errors of ``Cache.fetch`` and ``put_object``.
    """
    if not is_remote(path):
        yield Path(path)
        return
    url = os.fspath(path)
    _, name = split_address(url)
    cache = open_cache()
    with cache.locks.held(url):
        existing = find_object(url)
        entry = cache.entry(f"{name}.output", url)
        try:
            local = entry / name
            local.unlink(missing_ok=True)  # left by a killed process
            if existing is not None:
                cache.fetch(existing, local)
            status = existing and local.stat()
            yield local
            if local.exists() and not (status and os.path.samestat(status, local.stat())):
                put_object(url, local)
        finally:
            cache.give_back(entry)


def _copy_existing(local: Path, prefixes: Sequence[str]) -> list[os.stat_result]:
    """Copy existing complete datasets and a build's manifest over the files of an earlier run;
    return the status of the copies."""
    copied = []
    for prefix in filter(exists, dict.fromkeys(prefixes)):
        files, pair = str(local / split_address(prefix)[1]), open_remote_pair(prefix)
        for suffix in (".idx", ".meta.json"):
            path_of(files, suffix).unlink(missing_ok=True)
            small = path_of(pair.local_prefix, suffix)
            if small.exists():
                copied.append(Path(shutil.copyfile(small, path_of(files, suffix))).stat())
        for remote_object in _large_objects(pair):
            path = path_of(files, remote_object.url.removeprefix(prefix))
            path.unlink(missing_ok=True)
            _write_size(path, remote_object)
    manifest = find_object(f"{prefixes[0]}.manifest.json") if copied else None
    if manifest is not None:
        path = local / split_address(manifest.url)[1]
        path.unlink(missing_ok=True)
        open_cache().fetch(manifest, path)
        copied.append(path.stat())
    return copied


def _write_size(path: Path, remote_object: RemoteObject) -> None:
    """Write a file of zeros of the object's size, for callers that do not read it."""
    with path.open("ab") as file:  # does not truncate: another process may check the size
        file.truncate(remote_object.num_bytes)


def _written(paths: Iterable[Path], copied: list[os.stat_result]) -> list[Path]:
    """Return those paths whose files are not copies of existing objects."""
    return [p for p in paths if not any(os.path.samestat(p.stat(), each) for each in copied)]


def upload_dataset(prefix: str, address: str) -> None:
    """Copy a local dataset, with its columns and checksums of blocks, to the prefix ``address``.

    Readers find the old dataset, none, or the new one at any moment: the old .idx is removed first,
    and the new one is written last. Run only one writer at a time: object stores have no locks.
    Raises FormatError if the files do not match the meta file, and the errors of ``put_object``.
    """
    with tempfile.TemporaryDirectory(prefix="megapack-") as folder:
        sums = Path(folder) / SUFFIX
        write_checksums(prefix, sums)
        large = DatasetChecksums.read(sums).blocks.keys()
        stale = _columns_at(address) - large
        remove_object(f"{address}.idx")
        for suffix in stale:
            remove_object(f"{address}{suffix}")
        for suffix in large:
            put_object(f"{address}{suffix}", path_of(prefix, suffix))
        meta = path_of(prefix, ".meta.json")
        if meta.exists():
            put_object(f"{address}.meta.json", meta)
        else:
            remove_object(f"{address}.meta.json")  # it belongs to the old dataset
        put_object(f"{address}{SUFFIX}", sums)
        put_object(f"{address}.idx", path_of(prefix, ".idx"))


def _columns_at(address: str) -> set[str]:
    """Return the suffixes of the columns at an address, if its meta file is sound."""
    with contextlib.suppress(FileNotFoundError, FormatError):
        meta = str(fetch_file(f"{address}.meta.json")).removesuffix(".meta.json")
        return {f".{name}.col" for name in column_entries(read_meta(meta), meta)}
    return set()
