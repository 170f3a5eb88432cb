"""megapack-build on datasets in an object store; and uploads are complete or absent."""

from __future__ import annotations

from pathlib import Path

import pytest
from object_store import Line

from megapack.cli.main import main
from megapack.errors import FormatError
from megapack.storage import IndexedDataset
from megapack.storage.remote import client
from megapack.storage.remote.upload import upload_dataset
from tests.remote.far import address_of, run, write_packed


def test_upload_inspect_and_pack(
    line: Line, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_packed(tmp_path / "docs")
    folder = f"s3://bucket/{tmp_path.name}"
    assert main(["upload", f"{tmp_path}/docs", folder]) == 0
    assert f"-> {folder}/docs.samples" in capsys.readouterr().out
    assert run(f"{folder}/docs") == run(tmp_path / "docs")
    assert main(["inspect", f"{folder}/docs"]) == 0
    assert "2,000" in capsys.readouterr().out
    buckets = ["--buckets", "64,256,512"]
    here = ["--output", f"{tmp_path}/again.samples"]
    assert main(["pack", f"{folder}/docs", *buckets, *here]) == 0
    assert main(["pack", f"{folder}/docs", *buckets]) == 2
    assert "megapack-build upload" in capsys.readouterr().err
    near, again = (
        (tmp_path / name).read_bytes()[-5000:] for name in ("docs.samples", "again.samples")
    )
    assert near == again


@pytest.mark.parametrize("command", ["verify", "repair"])
def test_commands_for_local_files_say_so(
    line: Line, tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_packed(tmp_path / "docs")
    upload_dataset(str(tmp_path / "docs"), address_of(tmp_path / "docs"))
    assert main([command, address_of(tmp_path / "docs")]) == 2
    assert "this works on local files" in capsys.readouterr().err
    assert not Path("s3:").exists()


def test_an_upload_that_is_cut_short_leaves_no_dataset(
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

    monkeypatch.setattr("megapack.storage.remote.upload.put_object", put_once)
    with pytest.raises(KeyboardInterrupt):
        upload_dataset(str(tmp_path / "docs"), address)
    assert not IndexedDataset.exists(address)


def test_what_is_damaged_is_not_uploaded(line: Line, tmp_path: Path) -> None:
    write_packed(tmp_path / "docs")
    tokens = bytearray((tmp_path / "docs.bin").read_bytes())
    tokens[1000] ^= 1
    (tmp_path / "docs.bin").write_bytes(tokens)
    with pytest.raises(FormatError, match="do not have the checksums of the meta file"):
        upload_dataset(str(tmp_path / "docs"), address_of(tmp_path / "docs"))
    assert not IndexedDataset.exists(address_of(tmp_path / "docs"))
