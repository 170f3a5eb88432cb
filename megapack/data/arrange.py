"""A source written anew, so that its tokens lie in the order in which they are drawn.

The samples of every bucket are put in one random order, and shard s of n gets, of every bucket,
those from its s-th n-th of that order. There a segment is a document of its own, one behind the
other, so a run that draws the samples in this order reads every bucket straight through. Where a
segment's document goes on, the token behind it comes along, as it is the label of the segment's
last token: a sample is the same, token by token and label by label, as in the source. What changes
are the numbers of documents and samples, and that a segment knows no more where in its document it
began (positions: document is refused).

Shards are complete or absent, each a function of source, seed and number of shards; so a build goes
on where it was stopped, on any number of processes and machines.

Two buckets of 4 and 2 samples in two shards, the random orders 2 0 3 1 and 1 0:

    shard 0: samples 2, 0 of the first bucket, 1 of the second    # read from front to end
    shard 1: samples 3, 1 of the first bucket, 0 of the second
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megapack import _core
from megapack.data.dataset import PackedDataset
from megapack.data.documents import ShardedDocuments
from megapack.data.sources import segments_of
from megapack.data.steps import fold_key
from megapack.errors import ConfigError
from megapack.executors import Counted, Report, run_shards
from megapack.packing import SampleIndex
from megapack.packing.metrics import DocumentTotals
from megapack.packing.sample_index import describe_source
from megapack.packing.shard_packing import describe_shard
from megapack.packing.sharded import (
    PLAN,
    SUFFIX,
    Arranged,
    PackedShard,
    ShardedIndex,
    load_shards,
    plain,
    save_shards,
)
from megapack.storage import IndexedDataset, IndexedDatasetBuilder
from megapack.storage.files import check_target
from megapack.storage.index_file import LABELS, WEIGHTS
from megapack.storage.locks import is_own_folder, make_own_folder
from megapack.storage.metadata import read_meta

# ---- Samples as documents of their own: a segment each, and the token behind it where it goes on

Ids = NDArray[np.int64]


class Pieces(NamedTuple):
    """The documents that some samples become."""

    offsets: Ids
    """(documents + 1,), tokens."""
    lengths: Ids
    """(documents,) tokens that the sample has of each; one more goes along where it goes on."""
    counts: Ids
    """(samples,) documents of each."""


def cut_pieces(
    data: PackedDataset, chosen: PackedDataset | None, capacity: int, ids: Ids
) -> tuple[Pieces, Ids, Ids | None, NDArray[np.float32] | None]:
    """Samples of one capacity as documents of their own: where they are, their tokens, and their
    labels and loss weights: as those of ``chosen``, not shifted."""
    shards, owners, parts = data.samples.shards, [], []
    for shard, mine, local in shards.by_shard(ids):
        segments, owner = segments_of(shards.index(shard), local)
        owners.append(mine[owner])
        parts.append(np.asarray(shards.index(shard).segment_length[segments], np.int64))
    order = np.argsort(np.concatenate(owners), kind="stable")
    owner, lengths = np.concatenate(owners)[order], np.concatenate(parts)[order]
    counts = np.bincount(owner, minlength=len(ids))
    used = np.bincount(owner, lengths, len(ids)).astype(np.int64)
    before = np.cumsum(lengths) - lengths - (np.cumsum(used) - used)[owner]
    begins = owner * capacity + before
    batch = data.micro_batch(ids, capacity=capacity)
    following = batch["labels"].numpy()[0, begins + lengths - 1]
    goes_on = following >= 0
    offsets = np.concatenate([[0], np.cumsum(lengths + goes_on)])
    at = np.repeat(begins - offsets[:-1], lengths + goes_on) + np.arange(offsets[-1])
    tokens = np.append(batch["tokens"].numpy()[0], 0)[at]
    tokens[offsets[1:][goes_on] - 1] = following[goes_on]
    pieces = Pieces(offsets, lengths, counts)
    if chosen is None:
        return pieces, tokens, None, None
    shifted = chosen.micro_batch(ids, capacity=capacity)
    labels = np.concatenate([[-100], shifted["labels"].numpy()[0]])[at]
    weights = np.concatenate([[0], shifted["loss_mask"].numpy()[0]])[at]
    # The first token of a segment is nobody's label in its sample.
    labels[offsets[:-1]], weights[offsets[:-1]] = -100, 0
    return pieces, tokens, labels, weights


BLOCK_TOKENS = 1 << 20  # of one bucket: 2 to 4 MB
WINDOW_BLOCKS = 16
_CHUNK_TOKENS = 1 << 22
# What meta files say of documents that begin and end otherwise here, and of how files were made.
_NOT_KEPT = {"document_begin_token", "document_end_token", "plan", "command", "imported_from"}
_ORDER = 6  # what the key is for, beside those of megapack.data.steps


@dataclass(frozen=True, kw_only=True)
class Arranger:
    """Writes the shards of an arranged source.

    Attributes:
        source: the source's shard manifest.
        manifest: of the result; its shards lie in the folder named like it.
        arranged: what it says of its order.
        num_shards: of the result.
        overwrite: replace shards that were made otherwise.
    """

    source: ShardedIndex
    manifest: Path
    arranged: Arranged
    num_shards: int
    overwrite: bool = False
    threads: int = 1

    def build(self, index: int, report: Report) -> PackedShard:
        """Write a shard, or find it written.

        Raises:
            ConfigError: another one stands there, and may not be replaced.
            IndexMismatchError, FormatError, OSError: as of ``PackedDataset``.
        """
        prefix = self.folder / f"{index:06d}"
        samples = Path(f"{prefix}.samples")
        made_of = {**vars(self.arranged), "shard": index, "num_shards": self.num_shards}
        if samples.exists() and IndexedDataset.exists(prefix):
            if (read_meta(prefix) or {}).get("arranged") == made_of:
                return self._row(prefix, samples, SampleIndex.load(samples), report)
            if not self.overwrite:
                raise ConfigError(
                    f"{prefix} is there already, made otherwise; replace it with --overwrite, or "
                    "choose another --output"
                )
        if is_own_folder(self.folder):
            samples.unlink(missing_ok=True)  # written last: a shard that has it is complete
        return self._row(prefix, samples, self._written(index, prefix, samples, made_of), report)

    @property
    def folder(self) -> Path:
        """The folder of the shards."""
        return self.manifest.with_name(self.manifest.name.removesuffix(".json"))

    def _row(self, prefix: Path, samples: Path, index: SampleIndex, report: Report) -> PackedShard:
        dataset = IndexedDataset(prefix)
        index.check_source(dataset)
        shard = describe_shard(dataset, samples, index)
        report(Counted(documents=shard.num_documents, tokens=shard.num_tokens))
        ends = {own.document_end_token for own in self.source.shards}
        return replace(shard, document_end_token=ends.pop() if len(ends) == 1 else None)

    def _written(
        self, number: int, prefix: Path, samples: Path, made_of: dict[str, Any]
    ) -> SampleIndex:
        make_own_folder(prefix.parent)
        data, chosen = self._data
        found: list[Pieces] = []
        with ExitStack() as stack:
            documents = data.datasets[0]
            said, *said_beside = self._said
            builder = stack.enter_context(
                IndexedDatasetBuilder(
                    prefix,
                    documents.dtype,
                    vocab_size=documents.vocab_size,
                    metadata={**said, "arranged": made_of},
                    overwrite=True,
                )
            )
            kinds: tuple[tuple[str, str, dict[str, Any]], ...] = (
                (LABELS, "labels", {"allow_negative": True}),
                (WEIGHTS, "weights", {"dtype": np.float16}),
            )
            beside = [
                stack.enter_context(
                    IndexedDatasetBuilder(
                        f"{prefix}{end}",
                        **options,
                        metadata={**told, "arranged": made_of},
                        overwrite=True,
                    )
                )
                if any(getattr(shard, name) for shard in self.source.shards)
                else None
                for (end, name, options), told in zip(kinds, said_beside, strict=True)
            ]
            for capacity, ids in self._chunks(number):
                pieces, tokens, *more = cut_pieces(data, chosen, capacity, ids)
                builder.add_documents(tokens, pieces.offsets)
                for own, values in zip(beside, more, strict=True):
                    if own is not None:
                        own.add_documents(values, pieces.offsets)
                found.append(pieces)
        dataset = IndexedDataset(prefix)
        index = self._index(number, found, dataset)
        # Its name alone: the bytes are the same in every folder, and the two lie side by side.
        made = describe_source(dataset, prefix.name)
        index.save(samples, source=made, overwrite=True)
        return index

    @cached_property
    def _data(self) -> tuple[PackedDataset, PackedDataset | None]:
        """The source without labels and weights beside its shards, and with them if it has some."""
        has_more = any(shard.labels or shard.weights for shard in self.source.shards)
        plain = PackedDataset(None, self.source, label_dataset=None, weight_dataset=None)
        return plain, PackedDataset(None, self.source) if has_more else None

    @cached_property
    def _said(self) -> list[dict[str, Any]]:
        """Metadata of tokens, labels and weights that stays true: above all the tokenizer."""
        said = ShardedDocuments(self.source, with_labels=True).metadata()
        return [{k: value for k, value in of.items() if k not in _NOT_KEPT} for of in said]

    def _chunks(self, number: int) -> Iterator[tuple[int, Ids]]:
        """Capacity and ids of the samples of a shard, in their order, some at a time."""
        offsets = self.source.bucket_sample_offsets.tolist()
        for b, capacity in enumerate(self.source.bucket_capacity.tolist()):
            size, step = offsets[b + 1] - offsets[b], max(1, _CHUNK_TOKENS // capacity)
            key = fold_key(self.arranged.seed, _ORDER, capacity)
            end = self._place(size, number + 1)
            for begin in range(self._place(size, number), end, step):
                places = _core.permute_range(key, size, begin, min(step, end - begin))
                yield capacity, offsets[b] + places

    def _place(self, size: int, number: int) -> int:
        """How many of a bucket's samples lie in the shards before shard ``number``."""
        return size * number // self.num_shards

    def _index(self, number: int, found: list[Pieces], dataset: IndexedDataset) -> SampleIndex:
        sizes = np.diff(self.source.bucket_sample_offsets).tolist()
        held = [self._place(size, number + 1) - self._place(size, number) for size in sizes]
        empty = [np.zeros(0, np.int64)]
        counts = np.concatenate([*empty, *(pieces.counts for pieces in found)])
        lengths = np.concatenate([*empty, *(pieces.lengths for pieces in found)]).astype(np.int32)
        documents = dataset.document_lengths
        checked = _core.DocumentLengths(documents, capacity=int(self.source.bucket_capacity[-1]))
        index = SampleIndex(
            bucket_capacity=self.source.bucket_capacity.copy(),
            bucket_sample_offsets=np.cumsum([0, *held], dtype=np.int64),
            sample_segment_offsets=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
            segment_document=np.arange(len(lengths), dtype=np.int32),
            segment_begin=np.zeros(len(lengths), np.int32),
            segment_length=lengths,
            strategy=self.source.strategy,
            parameters=dict(self.source.parameters),
            buckets=list(self.source.buckets),
            seed=self.source.seed,
            decisions={},
            documents=DocumentTotals.of(documents, checked),
            dropped_tokens=dataset.num_tokens - int(lengths.sum(dtype=np.int64)),
            repeated_tokens=0,
        )
        whole = _core.whole_documents(*index.segment_arrays(), documents)
        return replace(index, documents=replace(index.documents, num_whole=whole))


