"""Options of a build, and all decisions that follow from them, made before the first shard.

- BuildConfig: the options, checked when the object is created
- make_plan: decides everything that a BuildConfig leaves open
- Plan: the decisions, equal on every worker and machine. Its digest covers everything that affects
  an output byte: builds with one digest make equal shards; shards of two digests are never joined
- differences: readable changes between two plans

    config = BuildConfig(inputs=("x.jsonl",), tokenizer="bytes", output_prefix="out")
    plan, encoder = make_plan(config, find_inputs(config.inputs), note=print)
    plan.dtype, plan.backend, plan.shard_bytes       # -> ("uint16", "bytes", 1048576)
    plan.digest                                      # -> directory <output_prefix>.build/<digest>/
"""

from __future__ import annotations

import dataclasses
import functools
import json
import shlex
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import xxhash

from megapack.config import check_range
from megapack.errors import ConfigError, check_name, require
from megapack.storage.address import is_remote
from megapack.storage.columns import INTERPRETED, LABELS, WEIGHTS, ColumnSpec
from megapack.storage.index_file import GROUPS, prefix_of
from megapack.tokenization.corpus.documents import SPLIT_NAMES, OnError, ReadOptions, parse_split
from megapack.tokenization.corpus.readers import Shard, default_shard_bytes, plan_shards
from megapack.tokenization.corpus.streams import Format, InputFile
from megapack.tokenization.corpus.token_values import (
    ColumnOption,
    LossWeights,
    TokenValues,
    first_value,
)
from megapack.tokenization.tokenizers.coding import ChatLoss, Frame
from megapack.tokenization.tokenizers.encoders import BACKENDS, Encoder, Limits
from megapack.tokenization.tokenizers.probe import choose_backend, require_runnable, sample_blocks
from megapack.tokenization.tokenizers.tokenizer import (
    SpecialToken,
    TokenizerFiles,
    library_versions,
)

# Fields that affect how a build runs and where its files are, not their content.
_EXECUTION = frozenset(
    ("output_prefix", "workers", "executor", "ray_address", "part", "finish", "block_bytes")
    + ("worker_memory", "keep_shards", "overwrite")
)
# Fields whose option has a different name: field -> option.
OPTIONS = {"inputs": "input", "suffixes": "suffix", "columns": "column"}


