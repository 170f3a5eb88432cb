"""Token files of other tools: where their tokens lie and where documents begin.

===========  ==================================================================================
mmididx      .bin/.idx of Megatron, Megatron-DeepSpeed, GPT-NeoX or DeepSpeed, damaged or not
tntidx       .bin/.idx of the format before it (``--data-impl lazy`` and ``cached``)
datatrove    ``<name>.ds`` with ``<name>.ds.index`` (uint64 document ends, in tokens)
llm.c        .bin with a header of 256 int32; documents begin with the end-of-text token
npy          a 1-D .npy; documents end with a token
flat         nothing but tokens (nanoGPT's .bin, OLMo's headerless .npy); documents end with one
===========  ==================================================================================
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from megapack.errors import ConfigError, FormatError
from megapack.storage.layout import ArrayLayout
from megapack.storage.meta import TokenFacts
from megapack.storage.mmididx import MAGIC, path_of, prefix_of
from megapack.storage.opening import identity_of, open_regular
from megapack.storage.plain_tokens import (
    LLM_C_DTYPES,
    PLAIN_KINDS,
    as_lengths,
    open_plain,
    split_documents,
)
from megapack.storage.survey import LEGACY_MAGIC, meaning_of, survey

__all__ = ["KINDS", "Foreign", "detect", "open_foreign", "tokens_path"]


@dataclass(frozen=True, kw_only=True)
class Foreign:
    """Somebody else's documents."""

    tokens_path: Path
    dtype: np.dtype[Any]
    layout: ArrayLayout
    begin_byte: int = 0  # of the first token
    # Byte of every sequence in tokens_path, when they are not stored in order.
    pointers: NDArray[np.int64] | None = None
    facts: TokenFacts | None = None  # when the tokens had to be read anyway
    metadata: dict[str, Any] = field(default_factory=dict)
    # Negative values are labels; False where a negative id would be an unsigned one too large.
    allow_negative: bool = False


def detect(path: str | os.PathLike[str]) -> str:
    """The kind of a file or prefix, by what stands in it and beside it.

    Raises:
        FileNotFoundError: there is no such file.
        FormatError: it is no regular file.
    """
    path = Path(path)
    idx_path = path_of(prefix_of(path), ".idx")
    if idx_path.is_file():
        with open_regular(idx_path) as file:
            magic = file.read(len(MAGIC))
        if magic == MAGIC:
            return "mmididx"
        if magic.startswith(LEGACY_MAGIC):
            return "tntidx"
    if path_of(path, ".index").is_file():
        return "datatrove"
    with open_regular(path) as file:
        head = file.read(8)
    if head.startswith(b"\x93NUMPY"):
        return "npy"
    if len(head) == 8 and struct.unpack("<ii", head)[0] in LLM_C_DTYPES:
        return "llm.c"
    return "flat"


def tokens_path(path: str | os.PathLike[str], kind: str) -> Path:
    """The file that holds the tokens."""
    is_pair = kind in ("mmididx", "tntidx")
    return path_of(prefix_of(path), ".bin") if is_pair else Path(path)


def open_foreign(
    path: str | os.PathLike[str],
    kind: str,
    *,
    dtype: DTypeLike | None = None,
    eod_token: int | None = None,
    eod_at: str = "end",
) -> Foreign:
    """Find the documents of a file.

    Args:
        path: file or prefix.
        kind: one of ``KINDS``.
        dtype: of the tokens, where the file does not say it.
        eod_token: the id that ends documents, for kinds without an index.
        eod_at: ``"end"`` of a document, or ``"start"`` where the token comes before it.

    Raises:
        FormatError: the file is damaged or not of that kind.
        DataError: the token that ends documents never occurs.
        ConfigError: an argument that this kind needs is missing.
        OSError: a file cannot be read.
    """
    if kind not in KINDS:
        raise ConfigError(f"kind is {kind!r}; it is one of {', '.join(KINDS)}")
    path = Path(path)
    if kind in _INDEXED:
        return _INDEXED[kind](path)
    plain = open_plain(path, kind, dtype)
    lengths, facts, metadata = split_documents(plain, eod_token, eod_at)
    return Foreign(
        tokens_path=path,
        begin_byte=plain.begin_byte,
        dtype=plain.dtype,
        layout=ArrayLayout(lengths),
        facts=facts,
        metadata=metadata,
    )


