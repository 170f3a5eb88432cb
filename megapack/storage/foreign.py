"""Read token files of other tools: documents, widths, counts and masks.

- ``detect``: the kind of a file; ``open_foreign``: a file of any kind as a ``Foreign``
- ``KINDS``: the function that reads each kind
- ``Foreign``: tokens, document bounds and facts of a file, each checked against the file's size

A file next to the tokens that cannot be read, as a link to nothing, is an error, not absent.

===========  ==================================================================================
mmididx      .bin/.idx of Megatron, Megatron-DeepSpeed, GPT-NeoX, DeepSpeed or megapack
datatrove    ``<name>.ds`` with ``.index`` (uint64 document ends, in tokens), ``.metadata``
             (tokenizer, width, count) and ``.loss`` (a byte per token, 0: no loss)
dolma        headerless .npy of dolma and OLMo-core with ``.csv.gz`` (start and end per document)
llm.c        .bin of llm.c and modded-nanogpt: a header of 256 int32, then tokens
npy          a 1-D .npy; documents as recorded in ``.csv.gz``, else split at a separator
flat         only tokens (nanoGPT's .bin), documents split at a separator
===========  ==================================================================================

If the index has the document ends 3 and 5 (tokens), a file of 20 bytes has 4 bytes per token::

    open_foreign("000_shuffled.ds", "datatrove").dtype      # -> int32
"""

from __future__ import annotations

import contextlib
import csv
import gzip
import io
import json
import os
import pickle
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

from megapack.errors import ConfigError, DataError, FormatError
from megapack.storage.files import file_identity, open_regular
from megapack.storage.index_file import MAGIC, path_of, pick_dtype, prefix_of
from megapack.storage.index_writer import MAX_SEQUENCE_LENGTH, ArrayLayout
from megapack.storage.metadata import TokenFacts, matching_meta, own_metadata
from megapack.storage.signatures import LLM_C_MAGICS, recognize
from megapack.storage.survey import remedy_for, survey
from megapack.storage.tokens import open_npy

_LLM_C_HEADER_BYTES = 1024
_LLM_C_VERSIONS = {20240520: 1, 20240801: 7}
_BY_WIDTH = {1: "uint8", 2: "uint16", 4: "uint32", 8: "uint64"}


@dataclass(frozen=True, kw_only=True)
class Foreign:
    tokens_path: Path
    dtype: np.dtype[Any]
    num_tokens: int
    layout: ArrayLayout | None = None  # None: documents are separated by a token
    begin_byte: int = 0  # position of the first token in the file
    pointers: NDArray[np.int64] | None = None  # byte of every sequence, if not stored in order
    metadata: dict[str, Any] = field(default_factory=dict)
    vocab_size: int | None = None
    allow_negative: bool = False  # accept negative values, which are labels
    mask_path: Path | None = None  # a byte per token, 0: predicting this token has no loss
    recorded: TokenFacts | None = None  # from megapack's meta file


def detect(path: str | os.PathLike[str]) -> str:
    """Return the kind of a file or prefix, by its first bytes and the files next to it. Raises
    FormatError if it is a folder or not a regular file."""
    if Path(path).is_dir():
        raise FormatError(f"{path} is {recognize(path)}")
    idx_path = path_of(prefix_of(path), ".idx")
    if os.path.lexists(idx_path):
        with open_regular(idx_path) as file:
            if file.read(len(MAGIC)) == MAGIC:
                return "mmididx"
        raise FormatError(
            f"{idx_path} is {recognize(idx_path) or 'damaged, or an index of another format'}: "
            f"restore it, or give --kind flat to split {path} at a separator without it"
        )
    if os.path.lexists(path_of(path, ".index")):
        return "datatrove"
    with open_regular(path) as file:
        head = file.read(8)
    if head.startswith(b"\x93NUMPY"):
        return "npy"
    if len(head) == 8 and struct.unpack("<ii", head)[0] in LLM_C_MAGICS:
        return "llm.c"
    return "dolma" if os.path.lexists(_bounds_path(Path(path))) else "flat"


# ---- Megatron ------------------------------------------------------------------------------------


