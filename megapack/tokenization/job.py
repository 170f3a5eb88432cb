"""A build's configuration, made concrete: what every worker needs to know, and its coder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megapack.tokenization.chat import ChatCoder, ChatLoss, Chats, HeaderChats
from megapack.tokenization.chat_template import TemplateChats
from megapack.tokenization.coding import Coder, Storage, TextCoder
from megapack.tokenization.config import BuildConfig, ChatFormat
from megapack.tokenization.encoders import Limits, open_reference
from megapack.tokenization.faults import OnError
from megapack.tokenization.guard import open_any
from megapack.tokenization.pieces import ReadOptions
from megapack.tokenization.split import SPLIT_NAMES
from megapack.tokenization.tokenizer import SpecialToken, TokenizerFiles

__all__ = ["Job", "SpecialTokens", "describe_tokenizer", "make_job", "open_coder"]

# Megatron's rule: every host of the .bin/.idx format reads vocabularies below this as uint16.
_UINT16_VOCABULARY = 65500


@dataclass(frozen=True, kw_only=True)
class SpecialTokens:
    """Around every document; None where nothing stands."""

    bos: SpecialToken | None
    eod: SpecialToken | None


@dataclass(frozen=True, kw_only=True)
class Job:
    """Small, sent to every worker, and the same for all shards."""

    work_dir: str
    tokenizer: TokenizerFiles
    backend: str
    verify_fraction: float
    limits: Limits  # of a worker's encoder
    storage: Storage
    chat: tuple[ChatFormat, ChatLoss] | None  # None: documents are text
    read: ReadOptions
    on_error: OnError
    min_words: int | None
    max_words: int | None
    hash_weights: tuple[float, ...] | None  # split by hash, while shards are written
    finish_only: bool  # build nothing, find everything finished
    metadata: Mapping[str, Any]  # of the meta files

    @property
    def streams(self) -> tuple[str, ...]:
        """What a shard writes: one dataset, or one per split; name endings of their prefixes."""
        if self.hash_weights is None:
            return ("",)
        return tuple(f"_{name}" for name in SPLIT_NAMES)

    @property
    def has_labels(self) -> bool:
        return self.chat is not None

    @property
    def label_metadata(self) -> dict[str, Any]:
        """Of the meta files of labels, whose documents end with labels."""
        kept = {k: v for k, v in self.metadata.items() if not k.startswith("document_")}
        return {**kept, "labels": "token id where it carries loss, -100 elsewhere; not shifted"}


def make_job(
    config: BuildConfig,
    tokenizer: TokenizerFiles,
    special: SpecialTokens,
    *,
    backend: str,
    num_shards: int,
) -> Job:
    """The job of a configuration whose tokenizer, special tokens and backend are known."""
    dtype = config.dtype
    if dtype == "auto":
        dtype = "uint16" if tokenizer.vocab_size < _UINT16_VOCABULARY else "int32"
    chat = None
    if config.messages_key is not None:
        usual: ChatLoss = "turn" if config.chat_format == "headers" else "content"
        chat = (config.chat_format, config.chat_loss or usual)
    metadata: dict[str, Any] = {
        "tokenizer": describe_tokenizer(tokenizer),
        "command": config.command(),
    }
    if special.bos is not None:
        metadata["document_begin_token"] = special.bos.id
    if special.eod is not None:
        metadata["document_end_token"] = special.eod.id
    return Job(
        work_dir=f"{config.output_prefix}.build",
        tokenizer=tokenizer,
        backend=backend,
        verify_fraction=config.verify_fraction,
        # More workers than shards: the spare ones work inside of a shard.
        limits=Limits(max(1, config.workers // max(1, num_shards)), config.worker_memory),
        storage=Storage(
            dtype=dtype,
            vocab_size=tokenizer.vocab_size,
            prefix=() if special.bos is None else (special.bos.id,),
            suffix=() if special.eod is None else (special.eod.id,),
        ),
        chat=chat,
        read=read_options(config),
        on_error=config.on_error,
        min_words=config.min_words,
        max_words=config.max_words,
        hash_weights=config.split_weights if config.split_by == "hash" else None,
        finish_only=config.finish,
        metadata=metadata,
    )


def read_options(config: BuildConfig) -> ReadOptions:
    return ReadOptions(
        json_key=config.messages_key or config.json_key,
        values="strings" if config.messages_key is None else "lists",
        split_key=config.split_key,
        block_bytes=config.block_bytes,
        max_document_bytes=config.max_document_bytes,
    )


def describe_tokenizer(files: TokenizerFiles) -> dict[str, Any]:
    """A tokenizer's identity, as meta files and manifests say it."""
    return {
        "source": Path(files.source).name,
        "kind": files.kind,
        "digest": files.digest,
        "vocab_size": files.vocab_size,
    }


def open_coder(job: Job) -> Coder:
    """Load what turns documents into tokens.

    Raises:
        ConfigError: the backend or the chat format does not fit the tokenizer.
        MegapackError: a package is missing.
    """
    if job.chat is None:
        encoder = open_any(job.tokenizer, job.backend, job.limits)
        reference = None
        if job.verify_fraction > 0:
            reference = open_reference(job.tokenizer)
        return TextCoder(
            encoder,
            job.storage,
            reference=reference,
            verify_fraction=job.verify_fraction,
        )
    form, loss = job.chat
    chats: Chats
    if form == "template":
        chats = TemplateChats(job.tokenizer, loss)
    else:
        chats = HeaderChats(
            open_any(job.tokenizer, job.backend, job.limits), loss, job.tokenizer.source
        )
    return ChatCoder(chats, job.storage)
