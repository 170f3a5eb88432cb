"""Batches with columns of an object store equal those of the local files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from object_store import Line

from megapack.cli.main import main
from megapack.data import PackedDataset, Schedule, build_loader
from megapack.data.arrange import arrange, plan_arrangement
from megapack.errors import FormatError, IndexMismatchError
from megapack.packing import pack
from megapack.packing.sharded import load_shards
from megapack.storage import IndexedDataset, IndexedDatasetBuilder
from megapack.storage.columns import ColumnSpec
from megapack.storage.remote import cache as remote_cache
from megapack.storage.remote.client import put_object
from megapack.storage.remote.copies import upload_dataset
from tests.data.corpora import packed_lengths, packed_shards
from tests.remote.far import address_of, flip, folder_of

SPECS = {
    "advantages": ColumnSpec(dtype="float32", of="target", fill=-1),
    "experts": ColumnSpec(dtype="uint8", shape=(3,), fill=255),
    "logits": ColumnSpec(dtype="bfloat16", shape=(7, 3), of="target"),
    "wide": ColumnSpec(dtype="int16", shape=(2048,), fill=-5),  # 4 KiB
    "widest": ColumnSpec(dtype="int64", shape=(64, 128), of="target"),  # 64 KiB
}
NARROW = ["advantages", "experts", "logits"]
MICRO_BATCH = 64


def write_packed(prefix: Path, names: list[str], num_documents: int = 60, seed: int = 0) -> None:
    """Write documents of random tokens with random columns, and PREFIX.samples."""
    rng = np.random.default_rng(seed)
    lengths = packed_lengths(num_documents, 40, seed)
    num_tokens = int(lengths.sum())
    rows = {
        name: rng.integers(0, 120, (num_tokens, *SPECS[name].shape)).astype(SPECS[name].numpy_dtype)
        for name in names
    }
    specs = {name: SPECS[name] for name in names}
    with IndexedDatasetBuilder(prefix, np.uint16, columns=specs) as builder:
        tokens = rng.integers(1, 9000, num_tokens, np.uint16)
        builder.add_documents(tokens, np.cumsum([0, *lengths]), columns=rows)
    documents = IndexedDataset(prefix)
    index = pack(documents.document_lengths, "bucket", buckets=[16, 32])
    index.save(f"{prefix}.samples", source=documents)


def put(prefix: Path) -> str:
    address = address_of(prefix)
    upload_dataset(str(prefix), address)
    put_object(f"{address}.samples", f"{prefix}.samples")
    return address


def batches(prefixes: Any, indices: Any, names: Any, **options: Any) -> list[dict[str, bytes]]:
    """Return all tensors of an epoch."""
    data = PackedDataset(prefixes, indices, columns=names)
    schedule = Schedule(data, tokens_per_step=2 * MICRO_BATCH, seed=3)
    options = {"data_parallel_rank": 0, "data_parallel_size": 1, **options}
    loader = build_loader(data, schedule, micro_batch_tokens=MICRO_BATCH, **options)
    keys = ("tokens", "labels", "loss_mask", *names)
    return [
        {name: batch[name].contiguous().view(torch.uint8).numpy().tobytes() for name in keys}
        for batch in loader
    ]


@pytest.mark.parametrize("prefetch", [0, 2])
def test_batches_with_columns_are_equal(line: Line, tmp_path: Path, prefetch: int) -> None:
    write_packed(tmp_path / "docs", list(SPECS))
    address = put(tmp_path / "docs")
    expected = batches(str(tmp_path / "docs"), f"{tmp_path}/docs.samples", list(SPECS))
    assert len(expected) > 10
    far = (address, f"{address}.samples", list(SPECS))
    assert batches(*far, prefetch=prefetch) == expected
    line.counts.clear()
    assert batches(*far, prefetch=prefetch) == expected
    assert line.counts["GET"] == 0, "the cache was not used"


def test_columns_that_no_batch_carries_are_not_fetched(line: Line, tmp_path: Path) -> None:
    write_packed(tmp_path / "docs", list(SPECS))
    address = put(tmp_path / "docs")
    carried = batches(address, f"{address}.samples", ["experts"])
    assert carried == batches(f"{tmp_path}/docs", f"{tmp_path}/docs.samples", ["experts"])
    fetched = {path.parent.name.rsplit(".", 1)[0] for path in tmp_path.glob("cache/*/*/[0-9]*")}
    assert fetched == {"docs.bin", "docs.experts.col"}


def test_prefetch_covers_columns(line: Line, tmp_path: Path) -> None:
    """After a prefetch of samples, a gather of their columns makes no request."""
    write_packed(tmp_path / "docs", list(SPECS))
    address = put(tmp_path / "docs")
    data = PackedDataset(address, f"{address}.samples", columns=list(SPECS))
    ids = np.arange(4)
    num_bytes = data.remote_reads.prefetch(ids)
    row_bytes = sum(spec.row_bytes for spec in SPECS.values())
    num_tokens = int((data.micro_batch(ids, capacity=16)["labels"] != -100).sum())
    assert num_bytes >= num_tokens * row_bytes, "for the loader's limit"
    assert data.remote_reads.are_local(ids)
    line.counts.clear()
    data.micro_batch(ids, capacity=16)
    assert line.counts["requests"] == 0


def test_blend_of_local_and_remote_columns(line: Line, tmp_path: Path) -> None:
    write_packed(tmp_path / "a", NARROW, seed=1)
    write_packed(tmp_path / "b", ["experts"], seed=2)
    columns = {"advantages": "fill", "experts": "require"}
    prefixes = [str(tmp_path / name) for name in "ab"]
    expected = batches(prefixes, [f"{p}.samples" for p in prefixes], columns)
    for far in ([0], [1], [0, 1]):
        mixed = [put(Path(p)) if i in far else p for i, p in enumerate(prefixes)]
        assert batches(mixed, [f"{p}.samples" for p in mixed], columns) == expected


def test_shards_with_columns_are_packed_uploaded_and_arranged(line: Line, tmp_path: Path) -> None:
    """A manifest at an address equals the local one, packed there or uploaded, and so does the
    arranged source of each."""
    folder = tmp_path / f"{tmp_path.name}-web"
    folder.mkdir()
    for seed, name in enumerate("abc"):
        write_packed(folder / name, NARROW if name != "b" else ["experts"], seed=seed)
    local = folder / "web.shards.json"
    index = packed_shards(local, [folder / name for name in "abc"], buckets=[16, 32])
    columns = dict.fromkeys(NARROW, "fill")
    expected = batches(None, str(local), columns)
    main(["upload", str(local), folder_of(folder)])
    uploaded = f"{folder_of(folder)}/web.shards.json"
    assert load_shards(uploaded).columns == index.columns
    assert batches(None, uploaded, columns) == expected
    packed = f"{folder_of(folder)}/again.shards.json"
    prefixes = [f"{folder_of(folder)}/{name}" for name in "abc"]
    # One process: a fork server of an earlier test does not have this test's credentials.
    main(["pack", *prefixes, "--buckets", "16,32", "--output", packed, "--workers", "1"])
    assert load_shards(packed).shards[1].columns == index.shards[1].columns
    assert batches(None, packed, columns) == expected
    outputs = []
    for name, source in (("near", str(local)), ("far", uploaded)):
        arranger = plan_arrangement(source, str(tmp_path / f"{name}.shards.json"), seed=1)
        arrange(arranger, lambda _: None)
        outputs.append(tmp_path / f"{name}.shards")
    files = sorted(outputs[0].iterdir())
    assert sum(path.suffix == ".col" for path in files) == 3
    for path in files:
        assert path.read_bytes() == (outputs[1] / path.name).read_bytes(), path.name
    loaded = load_shards(tmp_path / "far.shards.json")
    assert loaded.columns == index.columns
    assert len(batches(None, str(loaded.path), columns)) == len(expected)


def test_replaced_column_of_a_remote_shard_is_refused(line: Line, tmp_path: Path) -> None:
    folder = tmp_path / f"{tmp_path.name}-web"
    folder.mkdir()
    write_packed(folder / "a", ["experts"])
    packed_shards(folder / "web.shards.json", [folder / "a"], buckets=[16, 32])
    main(["upload", str(folder / "web.shards.json"), folder_of(folder)])
    other = tmp_path / "other"
    other.mkdir()
    write_packed(other / "a", ["advantages", "experts"])  # other experts
    upload_dataset(str(other / "a"), f"{folder_of(folder)}/a")
    data = PackedDataset(None, f"{folder_of(folder)}/web.shards.json", columns=["experts"])
    with pytest.raises(IndexMismatchError, match=r"column experts of .*/a has changed since"):
        data[0]


def test_damaged_column_ends_the_run(
    line: Line, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEGAPACK_RETRY_SECONDS", "1")
    write_packed(tmp_path / "docs", ["wide"])
    address = put(tmp_path / "docs")
    flip(tmp_path / "docs.wide.col", 100_000)
    put_object(f"{address}.wide.col", tmp_path / "docs.wide.col")
    with pytest.raises(FormatError, match=r"docs\.wide\.col.*bytes \[98304, 114688\) differ"):
        batches(address, f"{address}.samples", ["wide"])


@pytest.mark.parametrize("names", [NARROW, ["wide", "widest"]])
def test_batches_of_a_tiny_cache_are_equal(
    line: Line, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: list[str]
) -> None:
    """Also if a micro batch has more bytes than the cache: 64 rows of 64 KiB."""
    monkeypatch.setattr(remote_cache, "SMALLEST_SIZE", 1)
    monkeypatch.setattr(remote_cache, "CHUNK_BLOCKS", 4)
    write_packed(tmp_path / "docs", names, 300 if names == NARROW else 15)
    address = put(tmp_path / "docs")
    num_bytes = sum(path.stat().st_size for path in tmp_path.glob("docs.*.col"))
    limit = num_bytes // 4 if names == NARROW else 2 << 20
    monkeypatch.setenv("MEGAPACK_CACHE_SIZE", str(limit))
    expected = batches(str(tmp_path / "docs"), f"{tmp_path}/docs.samples", names)
    line.counts.clear()
    assert batches(address, f"{address}.samples", names) == expected
    assert line.counts["bytes"] > num_bytes, "nothing was evicted: the test showed nothing"


def test_memory_is_freed_after_each_batch(line: Line, tmp_path: Path) -> None:
    """Only the blocks of the batch that is gathered are in memory; freed pages are 0."""
    write_packed(tmp_path / "docs", list(SPECS), 20)
    address = put(tmp_path / "docs")
    data = PackedDataset(address, f"{address}.samples", columns=list(SPECS))
    columns = data.documents(0).columns.values()
    loader = build_loader(
        data,
        Schedule(data, tokens_per_step=MICRO_BATCH),
        micro_batch_tokens=MICRO_BATCH,
        data_parallel_rank=0,
        data_parallel_size=1,
        prefetch=0,
    )
    num_batches = 0
    for batch in loader:
        num_batches += 1
        assert batch["widest"].any() and not any(column.mapped_bytes.any() for column in columns)
    assert num_batches > 1