def _mmididx(path: Path, _: DTypeLike | None) -> Foreign:
    prefix = prefix_of(path)
    facts = survey(path_of(prefix, ".idx"), path_of(prefix, ".bin"))
    layout = facts.layout
    dtype, text = facts.meaning()
    if dtype is None:
        raise FormatError(f"{prefix}: dtype code {layout.header.dtype_code} means {text}")
    reordered = not facts.widths and facts.names_another_order(dtype.itemsize)
    # ``meaning`` returned the dtype; if documents were lost, each sequence becomes a document.
    harmless = {"dtype", "documents-lost", *(["pointers"] if reordered else [])}
    for finding in facts.findings():
        if finding.severity != "note" and finding.code not in harmless:
            raise FormatError(f"{finding.message} -> {remedy_for(finding, prefix)}")
    meta = None
    with contextlib.suppress(FormatError):  # a file of that name may be another tool's
        meta = matching_meta(prefix, dtype.name, layout.header, facts.num_tokens)
    ends = None if layout.header.lacks_document_indices else layout.ends()
    modes = np.concatenate([*layout.mode_blocks()]) if facts.is_multimodal else None
    return Foreign(
        tokens_path=facts.bin_path,
        dtype=dtype,
        num_tokens=facts.num_tokens,
        layout=ArrayLayout(layout.lengths(), ends, modes),
        pointers=layout.pointers() if reordered else None,
        allow_negative=dtype.kind == "i",
        metadata=own_metadata(meta) if meta else {},
        vocab_size=meta["vocab_size"] if meta else None,
        recorded=TokenFacts.of_meta(meta) if meta and not reordered else None,
    )


# ---- datatrove -----------------------------------------------------------------------------------


class _DatatroveMetadata(NamedTuple):
    tokenizer: str | None
    width: int | None  # bytes per token; old releases do not record it
    num_tokens: int


def _datatrove(path: Path, _: DTypeLike | None) -> Foreign:
    index_path = path_of(path, ".index")
    with open_regular(index_path) as file:
        ends_bytes = file.read()
    if len(ends_bytes) % 8:
        raise FormatError(f"{index_path} has {len(ends_bytes)} bytes, not 8 per document")
    ends = np.frombuffer(ends_bytes, "<u8")
    if (ends[1:] < ends[:-1]).any():
        at = int((ends[1:] < ends[:-1]).argmax()) + 1
        raise FormatError(
            f"{index_path}: document {at} ends at {ends[at]}, before document {at - 1}: restore it"
        )
    num_tokens = int(ends[-1]) if ends.size else 0
    known = _datatrove_metadata(path)
    width = _proven_width(path, num_tokens, index_path.name, (2, 4)) or (known and known.width) or 2
    foreign = Foreign(
        tokens_path=path,
        dtype=_token_dtype(_BY_WIDTH[width]),
        num_tokens=num_tokens,
        layout=ArrayLayout(as_lengths(np.diff(np.concatenate([[0], ends.astype(np.int64)])))),
    )
    return _with_datatrove_facts(foreign, known)


def _datatrove_metadata(path: Path) -> _DatatroveMetadata | None:
    """Read the three lines of ``<path>.metadata``: tokenizer and width, token count, rounded count.
    Return None if the file does not exist."""
    metadata_path = path_of(path, ".metadata")
    if not os.path.lexists(metadata_path):
        return None
    try:
        with open_regular(metadata_path) as file:
            lines = file.read().decode().split("\n")
    except UnicodeDecodeError as error:
        raise FormatError(f"{metadata_path} is not text ({error}): restore or remove it") from error
    name, bar, width = lines[0].rpartition("|")
    if not bar:
        name, width = lines[0], ""
    elif width not in ("2", "4"):
        raise FormatError(
            f"{metadata_path}: a token has {width!r} bytes, not 2 or 4: restore or remove the file"
        )
    if len(lines) != 3 or not _is_number(lines[1]):
        raise FormatError(
            f"{metadata_path} must have 3 lines, a number in the second: restore or remove it"
        )
    tokenizer = None if name in ("", "Unknown Tokenizer") else name
    return _DatatroveMetadata(tokenizer, int(width) if width else None, int(lines[1]))


