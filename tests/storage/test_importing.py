"""What users already have becomes a dataset, without copying tokens where the layout allows."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest
from peers import peer

from megapack.errors import DataError, FormatError
from megapack.storage import IndexedDataset
from megapack.storage.importing import import_dataset
from megapack.storage.verify import verify
from storage.strategies import write

DOCUMENTS = [[5, 6, 0], [7, 0], [8, 9, 10, 0]]
FLAT = [token for document in DOCUMENTS for token in document]


def check(prefix: Path, documents: list = DOCUMENTS, dtype: type = np.uint16) -> IndexedDataset:
    dataset = IndexedDataset(prefix)
    assert [list(document) for document in dataset[:]] == documents
    assert dataset.dtype == dtype
    assert {f.severity for f in verify(prefix)} <= {"note"}
    return dataset


def same_file(a: Path, b: Path) -> bool:
    return Path(a).samefile(b)


def test_a_dataset_in_another_order_is_copied_in_order(tmp_path: Path) -> None:
    write(tmp_path / "theirs", [[d] for d in DOCUMENTS])
    (tmp_path / "theirs.meta.json").unlink()
    index, order = bytearray((tmp_path / "theirs.idx").read_bytes()), [2, 0, 1]
    dataset = IndexedDataset(tmp_path / "theirs")
    index[34 : 34 + 36] = (
        dataset.sequence_lengths[order].tobytes() + dataset.sequence_pointers[order].tobytes()
    )
    (tmp_path / "theirs.idx").write_bytes(index)
    assert "copied in order" in import_dataset(tmp_path / "theirs", tmp_path / "ours")
    check(tmp_path / "ours", [DOCUMENTS[i] for i in order])


@pytest.mark.parametrize(
    ("raw", "dtype"), [(np.uint16, np.uint16), (np.uint32, np.int32), (np.int32, np.int32)]
)
def test_deepspeed_datasets_are_linked_not_copied(tmp_path: Path, raw: type, dtype: type) -> None:
    deepspeed = peer("deepspeed.runtime.data_pipeline.data_sampling.indexed_dataset")
    builder = deepspeed.MMapIndexedDatasetBuilder(f"{tmp_path}/theirs.bin", raw)
    for document in DOCUMENTS:
        builder.add_item_numpy(np.array(document, raw))
        builder.end_document()
    builder.finalize(f"{tmp_path}/theirs.idx")
    said = import_dataset(tmp_path / "theirs", tmp_path / "ours")
    assert "3 documents, 9" in said and "(mmididx, .bin hard link)" in said
    check(tmp_path / "ours", dtype=dtype)
    assert same_file(tmp_path / "ours.bin", tmp_path / "theirs.bin")


@pytest.mark.parametrize(("raw", "dtype"), [(np.uint16, np.uint16), (np.uint32, np.int32)])
def test_datatrove_files_are_indexed(tmp_path: Path, raw: type, dtype: type) -> None:
    np.array(FLAT, raw).tofile(tmp_path / "000_shuffled.ds")
    np.cumsum([len(d) for d in DOCUMENTS]).astype("<u8").tofile(tmp_path / "000_shuffled.ds.index")
    import_dataset(tmp_path / "000_shuffled.ds", tmp_path / "ours")
    check(tmp_path / "ours", dtype=dtype)
    assert same_file(tmp_path / "ours.bin", tmp_path / "000_shuffled.ds")
    with (tmp_path / "000_shuffled.ds").open("ab") as file:
        file.write(b"x")
    with pytest.raises(FormatError, match="speaks of 9 tokens"):
        import_dataset(tmp_path / "000_shuffled.ds", tmp_path / "no")


def test_a_nanogpt_bin_gets_its_index_in_place(tmp_path: Path) -> None:
    np.array(FLAT, np.uint16).tofile(tmp_path / "train.bin")
    inode = (tmp_path / "train.bin").stat().st_ino
    said = import_dataset(
        tmp_path / "train.bin", tmp_path / "train", dtype="uint16", eod_token=0, vocab_size=11
    )
    assert ".bin as it was" in said
    dataset = check(tmp_path / "train")
    assert (tmp_path / "train.bin").stat().st_ino == inode
    assert dataset.vocab_size == 11
    assert dataset.meta["document_end_token"] == 0


@pytest.mark.parametrize("link", ["symbolic", "hard", "copy"])
def test_how_the_tokens_come_is_up_to_the_user(tmp_path: Path, link: str) -> None:
    np.array(FLAT, np.uint16).tofile(tmp_path / "train.bin")
    import_dataset(
        tmp_path / "train.bin", tmp_path / "ours", dtype="uint16", eod_token=0, link=link
    )
    check(tmp_path / "ours")
    assert (tmp_path / "ours.bin").is_symlink() == (link == "symbolic")
    assert same_file(tmp_path / "ours.bin", tmp_path / "train.bin") == (link != "copy")


def test_an_unfinished_last_document_is_one(tmp_path: Path) -> None:
    np.array([*FLAT, 3, 4], np.uint16).tofile(tmp_path / "train.bin")
    import_dataset(tmp_path / "train.bin", tmp_path / "ours", dtype="uint16", eod_token=0)
    dataset = check(tmp_path / "ours", [*DOCUMENTS, [3, 4]])
    assert "document_end_token" not in dataset.meta


def test_llm_c_files_lose_their_header(tmp_path: Path) -> None:
    """There the end-of-text token comes before each document."""
    header = np.zeros(256, np.int32)
    tokens = np.array([0, 5, 6, 0, 7, 0, 8, 9], np.uint16)
    header[:3] = 20240520, 1, tokens.size
    (tmp_path / "val.bin").write_bytes(header.tobytes() + tokens.tobytes() + b"padding")
    said = import_dataset(tmp_path / "val.bin", tmp_path / "ours", eod_token=0)
    assert "llm.c, .bin copied" in said
    dataset = check(tmp_path / "ours", [[0, 5, 6], [0, 7], [0, 8, 9]])
    assert dataset.meta["document_begin_token"] == 0
    with pytest.raises(ValueError, match="is imported and has a header"):
        import_dataset(tmp_path / "val.bin", tmp_path / "val", eod_token=0)
    header[2] = 1000
    (tmp_path / "val.bin").write_bytes(header.tobytes() + tokens.tobytes())
    with pytest.raises(FormatError, match="promises 1000 tokens"):
        import_dataset(tmp_path / "val.bin", tmp_path / "no", eod_token=0)


def test_npy_files_know_their_type(tmp_path: Path) -> None:
    np.save(tmp_path / "tokens.npy", np.array(FLAT, np.uint32))
    import_dataset(tmp_path / "tokens.npy", tmp_path / "ours", eod_token=0)
    check(tmp_path / "ours", dtype=np.int32)
    np.save(tmp_path / "tokens.npy", np.zeros((2, 2), np.uint16))
    with pytest.raises(FormatError, match=r"shape \(2, 2\)"):
        import_dataset(tmp_path / "tokens.npy", tmp_path / "no", eod_token=0)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"eod_token": 0}, ValueError, "--dtype"),
        ({"dtype": "uint16"}, ValueError, "--eod-token"),
        ({"dtype": "uint16", "eod_token": 3}, DataError, "3 never occurs"),
        ({"dtype": "int32", "eod_token": 0}, FormatError, "whole number of int32"),
        ({"dtype": "uint16", "eod_token": 0, "vocab_size": 10}, DataError, "ids from 0 to 10"),
        ({"dtype": "float32", "eod_token": 0}, ValueError, "stored as one of"),
        ({"kind": "tiktoken"}, ValueError, "kind is 'tiktoken'"),
        ({"link": "soft"}, ValueError, "link is 'soft'"),
        ({"eod_at": "middle"}, ValueError, "eod_at is 'middle'"),
    ],
)
def test_failed_import_is_clean(tmp_path: Path, options: dict, error: type, message: str) -> None:
    np.array(FLAT, np.uint16).tofile(tmp_path / "train.bin")
    with pytest.raises(error, match=message):
        import_dataset(tmp_path / "train.bin", tmp_path / "ours", **options)
    assert [path.name for path in tmp_path.iterdir()] == ["train.bin"]


def test_unsigned_ids_that_are_no_int32_are_refused(tmp_path: Path) -> None:
    np.array([1, 2**31, 0], np.uint32).tofile(tmp_path / "train.bin")
    with pytest.raises(DataError, match="ids from -2147483648"):
        import_dataset(tmp_path / "train.bin", tmp_path / "ours", dtype="uint32", eod_token=0)


def test_labels_keep_their_minus_100(tmp_path: Path) -> None:
    write(tmp_path / "theirs", [[[-100, 7]]], np.int32, allow_negative=True)
    (tmp_path / "theirs.meta.json").unlink()
    import_dataset(tmp_path / "theirs", tmp_path / "ours")
    check(tmp_path / "ours", [[-100, 7]], np.int32)


def test_the_source_stands_in_the_meta_file(tmp_path: Path) -> None:
    write(tmp_path / "theirs", [[d] for d in DOCUMENTS])
    import_dataset(tmp_path / "theirs", tmp_path / "ours", metadata={"tokenizer": "gpt2"})
    meta = json.loads((tmp_path / "ours.meta.json").read_text())
    assert (meta["imported_from"], meta["tokenizer"]) == ("mmididx", "gpt2")
    assert struct.calcsize("<H") * len(FLAT) == meta["bin"]["bytes"]
