"""The half of verify that reads .bin: checksums, range of ids, the ends of documents."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megapack.storage.findings import Finding
from megapack.storage.meta import Checksum, bin_checksums, joined_range
from megapack.storage.mmididx import IndexFile, Tokens, path_of
from megapack.storage.tokens import scan_tokens

__all__ = ["TokenChecks", "check_tokens"]

RESTORE = "restore .bin from a copy or build it again"


@dataclass(frozen=True, kw_only=True)
class TokenChecks:
    """What tokens are held against; None: not checked."""

    vocab_size: int | None = None
    allow_negative: bool = False
    document_begin_token: int | None = None
    document_end_token: int | None = None


def check_tokens(
    prefix: str,
    dtype: np.dtype[Any],
    checks: TokenChecks,
    meta: dict[str, Any] | None,
    progress: Callable[[int, int], None] | None = None,
) -> list[Finding]:
    """Read all tokens of a dataset whose index is sound; memory: 8 bytes per document, and 8 more
    where their first or last tokens are promised.

    Args:
        prefix: of the dataset.
        dtype: of its tokens.
        checks: what they are held against.
        meta: the meta file when it belongs to this dataset.
        progress: called with (bytes read, bytes in all).
    """
    reader = _Reader(prefix, dtype, checks)
    total = int(reader.offsets[-1]) * dtype.itemsize
    stretches = [Checksum(total, "")] if meta is None else bin_checksums(meta)
    ranges: list[tuple[int, int] | None] = []
    begin = 0

    def look(block: Tokens, low: int, high: int) -> None:
        reader.read(block, low, high)
        if progress is not None:
            progress(reader.num_tokens * dtype.itemsize, total)

    for num_bytes, expected in stretches:
        facts = scan_tokens(
            path_of(prefix, ".bin"), dtype, num_bytes // dtype.itemsize, look, begin_byte=begin
        )
        ranges.append(facts.token_range)
        if expected and facts.checksums[0].xxh3_128 != expected:
            reader.add_checksum_error(begin, begin + num_bytes)
        begin += num_bytes
    return [*reader.findings(), *_ranges(joined_range(ranges), checks, meta)]


class _Reader:
    """Collects, over consecutive blocks of tokens, the first violation of each kind."""

    def __init__(self, prefix: str, dtype: np.dtype[Any], checks: TokenChecks) -> None:
        index = IndexFile(path_of(prefix, ".idx"))
        self.offsets = index.document_offsets(dtype.itemsize)
        self.num_tokens = 0  # read so far
        self._itemsize, self._checks = dtype.itemsize, checks
        self._first: dict[str, str] = {}
        self._count: dict[str, int] = {}
        filled = self.offsets[:-1] < self.offsets[1:]
        if checks.document_begin_token is not None:
            self._begins = self.offsets[:-1][filled]
        if checks.document_end_token is not None:
            self._ends = self.offsets[1:][filled] - 1

    def read(self, tokens: Tokens, low: int, high: int) -> None:
        limit = self._checks.vocab_size
        if low < 0 and not self._checks.allow_negative:
            self._add("negative-id", np.flatnonzero(tokens < 0), tokens)
        if limit is not None and high >= limit:
            self._add("id-beyond-vocabulary", np.flatnonzero(tokens >= limit), tokens)
        ends, begins = self._checks.document_end_token, self._checks.document_begin_token
        if ends is not None:
            self._compare("document-end", self._ends, ends, tokens)
        if begins is not None:
            self._compare("document-begin", self._begins, begins, tokens)
        self.num_tokens += tokens.size

    def _compare(self, code: str, positions: NDArray[Any], wanted: int, tokens: Tokens) -> None:
        """Tokens at some positions of .bin must be ``wanted``."""
        bounds = np.searchsorted(positions, [self.num_tokens, self.num_tokens + tokens.size])
        here = positions[bounds[0] : bounds[1]] - self.num_tokens
        self._add(code, here[tokens[here] != wanted], tokens)

    def _add(self, code: str, where: NDArray[Any], tokens: Tokens) -> None:
        if where.size == 0:
            return
        self._count[code] = self._count.get(code, 0) + where.size
        if code not in self._first:
            position = self.num_tokens + int(where[0])
            document = int(np.searchsorted(self.offsets, position, side="right")) - 1
            inside = position - int(self.offsets[document])
            self._first[code] = (
                f"document {document}, position {inside}: token id {tokens[where[0]]}"
            )

    def add_checksum_error(self, begin: int, end: int) -> None:
        """Bytes [begin, end) of .bin are not what was written."""
        self._count["checksum"] = self._count.get("checksum", 0) + 1
        bounds = np.array([begin, end - 1]) // self._itemsize
        first, last = np.searchsorted(self.offsets, bounds, side="right") - 1
        self._first.setdefault(
            "checksum", f"bytes {begin} to {end} of .bin (documents {first} to {last})"
        )

    def findings(self) -> Iterator[Finding]:
        checks = self._checks
        for code, text, remedy in (
            ("checksum", "do not have the checksum of the meta file", RESTORE),
            ("negative-id", "is negative", "if these are labels, build with allow_negative=True"),
            ("id-beyond-vocabulary", f"is not below vocab_size {checks.vocab_size}", RESTORE),
            ("document-end", f"should be the last, {checks.document_end_token}", ""),
            ("document-begin", f"should be the first, {checks.document_begin_token}", ""),
        ):
            if code in self._first:
                more = self._count[code] - 1
                also = f" (and {more} more)" if more else ""
                yield Finding("error", code, f"{self._first[code]} {text}{also}", remedy)


def _ranges(
    known: tuple[int, int] | None, checks: TokenChecks, meta: dict[str, Any] | None
) -> Iterator[Finding]:
    """What the smallest and largest id tell."""
    if known is None:
        return
    low, high = known
    if low < 0 and checks.allow_negative:
        text = f"ids go from {low} to {high}: labels, no tokens to train on"
        yield Finding("note", "negative-ids", text)
    stated = None if meta is None else (meta["min_token_id"], meta["max_token_id"])
    if stated is not None and stated != (low, high):
        text = (
            f"token ids go from {low} to {high}; the meta file says from {stated[0]} to {stated[1]}"
        )
        yield Finding("error", "token-range", text, RESTORE)
