"""One shard: text in, a dataset of its own (one per split) and a record of it out."""

from __future__ import annotations

import contextlib
import functools
import queue
import threading
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from megapack import _core
from megapack.errors import ConfigError, MegapackError
from megapack.executors import Counted, Report
from megapack.storage import IndexedDatasetBuilder
from megapack.tokenization.corpus.documents import Faults, TextBlock, hashed_split, lacks_documents
from megapack.tokenization.corpus.readers import read_blocks
from megapack.tokenization.pipeline.config import LABELS
from megapack.tokenization.pipeline.plan import Plan
from megapack.tokenization.pipeline.workspace import (
    ShardRecord,
    Totals,
    read_record,
    shard_prefix,
    write_record,
)
from megapack.tokenization.tokenizers.chat import ChatCoder, HeaderChats
from megapack.tokenization.tokenizers.chat_template import TemplateChats
from megapack.tokenization.tokenizers.coding import Coded, Coder, TextCoder
from megapack.tokenization.tokenizers.encoders import Limits, open_reference
from megapack.tokenization.tokenizers.probe import open_any

# ---- A generator run ahead of its consumer in a thread of its own -------------------------------

T = TypeVar("T")


def ahead(items: Generator[T, None, None], *, depth: int = 2) -> Generator[T, None, None]:
    """The same items in the same order, made while the consumer works on earlier ones.

    Reading, encoding and writing spend their time outside of the interpreter's lock, so that three
    of these in a row keep a core busy while another waits for the disk.

    Closing it, as an error in the consumer does, closes ``items`` as well.

    Args:
        depth: finished items that may wait; memory follows it.
    """
    waiting: queue.Queue[tuple[bool, T | BaseException | None]] = queue.Queue(depth)
    stopped = threading.Event()

    def produce() -> None:
        try:
            for item in items:
                if not _put(waiting, (True, item), stopped):
                    return
            _put(waiting, (False, None), stopped)
        except BaseException as error:  # raised again in the consumer, where it can be handled
            _put(waiting, (False, error), stopped)
        finally:
            items.close()  # here, in the thread that runs it

    thread = threading.Thread(target=produce, name="megapack-ahead", daemon=True)
    thread.start()
    try:
        while True:
            more, item = waiting.get()
            if not more:
                if isinstance(item, BaseException):
                    raise item
                return
            yield item  # type: ignore[misc]
    finally:
        stopped.set()
        thread.join()


def _put(waiting: queue.Queue[T], item: T, stopped: threading.Event) -> bool:
    """Whether the item was taken before the consumer went away."""
    while not stopped.is_set():
        try:
            waiting.put(item, timeout=0.1)
        except queue.Full:
            continue
        return True
    return False


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
