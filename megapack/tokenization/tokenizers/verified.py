"""Kinds of tokenizers for which gigatoken was verified to give the reference's token ids.

- find_guard: return the Guard of a verified tokenizer, or the reason why it is not verified
- Guard: texts and characters; a document that contains one is sent to the reference

    find_guard("hf", Path("tokenizer.json").read_bytes())
    # -> Guard(contents=(b"  ",), characters=[0x88f, 0x88f, ...])     GPT-NeoX: runs of spaces

A fixed sample cannot show that two implementations agree: of 740 random tokenizers that passed one,
166 differed on other texts. So gigatoken runs a tokenizer only if its model, normalizer and
pre-tokenizer are on a list of combinations that property tests compare
(tests/tokenization/tokenizers/test_equal_ids.py). Added tokens cannot affect a document that
contains none of them; a document with one goes to the reference. Plain added tokens (without flags,
without overlap with another one) are the exception: chats contain many, so gigatoken was verified
for them.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

_SPACE = "\u2581"

# Character -> byte in byte-level BPE (GPT-2's bytes_to_unicode): a printable Latin-1 character is
# the byte of its code; characters 256, 257, ... are the other bytes in order.
_PLAIN = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_OTHERS = (byte for byte in range(256) if byte not in _PLAIN)
BYTE_ALPHABET = {chr(byte): byte for byte in _PLAIN} | {
    chr(256 + i): b for i, b in enumerate(_OTHERS)
}

# (first, last) of letters, numbers and marks new in Unicode 17: gigatoken's tables have them, but
# `tokenizers` treats them as unassigned, so the pre-tokenizers split differently.
_UNICODE_17 = (
    *((0x088F, 0x088F), (0x0C5C, 0x0C5C), (0x0CDC, 0x0CDC), (0xA7CE, 0xA7CF), (0xA7D2, 0xA7D2)),
    *((0xA7D4, 0xA7D4), (0xA7F1, 0xA7F1), (0x10940, 0x10959), (0x10EC5, 0x10EC7)),
    *((0x11DB0, 0x11DDB), (0x11DE0, 0x11DE9), (0x16EA0, 0x16EB8), (0x16EBB, 0x16ED3)),
    *((0x16FF2, 0x16FF6), (0x187F8, 0x187FF), (0x18D09, 0x18D1E), (0x18D80, 0x18DF2)),
    *((0x1E6C0, 0x1E6FF), (0x2B73A, 0x2B73F), (0x2CEA2, 0x2CEAD), (0x323B0, 0x33479)),
    *((0x1ACF, 0x1ADD), (0x1AE0, 0x1AEB), (0x10EFA, 0x10EFB), (0x11B60, 0x11B67)),  # marks
)

# (first, last) of characters that got a combining class or a decomposition after Unicode 10, whose
# tables `tokenizers` uses for NFC. Found by comparing all characters, each before and after marks.
_NFC_MARKS = (
    *((0x7FD, 0x7FD), (0x897, 0x89F), (0x8CA, 0x8D3), (0x9FE, 0x9FE)),
    *((0xC3C, 0xC3C), (0xD3B, 0xD3C), (0xEBA, 0xEBA), (0x1715, 0x1715)),
    *((0x1ABF, 0x1ACE), (0x1DF6, 0x1DFA), (0xA82C, 0xA82C), (0x10D24, 0x10D27)),
    *((0x10D69, 0x10D6D), (0x10EAB, 0x10EAC), (0x10EFD, 0x10EFF), (0x10F46, 0x10F50)),
    *((0x10F82, 0x10F85), (0x11070, 0x11070), (0x1133B, 0x1133B), (0x113C2, 0x113C2)),
    *((0x113CE, 0x113D0), (0x1145E, 0x1145E), (0x11839, 0x1183A), (0x1193D, 0x1193E)),
    *((0x11943, 0x11943), (0x119E0, 0x119E0), (0x11A34, 0x11A34), (0x11A47, 0x11A47)),
    *((0x11A99, 0x11A99), (0x11D42, 0x11D42), (0x11D44, 0x11D45), (0x11D97, 0x11D97)),
    *((0x11F41, 0x11F42), (0x1611E, 0x1611E), (0x1612F, 0x1612F), (0x16D67, 0x16D67)),
    *((0x16FF0, 0x16FF1), (0x1E08F, 0x1E08F), (0x1E130, 0x1E136), (0x1E2AE, 0x1E2AE)),
    *((0x1E2EC, 0x1E2EF), (0x1E4EC, 0x1E4EF), (0x1E5EE, 0x1E5EF)),
)

# Verified regular expressions of Split, grouped by the tokenizers that introduced them.
_ENGLISH = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SIGNS = r" ?[^\s\p{L}\p{N}]+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BEFORE = r"[^\r\n\p{L}\p{N}]?"
_REGEXES = frozenset(
    "|".join(parts)
    for parts in (
        # GPT-2, as GPT-NeoX writes it
        (r"'(?:[sdmt]|ll|ve|re)", r" ?\p{L}+", r" ?\p{N}+", _SIGNS, r"\s+(?!\S)", r"\s+"),
        # Llama 3, Qwen 2, Qwen 3.5
        (_ENGLISH, _WORD, r"\p{N}{1,3}", rf"{_SIGNS}[\r\n]*", _SPACES),
        (_ENGLISH, _WORD, r"\p{N}", rf"{_SIGNS}[\r\n]*", _SPACES),
        (_ENGLISH, rf"{_BEFORE}[\p{{L}}\p{{M}}]+", r"\p{N}")
        + (r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*", _SPACES),
        # GPT-4o
        (f"{_BEFORE}{_UPPER}*{_LOWER}+{_ENGLISH}?", f"{_BEFORE}{_UPPER}+{_LOWER}*{_ENGLISH}?")
        + (r"\p{N}{1,3}", rf"{_SIGNS}[\r\n/]*", _SPACES),
    )
)


class Guard(NamedTuple):
    """Texts and characters: a document that contains one of them goes to the reference."""

    contents: tuple[bytes, ...]  # UTF-8; none is part of another
    characters: NDArray[np.int64]  # first, last, first, last, ... code points


def find_guard(kind: str, definition: bytes) -> Guard | str:
    """Return the Guard of a verified tokenizer (``hf`` or ``sentencepiece``), else the reason why
    it is not verified. ``definition`` are the bytes of the tokenizer.json or the model."""
    try:
        if kind == "hf":
            return _guard_of_json(json.loads(definition))
        return _guard_of_sentencepiece(definition)
    except _UnverifiedError as reason:
        return str(reason)


class _UnverifiedError(Exception):
    """The tokenizer is not of a verified kind."""


def _require(condition: bool, reason: str) -> None:
    if not condition:
        raise _UnverifiedError(reason)


# ---- tokenizer.json -----------------------------------------------------------------------------

_NFC = ("NFC",)
_PREPEND = ("Prepend", _SPACE)
_REPLACE = ("Replace", {"String": " "}, _SPACE)


def _guard_of_json(tree: Mapping[str, Any]) -> Guard:
    model = tree["model"]
    _require(model.get("type") == "BPE", f"its model is {model.get('type')}, not BPE")
    for key in ("continuing_subword_prefix", "end_of_word_suffix"):
        _require(not model.get(key), f"its model has {key} {model.get(key)!r}")
    merges = model.get("merges") or ()
    _require(len({*map(tuple, merges)}) == len(merges), "its model has a merge twice")
    normalizers = [
        _normalizer(part) for part in sequence_parts(tree.get("normalizer"), "normalizers")
    ]
    pre_tokenizers = sequence_parts(tree.get("pre_tokenizer"), "pretokenizers")
    if model.get("byte_fallback"):
        _require(not model.get("ignore_merges"), "its model has byte_fallback and ignore_merges")
        needed = {f"<0x{byte:02X}>" for byte in range(256)}
        _require_spaces(normalizers, pre_tokenizers)
        plain_allowed = False
    else:
        needed = {*BYTE_ALPHABET}
        _require(normalizers in ([], [_NFC]), f"its normalizer is {_names(normalizers)}")
        # A prefix space would be added to every piece between two added tokens.
        plain_allowed = not _require_byte_level(pre_tokenizers)
    missing = sorted(needed - model["vocab"].keys())
    _require(not missing, f"its vocabulary lacks the byte {missing[:1]}")
    tokens = tree.get("added_tokens") or []
    if not plain_allowed:
        # gigatoken searches for added tokens after it has put a space before the text.
        starts = {token["content"][:1] for token in tokens}
        _require(not starts & {" ", _SPACE}, "it adds a token that begins with a space")
    contents = _guarded_contents(tokens, model["vocab"], bool(normalizers), plain_allowed)
    characters = _UNICODE_17 + (_NFC_MARKS if normalizers == [_NFC] else ())
    return Guard(contents, np.array(sorted(characters), np.int64).reshape(-1))


def sequence_parts(node: Any, key: str) -> list[Mapping[str, Any]]:
    """Return the parts of nested sequences of a tokenizer.json, in order."""
    if node is None:
        return []
    if node.get("type") != "Sequence":
        return [node]
    return [part for inner in node[key] for part in sequence_parts(inner, key)]


def _normalizer(part: Mapping[str, Any]) -> tuple[Any, ...]:
    values = [value for key, value in part.items() if key != "type"]
    return (part.get("type"), *values)


def _names(parts: Sequence[tuple[Any, ...]]) -> str:
    return " + ".join(str(part[0]) for part in parts) or "none"


def _require_byte_level(parts: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether a space is added before texts; raise unless text is split as verified."""
    _require(bool(parts) and parts[-1].get("type") == "ByteLevel", "it does not split into bytes")
    last, splits = parts[-1], parts[:-1]
    prefix, uses_regex = bool(last.get("add_prefix_space", True)), last.get("use_regex", True)
    if not splits:
        _require(uses_regex, "its pre-tokenizer splits nothing")
        return prefix
    _require(not prefix and not uses_regex, "its ByteLevel splits, or adds a space, after a Split")
    for split in splits:
        known = split.get("type") == "Split" and split["pattern"].get("Regex") in _REGEXES
        known = known and split.get("behavior") == "Isolated" and not split.get("invert")
        _require(known and len(splits) == 1, "its pre-tokenizer splits by another rule")
    return False


