"""Stores and lines that fail: nothing wrong reaches a batch, and what ends a run has a name."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from object_store import Faults, Line, serve_objects
from ports import free_port

from megapack.data import PackedDataset
from megapack.errors import ConfigError, FormatError
from megapack.storage import IndexedDataset
from megapack.storage.remote import client
from megapack.storage.remote.checksums import write_checksums
from megapack.storage.remote.client import put_object
from megapack.storage.remote.copies import upload_dataset
from tests.remote.far import address_of, flip, put_dataset, run, write_packed
from tests.remote.stores import EVERY_STORE


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors that last are given up after a second, with hardly a pause between attempts."""
    monkeypatch.setattr(client, "RETRY_SECONDS", 1.0)
    monkeypatch.setattr(client, "FIRST_PAUSE", 0.001)


@EVERY_STORE
@pytest.mark.parametrize("kind", ["slow_down", "cut", "short", "flip"])
def test_a_store_that_fails_now_and_then_changes_no_batch(
    line: Line, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every fifth request: many times what a store does, so that each kind is met."""
    monkeypatch.setattr(client, "FIRST_PAUSE", 0.001)
    monkeypatch.setattr(client, "WRONG_ATTEMPTS", 20)
    monkeypatch.setattr("megapack.storage.remote.reader.GAP_BLOCKS", 0)  # more requests
    address = put_dataset(tmp_path / "docs", 4000)
    line.faults = Faults(**{kind: 0.2})
    assert run(address) == run(tmp_path / "docs")
    assert line.counts[kind] > 0, "nothing failed: the test showed nothing"


def test_wrong_bytes_would_reach_a_batch_without_checksums(line: Line, tmp_path: Path) -> None:
    """What the test above guards against is real: the same line, nobody looking."""
    address = put_dataset(tmp_path / "docs", 4000)
    client.remove_object(f"{address}.checksums")
    PackedDataset(address, f"{address}.samples")  # what is small is here now
    line.faults = Faults(flip=1.0)
    assert run(address) != run(tmp_path / "docs")


@EVERY_STORE
def test_damaged_objects_are_named(line: Line, tmp_path: Path, impatient: None) -> None:
    address = put_dataset(tmp_path / "docs")
    damaged = Path(shutil.copyfile(tmp_path / "docs.bin", tmp_path / "damaged"))
    tokens = flip(damaged, 100_000)
    put_object(f"{address}.bin", damaged)
    far, near = IndexedDataset(address), IndexedDataset(tmp_path / "docs")
    assert far[0].tolist() == near[0].tolist(), "a block that is whole was refused"
    with pytest.raises(FormatError, match=r"docs\.bin is damaged.* do not have their checksum"):
        np.asarray(far.tokens)
    damaged.write_bytes(tokens[:-1])
    put_object(f"{address}.bin", damaged)
    with pytest.raises(FormatError, match="write it again"):
        IndexedDataset(address)


@pytest.mark.parametrize("suffix", [".idx", ".checksums", ".samples"])
def test_damaged_small_object_named(
    line: Line, tmp_path: Path, impatient: None, suffix: str
) -> None:
    address = put_dataset(tmp_path / "docs")
    local = tmp_path / f"docs{suffix}"
    if suffix == ".checksums":
        write_checksums(str(tmp_path / "docs"), local)
    flip(local, -9)
    put_object(f"{address}{suffix}", local)
    with pytest.raises(FormatError, match=rf"^s3://.*docs\{suffix} is damaged"):
        PackedDataset(address, f"{address}.samples")
    assert not list((tmp_path / "cache").glob(f"*/docs{suffix}"))


@EVERY_STORE
def test_an_object_that_is_replaced_ends_the_run(line: Line, tmp_path: Path) -> None:
    address = put_dataset(tmp_path / "docs", 20_000)
    far = PackedDataset(address, f"{address}.samples")
    far[0]
    (tmp_path / "new").mkdir()
    write_packed(tmp_path / "new" / "docs", 20_000, seed=1)
    upload_dataset(str(tmp_path / "new" / "docs"), address)
    with pytest.raises(FormatError, match=r"docs\.bin was replaced since it was opened"):
        for i in range(1, len(far)):
            far[i]
    # Who opens it now has a new entry of the cache and reads what stands there.
    near = IndexedDataset(tmp_path / "new" / "docs")
    assert IndexedDataset(address)[7].tolist() == near[7].tolist()
    client.remove_object(f"{address}.bin")
    with pytest.raises(FileNotFoundError, match=r"docs\.bin does not exist"):
        far[len(far) - 1]


def test_refused_credentials_are_named_at_once(line: Line, tmp_path: Path) -> None:
    address = put_dataset(tmp_path / "docs")
    far = IndexedDataset(address)
    line.faults = Faults(expired=1.0)
    line.counts.clear()
    with pytest.raises(ConfigError, match=r"docs\.bin: the store refuses.*ExpiredToken"):
        far[0]
    assert line.counts["GET"] == 1, "asked again although the answer will be the same"


@EVERY_STORE
def test_throttling_store_is_named(line: Line, tmp_path: Path, impatient: None) -> None:
    address = put_dataset(tmp_path / "docs")
    far = IndexedDataset(address)
    line.faults = Faults(slow_down=1.0)
    with pytest.raises(ConnectionError, match=r"docs\.bin: the store throttles"):
        far[0]
    line.faults = Faults()
    assert far[0].tolist() == IndexedDataset(tmp_path / "docs")[0].tolist()


def test_a_store_that_is_gone_is_named(line: Line, tmp_path: Path, impatient: None) -> None:
    address = put_dataset(tmp_path / "docs")
    far = IndexedDataset(address)
    line.faults = Faults(cut=1.0)
    with pytest.raises(
        ConnectionError, match=r"docs\.bin could not be read or written for 1 seconds"
    ):
        far[0]


def test_a_run_goes_on_when_the_server_was_restarted(line: Line, tmp_path: Path) -> None:
    """The process is killed in the middle of a run; another with the same objects comes later."""
    write_packed(tmp_path / "docs", 4000)
    address = address_of(tmp_path / "docs")
    with serve_objects(free_port()) as second:
        with serve_objects(free_port()) as first:
            for line.server in (second, first):
                upload_dataset(str(tmp_path / "docs"), address)
                put_object(f"{address}.samples", tmp_path / "docs.samples")
            far, near = (
                PackedDataset(prefix, f"{prefix}.samples")
                for prefix in (address, tmp_path / "docs")
            )
            assert far[0]["tokens"].tolist() == near[0]["tokens"].tolist()
        requests = line.counts["requests"]
        later = threading.Timer(1.0, setattr, (line, "server", second))
        later.start()
        last = len(far) - 1
        assert far[last]["tokens"].tolist() == near[last]["tokens"].tolist()
        assert later.finished.is_set(), "it was answered before anybody could answer"
        assert line.counts["requests"] > requests
        later.join()


FULL = """
import os, sys
from megapack.storage import IndexedDataset
os.environ["MEGAPACK_CACHE"] = sys.argv[2]
far = IndexedDataset(sys.argv[1])
try:
    far.tokens[:]
except OSError as error:
    print(error)
"""


def test_a_full_cache_disk_is_named(line: Line, tmp_path: Path) -> None:
    """On a real file system of one megabyte, in a mount namespace of its own."""
    if shutil.which("unshare") is None:
        pytest.skip("no unshare")
    address = put_dataset(tmp_path / "docs", 20_000)
    (tmp_path / "disk").mkdir()
    script = 'mount -t tmpfs -o size=1m none "$3" && "$0" -c "$1" "$2" "$3"'
    command = ["unshare", "-rm", "sh", "-c", script, sys.executable, FULL, address]
    done = subprocess.run(
        [*command, str(tmp_path / "disk")], check=False, capture_output=True, text=True
    )
    if "unshare failed" in done.stderr or "mount:" in done.stderr:
        pytest.skip("mounting needs user namespaces")
    assert done.returncode == 0, done.stderr
    assert "the disk of the cache is full" in done.stdout and "MEGAPACK_CACHE_SIZE" in done.stdout
