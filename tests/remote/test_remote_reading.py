"""A dataset in an object store equals the same dataset on a disk, through every interface."""

from __future__ import annotations

import json
import logging
import pickle
from concurrent.futures import wait
from pathlib import Path

import numpy as np
import pytest
from object_store import Line
from programs import PYTHON, ended

from megapack.data import PackedDataset, Schedule, build_loader, load_blend, open_blend
from megapack.errors import ConfigError
from megapack.packing import SampleIndex, pack
from megapack.storage import IndexedDataset, read_document_lengths
from megapack.storage.column_edits import add_column
from megapack.storage.columns import INTERPRETED
from megapack.storage.remote.checksums import BLOCK_BYTES, SUFFIX
from megapack.storage.remote.client import remove_object
from megapack.storage.remote.copies import upload_dataset
from megapack.storage.remote.reader import RemoteRows, blocks_of
from tests.remote.far import address_of, folder_of, put_dataset, run
from tests.remote.stores import EVERY_CLOUD, EVERY_STORE


@EVERY_STORE
def test_documents_are_equal(line: Line, tmp_path: Path) -> None:
    address = put_dataset(tmp_path / "docs")
    near, far = IndexedDataset(tmp_path / "docs"), IndexedDataset(address)
    assert len(far) == len(near) == 2000 and far.dtype == near.dtype
    assert far.fingerprint == near.fingerprint and far.meta == near.meta
    assert far.num_tokens == near.num_tokens
    for i in (0, 700, -1):
        assert far[i].tolist() == near[i].tolist()
    assert [row.tolist() for row in far[3:9]] == [row.tolist() for row in near[3:9]]
    assert far.get(5, 1, 2).tolist() == near.get(5, 1, 2).tolist()
    assert far.tokens[-7:].tolist() == near.tokens[-7:].tolist()
    assert far.tokens[11] == near.tokens[11]
    assert np.asarray(far.tokens).tolist() == near.tokens.tolist()
    again = pickle.loads(pickle.dumps(far))
    assert again.prefix == address and again[42].tolist() == near[42].tolist()
    assert IndexedDataset.exists(address) and not IndexedDataset.exists(f"{address}2")


@EVERY_CLOUD
def test_batches_are_equal(line: Line, tmp_path: Path) -> None:
    address = put_dataset(tmp_path / "docs")
    expected = run(tmp_path / "docs")
    assert len(expected) > 100
    assert run(address) == expected
    line.counts.clear()
    assert run(address) == expected
    assert line.counts["HEAD"] > 0 == line.counts["GET"], "the cache was not used"


def test_blend_may_be_local_and_remote(line: Line, tmp_path: Path) -> None:
    put_dataset(tmp_path / "here", seed=1)
    address = put_dataset(tmp_path / "there", seed=2)
    expected = run([tmp_path / "here", tmp_path / "there"])
    assert run([tmp_path / "here", address]) == expected
    blend = {"sources": [{"prefix": "here", "index": "here.samples"}]}
    blend["sources"].append({"prefix": address, "index": f"{address}.samples"})
    (tmp_path / "blend.yaml").write_text(json.dumps(blend))
    opened = open_blend(load_blend(tmp_path / "blend.yaml"))
    assert [item.prefix for item in opened.datasets] == [f"{tmp_path}/here", address]


def test_remote_labels_are_found_and_read(line: Line, tmp_path: Path) -> None:
    put_dataset(tmp_path / "docs")
    near = IndexedDataset(tmp_path / "docs")
    rng = np.random.default_rng(0)
    labels = [np.where(rng.random(tokens.size) < 0.5, tokens.astype(int), -100) for tokens in near]
    add_column(tmp_path / "docs", "labels", labels, INTERPRETED["labels"])
    address = address_of(tmp_path / "docs")
    upload_dataset(f"{tmp_path}/docs", address)
    expected = run(tmp_path / "docs")
    assert any(0.0 in batch["loss_mask"][0][:64] for batch in expected)
    assert run(address) == expected


def test_file_addresses_use_the_cache(line: Line, tmp_path: Path) -> None:
    """``file://`` is for slow or shared disks. No request leaves the machine."""
    put_dataset(tmp_path / "docs")  # the same files, which are not requested
    line.counts.clear()
    assert run(f"file://{tmp_path}/docs") == run(tmp_path / "docs")
    assert not line.counts["requests"]
    assert list((tmp_path / "cache").glob("docs-*/docs.bin.*/0"))


