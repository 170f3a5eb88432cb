"""Build one shard: read text, encode it, write a dataset (one per split) and its record.

- ShardWorker: builds shards of a plan; reading, encoding and writing overlap in three threads
- open_coder: return the function that turns a plan's documents into tokens
- prefetch: run a generator in a thread, ahead of its consumer
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
from megapack.storage.index_file import GROUPS
from megapack.tokenization.corpus.documents import Faults, TextBlock, hashed_split, lacks_documents
from megapack.tokenization.corpus.readers import read_blocks
from megapack.tokenization.pipeline.plan import Plan, chat_templates
from megapack.tokenization.pipeline.workspace import (
    ShardRecord,
    Totals,
    read_record,
    shard_prefix,
    write_record,
)
from megapack.tokenization.tokenizers.coding import ChatCoder, Coded, Coder, HeaderChats, TextCoder
from megapack.tokenization.tokenizers.encoders import Encoder, Limits, open_encoder, open_reference

T = TypeVar("T")


def prefetch(items: Generator[T, None, None], *, depth: int = 2) -> Generator[T, None, None]:
    """Yield the same items in the same order, computed while the consumer uses earlier ones.

    Reading, encoding and writing mostly run without the interpreter's lock, so in separate threads

    they overlap with each other and with waits for the disk. ``depth`` items are computed in
    advance. Closing this generator (also after an error in the consumer) closes ``items``.
    """
    end = object()
    with ThreadPoolExecutor(1, thread_name_prefix="megapack-prefetch") as thread:
        futures = collections.deque(thread.submit(next, items, end) for _ in range(depth))
        try:
            while (item := futures.popleft().result()) is not end:
                futures.append(thread.submit(next, items, end))
                yield item  # type: ignore[misc]
        finally:
            thread.shutdown(cancel_futures=True)
            items.close()


def open_coder(
    plan: Plan,
    limits: Limits = Limits(),  # noqa: B008
    encoder: Encoder | None = None,
) -> Coder:
    """Load the tokenizer of a plan, unless ``encoder`` is given; return a function that turns
    documents into tokens. Raises ConfigError if backend or chat format do not fit, and
    MegapackError if a package is missing."""
    config, files = plan.config, plan.tokenizer
    if plan.chat_format == "template":
        template_chats = chat_templates().TemplateChats
        chats = template_chats(files, plan.chat_loss, config.template_variables)
        return ChatCoder(chats.render_all, chats.code, plan.frame).code
    if encoder is None:
        encoder = open_encoder(files, plan.backend, limits)
    if plan.chat_loss is not None:
        headers = HeaderChats(encoder, plan.chat_loss, files)
        return ChatCoder(iter, headers.code, plan.frame).code
    fraction = config.verify_fraction
    reference = open_reference(files) if fraction > 0 else None
    return TextCoder(
        encoder,
        plan.frame,
        controls=files.controls.values(),
        values=plan.token_values,
        reference=reference,
        verify_fraction=fraction,
    ).code


@dataclass(frozen=True, kw_only=True)
class ShardWorker:
    """Builds shards of a plan. Loads the tokenizer once, for the first shard that needs it."""

    plan: Plan
    directory: Path  # of the shards
    limits: Limits  # of the tokenizer
    finish_only: bool  # raise for a shard that is not finished
    # As returned by ``make_plan``, in the same process; None: load the plan's tokenizer.
    encoder: Encoder | None = None

    @property
    def threads(self) -> int:
        return self.limits.threads

    @functools.cached_property
    def coder(self) -> Coder:
        """Tokenizer, loaded after ``Plan.check_machine``, which may raise ConfigError."""
        if self.encoder is None:
            self.plan.check_machine()
        return open_coder(self.plan, self.limits, self.encoder)

    def build(self, index: int, report: Report) -> ShardRecord:
        """Build a shard of the plan, unless it is finished already; return its record. ``report``
        is called after every block.

        Raises ConfigError if tokenizer files or libraries of this machine differ from the plan, or
        the finished shard lacks documents and ``on_error`` is "fail"; DataError for a faulty
        document or a token id outside the vocabulary; MegapackError if the shard is not finished
        and ``finish_only`` is True; and OSError if a file cannot be read or written; the shard then
        leaves no files.
        """
        plan = self.plan
        prefix = shard_prefix(self.directory, index)
        datasets = [f"{prefix}{stream}{end}" for stream in plan.streams for end in plan.ends]
        record = read_record(prefix, plan.digest, datasets)
        if record is None and self.finish_only:
            raise MegapackError(
                f"shard {index} is not finished, and --finish only joins finished shards: run the "
                "missing parts again, or leave out --finish to build them here"
            )
        if record is None:
            record = self._build(index, prefix, datasets, report)
            write_record(prefix, plan.digest, record)
        else:
            report(record.counted)
        if plan.config.on_error == "fail" and lacks_documents(record.faults.counts):
            raise ConfigError(
                f"shard {index} was built with --on-error skip and lacks documents "
                f"({'; '.join(Totals.of_records([record]).fault_lines())}): give --on-error skip "
                "again, or start over with --overwrite"
            )
        return record

    def _build(self, index: int, prefix: str, datasets: list[str], report: Report) -> ShardRecord:
        plan = self.plan
        # One Faults object per thread, because reading and encoding run at the same time.
        read_faults, code_faults = Faults(plan.config.on_error), Faults(plan.config.on_error)
        total = Counted()
        controls: collections.Counter[int] = collections.Counter()
        with contextlib.ExitStack() as stack:
            builders = {}
            for dataset in datasets:
                stored = plan.stored(dataset)
                # No fsync: a shard is used only if its checksums match.
                builder = IndexedDatasetBuilder(dataset, **stored, durable=False, overwrite=True)
                builders[dataset] = stack.enter_context(builder)
            read = read_blocks(plan.shards[index].pieces, plan.read, read_faults)
            blocks = prefetch(_filter_words(read, plan, read_faults))
            all_coded = prefetch(_encode(blocks, plan, self.coder, code_faults))
            for stream, block, coded in stack.enter_context(contextlib.closing(all_coded)):
                tokens, offsets = coded.tokens, coded.offsets
                builders[prefix + stream].add_documents(tokens, offsets, columns=coded.columns)
                if block.groups is not None:
                    ids = block.groups[coded.kept]
                    builders[prefix + stream + GROUPS].add_documents(ids, np.arange(len(ids) + 1))
                counted = Counted(len(offsets) - 1, len(block.text), len(tokens))
                total = total.plus(counted)
                controls.update(coded.controls)
                report(counted)
        read_faults.add(code_faults)
        text_of_id = {token: text for text, token in plan.tokenizer.controls.items()}
        special = {text_of_id[token]: number for token, number in sorted(controls.items())}
        return ShardRecord(total, read_faults, special)


def _filter_words(
    blocks: Iterator[TextBlock], plan: Plan, faults: Faults
) -> Generator[TextBlock, None, None]:
    """Yield blocks without the documents that the word limits drop."""
    fewest, most = plan.config.min_words or 0, plan.config.max_words
    for block in blocks:
        kept = block
        if fewest or most is not None:
            words = _core.count_words(block.text, block.offsets)
            kept = kept.drop(words < fewest, "too few words", faults)
            if most is not None:
                kept = kept.drop(words[words >= fewest] > most, "too many words", faults)
        if len(kept):
            yield kept


def _encode(
    blocks: Iterator[TextBlock], plan: Plan, coder: Coder, faults: Faults
) -> Generator[tuple[str, TextBlock, Coded], None, None]:
    """Yield stream, text and tokens of each block's documents that belong to the stream."""
    for block in blocks:
        split = np.zeros(len(block), np.int64)
        if plan.split is not None and plan.split_while_writing:
            hashes = block.text_hashes() if block.hashes is None else block.hashes
            split = hashed_split(plan.split, hashes)
        for i, stream in enumerate(plan.streams):
            chosen = block.select(split == i)
            if len(chosen):
                yield stream, chosen, coder(chosen, faults)
