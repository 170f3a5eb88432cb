"""Fill-in-the-middle (FIM): documents that are told with their middle at the end.

- ``FimConfig``, ``Sentinels``: the section ``fim:`` of a manifest, as it is written.
- ``Fim``: the same with ids: what the gather is given, and the inverse, ``restore``.
- ``open_fim``: one of the other, checked. ``check_fim``: whether the sources of a run allow it.
- ``FimDraws``: of every sample its pass and its rate, which a schedule knows.

    fim: {rate: 0.5, sentinels: {prefix: <|fim_prefix|>, suffix: <|fim_suffix|>,
          middle: <|fim_middle|>}, tokenizer: tokenizer.json}

A document of the body a b c d e f and its end-of-document token, cut at 2 and 5, becomes

    PSM   PRE a b SUF f MID c d e EOD      # prefix, suffix, middle
    SPM   PRE SUF f MID a b c d e EOD      # suffix first, and the prefix before the middle

(Bavarian et al. 2022, arXiv 2207.14255, section 3 and appendix D; Megatron's GPTFIMDataset). Which
documents are turned round, how, and where they are cut, is a pure function of the run's seed, the
number of the pass over the document's sample, and the document; it happens in the gather
(``csrc/core/gather``), so every host has it. Only whole documents are: those for which the index
has room (``pack --fim-room``) and that no sample cuts. All others stay as they are.
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
from megapack.config import check_range
from megapack.data.documents import SourceDocuments, end_tokens
from megapack.errors import ConfigError
from megapack.packing.sharded import SourceIndex
from megapack.storage.address import path_in

if TYPE_CHECKING:
    from megapack.tokenization.tokenizers.tokenizer import TokenizerFiles

Ids = NDArray[np.int64]


# ---- As it is written ----------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Sentinels:
    """Tokens that say what comes: ids, or texts of which each is one token."""

    prefix: int | str
    """Before the prefix."""
    suffix: int | str
    """Before the suffix."""
    middle: int | str
    """Before the middle."""
    end: int | str | None = None
    """Behind the middle; null: nothing, the end-of-document token says it."""


@dataclass(frozen=True, kw_only=True)
class FimConfig:
    """How documents are turned round."""

    rate: float = 0.5
    """Share of the documents, of sources and stages that do not say another (``fim_rate``,
    ``fim_rates``). With a larger rate the same documents are, and more."""
    spm_rate: float = 0.5
    """Share of these that begin with the suffix (SPM); the others are PSM."""
    cuts: Literal["token", "character"] = "token"
    """Where documents may be cut: between tokens, or inside of them, too, where what is left and
    right of the cut is tokenized by itself."""
    sentinels: Sentinels
    tokenizer: str | None = None
    """That of the documents, as ``megapack-build tokenize`` takes it: needed where sentinels are
    texts, and for cuts between characters."""
    eod: int | str | None = None
    """The token that ends documents, which stays there; null: as the datasets' metadata or the
    tokenizer say; ``none``: there is none."""

    def __post_init__(self) -> None:
        check_range("fim", at_least=0, at_most=1, rate=self.rate, spm_rate=self.spm_rate)
        given = [*vars(self.sentinels).values(), self.eod]
        texts = [text for text in given if isinstance(text, str) and text != "none"]
        if self.tokenizer is None and (texts or self.cuts == "character"):
            what = f"{texts[0]!r} is a text" if texts else "cuts are between characters"
            raise ConfigError(f"fim: {what}, and there is no tokenizer: give the documents' one")

    def relative_to(self, folder: Path) -> FimConfig:
        """The same with the tokenizer's path relative to the manifest's folder."""
        if self.tokenizer in (None, "bytes"):
            return self
        parts = str(self.tokenizer).split(",")
        return replace(self, tokenizer=",".join(path_in(folder, part) for part in parts))


# ---- With ids ------------------------------------------------------------------------------------

Tables = tuple[Ids, Ids, Ids, Ids]


class FimDraw(NamedTuple):
    """What is drawn of a document that is turned round."""

    sample: int
    """Its position among the samples asked about."""
    segment: int
    """Of the sample, without those of masked documents."""
    document: int
    """Its number in the source."""
    spm: bool
    """Suffix first; else PSM."""
    first: int
    """Tokens of the body, or characters, before the middle."""
    second: int
    """Tokens, or characters, before the suffix."""

    def __str__(self) -> str:
        return f"{'SPM' if self.spm else 'PSM'}, cut at {self.first:,} and {self.second:,}"


@dataclass(frozen=True, kw_only=True, eq=False)
class Fim:
    """What the gather is given. Ids, -1 where there is none."""

    prefix: int
    suffix: int
    middle: int
    end: int = -1
    eod: int = -1
    spm_rate: float = 0.5
    tables: Tables | None = None
    """How tokens are cut between their characters (``csrc/core/gather/fim.hpp``); None: they are
    not."""

    @property
    def sentinels(self) -> list[int]:
        """Ids of those that there are."""
        given = (self.prefix, self.suffix, self.middle, self.end)
        return [token for token in given if token >= 0]

    @cached_property
    def room(self) -> int:
        """Tokens that a document grows by at most."""
        room = len(self.sentinels)
        if self.tables is not None:  # two tokens are each replaced by those of their parts
            _, _, first_part, _ = self.tables
            room += 2 * max(0, int(np.max(np.diff(first_part[::2]), initial=1)) - 1)
        return room

    @cached_property
    def largest_id(self) -> int:
        """Of all that it writes beside the documents' tokens."""
        parts = () if self.tables is None else self.tables[3]
        return max(*self.sentinels, int(np.max(parts, initial=0)))

    def core(self) -> _core.Fim:
        """As a ``_core.Gatherer`` takes it."""
        names = ("prefix", "suffix", "middle", "end", "eod", "spm_rate", "tables")
        return _core.Fim(**{name: getattr(self, name) for name in names})

    def identity(self) -> dict[str, Any]:
        """All that decides what a document is told as, beside seed, pass and rate; JSON."""
        names = ("prefix", "suffix", "middle", "end", "eod", "spm_rate")
        found = {name: getattr(self, name) for name in names}
        if self.tables is not None:
            tables = b"".join(np.ascontiguousarray(table, "<i8").tobytes() for table in self.tables)
            found["tables"] = xxhash.xxh3_128_hexdigest(tables)
        return found

    def restore(self, tokens: ArrayLike) -> Ids:
        """The document that was told as these tokens; one that holds no sentinels is itself.

        Args:
            tokens: of a whole document, as a batch has them, (tokens,).

        Returns:
            Its tokens, int64; with cuts between characters those of the same text, of which up to
            two are in parts. Documents whose own text holds sentinels cannot be told apart.
        """
        told = np.asarray(tokens, np.int64)
        at = [np.flatnonzero(told == token)[:1] for token in (self.suffix, self.middle)]
        if not len(told) or told[0] != self.prefix or not all(map(len, at)):
            return told
        suffix, middle = (int(found[0]) for found in at)
        end = len(told) - (self.eod >= 0 and int(told[-1]) == self.eod)
        last = end - (self.end >= 0)
        parts = (told[1:suffix], told[middle + 1 : last], told[suffix + 1 : middle], told[end:])
        return np.concatenate(parts)


