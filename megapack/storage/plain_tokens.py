"""Files of tokens without an index, whose documents end (or begin) with a token."""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from megapack.errors import ConfigError, DataError, FormatError
from megapack.storage.document_log import MAX_SEQUENCE_LENGTH
from megapack.storage.meta import TokenFacts
from megapack.storage.mmididx import Tokens, pick_dtype
from megapack.storage.opening import identity_of, open_regular
from megapack.storage.tokens import scan_tokens

__all__ = [
    "LLM_C_DTYPES",
    "PLAIN_KINDS",
    "PlainTokens",
    "as_lengths",
    "open_plain",
    "split_documents",
]

PLAIN_KINDS = ("llm.c", "npy", "flat")
# First number of llm.c's header -> token type. Its uint32 ids are below 2^31: int32's bytes.
LLM_C_DTYPES: dict[int, np.dtype[Any]] = {
    20240520: np.dtype(np.uint16),
    20240801: np.dtype(np.int32),
}
_LLM_C_HEADER_BYTES = 1024


@dataclass(frozen=True)
class PlainTokens:
    """Where the tokens of a file lie."""

    path: Path
    begin_byte: int
    dtype: np.dtype[Any]
    num_tokens: int


def open_plain(path: Path, kind: str, dtype: DTypeLike | None) -> PlainTokens:
    """Find the tokens of a file of one of ``PLAIN_KINDS``.

    Raises:
        FormatError: it is not of that kind, or damaged.
        ConfigError: dtype is needed (``flat``) or no token type.
        OSError: it cannot be read.
    """
    with open_regular(path) as file:
        num_bytes = identity_of(file).num_bytes
        if kind == "llm.c":
            return _open_llm_c(path, file)
    if kind == "npy":
        array = np.load(path, mmap_mode="r", allow_pickle=False)
        if array.ndim != 1:
            raise FormatError(f"{path} has shape {array.shape}; tokens are 1-D")
        return PlainTokens(path, array.offset, _token_dtype(array.dtype), array.size)
    if dtype is None:
        raise ConfigError(f"{path} has no header: say what its tokens are (--dtype uint16)")
    chosen = _token_dtype(dtype)
    num_tokens, rest = divmod(num_bytes, chosen.itemsize)
    if rest:
        raise FormatError(f"{path} does not hold a whole number of {chosen.name} tokens")
    return PlainTokens(path, 0, chosen, num_tokens)


def split_documents(
    plain: PlainTokens, eod_token: int | None, eod_at: str
) -> tuple[NDArray[np.int32], TokenFacts, dict[str, Any]]:
    """Lengths of the documents, what the tokens are, and what the meta file may promise.

    Raises:
        ConfigError: eod_token is missing.
        DataError: it never occurs, or a document is too long.
    """
    if eod_token is None:
        raise ConfigError(f"{plain.path} has no index: say which id ends documents (--eod-token)")
    found: list[NDArray[Any]] = [np.zeros(0, np.int64)]
    position = 0

    def look(block: Tokens, *_: int) -> None:
        nonlocal position
        found.append(np.flatnonzero(block == eod_token) + position)
        position += block.size

    begin = plain.begin_byte
    facts = scan_tokens(plain.path, plain.dtype, plain.num_tokens, look, begin_byte=begin)
    marks = np.concatenate(found)
    if plain.num_tokens and not marks.size:
        raise DataError(
            f"{plain.path}: token id {eod_token} never occurs; is it the one that ends documents, "
            f"and are the tokens {plain.dtype.name}?"
        )
    bounds = marks + 1 if eod_at == "end" else marks
    bounds = np.unique(np.concatenate([[0], bounds, [plain.num_tokens]]))
    metadata: dict[str, Any] = {}
    if eod_at == "end" and marks.size and marks[-1] == plain.num_tokens - 1:
        metadata["document_end_token"] = eod_token
    elif eod_at == "start" and marks.size and marks[0] == 0:
        metadata["document_begin_token"] = eod_token
    return as_lengths(np.diff(bounds), "a document"), facts, metadata


def as_lengths(lengths: NDArray[np.int64], what: str) -> NDArray[np.int32]:
    """Lengths as an .idx has them; DataError when one is too long."""
    longest = int(lengths.max(initial=0))
    if longest > MAX_SEQUENCE_LENGTH:
        raise DataError(f"{what} has {longest} tokens; the format ends at {MAX_SEQUENCE_LENGTH}")
    return lengths.astype(np.int32)


def _open_llm_c(path: Path, file: io.FileIO) -> PlainTokens:
    header = np.fromfile(file, np.int32, 3)
    dtype = LLM_C_DTYPES.get(int(header[0])) if header.size == 3 else None
    if dtype is None:
        raise FormatError(f"{path} does not begin with the header of llm.c")
    num_tokens = int(header[2])
    if (
        num_tokens < 0
        or identity_of(file).num_bytes < _LLM_C_HEADER_BYTES + num_tokens * dtype.itemsize
    ):
        raise FormatError(f"{path} is truncated: its header promises {num_tokens} tokens")
    return PlainTokens(path, _LLM_C_HEADER_BYTES, dtype, num_tokens)


def _token_dtype(dtype: DTypeLike) -> np.dtype[Any]:
    """Unsigned ids below the sign bit have the bytes of signed ones."""
    for unsigned, signed in ((np.uint32, np.int32), (np.uint64, np.int64)):
        if dtype == unsigned or dtype == np.dtype(unsigned).name:
            return np.dtype(signed)
    return pick_dtype(dtype)