def _mmididx(path: Path) -> Foreign:
    prefix = prefix_of(path)
    facts = survey(path_of(prefix, ".idx"), path_of(prefix, ".bin"))
    layout = facts.layout
    dtype, text = facts.meaning()
    if dtype is None:
        raise FormatError(f"{prefix}: dtype code {layout.header.dtype_code} means {text}")
    ends = None if layout.header.lacks_document_indices else layout.ends()
    return Foreign(
        tokens_path=path_of(prefix, ".bin"),
        dtype=dtype,
        layout=ArrayLayout(layout.lengths(), ends),
        pointers=None if facts.widths else layout.pointers(),
        allow_negative=dtype.kind == "i",
    )


def _tntidx(path: Path) -> Foreign:
    prefix = prefix_of(path)
    idx_path, bin_path = path_of(prefix, ".idx"), path_of(prefix, ".bin")
    with open_regular(idx_path) as file:
        head = file.read(56)
        if len(head) < 56:
            raise FormatError(f"{idx_path} is truncated: its header has 56 bytes")
        _, code, width, num_items, num_sizes, num_indices = struct.unpack_from("<QQQQQQ", head, 8)
        counts = [num_items + 1, num_items + 1, num_sizes, num_indices]
        if identity_of(file).num_bytes < 56 + 8 * sum(counts):
            raise FormatError(f"{idx_path} is truncated")
        dims, offsets, sizes, indices = (np.fromfile(file, np.int64, n) for n in counts)
    if num_sizes != num_items or not np.array_equal(dims, np.arange(num_items + 1)):
        raise FormatError(f"{idx_path} holds arrays of several dimensions, not token sequences")
    if not np.array_equal(np.diff(offsets), sizes) or (sizes < 0).any():
        raise FormatError(f"{idx_path}: offsets do not follow from the sizes")
    dtype, text = meaning_of(code, width, bin_path)
    if dtype is None:
        raise FormatError(f"{idx_path}: dtype code {code} means {text}; these are no token ids")
    return Foreign(
        tokens_path=bin_path,
        dtype=dtype,
        layout=ArrayLayout(
            as_lengths(sizes, "a sequence"), indices[1:] if indices.size > 1 else None
        ),
        allow_negative=dtype.kind == "i",
    )


def _datatrove(path: Path) -> Foreign:
    index_path = path_of(path, ".index")
    with open_regular(index_path) as index, open_regular(path) as tokens:
        ends = np.fromfile(index, np.uint64).astype(np.int64)
        num_tokens, num_bytes = int(ends[-1]) if ends.size else 0, identity_of(tokens).num_bytes
    width = num_bytes // num_tokens if num_tokens else 2
    if width not in (2, 4) or width * num_tokens != num_bytes:
        raise FormatError(
            f"{path} has {num_bytes} bytes, but {index_path.name} speaks of {num_tokens} tokens; "
            "they are 2 or 4 bytes wide"
        )
    lengths = np.diff(ends, prepend=0)
    if (lengths < 0).any():
        raise FormatError(f"{index_path}: document {int((lengths < 0).argmax())} ends too early")
    return Foreign(
        tokens_path=path,
        dtype=np.dtype(np.uint16 if width == 2 else np.int32),
        layout=ArrayLayout(as_lengths(lengths, "a document")),
    )


_INDEXED: dict[str, Callable[[Path], Foreign]] = {
    "mmididx": _mmididx,
    "tntidx": _tntidx,
    "datatrove": _datatrove,
}
KINDS = (*_INDEXED, *PLAIN_KINDS)
