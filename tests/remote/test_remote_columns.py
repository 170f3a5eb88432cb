"""Columns in an object store equal the local files; damage, replacement and eviction."""

from __future__ import annotations

import json
import pickle
import struct
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from object_store import Line
from programs import PYTHON, ended

from megapack.cli.main import main
from megapack.errors import ConfigError, FormatError
from megapack.storage import IndexedDataset, IndexedDatasetBuilder
from megapack.storage.column_edits import add_column, remove_column
from megapack.storage.columns import ColumnSpec
from megapack.storage.remote import cache as remote_cache
from megapack.storage.remote.checksums import BLOCK_BYTES, SUFFIX, DatasetChecksums
from megapack.storage.remote.client import find_object, put_object, remove_object
from megapack.storage.remote.copies import local_copy, local_output, upload_dataset
from megapack.storage.remote.reader import blocks_of, read_consistently
from tests.remote.far import address_of, flip
from tests.remote.stores import EVERY_CLOUD

SPECS = {
    "advantages": ColumnSpec(dtype="float32", of="target", fill=-1),
    "logits": ColumnSpec(dtype="bfloat16", shape=(7, 3), of="target"),  # 42 bytes: blocks cut rows
    "mask": ColumnSpec(dtype="uint8"),
    "wide": ColumnSpec(dtype="int16", shape=(2048,), fill=-5),  # 4 KiB
    "widest": ColumnSpec(dtype="int64", shape=(64, 128)),  # 64 KiB: four blocks
}


def write_columns(
    prefix: Path, names: list[str], num_tokens: int = 3000, seed: int = 0
) -> IndexedDataset:
    """Write a dataset of random tokens in 10 documents, with random bytes in its columns."""
    rng = np.random.default_rng(seed)
    columns = {name: random_rows(SPECS[name], num_tokens, rng) for name in names}
    offsets = [0, *np.sort(rng.integers(0, num_tokens, 9)).tolist(), num_tokens]
    specs = {name: SPECS[name] for name in names}
    with IndexedDatasetBuilder(prefix, np.uint16, columns=specs, overwrite=True) as builder:
        tokens = rng.integers(1, 9000, num_tokens, np.uint16)
        builder.add_documents(tokens, offsets, columns=columns)
    return IndexedDataset(prefix)


def random_rows(spec: ColumnSpec, num_rows: int, rng: np.random.Generator) -> Any:
    if spec.dtype == "float32":
        return rng.random((num_rows, *spec.shape), np.float32)
    info = np.iinfo(spec.numpy_dtype)
    high = 0x7F80 if spec.dtype == "bfloat16" else info.max
    return rng.integers(info.min, high, (num_rows, *spec.shape), spec.numpy_dtype)


def near_and_far(
    prefix: Path, names: list[str], num_tokens: int = 3000, seed: int = 0
) -> tuple[IndexedDataset, IndexedDataset]:
    """Return a local dataset with columns and the same dataset at its address."""
    near = write_columns(prefix, names, num_tokens, seed)
    upload_dataset(str(prefix), address_of(prefix))
    return near, IndexedDataset(address_of(prefix))


@EVERY_CLOUD
def test_rows_are_equal(line: Line, tmp_path: Path) -> None:
    near, far = near_and_far(tmp_path / "docs", list(SPECS), 400)
    again = pickle.loads(pickle.dumps(far))
    assert far.columns.keys() == near.columns.keys() == again.columns.keys() == SPECS.keys()
    rng = np.random.default_rng(1)
    for name, spec in SPECS.items():
        rows, expected = far.columns[name].rows, near.columns[name].rows
        assert far.columns[name].spec == spec and rows.shape == expected.shape == (400, *spec.shape)
        assert rows.dtype == expected.dtype and len(rows) == 400
        for begin, end in [(0, 0), (400, 400), (399, 400), *rng.integers(0, 401, (10, 2)).tolist()]:
            assert rows[begin:end].tobytes() == expected[begin:end].tobytes()
        assert rows[-3].tobytes() == expected[-3].tobytes()
        assert not far.columns[name].mapped_bytes.any(), "memory was kept"
        assert np.asarray(again.columns[name].rows).tobytes() == expected.tobytes()


