"""Reading: views of the mapped file, documents, and errors of damaged files."""

from __future__ import annotations

import os
import pickle
import re
import struct
import sys
from itertools import pairwise
from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from megapack.data import PackedDataset
from megapack.errors import ConfigError, FormatError
from megapack.packing import pack
from megapack.storage import IndexedDataset, IndexedDatasetBuilder, read_document_lengths
from megapack.storage.address import path_in
from megapack.storage.files import file_exists, open_regular, read_array_blocks
from megapack.storage.index_file import name_of, path_of
from megapack.storage.verify import verify
from storage.strategies import SMALL, by_hand, corpora, files, flatten, index_bytes, write


@given(
    corpus=corpora, dtype=st.sampled_from([np.uint16, np.int32, np.int64, np.uint8]), data=st.data()
)
def test_items_slices_and_parts_equal_a_list(
    tmp_path_factory: pytest.TempPathFactory, corpus: list, dtype: type, data: st.DataObject
) -> None:
    prefix = tmp_path_factory.mktemp("read") / "data"
    write(prefix, corpus, dtype)
    expected = [sequence for document in corpus for sequence in document]
    dataset = IndexedDataset(prefix)
    assert dataset.dtype == dtype and dataset.num_documents == len(corpus)
    assert [list(dataset[i]) for i in range(len(dataset))] == expected
    for d, document in enumerate(corpus):
        first, last = dataset.document_indices[d : d + 2]
        assert [list(sequence) for sequence in dataset[first:last]] == document
        begin, end = dataset.document_offsets[d : d + 2]
        assert list(dataset.tokens[begin:end]) == flatten(document)
    assert list(dataset.document_lengths) == [len(flatten(document)) for document in corpus]
    a, b = data.draw(st.integers(-50, 50)), data.draw(st.integers(-50, 50))
    assert [list(view) for view in dataset[a:b]] == expected[a:b]
    if expected:
        i = data.draw(st.integers(-len(expected), len(expected) - 1))
        begin = data.draw(st.integers(0, len(expected[i])))
        length = data.draw(st.integers(0, len(expected[i]) - begin))
        assert list(dataset[i]) == expected[i]
        assert list(dataset.get(i, begin)) == expected[i][begin:]
        assert list(dataset.get(np.int64(i), begin, length)) == expected[i][begin : begin + length]


def test_tokens_are_read_only_views_of_one_mapping(tmp_path: Path) -> None:
    write(tmp_path / "data", SMALL)
    dataset = IndexedDataset(tmp_path / "data")
    assert np.shares_memory(dataset[0], dataset.tokens)
    for array in (dataset.tokens, dataset[0], dataset.document_offsets, dataset.sequence_lengths):
        with pytest.raises(ValueError, match="read-only"):
            array[:1] = 0
    for array in (dataset.sequence_lengths, dataset.sequence_pointers, dataset.document_indices):
        assert array.flags.aligned


def test_missing_sequences_are_index_errors(tmp_path: Path) -> None:
    write(tmp_path / "data", SMALL)
    dataset = IndexedDataset(tmp_path / "data")
    for call in (
        lambda: dataset[5],
        lambda: dataset[-6],
        lambda: dataset.get(0, 2, 2),
        lambda: dataset.get(0, -1),
        lambda: dataset.get(0, 0, -1),
        lambda: dataset.get(0, 4),
    ):
        with pytest.raises(IndexError):
            call()
    with pytest.raises(ValueError, match="slice step is 2"):
        dataset[::2]
    with pytest.raises(TypeError, match="integer or a slice"):
        dataset["0"]


def test_pickle_is_small_and_finds_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(Path("data"), SMALL * 1000)
    dataset = IndexedDataset("data")
    assert dataset.document_offsets.size == 5001
    state = pickle.dumps(dataset)
    monkeypatch.chdir("/")
    copy = pickle.loads(state)
    assert len(state) < 500
    np.testing.assert_array_equal(copy.tokens, dataset.tokens)
    assert copy.fingerprint == dataset.fingerprint


def test_lengths_need_only_the_index(tmp_path: Path) -> None:
    write(tmp_path / "data", SMALL)
    (tmp_path / "data.bin").unlink()
    lengths = read_document_lengths(tmp_path / "data")
    assert lengths.dtype == np.int32
    assert list(lengths) == [len(flatten(document)) for document in SMALL]