def _require_spaces(
    normalizers: Sequence[tuple[Any, ...]], pre_tokenizers: Sequence[Mapping[str, Any]]
) -> None:
    """Raise unless spaces become U+2581 in one of the verified ways."""
    if not pre_tokenizers:
        known = list(normalizers) in ([_PREPEND, _REPLACE], [_REPLACE])
        _require(known, f"its normalizer is {_names(normalizers)}")
        return
    _require(not normalizers, f"its normalizer is {_names(normalizers)}, with a pre-tokenizer")
    [*others, metaspace] = pre_tokenizers
    known = not others and metaspace.get("type") == "Metaspace"
    known = known and metaspace.get("replacement") == _SPACE and metaspace.get("split") is False
    known = known and metaspace.get("prepend_scheme") in ("always", "first")
    _require(known, "its pre-tokenizer is not Metaspace, or has unusual settings")


# ---- Added tokens -------------------------------------------------------------------------------

_FLAGS = ("single_word", "lstrip", "rstrip")
# ASCII characters that NFC substitutes for others (U+037E, U+1FEF, U+212A), and the space, which
# other normalizers replace. A text may contain a token with one of these only after normalization.
_MADE_BY_NORMALIZERS = frozenset(" ;`K")


def _guarded_contents(
    tokens: Sequence[Mapping[str, Any]],
    vocab: Mapping[str, int],
    normalizes: bool,
    plain_allowed: bool,
) -> tuple[bytes, ...]:
    """Return the contents of added tokens that send a document to the reference."""
    contents = [token["content"] for token in tokens]
    _require(len(set(contents)) == len(contents), "it adds one token twice")
    _require("" not in contents, "it adds an empty token")
    ids = {token["id"] for token in tokens if token["content"] not in vocab}
    known = all(vocab.get(token["content"], token["id"]) == token["id"] for token in tokens)
    clear = known and len(ids) == sum(content not in vocab for content in contents)
    _require(clear and not ids & {*vocab.values()}, "its added tokens have ids of other tokens")
    overlapping = _overlapping(contents)
    guarded = []
    for token in tokens:
        content = token["content"]
        normalized = normalizes and token.get("normalized")
        if normalized:
            unchanged = content.isascii() and not _MADE_BY_NORMALIZERS & {*content}
            _require(unchanged, f"its added token {content!r} is searched for in normalized text")
        plain = plain_allowed and not normalized and not any(map(token.get, _FLAGS))
        if not plain or content in overlapping:
            guarded.append(content.encode("utf-8"))
    # Keep no token that contains a shorter one: a search for the shorter one finds both.
    unique = {*guarded}
    return tuple(sorted(c for c in unique if not any(p in unique for p in _pieces(c))))


