"""Derive token width, document ends, and begin and end tokens from the tokens of a file.

- ``Scan``: one pass over all tokens; ``check_width``, ``likely_dtype``: compare ids with the dtype
- ``split_documents``: documents between separators
- ``count_separators_only``: number of documents without other tokens
- ``edge_tokens``: ids with which every document begins or ends

The four uint32 ids 7 8 0 9, read as uint16, are 7 0 8 0 0 0 9 0: every second id is 0::

    check_width(foreign, Scan(foreign, None), None)
    # DataError: ... 0 or almost 0 at every second position: ... give --dtype uint32
"""

from __future__ import annotations

import itertools

import numpy as np
from numpy.typing import NDArray

from megapack.errors import ConfigError, DataError
from megapack.storage.files import open_regular
from megapack.storage.foreign import Foreign, as_lengths
from megapack.storage.index_file import Tokens
from megapack.storage.index_writer import ArrayLayout
from megapack.storage.tokens import scan_tokens

_LARGEST_VOCABULARY = 1 << 20  # no tokenizer has more ids; two uint16 ids read as one exceed it
_SAMPLE_TOKENS = 1 << 16


class Scan:
    """Facts about all tokens of a file, collected in one pass."""

    def __init__(self, foreign: Foreign, separator: int | None) -> None:
        self.maxima = np.zeros(4, np.int64)  # largest id at positions 0 to 3 modulo 4
        self.separators: NDArray[np.int64] = np.zeros(0, np.int64)
        tokens = mapped_tokens(foreign)
        self.first = int(tokens[0]) if tokens.size else -1
        self.last = int(tokens[-1]) if tokens.size else -1
        self.num_first = self.num_last = 0
        positions: list[NDArray[np.int64]] = []
        begin = 0

        def look(block: Tokens, *_: int) -> None:
            nonlocal begin
            # Every block begins at a multiple of 4, so k is the position modulo 4.
            for k in range(min(4, block.size)):
                self.maxima[k] = max(self.maxima[k], int(block[k::4].max()))
            self.num_first += int(np.count_nonzero(block == self.first))
            self.num_last += int(np.count_nonzero(block == self.last))
            if separator is not None:
                positions.append(np.flatnonzero(block == separator) + begin)
            begin += block.size

        path, dtype, count = foreign.tokens_path, foreign.dtype, foreign.num_tokens
        self.facts = scan_tokens(path, dtype, count, look, begin_byte=foreign.begin_byte)
        if positions:
            self.separators = np.concatenate(positions)


def mapped_tokens(foreign: Foreign) -> Tokens:
    if not foreign.num_tokens:
        return np.zeros(0, foreign.dtype)
    shape = (foreign.num_tokens,)
    return np.memmap(foreign.tokens_path, foreign.dtype, "r", foreign.begin_byte, shape)


def _is_plausible(maxima: NDArray[np.int64], num_tokens: int, limit: int, width: int) -> bool:
    """Return whether ids can have this width, from the largest at positions 0 to 3 modulo 4. If ids
    are read at half their width, every second number is a high half: 0, or at most 15 for a
    vocabulary below 2^20. Ids read at twice their width exceed every vocabulary."""
    if int(maxima.max(initial=0)) >= limit:
        return False
    if num_tokens < 8 or num_tokens % 2:
        return True
    if width == 1 and num_tokens >= 64 and maxima[3] == 0 and maxima[2] <= 15 < maxima[0]:
        return False  # the upper bytes of four
    low, high = sorted((max(maxima[0], maxima[2]), max(maxima[1], maxima[3])))
    return not (low == 0 < high or (low <= 15 and high > 255 and num_tokens >= 64))


def check_width(foreign: Foreign, scan: Scan, vocab_size: int | None) -> None:
    """Raise DataError if the ids contradict the dtype; the message names the dtype that fits."""
    limit = max(_LARGEST_VOCABULARY, vocab_size or 0)
    if _is_plausible(scan.maxima, foreign.num_tokens, limit, foreign.dtype.itemsize):
        return
    likely = likely_dtype(foreign, vocab_size)
    high = int(scan.maxima.max())
    symptom = f"an id of {high}, beyond any vocabulary" if high >= limit else "0 or almost 0"
    where = "" if high >= limit else " at every second position"
    if likely is None or likely.startswith("big"):
        likely = likely or "another type"
        remedy = "convert the file with numpy"
    else:
        remedy = f"give --dtype {likely}, or rewrite the file if its header names the type"
    raise DataError(
        f"{foreign.tokens_path}: read as {foreign.dtype.name}, it has {symptom}{where}: the tokens "
        f"are probably {likely}: {remedy}"
    )


