"""A merge equals the output of one builder, for inputs of all tools; imports."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from peers import peer
from programs import PEAK_BYTES, PYTHON, ended

from megapack.errors import ConfigError, DataError, FormatError
from megapack.storage import IndexedDataset, IndexedDatasetBuilder
from megapack.storage.importing import import_dataset
from megapack.storage.merge import merge
from megapack.storage.verify import verify
from storage.strategies import SMALL, corpora, errors, files, names, write, write_foreign


@settings(max_examples=15)
@given(shards=st.lists(corpora, min_size=1, max_size=5), data=st.data())
def test_merge_equals_one_build(
    tmp_path_factory: pytest.TempPathFactory, shards: list, data: st.DataObject
) -> None:
    tmp = tmp_path_factory.mktemp("merge")
    for i, corpus in enumerate(shards):
        writer = data.draw(st.sampled_from([write, write_foreign]))
        writer(tmp / f"shard{i}", corpus, np.uint16)
    prefixes = [tmp / f"shard{i}" for i in range(len(shards))]
    write(tmp / "whole", [document for corpus in shards for document in corpus])
    merge(prefixes, tmp / "merged")
    with IndexedDatasetBuilder(tmp / "added", np.uint16) as builder:
        for prefix in prefixes:
            builder.add_index(prefix)
    assert files(tmp / "merged") == files(tmp / "whole") == files(tmp / "added")
    assert not errors(tmp / "merged")
    whole, merged = IndexedDataset(tmp / "whole").meta, IndexedDataset(tmp / "merged").meta
    for key in ("idx", "num_documents", "num_tokens", "min_token_id", "max_token_id", "dtype"):
        assert merged[key] == whole[key] == IndexedDataset(tmp / "added").meta[key]


def test_builder_continues_after_add_index(tmp_path: Path) -> None:
    write(tmp_path / "part", SMALL)
    with IndexedDatasetBuilder(tmp_path / "all", np.uint16) as builder:
        builder.add_document([100])
        builder.add_index(tmp_path / "part")
        builder.add_documents([101, 102], [0, 1, 2])
    write(tmp_path / "whole", [[[100]], *SMALL, [[101]], [[102]]])
    assert files(tmp_path / "all") == files(tmp_path / "whole")
    assert not errors(tmp_path / "all")


def test_modes_are_merged(tmp_path: Path) -> None:
    for name in ("a", "b", "whole"):
        with IndexedDatasetBuilder(tmp_path / name, multimodal=True) as builder:
            for _ in range(2 if name == "whole" else 1):
                builder.add_document([1, 2, 3], [1, 2], [0, 1])
    merge([tmp_path / "a", tmp_path / "b"], tmp_path / "merged", multimodal=True)
    assert files(tmp_path / "merged") == files(tmp_path / "whole")
    write(tmp_path / "plain", [[[1, 2, 3, 4, 5]]], np.int32)
    with pytest.raises(FormatError, match="has no modes"):
        merge([tmp_path / "a", tmp_path / "plain"], tmp_path / "no", multimodal=True)


def test_merge_of_a_neox_dataset_makes_a_document_per_sequence(tmp_path: Path) -> None:
    write(tmp_path / "a", [[[1, 2]], [[3]]])
    index = bytearray((tmp_path / "a.idx").read_bytes())
    struct.pack_into("<Q", index, 26, 1)
    (tmp_path / "a.idx").write_bytes(index[: 34 + 12 * 2 + 8])
    merge([tmp_path / "a", tmp_path / "a"], tmp_path / "merged")
    write(tmp_path / "whole", [[[1, 2]], [[3]]] * 2)
    assert files(tmp_path / "merged") == files(tmp_path / "whole")


def test_dtypes_are_converted_on_request_only(tmp_path: Path) -> None:
    write(tmp_path / "narrow", SMALL, np.uint16)
    write(tmp_path / "wide", [[[70_000]]], np.int32)
    inputs = [tmp_path / "narrow", tmp_path / "wide"]
    with pytest.raises(DataError, match=r"differ in dtype: uint16 .* int32 .*--dtype int32"):
        merge(inputs, tmp_path / "merged")
    merge(inputs, tmp_path / "merged", dtype=np.int32)
    write(tmp_path / "whole", [*SMALL, [[70_000]]], np.int32)
    assert files(tmp_path / "merged") == files(tmp_path / "whole")
    said = r"document 0 of .*wide, position 0: token id 70000 is outside \[0, 65535\]"
    with pytest.raises(DataError, match=said):
        merge(inputs, tmp_path / "no", dtype=np.uint16)
    with pytest.raises(DataError, match="uint16 tokens, this dataset int32"):
        IndexedDatasetBuilder(tmp_path / "no").add_index(tmp_path / "narrow")
    assert not list(tmp_path.glob("no*"))


def test_ids_beyond_the_vocabulary_of_inputs_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "known", SMALL)
    write_foreign(tmp_path / "unknown", SMALL)
    builder = IndexedDatasetBuilder(tmp_path / "all", np.uint16, vocab_size=10)
    builder.add_document([1])
    with pytest.raises(DataError, match=r"known has token ids from 1 to 10, outside \[0, 9\]"):
        builder.add_index(tmp_path / "known")
    with pytest.raises(DataError, match=r"document 4 of .*unknown, position 3: token id 10 "):
        builder.add_index(tmp_path / "unknown")
    builder.finalize()
    assert IndexedDataset(tmp_path / "all").num_tokens == 1


def test_mixed_tokenizers_are_refused_by_default(tmp_path: Path) -> None:
    for name, digest, source in (("a", "x", "/one"), ("b", "x", "/two"), ("c", "y", "/one")):
        tokenizer = {"digest": digest, "source": source}
        write(tmp_path / name, SMALL, metadata={"tokenizer": tokenizer, "document_end_token": 0})
    merge([tmp_path / "a", tmp_path / "b"], tmp_path / "same")
    with pytest.raises(DataError, match=r"a and .*c name different tokenizers \(x and y\)"):
        merge([tmp_path / "a", tmp_path / "c"], tmp_path / "mixed")
    merge([tmp_path / "a", tmp_path / "c"], tmp_path / "mixed", allow_mixed_tokenizers=True)
    meta = IndexedDataset(tmp_path / "mixed").meta
    assert "tokenizer" not in meta and meta["document_end_token"] == 0


def test_different_begin_or_end_tokens_are_refused_by_default(
    tmp_path: Path,
) -> None:
    tokenizer = {"digest": "x"}
    write(tmp_path / "plain", SMALL, metadata={"tokenizer": tokenizer})
    for fact, where in (("document_begin_token", "begin"), ("document_end_token", "end")):
        write(tmp_path / where, SMALL, metadata={"tokenizer": tokenizer, fact: 0})
        inputs = [tmp_path / "plain", tmp_path / where]
        with pytest.raises(
            DataError, match=rf"{where} with different tokens: no token .*, 0 .*--allow-mixed"
        ):
            merge(inputs, tmp_path / "merged")
        merge(inputs, tmp_path / f"allowed-{where}", allow_mixed_tokenizers=True)


def test_inputs_without_a_tokenizer_name_are_refused_by_default(tmp_path: Path) -> None:
    """The result would name no tokenizer, and hide that ids have different meanings."""
    write(tmp_path / "named", SMALL, metadata={"tokenizer": {"digest": "x"}})
    write(tmp_path / "silent", SMALL)
    write_foreign(tmp_path / "without-meta", SMALL)
    for other in ("silent", "without-meta"):
        inputs = [tmp_path / "named", tmp_path / other]
        for order in (inputs, inputs[::-1]):
            with pytest.raises(DataError, match=r"different tokenizers.*none.*--allow-mixed"):
                merge(order, tmp_path / "merged")
        assert not IndexedDataset.exists(tmp_path / "merged")
        merge(inputs, tmp_path / f"allowed-{other}", allow_mixed_tokenizers=True)
        assert "tokenizer" not in IndexedDataset(tmp_path / f"allowed-{other}").meta
    merge([tmp_path / "silent", tmp_path / "without-meta"], tmp_path / "nobody")


def test_conversion_to_a_wider_dtype_in_blocks(tmp_path: Path) -> None:
    """The input has more bytes than a block, the output four times as many."""
    tokens = np.random.default_rng(0).integers(0, 256, 700_000)
    write(tmp_path / "narrow", [[tokens]], np.uint8)
    merge([tmp_path / "narrow"], tmp_path / "wide", dtype=np.int32)
    np.testing.assert_array_equal(IndexedDataset(tmp_path / "wide").tokens, tokens)


def test_verify_after_a_merge_detects_earlier_damage(tmp_path: Path) -> None:
    write(tmp_path / "a", SMALL)
    write(tmp_path / "b", SMALL)
    content = (tmp_path / "b.bin").read_bytes()
    (tmp_path / "b.bin").write_bytes(bytes([content[0] ^ 2]) + content[1:])
    merge([tmp_path / "a", tmp_path / "b"], tmp_path / "merged")
    [found] = errors(tmp_path / "merged")
    assert found.code == "checksum" and "bytes 20 to 40" in found.message


def test_meta_file_of_other_data_is_ignored(tmp_path: Path) -> None:
    """Megatron wrote another dataset to the same prefix."""
    write(tmp_path / "a", SMALL, vocab_size=11)
    write_foreign(tmp_path / "a", [[[20, 21, 22]], [[1] * 7]])
    merge([tmp_path / "a"], tmp_path / "merged")
    assert IndexedDataset(tmp_path / "merged").meta["max_token_id"] == 22
    assert IndexedDataset(tmp_path / "merged").vocab_size is None


def test_damaged_inputs_write_no_output(tmp_path: Path) -> None:
    for name in ("good", "short"):
        write(tmp_path / name, SMALL)
    os.truncate(tmp_path / "short.bin", 8)
    for inputs, output, error, message in (
        (["good", "short"], "merged", FormatError, r"short\.bin has 8 bytes"),
        (["good"], "good", ValueError, "also an input"),
        ([], "merged", ValueError, "at least one"),
    ):
        with pytest.raises(error, match=message):
            merge([tmp_path / name for name in inputs], tmp_path / output)
    assert not list(tmp_path.glob("merged*"))


def test_inputs_are_removed_on_request_only(tmp_path: Path) -> None:
    write(tmp_path / "a", SMALL)
    write(tmp_path / "b", SMALL)
    seen, inputs = [], [tmp_path / "a", tmp_path / "b"]
    progress = lambda *counts: seen.append(counts)  # noqa: E731
    merge(inputs, tmp_path / "merged", remove_inputs=True, progress=progress)
    assert seen == [(10, 20), (20, 20)]
    assert names(tmp_path) == ["merged.bin", "merged.idx", "merged.meta.json"]


@pytest.mark.parametrize(
    "named", ["abc", "bc"]
)  # named one by one; by a directory, which lists existing ones
def test_result_stays_after_an_interrupted_removal_of_inputs(tmp_path: Path, named: str) -> None:
    for name, corpus in (("a", SMALL), ("b", SMALL[:2]), ("c", SMALL[1:])):
        write(tmp_path / name, corpus)
    merge([tmp_path / name for name in "abc"], tmp_path / "out")
    before = files(tmp_path / "out")
    (tmp_path / "a.idx").unlink()  # as after a kill
    for overwrite in (False, True):
        inputs = [tmp_path / name for name in named]
        with pytest.raises(ConfigError, match=r"remove the remaining inputs \(.*b\.idx, "):
            merge(inputs, tmp_path / "out", remove_inputs=True, overwrite=overwrite)
    assert files(tmp_path / "out") == before and IndexedDataset.exists(tmp_path / "b")


MERGE = """
import sys
from megapack.storage.merge import merge
before = peak_bytes()
merge(sys.argv[1:3], sys.argv[3])
print(peak_bytes() - before)
"""


def test_memory_does_not_grow_with_the_documents(tmp_path: Path) -> None:
    """The limit is 30 bytes per document; a merge needs none."""
    count = 1_000_000
    with IndexedDatasetBuilder(tmp_path / "a", np.uint16) as builder:
        builder.add_documents(np.zeros(count, np.uint16), np.arange(count + 1))
    done = ended(*PYTHON, PEAK_BYTES + MERGE, *(tmp_path / name for name in ("a", "a", "merged")))
    assert int(done.stdout) / (2 * count) < 8
    assert IndexedDataset(tmp_path / "merged").num_documents == 2 * count


# ---- Imports: files of other tools become datasets, without copying tokens if possible -----------


DOCUMENTS = [[5, 6, 0], [7, 0], [8, 9, 10, 0]]
FLAT = [token for document in DOCUMENTS for token in document]


FLAT_UINT16 = {"dtype": "uint16", "eod_token": 0}


def imported(path: Path, **how: Any) -> str:
    """Import a file as ``ours``; return the summary."""
    return import_dataset(path, path.with_name("ours"), **how)


def flat_file(folder: Path, tokens: list[int] = FLAT, dtype: type = np.uint16) -> Path:
    np.array(tokens, dtype).tofile(folder / "train.bin")
    return folder / "train.bin"


def check(prefix: Path, documents: list = DOCUMENTS, dtype: type = np.uint16) -> IndexedDataset:
    dataset = IndexedDataset(prefix)
    assert [list(document) for document in dataset[:]] == documents
    assert dataset.dtype == dtype
    assert {f.severity for f in verify(prefix)} <= {"note"}
    return dataset


def test_sequences_in_another_order_are_copied_in_order(tmp_path: Path) -> None:
    write_foreign(tmp_path / "theirs", [[d] for d in DOCUMENTS])
    index, order = bytearray((tmp_path / "theirs.idx").read_bytes()), [2, 0, 1]
    dataset = IndexedDataset(tmp_path / "theirs")
    index[34 : 34 + 36] = (
        dataset.sequence_lengths[order].tobytes() + dataset.sequence_pointers[order].tobytes()
    )
    (tmp_path / "theirs.idx").write_bytes(index)
    assert "copied in order" in imported(tmp_path / "theirs")
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
    said = imported(tmp_path / "theirs")
    assert "3 documents, 9" in said and "(mmididx, .bin hard link)" in said
    check(tmp_path / "ours", dtype=dtype)
    assert (tmp_path / "ours.bin").samefile(tmp_path / "theirs.bin")


@pytest.mark.parametrize(("raw", "dtype"), [(np.uint16, np.uint16), (np.uint32, np.int32)])
def test_datatrove_files_are_indexed(tmp_path: Path, raw: type, dtype: type) -> None:
    path, index = tmp_path / "000_shuffled.ds", tmp_path / "000_shuffled.ds.index"
    np.array(FLAT, raw).tofile(path)
    np.cumsum([len(d) for d in DOCUMENTS]).astype("<u8").tofile(index)
    imported(path)
    check(tmp_path / "ours", dtype=dtype)
    assert (tmp_path / "ours.bin").samefile(path)
    with path.open("ab") as file:
        file.write(b"x")
    with pytest.raises(FormatError, match="counts 9 tokens"):
        import_dataset(path, tmp_path / "no")
    os.truncate(index, 21)
    with pytest.raises(FormatError, match="has 21 bytes, not 8 per document"):
        import_dataset(path, tmp_path / "no")


def test_nanogpt_bin_is_imported_in_place(tmp_path: Path) -> None:
    path = flat_file(tmp_path)
    inode = path.stat().st_ino
    how = {**FLAT_UINT16, "vocab_size": 11}
    assert ".bin unchanged" in import_dataset(path, tmp_path / "train", **how)
    dataset = check(tmp_path / "train")
    assert path.stat().st_ino == inode
    assert dataset.vocab_size == 11 and dataset.meta["document_end_token"] == 0
    again = import_dataset(path, tmp_path / "train", **how)
    assert again == f"nothing to do: {tmp_path}/train exists already"


@pytest.mark.parametrize("link", ["symbolic", "hard", "copy"])
def test_link_option_decides_how_bin_is_made(tmp_path: Path, link: str) -> None:
    path = flat_file(tmp_path)
    imported(path, **FLAT_UINT16, link=link)
    check(tmp_path / "ours")
    assert (tmp_path / "ours.bin").is_symlink() == (link == "symbolic")
    assert (tmp_path / "ours.bin").samefile(path) == (link != "copy")


def test_unfinished_last_document_is_kept(tmp_path: Path) -> None:
    imported(flat_file(tmp_path, [*FLAT, 3, 4]), **FLAT_UINT16)
    dataset = check(tmp_path / "ours", [*DOCUMENTS, [3, 4]])
    assert "document_end_token" not in dataset.meta


def test_llm_c_files_lose_their_header(tmp_path: Path) -> None:
    """In llm.c the end-of-text token comes before each document."""
    header, path = np.zeros(256, np.int32), tmp_path / "val.bin"
    tokens = np.array([0, 5, 6, 0, 7, 0, 8, 9], np.uint16)
    header[:3] = 20240520, 1, tokens.size
    path.write_bytes(header.tobytes() + tokens.tobytes())
    assert "llm.c, .bin copied" in imported(path, eod_token=0)
    dataset = check(tmp_path / "ours", [[0, 5, 6], [0, 7], [0, 8, 9]])
    assert dataset.meta["document_begin_token"] == 0
    with pytest.raises(ValueError, match="is the input and has a header"):
        import_dataset(path, tmp_path / "val", eod_token=0)
    for count in (1000, 7):  # truncated; a count that wrapped around
        header[2] = count
        path.write_bytes(header.tobytes() + tokens.tobytes())
        with pytest.raises(FormatError, match=f"1040 bytes, and .* counts {count} tokens of 2"):
            import_dataset(path, tmp_path / "no", eod_token=0)


def test_npy_files_record_their_dtype(tmp_path: Path) -> None:
    path = tmp_path / "tokens.npy"
    np.save(path, np.array(FLAT, np.uint32))
    imported(path, eod_token=0)
    check(tmp_path / "ours", dtype=np.int32)
    for array, error, message in (
        (np.zeros((2, 2), np.uint16), FormatError, r"shape \(2, 2\)"),
        (
            np.array(FLAT, ">u4"),
            ConfigError,
            "dtype is >u4",
        ),  # was once read in the wrong byte order
    ):
        np.save(path, array)
        with pytest.raises(error, match=message):
            import_dataset(path, tmp_path / "no", eod_token=0)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"eod_token": 0}, ValueError, "--dtype"),
        ({"dtype": "uint16"}, ValueError, "--eod-token"),
        ({"dtype": "uint16", "eod_token": 3}, DataError, "3 never occurs"),
        ({"dtype": "int32", "eod_token": 0}, FormatError, "whole number of int32"),
        ({"dtype": "uint16", "eod_token": 0, "vocab_size": 10}, DataError, "ids from 0 to 10"),
        ({"dtype": "float32", "eod_token": 0}, ValueError, "token files have one of"),
        ({"dtype": ">u2", "eod_token": 0}, ValueError, r"dtype is >u2; .*\(little-endian\)"),
        ({"kind": "tiktoken"}, ValueError, "kind is 'tiktoken'"),
        ({"link": "soft"}, ValueError, "link is 'soft'"),
        ({"eod_at": "middle"}, ValueError, "eod_at is 'middle'"),
    ],
)
def test_failed_import_is_clean(tmp_path: Path, options: dict, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        imported(flat_file(tmp_path), **options)
    assert names(tmp_path) == ["train.bin"]


@pytest.mark.parametrize("options", [{"dtype": "int32"}, {"eod_token": 7}])
def test_options_that_contradict_an_index_are_refused(tmp_path: Path, options: dict) -> None:
    write(tmp_path / "theirs", SMALL)
    option = f"--{next(iter(options)).replace('_', '-')}"
    with pytest.raises(ConfigError, match=f"of kind mmididx.* record.*leave out .*{option}"):
        imported(tmp_path / "theirs.bin", **options)
    assert not list(tmp_path.glob("ours*"))


def test_unsigned_ids_beyond_int32_are_refused(tmp_path: Path) -> None:
    path = flat_file(tmp_path, [1, 2**31, 0], np.uint32)
    with pytest.raises(DataError, match=r"ids from -2147483648 \(2147483648 as uint32\)"):
        imported(path, dtype="uint32", eod_token=0)


def test_labels_keep_their_minus_100(tmp_path: Path) -> None:
    write(tmp_path / "theirs", [[[-100, 7]]], np.int32, allow_negative=True)
    (tmp_path / "theirs.meta.json").unlink()
    imported(tmp_path / "theirs")
    check(tmp_path / "ours", [[-100, 7]], np.int32)


def test_meta_file_names_the_source(tmp_path: Path) -> None:
    write(tmp_path / "theirs", [[d] for d in DOCUMENTS])
    imported(tmp_path / "theirs", metadata={"tokenizer": "gpt2"})
    meta = json.loads((tmp_path / "ours.meta.json").read_text())
    assert (meta["imported_from"], meta["tokenizer"]) == ("mmididx", "gpt2")
    assert meta["bin"]["bytes"] == 2 * len(FLAT)
