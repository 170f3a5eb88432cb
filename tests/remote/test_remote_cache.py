"""The node's shared cache: its files are complete, also after kills and during eviction."""

from __future__ import annotations

import hashlib
import itertools
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from object_store import Line
from patience import wait_until
from programs import started, tell

from megapack.cli.arguments import byte_count
from megapack.data import PackedDataset
from megapack.errors import ConfigError, FormatError
from megapack.storage import IndexedDataset
from megapack.storage.remote import cache as remote_cache
from megapack.storage.remote import reader
from megapack.storage.remote.cache import Chunks, RangeLocks, make_room, open_cache
from megapack.storage.remote.checksums import BLOCK_BYTES
from megapack.storage.remote.client import find_object
from megapack.storage.remote.reader import read_consistently
from tests.remote.far import HOLDS, near_and_far, put_dataset, run

NUM_BLOCKS = 64
FULL = np.repeat(np.arange(1, NUM_BLOCKS + 1, dtype=np.uint8), BLOCK_BYTES)
ALL = np.arange(NUM_BLOCKS)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_cache, "SMALLEST_SIZE", 1)
    monkeypatch.setattr(remote_cache, "CHUNK_BLOCKS", 4)


def filled(folder: Path) -> Chunks:
    """Write 64 blocks, each filled with its number + 1."""
    chunks = Chunks(folder / "docs.bin")
    for first in range(0, NUM_BLOCKS, 4):
        chunks.write(first, FULL[first * BLOCK_BYTES :][: 4 * BLOCK_BYTES].data)
    data = np.zeros_like(FULL)
    assert not chunks.copy(ALL, data).size and (data == FULL).all()
    return chunks


def on_disk(path: Path) -> int:
    return path.stat().st_blocks * 512


