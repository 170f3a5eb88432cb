"""One shard: text in, finished datasets and a record of them out. What a worker runs."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from megapack import _core
from megapack.errors import ConfigError, MegapackError
from megapack.storage import IndexedDatasetBuilder
from megapack.tokenization.build.background import ahead
from megapack.tokenization.build.plan import Plan
from megapack.tokenization.build.record import (
    LABELS,
    ShardRecord,
    Totals,
    read_record,
    shard_prefix,
    write_record,
)
from megapack.tokenization.corpus.blocks import TextBlock
from megapack.tokenization.corpus.faults import Faults
from megapack.tokenization.corpus.readers import read_blocks
from megapack.tokenization.corpus.split import hashed_split
from megapack.tokenization.tokenizers.chat import ChatCoder, HeaderChats
from megapack.tokenization.tokenizers.chat_template import TemplateChats
from megapack.tokenization.tokenizers.coding import Coded, Coder, TextCoder
from megapack.tokenization.tokenizers.encoders import Limits, open_reference
from megapack.tokenization.tokenizers.guard import open_any

__all__ = ["Counted", "Execution", "Report", "Worker", "open_coder"]


@dataclass(frozen=True, kw_only=True)
class Execution:
    """A plan, and how this run executes it; of the result only the plan decides."""

    plan: Plan
    directory: str  # of the shards
    limits: Limits  # of a worker's tokenizer
    finish_only: bool  # build nothing, find everything finished


class Counted(NamedTuple):
    """What was done since the last report."""

    documents: int
    text_bytes: int
    tokens: int


Report = Callable[[Counted], None]


class _Part(NamedTuple):
    """A coded block, or the part of it that goes to one stream."""

    stream: str
    coded: Coded
    num_text_bytes: int


def open_coder(plan: Plan, limits: Limits = Limits()) -> Coder:  # noqa: B008
    """Load what turns documents into tokens.

    Raises:
        ConfigError: the backend or the chat format does not fit the tokenizer.
        MegapackError: a package is missing.
    """
    if plan.chat_loss is not None:
        if plan.chat_format == "template":
            return ChatCoder(TemplateChats(plan.tokenizer, plan.chat_loss), plan.storage)
        encoder = open_any(plan.tokenizer, plan.backend, limits)
        chats = HeaderChats(encoder, plan.chat_loss, plan.tokenizer.source)
        return ChatCoder(chats, plan.storage)
    return TextCoder(
        open_any(plan.tokenizer, plan.backend, limits),
        plan.storage,
        reference=open_reference(plan.tokenizer) if plan.verify_fraction > 0 else None,
        verify_fraction=plan.verify_fraction,
    )


class Worker:
    """Builds shards, with a tokenizer that is loaded once, by the first that needs it."""

    def __init__(self, execution: Execution) -> None:
        self.execution = execution
        self._plan = execution.plan

    @functools.cached_property
    def coder(self) -> Coder:
        """Loaded after a look at this machine. Raises ConfigError where it is not the plan's."""
        self._plan.check_machine()
        return open_coder(self._plan, self.execution.limits)

    def build(self, index: int, report: Report) -> ShardRecord:
        """Build a shard, or find it finished. Reading, encoding and writing overlap.

        Args:
            index: of the plan's shards.
            report: called after every block.

        Raises:
            ConfigError: this machine has other tokenizer files or libraries than the plan; the
                shard lacks documents that may not be left out.
            DataError: a document that may not pass; a token id outside of the vocabulary.
            MegapackError: the shard is not finished and may not be built.
            OSError: a file cannot be read or written; the shard then leaves nothing behind.
        """
        plan = self._plan
        prefix = shard_prefix(self.execution.directory, index)
        ends = ("", LABELS) if plan.has_labels else ("",)
        datasets = [f"{prefix}{stream}{end}" for stream in plan.streams for end in ends]
        record = read_record(prefix, datasets, plan.digest)
        if record is None and self.execution.finish_only:
            raise MegapackError(
                f"shard {index} is not finished; --finish joins shards that all are: run the "
                "missing parts again, or leave out --finish to build them here"
            )
        if record is None:
            record = self._built(index, prefix, datasets, report)
            write_record(prefix, record)
        else:
            report(Counted(record.num_documents, record.num_text_bytes, record.num_tokens))
        if plan.on_error == "fail" and record.lacks_documents:
            raise ConfigError(
                f"shard {index} was built with --on-error skip and lacks documents "
                f"({'; '.join(Totals.of_records([record]).fault_lines())}); say --on-error skip "
                "again, or start over with --overwrite"
            )
        return record

    def _built(self, index: int, prefix: str, datasets: list[str], report: Report) -> ShardRecord:
        plan = self._plan
        # One for each thread.
        read_faults, code_faults = Faults(plan.on_error), Faults(plan.on_error)
        total = Counted(0, 0, 0)
        with contextlib.ExitStack() as stack:
            builders = {d: stack.enter_context(_builder(plan, d)) for d in datasets}
            read = read_blocks(plan.shards[index].pieces, plan.read, read_faults)
            blocks = ahead(_kept(read, plan, read_faults))
            parts = ahead(_coded(blocks, plan, self.coder, code_faults))
            for part in stack.enter_context(contextlib.closing(parts)):
                tokens, offsets, labels = part.coded
                builders[prefix + part.stream].add_documents(tokens, offsets)
                if labels is not None:
                    builders[prefix + part.stream + LABELS].add_documents(labels, offsets)
                counted = Counted(len(offsets) - 1, part.num_text_bytes, len(tokens))
                total = Counted(*(a + b for a, b in zip(total, counted, strict=True)))
                report(counted)
        read_faults.add(code_faults.counts, code_faults.places)
        return ShardRecord(
            plan=plan.digest,
            index=index,
            num_documents=total.documents,
            num_tokens=total.tokens,
            num_text_bytes=total.text_bytes,
            fault_counts=read_faults.counts,
            fault_places=read_faults.places,
        )


