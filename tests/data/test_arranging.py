"""An arranged source has the samples of the one it was made of, in the order they are read in."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megapack.data import PackedDataset, Schedule, build_loader
from megapack.data.arrange import Arranger, arrange, plan_arrangement
from megapack.errors import ConfigError
from megapack.packing.shard_packing import pack_shards, plan_packing
from megapack.packing.sharded import load_shards
from megapack.packing.verify import verify_shard
from megapack.storage import IndexedDataset, IndexedDatasetBuilder
from megapack.storage.metadata import own_metadata
from megapack.storage.verify import has_errors, verify
from tests.data.corpora import packed_lengths, random_documents, write_documents

BUCKETS = [16, 32, 64]
STEP_TOKENS = 64 * 8


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Three datasets with documents longer than the largest bucket, one of them with labels."""
    folder = tmp_path_factory.mktemp("source")
    for seed, name in enumerate("abc"):
        documents = random_documents(packed_lengths(150, 64, seed), seed)
        write_documents(folder / name, documents)
    chosen = [[t if t % 2 else -100 for t in document] for document in documents]
    write_documents(folder / "c.labels", chosen, "int32")
    manifest = str(folder / "web.shards.json")
    plan = plan_packing(manifest, [str(folder / name) for name in "abc"], {"buckets": BUCKETS})
    pack_shards(plan, lambda _: None)
    return manifest


def arranged(source: str, output: Path, **how: Any) -> Arranger:
    options = {name: how.pop(name) for name in ("seed", "overwrite") if name in how}
    arranger = plan_arrangement(source, str(output), shard_bytes=3000, **options)
    arrange(arranger, lambda _: None, **how)
    return arranger


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    names = ("tokens", "labels", "loss_mask", "position_ids", "cu_seqlens")
    return all(torch.equal(a[name], b[name]) for name in names)


def test_samples_are_those_of_the_source_with_their_labels(source: str, tmp_path: Path) -> None:
    arranger = arranged(source, tmp_path / "new.shards.json", seed=1)
    ours, theirs = (PackedDataset(None, path) for path in (tmp_path / "new.shards.json", source))
    assert len(ours) == len(theirs) > 200 and arranger.num_shards > 3
    order = np.concatenate(
        [ids for n in range(arranger.num_shards) for _, ids in arranger._chunks(n)]
    )
    by_bucket = np.argsort(np.searchsorted(theirs.samples.indices[0].bucket_sample_offsets, order,
                                           side="right"), kind="stable")  # fmt: skip
    order = order[by_bucket]
    assert sorted(order.tolist()) == list(range(len(theirs))) != order.tolist()
    cut = 0
    for sample in range(len(ours)):
        assert same(ours[sample], theirs[int(order[sample])]), sample
        last = ours[sample]["cu_seqlens"][1] - 1
        cut += int(ours[sample]["labels"][last] != -100)
    assert cut > 5, "documents that go on in another sample are among them"


def test_the_first_epoch_reads_every_bucket_straight_through(source: str, tmp_path: Path) -> None:
    arranged(source, tmp_path / "new.shards.json")
    packed = PackedDataset(None, tmp_path / "new.shards.json")
    schedule = Schedule(packed, tokens_per_step=STEP_TOKENS, seed=3)
    offsets = packed.samples.indices[0].bucket_sample_offsets.tolist()
    read: dict[int, list[int]] = {capacity: [] for capacity in BUCKETS}
    for step in range(schedule.num_steps(2)):
        for draw in schedule.step(step).draws:
            read[draw.capacity] += draw.sample_ids.tolist()
    for b, capacity in enumerate(BUCKETS):
        size, drawn = offsets[b + 1] - offsets[b], read[capacity]
        assert drawn[:size] == list(range(offsets[b], offsets[b + 1]))
        later = drawn[size : 2 * size]
        assert sorted(later) == drawn[:size] != later, "the second epoch is a shuffle"
    shards = packed.samples.shards
    for shard in range(len(shards)):
        segments = shards.index(shard).segment_document
        assert segments.tolist() == list(range(len(segments))), "and so are its tokens"
    sample = int(schedule.step(0).sample_ids[0])
    found = schedule.steps_of(sample, schedule.num_steps(3))
    assert len(found) == 3 and all(sample in schedule.step(i).sample_ids for i in found)


