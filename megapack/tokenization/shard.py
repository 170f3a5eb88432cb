"""One shard: text in, finished datasets and a record of them out. What a worker runs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from megapack import _core
from megapack.errors import MegapackError
from megapack.storage import IndexedDatasetBuilder
from megapack.tokenization.background import ahead
from megapack.tokenization.blocks import TextBlock
from megapack.tokenization.coding import Coded, Coder
from megapack.tokenization.faults import Faults
from megapack.tokenization.job import Job
from megapack.tokenization.plan import Shard
from megapack.tokenization.readers import read_blocks
from megapack.tokenization.record import ShardRecord, read_record, write_record
from megapack.tokenization.split import hashed_split

__all__ = ["LABELS", "Counted", "build_shard", "shard_prefix"]

LABELS = ".labels"  # ends the prefix of a dataset of labels


class Counted(NamedTuple):
    """What was done since the last report."""

    documents: int
    text_bytes: int
    tokens: int


class _Part(NamedTuple):
    """A coded block, or the part of it that goes to one stream."""

    stream: str
    coded: Coded
    num_text_bytes: int


def shard_prefix(work_dir: str, index: int) -> str:
    """Where a shard's datasets lie; their names go on with the stream and ``LABELS``."""
    return str(Path(work_dir) / f"shard-{index:06d}")


def build_shard(
    job: Job, shard: Shard, coder: Coder, report: Callable[[Counted], None]
) -> ShardRecord:
    """Build a shard, or find it finished. Reading, encoding and writing overlap.

    Args:
        report: called after every block.

    Raises:
        DataError: a document that may not pass; a token id outside of the vocabulary.
        MegapackError: the shard is not finished and may not be built.
        OSError: a file cannot be read or written; the shard then leaves nothing behind.
    """
    prefix = shard_prefix(job.work_dir, shard.index)
    datasets = [
        f"{prefix}{stream}{end}"
        for stream in job.streams
        for end in (("", LABELS) if job.has_labels else ("",))
    ]
    finished = read_record(prefix, datasets)
    if finished is not None:
        report(Counted(finished.num_documents, finished.num_text_bytes, finished.num_tokens))
        return finished
    if job.finish_only:
        raise MegapackError(
            f"shard {shard.index} is not finished; --finish joins shards that all are: run the "
            "missing parts again, or leave out --finish to build them here"
        )
    record = ShardRecord(index=shard.index)
    # One for each thread.
    read_faults, code_faults = Faults(job.on_error), Faults(job.on_error)
    with contextlib.ExitStack() as stack:
        builders = {dataset: stack.enter_context(_builder(job, dataset)) for dataset in datasets}
        blocks = ahead(_kept(read_blocks(shard.pieces, job.read, read_faults), job, read_faults))
        parts = ahead(_coded(blocks, job, coder, code_faults))
        for part in stack.enter_context(contextlib.closing(parts)):
            tokens, offsets, labels = part.coded
            builders[prefix + part.stream].add_documents(tokens, offsets)
            if labels is not None:
                builders[prefix + part.stream + LABELS].add_documents(labels, offsets)
            counted = Counted(len(offsets) - 1, part.num_text_bytes, len(tokens))
            record.num_documents += counted.documents
            record.num_text_bytes += counted.text_bytes
            record.num_tokens += counted.tokens
            report(counted)
    read_faults.add(code_faults.counts, code_faults.places)
    record.fault_counts, record.fault_places = read_faults.counts, read_faults.places
    write_record(prefix, record)
    return record


def _builder(job: Job, dataset: str) -> IndexedDatasetBuilder:
    # Nothing waits for the disk: a shard's checksums are compared before it is used.
    if dataset.endswith(LABELS):
        return IndexedDatasetBuilder(
            dataset,
            np.int32,
            allow_negative=True,
            metadata=job.label_metadata,
            durable=False,
            overwrite=True,
        )
    return IndexedDatasetBuilder(
        dataset,
        job.storage.dtype,
        vocab_size=job.storage.vocab_size,
        metadata=job.metadata,
        durable=False,
        overwrite=True,
    )


def _kept(
    blocks: Iterator[TextBlock], job: Job, faults: Faults
) -> Generator[TextBlock, None, None]:
    """Without the documents that the word limits leave out."""
    few = 0 if job.min_words is None else job.min_words
    many = np.iinfo(np.int64).max if job.max_words is None else job.max_words
    for block in blocks:
        kept = block
        if job.min_words is not None or job.max_words is not None:
            words = _core.count_words(block.text, block.offsets)
            kept = kept.drop(words < few, "too few words", faults)
            kept = kept.drop(words[words >= few] > many, "too many words", faults)
        if len(kept):
            yield kept


def _coded(
    blocks: Iterator[TextBlock], job: Job, coder: Coder, faults: Faults
) -> Generator[_Part, None, None]:
    for block in blocks:
        if job.hash_weights is None:
            yield _Part("", coder.code(block, faults), len(block.text))
            continue
        hashes = block.text_hashes() if block.hashes is None else block.hashes
        split = hashed_split(job.hash_weights, hashes)
        for i, stream in enumerate(job.streams):
            part = block.select(split == i)
            if len(part):
                yield _Part(stream, coder.code(part, faults), len(part.text))
