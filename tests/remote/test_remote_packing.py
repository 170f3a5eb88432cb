"""megapack-build with remote outputs: equal to local ones, complete or absent."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from commands import printed
from object_store import Line

from megapack.cli.main import main
from megapack.data import PackedDataset
from megapack.errors import FormatError, MegapackWarning
from megapack.packing import SampleIndex
from megapack.packing.sharded import load_shards
from megapack.storage import IndexedDataset, IndexedDatasetBuilder, read_document_lengths
from megapack.storage.metadata import BOUNDARY_TOKENS
from megapack.storage.remote.client import find_object, put_object, remove_object
from megapack.storage.remote.copies import local_copy, local_output, upload_dataset
from megapack.storage.remote.reader import fetch_file
from megapack.storage.verify import verify
from tests.remote.far import address_of, flip, folder_of, run, write_packed
from tests.remote.stores import EVERY_CLOUD

BUCKETS = ("--buckets", "64,256,512")
COMMAND = (sys.executable, "-c", "import sys; from megapack.cli.main import main; sys.exit(main())")


def pack(*arguments: object) -> int:
    return main(["pack", *map(str, arguments), *BUCKETS, "--workers", "1"])


def put_documents(prefix: Path, num_documents: int = 200, seed: int = 0) -> str:
    """Upload a dataset without samples; return its address."""
    write_packed(prefix, num_documents, seed)
    Path(f"{prefix}.samples").unlink()
    upload_dataset(str(prefix), address_of(prefix))
    return address_of(prefix)


def put_shards(folder: Path, names: str = "abc") -> str:
    """Upload datasets named by one letter each; return the folder's address."""
    for seed, name in enumerate(names):
        put_documents(folder / name, 150, seed)
    return folder_of(folder)


@contextlib.contextmanager
def line_down(but_for: str | None = None) -> Iterator[None]:
    """Fail on writes to other objects than those with this text in their names."""

    def put(url: str, path: Path) -> None:
        if but_for is None or but_for not in url:
            raise ConnectionError("the line is down")
        put_object(url, path)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("megapack.storage.remote.copies.put_object", put)
        yield


def leftovers(tmp_path: Path) -> list[Path]:
    return list((tmp_path / "cache").glob("*.output-*"))


