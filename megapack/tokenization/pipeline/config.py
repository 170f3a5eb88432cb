"""What a build is asked to do. Every field is checked as soon as it is said."""

from __future__ import annotations

import dataclasses
import shlex
from dataclasses import dataclass
from typing import Literal

from megapack.errors import ConfigError
from megapack.storage.index_file import prefix_of
from megapack.storage.remote import is_remote
from megapack.tokenization.corpus.documents import SPLIT_NAMES, OnError, parse_split
from megapack.tokenization.corpus.pieces import Format, require_utf8
from megapack.tokenization.tokenizers.chat import ChatLoss

__all__ = ["LABELS", "OPTIONS", "BuildConfig", "ChatFormat", "LabelNames"]

ChatFormat = Literal["template", "headers"]
LabelNames = Literal["megapack", "neox"]

# Fields that decide who does the work and where it lies, not what comes out.
_EXECUTION = frozenset(
    {
        "output_prefix",
        "workers",
        "executor",
        "ray_address",
        "part",
        "finish",
        "block_bytes",
        "worker_memory",
        "keep_shards",
        "overwrite",
    }
)
# Fields whose options have another name.
OPTIONS = {"inputs": "input", "suffixes": "suffix"}
LABELS = ".labels"  # ends the stream, and the prefix, of a dataset of labels


@dataclass(frozen=True, kw_only=True)
class BuildConfig:
    """Text to documents: what goes in, what is done with it, who does it.

    The bytes of the result depend on the first three groups and the input files only.
    """

    # What goes in.
    inputs: tuple[str, ...]
    suffixes: tuple[str, ...] = ()  # taken from directories; () is every known data suffix
    format: Format | None = None  # None: by suffix
    json_key: str = "text"  # also the column of a table
    messages_key: str | None = None  # instead of json_key: the documents are conversations
    max_input_bytes: int | None = None  # whole files only
    max_document_bytes: int = 1 << 30
    on_error: OnError = "fail"
    min_words: int | None = None
    max_words: int | None = None

    # What tokens they become.
    tokenizer: str
    backend: str = "auto"
    verify_fraction: float = 0.0  # of documents encoded again by the reference
    append_eod: bool = False
    prepend_bos: bool = False
    eod_token: str | int | None = None  # a name or an id
    bos_token: str | int | None = None
    dtype: Literal["auto", "uint16", "int32"] = "auto"
    chat_format: ChatFormat = "template"
    chat_loss: ChatLoss | None = None  # None: content with a template, turn with headers
    tools_key: str = "tools"  # of a conversation; "": it has none
    template_variables: tuple[str, ...] = ()  # NAME (a key of documents), NAME=JSON or NAME= (none)

    # What comes out.
    output_prefix: str
    split: str | None = None  # "98,1,1"
    split_by: Literal["order", "hash"] = "order"
    split_key: str | None = None  # hash this key instead of the text
    label_names: LabelNames = "megapack"
    shard_bytes: int | None = None

    # Who does it.
    workers: int = 1
    executor: Literal["local", "ray"] = "local"
    ray_address: str | None = None
    part: tuple[int, int] | None = None  # (i, n): the shards i, i + n, ... are this machine's
    finish: bool = False  # join shards that other machines built
    block_bytes: int = 4 << 20
    worker_memory: int = 2 << 30  # bytes, above which a worker drops its tokenizer's cache
    keep_shards: bool = False
    overwrite: bool = False

    def __post_init__(self) -> None:
        require_utf8(self.output_prefix)
        # PREFIX.bin or .idx, as a shell completes it, names the same dataset everywhere.
        object.__setattr__(self, "output_prefix", prefix_of(self.output_prefix))
        if self.workers < 1:
            raise ConfigError(f"workers is {self.workers}; it must be at least 1")
        if not 0 <= self.verify_fraction <= 1:
            raise ConfigError(f"verify fraction is {self.verify_fraction}; it must be in [0, 1]")
        if self.part is not None and not 0 <= self.part[0] < self.part[1]:
            i, n = self.part
            raise ConfigError(f"part is {i}/{n}; it must be i/n with 0 <= i < n")
        if self.split is not None:
            parse_split(self.split)
        for wrong, remedy in self._contradictions():
            if wrong:
                raise ConfigError(remedy)

    def _contradictions(self) -> list[tuple[bool, str]]:
        words = self.min_words is not None or self.max_words is not None
        hashed = self.split is not None and self.split_by == "hash"
        chat = self.messages_key is not None
        return [
            (
                any(map(is_remote, self.inputs)),
                "inputs are files of this machine: copy what lies at addresses first",
            ),
            (
                self.part is not None and self.finish,
                "--part builds one part, --finish joins all parts; give one of them",
            ),
            (
                is_remote(self.output_prefix)
                and (self.part is not None or self.finish or self.executor == "ray"),
                f"parts of {self.output_prefix} would be built on several machines, of which none "
                "sees what the others did: build under a local prefix that all of them see, and "
                "copy the result with `megapack-build upload`",
            ),
            (chat and words, "conversations have no --min-words and --max-words"),
            (
                chat and self.verify_fraction > 0,
                "--verify-fraction is for text; chat templates are always run by the reference",
            ),
            (
                bool(self.template_variables) and not (chat and self.chat_format == "template"),
                "--template-variables are for chat templates; give --messages-key, and no "
                "--chat-format headers",
            ),
            (
                self.split_key is not None and not hashed,
                "--split-key needs --split and --split-by hash",
            ),
            (
                self.label_names == "neox" and not chat,
                "--label-names neox is for conversations; give --messages-key",
            ),
        ]

    @property
    def split_weights(self) -> tuple[float, ...] | None:
        """Weights of train, valid and test."""
        return None if self.split is None else parse_split(self.split)

    @property
    def outputs(self) -> dict[str, str]:
        """The datasets a build makes: stream (``""``, ``"_valid"``, ``"_valid.labels"``) -> prefix.

        GPT-NeoX names the tokens ``<prefix>_<key>_document`` and the labels
        ``<prefix>_<key>_label_document``.
        """
        splits = [""]
        if self.split_weights is not None:
            chosen = zip(SPLIT_NAMES, self.split_weights, strict=True)
            splits = [f"_{name}" for name, weight in chosen if weight > 0]
        tokens, labels = "", LABELS
        if self.label_names == "neox":
            tokens = f"_{self.messages_key}_document"
            labels = f"_{self.messages_key}_label_document"
        outputs = {}
        for split in splits:
            outputs[split] = self.output_prefix + split + tokens
            if self.messages_key is not None:
                outputs[split + LABELS] = self.output_prefix + split + labels
        return outputs

    def command(self) -> str:
        """A command line that builds the same dataset."""
        words = ["megapack-build", "tokenize", "--input", *self.inputs]
        words += ["--output-prefix", self.output_prefix]
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            skipped = field.name in _EXECUTION or field.name == "inputs"
            if skipped or value is None or value == field.default:
                continue
            words.append("--" + OPTIONS.get(field.name, field.name).replace("_", "-"))
            if isinstance(value, tuple):
                words += map(str, value)
            elif value is not True:
                words.append(str(value))
        return shlex.join(words)
