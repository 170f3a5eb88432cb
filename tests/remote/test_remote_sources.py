"""Shard manifests, here and at an address: told, checked file by file, uploaded in one piece."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import printed
from object_store import Line

from megapack.cli.main import main
from megapack.data import PackedDataset
from megapack.packing.shard_packing import pack_shards, plan_packing
from megapack.packing.sharded import load_shards
from megapack.storage import IndexedDataset, IndexedDatasetBuilder
from megapack.storage.remote.client import put_object, remove_object
from tests.remote.far import flip, folder_of, signed, write_packed
from tests.remote.stores import EVERY_CLOUD

NAMES = ("a", "b", "c")
OPTIONS = {"buckets": [64, 256, 512]}


def write_source(folder: Path) -> str:
    """Three datasets as one source, the last of them with labels; the manifest."""
    for seed, name in enumerate(NAMES):
        documents = write_packed(folder / name, 150, seed)
    with IndexedDatasetBuilder(folder / "c.labels", dtype=np.int32, allow_negative=True) as builder:
        for document in documents:
            builder.add_document(np.where(document % 2, document, -100))
    manifest = f"{folder}/web.shards.json"
    plan = plan_packing(manifest, [f"{folder}/{name}" for name in NAMES], OPTIONS)
    pack_shards(plan, lambda _: None)
    return manifest


def told(capsys: pytest.CaptureFixture[str], *command: str, status: int = 0) -> Any:
    capsys.readouterr()
    assert main([*command, "--json"]) == status
    return json.loads(capsys.readouterr().out)


def test_inspect_tells_sums_and_shards(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = write_source(tmp_path)
    datasets = [IndexedDataset(tmp_path / name) for name in NAMES]
    facts = told(capsys, "inspect", manifest)
    assert facts["num_tokens"] == sum(dataset.num_tokens for dataset in datasets)
    assert (
        facts["num_samples"]
        == sum(facts["samples_per_bucket"])
        == load_shards(manifest).num_samples
    )
    assert "shards" not in facts and facts["strategy"] == "bucket"
    shards = told(capsys, "inspect", manifest, "--shards")["shards"]
    assert [shard["num_tokens"] for shard in shards] == [d.num_tokens for d in datasets]
    text = printed("inspect", manifest, "--shards")
    assert all(f"{tmp_path}/{name}" in text for name in NAMES) and "3 datasets" in text


def change_manifest(folder: Path) -> None:
    path = folder / "web.shards.json"
    content = json.loads(path.read_text())
    content["shards"][1]["longest_reach"] += 1
    path.write_text(signed(content))


def replace_samples(folder: Path) -> None:
    shards = load_shards(folder / "web.shards.json").shards
    Path(shards[1].samples).write_bytes(Path(shards[0].samples).read_bytes())


def samples_of(folder: Path, number: int) -> Path:
    return Path(load_shards(folder / "web.shards.json").shards[number].samples)


DAMAGES: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "a token": (lambda folder: flip(folder / "b.bin", 999), "b", "checksum of the meta file"),
    "no .bin": (lambda folder: (folder / "b.bin").unlink(), "b", "b.bin does not exist"),
    "a label": (lambda folder: flip(folder / "c.labels.bin", 99), "c.labels", "checksum"),
    "no labels": (lambda folder: (folder / "c.labels.idx").unlink(), "c.labels", "does not exist"),
    "no samples": (lambda folder: samples_of(folder, 1).unlink(), "b-", "does not exist"),
    "a sample": (lambda folder: flip(samples_of(folder, 0), -9), "a-", "checksum"),
    "others": (replace_samples, "b-", "pack it again"),
    "manifest": (change_manifest, "b", "says longest_reach"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_verify_names_file(tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: str) -> None:
    manifest = write_source(tmp_path)
    sound = told(capsys, "verify", manifest)
    assert sum(name != manifest for name in sound) == 7, "datasets, labels and samples"
    do, name, text = DAMAGES[damage]
    do(tmp_path)
    found = told(capsys, "verify", manifest, status=1)
    bad = {at: [f["message"] for f in of if f["severity"] == "error"] for at, of in found.items()}
    bad = {at: messages for at, messages in bad.items() if messages}
    assert manifest in bad and "1 of 3 datasets" in bad[manifest][0]
    [(at, messages)] = [(at, messages) for at, messages in bad.items() if at != manifest]
    assert Path(at).name.startswith(name) and text in messages[0], (at, messages)
    assert main(["verify", manifest]) == 1
    out = capsys.readouterr().out
    assert f"{at}: DAMAGED" in out and out.count(": sound") == 0


@EVERY_CLOUD
def test_source_is_uploaded(line: Line, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest, folder = write_source(tmp_path), folder_of(tmp_path)
    assert main(["upload", manifest, folder]) == 0
    near, far = PackedDataset(None, manifest), PackedDataset(None, f"{folder}/web.shards.json")
    assert far.remote_reads.any and len(near) == len(far) > 150
    for i in range(0, len(near), 17):
        for name in ("tokens", "labels"):
            assert far[i][name].tolist() == near[i][name].tolist()
    facts = told(capsys, "inspect", f"{folder}/web.shards.json")
    assert facts["fingerprint"] == load_shards(manifest).fingerprint
    before = sorted(path.name for path in (tmp_path / "cache").iterdir())
    assert not [f for of in told(capsys, "verify", f"{folder}/web.shards.json").values()
                for f in of if f["severity"] != "note"]  # fmt: skip
    after = sorted(path.name for path in (tmp_path / "cache").iterdir())
    assert after == before, "whole copies go when they were read"
    flip(tmp_path / "b.bin", 999)
    put_object(f"{folder}/b.bin", tmp_path / "b.bin")
    remove_object(f"{folder}/c.labels.bin")
    found = told(capsys, "verify", f"{folder}/web.shards.json", status=1)
    assert "b.bin" in found[f"{folder}/b"][0]["message"]
    assert "c.labels.bin does not exist" in found[f"{folder}/c.labels"][0]["message"]


def test_elsewhere_refused(line: Line, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "here").mkdir()
    write_packed(tmp_path / "there" / "a", 50)
    manifest = f"{tmp_path}/here/web.shards.json"
    pack_shards(plan_packing(manifest, [f"{tmp_path}/there/a"], OPTIONS), lambda _: None)
    before = line.counts["PUT"]
    assert "which would not be below" in printed(
        "upload", manifest, f"s3://bucket/{tmp_path.name}", status=2
    )
    assert line.counts["PUT"] == before


def test_datasets_at_addresses_are_packed_as_one_source(line: Line, tmp_path: Path) -> None:
    """As the same datasets here: the manifests differ in nothing but the addresses."""
    near = write_source(tmp_path)
    folder = f"s3://bucket/{tmp_path.name}"
    for name in NAMES:
        assert main(["upload", f"{tmp_path}/{name}", folder]) == 0
    (tmp_path / "far").mkdir()
    far = f"{tmp_path}/far/web.shards.json"
    command = ["pack", *(f"{folder}/{name}" for name in NAMES), "--buckets", "64,256,512"]
    assert main([*command, "--output", far, "--workers", "1"]) == 0
    assert load_shards(far).fingerprint == load_shards(near).fingerprint
    assert [shard.labels for shard in load_shards(far).shards] == [False, False, True]
    ours, theirs = PackedDataset(None, far), PackedDataset(None, near)
    for i in range(0, len(theirs), 29):
        assert ours[i]["labels"].tolist() == theirs[i]["labels"].tolist()
    assert main([*command, "--output", far, "--workers", "1"]) == 0, "they have not changed"
