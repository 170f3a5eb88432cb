"""Fill-in-the-middle, in plain Python: the definition of csrc/core/gather/fim.hpp.

A transformed document is an ordinary document: ``transform_document`` returns its tokens, samples
that contain all of it then contain these instead, and ``reference.gather`` defines the batch.

    transform_document("abcde" + eod, cuts 1 and 3)    PSM   PRE a SUF d e MID b c END eod
                                                       SPM   PRE SUF d e MID a b c END eod
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from reference.gather import Column
from reference.random import fold_key, random_bits, unit

PURPOSE = 6  # number of this use of the seed

Segment = tuple[int, int, int]  # document, begin, length
# Token, the token of the document with the same weight, and whether it is that token.
Told = list[tuple[int, int, bool]]


class Parts(NamedTuple):
    """Parts of a token that is cut."""

    left: list[int]
    right: list[int]


@dataclass(frozen=True)
class Fim:
    """Sentinels and rules.

    Attributes:
        end, eod: None: no such token.
        text: bytes of every token, by id; None: documents are cut between tokens only.
        parts: (token, number of bytes left of the cut) -> its parts; missing: it may not be cut
            there.
    """

    prefix: int
    suffix: int
    middle: int
    end: int | None = None
    eod: int | None = None
    spm_rate: float = 0.5
    seed: int = 0
    text: list[bytes] | None = None
    parts: dict[tuple[int, int], Parts] | None = None


# ---- One document


def key_of(seed: int, epoch: int, document: int) -> int:
    """Compute the key of a document from its numbers."""
    return fold_key(seed, PURPOSE, epoch, document)


def transform_document(tokens: list[int], fim: Fim, key: int) -> Told:
    """Return the transformed document."""
    ends = tokens[-1] == fim.eod
    body = tokens[: len(tokens) - ends]
    first, second = cuts(body, fim, key)
    prefix, end_cut = between(body, fim, (0, 0), first), (len(body), 0)
    middle, suffix = between(body, fim, first, second), between(body, fim, second, end_cut)
    if unit(key, 1) < fim.spm_rate:
        parts = [[fim.prefix], [fim.suffix], suffix, [fim.middle], prefix, middle]
    else:
        parts = [[fim.prefix], prefix, [fim.suffix], suffix, [fim.middle], middle]
    parts += [[fim.end]] if fim.end is not None else []
    parts += [[(tokens[-1], len(tokens) - 1, True)]] if ends else []
    # A sentinel has the weight of the next token, or of the last one.
    result: Told = []
    at = next(one[-1][1] for one in reversed(parts) if one and isinstance(one[-1], tuple))
    for one in (one for part in reversed(parts) for one in reversed(part)):
        token, at, is_own = one if isinstance(one, tuple) else (one, at, False)
        result.append((token, at, is_own))
    return result[::-1]


Cut = tuple[int, int]  # before that token, or after this many of its bytes


def cuts(body: list[int], fim: Fim, key: int) -> tuple[Cut, Cut]:
    """Return the begin and the end of the middle."""
    if fim.text is None or fim.parts is None:
        first, second = sorted(int(unit(key, k) * (len(body) + 1)) for k in (2, 3))
        return (first, 0), (second, 0)
    # Begins of characters, token by token (bytes that continue none), and the end.
    begins = [begins_of(text_of(token, fim)) for token in body] + [[0]]
    most = max(len(begins_of(text)) for text in fim.text)

    def drawn(k: int) -> Cut:
        """Draw a uniform number, by rejection."""
        for i in range(1024):
            token, c = divmod(random_bits(key, k + 2 * i) * len(begins) * most >> 64, most)
            if c < len(begins[token]):
                return token, begins[token][c]
        return len(body), 0

    first, second = sorted(drawn(k) for k in (2, 3))
    if first[0] == second[0] and first[1] and second[1]:
        second = (second[0] + 1, 0)
    allowed = [
        (t + 1, 0) if b and (body[t], b) not in fim.parts else (t, b) for t, b in (first, second)
    ]
    return allowed[0], allowed[1]


def begins_of(text: bytes) -> list[int]:
    return [at for at, byte in enumerate(text) if byte & 0xC0 != 0x80]


def text_of(token: int, fim: Fim) -> bytes:
    assert fim.text is not None
    return fim.text[token] if token < len(fim.text) else b""


def between(body: list[int], fim: Fim, begin: Cut, end: Cut) -> Told:
    result: Told = []
    (t, inside), (last, until) = begin, end
    if inside:
        result += [(token, t, False) for token in (fim.parts or {})[body[t], inside].right]
        t += 1
    result += [(body[i], i, True) for i in range(t, last)]
    if until:
        result += [(token, last, False) for token in (fim.parts or {})[body[last], until].left]
    return result


# ---- Samples


class Transformed(NamedTuple):
    documents: list[list[int]]
    weights: list[list[float]] | None
    samples: list[list[Segment]]
    which: list[tuple[int, int]]  # (sample, segment) of the transformed documents


def transformed(
    documents: list[list[int]],
    samples: list[list[Segment]],
    fim: Fim,
    *,
    longest: int,
    epochs: list[int],
    rates: list[float],
    weights: list[list[float]] | None = None,
    columns: dict[str, Column] | None = None,
    first_document: int = 0,
) -> Transformed:
    """Return samples with transformed documents, which are appended to the others, also to
    ``columns``.

    Args:
        longest: tokens of the longest document that has room.
        epochs, rates: epoch and rate of every sample.
        first_document: number of the first document in the source.
    """
    result = Transformed(list(documents), weights and list(weights), [], [])
    for i, sample in enumerate(samples):
        result.samples.append([])
        for s, (d, begin, length) in enumerate(sample):
            key = key_of(fim.seed, epochs[i], first_document + d)
            whole = begin == 0 and 1 < length == len(documents[d]) <= longest
            if not whole or not unit(key, 0) < rates[i]:
                result.samples[-1].append((d, begin, length))
                continue
            new_tokens = transform_document(documents[d], fim, key)
            result.samples[-1].append((len(result.documents), 0, len(new_tokens)))
            result.which.append((i, s))
            result.documents.append([token for token, _, _ in new_tokens])
            if weights is not None and result.weights is not None:
                result.weights.append([weights[d][at] for _, at, _ in new_tokens])
            for column in (columns or {}).values():
                rows = column.rows[d]
                column.rows.append([rows[at] if own else column.fill for _, at, own in new_tokens])
    return result
