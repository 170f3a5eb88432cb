"""megapack-build pack to addresses: what it writes there is what it writes here, in whole."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from object_store import Line

from megapack.cli.main import main
from megapack.data import PackedDataset
from megapack.errors import FormatError
from megapack.packing import SampleIndex
from megapack.packing.sharded import load_shards
from megapack.storage import IndexedDatasetBuilder
from megapack.storage.remote.client import find_object, put_object
from megapack.storage.remote.copies import put_object as put_once
from megapack.storage.remote.copies import upload_dataset
from megapack.storage.remote.reader import fetch_file
from tests.remote.far import address_of, folder_of, run, write_packed
from tests.remote.stores import EVERY_STORE

BUCKETS = ("--buckets", "64,256,512")
COMMAND = (sys.executable, "-c", "import sys; from megapack.cli.main import main; sys.exit(main())")


def pack(*arguments: object) -> int:
    return main(["pack", *map(str, arguments), *BUCKETS, "--workers", "1"])


def put_documents(prefix: Path, num_documents: int = 200, seed: int = 0) -> str:
    """Without samples; the address of the prefix."""
    write_packed(prefix, num_documents, seed)
    Path(f"{prefix}.samples").unlink()
    upload_dataset(str(prefix), address_of(prefix))
    return address_of(prefix)


def put_shards(folder: Path, names: str = "abc") -> str:
    """Datasets of one letter each; the folder's address."""
    for seed, name in enumerate(names):
        put_documents(folder / name, 150, seed)
    return folder_of(folder)


def leftovers(tmp_path: Path) -> list[Path]:
    return list((tmp_path / "cache").glob("*.output-*"))