def test_disk_error_is_not_reported_as_truncation() -> None:
    """Page 0 of this process is not mapped: reading it fails like a broken disk."""
    with open_regular("/proc/self/mem") as file, pytest.raises(OSError, match="Input/output"):
        list(read_array_blocks(file, np.int32, 10))


def test_documents_beyond_2_31_tokens_have_64_bit_lengths(tmp_path: Path) -> None:
    n = 2**31 - 1
    prefix = by_hand(tmp_path / "data", [n, n, 5], [0, n, 2 * n], [0, 2, 3], code=1)
    os.truncate(f"{prefix}.bin", 2 * n + 5)  # a sparse file
    lengths = read_document_lengths(prefix)
    assert lengths.dtype == np.int64
    assert list(lengths) == [2 * n, 5]
    dataset = IndexedDataset(prefix)
    assert list(dataset.document_offsets) == [0, 2 * n, 2 * n + 5]
    assert dataset.num_tokens == 2 * n + 5


def test_neox_merge_without_documents_has_one_per_sequence(tmp_path: Path) -> None:
    dataset = IndexedDataset(by_hand(tmp_path / "data", [3, 0, 2], [0, 6, 6], [0], bin_bytes=10))
    assert list(dataset.document_indices) == [0, 1, 2, 3]
    assert list(dataset.document_lengths) == [3, 0, 2]
    assert list(dataset.document_offsets) == [0, 3, 3, 5]


BAD_HEADERS = [
    (b"", "truncated"),
    (b"MMIDIDX", "truncated"),
    (b"TNTIDX\0\0" + bytes(60), "begins with 'TNTIDX"),
    (b"PK\3\4" + bytes(60), r"begins with 'PK"),
    (index_bytes([1], [0], [0, 1])[:-1], "truncated"),
    (struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 2, 8, 0, 1) + bytes(8), "version 2"),
    *(
        (struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, *counts), "cannot hold")
        for counts in ((2**63, 2**63), (2**64 - 1, 1), (0, 2**61))
    ),
]


@pytest.mark.parametrize(("content", "message"), BAD_HEADERS)
def test_invalid_index_is_refused_by_name(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "data.idx").write_bytes(content)
    (tmp_path / "data.bin").write_bytes(bytes(100))
    with pytest.raises(FormatError, match=rf"data\.idx.*{message}"):
        IndexedDataset(tmp_path / "data")


def test_ambiguous_dtype_codes_are_refused(tmp_path: Path) -> None:
    for code in (0, 6, 7, 9, 255):
        prefix = by_hand(tmp_path / "data", [3], [0], [0, 1], code=code, bin_bytes=24)
        with pytest.raises(FormatError, match=f"dtype code {code}"):
            IndexedDataset(prefix)


def test_bin_shorter_than_its_index_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "data", SMALL)
    with (tmp_path / "data.bin").open("ab") as file:
        file.write(b"xyz")
    assert IndexedDataset(tmp_path / "data").num_tokens == 10, "bytes after the tokens"
    os.truncate(tmp_path / "data.bin", 19)
    with pytest.raises(FormatError, match=r"data\.bin has 19 bytes.*ends at byte 20"):
        IndexedDataset(tmp_path / "data")


@pytest.mark.parametrize(
    ("lengths", "pointers", "documents", "message"),
    [
        # DeepSpeed's uint64 has the same code: read as uint16, the tokens would be wrong.
        ([3, 4], [0, 24], [0, 1, 2], "sequence 1 points at byte 24, but uint16"),
        ([2, -1, 2], [0, 4, 2], [0, 1, 2, 3], "sequence 1 has length -1"),
        ([2, 2, 2], [0, 6, 8], [0, 1, 2, 3], "sequence 1 points at byte 6"),
        ([2, 2, 2], [0, 4, -8], [0, 1, 2, 3], "points at byte -8"),
        ([2, 2, 2], [0, 4, 8], [0, 2, 1, 3], r"document_indices\[2\] is 1"),
        ([2, 2, 2], [0, 4, 8], [0, 1, 2], "end at 2 instead of the number of sequences, 3"),
        ([2, 2, 2], [0, 4, 8], [1, 2, 3], r"document_indices\[0\] is 1"),
        ([2, 2, 2], [0, 4, 8], [0, 2**40, 3], r"document_indices\[2\] is 3"),
        ([2, 2, 2], [0, 4, 8], [0, -1, 3], r"document_indices\[1\] is -1"),
    ],
)
def test_inconsistent_index_is_refused(
    tmp_path: Path, lengths: list, pointers: list, documents: list, message: str
) -> None:
    prefix = by_hand(tmp_path / "data", lengths, pointers, documents, bin_bytes=56)
    with pytest.raises(FormatError, match=message):
        _ = IndexedDataset(prefix).document_offsets


