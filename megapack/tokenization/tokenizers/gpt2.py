"""GPT-2's vocab.json and merges.txt as the tokenizer.json that they stand for."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megapack.errors import ConfigError, FormatError
from megapack.optional import require

__all__ = ["GPT2_CONFIG", "gpt2_definition"]

_END = "<|endoftext|>"
_CLASSES = ("GPT2Tokenizer", "GPT2TokenizerFast")
_NAMED = ("unk_token", "bos_token", "eos_token", "pad_token")
GPT2_CONFIG = dict.fromkeys(_NAMED[:3], _END)  # unless tokenizer_config.json says otherwise


def gpt2_definition(
    paths: Sequence[Path], data: Sequence[bytes], config: Mapping[str, Any]
) -> bytes:
    """A tokenizer.json that gives the ids of transformers' GPT2Tokenizer.

    Args:
        paths: of the vocabulary and of the merges, for messages.
        data: their contents.
        config: ``GPT2_CONFIG`` and the files beside them, with ``added_tokens``.

    Raises:
        ConfigError: the files are those of another tokenizer, which splits text otherwise.
        FormatError: the files are not a vocabulary and its merges.
    """
    name = f"{paths[0]} with {paths[1].name}"
    tokenizers = require("tokenizers", f"tokenizer {name}")
    try:
        vocab: dict[str, int] = json.loads(data[0])
        lines = data[1].decode("utf-8").splitlines()
        merges = [tuple(line.split()) for line in lines if line and not line.startswith("#version")]
        model = tokenizers.models.BPE(vocab=vocab, merges=merges)
    except Exception as error:  # the Rust library raises nothing narrower
        raise FormatError(f"{name} are no vocabulary and its merges ({error})") from error
    said = config.get("tokenizer_class")
    is_gpt2 = _END in vocab and not any(token.endswith("</w>") for token in vocab)
    if said not in _CLASSES and (said is not None or not is_gpt2):
        raise ConfigError(
            f"{name} belong to {said or 'another tokenizer'}, not to GPT-2, and do not say how "
            "text is split; give its tokenizer.json"
        )
    tokenizer = tokenizers.Tokenizer(model)
    prefix = bool(config.get("add_prefix_space", False))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    special = sorted(_special_tokens(config), key=lambda text: vocab.get(text, -1))
    beyond = [text for text in special if text not in vocab]
    if beyond:
        raise ConfigError(
            f"{name}: the files beside them add {beyond[0]!r} to the vocabulary; give the "
            "tokenizer.json that transformers writes for them (save_pretrained)"
        )
    tokenizer.add_special_tokens(special)
    return str(tokenizer.to_str()).encode("utf-8")


def _special_tokens(config: Mapping[str, Any]) -> set[str]:
    """What is one token wherever it stands in a text."""
    named = [config.get(name) for name in _NAMED]
    added = [*config.get("added_tokens", {}), *config.get("added_tokens_decoder", {}).values()]
    values = [*named, *added, *config.get("additional_special_tokens", [])]
    texts = (value.get("content") if isinstance(value, Mapping) else value for value in values)
    return {text for text in texts if isinstance(text, str)}
