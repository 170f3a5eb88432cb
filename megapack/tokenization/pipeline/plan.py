"""What a build does, decided before its first shard.

Every worker on every machine executes this value as it is. Its digest covers whatever decides an id
or a byte, so two builds of one digest make the same shards, and shards of two digests never meet.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import socket
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from megapack.errors import ConfigError
from megapack.tokenization.corpus.documents import SPLIT_NAMES, OnError
from megapack.tokenization.corpus.pieces import InputFile, ReadOptions
from megapack.tokenization.corpus.shards import Shard, default_shard_bytes, plan_shards
from megapack.tokenization.pipeline.config import BuildConfig, ChatFormat
from megapack.tokenization.tokenizers.chat import ChatLoss
from megapack.tokenization.tokenizers.chat_template import keys_beside
from megapack.tokenization.tokenizers.coding import Frame
from megapack.tokenization.tokenizers.probe import choose_backend
from megapack.tokenization.tokenizers.tokenizer import (
    SpecialToken,
    TokenizerFiles,
    library_versions,
)

__all__ = ["Plan", "differences", "make_plan"]

# Megatron's rule: every host of the .bin/.idx format reads vocabularies below this as uint16.
_UINT16_VOCABULARY = 65500


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A build, decided. Small enough to be sent to every worker, and the same for all of them."""

    inputs: tuple[InputFile, ...]
    read: ReadOptions
    on_error: OnError
    min_words: int | None
    max_words: int | None
    tokenizer: TokenizerFiles
    backend: str
    libraries: Mapping[str, str]  # package -> version, of all that make ids of text
    verify_fraction: float
    bos: SpecialToken | None  # before every document
    eod: SpecialToken | None  # behind it
    dtype: str  # "uint16" or "int32"
    chat_format: ChatFormat | None  # None: documents are text
    chat_loss: ChatLoss | None
    template_variables: tuple[str, ...]  # as BuildConfig has them
    split: tuple[float, ...] | None  # weights of train, valid and test
    split_by: str  # "order" or "hash"
    shard_bytes: int
    shards: tuple[Shard, ...]  # what ``inputs`` and ``shard_bytes`` give

    @functools.cached_property
    def digest(self) -> str:
        """xxh3-128 of everything that decides an id or a byte.

        Not ``on_error``: a shard without faults is the same either way, and one with faults is
        known by its record.
        """
        tree = self.tree()
        del tree["on_error"]
        tree["shards"] = [[piece[1:] for piece in shard.pieces] for shard in self.shards]
        return xxhash.xxh3_128_hexdigest(json.dumps(tree, sort_keys=True).encode())

    def tree(self) -> dict[str, Any]:
        """The plan as JSON shows it; equal for equal plans."""
        read = dataclasses.asdict(self.read)
        del read["block_bytes"]  # memory follows it, nothing else
        read["beside"] = [list(pair) for pair in self.read.beside]
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {
            **values,
            "inputs": [
                [file.path, file.size, file.mtime_ns, file.format, file.compression]
                for file in self.inputs
            ],
            "read": read,
            "tokenizer": self.tokenizer.identity(),
            "libraries": dict(self.libraries),
            "bos": _token(self.bos),
            "eod": _token(self.eod),
            "template_variables": list(self.template_variables),
            "split": None if self.split is None else list(self.split),
            "shards": len(self.shards),
        }

    def num_bytes(self, indices: Iterable[int]) -> int:
        """Of text, about, in some shards."""
        return sum(self.shards[index].num_bytes for index in indices)

    @property
    def frame(self) -> Frame:
        return Frame(
            dtype=self.dtype,
            vocab_size=self.tokenizer.vocab_size,
            prefix=() if self.bos is None else (self.bos.id,),
            suffix=() if self.eod is None else (self.eod.id,),
        )

    @property
    def has_labels(self) -> bool:
        return self.chat_format is not None

    @property
    def split_while_writing(self) -> bool:
        """By a hash: every document is sent to its split. Otherwise shards are cut in the end."""
        return self.split is not None and self.split_by == "hash"

    @property
    def streams(self) -> tuple[str, ...]:
        """What a shard writes: one dataset, or one per split; name endings of their prefixes."""
        return tuple(f"_{name}" for name in SPLIT_NAMES) if self.split_while_writing else ("",)

    def stored(self, *, labels: bool) -> dict[str, Any]:
        """How tokens, or their labels, are stored: arguments of ``IndexedDatasetBuilder``."""
        metadata: dict[str, Any] = {
            "tokenizer": {
                "name": Path(self.tokenizer.name).name,
                "kind": self.tokenizer.kind,
                "digest": self.tokenizer.digest,
                "vocab_size": self.tokenizer.vocab_size,
            },
            "plan": self.digest,
        }
        if labels:
            metadata["labels"] = "token id where it carries loss, -100 elsewhere; not shifted"
            return {"dtype": np.int32, "allow_negative": True, "metadata": metadata}
        for key, token in (("document_begin_token", self.bos), ("document_end_token", self.eod)):
            if token is not None:
                metadata[key] = token.id
        vocab_size = self.tokenizer.vocab_size
        return {"dtype": self.dtype, "vocab_size": vocab_size, "metadata": metadata}

    def check_machine(self) -> None:
        """Whether this machine would give the ids that were planned.

        Raises:
            ConfigError: its tokenizer files or its libraries are others; names machine and
                difference.
        """
        here = {
            "tokenizer": TokenizerFiles.open(self.tokenizer.name).identity(),
            "libraries": _libraries(self.backend, self.chat_format),
        }
        planned = {"tokenizer": self.tokenizer.identity(), "libraries": dict(self.libraries)}
        changed = differences(planned, here)
        if changed:
            raise ConfigError(
                f"{socket.gethostname()} would not give the ids that were planned: "
                f"{'; '.join(changed)}. Give all machines the same files and packages"
            )


