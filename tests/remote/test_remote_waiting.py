"""No wait is endless, for locks, requests or at exit; log lines name the awaited data."""

from __future__ import annotations

import gc
import json
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from object_store import Line
from patience import wait_until
from programs import PYTHON, ended, started

from megapack.data import PackedDataset
from megapack.data.loader import ThreadPrefetcher
from megapack.storage import IndexedDataset
from megapack.storage.remote import cache as pool
from megapack.storage.remote.cache import make_room, open_cache
from megapack.storage.remote.checksums import BLOCK_BYTES
from tests.remote.far import HOLDS, near_and_far, put_dataset, run

LIMIT = 600.0  # seconds until a test counts as hanging; the longest takes ten on an idle machine
STRESS = Path(__file__).with_name("stress.py")


def in_time(function: Callable[[], Any]) -> Any:
    """Return or raise what a function does, in a thread that may hang without the test."""
    found: Future[Any] = Future()

    def call() -> None:
        try:
            found.set_result(function())
        except BaseException as error:
            found.set_exception(error)

    threading.Thread(target=call, daemon=True).start()
    return found.result(LIMIT)


@pytest.mark.parametrize(("size", "count"), [("512K", 500), ("none", 1000)])
def test_processes_and_threads_with_one_cache_read_equal_batches(size: str, count: int) -> None:
    """Two processes of two threads; ``stress.py`` runs as many micro batches as one likes. With a
    size blocks come and go all the time, 2,000 in an epoch; without one all ranks begin twice in an
    empty cache."""
    how = ["--micro-batches", f"{count}", "--processes", "2", "--cache-size", size]
    done = ended(sys.executable, STRESS, *how, "--limit", LIMIT)
    found = json.loads(done.stdout)
    assert found["micro_batches"] >= count and found["differences"] == found["hangs"] == 0
    assert (found["dropped_chunks"] > 500) == (size != "none"), "nothing was evicted"


