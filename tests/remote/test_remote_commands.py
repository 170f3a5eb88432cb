"""megapack-build on datasets in an object store; and uploads are complete or absent."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from object_store import Line

from megapack.cli.main import main
from megapack.errors import FormatError
from megapack.storage import IndexedDataset
from megapack.storage.remote import client
from megapack.storage.remote.client import find_object, put_object, remove_object
from megapack.storage.remote.copies import upload_dataset
from megapack.storage.remote.reader import fetch_file
from megapack.storage.verify import verify
from tests.remote.far import address_of, flip, folder_of, run, write_packed
from tests.remote.stores import EVERY_STORE


@EVERY_STORE
def test_upload_inspect_and_pack(
    line: Line, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_packed(tmp_path / "docs")
    folder = folder_of(tmp_path)
    assert main(["upload", f"{tmp_path}/docs", folder]) == 0
    assert f"-> {folder}/docs.samples" in capsys.readouterr().out
    assert run(f"{folder}/docs") == run(tmp_path / "docs")
    assert main(["inspect", f"{folder}/docs"]) == 0
    assert "2,000" in capsys.readouterr().out
    buckets = ["--buckets", "64,256,512"]
    here = ["--output", f"{tmp_path}/again.samples"]
    assert main(["pack", f"{folder}/docs", *buckets, *here]) == 0
    near, again = (
        (tmp_path / name).read_bytes()[-5000:] for name in ("docs.samples", "again.samples")
    )
    assert near == again


def test_local_commands_say(line: Line, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_packed(tmp_path / "docs")
    upload_dataset(str(tmp_path / "docs"), address_of(tmp_path / "docs"))
    assert main(["repair", address_of(tmp_path / "docs")]) == 2
    assert "this works on local files" in capsys.readouterr().err
    assert not Path("s3:").exists()


@EVERY_STORE
def test_verify_is_as_local(line: Line, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_packed(tmp_path / "docs")
    address = address_of(tmp_path / "docs")
    upload_dataset(str(tmp_path / "docs"), address)
    assert verify(address) == verify(tmp_path / "docs") == []
    line.counts.clear()
    assert verify(address, tokens=False) == []
    assert line.counts["bytes"] < (tmp_path / "docs.bin").stat().st_size, ".bin was not asked for"
    ids = {"vocab_size": 7, "document_end_token": 3}
    there, here = verify(address, **ids), verify(tmp_path / "docs", **ids)
    assert there == here and len(here) == 2
    upload_dataset(str(tmp_path / "docs"), f"{address}2")
    assert main(["verify", address, f"{address}2", "--no-tokens"]) == 0
    assert f"holds the same documents as {address}" in capsys.readouterr().out
    flip(tmp_path / "docs.bin", 1000)
    put_object(f"{address}.bin", tmp_path / "docs.bin")
    [found] = verify(address)
    assert found.severity == "error" and f"{address}.bin" in found.message
    remove_object(f"{address}.checksums")  # then the meta file tells
    [found] = [f for f in verify(address) if f.severity == "error"]
    assert found == verify(tmp_path / "docs")[0] and found.code == "checksum"
    remove_object(f"{address}.bin")
    assert verify(address)[0].message.startswith(f"{address}.bin does not exist")


def objects(address: str) -> dict[str, bytes]:
    """What stands at an address, by suffix."""
    found = {}
    for suffix in (".bin", ".idx", ".meta.json", ".manifest.json"):
        if find_object(f"{address}{suffix}") is not None:
            found[suffix] = fetch_file(f"{address}{suffix}").read_bytes()
    return found


def local_files(prefix: Path) -> dict[str, bytes]:
    names = (".bin", ".idx", ".meta.json", ".manifest.json")
    paths = {suffix: Path(f"{prefix}{suffix}") for suffix in names}
    return {suffix: path.read_bytes() for suffix, path in paths.items() if path.exists()}


def commands(tmp_path: Path, address: str) -> dict[str, list[str]]:
    """Each without its --output-prefix; ``address`` is an input of merge."""
    (tmp_path / "text.jsonl").write_text('{"text": "some words"}\n{"text": "and more"}\n' * 50)
    text = ["--input", f"{tmp_path}/text.jsonl", "--tokenizer", "bytes", "--workers", "1"]
    flat = ["--kind", "flat", "--dtype", "uint16", "--eod-token", "7"]
    return {
        "tokenize": ["tokenize", *text, "--append-eod"],
        "merge": ["merge", f"{tmp_path}/docs", address],
        "import": ["import", f"{tmp_path}/docs.bin", *flat],
    }


OTHERWISE = {  # options with which another dataset is made
    "tokenize": ["--prepend-bos"],
    "merge": ["--dtype", "int64"],
    "import": ["--eod-at", "start"],
}


@EVERY_STORE
@pytest.mark.parametrize("command", ["tokenize", "merge", "import"])
def test_what_is_written_to_an_address_is_what_is_written_here(
    line: Line,
    tmp_path: Path,
    command: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write_packed(tmp_path / "docs", 300)
    address = address_of(tmp_path / "docs")
    upload_dataset(str(tmp_path / "docs"), address)
    how = commands(tmp_path, address)[command]
    target = f"{address}-out"

    def fails(*_: object) -> None:
        raise ConnectionError("the line is down")

    with monkeypatch.context() as patched:  # killed before the last object of the dataset
        patched.setattr("megapack.storage.remote.copies.put_object", fails)
        assert main([*how, "--output-prefix", target]) == 1
    assert not IndexedDataset.exists(target), "absent until it is complete"
    capsys.readouterr()
    assert main([*how, "--output-prefix", target]) == 0
    out = capsys.readouterr().out
    assert target in out and str(tmp_path / "cache") not in out
    if command == "tokenize":
        assert "this very build is finished" in out, "it was built anew"
    assert not list((tmp_path / "cache").glob("*output*")), "the local files stay behind"
    assert main([*how, "--output-prefix", f"{tmp_path}/out"]) == 0
    here, there = local_files(tmp_path / "out"), objects(target)
    meta, theirs = json.loads(here.pop(".meta.json")), json.loads(there.pop(".meta.json"))
    assert str(meta.pop("command", "")).replace(f"{tmp_path}/out", target) == str(
        theirs.pop("command", "")
    )
    assert meta == theirs and here == there and len(here) == 2 + (command == "tokenize")
    assert verify(target) == verify(tmp_path / "out")
    for prefix in (target, f"{tmp_path}/out"):  # one rule, here and there
        line.counts.clear()
        assert main([*how, "--output-prefix", prefix]) == 0
        assert "nothing to do" in capsys.readouterr().out
        assert not line.counts["PUT"] + line.counts["DELETE"]
        assert main([*how, *OTHERWISE[command], "--output-prefix", prefix]) == 2
        error = capsys.readouterr().err
        assert f"{prefix}." in error and "Replace it with --overwrite" in error
        assert str(tmp_path / "cache") not in error
    again = objects(target)
    assert main([*how, *OTHERWISE[command], "--output-prefix", target, "--overwrite"]) == 0
    assert objects(target) != again and verify(target) == []


def test_parts_need_a_disk(line: Line, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    how = [*commands(tmp_path, "")["tokenize"], "--output-prefix", "s3://bucket/parts/docs"]
    assert main([*how, "--part", "0/2"]) == 2
    assert "megapack-build upload" in capsys.readouterr().err
    merged = ["merge", "s3://bucket/parts/docs", "--output-prefix", f"{tmp_path}/out"]
    assert main([*merged, "--remove-inputs"]) == 2
    assert "--remove-inputs" in capsys.readouterr().err


@EVERY_STORE
def test_cut_upload_leaves_none(
    line: Line, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The .idx comes last: nobody pairs the new .bin with the old .idx."""
    write_packed(tmp_path / "docs")
    address = address_of(tmp_path / "docs")
    upload_dataset(str(tmp_path / "docs"), address)
    assert IndexedDataset.exists(address)
    put = client.put_object

    def put_once(url: str, path: Path) -> None:
        put(url, path)
        raise KeyboardInterrupt

    monkeypatch.setattr("megapack.storage.remote.copies.put_object", put_once)
    with pytest.raises(KeyboardInterrupt):
        upload_dataset(str(tmp_path / "docs"), address)
    assert not IndexedDataset.exists(address)


def test_what_is_damaged_is_not_uploaded(line: Line, tmp_path: Path) -> None:
    write_packed(tmp_path / "docs")
    flip(tmp_path / "docs.bin", 1000)
    with pytest.raises(FormatError, match="do not have the checksums of the meta file"):
        upload_dataset(str(tmp_path / "docs"), address_of(tmp_path / "docs"))
    assert not IndexedDataset.exists(address_of(tmp_path / "docs"))