def test_ranges_of_columns_are_read_together(line: Line, tmp_path: Path) -> None:
    """As a gather does: several ranges of tokens, with all columns, in one read."""
    near, far = near_and_far(tmp_path / "docs", list(SPECS), 300)
    rng = np.random.default_rng(0)
    arrays = [(near.tokens, far.tokens)]
    arrays += [(near.columns[name].rows, far.columns[name].rows) for name in SPECS]
    for _ in range(20):
        size = 2 * int(rng.integers(1, 6))
        begins, ends = np.sort(rng.choice(301, size, replace=False)).reshape(-1, 2).T
        wanted = [(rows, blocks_of(begins, ends, rows.row_bytes)) for _, rows in arrays]

        def read(begins: Any = begins, ends: Any = ends) -> list[bytes]:
            pairs = list(zip(begins, ends, strict=True))
            return [rows.mapped[b:e].tobytes() for _, rows in arrays for b, e in pairs]

        pairs = list(zip(begins, ends, strict=True))
        expected = [rows[b:e].tobytes() for rows, _ in arrays for b, e in pairs]
        assert read_consistently(wanted, read) == expected


def test_columns_that_nobody_opens_cost_no_request(line: Line, tmp_path: Path) -> None:
    _, far = near_and_far(tmp_path / "docs", ["mask", "wide"], 300)
    line.counts.clear()
    far.tokens[:10]
    assert line.counts["HEAD"] == 0
    assert len(far.columns) == 2 and line.counts["HEAD"] == 3


def checksums_by_hand(prefix: Path, columns: list[str]) -> bytes:
    """Return the .checksums file that docs/file_formats.md describes."""

    def blocks(suffix: str) -> bytes:
        data = Path(f"{prefix}{suffix}").read_bytes()
        parts = [data[b : b + BLOCK_BYTES] for b in range(0, len(data), BLOCK_BYTES)]
        return b"".join(struct.pack("<Q", xxhash.xxh3_64_intdigest(part)) for part in parts)

    def num_bytes(suffix: str) -> int:
        return Path(f"{prefix}{suffix}").stat().st_size

    files = {}
    for suffix in (".idx", ".meta.json"):
        digest = xxhash.xxh3_128_hexdigest(Path(f"{prefix}{suffix}").read_bytes())
        files[suffix] = {"bytes": num_bytes(suffix), "xxh3_128": digest}
    header = {"version": 1, "block_bytes": BLOCK_BYTES, "bin_bytes": num_bytes(".bin")}
    header |= {"files": files}
    if columns:
        header["columns"] = {name: num_bytes(f".{name}.col") for name in columns}
    text = json.dumps(header).encode()
    body = b"MEGASUMS" + struct.pack("<I", len(text)) + text
    body += b"".join(map(blocks, (".bin", *(f".{name}.col" for name in columns))))
    return body + xxhash.xxh3_128_digest(body)


@pytest.mark.parametrize("names", [[], ["logits", "mask"]])
def test_checksums_are_those_of_the_format(line: Line, tmp_path: Path, names: list[str]) -> None:
    prefix = tmp_path / "docs"
    near_and_far(prefix, names)
    stored = find_object(f"{address_of(prefix)}{SUFFIX}")
    assert stored is not None
    assert bytes(stored.read(0, stored.num_bytes)) == checksums_by_hand(prefix, names)


