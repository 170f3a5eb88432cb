"""Local and remote shard manifests: printed, checked file by file, uploaded as a whole."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import build, printed
from object_store import Line

from megapack.data import PackedDataset
from megapack.packing.shard_packing import pack_shards, plan_packing
from megapack.packing.sharded import load_shards
from megapack.storage import IndexedDataset
from megapack.storage.column_edits import add_column
from megapack.storage.columns import INTERPRETED
from megapack.storage.remote.client import put_object, remove_object
from tests.remote.far import flip, folder_of, signed, write_packed
from tests.remote.stores import EVERY_CLOUD

NAMES = ("a", "b", "c")
OPTIONS = {"buckets": [64, 256, 512]}


def write_source(folder: Path) -> str:
    """Write three datasets as one source, the last with labels; return the manifest."""
    for seed, name in enumerate(NAMES):
        documents = write_packed(folder / name, 150, seed)
    labels = (np.where(tokens % 2, np.int32(tokens), -100) for tokens in documents)
    add_column(folder / "c", "labels", labels, INTERPRETED["labels"])
    manifest = f"{folder}/web.shards.json"
    plan = plan_packing(manifest, [f"{folder}/{name}" for name in NAMES], OPTIONS)
    pack_shards(plan, lambda _: None)
    return manifest


def told(*command: str, status: int = 0) -> Any:
    done = build(*command, "--json")
    assert done.returncode == status, done
    return json.loads(done.stdout)


def test_inspect_prints_totals_and_shards(tmp_path: Path) -> None:
    manifest = write_source(tmp_path)
    datasets = [IndexedDataset(tmp_path / name) for name in NAMES]
    facts = told("inspect", manifest)
    assert facts["num_tokens"] == sum(dataset.num_tokens for dataset in datasets)
    of_buckets = sum(facts["samples_per_bucket"])
    assert facts["num_samples"] == of_buckets == load_shards(manifest).num_samples
    assert "shards" not in facts and facts["strategy"] == "bucket"
    shards = told("inspect", manifest, "--shards")["shards"]
    assert [shard["num_tokens"] for shard in shards] == [d.num_tokens for d in datasets]
    text = printed("inspect", manifest, "--shards")
    assert all(f"{tmp_path}/{name}" in text for name in NAMES) and "3 datasets" in text


def change_manifest(folder: Path) -> None:
    path = folder / "web.shards.json"
    content = json.loads(path.read_text())
    content["shards"][1]["longest_reach"] += 1
    path.write_text(signed(content))


def samples_of(folder: Path, number: int) -> Path:
    return Path(load_shards(folder / "web.shards.json").shards[number].samples)


def replace_samples(folder: Path) -> None:
    shutil.copy(samples_of(folder, 0), samples_of(folder, 1))


DAMAGES: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "a token": (lambda at: flip(at / "b.bin", 999), "b", "checksum of the meta file"),
    "no .bin": (lambda at: (at / "b.bin").unlink(), "b", "b.bin does not exist"),
    "a label": (lambda at: flip(at / "c.labels.col", 99), "c", "checksum"),
    "no labels": (lambda at: (at / "c.labels.col").unlink(), "c", "does not exist"),
    "no samples": (lambda at: samples_of(at, 1).unlink(), "b-", "does not exist"),
    "a sample": (lambda at: flip(samples_of(at, 0), -9), "a-", "checksum"),
    "others": (replace_samples, "b-", "do not belong together"),
    "manifest": (change_manifest, "b", "records longest_reach"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_verify_names_the_damaged_file(tmp_path: Path, damage: str) -> None:
    manifest = write_source(tmp_path)
    sound = told("verify", manifest)
    assert sum(name != manifest for name in sound) == 6, "datasets and samples"
    do, name, text = DAMAGES[damage]
    do(tmp_path)
    found = told("verify", manifest, status=1)
    bad = {at: [f["message"] for f in of if f["severity"] == "error"] for at, of in found.items()}
    bad = {at: messages for at, messages in bad.items() if messages}
    assert manifest in bad and "1 of 3 datasets" in bad[manifest][0]
    [(at, messages)] = [(at, messages) for at, messages in bad.items() if at != manifest]
    assert Path(at).name.startswith(name) and text in messages[0], (at, messages)
    out = build("verify", manifest).stdout
    state = "MISSING" if damage in ("no .bin", "no samples") else "DAMAGED"
    assert f"{at}: {state}" in out and out.count(": sound") == 0


@EVERY_CLOUD
def test_source_is_uploaded(line: Line, tmp_path: Path) -> None:
    manifest, folder = write_source(tmp_path), folder_of(tmp_path)
    printed("upload", manifest, folder)
    near, far = PackedDataset(None, manifest), PackedDataset(None, f"{folder}/web.shards.json")
    assert far.remote_reads.any and len(near) == len(far) > 150
    for i in range(0, len(near), 17):
        for name in ("tokens", "labels"):
            assert far[i][name].tolist() == near[i][name].tolist()
    facts = told("inspect", f"{folder}/web.shards.json")
    assert facts["fingerprint"] == load_shards(manifest).fingerprint
    before = sorted((tmp_path / "cache").iterdir())
    found = told("verify", f"{folder}/web.shards.json").values()
    assert {finding["severity"] for findings in found for finding in findings} <= {"note"}
    assert sorted((tmp_path / "cache").iterdir()) == before, "whole copies go when they were read"
    flip(tmp_path / "b.bin", 999)
    put_object(f"{folder}/b.bin", tmp_path / "b.bin")
    remove_object(f"{folder}/c.labels.col")
    found = told("verify", f"{folder}/web.shards.json", status=1)
    assert "b.bin" in found[f"{folder}/b"][0]["message"]
    assert "c.labels.col does not exist" in found[f"{folder}/c"][0]["message"]


def test_shards_at_other_addresses_are_refused(line: Line, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "here").mkdir()
    write_packed(tmp_path / "there" / "a", 50)
    manifest = f"{tmp_path}/here/web.shards.json"
    pack_shards(plan_packing(manifest, [f"{tmp_path}/there/a"], OPTIONS), lambda _: None)
    before = line.counts["PUT"]
    said = printed("upload", manifest, f"s3://bucket/{tmp_path.name}", status=2)
    assert "which would not be below" in said
    assert line.counts["PUT"] == before


def test_remote_datasets_are_packed_as_one_source(line: Line, tmp_path: Path) -> None:
    """The manifest equals that of the same local datasets, except for the addresses."""
    near = write_source(tmp_path)
    folder = f"s3://bucket/{tmp_path.name}"
    for name in NAMES:
        printed("upload", tmp_path / name, folder)
    (tmp_path / "far").mkdir()
    far = f"{tmp_path}/far/web.shards.json"
    command = ["pack", *(f"{folder}/{name}" for name in NAMES), "--buckets", "64,256,512"]
    printed(*command, "--output", far, "--workers", "1")
    assert load_shards(far).fingerprint == load_shards(near).fingerprint
    assert [[*shard.columns] for shard in load_shards(far).shards] == [[], [], ["labels"]]
    ours, theirs = PackedDataset(None, far), PackedDataset(None, near)
    for i in range(0, len(theirs), 29):
        assert ours[i]["labels"].tolist() == theirs[i]["labels"].tolist()
    printed(*command, "--output", far, "--workers", "1")  # unchanged