def make_plan(config: BuildConfig, inputs: list[InputFile], note: Callable[[str], None]) -> Plan:
    """Decide everything that ``config`` leaves open.

    Args:
        note: is told what is done otherwise than one may expect.

    Raises:
        ConfigError: there is no such tokenizer, special token or backend.
        DataError: a damaged input.
        MegapackError: a package is missing.
    """
    tokenizer = TokenizerFiles.open(config.tokenizer)
    if tokenizer.switched_off:
        settings = ", ".join(tokenizer.switched_off)
        note(f"{tokenizer.name} has settings that would change documents; switched off: {settings}")
    bos = tokenizer.special_token("bos", config.bos_token) if config.prepend_bos else None
    eod = tokenizer.special_token("eod", config.eod_token) if config.append_eod else None
    is_chat = config.messages_key is not None
    read = ReadOptions(
        json_key=config.messages_key or config.json_key,
        values="lists" if is_chat else "strings",
        beside=_beside(config, tokenizer) if is_chat else (),
        split_key=config.split_key,
        block_bytes=config.block_bytes,
        max_document_bytes=config.max_document_bytes,
    )
    shard_bytes = config.shard_bytes
    if shard_bytes is None:
        shard_bytes = default_shard_bytes(inputs)
    shards = plan_shards(inputs, shard_bytes=shard_bytes, json_key=read.json_key)
    backend = choose_backend(tokenizer, config.backend, shards, read, note)
    dtype = config.dtype
    if dtype == "auto":
        dtype = "uint16" if tokenizer.vocab_size < _UINT16_VOCABULARY else "int32"
    chat_format = config.chat_format if is_chat else None
    usual: ChatLoss = "turn" if config.chat_format == "headers" else "content"
    return Plan(
        inputs=tuple(inputs),
        read=read,
        on_error=config.on_error,
        min_words=config.min_words,
        max_words=config.max_words,
        tokenizer=tokenizer,
        backend=backend,
        libraries=_libraries(backend, chat_format),
        verify_fraction=config.verify_fraction,
        bos=bos,
        eod=eod,
        dtype=dtype,
        chat_format=chat_format,
        chat_loss=(config.chat_loss or usual) if is_chat else None,
        template_variables=config.template_variables,
        split=config.split_weights,
        split_by=config.split_by if config.split else "order",
        shard_bytes=shard_bytes,
        shards=tuple(shards),
    )


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """What changed from one plan's tree to another's, one readable line each."""
    lines = []
    for key in sorted(new):
        before, now = old.get(key), new[key]
        if before == now:
            continue
        if key == "inputs":
            lines += _changed_inputs(before or [], now)
        elif isinstance(now, Mapping) and isinstance(before, Mapping):
            names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
            lines += [_changed(f"{key}: {name}", before.get(name), now.get(name)) for name in names]
        else:
            lines.append(_changed(key, before, now))
    return lines


def _changed(what: str, before: object, now: object) -> str:
    return f"{what} was {before!r}, is {now!r}"


def _changed_inputs(old: list[list[Any]], new: list[list[Any]]) -> list[str]:
    before = {path: facts for path, *facts in old}
    after = {path: facts for path, *facts in new}
    lines = [f"input {path} is new" for path in after if path not in before]
    lines += [f"input {path} is gone" for path in before if path not in after]
    both = [path for path in after if path in before]
    lines += [f"input {path} changed" for path in both if before[path] != after[path]]
    return lines or ["the inputs come in another order"]


def _beside(config: BuildConfig, tokenizer: TokenizerFiles) -> tuple[tuple[str, str], ...]:
    if config.chat_format == "template":
        return keys_beside(tokenizer, config.tools_key, config.template_variables)
    return (("tools", config.tools_key),) if config.tools_key else ()


def _libraries(backend: str, chat_format: ChatFormat | None) -> dict[str, str]:
    return library_versions(backend, template=chat_format == "template")


def _token(token: SpecialToken | None) -> list[Any] | None:
    return None if token is None else [token.text, token.id]