def test_copy_returns_the_missing_blocks(tmp_path: Path) -> None:
    """Copy from chunks with all, some and no blocks, and from an unlinked one."""
    chunks = Chunks(tmp_path / "docs.bin")
    rng = np.random.default_rng(0)
    written = np.flatnonzero(rng.random(NUM_BLOCKS) < 0.4)
    for block in [*written.tolist(), NUM_BLOCKS - 1]:
        chunks.write(block, FULL[: FULL.size - 5][block * BLOCK_BYTES :][:BLOCK_BYTES].data)
    (chunks.folder / str(written[0] // 4)).unlink()
    here = set(written[written // 4 > written[0] // 4].tolist()) | {NUM_BLOCKS - 1}
    for _ in range(50):
        asked = np.flatnonzero(rng.random(NUM_BLOCKS) < rng.random())
        data = np.zeros(FULL.size - 5, np.uint8)
        assert chunks.copy(asked, data).tolist() == [b for b in asked.tolist() if b not in here]
        copied = np.repeat([b in here and b in asked for b in range(NUM_BLOCKS)], BLOCK_BYTES)
        assert (data == np.where(copied, FULL, 0)[:-5]).all()


def test_chunks_of_an_earlier_boot_are_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a crash of the machine, blocks marked as cached may be missing on the disk. Chunks of
    another machine that shares the directory, such as a home, stay."""
    monkeypatch.setenv("MEGAPACK_CACHE", str(tmp_path))
    cache = open_cache()
    entry = cache.entry("docs", "file:///docs")
    before = filled(entry).folder
    assert not Chunks(entry / "docs.bin").copy(ALL, None).size, "nor by another of the same boot"
    monkeypatch.setattr(remote_cache, "_boot", lambda: "01234567")
    assert Chunks(cache.entry("docs", "file:///docs") / "docs.bin").copy(ALL, None).size == 64
    assert before.exists(), "a process uses the entry"
    for _ in range(2):
        cache.in_use.give_back(str(entry))
    assert cache.entry("docs", "file:///docs") == entry and not before.exists()


def test_removed_folder_is_created_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chunks, mkdir = Chunks(tmp_path / "entry" / "docs.bin"), Path.mkdir
    is_removed = iter([True] * 3)

    def mkdir_in_vain(path: Path, *args: Any, **how: Any) -> None:
        mkdir(path, *args, **how)
        if path == chunks.folder and next(is_removed, False):
            shutil.rmtree(path.parent)

    monkeypatch.setattr(Path, "mkdir", mkdir_in_vain)
    chunks.write(5, FULL[:BLOCK_BYTES].data)
    assert chunks.copy(ALL, None).size == NUM_BLOCKS - 1


def test_removed_folder_of_a_whole_file_is_created_again(line: Line, tmp_path: Path) -> None:
    found = find_object(f"{put_dataset(tmp_path / 'docs')}.idx")
    assert found is not None
    cache = open_cache()
    path = cache.entry("docs", found.url) / "docs.idx"
    shutil.rmtree(path.parent)
    cache.fetch(found, path)
    assert path.read_bytes() == (tmp_path / "docs.idx").read_bytes()
    path.unlink()
    left = [1]
    cache.fetch(found, path, lambda file: left and left.pop() and shutil.rmtree(file.parent))
    assert path.read_bytes() == (tmp_path / "docs.idx").read_bytes()
    path.unlink()
    with pytest.raises(FormatError, match=r"docs\.idx .*empties the cache .*\(see MEGAPACK_CACHE"):
        cache.fetch(found, path, lambda file: shutil.rmtree(file.parent))


def test_removed_chunks_are_fetched_again(
    line: Line, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Remove files, folders, or the whole cache."""
    monkeypatch.setenv("MEGAPACK_CACHE_SIZE", "1G")
    here, far = near_and_far(tmp_path / "docs")
    near = here.tokens.tolist()
    for remove in (Path.unlink, lambda path: shutil.rmtree(path.parent)):
        assert far.tokens[:].tolist() == near
        for chunk in list((tmp_path / "cache").glob("*/*.bin.*/[13579]")):
            if chunk.exists():
                remove(chunk)
    assert far.tokens[:].tolist() == near
    shutil.rmtree(tmp_path / "cache")
    assert make_room(open_cache()) == 0
    assert far.tokens[:].tolist() == near and (tmp_path / "cache").is_dir()


def test_needed_last_goes_first(
    line: Line, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read 15 minutes ago (needed an epoch later), long ago, a minute ago (maybe requested, not
    read yet), now. Other folders in the directory are not evicted."""
    results = tmp_path / "cache" / "results"
    results.mkdir(parents=True)
    (results / "precious").write_bytes(bytes(2 * NUM_BLOCKS * BLOCK_BYTES))
    monkeypatch.setenv("MEGAPACK_CACHE_SIZE", str(NUM_BLOCKS * BLOCK_BYTES))
    cache = open_cache()
    chunks = filled(cache.entry(".entry", "file:///somewhere"))
    now = time.time()
    kinds = {"long ago": now - 5000, "quarter": now - 900, "minute": now - 60, "now": now}
    for chunk in range(NUM_BLOCKS // 4):
        at = list(kinds.values())[chunk % 4]
        os.utime(chunks.folder / str(chunk), (at, at))
    left = [set(kinds)]
    for _ in range(NUM_BLOCKS // 4):
        make_room(cache)
        left.append({list(kinds)[int(path.name) % 4] for path in chunks.folder.iterdir()})
        cache.limit = max(1, (cache.limit or 0) - 4 * BLOCK_BYTES)
    gone = [kind for before, after in itertools.pairwise(left) for kind in before - after]
    assert gone == ["quarter", "long ago", "minute", "now"][: len(gone)] and len(gone) >= 3
    assert (results / "precious").exists()


@pytest.mark.parametrize("page_blocks", [1, 4])
def test_pinned_memory_stays_when_its_chunk_is_evicted(
    line: Line, tmp_path: Path, page_blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two threads read the same blocks; each finds them, and memory is given back by the last, in
    pages of the machine: what another thread reads may lie in the same."""
    monkeypatch.setattr(reader, "PAGE_BLOCKS", page_blocks)
    here, far = near_and_far(tmp_path / "docs")
    in_block = BLOCK_BYTES // 2
    near = here.tokens[in_block : 3 * in_block].tolist()

    def read() -> list[int]:
        shutil.rmtree(far.tokens._chunks.folder)
        read_consistently([(far.tokens, np.arange(4))], lambda: None)
        assert far.mapped_tokens[:in_block].any() == (page_blocks == 4)
        found: list[int] = far.mapped_tokens[in_block : 3 * in_block].tolist()
        return found

    assert read_consistently([(far.tokens, np.arange(1, 3))], read) == near
    assert not far.mapped_tokens.any(), "memory was kept"


def test_failed_copy_is_repeated(
    line: Line, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread that waits for the same blocks does not read zeros."""
    near, far = near_and_far(tmp_path / "docs")
    assert far.tokens[:5000].tolist() == near.tokens[:5000].tolist()
    far.tokens.pin(np.arange(1))  # by the other thread

    def fails(*_: object) -> None:
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(Chunks, "copy", fails)
        with pytest.raises(OSError, match="Too many open files"):
            far.tokens[0]
    assert far.tokens[:5000].tolist() == near.tokens[:5000].tolist()


def test_batches_of_a_tiny_cache_are_equal(
    line: Line, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = put_dataset(tmp_path / "docs", 10_000)
    limit = 750_000
    monkeypatch.setenv("MEGAPACK_CACHE_SIZE", str(limit))
    PackedDataset(address, f"{address}.samples")
    whole = sum(on_disk(path) for path in (tmp_path / "cache").glob("*/*"))
    size = (tmp_path / "docs.bin").stat().st_size
    assert size > 2 * limit
    assert run(address, num_steps=30) == run(tmp_path / "docs", num_steps=30)
    assert line.counts["bytes"] > size, "nothing was evicted: the test showed nothing"
    make_room(open_cache())  # requests in flight when the run ended
    used = sum(on_disk(path) for path in (tmp_path / "cache").glob("*/*.bin.*/*"))
    assert used < limit + whole


READS = """
import sys
from megapack.storage import IndexedDataset
data = IndexedDataset(sys.argv[1])
data.tokens[:]
print("open", flush=True)
sys.stdin.read()
"""


def test_only_unused_entries_are_removed(
    line: Line, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, theirs, old = (put_dataset(tmp_path / name) for name in ("mine", "theirs", "old"))
    processes = [started(READS, address, says="open") for address in (theirs, old)]
    processes[1].communicate("")
    monkeypatch.setenv("MEGAPACK_CACHE_SIZE", "800000")
    IndexedDataset(mine).tokens[:]
    names = {path.name.rpartition("-")[0] for path in (tmp_path / "cache").iterdir()}
    processes[0].communicate("")
    assert {"mine", "theirs"} <= names and "old" not in names


def test_range_locks_exclude_threads_and_processes(tmp_path: Path) -> None:
    locks = RangeLocks(tmp_path / "locks")
    process = started(HOLDS, tmp_path / "locks", "file", 10, 5, says="held")

    def free(first: int, count: int, name: str = "file") -> bool:
        with locks.if_free(name, first, count) as is_free:
            return is_free

    assert [free(9, 1), free(9, 2), free(14, 1), free(15, 1)] == [True, False, False, True]
    assert free(10, 5, "another file")
    process.kill()
    process.wait()
    with locks.held("file", 9, 6):  # waits until the kernel gave it back
        assert not free(12, 1), "another thread of this process got it, too"
    assert free(12, 1)


def test_directory_without_locks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr("fcntl.lockf", no_locks)
    locks = RangeLocks(tmp_path / "locks")
    with pytest.raises(OSError, match=rf"MEGAPACK_CACHE to .*'{tmp_path}/locks'"):
        locks.share("it")


def test_invalid_directory_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("no directory")
    monkeypatch.setenv("MEGAPACK_CACHE", str(tmp_path / "file"))
    with pytest.raises(OSError, match=rf"File exists.*set MEGAPACK_CACHE to.*'{tmp_path}/file'"):
        open_cache()


# Digests of documents rank, rank + 4, ... of a dataset, without torch, whose import is slow.
RANK = """
import hashlib, pathlib, sys, time
from megapack.storage import IndexedDataset
prefix, rank, folder = sys.argv[1], int(sys.argv[2]), pathlib.Path(sys.argv[3])
documents = IndexedDataset(prefix)
print('open', flush=True)
sys.stdin.readline()
digests = [hashlib.md5(documents[i]).hexdigest() for i in range(rank, len(documents), 4)]
(folder / f'rank{rank}').write_text('\\n'.join(digests))
"""


def test_ranks_of_a_node_fetch_blocks_once(line: Line, tmp_path: Path) -> None:
    """Four processes fill one cache; one of them is killed with SIGKILL meanwhile."""
    address = put_dataset(tmp_path / "docs", 5000)
    line.latency = 0.02
    ranks = [started(RANK, address, rank, tmp_path, says="open") for rank in range(4)]
    line.counts.clear()
    for process in ranks:
        tell(process)
    wait_until(lambda: line.counts["GET"] >= 5)
    ranks[0].kill()
    assert [process.wait() for process in ranks] == [-signal.SIGKILL, 0, 0, 0]
    near = IndexedDataset(tmp_path / "docs")
    for rank in (1, 2, 3):
        expected = [hashlib.md5(near[i]).hexdigest() for i in range(rank, len(near), 4)]
        assert (tmp_path / f"rank{rank}").read_text().split("\n") == expected
    size = (tmp_path / "docs.bin").stat().st_size
    # The responses to the killed process are lost; each process reads a block at a time.
    assert size <= line.counts["bytes"] + BLOCK_BYTES
    assert line.counts["bytes"] < 1.2 * size, "ranks fetched what others had fetched"


def test_invalid_size_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_cache, "SMALLEST_SIZE", 256 << 20)
    for text in ("200Q", "10", "-1", "much", "255.9M"):
        monkeypatch.setenv("MEGAPACK_CACHE_SIZE", text)
        with pytest.raises(ConfigError, match=r"^MEGAPACK_CACHE_SIZE"):
            open_cache()


def test_size_has_one_syntax_in_cli_and_variables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """256M, which the guide and the errors recommend, is the minimum."""
    monkeypatch.setenv("MEGAPACK_CACHE", str(tmp_path))
    for text, limit in (("256M", 256 << 20), ("200G", 200 << 30), ("268435456", 256 << 20)):
        monkeypatch.setenv("MEGAPACK_CACHE_SIZE", text)
        assert open_cache().limit == byte_count(text) == limit
    monkeypatch.setenv("MEGAPACK_CACHE_SIZE", "1T")
    with open_cache().locks.if_free("it") as free, open_cache().locks.if_free("it") as again:
        assert (free, again) == (True, False), "a second cache, whose locks the process has, too"
    kept = open_cache()
    monkeypatch.delenv("MEGAPACK_CACHE_SIZE")
    assert open_cache() is kept and kept.limit is None
