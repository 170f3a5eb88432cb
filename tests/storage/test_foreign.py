"""Files of other tools, intact or damaged: imported correctly or refused.

An independent reader in plain Python (``READERS``) gives the expected documents: it implements the
published layouts and refuses every byte that they do not describe.
"""

from __future__ import annotations

import ast
import gzip
import io
import itertools
import json
import os
import pickle
import random
import re
import shlex
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from programs import PYTHON, ended

from megapack import IndexedDataset, pack
from megapack.errors import ConfigError, DataError, FormatError, MegapackError
from megapack.storage import read_document_lengths
from megapack.storage.columns import INTERPRETED
from megapack.storage.dataset import read_documents, read_lengths_file
from megapack.storage.importing import import_dataset
from megapack.storage.repair import repair
from megapack.storage.tokens import open_npy
from megapack.storage.verify import verify

ROUNDS = [int(os.environ.get("MEGAPACK_ROUNDS", "40")), pytest.param(500, marks=pytest.mark.pages)]
EOD = 0
Documents = list[list[int]]


# ---- Writers of the layouts ---------------------------------------------------------------------


def draw(rng: random.Random) -> Documents:
    """Return documents that end with EOD, of ids below 30,000."""
    return [
        [*(rng.randrange(1, 30_000) for _ in range(rng.randrange(1, 9))), EOD]
        for _ in range(rng.randrange(3, 9))
    ]


def joined(documents: Documents) -> list[int]:
    return [token for document in documents for token in document]


def write_datatrove(folder: Path, documents: Documents, rng: random.Random) -> Path:
    width, tokens = rng.choice([2, 4]), joined(documents)
    path = folder / "000_shuffled.ds"
    path.write_bytes(struct.pack(f"<{len(tokens)}{'H' if width == 2 else 'I'}", *tokens))
    ends = np.cumsum([len(document) for document in documents]).tolist()
    Path(f"{path}.index").write_bytes(struct.pack(f"<{len(ends)}Q", *ends))
    Path(f"{path}.metadata").write_text(f"gpt2|{width}\n{len(tokens)}\n{len(tokens)} T")
    if rng.random() < 0.7:
        Path(f"{path}.loss").write_bytes(bytes(rng.randrange(2) for _ in tokens))
    return path


def write_dolma(folder: Path, documents: Documents, rng: random.Random) -> Path:
    tokens, path = joined(documents), folder / "token_ids_part_0000.npy"
    path.write_bytes(struct.pack(f"<{len(tokens)}{rng.choice('HIQ')}", *tokens))
    rows, position = io.StringIO(), 0
    for i, document in enumerate(documents):
        rows.write(f'{position},{position + len(document)},"id, {i}",corpus.jsonl,{i}\r\n')
        position += len(document)
    (folder / "token_ids_part_0000.csv.gz").write_bytes(gzip.compress(rows.getvalue().encode()))
    if rng.random() < 0.5:
        mask = bytes(rng.randrange(2) for _ in tokens)
        (folder / "labels_mask_part_0000.npy").write_bytes(mask)
    return path


def write_llm_c(folder: Path, documents: Documents, rng: random.Random) -> Path:
    tokens, path = joined([[EOD, *document[:-1]] for document in documents]), folder / "val.bin"
    magic, version, code = rng.choice([(20240520, 1, "H"), (20240801, 7, "I")])
    header = struct.pack("<256i", magic, version, len(tokens), *[0] * 253)
    path.write_bytes(header + struct.pack(f"<{len(tokens)}{code}", *tokens))
    return path


def write_npy(folder: Path, documents: Documents, rng: random.Random) -> Path:
    np.save(folder / "tokens.npy", np.array(joined(documents), rng.choice(["<u2", "<u4", "<i8"])))
    return folder / "tokens.npy"