def _pieces(content: Any) -> Iterator[Any]:
    for begin in range(len(content)):
        for end in range(begin + 1, len(content) + 1):
            if end - begin < len(content):
                yield content[begin:end]


def _overlapping(contents: Sequence[str]) -> set[str]:
    """Return the contents that can overlap another one, or a copy of themselves, in a text."""
    starts: dict[str, list[str]] = defaultdict(list)
    for content in contents:
        for end in range(1, len(content)):
            starts[content[:end]].append(content)
    known, result = {*contents}, set()
    for content in contents:
        inner = [piece for piece in _pieces(content) if piece in known]
        shared = [o for begin in range(1, len(content)) for o in starts.get(content[begin:], ())]
        if inner or shared:
            result.update([content, *inner, *shared])
    return result


# ---- sentencepiece models -----------------------------------------------------------------------
# Fields of sentencepiece_model.proto: number in its message -> name.

_MODEL = {1: "pieces", 2: "trainer", 3: "normalizer"}
_PIECE = {1: "piece", 3: "type"}
_TRAINER = {3: "model_type", 24: "treat_whitespace_as_suffix", 35: "byte_fallback"}
_NORMALIZER = {2: "charsmap", 4: "remove_extra_whitespaces", 5: "escape_whitespaces"}
_CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 3, 4, 5, 6  # types of a piece; 1 is the default
_BPE = 2  # model_type; 1 (Unigram) is the default