def _with_datatrove_facts(foreign: Foreign, known: _DatatroveMetadata | None) -> Foreign:
    """Check token count and width against ``.metadata``, and add the tokenizer's name."""
    path = foreign.tokens_path
    if known is None:
        return foreign
    where = f"{path}.metadata"
    if known.num_tokens != foreign.num_tokens:
        raise FormatError(
            f"{where} counts {known.num_tokens} tokens, the files have {foreign.num_tokens}: "
            "they do not belong together; restore them, or remove it"
        )
    if known.width not in (None, foreign.dtype.itemsize):
        raise FormatError(
            f"{where} records {known.width} bytes per token, the files have "
            f"{foreign.dtype.itemsize}: restore them, or remove it"
        )
    named = {"tokenizer": {"name": known.tokenizer}} if known.tokenizer is not None else {}
    return replace(foreign, metadata=named)


# ---- dolma and OLMo-core -------------------------------------------------------------------------


def _bounds_path(path: Path) -> Path:
    return path.with_name(path.name.removesuffix(".npy") + ".csv.gz")


def _dolma(path: Path, _: DTypeLike | None) -> Foreign:
    bounds_path = _bounds_path(path)
    lengths = _read_bounds(bounds_path)
    num_tokens = int(lengths.sum())
    width = _proven_width(path, num_tokens, bounds_path.name, (1, 2, 4, 8)) or 2
    return Foreign(
        tokens_path=path,
        dtype=_token_dtype(_BY_WIDTH[width]),
        num_tokens=num_tokens,
        layout=ArrayLayout(as_lengths(lengths)),
    )


def _read_bounds(path: Path) -> NDArray[np.int64]:
    """Read tokens per document from a ``.csv.gz`` with a row per document: start, end, and more."""
    lengths: list[int] = []
    position = 0
    try:
        with open_regular(path) as raw, gzip.open(raw) as file:
            text = io.TextIOWrapper(file, "utf-8", newline="")
            for number, row in enumerate(csv.reader(text), 1):
                if len(row) < 2 or not _is_number(row[0]) or not _is_number(row[1]):
                    raise FormatError(
                        f"{path}, row {number}: {row[:2]} must be the begin and end of a document"
                    )
                begin, end = int(row[0]), int(row[1])
                if begin != position or end < begin:
                    raise FormatError(
                        f"{path}, row {number}: a document from {begin} to {end} does not follow "
                        f"the one before, which ends at {position}: restore the file"
                    )
                lengths.append(end - begin)
                position = end
    except (OSError, EOFError, zlib.error, UnicodeDecodeError, csv.Error) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise FormatError(f"{path} is not a gzip file of rows ({error}): restore it") from error
    return np.array(lengths, np.int64)


# ---- llm.c, .npy, plain tokens -------------------------------------------------------------------


