"""Recognize file formats by their first bytes, and say what to do if import cannot read them.

- ``recognize``: the format of a file or folder that is not plain tokens, and a remedy

    recognize("corpus.tar")     # -> "a tar archive (webdataset): write its texts as ..."
    recognize("train.bin")      # -> None: nothing contradicts plain tokens

A magic number of 4 or more bytes is proof enough; after a shorter one, the data must also have the
right structure (sizes that add up, a stream that decompresses).
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import struct
import tarfile
import zlib
from pathlib import Path, PurePath

from megapack.storage.files import file_identity, open_regular

_HEAD_BYTES = 4096
LLM_C_MAGICS = {20240520: "uint16", 20240801: "uint32"}
_LLM_C_OTHERS = {
    20240522: "a multiple-choice evaluation file of llm.c",
    20240326: "a model checkpoint of llm.c",
    20240327: "a debug state of llm.c",
    20240328: "a tokenizer of llm.c",
    20240527: "an optimizer state of llm.c",
}
_MDS_COMPRESSIONS = (".br", ".bz2", ".gz", ".snappy", ".zst", ".zstd")
_NO_TOKENS = "it contains no plain token ids; import a file of tokens"
_LITDATA = "read it with litdata, and add its documents to a megapack.IndexedDatasetBuilder"
_TEXT = "it has text: megapack-build tokenize --input {path} --output-prefix corpus --tokenizer T"
_SAVE = "save {} with numpy.save, and import that .npy"
_UNPACK = "unpack it first: {tool} {path}"
_RECORDS = "write its texts as JSON Lines and tokenize them, or its tokens with numpy.save"

# First bytes, name, remedy. All have 4 or more bytes: 4 match by chance in one of 4 billion files.
_MAGICS: tuple[tuple[bytes, str, str], ...] = (
    (b"\x93NUMPY", "a .npy file", "import it with --kind npy (the default detects it)"),
    (b"MMIDIDX\0\0", "the .idx of a Megatron pair", "import the prefix: leave out the ending .idx"),
    (b"TNTIDX\0\0", "the .idx of fairseq", "write it again with Megatron's --dataset-impl mmap"),
    (b"\x28\xb5\x2f\xfd", "a zstd stream", _UNPACK.format(tool="zstd -d", path="{path}")),
    (b"\xfd7zXZ\0", "an xz stream", _UNPACK.format(tool="xz -dk", path="{path}")),
    (b"\x04\x22\x4d\x18", "an lz4 stream", _UNPACK.format(tool="lz4 -d", path="{path}")),
    (b"PAR1", "a Parquet file", _TEXT),
    (b"ARROW1\0\0", "an Arrow file", _TEXT),
    (b"\xff\xff\xff\xff\x10", "an Arrow stream", _TEXT),
    (b"FEA1", "a Feather file", _TEXT),
    (b"PK\x03\x04", "a zip archive (.npz, torch.save)", _SAVE.format("one array")),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive", _UNPACK.format(tool="7z x", path="{path}")),
    (b"\x89HDF\r\n\x1a\n", "an HDF5 file", _SAVE.format("its array")),
    (b"SQLite format 3\0", "an SQLite database", _NO_TOKENS),
    (b"Obj\x01", "an Avro file", "write its texts as JSON Lines, and tokenize them"),
    (b"ORC\x08", "an ORC file", "write its texts as Parquet, and tokenize them"),
    (b"GGUF", "a GGUF model", _NO_TOKENS),
    (b"\x7fELF", "a program", _NO_TOKENS),
    (
        b"LITPKDS",
        "a chunk of lit-llama's packed dataset (TinyLlama, ProLong)",
        "read its tokens with numpy.fromfile(path, dtype, offset=24), where byte 15 is the code of "
        "dtype, save them with numpy.save, and import that .npy",
    ),
    (bytes.fromhex("83af70d10d884a3f"), "a Riegeli file (ArrayRecord)", _RECORDS),
    (
        b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19.",
        "a file of torch.save",
        _SAVE.format("a tensor"),
    ),
    (b"\xff\x06\x00\x00sNaPpY", "a snappy stream", "unpack it first, with python-snappy"),
    (b"\x02\x21\x4c\x18", "an lz4 stream", _UNPACK.format(tool="lz4 -d", path="{path}")),
    (b"\x50\x2a\x4d\x18", "a zstd stream", _UNPACK.format(tool="zstd -d", path="{path}")),
    (b"\x89LZO\0\r\n\x1a\n", "an lzop stream", _UNPACK.format(tool="lzop -d", path="{path}")),
    (b"Rar!\x1a\x07", "a RAR archive", _UNPACK.format(tool="unrar x", path="{path}")),
    (b"PK\x05\x06", "an empty zip archive", _NO_TOKENS),
    (b"version https://git-lfs", "a pointer of Git LFS", "fetch the file: git lfs pull"),
    (b"<!DOCTYPE", "a page of a web server", "download the file again"),
    (b"<!doctype", "a page of a web server", "download the file again"),
    (b"<html", "a page of a web server", "download the file again"),
)

_TOKENIZE = (
    " > corpus.jsonl && megapack-build tokenize --input corpus.jsonl --output-prefix corpus "
    "--tokenizer T"
)
_TAR_TEXT = (
    'write its texts as JSON Lines: python -c "import json, sys, tarfile; [print({line}) for '
    "t in map(tarfile.open, sys.argv[1:]) for m in t if m.name.endswith('{ending}')]\" {path}"
    + _TOKENIZE
)


def recognize(path: str | os.PathLike[str]) -> str | None:
    """Return "a NAME: REMEDY" for a file or folder that is not plain tokens, or None if its format
    is not recognized. Raises FormatError if the path is neither a regular file nor a folder."""
    path = Path(path)
    if path.is_dir():
        return _recognize_folder(path)
    if is_mds_shard(path) or path.name == "index.json":
        folder = _indexed_folder(path.parent)
        if folder is not None or path.suffix != ".json":
            return folder or "a shard of MDS without its index.json: download the whole folder"
    with open_regular(path) as file:
        size = file_identity(file).num_bytes
        head = file.read(_HEAD_BYTES)
        file.seek(max(0, size - 8))
        tail = file.read(8)
    for magic, name, remedy in _MAGICS:
        # Parquet has its magic at both ends.
        if head.startswith(magic) and (magic != b"PAR1" or tail.endswith(b"PAR1")):
            return f"{name}: {remedy.format(path=shlex.quote(str(path)))}"
    return (
        _llm_c(head)
        or _compressed(path, head)
        or _tar(path, head)
        or _tfrecord(head)
        or _safetensors(head, size)
        or _pickle(head, tail)
        or _shard(path, head, size)
        or _text(path, head)
    )


def is_mds_shard(path: str | os.PathLike[str]) -> bool:
    """Return whether a file's name is that of an MDS shard: ``.mds``, or ``.mds.br``."""
    name = PurePath(os.fspath(path).lower())
    return (name.with_suffix("") if name.suffix in _MDS_COMPRESSIONS else name).suffix == ".mds"


