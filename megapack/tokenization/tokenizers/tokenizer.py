"""A tokenizer on disk: its files, its vocabulary size, its special tokens.

- TokenizerFiles: files of a tokenizer; ``TokenizerFiles.open`` resolves a name
- SpecialToken: a token that begins or ends documents
- library_versions: versions of the packages that determine the ids

    files = TokenizerFiles.open("bytes")
    files.kind, files.vocab_size, files.special_token("eod")
    # -> ("bytes", 259, SpecialToken("<eod>", 256))

encoders.py runs tokenizers: `tokenizers` or gigatoken run a tokenizer.json, sentencepiece or
gigatoken a .model.
"""

from __future__ import annotations

import importlib.metadata
import json
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import xxhash

from megapack.errors import ConfigError, DataError, FormatError, require

# Incremented when megapack itself gives different ids for the same text, files and libraries.
_IDS_VERSION = 2

# Libraries reserve memory up to the largest id; the largest published vocabulary has 262,144 ids.
_MAX_IDS = 1 << 22

Kind = Literal["bytes", "sentencepiece", "hf"]
Role = Literal["bos", "eod"]

# Special tokens of the byte tokenizer: ids from 256, after those of the bytes.
_BYTE_SPECIALS = ("<eod>", "<bos>", "<pad>")

# Files of a tokenizer in a directory; the first complete entry wins.
_IN_DIRECTORY = (
    ("tokenizer.json",),
    ("tokenizer.model",),
    ("spiece.model",),
    ("vocab.json", "merges.txt"),
)

# Settings of a tokenizer.json that would cut, pad or randomly change documents. Files saved after
# fine-tuning, or for training with sampled subwords, have them. (True: a key of "model"; name)
_HARMFUL = (
    (False, "truncation"),
    (False, "padding"),
    (True, "dropout"),  # BPE
    (True, "alpha"),  # Unigram, with nbest_size
    (True, "nbest_size"),
)

# GPT-2's vocab.json and merges.txt do not list the special tokens.
_GPT2_END = "<|endoftext|>"
_CLASSES = ("GPT2Tokenizer", "GPT2TokenizerFast")
_NAMED = ("unk_token", "bos_token", "eos_token", "pad_token")
_GPT2_CONFIG = dict.fromkeys(_NAMED[:3], _GPT2_END)  # tokenizer_config.json overrides it


