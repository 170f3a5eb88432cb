"""Look up single tokens of a vocabulary: the id of a text, the bytes of an id.

    files = TokenizerFiles.open("tokenizer.json")                # byte-level BPE
    token_of(files, "<|endoftext|>", "--eod-token")              # -> 50256
    token_bytes(files)[262]                                      # -> b" the"

Both are read from the files; no text is encoded. Byte-level BPE writes bytes in GPT-2's alphabet
(``bytes_to_unicode``). sentencepiece and models with byte fallback write a space as U+2581 and
single bytes as <0x41>.
"""

from __future__ import annotations

import json
import re
from typing import Any

from megapack.errors import ConfigError, require
from megapack.tokenization.tokenizers.tokenizer import TokenizerFiles
from megapack.tokenization.tokenizers.verified import BYTE_ALPHABET, sequence_parts

_SPACE = "\u2581"
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


def token_of(files: TokenizerFiles, text: str, where: str) -> int:
    """Return the id of a token, spelled as in the tokenizer's files. ``where`` is the option or key
    that names it. Raises ConfigError if the tokenizer has no such token."""
    token = files.special.get(text)
    if token is None:
        token = _pieces(files).get(text)
    if token is None:
        known = ", ".join(sorted(files.special)[:20]) or "none"
        raise ConfigError(
            f"{where} is {text!r}, which is not one token of {files.name}: add it to the tokenizer "
            f"(megapack-build train-tokenizer --special-token), or give its id (special: {known})"
        )
    return token


def token_bytes(files: TokenizerFiles) -> list[bytes | None]:
    """Return the bytes of every token, by id; None for special tokens and unused ids. Raises
    ConfigError if the bytes are unknown, because the tokenizer changes text (WordPiece), and
    FormatError, OSError or DataError if its files cannot be read, or were changed."""
    result: list[bytes | None] = [None] * files.vocab_size
    tree = _tree(files) if files.kind == "hf" else {}
    byte_level = bool(tree) and _is_byte_level(tree)
    for piece, token in _pieces(files).items():
        if piece not in files.special:
            result[token] = _byte_level(piece) if byte_level else _spaced(piece)
    for added in tree.get("added_tokens", ()):
        if not added.get("special"):  # plain text, like GPT-NeoX's runs of spaces
            result[added["id"]] = added["content"].encode("utf-8")
    if files.kind == "bytes":
        result[:256] = [bytes([value]) for value in range(256)]
    return result


def _pieces(files: TokenizerFiles) -> dict[str, int]:
    """Return token -> id, without unused tokens; tokens are spelled as in the files."""
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
    kinds = {part.get("type") for part in sequence_parts(tree.get("decoder"), "decoders")}
    if "ByteLevel" in kinds:
        return True
    if not kinds or kinds - {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}:
        names = ", ".join(sorted(map(str, kinds))) or "none"
        raise ConfigError(
            f"the bytes of tokens are unknown for the tokenizer's decoder ({names}): only "
            "byte-level BPE and byte fallback allow cuts between characters; choose cuts: token"
        )
    return False


def _byte_level(piece: str) -> bytes | None:
    try:
        return bytes(BYTE_ALPHABET[character] for character in piece)
    except KeyError:
        return None  # an added token, which is plain text


def _spaced(piece: str) -> bytes:
    single = _BYTE.fullmatch(piece)
    return bytes([int(single[1], 16)]) if single else piece.replace(_SPACE, " ").encode("utf-8")
