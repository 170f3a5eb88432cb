"""One shard: text in, one finished dataset and a record of it out. What a worker runs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from megapack import _core
from megapack.errors import MegapackError
from megapack.storage import IndexedDatasetBuilder
from megapack.storage.atomic import atomic_write
from megapack.storage.meta import read_meta
from megapack.storage.mmididx import path_of
from megapack.tokenization.background import ahead
from megapack.tokenization.blocks import TextBlock
from megapack.tokenization.encoders import Encoder
from megapack.tokenization.faults import Faults, OnError, Place
from megapack.tokenization.plan import Shard
from megapack.tokenization.readers import ReadOptions, read_blocks
from megapack.tokenization.tokenizer import TokenizerFiles

__all__ = ["Counted", "Job", "ShardRecord", "build_shard", "finished_shard", "shard_prefix"]


@dataclass(frozen=True, kw_only=True)
class Job:
    """What every worker needs to know; small, and the same for all shards."""

    work_dir: str
    tokenizer: TokenizerFiles
    backend: str
    threads: int  # the backend may use
    prefix: tuple[int, ...]  # token ids before every document
    suffix: tuple[int, ...]  # and behind it
    dtype: str  # "uint16" or "int32"
    read: ReadOptions
    on_error: OnError
    min_words: int | None
    max_words: int | None
    finish_only: bool  # build nothing, find everything finished
    metadata: Mapping[str, Any]  # of the meta files: tokenizer, boundaries


@dataclass(kw_only=True)
class ShardRecord:
    """What a finished shard holds; written last, so that where it stands the shard is complete."""

    index: int
    num_documents: int = 0
    num_tokens: int = 0
    num_text_bytes: int = 0
    fault_counts: dict[str, int] = field(default_factory=dict)
    fault_places: dict[str, list[Place]] = field(default_factory=dict)
    kept: bool = False  # found finished, by whoever asks; not on disk


class Counted(NamedTuple):
    """Progress since the last report."""

    documents: int
    text_bytes: int
    tokens: int


class _Framed(NamedTuple):
    tokens: NDArray[Any]
    offsets: NDArray[np.int64]
    num_text_bytes: int


def shard_prefix(work_dir: str, index: int) -> str:
    return str(Path(work_dir) / f"shard-{index:06d}")


def build_shard(
    job: Job, shard: Shard, encoder: Encoder, report: Callable[[Counted], None]
) -> ShardRecord:
    """Build a shard, or find it finished. Reading, encoding and writing overlap.

    Args:
        report: called after every block.

    Raises:
        DataError: a document that may not pass; a token id outside of the vocabulary.
        OSError: a file cannot be read or written; the shard then leaves nothing behind.
    """
    finished = finished_shard(job, shard)
    if finished is not None:
        report(Counted(finished.num_documents, finished.num_text_bytes, finished.num_tokens))
        return finished
    if job.finish_only:
        raise MegapackError(
            f"shard {shard.index} is not finished; --finish joins shards that all are: run the "
            "missing parts again, or leave out --finish to build them here"
        )
    prefix = shard_prefix(job.work_dir, shard.index)
    record = ShardRecord(index=shard.index)
    faults = Faults(job.on_error)
    with IndexedDatasetBuilder(
        prefix, job.dtype, vocab_size=job.tokenizer.vocab_size, metadata=job.metadata
    ) as builder:
        texts = ahead(_filtered(read_blocks(shard.pieces, job.read, faults), job, faults))
        for framed in ahead(_encoded(texts, job, encoder, faults)):
            builder.add_documents(framed.tokens, framed.offsets)
            counted = Counted(len(framed.offsets) - 1, framed.num_text_bytes, len(framed.tokens))
            record.num_documents += counted.documents
            record.num_text_bytes += counted.text_bytes
            record.num_tokens += counted.tokens
            report(counted)
    record.fault_counts, record.fault_places = faults.counts, faults.places
    _write_record(prefix, record)
    return record


def _filtered(blocks: Iterator[TextBlock], job: Job, faults: Faults) -> Iterator[TextBlock]:
    for block in blocks:
        if job.min_words is not None or job.max_words is not None:
            words = _core.count_words(block.text, block.offsets)
            few = words < (job.min_words or 0)
            many = words > (np.iinfo(np.int64).max if job.max_words is None else job.max_words)
            for bad, kind in ((few, "too few words"), (many, "too many words")):
                for i in np.flatnonzero(bad):
                    faults.record(kind, block.place(int(i)))
            block = block.select(~(few | many))  # noqa: PLW2901
        if len(block):
            yield block


def _encoded(
    blocks: Iterator[TextBlock], job: Job, encoder: Encoder, faults: Faults
) -> Iterator[_Framed]:
    frame = _core.frame_documents_uint16 if job.dtype == "uint16" else _core.frame_documents_int32
    before, behind = list(job.prefix), list(job.suffix)
    for block in blocks:
        ids, offsets = encoder.encode(block)
        empty = offsets[:-1] == offsets[1:]
        if empty.any():  # text that a tokenizer's normalization leaves nothing of
            for i in np.flatnonzero(empty):
                faults.record("empty document", block.place(int(i)))
            offsets = offsets[np.concatenate([~empty, [True]])]
        tokens, framed_offsets, _ = frame(ids, offsets, before, behind, job.tokenizer.vocab_size)
        yield _Framed(tokens, framed_offsets, len(block.text))


def finished_shard(job: Job, shard: Shard) -> ShardRecord | None:
    """The record of a shard whose files are there with the size and checksum they had."""
    prefix = shard_prefix(job.work_dir, shard.index)
    try:
        tree = json.loads(_record_path(prefix).read_bytes())
        whole = _is_whole(prefix)
    except (OSError, ValueError):  # ValueError: a file cut short by a crash of the machine
        return None
    if not whole:
        return None
    places = {
        kind: [Place(*place) for place in found] for kind, found in tree.pop("fault_places").items()
    }
    return ShardRecord(**tree, fault_places=places, kept=True)


def _is_whole(prefix: str) -> bool:
    meta = read_meta(prefix)
    if meta is None:
        return False
    index = path_of(prefix, ".idx").read_bytes()
    if xxhash.xxh3_128_hexdigest(index) != meta["idx"]["xxh3_128"]:
        return False
    path = path_of(prefix, ".bin")
    if path.stat().st_size != meta["bin"]["bytes"]:
        return False
    with path.open("rb") as file:
        return all(_hash_of(file, size) == checksum for size, checksum in meta["bin"]["xxh3_128"])


def _hash_of(file: BinaryIO, size: int) -> str:
    hasher = xxhash.xxh3_128()
    while size > 0:
        block = file.read(min(size, 1 << 24))
        if not block:
            break
        hasher.update(block)
        size -= len(block)
    return hasher.hexdigest()


def _record_path(prefix: str) -> Path:
    return path_of(prefix, ".json")


def _write_record(prefix: str, record: ShardRecord) -> None:
    tree = asdict(record)
    del tree["kept"]
    tree["fault_places"] = {
        kind: [[place.path, place.unit, place.position] for place in places]
        for kind, places in record.fault_places.items()
    }
    with atomic_write(_record_path(prefix), "w") as file:
        json.dump(tree, file)
