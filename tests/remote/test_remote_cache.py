"""The cache that the processes of a node share: what is in it is whole, whoever dies or evicts."""

from __future__ import annotations

import hashlib
import itertools
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from object_store import Line
from patience import PATIENCE

from megapack.cli.arguments import byte_count
from megapack.data import PackedDataset
from megapack.errors import ConfigError
from megapack.storage import IndexedDataset
from megapack.storage.remote import cache as remote_cache
from megapack.storage.remote.cache import (
    PLANNED_SECONDS,
    RangeLocks,
    SparseFile,
    make_room,
    open_cache,
)
from megapack.storage.remote.checksums import BLOCK_BYTES
from megapack.storage.remote.reader import read_consistently
from tests.remote.far import put_dataset, run

NUM_BLOCKS = 64


def sparse_file(tmp_path: Path) -> SparseFile:
    """Of 64 blocks, all here, each full of its number + 1."""
    file = SparseFile(tmp_path / "file", NUM_BLOCKS * BLOCK_BYTES, RangeLocks(tmp_path / "locks"))
    content = np.repeat(np.arange(1, NUM_BLOCKS + 1, dtype=np.uint8), BLOCK_BYTES)
    file.put(0, NUM_BLOCKS, content.data)
    assert file.is_here(0, NUM_BLOCKS).all() and (file.data == content).all()
    return file


def on_disk(path: Path) -> int:
    return path.stat().st_blocks * 512


def test_dropped_blocks_give_their_disk_back_and_read_as_absent(tmp_path: Path) -> None:
    file = sparse_file(tmp_path)
    before = on_disk(file.path)
    file.drop(np.array([3, 4, 5, 40]))
    assert np.flatnonzero(~file.is_here(0, NUM_BLOCKS)).tolist() == [3, 4, 5, 40]
    assert on_disk(file.path) <= before - 4 * BLOCK_BYTES
    assert not file.data[3 * BLOCK_BYTES : 6 * BLOCK_BYTES].any()
    assert file.data[6 * BLOCK_BYTES] == 7


def test_what_somebody_is_writing_is_not_dropped(tmp_path: Path) -> None:
    file = sparse_file(tmp_path)
    with file._locks.held(file.name, 10, 2):
        file.drop(np.array([9, 10, 11, 30]))
    assert file.is_here(9, 12).all() and not file.is_here(30, 31).any()