def test_damaged_block_is_named(
    line: Line, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEGAPACK_RETRY_SECONDS", "1")
    prefix = tmp_path / "docs"
    near, _ = near_and_far(prefix, ["logits", "mask"])
    expected = near.columns["logits"].rows[:300].tobytes()
    flip(tmp_path / "docs.logits.col", 2 * BLOCK_BYTES + 5)
    put_object(f"{address_of(prefix)}.logits.col", tmp_path / "docs.logits.col")
    far = IndexedDataset(address_of(prefix))
    assert far.columns["logits"].rows[:300].tobytes() == expected, "no other block is damaged"
    with pytest.raises(FormatError, match=r"docs\.logits\.col.* bytes \[32768, 49152\) differ"):
        far.columns["logits"].rows[700:900]
    with (
        pytest.raises(FormatError, match=r"docs\.logits\.col.* bytes \[32768, 49152\) differ"),
        local_copy(address_of(prefix)),
    ):
        pass
    with pytest.raises(FormatError, match=r"columns do not have the checksums of the meta file"):
        upload_dataset(str(prefix), address_of(prefix))


def test_missing_and_replaced_columns_are_named(line: Line, tmp_path: Path) -> None:
    prefix = tmp_path / "docs"
    _, opened = near_and_far(prefix, ["mask"])
    _, late = near_and_far(prefix, ["mask"])
    assert opened.columns["mask"].rows[5] == late.columns["mask"].rows[5]
    before = IndexedDataset(address_of(prefix))
    write_columns(prefix, ["mask"], seed=9)
    upload_dataset(str(prefix), address_of(prefix))
    with pytest.raises(FormatError, match="was replaced after it was opened; open it again"):
        assert before.columns
    put_object(f"{address_of(prefix)}.mask.col", tmp_path / "docs.bin")
    with pytest.raises(FormatError, match=r"mask\.col has 6,000 bytes; the meta file says 3,000"):
        assert IndexedDataset(address_of(prefix)).columns
    remove_object(f"{address_of(prefix)}.mask.col")
    with pytest.raises(FormatError, match=r"mask\.col does not exist; the meta file says"):
        assert IndexedDataset(address_of(prefix)).columns
    assert IndexedDataset(address_of(prefix)).tokens.size == 3000, "the tokens are complete"


def test_column_replaced_while_it_is_read(line: Line, tmp_path: Path) -> None:
    prefix = tmp_path / "docs"
    _, far = near_and_far(prefix, ["wide"])
    assert far.columns["wide"].rows[0].any()
    write_columns(prefix, ["wide"], seed=9)
    upload_dataset(str(prefix), address_of(prefix))
    with pytest.raises(FormatError, match=r"wide\.col.* replaced"):
        far.columns["wide"].rows[2000]


def test_copies_include_columns(line: Line, tmp_path: Path) -> None:
    prefix = tmp_path / "docs"
    near, _ = near_and_far(prefix, ["logits", "mask"])
    with local_copy(address_of(prefix)) as copy:
        for name, column in IndexedDataset(copy).columns.items():
            assert column.rows.tobytes() == near.columns[name].rows.tobytes()
    with local_copy(address_of(prefix), tokens=False) as copy:
        column = IndexedDataset(copy).columns["logits"]
        assert column.rows.shape == near.columns["logits"].rows.shape and not column.rows.any()
    target = address_of(tmp_path / "other")
    with local_output(target, overwrite=False) as output:
        write_columns(Path(output), ["wide"], 50)
    expected = write_columns(tmp_path / "again", ["wide"], 50).columns["wide"].rows
    assert IndexedDataset(target).columns["wide"].rows[:].tobytes() == expected.tobytes()
    with local_output(target, overwrite=False) as output:  # an existing dataset is not replaced
        assert IndexedDataset(output).columns["wide"].rows.shape == (50, 2048)


def test_upload_copies_columns(line: Line, tmp_path: Path) -> None:
    near = write_columns(tmp_path / "docs", ["advantages", "wide"])
    folder, _, _ = address_of(tmp_path / "docs").rpartition("/")
    main(["upload", str(tmp_path / "docs"), folder])
    far = IndexedDataset(f"{folder}/docs")
    for name, column in near.columns.items():
        assert np.asarray(far.columns[name].rows).tobytes() == column.rows.tobytes()
    main(["verify", f"{folder}/docs"])
    write_columns(tmp_path / "docs", ["wide"])
    main(["upload", str(tmp_path / "docs"), folder])
    assert find_object(f"{folder}/docs.advantages.col") is None
    assert find_object(f"{folder}/docs.wide.col") is not None


def test_columns_are_added_to_a_local_copy(line: Line, tmp_path: Path) -> None:
    """As the error for an address advises."""
    prefix = tmp_path / "docs"
    near, _ = near_and_far(prefix, ["mask"])
    address, spec = address_of(prefix), SPECS["advantages"]
    values = np.arange(near.num_tokens, dtype=np.float32)
    with pytest.raises(ConfigError, match=f"merge {address} --output LOCAL`\\), then `.* upload`"):
        add_column(address, "advantages", values, spec)
    with pytest.raises(ConfigError, match="is an address; columns are added and removed locally"):
        remove_column(address, "mask")
    copy = tmp_path / "copy" / "docs"
    copy.parent.mkdir()
    main(["merge", address, "--output", str(copy)])
    add_column(copy, "advantages", values, spec)
    upload_dataset(str(copy), address)
    far = IndexedDataset(address)
    assert np.asarray(far.columns["advantages"].rows).tolist() == values.tolist()
    assert far.columns["mask"].rows[:].tobytes() == near.columns["mask"].rows.tobytes()
    assert far.tokens[:].tobytes() == near.tokens.tobytes()


SUMS = """
import sys, xxhash
from pathlib import Path
from megapack.storage import IndexedDataset

def peak():  # ru_maxrss would include the parent's
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])

column = IndexedDataset(sys.argv[1]).columns[sys.argv[2]]
digest, step = xxhash.xxh3_128(), int(sys.argv[3])
column.rows[:step]
before = peak()
for begin in range(0, len(column.rows), step):
    digest.update(column.rows[begin:begin + step].tobytes())
print(digest.hexdigest(), peak() - before)
"""


@pytest.mark.parametrize(
    ("name", "num_tokens", "step"), [("wide", 24576, 256), ("widest", 1536, 16)]
)
def test_memory_of_wide_columns_is_bounded(
    line: Line, tmp_path: Path, name: str, num_tokens: int, step: int
) -> None:
    """96 MiB are read in slices of 1 MiB; the memory of a slice is freed after it."""
    near, _ = near_and_far(tmp_path / "docs", [name], num_tokens)
    assert near.columns[name].mapped_bytes.size == 96 << 20
    done = ended(*PYTHON, SUMS, address_of(tmp_path / "docs"), name, str(step))
    digest, growth = done.stdout.split()
    assert digest == xxhash.xxh3_128_hexdigest(near.columns[name].rows.tobytes())
    assert int(growth) < 32 << 10, "kilobytes"


def test_evicted_rows_are_fetched_again(
    line: Line, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads read tokens and columns of 14 MiB through a cache of 3 MiB."""
    monkeypatch.setattr(remote_cache, "SMALLEST_SIZE", 1)
    monkeypatch.setattr(remote_cache, "CHUNK_BLOCKS", 4)
    monkeypatch.setenv("MEGAPACK_CACHE_SIZE", str(3 << 20))
    near, far = near_and_far(tmp_path / "docs", ["logits", "wide"])
    num_bytes = sum(column.mapped_bytes.size for column in near.columns.values())
    line.counts.clear()

    def read(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(60):
            name = ["logits", "wide"][int(rng.integers(2))]
            begin = int(rng.integers(2800))
            rows = far.columns[name].rows[begin : begin + 100]
            assert rows.tobytes() == near.columns[name].rows[begin : begin + 100].tobytes()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(read, range(4)))
    assert line.counts["bytes"] > 2 * num_bytes, "nothing was evicted: the test showed nothing"
    assert not any(column.mapped_bytes.any() for column in far.columns.values())


def test_checksums_are_mapped(tmp_path: Path) -> None:
    """A wide column has many blocks; processes of a node share them."""
    path = tmp_path / "docs.checksums"
    write_columns(tmp_path / "docs", ["wide"])
    path.write_bytes(checksums_by_hand(tmp_path / "docs", ["wide"]))
    sums = DatasetChecksums.read(path).blocks[".wide.col"]
    assert sums.num_bytes == 3000 * 4096 and not sums.digests.flags.owndata
    assert len(sums.digests) == 750 and not sums.digests.flags.writeable
    flip(path, 200)
    with pytest.raises(FormatError, match="is damaged: its checksum differs"):
        DatasetChecksums.read(path)