def test_sequence_outside_bin_is_refused(tmp_path: Path) -> None:
    for pointer in (3, 397, 400, -2, 2**62):
        pointers = [*range(0, 280, 4), pointer, *range(284, 400, 4)]
        by_hand(tmp_path / "data", [2] * 100, pointers, range(101), bin_bytes=400)
        dataset = IndexedDataset(tmp_path / "data")
        assert list(dataset[69]) == [0, 0]
        with pytest.raises(FormatError, match="sequence 70 is outside"):
            _ = dataset[70]


def test_fingerprint_covers_size_and_spread_blocks(tmp_path: Path) -> None:
    lengths = np.arange(200_000) % 3
    with IndexedDatasetBuilder(tmp_path / "data", np.uint16) as builder:
        builder.add_documents(np.zeros(lengths.sum(), np.uint16), np.cumsum([0, *lengths]))
    data = (tmp_path / "data.idx").read_bytes()
    last = (len(data) - 1) >> 16
    assert last == 61, "more blocks than it reads"
    ends = [0, 34 + 4 * 200_000, 34 + 12 * 200_000, len(data)]
    near = {at for b, e in pairwise(ends) for at in (b, b + 512, e - 1)}
    blocks = {last * i // 15 for i in range(16)} | {at >> 16 for at in near}
    digests = [xxhash.xxh64_hexdigest(data[b << 16 : (b + 1) << 16]) for b in sorted(blocks)]
    expected = xxhash.xxh3_128_hexdigest((str(len(data)) + "".join(digests)).encode())
    assert IndexedDataset(tmp_path / "data").fingerprint == expected
    # One more token in any document changes it, since all later pointers change.
    for document in (1, 77_777, 199_998):
        lengths[document] += 1
        pointers = 2 * (np.cumsum(lengths) - lengths)
        by_hand(tmp_path / "other", lengths, pointers, range(200_001), bin_bytes=1 << 20)
        assert IndexedDataset(tmp_path / "other").fingerprint != expected
        lengths[document] -= 1


def test_other_blocks_are_checked_when_they_are_read(tmp_path: Path) -> None:
    lengths = np.full(200_000, 2)
    arrays = [lengths, 4 * np.arange(200_000), np.arange(200_001)]
    sound = IndexedDataset(by_hand(tmp_path / "data", *arrays, bin_bytes=800_000))
    fingerprint, checksums = sound.fingerprint, sound.idx_checksums
    sequence = (
        (22 << 16) - 34 - 4 * 200_000
    ) // 8 + 100  # its pointer is in a block that the fingerprint skips
    arrays[1][[sequence, sequence + 1]] = arrays[1][[sequence + 1, sequence]]
    by_hand(tmp_path / "data", *arrays, bin_bytes=800_000)

    def held() -> IndexedDataset:
        dataset = IndexedDataset(tmp_path / "data")
        assert dataset.fingerprint == fingerprint
        dataset.verify_reads(checksums)
        return dataset

    assert len(IndexedDataset(tmp_path / "data")[sequence]) == 2, "no checksums were set"
    assert held()[sequence - 10_000].tolist() == held()[-1].tolist() == [0, 0]
    message = r"data\.idx is damaged: bytes 1441792 to 1507328 do not .* pack the dataset again"
    for read in (
        lambda: held()[sequence],
        lambda: held().get(sequence),
        lambda: held().document_offsets,
        lambda: held().sequence_pointers,
    ):
        with pytest.raises(FormatError, match=message):
            read()
    with pytest.raises(FormatError, match="blocks and 1 checksums"):
        IndexedDataset(tmp_path / "data").verify_reads(checksums[:16])


def test_meta_file_is_optional_but_checked(tmp_path: Path) -> None:
    write(tmp_path / "data", SMALL, vocab_size=12)
    assert IndexedDataset(tmp_path / "data").vocab_size == 12
    meta = tmp_path / "data.meta.json"
    for text, message in [
        ("{", "not valid JSON"),
        ("[]", "not a megapack meta file"),
        ('{"format": "megapack dataset", "version": 2}', "version 2"),
        ('{"format": "megapack dataset", "version": 1}', "missing or invalid keys"),
    ]:
        meta.write_text(text)
        with pytest.raises(FormatError, match=message):
            _ = IndexedDataset(tmp_path / "data").meta
    meta.unlink()
    dataset = IndexedDataset(tmp_path / "data")
    assert dataset.meta is None and dataset.vocab_size is None


def test_missing_files_are_named_os_errors(tmp_path: Path) -> None:
    for suffix in ("idx", "bin"):
        write(tmp_path / "data", SMALL, overwrite=True)
        assert IndexedDataset.exists(tmp_path / "data")
        (tmp_path / f"data.{suffix}").unlink()
        assert not IndexedDataset.exists(tmp_path / "data")
        with pytest.raises(FileNotFoundError, match=rf"data\.{suffix}"):
            IndexedDataset(tmp_path / "data")


@given(text=st.text("a./:\n", max_size=9))
def test_names_are_written_as_pathlib_writes_them(text: str) -> None:
    try:
        expected = str(path_of(text, ".idx"))
    except ConfigError as error:
        with pytest.raises(ConfigError, match=re.escape(str(error))):
            name_of(text, ".idx")
        return
    assert name_of(text, ".idx") == expected
    assert name_of(text, "") == str(Path(text))
    assert path_in(Path("x/y"), f"/{text}") == str(Path("x/y") / f"/{text}")


@pytest.mark.parametrize("name", ["data.idx", "missing", "data.idx/below", "loop", ".", "a\0b"])
def test_a_file_exists_as_pathlib_says(tmp_path: Path, name: str) -> None:
    write(tmp_path / "data", SMALL)
    (tmp_path / "loop").symlink_to("loop")
    assert file_exists(f"{tmp_path}/{name}") == (tmp_path / name).exists()
    with pytest.raises(OSError, match="too long"):
        file_exists(f"{tmp_path}/{'a' * 300}")


def test_prefixes_may_contain_dots(tmp_path: Path) -> None:
    write(tmp_path / "v1.5", SMALL)
    assert (tmp_path / "v1.5.idx").exists()
    assert len(IndexedDataset(tmp_path / "v1.5.idx")) == len(IndexedDataset(tmp_path / "v1.5"))


# ---- The format does not change: golden files of megatron-core ----------------------------------


GOLDEN = Path(__file__).parents[1] / "golden" / "mmididx"
CORPUS = [[[1, 2, 3]], [[40_000], [5, 6]], [], [[]], [[7, 8, 9, 10], [11]]]
MODES = [[0], [1, 2], [], [3], [-1, 0]]


@pytest.mark.parametrize("name", ["uint16", "int32", "multimodal"])
def test_golden_files_are_written_and_read(tmp_path: Path, name: str) -> None:
    assert sys.byteorder == "little", "the format is little endian and so is this package"
    multimodal = name == "multimodal"
    dtype = np.uint16 if name == "uint16" else np.int32
    with IndexedDatasetBuilder(tmp_path / name, dtype, multimodal) as builder:
        for document, modes in zip(CORPUS, MODES, strict=True):
            lengths = [len(sequence) for sequence in document]
            builder.add_document(flatten(document), lengths, modes if multimodal else None)
    assert files(tmp_path / name) == files(GOLDEN / name)
    dataset = IndexedDataset(GOLDEN / name, multimodal)
    assert list(dataset.document_lengths) == [3, 3, 0, 0, 5]
    assert list(dataset.tokens) == [token for document in CORPUS for token in flatten(document)]
    if multimodal:
        assert list(dataset.sequence_modes) == [mode for modes in MODES for mode in modes]
    assert not [f for f in verify(GOLDEN / name) if f.severity != "note"]


def test_opening_does_not_list_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder may have thousands of datasets, and a run opens them all."""
    with IndexedDatasetBuilder(tmp_path / "d", dtype=np.uint16) as builder:
        builder.add_document([1, 2])
    pack([2], buckets=[2]).save(tmp_path / "d.samples", source=IndexedDataset(tmp_path / "d"))

    def refuse(*_: object) -> NoReturn:
        raise AssertionError("the folder was listed")

    for module, name in ((Path, "glob"), (Path, "iterdir"), (os, "listdir"), (os, "scandir")):
        monkeypatch.setattr(module, name, refuse)
    assert len(PackedDataset(tmp_path / "d", tmp_path / "d.samples")) == 1