def _llm_c(path: Path, _: DTypeLike | None) -> Foreign:
    with open_regular(path) as file:
        num_bytes, head = file_identity(file).num_bytes, file.read(_LLM_C_HEADER_BYTES)
    header = np.frombuffer(head[: len(head) // 4 * 4], "<i4")
    magic = int(header[0]) if header.size else 0
    if magic not in LLM_C_MAGICS:
        raise FormatError(f"{path} does not begin with the header of llm.c")
    if header.size < 256:
        raise FormatError(
            f"{path} ends in its header, at byte {num_bytes} of 1024: download it again"
        )
    version, num_tokens = int(header[1]), int(header[2])
    dtype = np.dtype(LLM_C_MAGICS[magic])
    if version != _LLM_C_VERSIONS[magic]:
        raise FormatError(
            f"{path} has magic {magic} and version {version}; llm.c writes version "
            f"{_LLM_C_VERSIONS[magic]} with this magic: fetch or write the file again"
        )
    if num_bytes != _LLM_C_HEADER_BYTES + num_tokens * dtype.itemsize:
        counted = f"its header counts {num_tokens} tokens of {dtype.itemsize} bytes"
        raise FormatError(f"{path} has {num_bytes} bytes, and {counted}: fetch or write it again")
    if header[3:].any():
        at = 3 + int((header[3:] != 0).argmax())
        raise FormatError(
            f"{path}: number {at} of the header is {header[at]}, not 0: fetch or write it again"
        )
    return Foreign(
        tokens_path=path,
        begin_byte=_LLM_C_HEADER_BYTES,
        dtype=_token_dtype(dtype),
        num_tokens=num_tokens,
    )


def _npy(path: Path, _: DTypeLike | None) -> Foreign:
    array = open_npy(path)
    if array.ndim != 1:
        raise FormatError(f"{path} has shape {array.shape}; tokens are 1-D")
    bounds_path = _bounds_path(path)
    lengths = _read_bounds(bounds_path) if os.path.lexists(bounds_path) else None
    if lengths is not None and int(lengths.sum()) != array.size:
        raise FormatError(
            f"{path} has {array.size} tokens, but the documents of {bounds_path.name} have "
            f"{int(lengths.sum())}: the files do not belong together; restore both, or remove "
            f"{bounds_path.name}"
        )
    return Foreign(
        tokens_path=path,
        begin_byte=array.offset,
        dtype=_token_dtype(array.dtype),
        num_tokens=array.size,
        layout=None if lengths is None else ArrayLayout(as_lengths(lengths)),
    )


def _flat(path: Path, dtype: DTypeLike | None) -> Foreign:
    with open_regular(path) as file:
        num_bytes = file_identity(file).num_bytes
    known = _datatrove_metadata(path)
    if dtype is None and known is not None and known.width is not None:
        dtype = _BY_WIDTH[known.width]
    if dtype is None:
        raise ConfigError(f"{path} has no header: give the type of its tokens (--dtype uint16)")
    chosen = _token_dtype(dtype)
    num_tokens, trailing = divmod(num_bytes, chosen.itemsize)
    if trailing:
        raise FormatError(
            f"{path} does not hold a whole number of {chosen.name} tokens: it has {num_bytes} "
            "bytes; download it again, or give another --dtype"
        )
    foreign = Foreign(
        tokens_path=path, dtype=chosen, num_tokens=num_tokens, vocab_size=_nanogpt_vocab_size(path)
    )
    return _with_datatrove_facts(foreign, known)


class _PlainUnpickler(pickle.Unpickler):
    """Unpickler of dicts, lists, strings and numbers; it never imports or calls anything."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it needs {module}.{name}")


def _nanogpt_vocab_size(path: Path) -> int | None:
    """Return the vocabulary size in nanoGPT's ``meta.pkl`` next to train.bin and val.bin."""
    meta_path = path.with_name("meta.pkl")
    if path.name not in ("train.bin", "val.bin") or not os.path.lexists(meta_path):
        return None
    try:
        with open_regular(meta_path) as file:
            content = file.read()
        stream = io.BytesIO(content)
        size = _PlainUnpickler(stream).load()["vocab_size"]
        if stream.tell() == len(content) and type(size) is int and 0 < size < 1 << 31:
            return size
    except OSError:
        raise
    except Exception as error:  # a damaged pickle raises anything
        raise FormatError(f"{meta_path} is not a plain pickle ({error}): remove it") from error
    raise FormatError(f"{meta_path} has no vocab_size, which nanoGPT writes: restore or remove it")


KINDS: dict[str, Callable[[Path, DTypeLike | None], Foreign]] = {
    "mmididx": _mmididx,
    "datatrove": _datatrove,
    "dolma": _dolma,
    "llm.c": _llm_c,
    "npy": _npy,
    "flat": _flat,
}


def open_foreign(
    path: str | os.PathLike[str], kind: str, *, dtype: DTypeLike | None = None
) -> Foreign:
    """Read what a file and the files next to it record about its tokens; check that they agree.

    ``kind`` is one of ``KINDS``; ``dtype`` is needed if the file does not record it. Raises
    FormatError if the file is damaged, has another format, or does not fit the files next to it,
    and ConfigError if the kind does not exist, or ``dtype`` is missing or not the recorded one.
    """
    if kind not in KINDS:
        raise ConfigError(f"kind is {kind!r}; choose from {', '.join(KINDS)}")
    if kind in ("flat", "datatrove", "dolma") and (other := recognize(path)) is not None:
        raise FormatError(f"{path} is {other}")
    if kind == "flat" and (tokens_path := _described(Path(path))) is not None:
        raise FormatError(f"{path} describes {tokens_path} and has no tokens: import that file")
    foreign = KINDS[kind](Path(path), dtype)
    if dtype is not None and _token_dtype(dtype) != foreign.dtype:
        raise ConfigError(
            f"{path} of kind {kind} records the dtype, {foreign.dtype.name}: leave out --dtype"
        )
    if kind == "mmididx":
        return foreign
    mask_path, name = _mask_of(foreign), _tokenizer_beside(Path(path))
    metadata = {"tokenizer": {"name": name}} if name else {}
    return replace(foreign, mask_path=mask_path, metadata=metadata | foreign.metadata)


def _mask_of(foreign: Foreign) -> Path | None:
    """Return the path of the loss mask next to the tokens (.loss or labels_mask_*), or None."""
    path = foreign.tokens_path
    candidates = [path_of(path, ".loss")]
    if path.name.startswith("token_ids"):
        candidates.append(path.with_name(path.name.replace("token_ids", "labels_mask", 1)))
    for mask_path in candidates:
        if os.path.lexists(mask_path):
            with open_regular(mask_path) as file:
                num_bytes = file_identity(file).num_bytes
            if num_bytes != foreign.num_tokens:
                raise FormatError(
                    f"{mask_path} has {num_bytes} bytes for {foreign.num_tokens} tokens of "
                    f"{path.name}: restore both, or remove the mask to give every token loss"
                )
            return mask_path
    return None


def _described(path: Path) -> Path | None:
    """Return the token file of a side file (.index, .metadata, .loss, labels_mask_*), or None."""
    owner = path.with_name(path.name.replace("labels_mask", "token_ids", 1))
    if path.suffix in (".index", ".metadata", ".loss"):
        owner = path.with_suffix("")
    return owner if owner != path and owner.is_file() else None


def _tokenizer_beside(path: Path) -> str | None:
    """Return the name of the tokenizer that open-instruct saved next to files for OLMo-core."""
    config = path.with_name("tokenizer") / "tokenizer_config.json"
    if not path.name.startswith("token_ids") or not config.is_file():
        return None
    try:
        name = json.loads(config.read_bytes()).get("name_or_path")
    except (ValueError, AttributeError, RecursionError) as error:
        raise FormatError(
            f"{config} is not a JSON object ({error}): restore or remove it"
        ) from error
    return name if isinstance(name, str) and name else str(config.parent)


def _proven_width(
    path: Path, num_tokens: int, index_name: str, widths: tuple[int, ...]
) -> int | None:
    """Return the bytes per token: file size / token count of an index; None if both are 0."""
    with open_regular(path) as file:
        num_bytes = file_identity(file).num_bytes
    if num_tokens == 0 and num_bytes == 0:
        return None
    width = num_bytes // num_tokens if num_tokens else 0
    if width not in widths or width * num_tokens != num_bytes:
        names = " or ".join(map(str, widths))
        raise FormatError(
            f"{path} has {num_bytes} bytes, but {index_name} counts {num_tokens} tokens of {names} "
            "bytes: the two files do not belong together; restore them"
        )
    return width


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) < 19


def _token_dtype(dtype: DTypeLike) -> np.dtype[Any]:
    """Return the dtype for an .idx: int32 for uint32 and int64 for uint64, since ids that fit both
    have the same bytes."""
    for unsigned, signed in ((np.uint32, np.int32), (np.uint64, np.int64)):
        if dtype == unsigned or dtype == np.dtype(unsigned).name:
            return np.dtype(signed)
    return pick_dtype(dtype)


def as_lengths(lengths: NDArray[np.int64]) -> NDArray[np.int32]:
    """Return lengths as int32, as an .idx stores them. Raises DataError if one is too long."""
    longest = int(lengths.max(initial=0))
    if longest > MAX_SEQUENCE_LENGTH:
        raise DataError(f"a document has {longest} tokens; the limit is {MAX_SEQUENCE_LENGTH}")
    return lengths.astype(np.int32)