def test_missing_checksums_are_logged(
    line: Line, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    address = put_dataset(tmp_path / "docs")
    remove_object(f"{address}{SUFFIX}")
    with caplog.at_level(logging.INFO):
        assert run(address, prefetch=0) == run(tmp_path / "docs")
    assert sum(SUFFIX in record.message for record in caplog.records) == 1


def test_one_sample_and_one_micro_batch_need_no_loader(line: Line, tmp_path: Path) -> None:
    prefixes = tmp_path / "docs", (address := put_dataset(tmp_path / "docs"))
    near, far = (PackedDataset(prefix, f"{prefix}.samples") for prefix in prefixes)
    for i in (0, 100, len(near) - 1):
        assert far[i]["tokens"].tolist() == near[i]["tokens"].tolist()
    copy = pickle.loads(pickle.dumps(far))
    assert copy[7]["tokens"].tolist() == near[7]["tokens"].tolist()
    assert SampleIndex.load(f"{address}.samples").fingerprint == near.samples.fingerprints[0]


@EVERY_STORE
def test_missing_or_misspelled_addresses_are_named(line: Line, tmp_path: Path) -> None:
    nobody = folder_of(Path(f"nobody-{tmp_path.name}"))  # a store that no other test has opened
    with pytest.raises(FileNotFoundError, match=rf"{nobody}/docs\.idx does not exist"):
        IndexedDataset(f"{nobody}/docs")
    with pytest.raises(FileNotFoundError, match=rf"{nobody}/docs\.samples"):
        SampleIndex.load(f"{nobody}/docs.samples")
    with pytest.raises(ConfigError, match="begin with one of s3://, gs://"):
        IndexedDataset("s4://bucket/docs")
    with pytest.raises(ConfigError, match=r"s3://b/docs was given with one slash .* as a string"):
        IndexedDataset(Path("s3://b/docs"))
    with pytest.raises(ConfigError, match="is not the address of an object"):
        SampleIndex.load(f"{nobody}/")
    assert not list(Path.cwd().glob("??:*"))


QUEUES = """
import sys, numpy
from megapack.storage import IndexedDataset
dataset = IndexedDataset(sys.argv[1])
for block in range(240):
    dataset.tokens.want(numpy.array([block]))
dataset.tokens[0]
print("queued", flush=True)
"""


def test_program_that_ends_early_does_not_wait(line: Line, tmp_path: Path) -> None:
    """With a full queue of requests, leaving takes the time of one response."""
    address = put_dataset(tmp_path / "docs", 20_000)
    line.latency = 0.3
    line.counts.clear()
    done = ended(*PYTHON, QUEUES, address)
    assert done.stdout == "queued\n" and not done.stderr
    assert 0 < line.counts["GET"] < 200, "it read unneeded blocks"


FORKS = """
import os, sys
from megapack.errors import ConfigError
from megapack.storage import IndexedDataset
dataset = IndexedDataset(sys.argv[1])
if os.fork() == 0:
    try:
        dataset[0]
    except ConfigError as error:
        os._exit("spawn" in str(error) and 7)
    os._exit(1)
sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))
"""


def test_a_forked_child_of_a_reader_is_refused(line: Line, tmp_path: Path) -> None:
    """It would hang: the client's threads do not exist in the child."""
    ended(*PYTHON, FORKS, put_dataset(tmp_path / "docs"), status=7)


def test_lengths_need_no_tokens(line: Line, tmp_path: Path) -> None:
    address = put_dataset(tmp_path / "docs")
    far = read_document_lengths(address)
    assert far.tolist() == read_document_lengths(tmp_path / "docs").tolist()
    assert not list((tmp_path / "cache").glob("*/*.bin*"))


def test_adjacent_blocks_are_one_request(line: Line, tmp_path: Path) -> None:
    far = IndexedDataset(put_dataset(tmp_path / "docs", 20_000))
    blocks = np.arange(120)
    wait(far.tokens.want(blocks[:1]))  # and the blocks of the same request
    for wanted, requests in ((blocks[1:41], 1), (blocks[42:60:3], 1), (blocks[70:120:20], 3)):
        line.counts.clear()
        wait(far.tokens.want(wanted))
        assert line.counts["GET"] == requests


@pytest.mark.parametrize(("part", "is_copied"), [(2, True), (8, False)])
def test_shards_are_copied_ahead_if_a_quarter_is_read(
    line: Line, tmp_path: Path, part: int, is_copied: bool
) -> None:
    """The steps read the first part of the file; nothing but copying fetches its end."""
    address = put_dataset(tmp_path / "docs", 60_000)
    lengths = read_document_lengths(tmp_path / "docs")
    data = PackedDataset(address, pack(lengths, "concat", buckets=512, shuffle=False))
    schedule = Schedule(data, tokens_per_step=4096, order="sequential")
    steps = {"num_steps": schedule.num_steps() // part, "micro_batch_tokens": 4096}
    for _ in build_loader(data, schedule, data_parallel_rank=0, data_parallel_size=1, **steps):
        pass
    wait(data.remote_reads._copying)
    rows = data.documents(0).tokens
    assert isinstance(rows, RemoteRows) and rows.nbytes > 2 << 20
    last = np.arange(rows.nbytes // BLOCK_BYTES - 3, rows.nbytes // BLOCK_BYTES)
    assert rows.are_here(last) is is_copied
    assert (rows.missing_bytes == 0) is is_copied


def test_blocks_of_ranges_are_unique() -> None:
    """Several ranges may be in one block, and one range in several blocks."""
    rng = np.random.default_rng(0)
    for itemsize in (2, 4) * 100:
        size = int(rng.integers(1, 30))
        begins, ends = np.sort(rng.choice(300_000, (2 * size), replace=False)).reshape(-1, 2).T
        tokens = [np.arange(begin, end) for begin, end in zip(begins, ends, strict=True)]
        expected = np.unique(np.concatenate(tokens) * itemsize // BLOCK_BYTES)
        assert blocks_of(begins, ends, itemsize).tolist() == expected.tolist()
