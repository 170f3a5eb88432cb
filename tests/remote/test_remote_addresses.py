"""Addresses are parsed once: no secret is stored or printed, no manifest leads elsewhere."""

from __future__ import annotations

import base64
import io
import json
import os
import re
import shutil
import sys
import urllib.request
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import boto3
import botocore.config
import numpy as np
import pytest
from commands import build, printed
from hypothesis import given
from hypothesis import strategies as st
from object_store import BUCKET, Faults, Line
from ports import free_port
from programs import ended

from megapack.cli.main import main
from megapack.data import PackedDataset, load_blend, open_blend
from megapack.errors import ConfigError, FormatError, redacted
from megapack.packing.shard_packing import pack_shards, plan_packing
from megapack.packing.sharded import load_shards, save_shards
from megapack.storage import IndexedDataset, read_document_lengths
from megapack.storage.address import is_below, is_remote
from megapack.storage.remote import client
from megapack.storage.remote.client import (
    RemoteObject,
    find_object,
    names_in,
    put_object,
    remove_object,
)
from megapack.storage.verify import verify
from tests.remote.far import address_of, folder_of, put_dataset, signed, write_packed
from tests.remote.stores import EVERY_STORE

SECRET = "hunter2"
BAD = {
    "user and password": f"https://somebody:{SECRET}@host/folder/docs",
    "a token": f"s3://{SECRET}@bucket/folder/docs",
    "an @ in the password": f"https://me:{SECRET}@{SECRET}@host/docs",
    "a signed URL": f"https://host/docs?X-Amz-Signature={SECRET}&X-Amz-Expires=60",
    "a SAS": f"az://box/docs?sv=2021&sig={SECRET}",
    "a fragment": f"https://host/docs#{SECRET}",
    "an unknown kind": f"ftp://me:{SECRET}@host/docs?{SECRET}",
}
OPENERS: dict[str, Callable[[str], Any]] = {  # the commands test other openers
    "is_remote": is_remote,
    "exists": IndexedDataset.exists,
    "lengths": read_document_lengths,
    "batches": lambda address: PackedDataset(address, f"{address}.samples"),
}
REMEDIES = r"environment variables|addresses begin with one of"