# Usual names of the first and last token, for a tokenizer.json without tokenizer_config.json.
_USUAL: dict[Role, tuple[str, ...]] = {
    "bos": ("<s>", "<|begin_of_text|>", "<bos>", "<|begin\u2581of\u2581sentence|>", "[CLS]"),
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
    """A tokenizer on disk. It is small, because every worker receives a copy. ``vocab_size`` is the
    largest id plus 1, added tokens included. ``digest`` is xxh3-128 of the tokenizer's files;
    builds with equal digests can be joined."""

    kind: Kind
    name: str  # as given by the user
    paths: tuple[Path, ...] = ()  # tokenizer.json, a .model, or vocab.json and merges.txt
    vocab_size: int
    digest: str
    special: Mapping[str, int] = field(default_factory=dict)  # text -> id of added tokens
    # Subset of ``special``: tokens that a text contains only by accident, so without unk.
    controls: Mapping[str, int] = field(default_factory=dict)
    special_as_text: bool = False  # encode ``controls`` in a text as ordinary text
    config: Mapping[str, Any] = field(default_factory=dict)  # tokenizer_config.json
    # Texts of the tokens that the tokenizer itself adds before and after a text.
    framing: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
    file_digests: Mapping[str, str] = field(default_factory=dict)  # file name -> xxh3-128
    # Settings of a tokenizer.json that would cut, pad or randomly change documents.
    switched_off: tuple[str, ...] = ()

    def identity(self) -> dict[str, Any]:
        """Return a JSON value that is equal for tokenizers that encode texts and chats equally.

        ``files`` contains the digest of every file that was read: the tokenizer, its special
        tokens, its chat templates. Package versions are not included (``library_versions``). To
        check a different machine, open the same tokenizer there and compare the values.
        """
        return {
            "kind": self.kind,
            "vocab_size": self.vocab_size,
            "files": dict(sorted(self.file_digests.items())),
        }

    @staticmethod
    def open(name: str) -> TokenizerFiles:
        """Open ``name``: ``bytes``, a .model, a tokenizer.json, a directory with one of them or
        with GPT-2's vocab.json and merges.txt, or the paths of these two with a comma between them.
        Raises ConfigError if it does not exist, and FormatError if it is not a tokenizer."""
        if name == "bytes":
            special = {text: 256 + i for i, text in enumerate(_BYTE_SPECIALS)}
            return TokenizerFiles(
                kind="bytes",
                name=name,
                vocab_size=256 + len(special),
                digest="bytes",
                special=special,
            )
        paths = _tokenizer_files(name)
        _refuse_tiktoken(paths[0])
        digests: dict[str, str] = {}
        data = [_read(path, digests) for path in paths]
        switched_off: tuple[str, ...] = ()
        tree: dict[str, Any] = {}
        config = _read_config(paths[0].parent, digests)
        kind: Kind = "sentencepiece" if paths[0].suffix == ".model" else "hf"
        if len(paths) == 2:
            added = _read_json(paths[0].parent / "added_tokens.json", digests)
            config = {**_GPT2_CONFIG, **config, "added_tokens": added}
            vocab_size, special, tree = _read_hf(paths[0], _gpt2_definition(paths, data, config))
        elif kind == "sentencepiece":
            vocab_size, special = _read_sentencepiece(paths[0], data[0])
        else:
            vocab_size, special, tree = _read_hf(paths[0], data[0])
            switched_off = _take_harmful(tree)
        return TokenizerFiles(
            kind=kind,
            name=name,
            paths=paths,
            vocab_size=vocab_size,
            digest=xxhash.xxh3_128_hexdigest(b"".join(data)),
            special=special,
            controls=_controls(tree),
            framing=_framing(tree.get("post_processor"), config),
            config=config,
            file_digests=digests,
            switched_off=switched_off,
        )

    @property
    def chat_templates(self) -> dict[str, str]:
        """Chat templates by name; a single one is named ``default``."""
        value = self.config.get("chat_template")
        entries = value if isinstance(value, list) else [{"name": "default", "template": value}]
        named = {entry.get("name"): entry.get("template") for entry in entries}
        return {str(name): text for name, text in named.items() if isinstance(text, str)}

    def definition(self) -> bytes:
        """Return the .model or the tokenizer.json (also for vocab.json and merges.txt), without the
        settings in ``switched_off``. Raises DataError if a file was changed after it was opened."""
        digests: dict[str, str] = {}
        data = [_read(path, digests) for path in self.paths]
        for name, digest in digests.items():
            if digest != self.file_digests[name]:
                raise DataError(f"{name} of tokenizer {self.name} was changed; start again")
        if self.switched_off:
            tree = json.loads(data[0])
            _take_harmful(tree)
            return json.dumps(tree, ensure_ascii=False).encode("utf-8")
        return _gpt2_definition(self.paths, data, self.config) if len(data) == 2 else data[0]

    def special_token(self, role: Role, token: str | int | None = None) -> SpecialToken:
        """Return the token that begins (``bos``) or ends (``eod``) a document, by its text or id;
        by default that of the tokenizer's configuration, else the only special token with a usual
        name. Raises ConfigError if the token does not exist, or there are several candidates."""
        if isinstance(token, int):
            if not 0 <= token < self.vocab_size:
                raise ConfigError(
                    f"the {role} token is {token}, but the largest id of {self.name} is "
                    f"{self.vocab_size - 1}"
                )
            names = [text for text, token_id in self.special.items() if token_id == token]
            return SpecialToken([*names, str(token)][0], token)
        text = token
        if not text and self.kind == "bytes":
            text = f"<{role}>"
        elif not text:
            value = self.config.get("bos_token" if role == "bos" else "eos_token")
            text = value.get("content") if isinstance(value, Mapping) else value
        usual = [name for name in _USUAL[role] if name in self.special]
        if not isinstance(text, str) and len(usual) == 1:
            text = usual[0]
        if isinstance(text, str) and text in self.special:
            return SpecialToken(text, self.special[text])
        problem = f"could be {' or '.join(usual)}" if usual else "is not declared"
        problem = f"the {role} token of {self.name} {problem}"
        if isinstance(text, str):
            problem = f"{text!r} is not a special token of {self.name}"
        if not self.special:
            raise ConfigError(
                f"{problem}, and the tokenizer has no special tokens; give the id of a token that "
                f"no text contains, --{role}-token ID, or add a special token to the tokenizer"
            )
        known = ", ".join(sorted(self.special)[:20])
        raise ConfigError(f"{problem}; name it with --{role}-token (special: {known})")


_SUFFIXES = (".json", ".model", ".tiktoken")


def _tokenizer_files(name: str) -> tuple[Path, ...]:
    path = Path(name)
    if path.is_dir():
        for names in _IN_DIRECTORY:
            if all((path / name).is_file() for name in names):
                return tuple(path / name for name in names)
        choices = ", ".join(" with ".join(names) for names in _IN_DIRECTORY)
        raise ConfigError(f"directory {name} contains no tokenizer: none of {choices}")
    vocab, comma, merges = name.partition(",")
    if comma and Path(vocab).is_file() and Path(merges).is_file():
        return Path(vocab), Path(merges)
    if not path.is_file():
        is_name = path.suffix not in _SUFFIXES and not path.is_absolute() and len(path.parts) < 3
        files = "--include '*.json' --include '*.model' --include '*.jinja'"  # no weights
        hub = f"; from a hub: hf download {name} --local-dir {path.name} {files}" if is_name else ""
        raise ConfigError(
            f"no tokenizer at {name}; give a sentencepiece .model, a tokenizer.json, a "
            f"directory with one of them, or the word bytes (megapack downloads nothing){hub}"
        )
    if path.suffix not in _SUFFIXES:
        raise ConfigError(f"{name}: a tokenizer is a .model or a tokenizer.json")
    return (path,)


def _refuse_tiktoken(path: Path) -> None:
    """Raise ConfigError for tiktoken's format: lines of base64 and rank (Llama 3's .model)."""
    with path.open("rb") as file:
        is_ranks = re.match(rb"[A-Za-z0-9+/]+=* \d+\n", file.read(1 << 10)) is not None
    if path.suffix == ".tiktoken" or is_ranks:
        program = (
            "import sys, transformers.convert_slow_tokenizer as c; "
            "c.TikTokenConverter(sys.argv[1]).converted().save('tokenizer.json')"
        )
        raise ConfigError(
            f"{path} is a vocabulary in tiktoken's format, without the rule that splits text. "
            "Use the tokenizer.json that its publisher provides, or convert it with Llama 3's "
            f'split: pip install transformers tiktoken && python -c "{program}" '
            f"{shlex.quote(str(path))}"
        )


def _read(path: Path, digests: dict[str, str]) -> bytes:
    data = path.read_bytes()
    digests[path.name] = xxhash.xxh3_128_hexdigest(data)
    return data


def _read_json(path: Path, digests: dict[str, str]) -> dict[str, Any]:
    """Return the mapping in a JSON file; {} if the file does not exist."""
    if not path.is_file():
        return {}
    try:
        return dict(json.loads(_read(path, digests)))
    except (ValueError, TypeError, RecursionError) as error:
        raise FormatError(f"{path} is not valid JSON, or not a mapping ({error})") from error


def _read_config(directory: Path, digests: dict[str, str]) -> dict[str, Any]:
    """Read the settings in the tokenizer's directory; later files override earlier ones."""
    config = _read_json(directory / "special_tokens_map.json", digests)
    config |= _read_json(directory / "tokenizer_config.json", digests)
    files = {
        path.stem: path for path in sorted(directory.glob("additional_chat_templates/*.jinja"))
    }
    if (directory / "chat_template.jinja").is_file():
        files["default"] = directory / "chat_template.jinja"
    if files:
        templates = {name: _read(path, digests).decode("utf-8") for name, path in files.items()}
        config["chat_template"] = [{"name": n, "template": t} for n, t in templates.items()]
    return config


def _read_hf(path: Path, data: bytes) -> tuple[int, dict[str, int], dict[str, Any]]:
    """Return the vocabulary size, the added tokens and the content of a tokenizer.json."""
    try:
        tree = json.loads(data)
        vocab = tree["model"]["vocab"]
        added = {str(token["content"]): int(token["id"]) for token in tree.get("added_tokens", [])}
        ids: Iterable[int] = vocab.values() if isinstance(vocab, dict) else range(len(vocab))
        smallest, largest = min([*ids, *added.values()]), max([*ids, *added.values()])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise FormatError(
            f"{path} is not the tokenizer.json of a tokenizer with a vocabulary "
            f"({type(error).__name__}: {error})"
        ) from error
    if not 0 <= smallest <= largest < _MAX_IDS:
        wrong = smallest if smallest < 0 else largest
        raise FormatError(
            f"{path} has the token id {wrong}; ids must be in [0, {_MAX_IDS:,}). Correct the "
            "file, or download it again"
        )
    _check_added_ids(path, tree)
    return largest + 1, added, tree


def _check_added_ids(path: Path, tree: Mapping[str, Any]) -> None:
    """Raise FormatError if ``tokenizers`` does not give the added tokens the ids of their file: it
    gives them the vocabulary's ids, or the next ones that are free."""
    vocab = tree["model"]["vocab"]
    ids = dict(vocab) if isinstance(vocab, dict) else {t: i for i, (t, *_) in enumerate(vocab)}
    unused = len(ids)
    for token in tree.get("added_tokens") or ():
        content, stated = str(token["content"]), int(token["id"])
        assigned = ids.setdefault(content, unused) if content else stated
        if assigned != stated:
            raise FormatError(
                f"{path} gives its added token {content!r} the id {stated}, but `tokenizers` gives "
                f"it {assigned}: write {assigned} if the model was trained so, or add {content!r} "
                f"with the id {stated} to the vocabulary of its model"
            )
        unused = max(unused, assigned + 1)


def _controls(tree: Mapping[str, Any]) -> dict[str, int]:
    """Return the special tokens of a tokenizer.json without unk, which any text may produce."""
    model = tree.get("model", {})
    unk, vocab = model.get("unk_token"), model.get("vocab")
    if isinstance(vocab, list) and isinstance(model.get("unk_id"), int):
        unk = vocab[model["unk_id"]][0]
    added = (token for token in tree.get("added_tokens") or () if token.get("special"))
    return {token["content"]: token["id"] for token in added if token["content"] != unk}


def _framing(node: Any, config: Mapping[str, Any]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the tokens that the tokenizer itself adds before and after a text: by the
    ``post_processor`` of its tokenizer.json (``node``), unless its tokenizer_config.json overrides
    it, as in transformers."""
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    parts = [node] if isinstance(node, dict) else []
    while parts:
        part = parts.pop(0)
        parts += part.get("processors") or []
        if "cls" in part and "sep" in part:  # BertProcessing, RobertaProcessing
            before, after = (str(part["cls"][0]),), (str(part["sep"][0]),)
        elif part.get("type") == "TemplateProcessing":
            names = [piece.get("SpecialToken", {}).get("id") for piece in part["single"]]
            position = names.index(None) if None in names else len(names)
            before = tuple(names[:position])
            after = tuple(name for name in names[position:] if name is not None)
    for name, adds in (("bos_token", "add_bos_token"), ("eos_token", "add_eos_token")):
        value = config.get(name)
        text = value.get("content") if isinstance(value, Mapping) else value
        if isinstance(config.get(adds), bool) and isinstance(text, str):
            tokens = (text,) if config[adds] else ()
            before, after = (tokens, after) if name == "bos_token" else (before, tokens)
    return before, after


def _take_harmful(tree: dict[str, Any]) -> tuple[str, ...]:
    """Remove the settings of ``_HARMFUL``; return those that were set, with their values."""
    removed = [
        (name, (tree["model"] if of_model else tree).pop(name, None)) for of_model, name in _HARMFUL
    ]
    return tuple(f"{name} {json.dumps(value)}" for name, value in removed if value is not None)


def _read_sentencepiece(path: Path, data: bytes) -> tuple[int, dict[str, int]]:
    processor = require("sentencepiece", f"tokenizer {path}").SentencePieceProcessor()
    try:
        processor.LoadFromSerializedProto(data)
    except RuntimeError as error:
        raise FormatError(f"{path} is not a sentencepiece model ({error})") from error
    size = processor.GetPieceSize()
    special = {processor.IdToPiece(i): i for i in range(size) if processor.IsControl(i)}
    return size, special


def _gpt2_definition(
    paths: Sequence[Path], data: Sequence[bytes], config: Mapping[str, Any]
) -> bytes:
    """Return a tokenizer.json that gives the same ids as transformers' GPT2Tokenizer. ``data`` are
    the contents of ``paths``; ``config`` is ``_GPT2_CONFIG``, overridden by the files in the same
    directory, with ``added_tokens``. Raises ConfigError if the files belong to a tokenizer that
    splits text differently, and FormatError if they are not a vocabulary and its merges."""
    name = f"{paths[0]} with {paths[1].name}"
    tokenizers = require("tokenizers", f"tokenizer {name}")
    try:
        vocab: dict[str, int] = json.loads(data[0])
        lines = data[1].decode("utf-8").splitlines()
        merges = [tuple(line.split()) for line in lines if line and not line.startswith("#version")]
        model = tokenizers.models.BPE(vocab=vocab, merges=merges)
    except Exception as error:  # the Rust library raises nothing narrower
        raise FormatError(f"{name} are not a vocabulary and its merges ({error})") from error
    class_name = config.get("tokenizer_class")
    is_gpt2 = _GPT2_END in vocab and not any(token.endswith("</w>") for token in vocab)
    if class_name not in _CLASSES and (class_name is not None or not is_gpt2):
        raise ConfigError(
            f"{name} belong to {class_name or 'another tokenizer'}, not to GPT-2, and lack the "
            "rule that splits text; give its tokenizer.json"
        )
    tokenizer = tokenizers.Tokenizer(model)
    prefix = bool(config.get("add_prefix_space", False))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    # Texts that are always one token.
    added = [*config.get("added_tokens", {}), *config.get("added_tokens_decoder", {}).values()]
    values = [*map(config.get, _NAMED), *added, *config.get("additional_special_tokens", [])]
    texts = (value.get("content") if isinstance(value, Mapping) else value for value in values)
    unique = {text for text in texts if isinstance(text, str)}
    special = sorted(unique, key=lambda text: vocab.get(text, -1))
    missing = [text for text in special if text not in vocab]
    if missing:
        raise ConfigError(
            f"{name}: other files in the directory add {missing[0]!r} to the vocabulary; give the "
            "tokenizer.json that transformers writes for them (save_pretrained)"
        )
    tokenizer.add_special_tokens(special)
    return str(tokenizer.to_str()).encode("utf-8")


def library_versions(backend: str, *, template: bool = False) -> dict[str, str]:
    """Return the versions of packages that determine the ids: package -> version. megapack's entry
    changes when megapack itself gives different ids. ``backend`` comes from ``choose_backend``;
    ``template``: with a chat template. Raises MegapackError if a package is missing."""
    packages = {name for name in backend.split("+") if name != "bytes"}
    if template:
        packages |= {"tokenizers", "jinja2"}
    for package in packages:
        require(package, f"backend {backend}")
    versions = {package: importlib.metadata.version(package) for package in sorted(packages)}
    return {**versions, "megapack": str(_IDS_VERSION)}
