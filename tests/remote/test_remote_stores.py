"""Objects in a store of each kind; wrong addresses, settings and credentials are named."""

from __future__ import annotations

import base64
import os
import urllib.request
from pathlib import Path

import numpy as np
import pytest
from object_store import BUCKET, Faults, Line
from ports import free_port

from megapack.cli.main import main
from megapack.errors import ConfigError
from megapack.storage import IndexedDataset
from megapack.storage.remote import client
from megapack.storage.remote.client import find_object, names_in, put_object, remove_object
from tests.remote.far import folder_of, put_dataset
from tests.remote.stores import EVERY_STORE

PART = client.PART_BYTES
NAMES = ("none", "some", "a part", "100%41+more parts")


@EVERY_STORE
def test_object_is_what_was_put(line: Line, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Empty, whole, and in parts; every range of it, until another takes its name."""
    folder, data = folder_of(tmp_path), np.random.default_rng(0).bytes(2 * PART + 1)
    names = NAMES
    if request.node.callspec.params["line"] == "s3 nanio":  # signs names with % in them otherwise
        names = (*NAMES[:-1], NAMES[-1].replace("%", ""))
    for name, size in zip(names, (0, 1000, PART, 2 * PART + 1), strict=True):
        (tmp_path / name).write_bytes(data[:size])
        line.counts.clear()
        put_object(f"{folder}/{name}", tmp_path / name)
        assert (line.counts["PUT"] >= 3) == (size > PART), "three parts, or the whole at once"
        found = find_object(f"{folder}/{name}")
        assert found is not None and found.num_bytes == size and found.etag
        for begin, end in ((0, size), (0, 1), (size // 3, size // 2), (size - 1, size)):
            if 0 <= begin < end <= size:
                assert found.read(begin, end) == data[begin:end]
    put_object(f"{folder}/below/it", tmp_path / "some")
    assert names_in(folder) == sorted(names)
    assert find_object(f"{folder}/below") is find_object(f"{folder}/som") is None
    for _ in range(2):
        remove_object(f"{folder}/{names[-1]}")
        assert find_object(f"{folder}/{names[-1]}") is None
    assert names_in(folder) == sorted(names[:-1]) and names_in(f"{folder}/nowhere") == []


@EVERY_STORE
def test_parts_are_few_enough(line: Line, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In parts of 5 MiB it would end at 48.8 GiB, which a .bin soon has."""
    monkeypatch.setattr(client, "MOST_PARTS", 2)
    data = np.random.default_rng(0).bytes(3 * PART + 1)
    (tmp_path / "many").write_bytes(data)
    put_object(f"{folder_of(tmp_path)}/many", tmp_path / "many")
    requests = line.counts["PUT"] - (folder_of(tmp_path).startswith("az"))  # its list of parts
    assert requests == 2
    found = find_object(f"{folder_of(tmp_path)}/many")
    assert found is not None and found.read(0, len(data)) == data


@EVERY_STORE
def test_a_part_that_fails_is_sent_again_and_not_all_of_it(line: Line, tmp_path: Path) -> None:
    """However long an upload takes, one failure in it costs one part."""
    data = np.random.default_rng(0).bytes(8 * PART)
    (tmp_path / "many").write_bytes(data)
    line.faulty, line.faults = "PUT", Faults(slow_down=0.3)
    put_object(f"{folder_of(tmp_path)}/many", tmp_path / "many")
    failed = line.counts["slow_down"]
    assert failed > 0, "nothing failed"
    least = 8 + (folder_of(tmp_path).startswith("az"))  # its list of parts
    assert line.counts["PUT"] == least + failed
    line.faults = Faults()
    found = find_object(f"{folder_of(tmp_path)}/many")
    assert found is not None and found.read(0, len(data)) == data


@EVERY_STORE
def test_who_may_not_read_is_told_so_at_once(
    line: Line,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    request: pytest.FixtureRequest,
) -> None:
    """Another key, which two servers find wrong; none, for an object that moto keeps private."""
    address = put_dataset(tmp_path / "docs")
    far = IndexedDataset(address)
    client._open_store.cache_clear()
    if address.startswith("az"):
        os.environ["AZURE_STORAGE_ACCOUNT_KEY"] = base64.b64encode(b"another key").decode()
    elif request.node.callspec.params["line"] == "s3 nanio":
        os.environ["AWS_SECRET_ACCESS_KEY"] = "another secret"
    else:
        url = f"{line.url}/{BUCKET}/{address.partition(BUCKET)[2]}.bin"
        private = {"x-amz-acl": "private", "Authorization": "Bearer owner"}
        data = (tmp_path / "docs.bin").read_bytes()
        put = urllib.request.Request(url, data, private, method="PUT")
        urllib.request.urlopen(put, timeout=60).close()
        os.environ.update(AWS_SKIP_SIGNATURE="true", GOOGLE_SKIP_SIGNATURE="true")
    line.counts.clear()
    with pytest.raises(ConfigError, match=r"docs\.bin: the store refuses.*403 Forbidden"):
        far[0]
    assert line.counts["requests"] == 1, "asked again although the answer will be the same"
    assert main(["inspect", address]) == 2
    assert "the store refuses the request" in capsys.readouterr().err


SETTINGS: dict[str, tuple[str, dict[str, str], str]] = {
    "no account": ("az://box/folder/docs", {}, "az://box/folder: .*Account must be specified"),
    "an account, not a container": ("az://me.blob.core.windows.net/box/docs", {}, "az://me.blob"),
    "a key that is none": (
        "az://box/folder/docs",
        {"AZURE_STORAGE_ACCOUNT_NAME": "me", "AZURE_STORAGE_ACCOUNT_KEY": "?"},
        "Invalid Access Key",
    ),
    "a file that is missing": (
        "gs://box/folder/docs",
        {"GOOGLE_SERVICE_ACCOUNT": "/nowhere/key.json"},
        "/nowhere/key.json: No such file",
    ),
    "a port that cannot be": ("http://host:99999/folder/docs", {}, "invalid port number"),
}


@pytest.fixture
def nothing_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No settings, no files in a home; and nobody at the address that machines in a cloud ask."""
    nobody = f"127.0.0.1:{free_port()}"
    for name in list(os.environ):
        if name.startswith(("AWS_", "AZURE_", "GOOGLE_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", f"http://{nobody}")
    monkeypatch.setenv("AZURE_MSI_ENDPOINT", f"http://{nobody}")
    monkeypatch.setenv("GCE_METADATA_HOST", nobody)
    monkeypatch.setenv("GCE_METADATA_IP", nobody)


@pytest.mark.parametrize("case", SETTINGS)
def test_settings_are_named(nothing_set: None, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    address, settings, text = SETTINGS[case]
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=rf"{text}.*; docs/guides/object_storage\.md tells"):
        IndexedDataset(address)


@pytest.mark.parametrize("scheme", ["s3", "gs", "az"])
def test_no_credentials(nothing_set: None, monkeypatch: pytest.MonkeyPatch, scheme: str) -> None:
    monkeypatch.setattr(client, "RETRY_SECONDS", 0.1)
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "me")
    address = f"{scheme}://box/no-credentials/docs"
    with pytest.raises(ConfigError, match=rf"^{address}\.[a-z]*: no credentials are set"):
        IndexedDataset(address)