def test_an_earlier_boot_leaves_nothing_that_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a crash of the machine, what was marked as here may never have reached the disk."""
    sparse_file(tmp_path)
    again = SparseFile(tmp_path / "file", NUM_BLOCKS * BLOCK_BYTES, RangeLocks(tmp_path / "locks"))
    assert again.is_here(0, NUM_BLOCKS).all(), "a new process of the same boot must find it"
    monkeypatch.setattr("megapack.storage.remote.cache._boot", lambda: b"another boot")
    after = SparseFile(tmp_path / "file", NUM_BLOCKS * BLOCK_BYTES, RangeLocks(tmp_path / "locks"))
    assert not after.is_here(0, NUM_BLOCKS).any() and not after.data.any()


def test_a_file_removed_under_a_process_is_never_taken_for_another(tmp_path: Path) -> None:
    file = sparse_file(tmp_path)
    file.drop(np.arange(NUM_BLOCKS))
    for path in tmp_path.glob("file*"):
        path.unlink()
    sparse_file(tmp_path)  # another process makes it anew
    with pytest.raises(FileNotFoundError, match="removed from the cache while it was in use"):
        file.put(0, 1, memoryview(bytes(BLOCK_BYTES)))
    assert not file.is_here(0, 1).any()


def test_what_is_needed_last_goes_first(
    line: Line, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Used long ago; used a minute ago: an epoch away, the farthest; used just now; planned."""
    monkeypatch.setattr(remote_cache, "SMALLEST_SIZE", 1)
    monkeypatch.setenv("MEGAPACK_CACHE_SIZE", str(NUM_BLOCKS * BLOCK_BYTES))
    cache = open_cache()
    (tmp_path / "cache" / "entry").mkdir()
    file = sparse_file(tmp_path / "cache" / "entry")
    cache.add_file(file)
    cache.in_use.share(str(tmp_path / "cache" / "entry"))
    now = int(time.time())
    kinds = {"long ago": now - 5000, "minute": now - 60, "now": now}
    kinds |= {"soon": now + PLANNED_SECONDS, "later": now + PLANNED_SECONDS + 2}
    stamps = np.array(list(kinds.values()), np.uint32)
    order = ["minute", "long ago", "now", "later", "soon"]
    file.stamps[:] = np.resize(stamps, NUM_BLOCKS)
    left = [set(kinds)]
    for _ in range(6 * NUM_BLOCKS // 8):
        make_room(cache)
        here = np.flatnonzero(file.is_here(0, NUM_BLOCKS))
        left.append({list(kinds)[block % 5] for block in here.tolist()})
        cache.limit = max(1, (cache.limit or 0) - 2 * BLOCK_BYTES)
    gone = [kind for before, after in itertools.pairwise(left) for kind in before - after]
    assert gone == order[: len(gone)] and len(gone) >= 3


def test_a_read_during_which_a_block_went_is_thrown_away(line: Line, tmp_path: Path) -> None:
    far = IndexedDataset(put_dataset(tmp_path / "docs"))
    near = IndexedDataset(tmp_path / "docs").tokens
    blocks = np.arange(4)
    seen = []

    def read() -> list[int]:
        if len(seen) < 2:
            far.tokens._file.drop(np.array([2]))
        seen.append(far.mapped_tokens[: 4 * BLOCK_BYTES // 2].tolist())
        return seen[-1]

    assert read_consistently([(far.tokens, blocks)], read) == near[: 4 * BLOCK_BYTES // 2].tolist()
    assert len(seen) == 3 and 0 in seen[0], "nothing was dropped: the test showed nothing"


def test_batches_are_right_in_a_cache_that_is_much_too_small(
    line: Line, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_cache, "SMALLEST_SIZE", 1)
    address = put_dataset(tmp_path / "docs", 20_000)
    limit = 1_500_000
    monkeypatch.setenv("MEGAPACK_CACHE_SIZE", str(limit))
    opened = PackedDataset(address, f"{address}.samples")
    whole = sum(on_disk(path) for path in (tmp_path / "cache").glob("*/*"))
    size = (tmp_path / "docs.bin").stat().st_size
    assert size > 2 * limit
    assert run(address, num_steps=30) == run(tmp_path / "docs", num_steps=30)
    assert line.counts["bytes"] > size, "nothing was evicted: the test showed nothing"
    make_room(open_cache())  # what was in flight when the run ended
    used = sum(on_disk(path) for path in (tmp_path / "cache").glob("*/*"))
    assert used < limit + whole
    del opened  # held its blocks within the reach of make_room


def test_entries_that_nobody_uses_go_first_and_those_in_use_stay(
    line: Line, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_cache, "SMALLEST_SIZE", 1)
    mine, theirs, old = (put_dataset(tmp_path / name) for name in ("mine", "theirs", "old"))
    program = (
        "import sys\n"
        "from megapack.storage import IndexedDataset\n"
        "data = IndexedDataset(sys.argv[1])\n"
        "data.tokens[:]\n"
        "print('open', flush=True)\n"
        "sys.stdin.read()\n"
    )
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", program, address],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for address in (theirs, old)
    ]
    for process in processes:
        assert process.stdout is not None and process.stdout.readline() == "open\n"
    processes[1].communicate("")
    monkeypatch.setenv("MEGAPACK_CACHE_SIZE", "1000000")
    IndexedDataset(mine).tokens[:]
    names = {path.name.rpartition("-")[0] for path in (tmp_path / "cache").iterdir()}
    processes[0].communicate("")
    assert {"mine", "theirs"} <= names and "old" not in names


def test_locks_keep_threads_and_processes_away_and_end_with_their_process(tmp_path: Path) -> None:
    locks = RangeLocks(tmp_path / "locks")
    program = (
        "import sys, pathlib\n"
        "from megapack.storage.remote.cache import RangeLocks\n"
        "with RangeLocks(pathlib.Path(sys.argv[1])).held('file', 10, 5):\n"
        "    print('held', flush=True)\n"
        "    sys.stdin.read()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path / "locks")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "held\n"

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


# Without torch, whose import takes longer than all the rest: documents rank, rank + 4, ... of a
# dataset, as digests.
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


def test_ranks_of_a_node_fetch_every_block_once_and_outlive_each_other(
    line: Line, tmp_path: Path
) -> None:
    """Four fill one cache; one of them is killed with SIGKILL in the middle of it."""
    address = put_dataset(tmp_path / "docs", 5000)
    line.latency = 0.02
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, address, str(rank), str(tmp_path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(4)
    ]
    for process in ranks:
        assert process.stdout is not None and process.stdout.readline() == "open\n"
    line.counts.clear()
    for process in ranks:
        assert process.stdin is not None
        print("go", file=process.stdin, flush=True)
    until = time.monotonic() + PATIENCE
    while line.counts["GET"] < 5:
        assert time.monotonic() < until
        time.sleep(0.001)
    ranks[0].kill()
    assert [process.wait() for process in ranks] == [-signal.SIGKILL, 0, 0, 0]
    near = IndexedDataset(tmp_path / "docs")
    for rank in (1, 2, 3):
        expected = [hashlib.md5(near[i]).hexdigest() for i in range(rank, len(near), 4)]
        assert (tmp_path / f"rank{rank}").read_text().split("\n") == expected
    size = (tmp_path / "docs.bin").stat().st_size
    # What the killed one had asked for was answered and lost; each reads a block at a time.
    assert size <= line.counts["bytes"] + BLOCK_BYTES
    assert line.counts["bytes"] < 1.2 * size, "ranks fetched what others had fetched"


def test_a_size_that_cannot_be_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for text in ("200Q", "10", "-1", "much", "255.9M"):
        monkeypatch.setenv("MEGAPACK_CACHE_SIZE", text)
        with pytest.raises(ConfigError, match=r"^MEGAPACK_CACHE_SIZE"):
            open_cache()


def test_a_size_is_one_on_the_command_line_and_in_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """256M, which the guide and the errors recommend, is the least there is."""
    monkeypatch.setenv("MEGAPACK_CACHE", str(tmp_path))
    for text, limit in (("256M", 256 << 20), ("200G", 200 << 30), ("268435456", 256 << 20)):
        monkeypatch.setenv("MEGAPACK_CACHE_SIZE", text)
        assert open_cache().limit == byte_count(text) == limit