def write_flat(folder: Path, documents: Documents, _: random.Random) -> Path:
    path, tokens = folder / "train.bin", joined(documents)
    path.write_bytes(struct.pack(f"<{len(tokens)}H", *tokens))
    (folder / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": 30_000, "itos": {0: "a"}}))
    return path


def write_mmididx(folder: Path, documents: Documents, rng: random.Random) -> Path:
    dtype = np.dtype(rng.choice(["u2", "i4", "i8"]))
    lengths = np.array([len(document) for document in documents], np.int64)
    return write_pair(str(folder / "corpus"), np.array(joined(documents), dtype), lengths, dtype)


def write_pair(prefix: str, tokens: Any, lengths: Any, dtype: np.dtype[Any]) -> Path:
    """Write a pair whose .idx names ``dtype``; the tokens may have another."""
    code = {"u1": 1, "u2": 8, "u4": 4, "i4": 4, "u8": 5, "i8": 5}[dtype.str[1:]]
    pointers = (np.cumsum(lengths) - lengths) * dtype.itemsize
    count = len(lengths)
    Path(f"{prefix}.bin").write_bytes(tokens.tobytes())
    Path(f"{prefix}.idx").write_bytes(
        b"MMIDIDX\0\0"
        + struct.pack("<QBQQ", 1, code, count, count + 1)
        + struct.pack(f"<{count}i{count}q{count + 1}q", *lengths, *pointers, *range(count + 1))
    )
    return Path(f"{prefix}.bin")


# ---- Readers in plain Python: documents and mask, or ValueError ---------------------------------

Read = tuple[Documents, bytes | None]


def require(condition: object) -> None:
    if not condition:
        raise ValueError


def numbers(data: bytes, code: str) -> list[int]:
    require(len(data) % struct.calcsize(f"<{code}") == 0)
    return [number for (number,) in struct.iter_unpack(f"<{code}", data)]


def cut(tokens: list[int], ends: list[int]) -> Documents:
    require(ends == sorted(ends) and (ends or [0])[-1] == len(tokens))
    return [tokens[a:b] for a, b in zip([0, *ends], ends, strict=False)]


def split(tokens: list[int], at: str = "end") -> Documents:
    documents: Documents = []
    for i, token in enumerate(tokens):
        begins = token == EOD if at == "start" else i and tokens[i - 1] == EOD
        if begins or not documents:
            documents.append([])
        documents[-1].append(token)
    return documents


def mask_of(path: Path, tokens: list[int]) -> bytes | None:
    if not path.exists():
        return None
    mask = path.read_bytes()
    require(len(mask) == len(tokens) and set(mask) <= {0, 1})
    return mask


def read_datatrove(path: Path) -> Read:
    index, metadata = Path(f"{path}.index"), Path(f"{path}.metadata")
    lines = metadata.read_bytes().decode().split("\n") if metadata.exists() else None
    if index.exists():
        ends = numbers(index.read_bytes(), "Q")
        data, count = path.read_bytes(), (ends or [0])[-1]
        width = len(data) // count if count else 0
    else:  # split by the separator; the width is in the metadata
        assert lines is not None
        data, width = path.read_bytes(), int(lines[0].split("|")[1])
    require(width in (2, 4) and len(data) % width == 0)
    tokens = numbers(data, "H" if width == 2 else "I")
    if lines is not None:
        require(len(lines) == 3 and int(lines[1]) == len(tokens))
        require("|" not in lines[0] or int(lines[0].rpartition("|")[2]) == width)
    mask = mask_of(Path(f"{path}.loss"), tokens)
    return (cut(tokens, ends) if index.exists() else split(tokens)), mask


def read_dolma(path: Path) -> Read:
    bounds = path.with_name("token_ids_part_0000.csv.gz")
    require(bounds.exists())
    text = gzip.decompress(bounds.read_bytes())
    rows = [line.split(",", 2) for line in text.decode().splitlines()]
    require(all(row[0].isdecimal() and row[1].isdecimal() for row in rows))
    begins, ends = [int(row[0]) for row in rows], [int(row[1]) for row in rows]
    require(begins == [0, *ends][: len(begins)])
    content, count = path.read_bytes(), (ends or [0])[-1]
    width = len(content) // count if count else 0
    require(width in (1, 2, 4, 8))
    tokens = numbers(content, {1: "B", 2: "H", 4: "I", 8: "Q"}[width])
    return cut(tokens, ends), mask_of(path.with_name("labels_mask_part_0000.npy"), tokens)


def read_llm_c(path: Path) -> Read:
    data = path.read_bytes()
    require(len(data) >= 1024)
    magic, version, count, *others = struct.unpack("<256i", data[:1024])
    require((magic, version) in ((20240520, 1), (20240801, 7)) and not any(others))
    tokens = numbers(data[1024:], "H" if version == 1 else "I")
    require(len(tokens) == count)
    return split(tokens, "start"), None


def read_npy(path: Path) -> Read:
    data = path.read_bytes()
    require(data[:6] == b"\x93NUMPY" and data[6] in (1, 2, 3) and data[7] == 0)
    size, begin = (data[8:10], 10) if data[6] == 1 else (data[8:12], 12)
    end = begin + int.from_bytes(size, "little")
    require(len(data) >= end)
    header = ast.literal_eval(data[begin:end].decode("latin-1").strip())
    require(isinstance(header, dict) and isinstance(header.get("descr"), str))
    code = {"u1": "B", "i1": "b", "u2": "H", "i2": "h", "u4": "I", "i4": "i", "u8": "Q", "i8": "q"}
    tokens = numbers(data[end:], code[header["descr"].lstrip("<|=")])
    require(header["shape"] == (len(tokens),))
    return split(tokens), None


def read_flat(path: Path) -> Read:
    return split(numbers(path.read_bytes(), "H")), None


def read_mmididx(path: Path) -> Read:
    idx, data = path.with_suffix(".idx").read_bytes(), path.read_bytes()
    require(idx[:9] == b"MMIDIDX\0\0" and len(idx) >= 34)
    _, _, count, num_indices = struct.unpack("<QBQQ", idx[9:34])
    require(count < 1000 and num_indices < 1000)
    sizes = 4 * count, 8 * count, 8 * num_indices
    require(len(idx) - 34 - sum(sizes) in (0, count))  # with or without modes
    lengths = numbers(idx[34 : 34 + sizes[0]], "i")
    pointers = numbers(idx[34 + sizes[0] : 34 + sizes[0] + sizes[1]], "q")
    indices = numbers(idx[34 + sizes[0] + sizes[1] : 34 + sum(sizes)], "q")
    require(min(lengths, default=0) >= 0)
    total = sum(lengths)
    width = len(data) // total if total else 0
    require(width in (1, 2, 4, 8) and width * total == len(data))
    order = sorted(range(count), key=lambda i: (pointers[i], lengths[i]))
    position = 0
    for i in order:  # every byte of .bin belongs to one sequence
        require(pointers[i] == position * width)
        position += lengths[i]
    tokens = numbers(data, {1: "B", 2: "H", 4: "i", 8: "q"}[width])
    sequences = [
        tokens[p // width : p // width + n] for p, n in zip(pointers, lengths, strict=True)
    ]
    if len(indices) < 2:
        return sequences, None
    require(indices[0] == 0 and indices == sorted(indices) and indices[-1] == count)
    return [joined(sequences[a:b]) for a, b in itertools.pairwise(indices)], None


SEPARATED = {"eod_token": EOD}
FORMATS: dict[str, tuple[Callable[..., Path], Callable[[Path], Read], dict[str, Any]]] = {
    "datatrove": (write_datatrove, read_datatrove, {}),
    "dolma": (write_dolma, read_dolma, {}),
    "llm.c": (write_llm_c, read_llm_c, SEPARATED),
    "npy": (write_npy, read_npy, SEPARATED),
    "flat": (write_flat, read_flat, {**SEPARATED, "dtype": "uint16"}),
    "mmididx": (write_mmididx, read_mmididx, {}),
}


# ---- Mutations of headers and side files --------------------------------------------------------


def mutate(folder: Path, path: Path, other: Path, rng: random.Random) -> str:
    """Damage one file, but no token itself: only bytes before and after the tokens."""
    side = sorted(each for each in folder.iterdir() if each != path)
    target = rng.choice([*side, *side, path])
    data, theirs = bytearray(target.read_bytes()), (other / target.name)
    header = {"tokens.npy": 128, "val.bin": 1024}.get(path.name, 0) if target == path else len(data)
    how = rng.choice(
        [
            "cut",
            "extend",
            "twice",
            "other",
            "join",
            "flip",
            "step",
            "swap",
            "reverse",
            "none",
            "gone",
        ]
    )
    if how in ("flip", "step", "swap", "reverse") and not header:
        how = "cut"
    at = rng.randrange(min(header, len(data))) if header and data else 0
    if how == "flip" and data:
        data[at] ^= 1 << rng.randrange(8)
    elif how == "step" and data:
        data[at] = (data[at] + rng.choice([1, 255])) % 256
    elif how == "swap":
        size = rng.choice([1, 2, 4, 8])
        one, two = (rng.randrange(max(1, header // size)) * size for _ in range(2))
        data[one : one + size], data[two : two + size] = (
            data[two : two + size],
            data[one : one + size],
        )
    elif how == "reverse":  # the other byte order
        size = rng.choice([2, 4, 8])
        for begin in range(0, min(header, len(data)) - size + 1, size):
            data[begin : begin + size] = data[begin : begin + size][::-1]
    elif how == "cut":
        del data[len(data) - min(len(data), rng.choice([1, 2, 4, 8, len(data) // 2])) :]
    elif how == "extend":
        data += rng.choice([bytes([rng.randrange(256)]), bytes(rng.choice([1, 2, 4, 8]))])
    elif how == "twice":
        data = data + bytes(data)
    elif how in ("other", "join") and theirs.exists():
        data = bytearray(theirs.read_bytes()) if how == "other" else data + theirs.read_bytes()
    elif how == "none":
        data = bytearray()
    target.write_bytes(data)
    if how == "gone":
        target.unlink()
    return f"{how} of {target.name}"


def read_or_none(reader: Callable[[Path], Read], path: Path) -> Read | None:
    try:
        return reader(path)
    except Exception:  # plain Python may raise anything for damaged files
        return None


def stored(prefix: Path) -> Read:
    """Return documents and mask of a dataset; the mask comes from its labels."""
    dataset = IndexedDataset(prefix)
    bounds = np.concatenate([[0], np.cumsum(dataset.document_lengths)])
    tokens = dataset.tokens.tolist()
    documents = [tokens[a:b] for a, b in itertools.pairwise(bounds)]
    if "labels" not in dataset.columns:
        return documents, None
    values = dataset.columns["labels"].rows.tolist()
    assert all(v in (-100, t) for v, t in zip(values, tokens, strict=True))
    return documents, bytes(v >= 0 for v in values)


@pytest.mark.parametrize("rounds", ROUNDS)
@pytest.mark.parametrize("name", FORMATS)
def test_damaged_files_are_imported_correctly_or_refused(
    tmp_path: Path, name: str, rounds: int
) -> None:
    write, read, how = FORMATS[name]
    imported = refused = 0
    for seed in range(rounds):
        rng = random.Random(f"{name} {seed}")
        mine, other, ours = (tmp_path / f"{seed}{part}" for part in ("", "other", "ours"))
        for folder in (mine, other, ours):
            folder.mkdir()
        documents = draw(rng)
        path = write(mine, documents, rng)
        write(other, draw(rng), rng)
        whole = read(path)
        import_dataset(path, ours / "whole", **how)
        assert stored(ours / "whole") == whole, f"seed {seed}, undamaged"
        what = mutate(mine, path, other, rng)
        expected = read_or_none(read, path)
        options = how
        if name == "datatrove" and not Path(f"{path}.index").exists():
            options = SEPARATED
        try:
            import_dataset(path, ours / "out", **options)
        except (MegapackError, FileNotFoundError):
            refused += 1
            assert not IndexedDataset.exists(ours / "out")
            continue
        imported += 1
        assert stored(ours / "out") == expected, f"seed {seed}: {what}"
    assert refused > rounds / 10, "the mutations damage nothing"
    assert imported or name in ("npy", "mmididx"), "every mutation is refused"


# ---- Facts in headers and side files must agree with the bytes -----------------------------------


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refused(path: str | Path, error: type[Exception], message: str, **how: Any) -> None:
    with pytest.raises(error, match=message):
        import_dataset(path, "out", **how)
    assert not Path("out.idx").exists()


def test_concatenated_npy_files_are_refused_everywhere(folder: Path) -> None:
    np.save("a.npy", np.array([1, 2, 0], np.uint16))
    Path("two.npy").write_bytes(Path("a.npy").read_bytes() * 2)
    for read in (open_npy, read_documents, read_lengths_file):
        with pytest.raises(FormatError, match=r"two.npy has 134 bytes after its array"):
            read("two.npy")
    refused("two.npy", FormatError, "numpy.concatenate", eod_token=0)
    os.mkfifo("fifo.npy")  # nobody will ever write to it
    for read in (open_npy, read_documents, read_lengths_file):
        with pytest.raises(FormatError, match=r"fifo.npy is not a regular file"):
            read("fifo.npy")
    np.save("column.npy", np.asfortranarray(np.arange(6, dtype=np.uint16).reshape(2, 3)))
    np.save("scalar.npy", np.uint16(3))
    np.save("object.npy", np.array([1, None], object), allow_pickle=True)
    np.save("fields.npy", np.zeros(3, [("a", "<u2"), ("b", "<u2")]))
    np.save("swapped.npy", np.array([1, 2, 0], ">u2"))
    Path("cut.npy").write_bytes(Path("a.npy").read_bytes()[:-1])
    header = "{'descr': '<u2', 'fortran_order': False, 'shape': " + "(" * 9000 + "1" + ")" * 9000
    Path("deep.npy").write_bytes(
        b"\x93NUMPY\1\0" + struct.pack("<H", len(header)) + header.encode()
    )
    Path("long.npy").write_bytes(b"\x93NUMPY\1\0\xff\xff" + b"(" * 0xFFFF)
    for name in ("column", "scalar", "object", "fields", "swapped", "cut", "deep", "long"):
        refused(f"{name}.npy", MegapackError, r"\A[^\n]{1,400}\Z", eod_token=0)


@pytest.mark.parametrize(
    ("stored_as", "read_as"),
    [
        *(("u4", "u2"), ("u8", "u2"), ("u8", "u4"), ("u2", "u4"), ("u2", "u8"), ("u4", "u8")),
        *(("u4", "u1"), ("u8", "u1")),
    ],
)
@pytest.mark.parametrize("vocab_size", [300, 50_000, 200_000])
def test_wrong_width_is_refused_and_the_likely_one_is_named(
    folder: Path, stored_as: str, read_as: str, vocab_size: int
) -> None:
    if stored_as == "u2":
        vocab_size = min(vocab_size, 60_000)
    ids = np.random.default_rng(7).integers(1, vocab_size, 1040).astype(stored_as)
    ids[9::10] = 0
    ids.tofile("train.bin")
    likely = np.dtype(stored_as).name
    how = {"dtype": np.dtype(read_as).name, "eod_token": 0}
    refused("train.bin", DataError, f"probably {likely}: give --dtype {likely}", **how)
    np.save("view.npy", ids.view(read_as))
    refused("view.npy", DataError, f"probably {likely}", eod_token=0)
    lengths = np.full(104, 10 * ids.itemsize // np.dtype(read_as).itemsize or 1)
    lengths[-1] += ids.nbytes // np.dtype(read_as).itemsize - lengths.sum()
    write_pair("pair", ids, lengths, np.dtype(read_as))
    refused("pair", DataError, f"probably {likely}")
    assert "104 documents" in import_dataset("train.bin", "out", dtype=likely, eod_token=0)


def test_separator_of_llm_c_at_the_end_is_refused(folder: Path) -> None:
    for tokens, likely in (([5, 6, 0, 7, 0], "end"), ([0, 5, 6, 0, 0, 7, 0], "both")):
        header = struct.pack("<256i", 20240520, 1, len(tokens), *[0] * 253)
        Path("val.bin").write_bytes(header + np.array(tokens, np.uint16).tobytes())
        refused("val.bin", ConfigError, f"ends with .* give --eod-at {likely}, or", eod_token=0)
        said = import_dataset("val.bin", f"out-{likely}", eod_token=0, eod_at=likely)
        assert "2 documents" in said and "only a separator" not in said


def test_separators_at_both_ends(folder: Path) -> None:
    np.array([0, 5, 6, 0, 0, 7, 0, 0, 0], np.uint16).tofile("both.bin")
    how: dict[str, Any] = {"dtype": "uint16", "eod_token": 0}
    refused("both.bin", ConfigError, "begins with the separator 0.*--eod-at both", **how)
    said = import_dataset("both.bin", "out", **how, eod_at="both")
    assert "3 documents" in said and "1 of the documents contain only a separator" in said
    dataset = IndexedDataset("out")
    assert [list(d) for d in dataset[:]] == [[0, 5, 6, 0], [0, 7, 0], [0, 0]]
    assert dataset.meta is not None
    assert dataset.meta["document_begin_token"] == dataset.meta["document_end_token"] == 0
    assert not verify("out")
    said = import_dataset("both.bin", "end", **how, eod_at="end")
    assert "6 documents" in said and "4 of the documents contain only a separator" in said
    for tokens in ([0, 5, 0, 6], [0, 5, 0, 6, 0], [5, 0, 0, 6, 0], [0, 5, 0, 0]):
        np.array(tokens, np.uint16).tofile("odd.bin")
        with pytest.raises(DataError, match="do not begin and end with 0"):
            import_dataset("odd.bin", "odd", **how, eod_at="both")


def test_a_loss_mask_becomes_labels(folder: Path) -> None:
    path = write_datatrove(folder, [[5, 6, 0], [7, 0]], random.Random(1))
    Path(f"{path}.loss").write_bytes(bytes([0, 1, 1, 0, 1]))
    for _ in range(2):
        said = import_dataset(path, "out")
        labels = IndexedDataset("out").columns["labels"]
        assert labels.rows.tolist() == [-100, 6, 0, -100, 0]
        assert labels.spec == INTERPRETED["labels"]
    assert "nothing to do" in said
    Path("out.labels.col").unlink()  # a missing file is written again
    assert "nothing to do" not in import_dataset(path, "out")
    assert IndexedDataset("out").columns["labels"].rows.tolist() == labels.rows.tolist()
    meta = IndexedDataset("out").meta
    assert meta is not None and meta["tokenizer"] == {"name": "gpt2"}
    assert meta["document_end_token"] == 0 and meta["loss_mask"]["masked_tokens"] == 2
    Path(f"{path}.loss").write_bytes(bytes([0, 1, 1, 1, 1]))
    with pytest.raises(ConfigError, match="differs"):
        import_dataset(path, "out")
    given = {"labels": (np.zeros(5, np.int32), INTERPRETED["labels"])}
    with pytest.raises(ConfigError, match="loss gives labels already"):
        import_dataset(path, "out", columns=given, overwrite=True)
    Path(f"{path}.loss").unlink()
    with pytest.raises(ConfigError, match="differs"):
        import_dataset(path, "out")
    import_dataset(path, "out", overwrite=True)
    assert not IndexedDataset("out").columns and not Path("out.labels.col").exists()


def write_overflowed(prefix: str, dtype: str) -> None:
    """Make sparse files of 4 GiB and more; pointers were ``dtype``."""
    lengths = np.full(2200, 1 << 20, np.int32)
    pointers = (np.cumsum(lengths, dtype=np.int64) - lengths) * 2
    Path(f"{prefix}.idx").write_bytes(
        b"MMIDIDX\0\0"
        + struct.pack("<QBQQ", 1, 8, 2200, 2201)
        + lengths.tobytes()
        + pointers.astype(dtype).astype(np.int64).tobytes()
        + np.arange(2201).tobytes()
    )
    with Path(f"{prefix}.bin").open("wb") as file:
        file.truncate(2200 << 21)


@pytest.mark.parametrize("dtype", ["i4", "u4"])
def test_overflowed_pointers_are_repaired_first(folder: Path, dtype: str) -> None:
    write_overflowed("old", dtype)
    refused("old", FormatError, "(overflowed 32 bits|do not follow).*`megapack-build repair old`")
    with pytest.raises(FormatError, match=r"overflowed 32 bits.*`megapack-build repair old`"):
        read_document_lengths("old")
    with pytest.raises(FormatError, match=r"overflowed 32 bits.*`megapack-build repair old`"):
        pack(IndexedDataset("old").document_lengths, [1 << 20])
    assert repair("old") == ["recomputed the pointers of 2200 sequences"]
    assert read_document_lengths("old").size == 2200


def test_bytes_outside_all_sequences_are_refused(folder: Path) -> None:
    write_mmididx(folder, [[5, 0], [6, 7, 0]], random.Random(1))
    with Path("corpus.bin").open("ab") as file:
        file.write(bytes(8))
    refused("corpus", FormatError, "`megapack-build repair corpus --drop-trailing`")


def archives() -> dict[str, bytes]:
    text = b'{"text": "a document of words"}\n' * 4
    tar, npz = io.BytesIO(), io.BytesIO()
    with tarfile.open(fileobj=tar, mode="w") as file:
        entry = tarfile.TarInfo("0.txt")
        entry.size = len(text)
        file.addfile(entry, io.BytesIO(text))
    with zipfile.ZipFile(npz, "w") as archive:
        archive.writestr("a.npy", text)
    config = json.dumps({"column_names": ["text"], "column_encodings": ["str"]}).encode()
    begin = 4 + 8 + len(config)
    mds = struct.pack("<III", 1, begin, begin + 8) + config + struct.pack("<I", 4) + b"word"
    tensors = json.dumps({"a": {"dtype": "U16", "shape": [2], "data_offsets": [0, 4]}}).encode()
    return {
        "gzip": gzip.compress(text),
        "zstd": b"\x28\xb5\x2f\xfd" + text,
        "Parquet": b"PAR1" + text + b"PAR1",
        "zip": npz.getvalue(),
        "tar archive": tar.getvalue(),
        "MDS": mds,
        "safetensors": struct.pack("<Q", len(tensors)) + tensors + bytes(4),
        "JSON": text,
        "pickle": pickle.dumps({"a": 1}),
        "evaluation file of llm.c": struct.pack("<256i", 20240522, 1, *[0] * 254),
        "big-endian file of llm.c": struct.pack(">256i", 20240520, 1, *[0] * 254),
        "llm.c or modded-nanogpt": struct.pack("<256i", 20240520, 1, *[0] * 254),
        "idx of a Megatron": b"MMIDIDX\0\0" + bytes(100),
        "lit-llama's packed dataset": b"LITPKDS" + struct.pack("<QBQ", 1, 8, 50) + bytes(100),
        # The checksum of TensorFlow's record writer for a length of 3.
        "TFRecord": struct.pack("<QI", 3, 0x0E4999B0) + b"abc" + bytes(4),
        "Riegeli": bytes.fromhex("83af70d10d884a3f") + bytes(56),
        "file of torch.save": b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19.\x80\x02M\xe9\x03.",
        "zlib stream": zlib.compress(bytes(500)),
        "snappy stream": b"\xff\x06\x00\x00sNaPpY" + bytes(50),
        "pointer of Git LFS": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
        "page of a web server": b"<!DOCTYPE html><html>" + bytes(9),
    }


@pytest.mark.parametrize("name", archives())
def test_files_of_other_formats_are_named(folder: Path, name: str) -> None:
    data = archives()[name]
    Path("file").write_bytes(data + bytes(-len(data) % 2 if name == "JSON" else 0))
    refused("file", FormatError, name, kind="flat", dtype="uint8", eod_token=0)


def test_side_files_that_cannot_be_read_are_not_absent(folder: Path) -> None:
    """A link to nothing, and an .idx of another format next to a .bin."""
    path = write_datatrove(folder, [[5, 6, 0], [7, 0]], random.Random(1))
    write_flat(folder, [[5, 6, 0], [7, 0]], random.Random(1))
    np.save("tokens.npy", np.array([1, 0], np.uint16))
    sides = [(path, f"{path}.{end}") for end in ("index", "metadata", "loss")]
    sides += [
        ("train.bin", "meta.pkl"),
        ("train.bin", "train.idx"),
        ("train.bin", "train.bin.csv.gz"),
    ]
    for tokens, side in [*sides, ("tokens.npy", "tokens.csv.gz")]:
        whole = Path(side).read_bytes() if Path(side).exists() else None
        Path(side).unlink(missing_ok=True)
        Path(side).symlink_to("nothing")
        given = {"dtype": "uint16"} if tokens == "train.bin" else {}
        eod = {} if tokens == path else SEPARATED
        refused(tokens, FileNotFoundError, re.escape(Path(side).name), **given, **eod)
        Path(side).unlink()
        if whole is not None:
            Path(side).write_bytes(whole)
    for index, name in ((b"TNTIDX\0\0", "the .idx of fairseq"), (b"", "damaged, or an index")):
        Path("train.idx").write_bytes(index)
        how: dict[str, Any] = {"dtype": "uint16", **SEPARATED}
        refused("train.bin", FormatError, f"train.idx is {name}.* give --kind flat", **how)
    import_dataset("train.bin", "out", kind="flat", **how)


def test_tar_without_a_magic_is_recognized_by_its_checksum(folder: Path) -> None:
    old = bytearray(archives()["tar archive"])  # as before POSIX
    old[257:265] = bytes(8)
    total = sum(old[:512]) - sum(old[148:156]) + 8 * ord(" ")
    old[148:156] = b"%06o\0 " % total
    Path("it's 1.tar").write_bytes(old)
    how: dict[str, Any] = {"kind": "flat", "dtype": "uint8", "eod_token": 0}
    refused("it's 1.tar", FormatError, r"tar archive.* 'it'\"'\"'s 1.tar' >", **how)
    old[300] ^= 1
    Path("other").write_bytes(old)
    import_dataset("other", "out", **how)


def test_side_files_hold_no_tokens(folder: Path) -> None:
    path = write_datatrove(folder, [[5, 0]], random.Random(1))
    Path(f"{path}.loss").write_bytes(bytes(2))
    write_dolma(folder, [[5, 0]], random.Random(1))
    Path("labels_mask_part_0000.npy").write_bytes(bytes(2))
    how: dict[str, Any] = {"dtype": "uint8", "eod_token": 0}
    for end in ("index", "metadata", "loss"):
        refused(f"{path}.{end}", FormatError, f"describes {path} and has no tokens", **how)
    message = "describes token_ids_part_0000.npy"
    refused("labels_mask_part_0000.npy", FormatError, message, kind="flat", **how)


def test_names_in_conversion_commands_are_quoted(folder: Path) -> None:
    """Run the command's program on a stub that prints its requests."""
    shard = {"column_names": ["a'; print(9) #"], "column_encodings": ["str"], "format": "mds"}
    Path("it's").mkdir()
    Path("it's/index.json").write_text(json.dumps({"shards": [shard], "version": 2}))
    with pytest.raises(FormatError) as error:
        import_dataset("it's", "out")
    command = str(error.value).partition("JSON Lines: python -c ")[2].partition(" > corpus")[0]
    code, *words = shlex.split(command)
    Path("streaming.py").write_text(
        'def StreamingDataset(local, batch_size):\n    return [{"a\'; print(9) #": local}]\n'
    )
    assert json.loads(ended(*PYTHON, code, *words).stdout) == {"text": "it's"}


def test_mds_is_recognized_by_its_index(folder: Path) -> None:
    columns = {"column_names": ["tokens"], "column_encodings": ["ndarray:uint16"], "format": "mds"}
    Path("index.json").write_text(json.dumps({"shards": [columns], "version": 2}))
    shard = Path("shard.00000.mds")
    shard.write_bytes(struct.pack("<III", 1, 12, 20) + bytes(8))
    for path in (".", "index.json", shard):
        refused(path, FormatError, r"MDS .*tokens .ndarray:uint16.: write its tokens: python -c")
    Path("index.json").write_text(json.dumps({"chunks": []}))
    refused(shard, FormatError, "LitData")
    Path("index.json").write_text("[]")
    for name in ("shard.00000.mds.br", "shard.00000.mds", "shard.00000.MDS.zstd"):
        Path(name).write_bytes(bytes(16))
        refused(name, FormatError, "MDS without its index.json", dtype="uint8", eod_token=0)
    for name in ("corpus.mds.bin", "x.mds.v2", "mds.u16"):
        np.array([5, 6, 0], np.uint16).tofile(name)
        import_dataset(name, f"{name}-out", dtype="uint16", eod_token=0)


def test_converting_commands_work(folder: Path) -> None:
    Path("corpus.tar").write_bytes(archives()["tar archive"])
    with pytest.raises(FormatError) as error:
        import_dataset("corpus.tar", "out")
    command = str(error.value).partition("JSON Lines: python -c ")[2].partition(" && ")[0]
    code, paths = command.rpartition('"')[0][1:], ["corpus.tar"]
    done = ended(*PYTHON, code, *paths)
    assert [json.loads(line)["text"] for line in done.stdout.splitlines()] == [
        '{"text": "a document of words"}\n' * 4
    ]