@EVERY_STORE
def test_samples_are_equal(line: Line, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Byte for byte, with the same lines printed, of a dataset here and of one that is far."""
    address = put_documents(tmp_path / "docs", 2000)
    line.counts.clear()
    assert pack(address) == 0, "beside the dataset, as here"
    assert line.counts["bytes"] < (tmp_path / "docs.bin").stat().st_size, ".bin was not asked for"
    far = capsys.readouterr().out
    assert pack(address, "--output", tmp_path / "far.samples") == 0
    assert capsys.readouterr().out == far.replace(f"{address}.samples", f"{tmp_path}/far.samples")
    assert fetch_file(f"{address}.samples").read_bytes() == (tmp_path / "far.samples").read_bytes()
    assert pack(tmp_path / "docs", "--output", f"{address}-near.samples") == 0
    assert pack(tmp_path / "docs") == 0
    near = fetch_file(f"{address}-near.samples").read_bytes()
    assert near == (tmp_path / "docs.samples").read_bytes()
    assert not leftovers(tmp_path)
    batches = run(address)
    assert len(batches) > 50 and batches == run(tmp_path / "docs")
    capsys.readouterr()
    assert main(["inspect", f"{address}.samples"]) == 0
    assert f"{address}.samples: bucket of {address}" in capsys.readouterr().out


@EVERY_STORE
def test_existing_is_as_here(
    line: Line, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    address = put_documents(tmp_path / "docs")
    assert pack(address) == 0
    first = fetch_file(f"{address}.samples").read_bytes()
    line.counts.clear()
    assert pack(address) == 0
    assert f"nothing to do: {address}.samples is there already" in capsys.readouterr().err
    assert pack(address, "--seed", "9") == 2
    error = capsys.readouterr().err
    assert f"{address}.samples is there already: it was packed with another seed" in error
    assert "--overwrite" in error and str(tmp_path) not in error
    assert not line.counts["PUT"] and fetch_file(f"{address}.samples").read_bytes() == first
    assert pack(address, "--seed", "9", "--overwrite") == 0
    assert SampleIndex.load(f"{address}.samples").seed == 9
    damaged = bytearray(first)
    damaged[-9] ^= 1
    (tmp_path / "damaged").write_bytes(damaged)
    put_object(f"{address}.samples", tmp_path / "damaged")
    assert pack(address) == 2 and "checksum" in capsys.readouterr().err
    with pytest.raises(FormatError, match="checksum"):
        SampleIndex.load(f"{address}.samples")  # not a copy that pack has left unchecked
    assert pack(address, "--overwrite") == 0
    assert fetch_file(f"{address}.samples").read_bytes() == first


class HoldsAnswers(Counter[str]):
    """Counts of a line on which nothing is answered any more from the first PUT on."""

    line: Line

    def __setitem__(self, name: str, value: int) -> None:
        super().__setitem__(name, value)
        if name == "PUT":
            self.line.latency = 3600.0


@EVERY_STORE
@pytest.mark.parametrize("stands", [False, True])
def test_killed_upload_leaves_what_was_there(line: Line, tmp_path: Path, stands: bool) -> None:
    """The samples go in several parts, some of which have arrived when the process is killed."""
    with IndexedDatasetBuilder(tmp_path / "docs", dtype=np.uint16) as builder:
        builder.add_documents(np.ones(600_000, np.uint16), np.arange(600_001))
    output = f"{address_of(tmp_path / 'docs')}.samples"
    if stands:
        assert pack(tmp_path / "docs", "--output", output, "--seed", "9") == 0
    before = find_object(output)
    assert (before is not None) == stands
    line.counts = HoldsAnswers()
    line.counts.line = line
    again = ("pack", f"{tmp_path}/docs", "--output", output, *BUCKETS, "--overwrite")
    process = subprocess.Popen([*COMMAND, *again])
    while not line.counts["PUT"]:
        assert process.poll() is None, "it ended before it was killed"
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    line.counts, line.latency = Counter(), 0.0
    assert find_object(output) == before
    assert leftovers(tmp_path), "it was not killed while it uploaded"
    assert pack(tmp_path / "docs", "--output", output, "--overwrite") == 0
    assert line.counts["PUT"] > 1, "one part is no test of what several are"
    assert pack(tmp_path / "docs") == 0
    assert fetch_file(output).read_bytes() == (tmp_path / "docs.samples").read_bytes()
    assert not leftovers(tmp_path)


def test_failed_upload_is_clean(
    line: Line, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does what it packed stand in the way of other options."""
    address = put_documents(tmp_path / "docs")

    def fails(*_: object) -> None:
        raise ConnectionError("the line is down")

    with monkeypatch.context() as patched:
        patched.setattr("megapack.storage.remote.copies.put_object", fails)
        assert pack(address) == 1
    assert find_object(f"{address}.samples") is None and not leftovers(tmp_path)
    assert pack(address, "--seed", "9") == 0
    assert SampleIndex.load(f"{address}.samples").seed == 9


def test_writers_of_the_same_wait_for_each_other(line: Line, tmp_path: Path) -> None:
    address = put_documents(tmp_path / "docs")
    line.counts.clear()
    line.latency = 0.3  # between the look at what stands there and the upload
    both = [subprocess.Popen([*COMMAND, "pack", address, *BUCKETS]) for _ in range(2)]
    assert [process.wait() for process in both] == [0, 0]
    assert line.counts["PUT"] == 1, "the second found it there"


@EVERY_STORE
def test_many_make_a_source(line: Line, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Named by a pattern; the shards' samples are those of a manifest here, byte for byte."""
    folder = put_shards(tmp_path)
    far, near = f"{folder}/web.shards.json", f"{tmp_path}/web.shards.json"
    capsys.readouterr()
    assert pack(f"{folder}/*.idx", "--output", far) == 0
    out = capsys.readouterr().out
    assert pack(f"{folder}/[abc].idx", "--output", near) == 0
    assert capsys.readouterr().out == out.replace(far, near)
    ours, theirs = load_shards(far), load_shards(near)
    assert ours.fingerprint == theirs.fingerprint and len(ours.shards) == 3
    for our, their in zip(ours.shards, theirs.shards, strict=True):
        assert our.prefix == their.prefix and our.samples.startswith(f"{folder}/web.shards/")
        assert fetch_file(our.samples).read_bytes() == Path(their.samples).read_bytes()
    assert '"prefix": "a", "samples": "web.shards/a-' in fetch_file(far).read_text()
    data, expected = PackedDataset(None, far), PackedDataset(None, near)
    assert len(data) == len(expected) > 150
    for i in range(0, len(expected), 17):
        assert data[i]["tokens"].tolist() == expected[i]["tokens"].tolist()
    assert main(["verify", far]) == 0
    assert main(["inspect", far, "--shards"]) == 0
    assert not leftovers(tmp_path)


def test_a_source_at_an_address_goes_on_where_it_was_stopped_and_grows(
    line: Line,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = put_shards(tmp_path)
    command = (f"{folder}/[abcd].idx", "--output", f"{folder}/web.shards.json")

    def first_only(url: str, path: Path) -> None:
        if "/a-" not in url:
            raise ConnectionError("the line is down")
        put_once(url, path)

    with monkeypatch.context() as patched:
        patched.setattr("megapack.storage.remote.copies.put_object", first_only)
        assert pack(*command) == 1
    assert find_object(f"{folder}/web.shards.json") is None
    line.counts.clear()
    assert pack(*command) == 0
    assert line.counts["PUT"] == 3, "two shards that were missing, and the manifest"
    put_documents(tmp_path / "d", 150, 7)
    line.counts.clear()
    capsys.readouterr()
    assert pack(*command) == 0
    assert "4 datasets, 1 of them new" in capsys.readouterr().out
    assert line.counts["PUT"] == 2, "the new shard, and the manifest"
    before = find_object(f"{folder}/web.shards.json")
    assert pack(*command, "--seed", "9") == 2
    assert "another seed" in capsys.readouterr().err
    assert find_object(f"{folder}/web.shards.json") == before
    assert pack(*command, "--seed", "9", "--overwrite") == 0
    assert load_shards(f"{folder}/web.shards.json").seed == 9
    write_packed(tmp_path / "other", 150, 8)
    upload_dataset(f"{tmp_path}/other", f"{folder}/b")
    assert pack(*command, "--seed", "9") == 1
    assert f"{folder}/b.idx has changed since" in capsys.readouterr().err


def test_machines_share_a_source_at_an_address(line: Line, tmp_path: Path) -> None:
    """Each has a cache of its own and processes that pack; nothing is packed twice."""
    folder = put_shards(tmp_path, "abcde")
    output = ("--output", f"{folder}/web.shards.json", *BUCKETS, "--workers", "2")
    line.counts.clear()
    parts = [
        subprocess.Popen(
            [*COMMAND, "pack", f"{folder}/*.idx", *output, "--part", f"{i}/2"],
            env={**os.environ, "MEGAPACK_CACHE": f"{tmp_path}/cache{i}"},
        )
        for i in range(2)
    ]
    assert [process.wait() for process in parts] == [0, 0]
    assert line.counts["PUT"] == 5 and find_object(f"{folder}/web.shards.json") is None
    assert pack(f"{folder}/*.idx", *output[:2]) == 0
    assert line.counts["PUT"] == 6, "the manifest"
    assert pack(f"{folder}/*.idx", "--output", f"{tmp_path}/here.shards.json") == 0
    far, near = (
        load_shards(f"{folder}/web.shards.json"),
        load_shards(f"{tmp_path}/here.shards.json"),
    )
    assert far.fingerprint == near.fingerprint and len(far.shards) == 5


def test_staging_folders(line: Line, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "my data").mkdir()
    for seed, name in enumerate("ab"):
        write_packed(tmp_path / "my data" / name, 150, seed)
    folder = f"file://{tmp_path}/my%20data"
    far, near = f"{folder}/web.shards.json", f"{tmp_path}/web.shards.json"
    assert (
        pack(f"{folder}/*.idx", "--output", far) == pack(f"{folder}/*.idx", "--output", near) == 0
    )
    assert load_shards(far).fingerprint == load_shards(near).fingerprint
    written = {path.parent.name for path in (tmp_path / "my data").glob("*/*")}
    assert written == {"web.shards"} and (tmp_path / "my data/web.shards.json").exists()
    for missing in (f"{folder}/nowhere/a", f"{folder}/nowhere/*.idx"):
        assert pack(missing, "--output", far) == 1
        assert "does not exist (or is not visible)" in capsys.readouterr().err
    assert not (tmp_path / "my data" / "nowhere").exists(), "who reads makes nothing"


def test_refusals_say_remedy(
    line: Line, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    address = put_documents(tmp_path / "docs")
    folder, _, _ = address.rpartition("/")
    far, near = f"{folder}/web.shards.json", f"{tmp_path}/web.shards.json"
    line.counts.clear()
    for command, reason in (
        (("pack", address, f"{tmp_path}/docs", "--output", far, *BUCKETS), "pack its address"),
        (("pack", "s3://bucket/*/docs.idx", "--output", far, *BUCKETS), "behind the last /"),
        (("pack", "http://host/*.idx", "--output", far, *BUCKETS), "name each dataset"),
        (("pack", f"{folder}/x*.idx", "--output", far, *BUCKETS), "matches no file"),
        (("pack", address, "--output", "s3://bucket", *BUCKETS), "names no object"),
        (("arrange", near, "--output", far), "megapack-build upload"),
    ):
        assert main(list(command)) == 2, command
        assert reason in capsys.readouterr().err, command
    assert not line.counts["PUT"] and not Path("s3:").exists()