def test_early_response_leaves_no_request(
    line: Line, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    near, far = near_and_far(tmp_path / "docs")
    submit = pool.Cache.submit

    def slowly(self: pool.Cache, function: Any, *arguments: Any, **how: Any) -> Future[Any]:
        request = submit(self, function, *arguments, **how)
        time.sleep(0.3)
        return request

    monkeypatch.setattr(pool.Cache, "submit", slowly)
    assert in_time(lambda: far.tokens[:100]).tolist() == near.tokens[:100].tolist()
    assert not far.tokens._in_flight


def test_failed_request_is_removed(
    line: Line, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    near, far = near_and_far(tmp_path / "docs")

    def fails(*_: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(pool.Chunks, "write", fails)
        with pytest.raises(MemoryError):
            in_time(lambda: far.tokens[0])
    assert not far.tokens._in_flight
    assert in_time(lambda: far.tokens[0]) == near.tokens[0]


def test_log_of_a_wait_names_block_and_object(
    line: Line, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The store stalls in the middle of a run, then replies; the batches are equal."""
    address = put_dataset(tmp_path / "docs")
    PackedDataset(address, f"{address}.samples")  # fetch the small files
    monkeypatch.setattr(pool, "WARN_SECONDS", 0.1)
    line.latency = 0.5
    assert run(address, num_steps=4) == run(tmp_path / "docs", num_steps=4)
    said = [record.message for record in caplog.records if record.message.startswith("waited")]
    assert len(said) >= 3, "once per interval"
    assert all(f"of {address}.bin" in text and "block " in text for text in said)
    assert "bytes [" in said[0] and "0 seconds" in said[0]


def test_stalled_store_is_a_timeout(
    line: Line, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = put_dataset(tmp_path / "docs")
    far = PackedDataset(address, f"{address}.samples")
    monkeypatch.setattr(pool, "STALLED_RETRIES", 0.005)  # of 210 seconds
    line.latency = 8.0  # above the limit, below a request's timeout
    with pytest.raises(
        TimeoutError, match=rf"received nothing of block \d+ .*{address}\.bin .*limit 1,"
    ):
        far[0]


def test_stopped_process_is_named(
    line: Line, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It holds a block's lock and is stopped, as by a debugger; then it continues and ends."""
    monkeypatch.setattr(pool, "WARN_SECONDS", 0.2)
    near, far = near_and_far(tmp_path / "docs")
    far.tokens[-1]
    cache = open_cache()
    folder = str(far.tokens._chunks.folder)
    with started(HOLDS, cache.directory / "locks", folder, 0, 3, says="held") as other:
        other.send_signal(signal.SIGSTOP)
        assert cache.locks.owner(folder, 2) == other.pid
        assert cache.locks.owner(folder, 3) is None
        reading: queue.Queue[Any] = queue.Queue()
        threading.Thread(target=lambda: reading.put(far.tokens[0]), daemon=True).start()
        who = f"process {other.pid} of this node"
        wait_until(lambda: any(who in record.message for record in caplog.records))
        other.send_signal(signal.SIGCONT)
        other.communicate("")
    assert reading.get(timeout=LIMIT) == near.tokens[0]


ENDS = """
import sys
from megapack.data import PackedDataset, Schedule, build_loader
address = sys.argv[1]
data = PackedDataset(address, f"{address}.samples")
schedule = Schedule(data, tokens_per_step=1024, seed=3)
size = {"data_parallel_rank": 0, "data_parallel_size": 1, "micro_batch_tokens": 1024}
batches = iter(build_loader(data, schedule, **size, prefetch=16))
next(batches)
print("left")
"""


def test_program_with_a_waiting_loader_ends(line: Line, tmp_path: Path) -> None:
    """Its thread requests blocks after the fetching threads have ended."""
    address = put_dataset(tmp_path / "docs", 20_000)
    line.latency = 0.3
    assert ended(*PYTHON, ENDS, address, timeout=LIMIT).stdout == "left\n"


def test_garbage_collection_of_an_iterator_does_not_wait() -> None:
    """The collector runs in any thread, even in one that the prefetching thread waits for."""
    waiting, go = threading.Event(), threading.Event()

    def items() -> Any:
        yield 0
        waiting.set()
        assert go.wait(LIMIT)
        yield 1

    ahead: Any = ThreadPrefetcher(items(), 1)
    [thread] = ahead._thread._threads
    assert next(ahead) == 0 and waiting.wait(LIMIT)
    ahead.itself = ahead  # a cycle, as a traceback makes it

    def collect() -> None:
        nonlocal ahead
        ahead = None
        gc.collect()

    in_time(collect)
    assert thread.is_alive()
    go.set()
    thread.join(LIMIT)
    assert not thread.is_alive()


def test_files_may_disappear(line: Line, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other threads and processes create and remove entries while one of them evicts."""
    monkeypatch.setattr("megapack.storage.remote.cache.SMALLEST_SIZE", 1)
    monkeypatch.setenv("MEGAPACK_CACHE_SIZE", str(20 * BLOCK_BYTES))
    address = put_dataset(tmp_path / "docs")
    cache, far = open_cache(), IndexedDataset(address)
    near = IndexedDataset(tmp_path / "docs").tokens
    stop = threading.Event()

    def come_and_go(number: int) -> None:
        while not stop.is_set():
            entry = cache.entry(f"entry{number % 2}", "file:///somewhere")
            (entry / f"file{number}").write_bytes(bytes(BLOCK_BYTES))
            assert (entry / f"file{number}").exists(), "removed under its user"
            IndexedDataset(address)  # one more open file
            cache.give_back(entry)

    with monkeypatch.context() as patched:
        threads = [threading.Thread(target=come_and_go, args=(n,)) for n in range(3)]
        failed: list[Any] = []
        patched.setattr(threading, "excepthook", failed.append)
        for thread in threads:
            thread.start()
        rng = np.random.default_rng(0)
        for at in [*rng.integers(0, near.size - 50, 80).tolist(), 0]:
            if at == 0 or failed:
                stop.set()
            found = in_time(lambda at=at: far.tokens[at : at + 50].tolist())
            assert found == near[at : at + 50].tolist()
        for thread in threads:
            thread.join(LIMIT)
    assert not failed


def test_eviction_ignores_disappearing_entries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An entry is listed and disappears before it is read."""
    monkeypatch.setenv("MEGAPACK_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("megapack.storage.remote.cache.SMALLEST_SIZE", 1)
    monkeypatch.setenv("MEGAPACK_CACHE_SIZE", str(20 * BLOCK_BYTES))
    cache = open_cache()
    used = cache.entry("used", "file:///somewhere")
    chunk = used / "docs.bin.01234567" / "0"
    chunk.parent.mkdir()
    chunk.write_bytes(bytes(30 * BLOCK_BYTES))
    gone, scandir = cache.entry("gone", "file:///somewhere"), os.scandir

    def scan(path: Any) -> Any:
        if Path(path) == gone:
            raise FileNotFoundError(path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", scan)
    assert make_room(cache) >= 30 * BLOCK_BYTES
    assert not chunk.exists()