def _guard_of_sentencepiece(definition: bytes) -> Guard:
    model = _message(definition, _MODEL)
    trainer = _last(_message(model["trainer"][-1], _TRAINER) if model["trainer"] else {})
    normalizer = _last(
        _message(model["normalizer"][-1], _NORMALIZER) if model["normalizer"] else {}
    )
    _require(trainer.get("model_type", 1) == _BPE, "its model is not BPE")
    _require(not trainer.get("treat_whitespace_as_suffix"), "it writes spaces after words")
    _require(bool(trainer.get("byte_fallback")), "it has no byte_fallback")
    _require(not normalizer.get("charsmap"), "it normalizes characters")
    _require(not normalizer.get("remove_extra_whitespaces", 1), "it removes spaces")
    _require(bool(normalizer.get("escape_whitespaces", 1)), "it does not escape spaces")
    pieces = [_last(_message(piece, _PIECE)) for piece in model["pieces"]]
    kinds = [piece.get("type", 1) for piece in pieces]
    _require(_UNUSED not in kinds, "it has unused pieces")
    _require(kinds.count(_BYTE) == 256, "it lacks some bytes")
    guarded = set()
    for piece, of_kind in zip(pieces, kinds, strict=True):
        if of_kind in (_CONTROL, _USER_DEFINED):
            # U+2581 in a symbol matches itself, a space, or the space put before a text: guard the
            # longest part between them.
            part = max(piece.get("piece", b"").split(_SPACE.encode()), key=len)
            _require(bool(part), "it has a symbol of spaces")
            guarded.add(part)
    return Guard(tuple(sorted(guarded)), np.zeros(0, np.int64))


def _message(data: bytes, names: Mapping[int, str]) -> dict[str, list[Any]]:
    """Return the values of the named fields of a protocol buffer, in order."""
    values: dict[str, list[Any]] = {name: [] for name in names.values()}
    position = 0
    while position < len(data):
        key, position = _varint(data, position)
        wire = key & 7
        value: Any
        if wire == 0:
            value, position = _varint(data, position)
        else:
            length, position = (
                _varint(data, position) if wire == 2 else ({1: 8, 5: 4}[wire], position)
            )
            value, position = data[position : position + length], position + length
        if key >> 3 in names:
            values[names[key >> 3]].append(value)
    return values


def _last(fields: Mapping[str, list[Any]]) -> dict[str, Any]:
    """Return the last value of each field, which is the valid one in protocol buffers."""
    return {name: values[-1] for name, values in fields.items() if values}


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Decode a number of seven bits per byte; return it and the position after it."""
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if not byte & 0x80:
            return value, at