@pytest.mark.parametrize("opener", OPENERS)
def test_secrets_in_an_address_are_refused_and_not_printed(
    opener: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for bad in BAD.values():
        with pytest.raises(ConfigError, match=REMEDIES) as caught:
            OPENERS[opener](bad)
        assert SECRET not in str(caught.value)
    assert not list(tmp_path.iterdir())


COMMANDS = [
    ["inspect", "{bad}"],
    ["inspect", "{bad}.samples"],
    ["inspect", "{bad}.shards.json"],
    ["verify", "{bad}"],
    ["verify", "--data-prefix", "{bad}"],
    ["pack", "{bad}", "--buckets", "8"],
    ["pack", "{near}", "--buckets", "8", "--output", "{bad}.samples"],
    ["pack", "{near}", "--buckets", "8", "--output", "{bad}.shards.json"],
    ["merge", "{bad}", "--output-prefix", "out"],
    ["merge", "{near}", "--output-prefix", "{bad}"],
    ["import", "{near}.bin", "--kind", "flat", "--dtype", "uint16", "--output-prefix", "{bad}"],
    ["tokenize", "--tokenizer", "bytes", "--input", "{text}", "--output-prefix", "{bad}"],
    ["tokenize", "--tokenizer", "bytes", "--input", "{bad}", "--output-prefix", "out"],
    ["upload", "{near}", "{bad}"],
    ["upload", "{bad}", "s3://bucket/x"],
    ["compare", "{bad}", "--buckets", "8"],
    ["arrange", "{bad}.shards.json", "--output", "out.shards.json"],
    ["repair", "{bad}"],
]
# Options that accept no address have another message, or that of argparse or the system.
OTHERS = [
    ["arrange", "{bad}", "--output", "out.shards.json"],
    ["train-tokenizer", "--input", "{bad}", "--output", "t.model"],
    ["train-tokenizer", "--input", "{text}", "--output", "{bad}"],
    ["import", "{bad}.bin", "--kind", "flat", "--dtype", "uint16", "--output-prefix", "out"],
    ["tokenize", "--tokenizer", "{bad}", "--input", "{text}", "--output-prefix", "out"],
    ["compare", "--lengths", "{bad}", "--debug"],
    ["compare", "{near}", "--buckets", "8", "--html", "{bad}"],
    ["report", "{bad}"],
    ["trace", "{bad}", "--step", "1"],
    ["trace", "{text}", "{bad}"],
]


@pytest.mark.parametrize("command", COMMANDS + OTHERS, ids=" ".join)
def test_commands_print_and_write_no_secret(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_packed(tmp_path / "docs", 50)
    (tmp_path / "text.txt").write_text("some words\n")
    before = set(tmp_path.iterdir())
    for bad in BAD.values():
        names = {"bad": bad, "near": "docs", "text": "text.txt"}
        done = build(*(word.format(**names) for word in command))
        assert done.returncode and SECRET not in done.stdout + done.stderr
        assert command in OTHERS or (done.returncode == 2 and re.search(REMEDIES, done.stderr))
    assert not [path for path in set(tmp_path.iterdir()) - before if path.is_file()]


def test_a_run_prints_and_writes_no_secret(tmp_path: Path) -> None:
    bad = BAD["user and password"]
    root = Path(__file__).parents[2]
    command = [sys.executable, root / "launch/pretrain.py", "--config", "demo_cpu"]
    for word in (f"data.prefix={bad}", f"data.index={bad}.samples", f"run_dir={tmp_path}/run"):
        command += ["--set", word]
    for words, reason in (
        (command, "environment variables"),
        ([*command[:3], bad], "is neither a file nor a recipe"),
        ([*command, bad], "unrecognized arguments"),
    ):
        done = ended(*words, status=2, cwd=tmp_path)
        assert reason in done.stderr and SECRET not in done.stdout + done.stderr
    for path in tmp_path.rglob("*"):
        assert not path.is_file() or SECRET.encode() not in path.read_bytes()


def test_a_blend_with_a_secret_is_refused(tmp_path: Path) -> None:
    (tmp_path / "blend.yaml").write_text(
        json.dumps({"sources": [{"prefix": BAD["a SAS"], "index": "docs.samples"}]})
    )
    with pytest.raises(ConfigError, match=REMEDIES) as caught:
        open_blend(load_blend(tmp_path / "blend.yaml"))
    assert SECRET not in str(caught.value)


def test_special_characters_in_names_are_accepted() -> None:
    for address in ("s3://bucket/a@b/c:d", "https://host:8080/a@2x/b", "file:///a/b%20c"):
        assert is_remote(address) and redacted(address) == address
    assert not is_remote("folder/a?b#c@d")


def test_errors_of_the_client_are_printed_without_their_queries() -> None:
    text = f"GET https://u:{SECRET}@host/a?sig={SECRET}&b in 1 ms (see http://host/b#{SECRET})"
    assert redacted(text) == "GET https://...@host/a?... in 1 ms (see http://host/b#...)"


# ---- manifests -----------------------------------------------------------------------------------

FOLDER = "s3://bucket/web"
OUTSIDE = [
    *("/data/x", "../x", "a/../../x", "a/../x", "./x", "", "a//x", "%2e%2e/x", "a/..%2f..%2fx"),
    *("..\\x", "s3://bucket/x", "s3://bucket/webs/x", "s3://other/web/x", "https://host/x"),
    *("file:///etc/x", "s3://bucket/web/../x", "s3://bucket/web//x", "gs://bucket/web/x"),
    f"https://me:{SECRET}@host/x",
]


@pytest.mark.parametrize("field", ["prefix", "samples"])
def test_remote_manifest_names_only_files_below_it(line: Line, tmp_path: Path, field: str) -> None:
    """Hostile manifests are refused before any file in them is opened."""
    write_packed(tmp_path / "docs", 50)
    manifest, folder = tmp_path / "all.shards.json", folder_of(tmp_path)
    plan = plan_packing(str(manifest), [f"{tmp_path}/docs"], {"buckets": [512]})
    pack_shards(plan, lambda _: None)
    content, address = json.loads(manifest.read_text()), f"{folder}/all.shards.json"
    for name in OUTSIDE:
        content["shards"][0][field] = name.replace(FOLDER, folder)
        manifest.write_text(signed(content))
        put_object(address, manifest)
        line.counts.clear()
        with pytest.raises(FormatError, match="shard 0") as caught:
            PackedDataset(None, address)
        assert SECRET not in str(caught.value)
        assert line.counts["requests"] <= 2, "it looked for more than the manifest"


def test_local_manifest_names_absolute_paths_and_files_below_it(tmp_path: Path) -> None:
    """Local manifests may name any absolute path, but no ``..``."""
    write_packed(tmp_path / "docs", 50)
    (tmp_path / "below").mkdir()
    manifest = tmp_path / "below" / "all.shards.json"
    plan = plan_packing(str(manifest), [f"{tmp_path}/docs"], {"buckets": [512]})
    pack_shards(plan, lambda _: None)
    assert load_shards(manifest).shards[0].prefix == f"{tmp_path}/docs"
    content = json.loads(manifest.read_text())
    for name in ("../docs", "a/../../docs", f"https://me:{SECRET}@host/x"):
        content["shards"][0]["prefix"] = name
        manifest.write_text(signed(content))
        with pytest.raises(FormatError, match="shard 0") as caught:
            load_shards(manifest)
        assert SECRET not in str(caught.value)


def test_unreadable_manifest(line: Line, tmp_path: Path) -> None:
    address = put_dataset(tmp_path / "docs", 100)
    folder = folder_of(tmp_path)
    for output in (f"{folder}/below/all.shards.json", "s3://bucket/elsewhere/all.shards.json"):
        said = printed("pack", address, "--buckets", "512", "--output", output, status=2)
        assert f"{address} is not below" in said
        assert find_object(output) is None
    assert main(["pack", address, "--buckets", "512", "--output", f"{folder}/all.shards.json"]) == 0
    assert load_shards(f"{folder}/all.shards.json").shards[0].prefix == address
    # A local manifest that names another address is not uploaded.
    near = load_shards(f"{folder}/all.shards.json")
    plan = {name: getattr(near, name) for name in ("strategy", "parameters", "buckets", "seed")}
    plan["bucket_capacity"] = near.bucket_capacity.tolist()
    save_shards(tmp_path / "near.shards.json", plan, [replace(near.shards[0])])
    elsewhere = "s3://bucket/elsewhere"
    said = printed("upload", f"{tmp_path}/near.shards.json", elsewhere, status=2)
    assert f"which would not be below {elsewhere}" in said


@given(st.lists(st.text("ab./%\\2ef", max_size=6), min_size=1, max_size=4).map("/".join))
def test_is_below_agrees_with_every_path_syntax(name: str) -> None:
    """Resolve as a path, with and without percent-decoding: no result is outside the folder."""
    from posixpath import normpath  # noqa: PLC0415
    from urllib.parse import unquote  # noqa: PLC0415

    if is_below(FOLDER, f"{FOLDER}/{name}"):
        for read in (name, unquote(name), name.replace("\\", "/")):
            assert normpath(f"/x/{read}").startswith("/x/") and ".." not in read.split("/")


def test_advice_of_verify_works(line: Line, tmp_path: Path) -> None:
    """Verify another tool's dataset with a .bin longer than its .idx describes."""
    write_packed(tmp_path / "docs", 100)
    (tmp_path / "docs.meta.json").unlink()
    with (tmp_path / "docs.bin").open("ab") as file:
        file.write(bytes(7))
    address = address_of(tmp_path / "docs")
    for suffix in (".bin", ".idx"):
        put_object(f"{address}{suffix}", tmp_path / f"docs{suffix}")
    [here] = [found for found in verify(tmp_path / "docs") if found.remedy]
    [there] = [found for found in verify(address) if found.remedy]
    assert here.code == there.code == "trailing-bin"
    assert there.remedy == f"{here.remedy} on a local copy, then upload it again"
    shutil.rmtree(tmp_path / "cache", ignore_errors=True)


# ---- Objects in a store of each kind; errors of addresses, settings and credentials --------------


PART = client.PART_BYTES
NAMES = ("none", "some", "a part", "100%41+more parts")


@EVERY_STORE
def test_uploaded_object_is_read_back(
    line: Line, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Upload it empty, whole and in parts; read every range, until the object is replaced."""
    folder, data = folder_of(tmp_path), np.random.default_rng(0).bytes(2 * PART + 1)
    names, deep = NAMES, f"{folder}/below%41"
    if request.node.callspec.params["line"] == "s3 nanio":  # its signatures of names with % differ
        names, deep = (*NAMES[:-1], NAMES[-1].replace("%", "")), f"{folder}/below"
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
    put_object(f"{deep}/it", tmp_path / "some")
    assert names_in(folder) == sorted(names) and names_in(deep) == ["it"]
    for none in ("below", "som", "belowA/it"):
        assert find_object(f"{folder}/{none}") is None
    for _ in range(2):
        remove_object(f"{folder}/{names[-1]}")
        assert find_object(f"{folder}/{names[-1]}") is None
    assert names_in(folder) == sorted(names[:-1]) and names_in(f"{folder}/nowhere") == []


def put_many(folder: Path, size: int) -> tuple[RemoteObject, bytes]:
    """Upload an object of this size; return its bytes."""
    data = np.random.default_rng(0).bytes(size)
    (folder / "many").write_bytes(data)
    put_object(f"{folder_of(folder)}/many", folder / "many")
    found = find_object(f"{folder_of(folder)}/many")
    assert found is not None
    return found, data


def list_of_parts(folder: Path) -> int:
    """Return the requests other than those of the parts."""
    return int(folder_of(folder).startswith("az"))


def test_proxy_answers_expect_100_continue(line: Line) -> None:
    """boto3 sends ``Expect: 100-continue`` with a stream; 100 is not the final response."""
    short = botocore.config.Config(read_timeout=20, retries={"max_attempts": 0})
    store = boto3.client("s3", config=short)
    for size in (1, 100_000):
        store.put_object(Bucket=BUCKET, Key="stream", Body=io.BytesIO(bytes(size)))
        assert store.head_object(Bucket=BUCKET, Key="stream")["ContentLength"] == size
    assert line.counts["PUT"] == line.counts["HEAD"] == 2


@EVERY_STORE
def test_number_of_parts_is_limited(
    line: Line, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts of 5 MiB would limit an object to 48.8 GiB, and a .bin may be larger."""
    monkeypatch.setattr(client, "MAX_PARTS", 2)
    found, data = put_many(tmp_path, 3 * PART + 1)
    assert line.counts["PUT"] - list_of_parts(tmp_path) == 2
    assert found.read(0, len(data)) == data


@EVERY_STORE
def test_only_the_failed_part_is_sent_again(line: Line, tmp_path: Path) -> None:
    """A failure costs one part, not the whole upload."""
    line.faulty, line.faults = "PUT", Faults(slow_down=0.3)
    found, data = put_many(tmp_path, 8 * PART)
    failed = line.counts["slow_down"]
    assert failed > 0, "nothing failed"
    assert line.counts["PUT"] == 8 + list_of_parts(tmp_path) + failed
    line.faults = Faults()
    assert found.read(0, len(data)) == data


@EVERY_STORE
def test_missing_permission_is_an_error_at_once(
    line: Line, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Use a wrong key, which two servers detect, and no key for a private object of moto."""
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
    assert "the store refuses the request" in printed("inspect", address, status=2)


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
    """Remove all settings, an empty home, and no cloud metadata service."""
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
def test_invalid_settings_are_named(
    nothing_set: None, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    address, settings, text = SETTINGS[case]
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=rf"{text}.*; docs/guides/object_storage\.md describes"):
        IndexedDataset(address)


@pytest.mark.parametrize("scheme", ["s3", "gs", "az"])
def test_no_credentials(nothing_set: None, monkeypatch: pytest.MonkeyPatch, scheme: str) -> None:
    monkeypatch.setattr(client, "RETRY_SECONDS", 0.1)
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "me")
    address = f"{scheme}://box/no-credentials/docs"
    with pytest.raises(ConfigError, match=rf"^{address}\.[a-z]*: no credentials are set"):
        IndexedDataset(address)