@EVERY_CLOUD
def test_local_and_remote_samples_are_equal(
    line: Line, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Local and remote datasets give equal bytes and equal output lines."""
    address = put_documents(tmp_path / "docs", 2000)
    line.counts.clear()
    assert pack(address) == 0, "the output is next to the dataset, as for local ones"
    assert line.counts["bytes"] < (tmp_path / "docs.bin").stat().st_size, ".bin was not fetched"
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
    assert f"{address}.samples: bucket of {address}" in printed("inspect", f"{address}.samples")


@EVERY_CLOUD
def test_existing_remote_samples_are_treated_as_local_ones(
    line: Line, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    address = put_documents(tmp_path / "docs")
    assert pack(address) == 0
    first = fetch_file(f"{address}.samples").read_bytes()
    line.counts.clear()
    assert pack(address) == 0
    assert f"nothing to do: {address}.samples exists already" in capsys.readouterr().err
    assert pack(address, "--seed", "9") == 2
    error = capsys.readouterr().err
    assert f"{address}.samples exists already: it was packed with another seed" in error
    assert "--overwrite" in error and str(tmp_path) not in error
    assert not line.counts["PUT"] and fetch_file(f"{address}.samples").read_bytes() == first
    assert pack(address, "--seed", "9", "--overwrite") == 0
    assert SampleIndex.load(f"{address}.samples").seed == 9
    (tmp_path / "damaged").write_bytes(first)
    flip(tmp_path / "damaged", -9)
    put_object(f"{address}.samples", tmp_path / "damaged")
    assert pack(address) == 2 and "checksum" in capsys.readouterr().err
    with pytest.raises(FormatError, match="checksum"):
        SampleIndex.load(f"{address}.samples")  # not an unchecked copy of pack
    assert pack(address, "--overwrite") == 0
    assert fetch_file(f"{address}.samples").read_bytes() == first


class HoldsAnswers(Counter[str]):
    """Stop all responses from the first PUT on; return the proxy's counts."""

    line: Line

    def __setitem__(self, name: str, value: int) -> None:
        super().__setitem__(name, value)
        if name == "PUT":
            self.line.latency = 3600.0


@EVERY_CLOUD
def test_killed_upload_leaves_the_old_samples(line: Line, tmp_path: Path) -> None:
    """The samples go in several parts, some of which have arrived when the process is killed: once
    without existing samples, and once with them."""
    with IndexedDatasetBuilder(tmp_path / "docs", dtype=np.uint16) as builder:
        builder.add_documents(np.ones(600_000, np.uint16), np.arange(600_001))
    output = f"{address_of(tmp_path / 'docs')}.samples"
    for seed in ("8", "9"):
        how = (f"{tmp_path}/docs", "--output", output, "--seed", seed, "--overwrite")
        before = find_object(output)
        assert (before is not None) == (seed == "9")
        line.counts = HoldsAnswers()
        line.counts.line = line
        process = subprocess.Popen([*COMMAND, "pack", *how, *BUCKETS])
        while not line.counts["PUT"]:
            assert process.poll() is None, "it ended before it was killed"
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.wait()
        line.counts, line.latency = Counter(), 0.0
        assert find_object(output) == before
        assert leftovers(tmp_path), "it was not killed while it uploaded"
        assert pack(*how) == 0
        assert line.counts["PUT"] > 1, "the test needs several parts"
    assert pack(tmp_path / "docs", "--seed", "9") == 0
    assert fetch_file(output).read_bytes() == (tmp_path / "docs.samples").read_bytes()
    assert not leftovers(tmp_path)


def test_trees_of_a_remote_dataset_are_refused(line: Line, tmp_path: Path) -> None:
    address = put_documents(tmp_path / "d", 5)
    text = printed("pack", address, "--strategy", "tree", "--buckets", 512, status=2)
    assert f"strategy 'tree' reads all tokens of {address}: pack a local copy" in text


def test_failed_upload_leaves_no_files(line: Line, tmp_path: Path) -> None:
    """Its local files do not affect a run with other options."""
    address = put_documents(tmp_path / "docs")
    with line_down():
        assert pack(address) == 1
    assert find_object(f"{address}.samples") is None and not leftovers(tmp_path)
    assert pack(address, "--seed", "9") == 0
    assert SampleIndex.load(f"{address}.samples").seed == 9


def test_writers_of_one_address_wait_for_each_other(line: Line, tmp_path: Path) -> None:
    address = put_documents(tmp_path / "docs")
    line.counts.clear()
    line.latency = 0.3  # between the check for an existing object and the upload
    both = [subprocess.Popen([*COMMAND, "pack", address, *BUCKETS]) for _ in range(2)]
    assert [process.wait() for process in both] == [0, 0]
    assert line.counts["PUT"] == 1, "the second found it there"


@EVERY_CLOUD
def test_many_datasets_make_a_source(
    line: Line, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Name them by a pattern; the shards' samples equal those of a local manifest."""
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


@pytest.mark.parametrize("fact", BOUNDARY_TOKENS)
def test_different_document_tokens_are_reported(
    line: Line, tmp_path: Path, capsys: pytest.CaptureFixture[str], fact: str
) -> None:
    del line
    for name, token in (("a", 5), ("b", 6)):
        with IndexedDatasetBuilder(tmp_path / name, metadata={fact: token}) as builder:
            builder.add_documents(np.full(300, token), np.arange(0, 301, 10))
        upload_dataset(str(tmp_path / name), address_of(tmp_path / name))
    manifest = f"{folder_of(tmp_path)}/web.shards.json"
    assert pack(f"{folder_of(tmp_path)}/*.idx", "--output", manifest) == 0
    where = fact.split("_")[1]
    message = rf"documents {where} with different tokens: 5 \(s3.*/a\), 6 \(s3.*/b\)"
    assert re.search(message, capsys.readouterr().err)
    with pytest.warns(MegapackWarning, match=f"documents {where} with different tokens: "):
        PackedDataset(None, manifest)


def test_remote_source_resumes_and_grows(
    line: Line, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = put_shards(tmp_path)
    command = (f"{folder}/[abcd].idx", "--output", f"{folder}/web.shards.json")

    with line_down(but_for="/a-"):
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
    assert "other values of seed" in capsys.readouterr().err
    assert find_object(f"{folder}/web.shards.json") == before
    assert pack(*command, "--seed", "9", "--overwrite") == 0
    assert load_shards(f"{folder}/web.shards.json").seed == 9
    write_packed(tmp_path / "other", 150, 8)
    upload_dataset(f"{tmp_path}/other", f"{folder}/b")
    assert pack(*command, "--seed", "9") == 1
    assert f"{folder}/b.idx has changed since" in capsys.readouterr().err


def test_machines_share_a_remote_source(line: Line, tmp_path: Path) -> None:
    """Each machine has its own cache and packing processes; no shard is packed twice."""
    folder = put_shards(tmp_path, "abcde")
    output = ("--output", f"{folder}/web.shards.json", *BUCKETS, "--workers", "2")
    line.counts.clear()
    command, parts = [*COMMAND, "pack", f"{folder}/*.idx", *output, "--part"], []
    for i in range(2):
        environment = {**os.environ, "MEGAPACK_CACHE": f"{tmp_path}/cache{i}"}
        parts.append(subprocess.Popen([*command, f"{i}/2"], env=environment))
    assert [process.wait() for process in parts] == [0, 0]
    assert line.counts["PUT"] == 5 and find_object(f"{folder}/web.shards.json") is None
    assert pack(f"{folder}/*.idx", *output[:2]) == 0
    assert line.counts["PUT"] == 6, "the manifest"
    assert pack(f"{folder}/*.idx", "--output", f"{tmp_path}/web.shards.json") == 0
    far, near = (load_shards(f"{place}/web.shards.json") for place in (folder, tmp_path))
    assert far.fingerprint == near.fingerprint and len(far.shards) == 5


def test_staging_folders(line: Line, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "my data").mkdir()
    for seed, name in enumerate("ab"):
        write_packed(tmp_path / "my data" / name, 150, seed)
    folder = f"file://{tmp_path}/my%20data"
    far, near = f"{folder}/web.shards.json", f"{tmp_path}/web.shards.json"
    assert [pack(f"{folder}/*.idx", "--output", output) for output in (far, near)] == [0, 0]
    assert load_shards(far).fingerprint == load_shards(near).fingerprint
    written = {path.parent.name for path in (tmp_path / "my data").glob("*/*")}
    assert written == {"web.shards"} and (tmp_path / "my data/web.shards.json").exists()
    for missing in (f"{folder}/nowhere/a", f"{folder}/nowhere/*.idx"):
        assert pack(missing, "--output", far) == 1
        assert "does not exist (or is not visible)" in capsys.readouterr().err
    assert not (tmp_path / "my data" / "nowhere").exists(), "readers create no files"


def test_errors_name_a_remedy(line: Line, tmp_path: Path) -> None:
    address = put_documents(tmp_path / "docs")
    folder, _, _ = address.rpartition("/")
    text = ("--input", f"{tmp_path}/docs.meta.json", "--tokenizer", "bytes")
    tokenize = ("tokenize", *text, "--output-prefix")
    far, near = f"{folder}/web.shards.json", f"{tmp_path}/web.shards.json"
    line.counts.clear()
    for command, reason in (
        (("pack", address, f"{tmp_path}/docs", "--output", far, *BUCKETS), "pack its address"),
        (("pack", "s3://bucket/*/docs.idx", "--output", far, *BUCKETS), "after the last /"),
        (("pack", "http://host/*.idx", "--output", far, *BUCKETS), "name each dataset"),
        (("pack", f"{folder}/x*.idx", "--output", far, *BUCKETS), "matches no file"),
        (("pack", address, "--output", "s3://bucket", *BUCKETS), "is not the address of an object"),
        (("arrange", near, "--output", far), "megapack-build upload"),
        (("repair", address), "is not a local file"),
        (("merge", address, "--output-prefix", near, "--remove-inputs"), "--remove-inputs"),
        ((*tokenize, f"{folder}/x", "--part", "0/2"), "megapack-build upload"),
    ):
        assert reason in printed(*command, status=2), command
    assert not line.counts["PUT"] and not Path("s3:").exists()


# ---- megapack-build on datasets in an object store; uploads are complete or absent -------------


@EVERY_CLOUD
def test_upload_and_inspect(line: Line, tmp_path: Path) -> None:
    write_packed(tmp_path / "docs")
    folder = folder_of(tmp_path)
    assert f"-> {folder}/docs.samples" in printed("upload", f"{tmp_path}/docs", folder)
    assert run(f"{folder}/docs") == run(tmp_path / "docs")
    assert "2,000" in printed("inspect", f"{folder}/docs")


@EVERY_CLOUD
def test_verify_equals_local_verify(line: Line, tmp_path: Path) -> None:
    address = put_documents(tmp_path / "docs", 2000)
    assert verify(address) == verify(tmp_path / "docs") == []
    line.counts.clear()
    assert verify(address, tokens=False) == []
    assert line.counts["bytes"] < (tmp_path / "docs.bin").stat().st_size, ".bin was not fetched"
    ids = {"vocab_size": 7, "document_end_token": 3}
    there, here = verify(address, **ids), verify(tmp_path / "docs", **ids)
    assert there == here and len(here) == 2
    upload_dataset(str(tmp_path / "docs"), f"{address}2")
    said = printed("verify", address, f"{address}2", "--no-tokens")
    assert f"contains the same documents as {address}" in said
    flip(tmp_path / "docs.bin", 1000)
    put_object(f"{address}.bin", tmp_path / "docs.bin")
    [found] = verify(address)
    assert found.severity == "error" and f"{address}.bin" in found.message
    remove_object(f"{address}.checksums")  # then the meta file's checksums are used
    [found] = [f for f in verify(address) if f.severity == "error"]
    assert found == verify(tmp_path / "docs")[0] and found.code == "checksum"
    remove_object(f"{address}.bin")
    assert verify(address)[0].message.startswith(f"{address}.bin does not exist")


def test_local_copy_has_one_version(line: Line, tmp_path: Path) -> None:
    """Replace the .idx and keep the .bin: leftovers of the old version are not used."""
    with contextlib.ExitStack() as stack:
        for lengths in ([3, 3], [2, 4]):
            with IndexedDatasetBuilder(tmp_path / "docs", overwrite=True) as builder:
                builder.add_documents(np.arange(6), np.cumsum([0, *lengths]))
            upload_dataset(str(tmp_path / "docs"), address_of(tmp_path / "docs"))
            files = stack.enter_context(local_copy(address_of(tmp_path / "docs")))
            assert read_document_lengths(files).tolist() == lengths


def test_second_writer_of_an_address_waits(line: Line, tmp_path: Path) -> None:
    """Both use one cache folder: without the lock, the second uploads the first one's files."""
    address, inside = address_of(tmp_path / "docs"), threading.Event()

    def second() -> None:
        with local_output(address, overwrite=False):
            inside.set()

    with local_output(address, overwrite=True):
        waiting = threading.Thread(target=second)
        waiting.start()
        assert not inside.wait(0.3)
    waiting.join()
    assert inside.is_set()


def objects(address: str) -> dict[str, bytes]:
    """Return the objects at an address, by suffix."""
    suffixes = (".bin", ".idx", ".meta.json", ".manifest.json")
    there = [suffix for suffix in suffixes if find_object(f"{address}{suffix}") is not None]
    return {suffix: fetch_file(f"{address}{suffix}").read_bytes() for suffix in there}


def commands(tmp_path: Path, address: str) -> dict[str, list[str]]:
    """Return commands without their --output-prefix; ``address`` is an input of merge."""
    (tmp_path / "text.jsonl").write_text('{"text": "some words"}\n{"text": "and more"}\n' * 50)
    text = ["--input", f"{tmp_path}/text.jsonl", "--tokenizer", "bytes", "--workers", "1"]
    flat = ["--kind", "flat", "--dtype", "uint16", "--eod-token", "7"]
    return {
        "tokenize": ["tokenize", *text, "--append-eod"],
        "merge": ["merge", f"{tmp_path}/docs", address],
        "import": ["import", f"{tmp_path}/docs.bin", *flat],
    }


OTHERWISE = {  # options that make another dataset
    "tokenize": ["--prepend-bos"],
    "merge": ["--dtype", "int64"],
    "import": ["--eod-at", "start"],
}


@EVERY_CLOUD
@pytest.mark.parametrize("command", ["tokenize", "merge", "import"])
def test_remote_outputs_equal_local_ones(line: Line, tmp_path: Path, command: str) -> None:
    address = put_documents(tmp_path / "docs", 300)
    how = commands(tmp_path, address)[command]
    target = f"{address}-out"

    with line_down():  # killed before the last object of the dataset
        assert main([*how, "--output-prefix", target]) == 1
    assert not IndexedDataset.exists(target), "absent until it is complete"
    out = printed(*how, "--output-prefix", target)
    assert target in out and str(tmp_path / "cache") not in out
    if command == "tokenize":
        assert "this build is complete" in out, "it was built anew"
    assert not list((tmp_path / "cache").glob("*output*")), "the local files stay behind"
    assert main([*how, "--output-prefix", f"{tmp_path}/out"]) == 0
    here, there = objects(f"file://{tmp_path}/out"), objects(target)
    meta, theirs = json.loads(here.pop(".meta.json")), json.loads(there.pop(".meta.json"))
    ours = str(meta.pop("command", "")).replace(f"{tmp_path}/out", target)
    assert ours == str(theirs.pop("command", ""))
    assert meta == theirs and here == there and len(here) == 2 + (command == "tokenize")
    assert verify(target) == verify(tmp_path / "out")
    for prefix in (target, f"{tmp_path}/out"):  # one rule for both
        line.counts.clear()
        assert "nothing to do" in printed(*how, "--output-prefix", prefix)
        assert not line.counts["PUT"] + line.counts["DELETE"]
        error = printed(*how, *OTHERWISE[command], "--output-prefix", prefix, status=2)
        assert f"{prefix}." in error and "Replace it with --overwrite" in error
        assert str(tmp_path / "cache") not in error
    again = objects(target)
    assert main([*how, *OTHERWISE[command], "--output-prefix", target, "--overwrite"]) == 0
    assert objects(target) != again and verify(target) == []


def test_interrupted_upload_leaves_no_dataset(line: Line, tmp_path: Path) -> None:
    """The .idx comes last: no reader pairs the new .bin with the old .idx."""
    address = put_documents(tmp_path / "docs")
    assert IndexedDataset.exists(address)
    with line_down(but_for=".bin"), pytest.raises(ConnectionError):
        upload_dataset(str(tmp_path / "docs"), address)
    assert not IndexedDataset.exists(address)


def test_damaged_datasets_are_not_uploaded(line: Line, tmp_path: Path) -> None:
    write_packed(tmp_path / "docs")
    flip(tmp_path / "docs.bin", 1000)
    with pytest.raises(FormatError, match="do not have the checksums of the meta file"):
        upload_dataset(str(tmp_path / "docs"), address_of(tmp_path / "docs"))
    assert not IndexedDataset.exists(address_of(tmp_path / "docs"))
