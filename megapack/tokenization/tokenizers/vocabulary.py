"""The vocabulary of a tokenizer, token by token: which token a text is, and which bytes a token is.

    files = TokenizerFiles.open("tokenizer.json")                # byte-level BPE
    token_of(files, "<|fim_prefix|>", "fim")                     # -> 50253
    token_bytes(files)[262]                                      # -> b" the"

Both are told by the files alone, without encoding anything: byte-level BPE writes bytes in an
alphabet of its own (GPT-2's ``bytes_to_unicode``), sentencepiece and models with byte fallback
write a space as U+2581 and single bytes as <0x41>.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from megapack.errors import ConfigError, require
from megapack.tokenization.tokenizers.tokenizer import TokenizerFiles

_SPACE = "\u2581"
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


def token_of(files: TokenizerFiles, text: str, where: str) -> int:
    """The id of the token that a text is.

    Args:
        files: the tokenizer.
        text: the token's own, as the tokenizer's files spell it.
        where: what asks, which the message begins with.

    Raises:
        ConfigError: it is no token of the tokenizer.
    """
    found = files.special.get(text)
    if found is None:
        found = _pieces(files).get(text)
    if found is None:
        known = ", ".join(sorted(files.special)[:20]) or "none"
        raise ConfigError(
            f"{where} is {text!r}, which is not one token of {files.name}: add it to the tokenizer "
            f"(megapack-build train-tokenizer --special-token), or give its id (special: {known})"
        )
    return found


def token_bytes(files: TokenizerFiles) -> list[bytes | None]:
    """What every token writes, by id; None: a special token, or no token at all.

    Raises:
        ConfigError: the tokenizer changes text in a way that its tokens do not tell (WordPiece).
        FormatError, OSError, DataError: its files cannot be read, or were changed.
    """
    found: list[bytes | None] = [None] * files.vocab_size
    tree = _tree(files) if files.kind == "hf" else {}
    byte_level = bool(tree) and _is_byte_level(tree)
    for piece, token in _pieces(files).items():
        if piece not in files.special:
            found[token] = _byte_level(piece) if byte_level else _spaced(piece)
    for added in tree.get("added_tokens", ()):
        if not added.get("special"):  # text as it stands, like GPT-NeoX's runs of spaces
            found[added["id"]] = added["content"].encode("utf-8")
    if files.kind == "bytes":
        found[:256] = [bytes([value]) for value in range(256)]
    return found


def _pieces(files: TokenizerFiles) -> dict[str, int]:
    """As the files spell them; not those that sentencepiece has no use for."""
    if files.kind == "sentencepiece":
        module = require("sentencepiece", f"tokenizer {files.name}")
        model = module.SentencePieceProcessor(model_proto=files.definition())
        used = (
            i for i in range(model.GetPieceSize()) if not (model.IsUnused(i) or model.IsUnknown(i))
        )
        return {model.IdToPiece(i): i for i in used}
    if files.kind == "bytes":
        return {}
    vocabulary = _tree(files)["model"]["vocab"]
    if isinstance(vocabulary, dict):
        return {str(piece): int(token) for piece, token in vocabulary.items()}
    return {str(piece): token for token, (piece, _) in enumerate(vocabulary)}  # Unigram


def _tree(files: TokenizerFiles) -> dict[str, Any]:
    return dict(json.loads(files.definition()))


def _is_byte_level(tree: dict[str, Any]) -> bool:
    """Of a tokenizer.json; ConfigError if its decoder is neither that nor spaces and bytes."""
    kinds = {part.get("type") for part in _parts(tree.get("decoder"))}
    if "ByteLevel" in kinds:
        return True
    if not kinds or kinds - {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}:
        told = ", ".join(sorted(map(str, kinds))) or "none"
        raise ConfigError(
            f"the tokenizer's decoder ({told}) does not tell which bytes a token is: only those of "
            "byte-level BPE and with byte fallback are cut between characters; choose cuts: token"
        )
    return False


def _parts(node: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    for part in (node or {}).get("decoders", [node] if node else []):
        yield from _parts(part) if "decoders" in part else [part]


def _byte_level(piece: str) -> bytes | None:
    try:
        return bytes(_ALPHABET[character] for character in piece)
    except KeyError:
        return None  # added as it stands


def _spaced(piece: str) -> bytes:
    single = _BYTE.fullmatch(piece)
    return bytes([int(single[1], 16)]) if single else piece.replace(_SPACE, " ").encode("utf-8")


def _alphabet() -> dict[str, int]:
    """Printable characters of Latin-1 stand for themselves, the other bytes for 256, 257, ..."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): b for i, b in enumerate(others)}


_ALPHABET = _alphabet()
