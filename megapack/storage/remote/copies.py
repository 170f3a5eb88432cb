"""Whole datasets and files between addresses and this machine, for what works on local files.

- ``local_copy``: a dataset to read; ``local_output``, ``local_output_file``: where to write
- ``upload_dataset``: a finished dataset, copied to an address

Both ways lead through the cache: what is read is fetched there whole, what is to stand at an
address is written there first. Local prefixes and paths pass as they are.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from megapack.errors import MegapackError
from megapack.storage.address import is_remote, split_address
from megapack.storage.index_file import path_of, prefix_of
from megapack.storage.remote.cache import open_cache
from megapack.storage.remote.checksums import BLOCK_BYTES, SUFFIX, BlockChecksums, write_checksums
from megapack.storage.remote.client import find_object, put_object, remove_object
from megapack.storage.remote.reader import RemotePair, exists, open_remote_pair

_CHECKED_BLOCKS = 256  # at once


@contextlib.contextmanager
def local_copy(prefix: str | os.PathLike[str], *, tokens: bool = True) -> Iterator[str]:
    """Where the files of a dataset lie on this machine while the block runs.

    Those of an address are fetched, compared with its checksums, and removed at the end.

    Args:
        prefix: of the dataset.
        tokens: False: a .bin of an address has its size and no tokens.

    Raises:
        FileNotFoundError: there is no .idx or no .bin.
        FormatError, ConfigError, OSError: as of ``open_remote_pair`` and ``Cache.fetch``.
    """
    prefix = prefix_of(prefix)
    if not is_remote(prefix):
        yield prefix
        return
    pair = open_remote_pair(prefix)
    cache, sums = pair.cache, pair.checksums
    name = Path(pair.local_prefix).name
    # Of this version of all objects: what a killed process left of another is not taken for it.
    local = cache.entry(f"{name}.{'whole' if tokens else 'sizes'}", pair.local_prefix)
    files = str(local / name)
    try:
        for suffix in (".idx", ".meta.json"):
            small = path_of(pair.local_prefix, suffix)
            if small.exists():
                with contextlib.suppress(FileExistsError):
                    path_of(files, suffix).hardlink_to(small)
        if tokens:
            cache.fetch(
                pair.bin_object,
                path_of(files, ".bin"),
                lambda path: None if sums is None else _check_blocks(path, sums),
            )
        else:
            _write_size(path_of(files, ".bin"), pair)
        yield files
    finally:
        cache.give_back(local)


def _check_blocks(path: Path, checksums: BlockChecksums) -> None:
    first = 0
    with path.open("rb") as file:
        while data := file.read(_CHECKED_BLOCKS * BLOCK_BYTES):
            checksums.check(first, memoryview(data))
            first += _CHECKED_BLOCKS


@contextlib.contextmanager
def local_output(
    prefix: str | os.PathLike[str], outputs: Iterable[str] | None = None, *, overwrite: bool
) -> Iterator[str]:
    """The prefix to look at and write to while the block runs, of what shall stand at a prefix.

    Of an address the files by which a dataset is known are copied there first, unless it is to be
    replaced: so what stands far away is treated as what stands here, the same left alone and
    anything else refused. Its .bin has its size and no tokens. What is written in the block is
    uploaded at the end: every dataset, complete or absent, and the manifest of a build. Where the
    block or the upload fails, all of it stays in the cache, and the next run finds it there.
    Another process of this node that wants to write there waits.

    Args:
        outputs: prefixes of all datasets that are written; by default the one.
        overwrite: replace what stands there.

    Raises:
        ConfigError, FormatError, OSError: as of ``open_remote_pair`` and ``upload_dataset``.
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
            there = [] if overwrite else _copy_what_is_there(local, [prefix, *(outputs or ())])
            yield str(local / name)
            for idx in sorted(_written(local.glob("*.idx"), there)):
                upload_dataset(prefix_of(idx), f"{folder}/{idx.stem}")
            for plan in _written(local.glob("*.manifest.json"), there):
                put_object(f"{folder}/{plan.name}", plan)
        except BaseException as error:
            if isinstance(error, MegapackError):  # which names what stands here for what is there
                error.args = (str(error).replace(str(local), folder),)
            cache.in_use.give_back(str(local))  # and leave what is in it
            raise
        cache.give_back(local)


@contextlib.contextmanager
def local_output_file(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Where to look at and write to, while the block runs, one file that shall stand at a path.

    Of an address that is a copy of what stands there, if anything does; a file that takes its place
    is uploaded at the end, complete or absent. Where the block or the upload fails, nothing of it
    stays. Another process that wants to write there waits, as for ``local_output``.

    Raises:
        ConfigError, FormatError, OSError: as of ``Cache.fetch`` and ``put_object``.
    """
    if not is_remote(path):
        yield Path(path)
        return
    url = os.fspath(path)
    _, name = split_address(url)
    cache = open_cache()
    with cache.locks.held(url):
        found = find_object(url)
        entry = cache.entry(f"{name}.output", url)
        try:
            local = entry / name
            local.unlink(missing_ok=True)  # whoever was killed here left it
            if found is not None:
                cache.fetch(found, local)
            before = found and local.stat()
            yield local
            if local.exists() and not (before and os.path.samestat(before, local.stat())):
                put_object(url, local)
        finally:
            cache.give_back(entry)


def _copy_what_is_there(local: Path, prefixes: Sequence[str]) -> list[os.stat_result]:
    """Copy complete datasets and a build's manifest over what an earlier run left."""
    there = []
    for prefix in filter(exists, dict.fromkeys(prefixes)):
        files, pair = str(local / split_address(prefix)[1]), open_remote_pair(prefix)
        for suffix in (".idx", ".bin", ".meta.json"):
            path_of(files, suffix).unlink(missing_ok=True)
        for suffix in (".idx", ".meta.json"):
            small = path_of(pair.local_prefix, suffix)
            if small.exists():
                there.append(Path(shutil.copyfile(small, path_of(files, suffix))).stat())
        _write_size(path_of(files, ".bin"), pair)
    plan = find_object(f"{prefixes[0]}.manifest.json") if there else None
    if plan is not None:
        path = local / split_address(plan.url)[1]
        path.unlink(missing_ok=True)
        open_cache().fetch(plan, path)
        there.append(path.stat())
    return there


def _write_size(path: Path, pair: RemotePair) -> None:
    """A .bin of the right size, for those who do not look into it."""
    with path.open("ab") as file:  # never shorter meanwhile: another process may look
        file.truncate(pair.bin_object.num_bytes)


def _written(paths: Iterable[Path], there: list[os.stat_result]) -> list[Path]:
    """Those that are not what was copied from there."""
    return [p for p in paths if not any(os.path.samestat(p.stat(), each) for each in there)]


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
