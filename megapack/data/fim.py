"""Fill-in-the-middle (FIM): documents whose middle is moved to the end.

``FimConfig`` is the section ``fim:`` of a manifest; ``open_fim`` makes ``Fim``, the settings with
token ids, whose ``restore`` undoes a transformation; ``check_fim`` checks the sources of a run.

    fim: {rate: 0.5, sentinels: {prefix: <|fim_prefix|>, suffix: <|fim_suffix|>,
          middle: <|fim_middle|>}, tokenizer: tokenizer.json}

A document of the body a b c d e f and its end-of-document token, cut at 2 and 5, becomes

    PSM   PRE a b SUF f MID c d e EOD      # prefix, suffix, middle
    SPM   PRE SUF f MID a b c d e EOD      # suffix first, and the prefix before the middle

(Bavarian et al. 2022, arXiv 2207.14255, section 3 and appendix D; Megatron's GPTFIMDataset). The
choice of documents, PSM or SPM, and the cuts are a pure function of the run's seed, the epoch of
the document's sample, and the document. The gather (``csrc/core/gather``) transforms only whole
documents, and only if the index has room for the sentinels (``pack --fim-room``).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import xxhash
from numpy.typing import ArrayLike, NDArray

from megapack import _core
from megapack.calls import checked_call
from megapack.config import check_range
from megapack.data.documents import SourceDocuments, end_tokens
from megapack.errors import ConfigError
from megapack.packing.sharded import SourceIndex
from megapack.storage.address import path_in

if TYPE_CHECKING:
    from megapack.tokenization.tokenizers.tokenizer import TokenizerFiles

Ids = NDArray[np.int64]


# ---- Configuration -------------------------------------------------------------------------------


@checked_call
@dataclass(frozen=True, kw_only=True)
class Sentinels:
    """Tokens that mark the parts of a document: ids, or texts of one token each."""

    prefix: int | str
    """Before the prefix."""
    suffix: int | str
    """Before the suffix."""
    middle: int | str
    """Before the middle."""
    end: int | str | None = None
    """After the middle; null: no token, since the end-of-document token follows."""


@checked_call
@dataclass(frozen=True, kw_only=True)
class FimConfig:
    """Settings of fill-in-the-middle."""

    rate: float = 0.5
    """Share of documents to transform, unless a source or a stage sets its own (``fim_rate``,
    ``fim_rates``). The documents of a smaller rate are among those of a larger one."""
    spm_rate: float = 0.5
    """Share of transformed documents in suffix-prefix-middle order (SPM) instead of PSM."""
    cuts: Literal["token", "character"] = "token"
    """Positions of cuts: between tokens, or also in tokens, whose parts are tokenized again."""
    sentinels: Sentinels
    tokenizer: str | None = None
    """Tokenizer of the documents, as in ``megapack-build tokenize``: required for sentinels that
    are texts and for cuts between characters."""
    eod: int | str | None = None
    """Token that ends documents and stays at their end; null: taken from the datasets' metadata or
    the tokenizer; ``none``: documents end without one."""

    def __post_init__(self) -> None:
        check_range("fim", at_least=0, at_most=1, rate=self.rate, spm_rate=self.spm_rate)
        tokens = [*vars(self.sentinels).values(), self.eod]
        texts = [text for text in tokens if isinstance(text, str) and text != "none"]
        if self.tokenizer is None and (texts or self.cuts == "character"):
            reason = f"{texts[0]!r} is a text" if texts else "cuts are between characters"
            raise ConfigError(f"fim: {reason}, and fim.tokenizer is null: set it")

    def relative_to(self, folder: Path) -> FimConfig:
        """Return the settings with the tokenizer's path relative to the manifest's folder."""
        if self.tokenizer in (None, "bytes"):
            return self
        parts = str(self.tokenizer).split(",")
        return replace(self, tokenizer=",".join(path_in(folder, part) for part in parts))


# ---- Token ids -----------------------------------------------------------------------------------

Tables = tuple[Ids, Ids, Ids, Ids]


class FimDraw(NamedTuple):
    """Random choices for one transformed document.

    Attributes:
        sample: position of its sample in the query.
        segment: segment of the sample; masked documents do not count.
        document: number of the document in its source.
        first, second: tokens, or characters, of the body before the middle, and before the suffix.
    """

    sample: int
    segment: int
    document: int
    spm: bool  # SPM, not PSM
    first: int
    second: int

    def __str__(self) -> str:
        return f"{'SPM' if self.spm else 'PSM'}, cut at {self.first:,} and {self.second:,}"


@dataclass(frozen=True, kw_only=True, eq=False)
class Fim:
    """Settings of fill-in-the-middle for the gather: token ids, -1 for none."""

    prefix: int
    suffix: int
    middle: int
    end: int = -1
    eod: int = -1
    spm_rate: float = 0.5
    tables: Tables | None = None
    """Parts of divided tokens (``csrc/core/gather/fim.hpp``); None: cuts do not divide tokens."""

    @property
    def sentinels(self) -> list[int]:
        return [t for t in (self.prefix, self.suffix, self.middle, self.end) if t >= 0]

    @cached_property
    def room(self) -> int:
        """Largest number of tokens by which a document grows."""
        room = len(self.sentinels)
        if self.tables is not None:  # two cuts, each of which replaces a token by its parts
            _, _, first_part, _ = self.tables
            room += 2 * max(0, int(np.max(np.diff(first_part[::2]), initial=1)) - 1)
        return room

    @cached_property
    def largest_id(self) -> int:
        parts = () if self.tables is None else self.tables[3]
        return max(*self.sentinels, int(np.max(parts, initial=0)))

    def core(self) -> _core.Fim:
        return _core.Fim(**self._scalars(), tables=self.tables)

    def identity(self) -> dict[str, Any]:
        """Return all settings that decide the tokens, except seed, epoch and rate; JSON."""
        fields = self._scalars()
        if self.tables is not None:
            tables = b"".join(np.ascontiguousarray(table, "<i8").tobytes() for table in self.tables)
            fields["tables"] = xxhash.xxh3_128_hexdigest(tables)
        return fields

    def _scalars(self) -> dict[str, Any]:
        names = ("prefix", "suffix", "middle", "end", "eod", "spm_rate")
        return {name: getattr(self, name) for name in names}

    def restore(self, tokens: ArrayLike) -> Ids:
        """Return the original of a transformed document; return others unchanged.

        Args:
            tokens: tokens of a whole document in a batch, (tokens,).

        Returns:
            Its tokens, int64; with cuts between characters, up to two tokens stay split into parts
            with the same text. A document that itself contains sentinels cannot be recognized.
        """
        moved = np.asarray(tokens, np.int64)
        first = [np.flatnonzero(moved == token)[:1] for token in (self.suffix, self.middle)]
        if not len(moved) or moved[0] != self.prefix or not all(map(len, first)):
            return moved
        suffix, middle = (int(position[0]) for position in first)
        end = len(moved) - (self.eod >= 0 and int(moved[-1]) == self.eod)
        last = end - (self.end >= 0)
        parts = (moved[1:suffix], moved[middle + 1 : last], moved[suffix + 1 : middle], moved[end:])
        return np.concatenate(parts)


def open_fim(config: FimConfig, datasets: Sequence[SourceDocuments]) -> Fim:
    """Return the settings with token ids; ``datasets`` may name the token that ends documents.

    Raises ConfigError if a sentinel is not a token or equals another one, the token that ends
    documents is unknown, or the tokenizer does not expose the bytes of its tokens; FormatError or
    OSError if the tokenizer cannot be read.
    """
    files = None
    if config.tokenizer is not None:
        from megapack.tokenization.tokenizers.tokenizer import TokenizerFiles  # noqa: PLC0415

        files = TokenizerFiles.open(config.tokenizer)
    ids = {
        name: -1 if sentinel is None else _token_id(name, sentinel, files)
        for name, sentinel in vars(config.sentinels).items()
    }
    eod = _end_token(config, files, datasets)
    used = [(token, name) for name, token in [*ids.items(), ("eod", eod)] if token >= 0]
    for (before, first), (token, second) in pairwise(sorted(used)):
        if before == token:
            raise ConfigError(
                f"fim: {first} and {second} are both token {token}; give them different tokens"
            )
    tables = None
    if config.cuts == "character":
        assert files is not None  # FimConfig checked it
        tables = _tables_of(files)
    return Fim(**ids, eod=eod, spm_rate=config.spm_rate, tables=tables)


def _token_id(name: str, token: int | str, files: TokenizerFiles | None) -> int:
    if isinstance(token, int):
        below = None if files is None else files.vocab_size
        check_range("fim", at_least=0, below=below, **{name: token})
        return token
    from megapack.tokenization.tokenizers.vocabulary import token_of  # noqa: PLC0415

    assert files is not None  # FimConfig checked it
    return token_of(files, token, f"fim: {name}")


def _end_token(
    config: FimConfig, files: TokenizerFiles | None, datasets: Sequence[SourceDocuments]
) -> int:
    """Return the token that ends documents, or -1 without one."""
    if config.eod == "none":
        return -1
    if config.eod is not None:
        return _token_id("eod", config.eod, files)
    tokens = {token: by for token, by in end_tokens(datasets).items() if token is not None}
    if len(tokens) > 1:
        (one, first), (other, second) = list(tokens.items())[:2]
        raise ConfigError(
            f"fim: documents of {first} end with token {one}, those of {second} with {other}; use "
            "one tokenizer in a run, or give fim.eod"
        )
    if tokens:
        return next(iter(tokens))
    if files is not None:
        return files.special_token("eod").id
    raise ConfigError(
        "fim: neither the datasets' metadata nor a tokenizer says which token ends documents: "
        "give fim.eod, or eod: none"
    )


# ---- Cuts between characters ---------------------------------------------------------------------

_tables: dict[str, Tables] = {}  # by digest of the tokenizer; large tokenizers take seconds


def _tables_of(files: TokenizerFiles) -> Tables:
    from megapack.tokenization.tokenizers.vocabulary import token_bytes  # noqa: PLC0415

    if files.digest not in _tables:
        _tables[files.digest] = character_tables(token_bytes(files))
    return _tables[files.digest]


# Most parts of a token with a cut. More would need more room in every document for rare tokens.
MOST_PARTS = 4


def character_tables(texts: Sequence[bytes | None]) -> Tables:
    """Return the parts of tokens at every cut between their characters, for ``_core.Fim``.

    Each side of a cut is written with as few tokens as possible, the longest first. If that takes
    more than ``MOST_PARTS``, or is impossible, the cut moves to the end of the token.

        character_tables([b"a", b"b", b"ab"])      # token 2 has two characters, one cut: 0 | 1
        # -> characters 1 1 2; first_cut 0 0 0 1; first_part 0 1 2; parts 0 1

    Args:
        texts: bytes of every token (UTF-8, may begin or end within a character); None: no text.
    """
    # In vocabularies with byte tokens and pieces, the pieces have the larger ids and win.
    ids = {text: token for token, text in enumerate(texts) if text}
    cached: dict[bytes, tuple[int, ...]] = {}

    def in_parts(text: bytes, number: int) -> tuple[int, ...]:
        if number == 1:
            return (ids[text],) if text in ids else ()
        for end in range(len(text) - number + 1, 0, -1):
            others = in_parts(text[end:], number - 1) if text[:end] in ids else ()
            if others:
                return (ids[text[:end]], *others)
        return ()

    def encode(text: bytes) -> tuple[int, ...]:
        if text not in cached:
            encodings = (in_parts(text, number) for number in range(1, MOST_PARTS))
            cached[text] = next(filter(None, encodings), ())
        return cached[text]

    characters = np.zeros(len(texts), np.int64)
    first_cut, first_part, parts = np.zeros(len(texts) + 1, np.int64), [0], array("q")
    for token, text in enumerate(texts):
        begins = [i for i, byte in enumerate(text or b"") if byte & 0xC0 != 0x80]
        characters[token] = len(begins)
        cuts = [i for i in begins if i]
        first_cut[token + 1] = first_cut[token] + len(cuts)
        for cut in cuts:
            assert text is not None
            sides = encode(text[:cut]), encode(text[cut:])
            is_allowed = all(sides) and len(sides[0]) + len(sides[1]) <= MOST_PARTS
            for side in sides:
                parts.extend(side if is_allowed else ())
                first_part.append(len(parts))
    table = np.array(first_part, np.int64)
    return characters, first_cut, table, np.array(parts, np.int64)


# ---- Checks of the sources -----------------------------------------------------------------------


def check_fim(fim: Fim, sources: Iterable[tuple[str, float, SourceDocuments, SourceIndex]]) -> None:
    """Raise ConfigError if a source has chosen labels, is arranged, or has no room for sentinels.
    ``sources``: name, largest rate of any stage, documents and samples of every source."""
    for name, rate, dataset, index in sources:
        if not rate:
            continue
        remedy = f"or give source {name!r} fim_rate: 0"
        if dataset.has_labels:
            raise ConfigError(
                f"source {name!r} has labels that were chosen per token, which do not fit "
                f"transformed documents: set labels: none, {remedy}"
            )
        if index.arranged:
            raise ConfigError(
                f"source {name!r} is arranged, so its documents are parts of the original ones: "
                f"use the source before that, {remedy}"
            )
        if index.fim_room < fim.room:
            raise ConfigError(
                f"source {name!r} was packed with room for {index.fim_room} sentinels per "
                f"document, and fim writes up to {fim.room} tokens more: pack it with --fim-room "
                f"{fim.room}, {remedy}"
            )