def _llm_c(head: bytes) -> str | None:
    if len(head) < 8:
        return None
    magic, version = struct.unpack("<ii", head[:8])
    swapped, _ = struct.unpack(">ii", head[:8])
    if swapped in LLM_C_MAGICS or swapped in _LLM_C_OTHERS:
        return "a big-endian file of llm.c: swap its bytes with numpy, and import it again"
    if magic in _LLM_C_OTHERS:
        return f"{_LLM_C_OTHERS[magic]}: {_NO_TOKENS}"
    if magic in LLM_C_MAGICS:
        name = "a file of llm.c or modded-nanogpt with a header"
        return f"{name} (version {version}): import it with --kind llm.c (the default detects it)"
    return None


def _compressed(path: Path, head: bytes) -> str | None:
    """Recognize gzip, zlib and bzip2. Their 2 or 3 bytes prove little, so a stream must
    decompress."""
    if head.startswith(b"\x1f\x8b\x08"):
        with contextlib.suppress(zlib.error):
            zlib.decompressobj(31).decompress(head)
            return f"a gzip stream: unpack it first: gunzip -k {shlex.quote(str(path))}"
    if head[:2] in (b"\x78\x01", b"\x78\x5e", b"\x78\x9c", b"\x78\xda"):
        with contextlib.suppress(zlib.error):
            stream = zlib.decompressobj()
            if len(stream.decompress(head)) >= 64:
                return "a zlib stream: unpack it first, with Python's zlib.decompress"
    if head.startswith(b"BZh") and head[4:10] == b"1AY&SY":
        return f"a bzip2 stream: unpack it first: bunzip2 -k {shlex.quote(str(path))}"
    return None


def _tar(path: Path, head: bytes) -> str | None:
    try:
        tarfile.TarInfo.frombuf(head[:512], "utf-8", "surrogateescape")  # has a checksum
    except tarfile.HeaderError:
        return None
    names: list[str] = []
    with contextlib.suppress(tarfile.TarError, OSError), tarfile.open(path) as archive:
        for member in archive:
            names.append(member.name)
            if len(names) == 16:
                break
    kind, quoted = "a tar archive (webdataset)", shlex.quote(str(path))
    for ending, line in (
        (".txt", "json.dumps({'text': t.extractfile(m).read().decode()})"),
        (".json", "json.dumps(json.load(t.extractfile(m)))"),
    ):
        if any(name.endswith(ending) for name in names):
            return f"{kind}: {_TAR_TEXT.format(line=line, ending=ending, path=quoted)}"
    return f"{kind}: unpack it first: tar xf {quoted}"


def _tfrecord(head: bytes) -> str | None:
    """Recognize TFRecord by the masked CRC-32C of its first length."""
    if len(head) < 16 or int.from_bytes(head[:8], "little") >= 1 << 40:
        return None
    remainder = 0xFFFFFFFF
    for byte in head[:8]:
        remainder ^= byte
        for _ in range(8):
            remainder = remainder >> 1 ^ (0x82F63B78 if remainder & 1 else 0)
    checksum = remainder ^ 0xFFFFFFFF
    masked = ((checksum >> 15 | checksum << 17) + 0xA282EAD8) & 0xFFFFFFFF
    return (
        f"a TFRecord file: {_RECORDS}" if masked == int.from_bytes(head[8:12], "little") else None
    )