def open_fim(config: FimConfig, datasets: Sequence[SourceDocuments]) -> Fim:
    """With ids.

    Args:
        config: as it is written.
        datasets: documents of the sources, whose metadata may say what ends them.

    Raises:
        ConfigError: a sentinel is no token, or two are the same; nobody says what ends documents;
            a tokenizer that does not tell what its tokens hold.
        FormatError, OSError: the tokenizer cannot be read.
    """
    files = None
    if config.tokenizer is not None:
        from megapack.tokenization.tokenizers.tokenizer import TokenizerFiles  # noqa: PLC0415

        files = TokenizerFiles.open(config.tokenizer)
    ids = {
        name: -1 if given is None else _token(name, given, files)
        for name, given in vars(config.sentinels).items()
    }
    eod = _eod(config, files, datasets)
    used = [(token, name) for name, token in [*ids.items(), ("eod", eod)] if token >= 0]
    for (before, first), (token, second) in pairwise(sorted(used)):
        if before == token:
            raise ConfigError(
                f"fim: {first} and {second} are both token {token}; give each a token of its own"
            )
    tables = None
    if config.cuts == "character":
        assert files is not None  # FimConfig checked it
        tables = _tables_of(files)
    return Fim(**ids, eod=eod, spm_rate=config.spm_rate, tables=tables)


def _token(name: str, given: int | str, files: TokenizerFiles | None) -> int:
    if isinstance(given, int):
        below = None if files is None else files.vocab_size
        check_range("fim", at_least=0, below=below, **{name: given})
        return given
    from megapack.tokenization.tokenizers.vocabulary import token_of  # noqa: PLC0415

    assert files is not None  # FimConfig checked it
    return token_of(files, given, f"fim: {name}")