def _builder(plan: Plan, dataset: str) -> IndexedDatasetBuilder:
    # Nothing waits for the disk: a shard's checksums are compared before it is used.
    if dataset.endswith(LABELS):
        return IndexedDatasetBuilder(
            dataset,
            np.int32,
            allow_negative=True,
            metadata=plan.label_metadata,
            durable=False,
            overwrite=True,
        )
    return IndexedDatasetBuilder(
        dataset,
        plan.dtype,
        vocab_size=plan.tokenizer.vocab_size,
        metadata=plan.metadata,
        durable=False,
        overwrite=True,
    )


def _kept(
    blocks: Iterator[TextBlock], plan: Plan, faults: Faults
) -> Generator[TextBlock, None, None]:
    """Without the documents that the word limits leave out."""
    few = 0 if plan.min_words is None else plan.min_words
    many = np.iinfo(np.int64).max if plan.max_words is None else plan.max_words
    for block in blocks:
        kept = block
        if plan.min_words is not None or plan.max_words is not None:
            words = _core.count_words(block.text, block.offsets)
            kept = kept.drop(words < few, "too few words", faults)
            kept = kept.drop(words[words >= few] > many, "too many words", faults)
        if len(kept):
            yield kept


def _coded(
    blocks: Iterator[TextBlock], plan: Plan, coder: Coder, faults: Faults
) -> Generator[_Part, None, None]:
    for block in blocks:
        if plan.split is None or plan.split_by != "hash":
            yield _Part("", coder.code(block, faults), len(block.text))
            continue
        hashes = block.text_hashes() if block.hashes is None else block.hashes
        split = hashed_split(plan.split, hashes)
        for i, stream in enumerate(plan.streams):
            part = block.select(split == i)
            if len(part):
                yield _Part(stream, coder.code(part, faults), len(part.text))
