"""verify reports every known kind of damage; repair repairs it if possible."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from dataclasses import dataclass
from operator import methodcaller
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given

from megapack.errors import FormatError
from megapack.storage import IndexedDataset
from megapack.storage.repair import repair
from megapack.storage.verify import find_duplicates, verify
from storage.strategies import Corpus, by_hand, corpora, errors, files, write, write_foreign

CORPUS: Corpus = [[[i, i + 1, i + 2]] for i in range(10)] + [[[1], [2, 3]]]
S, D = 12, 12  # sequences, document indices
LENGTHS, POINTERS, DOCUMENTS = 34, 34 + 4 * S, 34 + 12 * S


Damage = Callable[[bytearray], object]  # of an .idx


def edit_index(prefix: Path, change: Damage) -> None:
    path = Path(f"{prefix}.idx")
    content = bytearray(path.read_bytes())
    change(content)
    path.write_bytes(content)


def codes(prefix: Path, severity: str = "error", **options: object) -> list[str]:
    return [found.code for found in verify(prefix, **options) if found.severity == severity]


def foreign(prefix: Path, dtype: type = np.uint16, corpus: Corpus = CORPUS) -> Path:
    write_foreign(prefix, corpus, dtype)
    return prefix


@given(corpus=corpora)
def test_sound_files_stay_unchanged(tmp_path_factory: pytest.TempPathFactory, corpus: list) -> None:
    prefix = tmp_path_factory.mktemp("verify") / "data"
    write(prefix, corpus, vocab_size=128)
    before = files(prefix)
    assert {f.severity for f in verify(prefix)} <= {"note"}
    assert repair(prefix) == []
    assert files(prefix) == before
    Path(f"{prefix}.meta.json").unlink()
    assert {f.severity for f in verify(prefix)} <= {"note"}
    assert repair(prefix) == []


def set_code(value: int) -> Damage:
    return lambda content: content.__setitem__(17, value)


def set_number(at: int, value: int, kind: str = "<q") -> Damage:
    return lambda content: struct.pack_into(kind, content, at, value)


def cut(at: int) -> Damage:
    return lambda content: content.__delitem__(slice(at, None))


def keep_documents(count: int) -> Damage:
    """Set the document indices; GPT-NeoX's merge writes one, [0]."""

    def change(content: bytearray) -> None:
        struct.pack_into("<Q", content, 26, count)
        del content[DOCUMENTS + 8 * count :]

    return change


LONGER = methodcaller("extend", b"abc")
WRONG_POINTER = set_number(POINTERS + 8 * 5, 1000)


@dataclass
class Case:
    name: str
    damage: Damage
    code: str  # of verify's finding
    said: str  # repair's message
    documents: str = "kept"  # or "sequences": every sequence became a document