def _eod(
    config: FimConfig, files: TokenizerFiles | None, datasets: Sequence[SourceDocuments]
) -> int:
    """The token that ends documents, -1 if none does."""
    if config.eod == "none":
        return -1
    if config.eod is not None:
        return _token("eod", config.eod, files)
    told = {token: by for token, by in end_tokens(datasets).items() if token is not None}
    if len(told) > 1:
        (one, first), (other, second) = list(told.items())[:2]
        raise ConfigError(
            f"fim: documents of {first} end with token {one}, those of {second} with {other}; turn "
            "round documents of one tokenizer in a run, or say which with fim.eod"
        )
    if told:
        return next(iter(told))
    if files is not None:
        return files.special_token("eod").id
    raise ConfigError(
        "fim: neither the datasets' metadata nor a tokenizer say which token ends documents: give "
        "fim.eod, or eod: none"
    )


# ---- Cuts between characters ---------------------------------------------------------------------

_tables: dict[str, Tables] = {}  # by digest of the tokenizer: large ones take seconds


def _tables_of(files: TokenizerFiles) -> Tables:
    from megapack.tokenization.tokenizers.vocabulary import token_bytes  # noqa: PLC0415

    if files.digest not in _tables:
        _tables[files.digest] = character_tables(token_bytes(files))
    return _tables[files.digest]


# Of a token that is cut; more would need more room in every document, for a few rare tokens.
MOST_PARTS = 4


def character_tables(texts: Sequence[bytes | None]) -> Tables:
    """How tokens are cut between their characters, for ``_core.Fim``.

    What is left of a cut, and what is right of it, is written with as few tokens as there are for
    its bytes, the longest first. Where that takes more than ``MOST_PARTS``, or there are none, a
    cut goes to the end of the token.

        character_tables([b"a", b"b", b"ab"])      # token 2 has two characters, one cut: 0 | 1
        # -> characters 1 1 2; first_cut 0 0 0 1; first_part 0 1 2; parts 0 1

    Args:
        texts: of every token its bytes (UTF-8, which may begin or end within a character); None: it
            has no text.
    """
    ids = {text: token for token, text in enumerate(texts) if text}  # pieces stand behind bytes
    known: dict[bytes, tuple[int, ...]] = {}

    def in_parts(text: bytes, number: int) -> tuple[int, ...]:
        if number == 1:
            return (ids[text],) if text in ids else ()
        for end in range(len(text) - number + 1, 0, -1):
            rest = in_parts(text[end:], number - 1) if text[:end] in ids else ()
            if rest:
                return (ids[text[:end]], *rest)
        return ()

    def written(text: bytes) -> tuple[int, ...]:
        if text not in known:
            ways = (in_parts(text, number) for number in range(1, MOST_PARTS))
            known[text] = next(filter(None, ways), ())
        return known[text]

    characters = np.zeros(len(texts), np.int64)
    first_cut, first_part, parts = np.zeros(len(texts) + 1, np.int64), [0], array("q")
    for token, text in enumerate(texts):
        begins = [at for at, byte in enumerate(text or b"") if byte & 0xC0 != 0x80]
        characters[token] = len(begins)
        inner = [at for at in begins if at]
        first_cut[token + 1] = first_cut[token] + len(inner)
        for at in inner:
            assert text is not None
            sides = written(text[:at]), written(text[at:])
            allowed = all(sides) and len(sides[0]) + len(sides[1]) <= MOST_PARTS
            for side in sides:
                parts.extend(side if allowed else ())
                first_part.append(len(parts))
    table = np.array(first_part, np.int64)
    return characters, first_cut, table, np.array(parts, np.int64)


# ---- Whether sources allow it --------------------------------------------------------------------


def check_fim(
    fim: Fim,
    sources: Iterable[tuple[str, float, SourceDocuments, SourceIndex]],
) -> None:
    """Refuse sources that cannot be turned round.

    Args:
        fim: of the run.
        sources: name, largest rate of any stage, documents and samples of each.

    Raises:
        ConfigError: chosen labels, an index without room, or one of an arranged source.
    """
    for name, rate, dataset, index in sources:
        if not rate:
            continue
        remedy = f"or give source {name!r} fim_rate: 0"
        if dataset.has_labels:
            raise ConfigError(
                f"source {name!r} has labels that were chosen token by token, which say nothing of "
                f"documents turned round: say labels: none, {remedy}"
            )
        if index.arranged:
            raise ConfigError(
                f"source {name!r} is arranged, so that pieces of documents are documents of their "
                f"own: use the source that it was made of, {remedy}"
            )
        if index.fim_room < fim.room:
            raise ConfigError(
                f"source {name!r} was packed with room for {index.fim_room} sentinels per "
                f"document, and fim writes up to {fim.room} tokens more: pack it with --fim-room "
                f"{fim.room}, {remedy}"
            )