def plan_arrangement(
    source: str, output: str, *, seed: int = 0, shard_bytes: int = 1 << 30, overwrite: bool = False
) -> Arranger:
    """Plan what ``arrange`` writes.

    Args:
        source: a shard manifest.
        output: the shard manifest of the result.
        seed: of the order.
        shard_bytes: of the tokens of a shard, about.
        overwrite: replace what is there and made otherwise.

    Raises:
        ConfigError: names or a size that cannot be; another source stands at the output.
        FormatError, OSError: a manifest is damaged or cannot be read.
    """
    path = Path(output)
    if not path.name.endswith(SUFFIX) or path.resolve() == Path(source).resolve():
        raise ConfigError(f"--output {path} must be another NAME{SUFFIX} than {source}")
    if shard_bytes < 1:
        raise ConfigError(f"--bytes-per-shard is {shard_bytes}; it must be at least 1 byte")
    index = load_shards(source)
    num_bytes = sum(shard.num_tokens * np.dtype(shard.dtype).itemsize for shard in index.shards)
    arranger = Arranger(
        source=index,
        manifest=path,
        arranged=Arranged(
            source=index.fingerprint,
            seed=seed,
            block_tokens=BLOCK_TOKENS,
            window_blocks=WINDOW_BLOCKS,
        ),
        num_shards=max(1, -(-num_bytes // shard_bytes)),
        overwrite=overwrite,
    )

    def difference() -> str | None:
        there = load_shards(path)
        same = there.arranged == arranger.arranged and len(there.shards) == arranger.num_shards
        return None if same else "it is another source"

    check_target(path, overwrite=overwrite, difference=difference)
    return arranger


def arrange(
    arranger: Arranger,
    report: Report,
    *,
    part: tuple[int, int] | None = None,
    **how: Any,
) -> list[PackedShard]:
    """Write what is not written yet, and the manifest.

    Args:
        part: (i, n): only the i-th of n parts of the shards, and no manifest.
        how: of ``run_shards``.

    Raises:
        ConfigError, MegapackError, OSError: as of ``Arranger.build`` and ``run_shards``.
    """
    i, n = part or (0, 1)
    if not 0 <= i < n:
        raise ConfigError(f"part {i}/{n}: parts are counted from 0 to {n - 1}")
    shards = run_shards(arranger, range(i, arranger.num_shards, n), report, **how)
    if part is None:
        index = arranger.source
        plan = {name: plain(getattr(index, name)) for name in PLAN}
        save_shards(arranger.manifest, plan, shards, arranged=arranger.arranged)
    return shards
