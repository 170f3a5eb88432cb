"""One shard: text in, a dataset of its own (one per split) and a record of it out."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megapack import _core
from megapack.errors import ConfigError, MegapackError
from megapack.execution.work import Counted, Report
from megapack.storage import IndexedDatasetBuilder
from megapack.tokenization.build.background import ahead
from megapack.tokenization.build.config import LABELS
from megapack.tokenization.build.plan import Plan
from megapack.tokenization.build.record import (
    ShardRecord,
    Totals,
    read_record,
    shard_prefix,
    write_record,
)
from megapack.tokenization.corpus.blocks import TextBlock
from megapack.tokenization.corpus.faults import Faults, lacks_documents
from megapack.tokenization.corpus.readers import read_blocks
from megapack.tokenization.corpus.split import hashed_split
from megapack.tokenization.tokenizers.chat import ChatCoder, HeaderChats
from megapack.tokenization.tokenizers.chat_template import TemplateChats
from megapack.tokenization.tokenizers.coding import Coded, Coder, TextCoder
from megapack.tokenization.tokenizers.encoders import Limits, open_reference
from megapack.tokenization.tokenizers.guard import open_any

__all__ = ["ShardWorker", "open_coder"]


def open_coder(plan: Plan, limits: Limits = Limits()) -> Coder:  # noqa: B008
    """Load what turns documents into tokens.

    Raises:
        ConfigError: the backend or the chat format does not fit the tokenizer.
        MegapackError: a package is missing.
    """
    if plan.chat_loss is not None:
        if plan.chat_format == "template":
            chats = TemplateChats(plan.tokenizer, plan.chat_loss, plan.template_variables)
            return ChatCoder(chats, plan.frame)
        encoder = open_any(plan.tokenizer, plan.backend, limits)
        return ChatCoder(HeaderChats(encoder, plan.chat_loss, plan.tokenizer.name), plan.frame)
    return TextCoder(
        open_any(plan.tokenizer, plan.backend, limits),
        plan.frame,
        reference=open_reference(plan.tokenizer) if plan.verify_fraction > 0 else None,
        verify_fraction=plan.verify_fraction,
    )


@dataclass(frozen=True, kw_only=True)
class ShardWorker:
    """Builds shards of a plan, with a tokenizer that is loaded once, by the first that needs it."""

    plan: Plan
    directory: Path  # of the shards
    limits: Limits  # of the tokenizer
    finish_only: bool  # build nothing, find everything finished

    @property
    def threads(self) -> int:
        return self.limits.threads

    @functools.cached_property
    def coder(self) -> Coder:
        """Loaded after a look at this machine. Raises ConfigError where it is not the plan's."""
        self.plan.check_machine()
        return open_coder(self.plan, self.limits)

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
        plan = self.plan
        prefix = shard_prefix(self.directory, index)
        ends = ("", LABELS) if plan.has_labels else ("",)
        datasets = [f"{prefix}{stream}{end}" for stream in plan.streams for end in ends]
        record = read_record(prefix, plan.digest, datasets)
        if record is None and self.finish_only:
            raise MegapackError(
                f"shard {index} is not finished; --finish joins shards that all are: run the "
                "missing parts again, or leave out --finish to build them here"
            )
        if record is None:
            record = self._built(index, prefix, datasets, report)
            write_record(prefix, plan.digest, record)
        else:
            report(record.counted)
        if plan.on_error == "fail" and lacks_documents(record.faults.counts):
            raise ConfigError(
                f"shard {index} was built with --on-error skip and lacks documents "
                f"({'; '.join(Totals.of_records([record]).fault_lines())}); say --on-error skip "
                "again, or start over with --overwrite"
            )
        return record

    def _built(self, index: int, prefix: str, datasets: list[str], report: Report) -> ShardRecord:
        plan = self.plan
        # One for each thread.
        read_faults, code_faults = Faults(plan.on_error), Faults(plan.on_error)
        total = Counted()
        with contextlib.ExitStack() as stack:
            builders = {d: stack.enter_context(_builder(plan, d)) for d in datasets}
            read = read_blocks(plan.shards[index].pieces, plan.read, read_faults)
            blocks = ahead(_kept(read, plan, read_faults))
            all_coded = ahead(_coded(blocks, plan, self.coder, code_faults))
            for stream, num_text_bytes, coded in stack.enter_context(contextlib.closing(all_coded)):
                tokens, offsets, labels = coded
                builders[prefix + stream].add_documents(tokens, offsets)
                if labels is not None:
                    builders[prefix + stream + LABELS].add_documents(labels, offsets)
                counted = Counted(len(offsets) - 1, num_text_bytes, len(tokens))
                total = total.plus(counted)
                report(counted)
        read_faults.add(code_faults)
        return ShardRecord(total, read_faults)


def _builder(plan: Plan, dataset: str) -> IndexedDatasetBuilder:
    # Nothing waits for the disk: a shard's checksums are compared before it is used.
    stored = plan.stored(labels=dataset.endswith(LABELS))
    return IndexedDatasetBuilder(dataset, **stored, durable=False, overwrite=True)


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
) -> Generator[tuple[str, int, Coded], None, None]:
    """Stream, bytes of text and tokens of the documents of every block that go to that stream."""
    for block in blocks:
        split = _split(block, plan)
        for i, stream in enumerate(plan.streams):
            chosen = block.select(split == i)
            if len(chosen):
                yield stream, len(chosen.text), coder.code(chosen, faults)


def _split(block: TextBlock, plan: Plan) -> NDArray[np.int64]:
    """Of every document the number of its stream."""
    if plan.split is None or not plan.split_while_writing:
        return np.zeros(len(block), np.int64)
    return hashed_split(plan.split, block.text_hashes() if block.hashes is None else block.hashes)