def test_parts_and_a_stopped_build_write_the_same_bytes(source: str, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    arranged(source, tmp_path / "a" / "new.shards.json", seed=4)
    manifest = tmp_path / "b" / "new.shards.json"
    arranger = arranged(source, manifest, seed=4, part=(1, 2))
    assert not manifest.exists()
    (arranger.folder / "000003.samples").unlink()  # as when it was killed before its last file
    kept = (arranger.folder / "000001.bin").stat().st_mtime_ns
    arranged(source, manifest, seed=4, num_processes=2)
    assert (arranger.folder / "000001.bin").stat().st_mtime_ns == kept
    for path in sorted((tmp_path / "a").rglob("*")):
        if path.is_file():
            other = tmp_path / "b" / path.relative_to(tmp_path / "a")
            assert path.read_bytes() == other.read_bytes(), path.name
    for shard in load_shards(manifest).shards:
        assert not [f for f in verify(shard.prefix) if f.severity == "error"]


def test_what_stands_there_is_replaced_only_when_asked(source: str, tmp_path: Path) -> None:
    output = tmp_path / "new.shards.json"
    arranged(source, output)
    arranged(source, output)  # finds it
    with pytest.raises(ConfigError, match="another source"):
        arranged(source, output, seed=9)
    output.unlink()
    with pytest.raises(ConfigError, match="000000 is there already, made otherwise"):
        arranged(source, output, seed=9)
    arranged(source, output, seed=9, overwrite=True)
    index = load_shards(output)
    assert index.arranged is not None and index.arranged.seed == 9
    assert index.fingerprint.endswith("shards, arranged")
    with pytest.raises(ConfigError, match="is an arranged source: add datasets to the one"):
        plan_packing(str(output), [], {"buckets": BUCKETS})
    with pytest.raises(ConfigError, match="must be another"):
        plan_arrangement(source, source)
    with pytest.raises(ConfigError, match="use positions: segment"):
        PackedDataset(None, output, positions="document")


def test_what_stays_true_of_the_meta_files_is_kept(tmp_path: Path) -> None:
    """Of what all say alike: the tokenizer, and not where documents end or who made the files."""
    told = {"tokenizer": {"digest": "t"}, "licence": "mit", "document_end_token": 0, "plan": "p"}
    for name, more in (("a", {}), ("b", {"licence": "other"})):
        about = {"vocab_size": 300, "metadata": {**told, "command": name, **more}}
        with IndexedDatasetBuilder(tmp_path / name, np.uint16, **about) as builder:
            for _ in range(40):
                builder.add_document([*range(1, 20), 0])
    manifest = str(tmp_path / "web.shards.json")
    plan = plan_packing(manifest, [str(tmp_path / name) for name in "ab"], {"buckets": BUCKETS})
    pack_shards(plan, lambda _: None)
    arranged(manifest, tmp_path / "new.shards.json")
    index = load_shards(tmp_path / "new.shards.json")
    meta = IndexedDataset(index.shards[0].prefix).meta
    assert meta is not None and own_metadata(meta).keys() == {"tokenizer", "arranged"}
    assert meta["tokenizer"] == told["tokenizer"] and meta["vocab_size"] == 300
    assert not any(map(has_errors, verify_shard(index, 0).values()))


def test_the_command_and_a_loader_over_what_it_wrote(source: str, tmp_path: Path) -> None:
    output = tmp_path / "new.shards.json"
    command = [
        sys.executable,
        "-m",
        "megapack.cli.main",
        "arrange",
        source,
        "--output",
        str(output),
    ]
    command += ["--bytes-per-shard", "8K", "--workers", "1", "--json"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    facts = json.loads(done.stdout)
    size = command.index("8K")
    done = subprocess.run(
        [*command[:size], "0", *command[size + 1 :]], check=False, capture_output=True, text=True
    )
    assert (done.returncode, "--bytes-per-shard is 0" in done.stderr) == (2, True)
    assert facts["num_samples"] == load_shards(source).num_samples and facts["num_shards"] == 2
    packed = PackedDataset(None, output)
    schedule = Schedule(packed, tokens_per_step=STEP_TOKENS)
    loader = build_loader(
        packed, schedule, data_parallel_rank=0, data_parallel_size=1, micro_batch_tokens=128
    )
    assert (
        sum(batch["tokens"].numel() for batch in loader)
        >= IndexedDataset(load_shards(output).shards[0].prefix).num_tokens
    )
