"""Many datasets packed as one source: reproducible, and changed files are detected."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from packing_inputs import same_arrays

from megapack.cli.main import main
from megapack.errors import ConfigError, FormatError, IndexMismatchError
from megapack.packing import STRATEGIES, SampleIndex, pack
from megapack.packing.shard_packing import pack_shards, plan_packing
from megapack.packing.sharded import (
    ShardedIndex,
    load_index,
    load_shards,
)
from megapack.storage import IndexedDataset, IndexedDatasetBuilder

OPTIONS = {"strategy": "bucket", "buckets": [16, 32, 64], "seed": 3}
NUM_SHARDS = 5


def write(prefix: Path, seed: int, **how: Any) -> str:
    prefix.parent.mkdir(exist_ok=True)
    lengths = np.random.default_rng(seed).integers(0, 90, 40 + 10 * seed)
    metadata = {"document_end_token": 0}
    with IndexedDatasetBuilder(
        prefix, dtype=np.uint16, vocab_size=300, metadata=metadata, **how
    ) as builder:
        for length in lengths:
            builder.add_document(np.r_[np.full(max(0, length - 1), 100 + seed), [0]][:length])
    return str(prefix)


@pytest.fixture
def prefixes(tmp_path: Path) -> list[str]:
    return [write(tmp_path / f"web{i % 2}" / f"part{i}", i) for i in range(NUM_SHARDS)]


def packed(manifest: Path, prefixes: list[str], **how: Any) -> ShardedIndex:
    options = {**OPTIONS, **how.pop("options", {})}
    overwrite = how.get("overwrite", False)
    plan = plan_packing(str(manifest), prefixes, options, overwrite=overwrite)
    pack_shards(plan, lambda _: None, **how)
    return load_shards(manifest)


def files(manifest: Path) -> dict[str, bytes]:
    folder = manifest.with_name(manifest.name.removesuffix(".json"))
    found = {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
    return {**found, "manifest": manifest.read_bytes()}


def test_manifest_agrees_with_files(tmp_path: Path, prefixes: list[str]) -> None:
    index = packed(tmp_path / "web.shards.json", prefixes)
    assert len(index.shards) == NUM_SHARDS
    for number, (prefix, shard) in enumerate(zip(prefixes, index.shards, strict=True)):
        dataset, own = IndexedDataset(prefix), index.open(number)
        assert same_arrays(own, pack(dataset.document_lengths, **OPTIONS))
        own.check_source(dataset)
        for name in ("num_documents", "num_tokens", "fingerprint"):
            assert getattr(shard, name) == getattr(dataset, name)
        assert (shard.vocab_size, shard.document_end_token, shard.columns) == (300, 0, {})
        assert shard.max_token_id == dataset.meta["max_token_id"] and shard.dtype == "uint16"
    assert index.num_documents == sum(s.num_documents for s in index.shards)
    opened = [index.open(number) for number in range(NUM_SHARDS)]
    assert index.num_samples == sum(own.num_samples for own in opened) > 100
    assert index.most_segments == np.max([own.most_segments for own in opened], axis=0).tolist()
    assert index.longest_segment == max(own.longest_segment for own in opened)
    assert index.longest_reach == max(own.longest_reach for own in opened) > index.longest_segment


def test_runs_number_every_sample_once(tmp_path: Path, prefixes: list[str]) -> None:
    """By bucket, then by shard."""
    index = packed(tmp_path / "web.shards.json", prefixes)
    first, shard, begin = index.runs
    runs = zip(shard.tolist(), begin.tolist(), np.diff(first).tolist(), strict=True)
    numbered = [(s, b + i) for s, b, size in runs for i in range(size)]
    expected: list[tuple[int, int]] = []
    for bucket, shard in np.ndindex(len(index.bucket_capacity), NUM_SHARDS):
        begin, end = index.open(shard).bucket_sample_offsets[bucket : bucket + 2].tolist()
        expected += [(shard, sample) for sample in range(begin, end)]
    assert numbered == expected and len(expected) == index.num_samples


def test_parts_and_killed_runs_write_the_same_files(tmp_path: Path, prefixes: list[str]) -> None:
    alone, manifest = (tmp_path / name / "web.shards.json" for name in ("alone", "together"))
    alone.parent.mkdir()
    manifest.parent.mkdir()
    packed(alone, prefixes)
    plan = plan_packing(str(manifest), prefixes, OPTIONS)
    done = pack_shards(plan, lambda _: None, part=(1, 2))
    assert len(done) == NUM_SHARDS // 2 and not manifest.exists()
    kept = {path: path.stat().st_mtime_ns for path in manifest.with_name("web.shards").iterdir()}
    packed(manifest, prefixes, workers=2)
    assert {path: path.stat().st_mtime_ns for path in kept} == kept, "what was there stays"
    assert files(manifest) == files(alone)


def test_added_dataset_is_packed_alone_and_last(tmp_path: Path, prefixes: list[str]) -> None:
    manifest = tmp_path / "web.shards.json"
    before = packed(manifest, prefixes)
    kept = {path: path.stat().st_mtime_ns for path in manifest.with_name("web.shards").iterdir()}
    later = write(tmp_path / "a_name_that_sorts_first", 9)
    after = packed(manifest, [later, *prefixes])
    assert [s.prefix for s in after.shards[:-1]] == [s.prefix for s in before.shards]
    assert after.shards[:-1] == before.shards and after.shards[-1].prefix == later
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    assert packed(manifest, []).shards == after.shards, "those that it has need not be named"
    assert load_shards(manifest, [0, NUM_SHARDS]).fingerprint == before.fingerprint
    assert after.fingerprint != before.fingerprint and "of 6 shards" in after.fingerprint
    [added] = load_shards(manifest, [NUM_SHARDS, NUM_SHARDS + 1]).shards
    assert added.prefix == later
    with pytest.raises(ConfigError, match=r"shards is \[3, 9\); .* has 6 shards"):
        load_shards(manifest, [3, 9])


def test_duplicate_dataset_is_refused_with_remedy(
    tmp_path: Path, prefixes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for again in (prefixes[1], os.path.relpath(prefixes[1]), f"{tmp_path}/./web1/part1"):
        with pytest.raises(ConfigError, match=r"web1/part1 is given more than once; .* weight"):
            packed(tmp_path / "web.shards.json", [*prefixes, again])
    manifest = tmp_path / "web.shards.json"
    command = ["pack", *prefixes, f"{prefixes[1]}.idx", "--output", str(manifest)]
    assert main([*command, "--buckets", "64"]) == 2
    assert not manifest.exists()


def test_changed_file_is_refused_by_name(tmp_path: Path, prefixes: list[str]) -> None:
    manifest = tmp_path / "web.shards.json"
    index = packed(manifest, prefixes)
    written = manifest.read_bytes()
    write(tmp_path / "web1" / "part1", 7, overwrite=True)
    with pytest.raises(IndexMismatchError, match=r"part1\.idx has changed since .*shards\.json"):
        packed(manifest, prefixes)
    assert manifest.read_bytes() == written
    new = packed(manifest, prefixes, overwrite=True)
    assert new.shards[1] != index.shards[1] and new.shards[2] == index.shards[2]
    other = SampleIndex.load(new.shards[2].samples)
    other.save(new.shards[3].samples, overwrite=True)
    with pytest.raises(IndexMismatchError, match=r"part3-.*samples has changed"):
        packed(manifest, prefixes)
    with pytest.raises(IndexMismatchError, match=r"part3-.*samples holds other samples than"):
        new.open(3)


def test_other_options_are_refused(tmp_path: Path, prefixes: list[str]) -> None:
    manifest = tmp_path / "web.shards.json"
    packed(manifest, prefixes)
    with pytest.raises(
        ConfigError, match="packed with other values of seed: give the same options"
    ):
        packed(manifest, prefixes, options={"seed": 4})
    with pytest.raises(
        ConfigError, match="other values of parameters and buckets and bucket_capacity"
    ):
        packed(manifest, prefixes, options={"buckets": [16], "alignment": 4})
    manifest.unlink()  # a run stopped before it wrote the manifest, then other options
    with pytest.raises(ConfigError, match=r"part0-.* exists already: it was packed with another"):
        packed(manifest, prefixes, options={"seed": 4})
    assert packed(manifest, prefixes, options={"seed": 4}, overwrite=True).seed == 4
    with pytest.raises(ConfigError, match=r"NAME\.shards\.json"):
        packed(tmp_path / "web.json", prefixes)
    with pytest.raises(ConfigError, match="no datasets"):
        packed(tmp_path / "none.shards.json", [])


def test_folder_moves_with_its_manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    prefix = write(Path("here") / "docs", 2)
    packed(Path("here") / "web.shards.json", [prefix])
    index = packed(Path("here") / "web.shards.json", [str(tmp_path / "here" / "docs")])
    assert len(index.shards) == 1, "two ways to write one prefix are one shard"
    carried = pickle.dumps(index)
    shutil.move("here", "there")
    moved = load_shards(Path("there") / "web.shards.json")
    assert moved.open(0).num_samples == index.num_samples
    monkeypatch.chdir("there")
    shutil.move(tmp_path / "there", tmp_path / "here")
    assert pickle.loads(carried).open(0).num_samples == index.num_samples, "from any directory"


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_buckets_do_not_depend_on_documents(strategy: str) -> None:
    """So all shards have the same buckets."""
    many = STRATEGIES[strategy].many_buckets
    options: dict[str, Any] = {"strategy": strategy, "buckets": [16, 64] if many else [64]}
    lengths = np.arange(1, 80)
    made = [pack(own, **options) for own in (np.zeros(0, np.int32), lengths[:3], lengths)]
    assert len({tuple(index.bucket_capacity) for index in made}) == 1


def test_a_damaged_manifest_is_refused(tmp_path: Path, prefixes: list[str]) -> None:
    manifest = tmp_path / "web.shards.json"
    packed(manifest, prefixes)
    sound = json.loads(manifest.read_text())

    def damaged(change: Any, *, hidden: bool = True) -> str:
        """Return the error for changed content; ``hidden``: with a matching checksum."""
        content = json.loads(json.dumps(sound))
        change(content)
        digest = content.pop("xxh3")
        if hidden:
            digest = xxhash.xxh3_64_hexdigest(json.dumps(content).encode())
        manifest.write_text(json.dumps({**content, "xxh3": digest}))
        with pytest.raises(FormatError) as caught:
            load_index(manifest)
        return str(caught.value)

    old = "has version 1; this megapack reads 4: pack again, megapack-build pack PREFIX"
    for change, message in (
        (lambda c: c.update(format="other"), "not a shard manifest"),
        (lambda c: c.update(version=1), old),
        (lambda c: c.pop("seed"), "has no shards or no packing options"),
        (lambda c: c.update(shards=[]), "has no shards or no packing options"),
        (lambda c: c["shards"][1].update(num_documents=-1), "shard 1 says num_documents is -1"),
        (lambda c: c["shards"][0].update(samples_per_bucket=[1]), "has 1 of 3 samples_per_bucket"),
        *(
            (lambda c, n=name: c["shards"][2].pop(n), f"shard 2 has no {name}")
            for name in sound["shards"][2]
        ),
    ):
        assert message in damaged(change)
    for change in (
        lambda c: c["shards"][1].update(labels=True),
        lambda c: c["shards"][0].update(longest_segment=1),
        lambda c: c["shards"].pop(),
        lambda c: c.update(seed=2),
        lambda c: c.update(xxh3="0" * 16),
    ):
        assert "its checksum is wrong; restore it" in damaged(change, hidden=False)
    manifest.write_text(json.dumps(sound, indent=1))  # changed content is refused, too
    assert len(load_shards(manifest).shards) == NUM_SHARDS
    manifest.write_text(json.dumps(sound)[:-30])
    with pytest.raises(FormatError, match="not valid JSON"):
        load_index(manifest)