EACH = "made each of the 12 sequences a document"
SOME = "made sequences 5 to 12 a document each"
CUT = "completed an .idx that ended after"
CASES = [
    Case("lost", keep_documents(1), "documents-lost", EACH, "sequences"),
    Case("few", keep_documents(6), "documents", SOME, "sequences"),
    Case("deepspeed", set_code(6), "dtype", "code 6 means uint16 in DeepSpeed's table: now uint16"),
    Case("unknown code", set_code(77), "dtype", "dtype code 77"),
    Case("pointer", WRONG_POINTER, "pointers", "recomputed the pointers of 12 sequences"),
    # verify once raised here instead of returning a finding.
    Case("late", set_number(DOCUMENTS, 1), "documents", "document 0 began at sequence 1: now at 0"),
    Case("longer", LONGER, "trailing-idx", "dropped 3 bytes after the end of the index"),
    Case("in pointers", cut(POINTERS + 17), "index", CUT, "sequences"),
    Case("in documents", cut(DOCUMENTS + 8 * 4 + 3), "index", CUT, "sequences"),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_damage_is_named_and_repaired_to_the_byte(tmp_path: Path, case: Case) -> None:
    prefix = foreign(tmp_path / "data")
    whole = files(prefix)
    edit_index(prefix, case.damage)
    damaged, inode = files(prefix), (tmp_path / "data.idx").stat().st_ino
    assert case.code in codes(prefix) + codes(prefix, "warning")
    assert any(case.said in step for step in repair(prefix, dry_run=True))
    assert files(prefix) == damaged, "a dry run changes nothing"
    assert any(case.said in step for step in repair(prefix))
    if case.documents == "sequences":
        flat = [[sequence] for document in CORPUS for sequence in document]
        whole = files(foreign(tmp_path / "expected", corpus=flat))
    assert files(prefix) == whole
    assert codes(prefix) == [] and codes(prefix, "warning") == []
    original = tmp_path / "data.idx.orig"
    assert original.read_bytes() == damaged[".idx"]
    assert original.stat().st_ino == inode, "a copy, which a crash could leave incomplete"
    assert repair(prefix) == []


@pytest.mark.parametrize(
    ("code", "raw", "becomes"),
    [(7, np.uint32, np.int32), (8, np.uint64, np.int64), (6, np.uint16, np.uint16)],
)
def test_dtype_codes_of_deepspeed_are_recognized(
    tmp_path: Path, code: int, raw: type, becomes: type
) -> None:
    prefix = foreign(tmp_path / "data", becomes)
    edit_index(prefix, set_code(code))
    assert "dtype" in codes(prefix)
    repair(prefix)
    dataset = IndexedDataset(prefix)
    assert dataset.dtype == becomes
    np.testing.assert_array_equal(dataset.tokens.astype(raw)[:6], [0, 1, 2, 1, 2, 3])


@pytest.mark.parametrize(("code", "dtype"), [(6, np.float64), (7, np.float32), (6, np.float32)])
def test_floats_are_not_tokens(tmp_path: Path, code: int, dtype: type) -> None:
    width = np.dtype(dtype).itemsize
    prefix = foreign(tmp_path / "data", {4: np.int32, 8: np.int64}[width])
    values = np.fromfile(f"{prefix}.bin", f"i{width}").astype(dtype) + 1
    values.tofile(f"{prefix}.bin")
    edit_index(prefix, set_code(code))
    [finding] = errors(prefix)
    assert finding.code == "dtype" and "a file of token ids" in finding.remedy
    with pytest.raises(FormatError, match="cannot be repaired"):
        repair(prefix)


def test_overflowed_pointers_are_recomputed(tmp_path: Path) -> None:
    """Old releases summed pointers in 32 bits (40 billion tokens; here a sparse .bin)."""
    n = 2**30 - 1
    lengths, documents = [n] * 5, list(range(6))
    pointers = (np.arange(5) * n * 2).astype(np.int32).tolist()
    by_hand(tmp_path / "data", lengths, pointers, documents)
    os.truncate(tmp_path / "data.bin", 5 * n * 2)
    [finding] = errors(tmp_path / "data")
    assert "overflowed 32 bits" in finding.message
    assert repair(tmp_path / "data") == ["recomputed the pointers of 5 sequences"]
    assert codes(tmp_path / "data", tokens=False) == []
    pointers = IndexedDataset(tmp_path / "data").sequence_pointers
    assert pointers.tolist() == [2 * n * i for i in range(5)]


def test_pointers_in_another_order_are_not_recomputed(tmp_path: Path) -> None:
    prefix = foreign(tmp_path / "data", corpus=[[[1, 2]], [[]], [[3]], [[4, 5, 6]]])
    order = [3, 1, 0, 2]
    dataset = IndexedDataset(prefix)
    lengths = dataset.sequence_lengths[order].tobytes()
    pointers = dataset.sequence_pointers[order].tobytes()
    edit_index(prefix, lambda content: content.__setitem__(slice(34, 34 + 48), lengths + pointers))
    assert codes(prefix) == ["pointers"]
    before = files(prefix)
    with pytest.raises(FormatError, match="in another order"):
        repair(prefix)
    assert files(prefix) == before


@pytest.mark.parametrize("cut", [1, 2, 3, 6, 7, 13, 60])
def test_drop_truncated_keeps_complete_documents(tmp_path: Path, cut: int) -> None:
    prefix = tmp_path / "data"
    write(prefix, CORPUS, vocab_size=100, metadata={"tokenizer": "t"})
    os.truncate(f"{prefix}.bin", 66 - cut)
    assert codes(prefix) == ["bin-truncated"]
    with pytest.raises(FormatError, match="--drop-truncated"):
        repair(prefix)
    repair(prefix, drop_truncated=True)
    left = (66 - cut) // 6
    write(tmp_path / "expected", CORPUS[: min(left, 10)])
    assert files(prefix) == files(tmp_path / "expected")
    assert codes(prefix) == []
    meta = IndexedDataset(prefix).meta
    assert (meta["tokenizer"], meta["vocab_size"], meta["num_documents"]) == ("t", 100, left)


def test_drop_trailing_removes_bytes_after_the_tokens(tmp_path: Path) -> None:
    prefix = foreign(tmp_path / "data")
    whole = files(prefix)
    with Path(f"{prefix}.bin").open("ab") as file:
        file.write(b"12345")
    assert codes(prefix, "warning") == ["trailing-bin"]
    assert repair(prefix) == []
    (tmp_path / "other").hardlink_to(tmp_path / "data.bin")
    with pytest.raises(FormatError, match="has hard links"):
        repair(prefix, drop_trailing=True)
    (tmp_path / "other").unlink()
    said = repair(prefix, drop_trailing=True)
    assert said == ["removed 5 bytes of .bin that belong to no sequence"]
    assert files(prefix) == whole


def test_invalid_documents_are_discarded_on_request(tmp_path: Path) -> None:
    prefix = foreign(tmp_path / "data")
    edit_index(prefix, set_number(DOCUMENTS + 8 * 3, -5))
    assert codes(prefix) == ["documents"]
    with pytest.raises(FormatError, match=r"document 2 .*--one-document-per-sequence"):
        repair(prefix)
    repair(prefix, one_document_per_sequence=True)
    assert IndexedDataset(prefix).num_documents == 12


def test_modes_survive_a_repair(tmp_path: Path) -> None:
    prefix = foreign(tmp_path / "data")
    with Path(f"{prefix}.idx").open("ab") as file:
        file.write(bytes(range(12)))
    assert "multimodal" in {f.code for f in verify(prefix)}
    edit_index(prefix, WRONG_POINTER)
    repair(prefix)
    assert list(IndexedDataset(prefix, multimodal=True).sequence_modes) == list(range(12))


@pytest.mark.parametrize("content", [b"", b"TNTIDX\0\0" + bytes(64), b"garbage" * 20])
def test_files_of_other_formats_cannot_be_repaired(tmp_path: Path, content: bytes) -> None:
    prefix = foreign(tmp_path / "data")
    Path(f"{prefix}.idx").write_bytes(content)
    assert codes(prefix) == ["index"]
    with pytest.raises(FormatError):
        repair(prefix)
    assert Path(f"{prefix}.idx").read_bytes() == content


def test_negative_lengths_cannot_be_repaired(tmp_path: Path) -> None:
    prefix = foreign(tmp_path / "data")
    edit_index(prefix, set_number(LENGTHS + 4 * 7, -3, "<i"))
    [finding] = errors(prefix)
    assert "sequence 7: a sequence has length -3" in finding.message
    with pytest.raises(FormatError, match="sequence 7"):
        repair(prefix)


def test_changed_index_is_detected_by_its_checksum(tmp_path: Path) -> None:
    prefix = tmp_path / "data"
    write(prefix, [[[1, 2]], [[3]]])
    other = files(foreign(tmp_path / "other", corpus=[[[1]], [[2, 3]]]))
    Path(f"{prefix}.idx").write_bytes(other[".idx"])
    assert codes(prefix) == ["checksum"]


def test_ids_and_document_ends_are_checked_against_the_meta_file(tmp_path: Path) -> None:
    write(tmp_path / "a", [[[5, 1, 0]], [], [[2, 0]]], metadata={"document_end_token": 0})
    assert codes(tmp_path / "a") == []
    assert codes(tmp_path / "a", vocab_size=5) == ["id-beyond-vocabulary"]
    assert codes(tmp_path / "a", document_end_token=1) == ["document-end"]
    write(tmp_path / "b", [[[5, 0]], [[7, 7], [0, 7]]], metadata={"document_end_token": 0})
    [finding] = errors(tmp_path / "b")
    assert finding.message.startswith("document 1, position 3: token id 7 should be the last, 0")
    write(tmp_path / "c", [[[1, 2]], [[2, 1]]], metadata={"document_begin_token": 1})
    assert codes(tmp_path / "c") == ["document-begin"]


def test_negative_ids_need_allow_negative(tmp_path: Path) -> None:
    write(tmp_path / "labels", [[[-100, 5]]], np.int32, allow_negative=True)
    assert codes(tmp_path / "labels") == []
    (tmp_path / "labels.meta.json").unlink()
    assert codes(tmp_path / "labels") == ["negative-id"]


def test_duplicates_are_found(tmp_path: Path) -> None:
    for name, corpus in (("a", CORPUS), ("b", CORPUS), ("c", CORPUS[1:])):
        write(tmp_path / name, corpus)
    (tmp_path / "d.bin").hardlink_to(tmp_path / "c.bin")
    (tmp_path / "d.idx").symlink_to(tmp_path / "c.idx")
    prefixes = [str(tmp_path / name) for name in "abcd"]
    found = find_duplicates(prefixes)
    assert set(found) == {prefixes[1], prefixes[3]}
    assert found[prefixes[3]].message.endswith(f"as {prefixes[2]}")


def test_missing_files_are_findings(tmp_path: Path) -> None:
    assert codes(tmp_path / "data") == ["missing", "missing"]
    foreign(tmp_path / "data")
    (tmp_path / "data.bin").unlink()
    assert codes(tmp_path / "data") == ["missing"]
