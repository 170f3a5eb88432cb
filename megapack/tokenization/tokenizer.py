"""What a tokenizer is: its files, its vocabulary, its special tokens.

Who runs it is another matter (megapack/tokenization/encoders.py): the same tokenizer.json is run by
`tokenizers` or gigatoken, the same .model by sentencepiece or gigatoken.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import xxhash

from megapack.errors import ConfigError, FormatError
from megapack.tokenization.optional import require

__all__ = ["Kind", "SpecialToken", "TokenizerFiles"]

Kind = Literal["bytes", "sentencepiece", "hf"]
Role = Literal["bos", "eod"]

# The byte tokenizer: ids 0..255 are bytes, these follow.
_BYTE_SPECIALS = ("<eod>", "<bos>", "<pad>")

# Names by which published tokenizers call their first and last token, for a tokenizer.json that
# comes without the tokenizer_config.json that would say so.
_USUAL: dict[Role, tuple[str, ...]] = {
    "bos": (
        "<s>",
        "<|begin_of_text|>",
        "<bos>",
        "<|begin\u2581of\u2581sentence|>",
        "[CLS]",
    ),
    "eod": (
        "<|endoftext|>",
        "</s>",
        "<|end_of_text|>",
        "<eos>",
        "<|end\u2581of\u2581sentence|>",
        "[SEP]",
    ),
}


@dataclass(frozen=True, slots=True)
class SpecialToken:
    text: str
    id: int


@dataclass(frozen=True, kw_only=True)
class TokenizerFiles:
    """A tokenizer on disk, small enough to be sent to every worker.

    ``vocab_size`` is one more than the largest id, added tokens included. ``digest`` is xxh3-128 of
    the tokenizer's file: two builds belong together when their digests agree.
    """

    kind: Kind
    source: str  # as the user named it
    path: Path | None  # tokenizer.json or .model; None for bytes
    vocab_size: int
    digest: str
    special: Mapping[str, int] = field(default_factory=dict)  # text -> id of special tokens
    config: Mapping[str, Any] = field(default_factory=dict)  # tokenizer_config.json

    @staticmethod
    def open(source: str) -> TokenizerFiles:
        """Find out what ``source`` is: ``bytes``, a .model, a tokenizer.json, or a directory.

        Raises:
            ConfigError: there is no such tokenizer.
            FormatError: the file is not a tokenizer.
        """
        if source == "bytes":
            special = {text: 256 + i for i, text in enumerate(_BYTE_SPECIALS)}
            return TokenizerFiles(
                kind="bytes",
                source=source,
                path=None,
                vocab_size=256 + len(special),
                digest="bytes",
                special=special,
            )
        path = _tokenizer_file(Path(source))
        data = path.read_bytes()
        kind: Kind = "sentencepiece" if path.suffix == ".model" else "hf"
        read = _read_sentencepiece if kind == "sentencepiece" else _read_hf
        vocab_size, special = read(path, data)
        return TokenizerFiles(
            kind=kind,
            source=source,
            path=path,
            vocab_size=vocab_size,
            digest=xxhash.xxh3_128_hexdigest(data),
            special=special,
            config=_read_config(path.parent),
        )

    def special_token(self, role: Role, text: str | None = None) -> SpecialToken:
        """The token that begins (``bos``) or ends (``eod``) a document.

        Args:
            text: the token's own name; without it, what the tokenizer's configuration says, or the
                one usual name that is among its special tokens.

        Raises:
            ConfigError: there is none, or several could be meant.
        """
        if text is None:
            text = self._configured(role)
        if text is not None:
            if text not in self.special:
                raise self._no_special(f"{text!r} is not a special token of {self.source}")
            return SpecialToken(text, self.special[text])
        found = [name for name in _USUAL[role] if name in self.special]
        if len(found) == 1:
            return SpecialToken(found[0], self.special[found[0]])
        problem = f"could be {' or '.join(found)}" if found else "is not declared"
        raise self._no_special(f"the {role} token of {self.source} {problem}")

    def _configured(self, role: Role) -> str | None:
        if self.kind == "bytes":
            return f"<{role}>"
        value = self.config.get("bos_token" if role == "bos" else "eos_token")
        text = value.get("content") if isinstance(value, Mapping) else value
        return text if isinstance(text, str) else None

    def _no_special(self, problem: str) -> ConfigError:
        known = ", ".join(sorted(self.special)[:20]) or "none"
        return ConfigError(f"{problem}; name it with --eod-token or --bos-token (special: {known})")


def _tokenizer_file(source: Path) -> Path:
    if source.is_dir():
        for name in ("tokenizer.json", "tokenizer.model", "spiece.model"):
            if (source / name).is_file():
                return source / name
        raise ConfigError(f"directory {source} holds neither tokenizer.json nor tokenizer.model")
    if not source.is_file():
        raise ConfigError(
            f"there is no tokenizer at {source}; give a sentencepiece .model, a tokenizer.json, a "
            "directory that holds one, or the word bytes (nothing is downloaded)"
        )
    if source.suffix not in (".json", ".model"):
        raise ConfigError(f"{source}: a tokenizer is a .model or a tokenizer.json")
    return source


def _read_config(directory: Path) -> dict[str, Any]:
    path = directory / "tokenizer_config.json"
    config: dict[str, Any] = {}
    if path.is_file():
        try:
            config = dict(json.loads(path.read_bytes()))
        except (ValueError, TypeError) as error:
            raise FormatError(f"{path} is not valid JSON of a mapping ({error})") from error
    template = directory / "chat_template.jinja"
    if template.is_file():
        config["chat_template"] = template.read_text(encoding="utf-8")
    return config


def _read_hf(path: Path, data: bytes) -> tuple[int, dict[str, int]]:
    try:
        tree = json.loads(data)
        vocab = tree["model"]["vocab"]
        added = {str(token["content"]): int(token["id"]) for token in tree.get("added_tokens", [])}
        ids: Iterable[int] = vocab.values() if isinstance(vocab, dict) else range(len(vocab))
        largest = max([*ids, *added.values()])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise FormatError(
            f"{path} is not the tokenizer.json of a tokenizer with a vocabulary ({error!r})"
        ) from error
    return largest + 1, added


def _read_sentencepiece(path: Path, data: bytes) -> tuple[int, dict[str, int]]:
    processor = require("sentencepiece", None, f"tokenizer {path}").SentencePieceProcessor()
    try:
        processor.LoadFromSerializedProto(data)
    except RuntimeError as error:
        raise FormatError(f"{path} is not a sentencepiece model ({error})") from error
    size = processor.GetPieceSize()
    special = {processor.IdToPiece(i): i for i in range(size) if processor.IsControl(i)}
    return size, special