def likely_dtype(foreign: Foreign, vocab_size: int | None) -> str | None:
    """Return another type in which the first tokens are plausible ids, or None."""
    num_bytes = foreign.num_tokens * foreign.dtype.itemsize
    with open_regular(foreign.tokens_path) as file:
        file.seek(foreign.begin_byte)
        sample = file.read(min(num_bytes, 8 * _SAMPLE_TOKENS))
    for order, width in itertools.product("<>", (2, 4, 8)):
        dtype = np.dtype(f"{order}u{width}")
        if dtype.newbyteorder("=") == foreign.dtype or num_bytes % width:
            continue
        ids = np.frombuffer(sample[: len(sample) // width * width], dtype)
        maxima = np.array([min(int(ids[k::4].max(initial=0)), 2**62) for k in range(4)], np.int64)
        if _is_plausible(maxima, ids.size, vocab_size or _LARGEST_VOCABULARY, width):
            return f"{'big-endian ' if order == '>' else ''}uint{8 * width}"
    return None


# ---- Documents -----------------------------------------------------------------------------------


def split_documents(
    foreign: Foreign, scan: Scan, separator: int, at: str | None, usual: str = "end"
) -> tuple[ArrayLayout, dict[str, int]]:
    """Return the documents between separators, and begin and end tokens for the meta file. ``at``
    is the separator's position in a document: ``"end"``, ``"start"`` or ``"both"``. None means
    ``usual``, ``"end"`` or ``"start"``, but raises ConfigError if the file begins or ends with a
    separator that would form a document alone."""
    path, num_tokens, marks = foreign.tokens_path, foreign.num_tokens, scan.separators
    if num_tokens and not marks.size:
        raise DataError(
            f"{path}: token id {separator} never occurs; is it the one that ends documents, "
            f"and are the tokens {foreign.dtype.name}?"
        )
    begins = bool(num_tokens and marks[0] == 0)
    ends = bool(num_tokens and marks[-1] == num_tokens - 1)
    if at is None and (begins if usual == "end" else ends):
        where, other = ("begins", "start") if usual == "end" else ("ends", "end")
        likely = "both" if begins and ends and _unpaired(marks, num_tokens) is None else other
        raise ConfigError(
            f"{path} {where} with the separator {separator}, so --eod-at {usual} would make a "
            f"document of it alone: give --eod-at {likely}, or --eod-at {usual} if that is meant"
        )
    at = at or usual
    if at == "both":
        wrong = _unpaired(marks, num_tokens)
        if wrong is not None:
            raise DataError(
                f"{path}: the documents around token {wrong} do not begin and end with "
                f"{separator}: give --eod-at start or --eod-at end"
            )
        bounds = np.concatenate([[0], marks[1::2] + 1])
    else:
        bounds = marks if at == "start" else marks + 1
        bounds = np.unique(np.concatenate([[0], bounds, [num_tokens]]))
    promises = {}
    if at != "start" and ends:
        promises["document_end_token"] = separator
    if at in ("start", "both") and begins:
        promises["document_begin_token"] = separator
    return ArrayLayout(as_lengths(np.diff(bounds))), promises


def _unpaired(marks: NDArray[np.int64], num_tokens: int) -> int | None:
    """Return the first token that contradicts separators at both ends of documents, or None."""
    begins, ends = marks[::2], marks[1::2]
    expected = np.concatenate([[0], ends + 1])[: begins.size]
    wrong = np.flatnonzero(begins != expected)
    if wrong.size:
        return int(expected[wrong[0]])
    if marks.size % 2 or (num_tokens and ends[-1] != num_tokens - 1):
        return num_tokens - 1
    return None


def edge_tokens(foreign: Foreign, layout: ArrayLayout, scan: Scan) -> dict[str, int]:
    """Return the ids that begin or end every document and occur nowhere else; an empty dict if
    fewer than two documents have tokens."""
    offsets = np.concatenate([[0], np.cumsum(layout.lengths, dtype=np.int64)])
    if layout.ends is not None:
        offsets = offsets[np.concatenate([[0], layout.ends])]
    begins, ends = offsets[:-1], offsets[1:]
    begins, ends = begins[ends > begins], ends[ends > begins]
    if begins.size < 2:
        return {}
    tokens, count = mapped_tokens(foreign), begins.size
    begin = scan.first >= 0 and bool((tokens[begins] == scan.first).all())
    end = scan.last >= 0 and bool((tokens[ends - 1] == scan.last).all())
    if scan.first == scan.last:
        both = begin and end and scan.num_last == 2 * count and int((ends - begins).min()) > 1
        begin = both or (begin and scan.num_first == count and not end)
        end = both or (end and scan.num_last == count)
    else:
        begin, end = begin and scan.num_first == count, end and scan.num_last == count
    found = {"document_begin_token": (begin, scan.first), "document_end_token": (end, scan.last)}
    return {key: token for key, (holds, token) in found.items() if holds}


def count_separators_only(foreign: Foreign, layout: ArrayLayout, separators: list[int]) -> int:
    """Return how many documents consist only of separators: one, or one at each end."""
    offsets = np.cumsum(layout.lengths, dtype=np.int64) - layout.lengths
    tokens = mapped_tokens(foreign)
    alone = 0
    for length in (1, 2):
        begins = offsets[layout.lengths == length]
        if length == 1 or len(separators) == 2:
            held = [np.isin(tokens[begins + k], separators) for k in range(length)]
            alone += int(np.count_nonzero(np.logical_and.reduce(held)))
    return alone
