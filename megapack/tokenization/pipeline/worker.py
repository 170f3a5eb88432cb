"""One shard: text in, a dataset of its own (one per split) and a record of it out.

- ShardWorker: builds shards of a plan; three threads read, encode and write at once
- open_coder: what turns a plan's documents into tokens
- ahead: a generator, run ahead of its consumer in a thread of its own
"""

from __future__ import annotations

import collections
import contextlib
import functools
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np

from megapack import _core
from megapack.errors import ConfigError, MegapackError
from megapack.executors import Counted, Report
from megapack.storage import IndexedDatasetBuilder
from megapack.storage.index_file import GROUPS, LABELS, WEIGHTS
from megapack.tokenization.corpus.documents import Faults, TextBlock, hashed_split, lacks_documents
from megapack.tokenization.corpus.readers import read_blocks
from megapack.tokenization.pipeline.plan import Plan, chat_templates, ending_of
from megapack.tokenization.pipeline.workspace import (
    ShardRecord,
    Totals,
    read_record,
    shard_prefix,
    write_record,
)
from megapack.tokenization.tokenizers.coding import (
    ChatCoder,
    Coded,
    Coder,
    HeaderChats,
    TextCoder,
)
from megapack.tokenization.tokenizers.encoders import Limits, open_encoder, open_reference

T = TypeVar("T")


def ahead(items: Generator[T, None, None], *, depth: int = 2) -> Generator[T, None, None]:
    """The same items in the same order, made while the consumer works on earlier ones.

    Reading, encoding and writing spend their time outside of the interpreter's lock, so that three
    of these in a row keep a core busy while another waits for the disk.

    Closing it, as an error in the consumer does, closes ``items`` as well.

    Args:
        depth: items that are made ahead; memory follows it.
    """
    end = object()
    with ThreadPoolExecutor(1, thread_name_prefix="megapack-ahead") as thread:
        made = collections.deque(thread.submit(next, items, end) for _ in range(depth))
        try:
            while (item := made.popleft().result()) is not end:
                made.append(thread.submit(next, items, end))
                yield item  # type: ignore[misc]
        finally:
            thread.shutdown(cancel_futures=True)
            items.close()


def open_coder(plan: Plan, limits: Limits = Limits()) -> Coder:  # noqa: B008
    """Load what turns documents into tokens.

    Raises:
        ConfigError: the backend or the chat format does not fit the tokenizer.
        MegapackError: a package is missing.
    """
    config, files = plan.config, plan.tokenizer
    if plan.chat_format == "template":
        template_chats = chat_templates().TemplateChats
        chats = template_chats(files, plan.chat_loss, config.template_variables)
        return ChatCoder(chats.render_all, chats.code, plan.frame).code
    encoder = open_encoder(files, plan.backend, limits)
    if plan.chat_loss is not None:
        headers = HeaderChats(encoder, plan.chat_loss, files.name)
        return ChatCoder(iter, headers.code, plan.frame).code
    fraction = config.verify_fraction
    reference = open_reference(files) if fraction > 0 else None
    return TextCoder(
        encoder,
        plan.frame,
        controls=files.controls.values(),
        reference=reference,
        verify_fraction=fraction,
    ).code


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
        datasets = [f"{prefix}{stream}{end}" for stream in plan.streams for end in plan.ends]
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
        if plan.config.on_error == "fail" and lacks_documents(record.faults.counts):
            raise ConfigError(
                f"shard {index} was built with --on-error skip and lacks documents "
                f"({'; '.join(Totals.of_records([record]).fault_lines())}); say --on-error skip "
                "again, or start over with --overwrite"
            )
        return record

    def _built(self, index: int, prefix: str, datasets: list[str], report: Report) -> ShardRecord:
        plan = self.plan
        # One for each thread.
        read_faults, code_faults = Faults(plan.config.on_error), Faults(plan.config.on_error)
        total = Counted()
        controls: collections.Counter[int] = collections.Counter()
        with contextlib.ExitStack() as stack:
            builders = {}
            for dataset in datasets:
                stored = plan.stored(ending_of(dataset))
                # Nothing waits for the disk: a shard's checksums are compared before it is used.
                builder = IndexedDatasetBuilder(dataset, **stored, durable=False, overwrite=True)
                builders[dataset] = stack.enter_context(builder)
            read = read_blocks(plan.shards[index].pieces, plan.read, read_faults)
            blocks = ahead(_kept(read, plan, read_faults))
            all_coded = ahead(_coded(blocks, plan, self.coder, code_faults))
            for stream, block, coded in stack.enter_context(contextlib.closing(all_coded)):
                tokens, offsets = coded.tokens, coded.offsets
                builders[prefix + stream].add_documents(tokens, offsets)
                if coded.labels is not None:
                    builders[prefix + stream + LABELS].add_documents(coded.labels, offsets)
                if plan.read.weights_key is not None:
                    weights = np.ones(len(tokens)) if coded.weights is None else coded.weights
                    builders[prefix + stream + WEIGHTS].add_documents(weights, offsets)
                if block.groups is not None:
                    ids = block.groups[coded.kept]
                    builders[prefix + stream + GROUPS].add_documents(ids, np.arange(len(ids) + 1))
                counted = Counted(len(offsets) - 1, len(block.text), len(tokens))
                total = total.plus(counted)
                controls.update(coded.controls)
                report(counted)
        read_faults.add(code_faults)
        names = {token: text for text, token in plan.tokenizer.controls.items()}
        special = {names[token]: number for token, number in sorted(controls.items())}
        return ShardRecord(total, read_faults, special)


def _kept(
    blocks: Iterator[TextBlock], plan: Plan, faults: Faults
) -> Generator[TextBlock, None, None]:
    """Without the documents that the word limits leave out."""
    few, many = plan.config.min_words or 0, plan.config.max_words
    for block in blocks:
        kept = block
        if few or many is not None:
            words = _core.count_words(block.text, block.offsets)
            kept = kept.drop(words < few, "too few words", faults)
            if many is not None:
                kept = kept.drop(words[words >= few] > many, "too many words", faults)
        if len(kept):
            yield kept


def _coded(
    blocks: Iterator[TextBlock], plan: Plan, coder: Coder, faults: Faults
) -> Generator[tuple[str, TextBlock, Coded], None, None]:
    """Stream, text and tokens of the documents of every block that go to that stream."""
    for block in blocks:
        split = np.zeros(len(block), np.int64)
        if plan.split is not None and plan.split_while_writing:
            hashes = block.text_hashes() if block.hashes is None else block.hashes
            split = hashed_split(plan.split, hashes)
        for i, stream in enumerate(plan.streams):
            chosen = block.select(split == i)
            if len(chosen):
                yield stream, chosen, coder(chosen, faults)