def _safetensors(head: bytes, size: int) -> str | None:
    length = int.from_bytes(head[:8], "little")
    if head[8:10] in (b'{"', b"{}", b"{ ") and 2 <= length <= size - 8:
        return f"a safetensors file: {_SAVE.format('one tensor of it')}"
    return None


def _pickle(head: bytes, tail: bytes) -> str | None:
    # The byte after the protocol number begins a frame or an object.
    begins = len(head) > 2 and head[0] == 0x80 and 2 <= head[1] <= 5 and head[2] in b"\x95\x8c}](cX"
    if begins and tail.endswith(b"."):
        return f"a pickle: {_SAVE.format('its tokens')}"
    return None


def _shard(path: Path, head: bytes, size: int) -> str | None:
    """Recognize MDS (MosaicML streaming) and LitData by the count and offsets of their samples."""
    if len(head) < 12:
        return None
    count, first = struct.unpack("<II", head[:8])
    table_end = 4 + 4 * (count + 1)
    if not (0 < count < 1 << 30 and table_end <= first <= size):
        return None
    with open_regular(path) as file:
        file.seek(table_end - 4)
        last = file.read(4)
        config = file.read(min(first - table_end, 1 << 16))
    if len(last) < 4 or int.from_bytes(last, "little") != size:
        return None
    if first == table_end:
        return f"a chunk of LitData: {_LITDATA}"
    with contextlib.suppress(ValueError):
        if "column_names" in (found := json.loads(config)):
            return mds_remedy(path.parent, found)
    return None


def mds_remedy(folder: Path, shard: dict[str, object]) -> str:
    """Return name and remedy for an MDS folder, chosen by the columns of one of its shards."""
    names, encodings = shard.get("column_names"), shard.get("column_encodings")
    columns: dict[str, str] = {}
    if isinstance(names, list) and isinstance(encodings, list):
        columns = {str(n): str(e) for n, e in zip(names, encodings, strict=False)}
    about = ", ".join(f"{name} ({encoding})" for name, encoding in columns.items()) or "no columns"
    name = f"a folder or shard of MDS (MosaicML streaming) with {about}"
    # Names are arguments of the program: one with a quote would change the program.
    read = "streaming.StreamingDataset(local=sys.argv[1], batch_size=1)"
    for column, encoding in columns.items():
        if encoding == "str":
            return (
                f'{name}: write its texts as JSON Lines: python -c "import json, streaming, sys; '
                f"[print(json.dumps({{'text': s[sys.argv[2]]}})) for s in {read}]\" "
                f"{shlex.join([str(folder), column])}{_TOKENIZE}"
            )
    for column, encoding in columns.items():
        if encoding == "bytes" or encoding.startswith("ndarray"):
            value = "s[sys.argv[2]]"
            if encoding == "bytes":  # LLM Foundry writes int64; the file does not say so
                value = f"numpy.frombuffer({value}, 'int64')"
            return (
                f'{name}: write its tokens: python -c "import megapack, numpy, streaming, sys; '
                "b = megapack.IndexedDatasetBuilder('corpus'); "
                f'[b.add_document({value}) for s in {read}]; b.finalize()" '
                f"{shlex.join([str(folder), column])}"
            )
    return f"{name}: none of them is text or tokens"


def _text(path: Path, head: bytes) -> str | None:
    """Recognize JSON and JSON Lines: they start with printable characters, unlike token ids."""
    start = head[:64]
    if len(start) < 16 or start.lstrip()[:1] not in (b"{", b"["):
        return None
    if all(32 <= byte < 127 or byte in b"\t\r\n" or byte >= 0xC2 for byte in start):
        return f"JSON text: {_TEXT.format(path=shlex.quote(str(path)))}"
    return None


def _indexed_folder(path: Path) -> str | None:
    """Recognize MDS and LitData by the folder's index.json; None if it has none of theirs."""
    try:
        index = json.loads((path / "index.json").read_bytes())
        if "chunks" in index:
            return f"a folder of LitData: {_LITDATA}"
        return mds_remedy(path, index["shards"][0])
    except (ValueError, OSError, KeyError, IndexError, TypeError, AttributeError, RecursionError):
        return None


def _recognize_folder(path: Path) -> str:
    names = sorted(os.listdir(path))  # noqa: PTH208
    if "index.json" in names:
        return (
            _indexed_folder(path)
            or "a folder of MDS (MosaicML streaming) with a damaged index.json: download it again"
        )
    if "dataset_info.json" in names or "state.json" in names:
        return (
            "a folder of Hugging Face datasets: megapack-build tokenize --input "
            f"{shlex.quote(str(path))}/*.arrow --output-prefix corpus --tokenizer T"
        )
    if any(name.endswith(".tar") for name in names):
        first = next(name for name in names if name.endswith(".tar"))
        return recognize(path / first) or "a folder with damaged .tar files: download them again"
    return "a folder: name one of its files"