@dataclass(frozen=True, kw_only=True)
class BuildConfig:
    """Options of a build. The result depends only on the first three groups and the input files."""

    # Input.
    inputs: tuple[str, ...]
    suffixes: tuple[str, ...] = ()  # to read in directories; (): all known data suffixes
    format: Format | None = None  # None: by suffix
    json_key: str = "text"  # key of the text, or column of a table
    messages_key: str | None = None  # replaces json_key: documents are conversations
    weights_key: str | None = None  # loss weights of a text's tokens
    columns: tuple[str, ...] = ()  # columns of a text's tokens; see ``ColumnOption.parse``
    group_key: str | None = None  # documents with equal values form a group
    max_input_bytes: int | None = None  # read whole files up to this total
    max_document_bytes: int = 1 << 30
    on_error: OnError = "fail"
    min_words: int | None = None
    max_words: int | None = None

    # Tokens.
    tokenizer: str
    backend: str = "auto"
    verify_fraction: float = 0.0  # fraction of documents that the reference encodes again
    append_eod: bool = False
    prepend_bos: bool = False
    eod_token: str | int | None = None  # a name or an id
    bos_token: str | int | None = None
    special_tokens: Literal["ids", "text"] = "ids"  # how special tokens in a text are encoded
    dtype: Literal["auto", "uint16", "int32"] = "auto"
    chat_format: Literal["template", "headers"] = "template"
    chat_loss: ChatLoss | None = None  # None: content with a template, turn with headers
    tools_key: str = "tools"  # key of a conversation's tools; "": ignore tools
    template_variables: tuple[str, ...] = ()  # NAME (a key of documents), NAME=JSON or NAME= (none)

    # Output.
    output_prefix: str
    split: str | None = None  # "98,1,1"
    split_by: Literal["order", "hash"] = "order"
    split_key: str | None = None  # hash the value of this key, not the text
    shard_bytes: int | None = None

    # Execution.
    workers: int = 1
    executor: Literal["local", "ray"] = "local"
    ray_address: str | None = None
    part: tuple[int, int] | None = None  # (i, n): this machine builds shards i, i + n, ...
    finish: bool = False  # join shards that other machines built
    block_bytes: int = 4 << 20
    worker_memory: int = 2 << 30  # bytes above which a worker drops its tokenizer's cache
    keep_shards: bool = False
    overwrite: bool = False

    def __post_init__(self) -> None:
        check_name(self.output_prefix)
        # Every command accepts PREFIX.bin or PREFIX.idx, as a shell completes it, for PREFIX.
        object.__setattr__(self, "output_prefix", prefix_of(self.output_prefix))
        check_range("tokenize", at_least=1, workers=self.workers)
        check_range("tokenize", at_least=0, min_words=self.min_words, max_words=self.max_words)
        check_range("tokenize", at_least=0, at_most=1, verify_fraction=self.verify_fraction)
        if self.part is not None and not 0 <= self.part[0] < self.part[1]:
            i, n = self.part
            raise ConfigError(f"part is {i}/{n}; it must be i/n with 0 <= i < n")
        if self.split is not None:
            parse_split(self.split)
        for remedy in self._contradictions():
            raise ConfigError(remedy)

    def _contradictions(self) -> Iterator[str]:
        few, many, chat = self.min_words, self.max_words, self.messages_key is not None
        if any(map(is_remote, self.inputs)):
            yield "inputs must be local files: copy remote files to this machine first"
        if self.part is not None and self.finish:
            yield "--part builds one part, --finish joins all parts; give one of them"
        if is_remote(self.output_prefix) and (
            self.part is not None or self.finish or self.executor == "ray"
        ):
            yield (
                f"several machines cannot build parts of the remote {self.output_prefix}: build "
                "under a prefix on a file system that they share, and copy the result with "
                "`megapack-build upload`"
            )
        if few is not None and many is not None and few > many:
            yield f"--min-words {few} is above --max-words {many}: no document can pass"
        if chat and (few is not None or many is not None):
            yield "--min-words and --max-words are for text: leave them or --messages-key out"
        if chat and self.template_variables and self.chat_format != "template":
            yield "--template-variables are for chat templates: leave out --chat-format headers"
        if chat and self.verify_fraction > 0:
            yield "--verify-fraction is for text; chat templates are always run by the reference"
        if self.split_key is not None and (self.split is None or self.split_by != "hash"):
            yield "--split-key needs --split and --split-by hash"
        of_tokens = "--weights-key" if self.weights_key is not None else "--column"
        if (self.weights_key is not None or self.columns) and (
            chat or self.backend.startswith("gigatoken")
        ):
            yield (
                f"{of_tokens} is for text, and needs a backend that reports the characters of a "
                "token: leave out --messages-key (--chat-loss chooses the loss of conversations; "
                "`megapack-build column add` adds columns to them) and --backend gigatoken"
            )
        names = [WEIGHTS, *(option.name for option in self.column_options)]
        if repeated := {name for name in names if names.count(name) > 1}:
            yield (
                f"--column names {min(repeated)} twice, or weights, which --weights-key reads; "
                "give each column another name"
            )
        if self.special_tokens == "text" and (chat or self.backend == "gigatoken"):
            yield (
                "--special-tokens text is for plain text (chat formats write special tokens), and "
                "gigatoken alone cannot do it: leave out --messages-key and --backend gigatoken"
            )
        if not chat:
            yield from self._chat_options()

    def _chat_options(self) -> Iterator[str]:
        """Yield a sentence for each option that has no effect without conversations."""
        for option, given in (
            (f"--chat-loss {self.chat_loss}", self.chat_loss is not None),
            (f"--chat-format {self.chat_format}", self.chat_format != "template"),
            (f"--tools-key {self.tools_key!r}", self.tools_key != "tools"),
            ("--template-variables", bool(self.template_variables)),
        ):
            if given:
                yield f"{option} is for conversations: give --messages-key, or leave it out"

    @property
    def column_options(self) -> list[ColumnOption]:
        return [ColumnOption.parse(text) for text in self.columns]

    @property
    def split_weights(self) -> tuple[float, ...] | None:
        return None if self.split is None else parse_split(self.split)

    @property
    def outputs(self) -> dict[str, str]:
        """Datasets of the build: stream (``""``, ``"_valid"``, ``"_valid.groups"``) -> prefix."""
        splits = [""]
        if self.split_weights is not None:
            chosen = zip(SPLIT_NAMES, self.split_weights, strict=True)
            splits = [f"_{name}" for name, weight in chosen if weight > 0]
        ends = ("",) if self.group_key is None else ("", GROUPS)
        return {split + end: self.output_prefix + split + end for split in splits for end in ends}

    @property
    def packages(self) -> tuple[str, ...]:
        """Optional packages that this build may use and that take long to import."""
        may_use = self.backend == "gigatoken" or (self.backend == "auto" and not self.needs_spans)
        return ("gigatoken", "awkward") if may_use else ()

    @property
    def needs_spans(self) -> bool:
        """True if the build needs the characters of tokens, which gigatoken cannot report."""
        of_chats = self.messages_key is not None and self.chat_format == "template"
        return of_chats or self.weights_key is not None or bool(self.columns)

    def indices(self, num_shards: int) -> range:
        """Return the shards of this run."""
        i, n = self.part or (0, 1)
        return range(i, num_shards, n)

    def processes(self, indices: Sequence[int]) -> int:
        """Return the number of processes that build these shards."""
        return min(self.workers, max(1, len(indices)))

    def limits(self, indices: Sequence[int]) -> Limits:
        """Return the limits of each process: with more workers than shards, it has several
        threads."""
        return Limits(self.workers // self.processes(indices), self.worker_memory)

    def command(self) -> str:
        """Return a command line that builds the same dataset."""
        words = ["megapack-build", "tokenize", "--input", *self.inputs]
        words += ["--output-prefix", self.output_prefix]
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            skipped = field.name in _EXECUTION or field.name == "inputs"
            if skipped or value is None or value == field.default:
                continue
            option = "--" + OPTIONS.get(field.name, field.name).replace("_", "-")
            if field.name == "columns":  # one value each
                words += [word for column in value for word in (option, column)]
                continue
            words.append(option)
            if isinstance(value, tuple):
                words += map(str, value)
            elif value is not True:
                words.append(str(value))
        return shlex.join(words)


# Megatron's limit: hosts of the .bin/.idx format expect uint16 ids for smaller vocabularies.
_UINT16_VOCABULARY = 65500


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All decisions of a build. It is small, because every worker receives a copy."""

    config: BuildConfig
    inputs: tuple[InputFile, ...]
    read: ReadOptions
    tokenizer: TokenizerFiles
    backend: str
    libraries: Mapping[str, str]  # packages that determine the ids: name -> version
    bos: SpecialToken | None  # added before every document
    eod: SpecialToken | None  # added after every document
    dtype: str  # "uint16" or "int32"
    chat_format: str | None  # None: documents are text
    chat_loss: ChatLoss | None
    shard_bytes: int
    shards: tuple[Shard, ...]  # determined by ``inputs`` and ``shard_bytes``
    columns: Mapping[str, ColumnSpec] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def digest(self) -> str:
        """xxh3-128 of everything that affects an output byte. It excludes ``on_error``, which does
        not change shards without faults; the record of a shard lists its faults."""
        tree = self.tree()
        del tree["on_error"]
        tree["shards"] = [[piece[1:] for piece in shard.pieces] for shard in self.shards]
        return xxhash.xxh3_128_hexdigest(json.dumps(tree, sort_keys=True).encode())

    def tree(self) -> dict[str, Any]:
        """Return the plan as a JSON value; equal plans have equal values."""
        # The JSON of a plan calls the extra keys "beside".
        read = {
            "beside" if name == "extra_keys" else name: value
            for name, value in dataclasses.asdict(self.read).items()
        }
        del read["block_bytes"]  # affects memory only
        if read["group_key"] is None:  # keeps the digest of plans from before this option
            del read["group_key"]
        read["beside"] = [list(pair) for pair in self.read.extra_keys]
        keys = dict(read.pop("value_keys"))
        columns = {
            name: {"key": keys.get(name), **dataclasses.asdict(spec), "shape": list(spec.shape)}
            for name, spec in self.columns.items()
        }
        config = self.config
        return {
            "inputs": [
                [file.path, file.size, file.mtime_ns, file.format, file.compression]
                for file in self.inputs
            ],
            "read": read,
            "on_error": config.on_error,
            "min_words": config.min_words,
            "max_words": config.max_words,
            "tokenizer": self.tokenizer.identity(),
            "backend": self.backend,
            "libraries": dict(self.libraries),
            "verify_fraction": config.verify_fraction,
            "bos": _token(self.bos),
            "eod": _token(self.eod),
            "special_tokens": config.special_tokens,
            "dtype": self.dtype,
            "chat_format": self.chat_format,
            "chat_loss": self.chat_loss,
            "template_variables": list(config.template_variables),
            "split": None if self.split is None else list(self.split),
            "split_by": config.split_by if config.split else "order",
            "shard_bytes": self.shard_bytes,
            "shards": len(self.shards),
            **({"columns": columns} if columns else {}),
        }

    def num_bytes(self, indices: Iterable[int]) -> int:
        """Return the approximate bytes of text in the shards with these indices."""
        return sum(self.shards[index].num_bytes for index in indices)

    @property
    def frame(self) -> Frame:
        return Frame(
            dtype=self.dtype,
            vocab_size=self.tokenizer.vocab_size,
            prefix=() if self.bos is None else (self.bos.id,),
            suffix=() if self.eod is None else (self.eod.id,),
        )

    @functools.cached_property
    def token_values(self) -> dict[str, TokenValues]:
        """Readers of the columns of text, by name."""
        return {
            name: LossWeights() if name == WEIGHTS else TokenValues(f"column {name}", spec)
            for name, spec in self.columns.items()
        }

    @property
    def split(self) -> tuple[float, ...] | None:
        return self.config.split_weights

    @property
    def split_while_writing(self) -> bool:
        """True: a hash assigns each document to its split. False: `assemble` cuts the shards."""
        return self.config.split is not None and self.config.split_by == "hash"

    @property
    def streams(self) -> tuple[str, ...]:
        """Suffixes added to a shard's prefix: one per split if `split_while_writing`, else ""."""
        return tuple(f"_{name}" for name in SPLIT_NAMES) if self.split_while_writing else ("",)

    @property
    def ends(self) -> tuple[str, ...]:
        """Suffixes of each stream's datasets: "" for tokens, and that of groups if any."""
        return ("",) if self.read.group_key is None else ("", GROUPS)

    def stored(self, dataset: str) -> dict[str, Any]:
        """Return the arguments of ``IndexedDatasetBuilder`` for a dataset; ``dataset`` is its
        stream or a shard's prefix, which ends in ``.groups`` for groups."""
        metadata: dict[str, Any] = {
            "tokenizer": {
                "name": Path(self.tokenizer.name).name,
                "kind": self.tokenizer.kind,
                "digest": self.tokenizer.digest,
                "vocab_size": self.tokenizer.vocab_size,
            },
            "plan": self.digest,
        }
        if dataset.endswith(GROUPS):
            del metadata["tokenizer"]
            metadata["groups"] = "one number per document: its group, or -1"
            return {"dtype": np.int64, "allow_negative": True, "metadata": metadata}
        for key, token in (("document_begin_token", self.bos), ("document_end_token", self.eod)):
            if token is not None:
                metadata[key] = token.id
        vocab_size = self.tokenizer.vocab_size
        facts = {"dtype": self.dtype, "vocab_size": vocab_size, "metadata": metadata}
        return {**facts, "columns": self.columns} if self.columns else facts

    def check_machine(self) -> None:
        """Raise ConfigError, which lists the differences, if this machine has other tokenizer files
        or libraries than the plan, and so might encode text to other ids."""
        installed = {
            "tokenizer": TokenizerFiles.open(self.tokenizer.name).identity(),
            "libraries": library_versions(self.backend, template=self.chat_format == "template"),
        }
        planned = {"tokenizer": self.tokenizer.identity(), "libraries": dict(self.libraries)}
        changed = differences(planned, installed)
        if changed:
            raise ConfigError(
                f"{socket.gethostname()} would not give the planned ids: {'; '.join(changed)}. "
                "Install the same files and packages on all machines"
            )


def make_plan(
    config: BuildConfig, inputs: list[InputFile], note: Callable[[str], None]
) -> tuple[Plan, Encoder | None]:
    """Decide everything that ``config`` leaves open. Return the plan, and the encoder of its
    backend if it was loaded: the first shard can use it. ``note`` is called with a sentence for
    every decision that a user may not expect. Raises ConfigError for an unknown tokenizer, special
    token or backend, DataError if an input is damaged, and MegapackError if a package is missing.
    """
    tokenizer = TokenizerFiles.open(config.tokenizer)
    require_runnable(tokenizer, config.packages)
    as_text = config.special_tokens == "text"
    tokenizer = dataclasses.replace(tokenizer, special_as_text=as_text)
    if tokenizer.switched_off:
        settings = ", ".join(tokenizer.switched_off)
        note(f"{tokenizer.name} has settings that would change documents; switched off: {settings}")
    bos = tokenizer.special_token("bos", config.bos_token) if config.prepend_bos else None
    eod = tokenizer.special_token("eod", config.eod_token) if config.append_eod else None
    is_chat = config.messages_key is not None
    chat_format = config.chat_format if is_chat else None
    if chat_format is None:
        _note_framing(config, tokenizer, note)
    extra_keys: tuple[tuple[str, str], ...] = ()
    if chat_format == "template":
        template_keys = chat_templates().template_keys
        extra_keys = template_keys(tokenizer, config.tools_key, config.template_variables)
    elif chat_format == "headers" and config.tools_key:
        extra_keys = (("tools", config.tools_key),)
    read = ReadOptions(
        json_key=config.messages_key or config.json_key,
        values="lists" if is_chat else "strings",
        extra_keys=extra_keys,
        split_key=config.split_key,
        value_keys=(
            *([] if config.weights_key is None else [(WEIGHTS, config.weights_key)]),
            *((option.name, option.key) for option in config.column_options),
        ),
        group_key=config.group_key,
        block_bytes=config.block_bytes,
        max_document_bytes=config.max_document_bytes,
    )
    shard_bytes = config.shard_bytes
    shard_bytes = default_shard_bytes(inputs) if shard_bytes is None else shard_bytes
    num_shards = sum(file.size for file in inputs) // max(1, shard_bytes)
    if shard_bytes < 1 << 20 and num_shards > 1000:
        note(f"--shard-bytes {shard_bytes} makes about {num_shards:,} shards: 1M or more is faster")
    shards = plan_shards(inputs, shard_bytes=shard_bytes, json_key=read.json_key)
    _require_keys(config, inputs)
    backend = config.backend
    if backend == "auto" and config.needs_spans:
        backend = BACKENDS[tokenizer.kind][0]
    limits = config.limits(config.indices(len(shards)))
    backend, encoder = choose_backend(tokenizer, backend, shards, read, note, limits=limits)
    columns = _column_specs(config, read, shards, note)
    dtype = config.dtype
    if dtype == "auto":
        dtype = "uint16" if tokenizer.vocab_size < _UINT16_VOCABULARY else "int32"
    usual: ChatLoss = "turn" if config.chat_format == "headers" else "content"
    plan = Plan(
        config=config,
        inputs=tuple(inputs),
        read=read,
        tokenizer=tokenizer,
        backend=backend,
        libraries=library_versions(backend, template=chat_format == "template"),
        bos=bos,
        eod=eod,
        dtype=dtype,
        chat_format=chat_format,
        chat_loss=(config.chat_loss or usual) if is_chat else None,
        shard_bytes=shard_bytes,
        shards=tuple(shards),
        columns=columns,
    )
    return plan, encoder


def _note_framing(
    config: BuildConfig, tokenizer: TokenizerFiles, note: Callable[[str], None]
) -> None:
    """Report tokens that the tokenizer itself adds around a text but this build does not."""
    begin, end = tokenizer.framing
    for tokens, verb, option, name, enabled in (
        (begin, "begins", "--prepend-bos", "--bos-token", config.prepend_bos),
        (end, "ends", "--append-eod", "--eod-token", config.append_eod),
    ):
        if tokens and not enabled:
            note(
                f"{tokenizer.name} itself {verb} every text with {' '.join(tokens)}; this build "
                f"adds none: {option} {name} '{tokens[0]}' adds it"
            )


def _require_keys(config: BuildConfig, inputs: Iterable[InputFile]) -> None:
    """Raise ConfigError if options name keys of documents but an input is plain text."""
    whole = next((file.path for file in inputs if file.format == "text"), None)
    for name in ("messages_key", "weights_key", "columns", "group_key", "split_key"):
        if whole is not None and getattr(config, name) not in (None, ()):
            ids = ", or give `pack --groups` a .npy of ids" if name == "group_key" else ""
            option = OPTIONS.get(name, name).replace("_", "-")
            raise ConfigError(
                f"{whole} is one document and has no key for --{option}: write the "
                f"corpus as JSON Lines{ids}"
            )


def _column_specs(
    config: BuildConfig, read: ReadOptions, shards: Sequence[Shard], note: Callable[[str], None]
) -> dict[str, ColumnSpec]:
    """Return the types of the columns: labels of conversations, loss weights, and those of
    ``--column``, from the option or the first document of a sample that has a value. Report an
    optional key that no sampled document has, because it may be misspelled."""
    specs = {} if config.messages_key is None else {LABELS: INTERPRETED[LABELS]}
    if not read.value_keys and read.group_key is None:
        return specs
    blocks = sample_blocks(shards, read)
    groups = {group for block in blocks if block.groups is not None for group in block.groups}
    keys = dict(read.value_keys)
    missing = [] if groups - {-1} else [("--group-key", read.group_key)]
    if WEIGHTS in keys:
        specs[WEIGHTS] = INTERPRETED[WEIGHTS]
        if first_value(blocks, WEIGHTS) is None:
            missing.append(("--weights-key", keys[WEIGHTS]))
    for option in config.column_options:
        first = first_value(blocks, option.name)
        if first is None:
            missing.append(("--column", option.key))
        specs[option.name] = option.spec_for(first, note)
    for name, key in missing:
        if key is not None:
            note(f"no document of a sample has {key!r}; see {name}")
    return specs


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Return the changes between the trees of two plans, one readable line each."""
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


def chat_templates() -> Any:
    """Import the module template_chats, which needs jinja2."""
    require("jinja2", "a chat template")
    from megapack.tokenization.tokenizers import template_chats  # noqa: PLC0415

    return template_chats


def _token(token: SpecialToken | None) -> list[Any] | None:
    return None if token is None else [token.text, token.id]
