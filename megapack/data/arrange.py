"""Rewrite a source so that its tokens are stored in the order of the draws.

The samples of every bucket are put in one random order, which the n shards split evenly: shard s
gets the s-th part of every bucket. In a shard every segment is a document, so a run that draws the
samples in this order reads every bucket sequentially. If a segment ends inside its document, the
next token is stored, too: it is the label of the segment's last token. Tokens and labels of a
sample are the same as in the source. The numbers of documents and samples change, and a segment
loses its position in the document (positions: document is refused).

A shard is a function of source, seed and number of shards, and is either complete or absent. So a
build can resume on any number of processes and machines.

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
from megapack.storage.metadata import BOUNDARY_TOKENS, read_meta

# ---- Samples as documents: one per segment, with the next token of the original document

Ids = NDArray[np.int64]


class Pieces(NamedTuple):
    """Documents cut from samples."""

    offsets: Ids
    """(documents + 1,), tokens."""
    lengths: Ids
    """(documents,) tokens of the sample, without the additional next token."""
    counts: Ids
    """(samples,) documents per sample."""


def cut_pieces(
    data: PackedDataset, chosen: PackedDataset | None, capacity: int, ids: Ids
) -> tuple[Pieces, Ids, Ids | None, NDArray[np.float32] | None]:
    """Return samples of one capacity as documents, with tokens, labels and loss weights.

    Labels and weights are those of ``chosen``, not shifted; None without it.
    """
    shards, owners, parts = data.samples.shards, [], []
    for shard, positions, local in shards.by_shard(ids):
        segments, owner = segments_of(shards.index(shard), local)
        owners.append(positions[owner])
        parts.append(np.asarray(shards.index(shard).segment_length[segments], np.int64))
    order = np.argsort(np.concatenate(owners), kind="stable")
    owner, lengths = np.concatenate(owners)[order], np.concatenate(parts)[order]
    counts = np.bincount(owner, minlength=len(ids))
    used = np.bincount(owner, lengths, len(ids)).astype(np.int64)
    begin_in_sample = np.cumsum(lengths) - lengths - (np.cumsum(used) - used)[owner]
    begins = owner * capacity + begin_in_sample
    batch = data.micro_batch(ids, capacity=capacity)
    # The label of a segment's last token is the next token of its document, if there is one.
    following = batch["labels"].numpy()[0, begins + lengths - 1]
    has_next = following >= 0
    offsets = np.concatenate([[0], np.cumsum(lengths + has_next)])
    indices = np.repeat(begins - offsets[:-1], lengths + has_next) + np.arange(offsets[-1])
    tokens = np.append(batch["tokens"].numpy()[0], 0)[indices]
    tokens[offsets[1:][has_next] - 1] = following[has_next]
    pieces = Pieces(offsets, lengths, counts)
    if chosen is None:
        return pieces, tokens, None, None
    shifted = chosen.micro_batch(ids, capacity=capacity)
    labels = np.concatenate([[-100], shifted["labels"].numpy()[0]])[indices]
    weights = np.concatenate([[0], shifted["loss_mask"].numpy()[0]])[indices]
    # No token of the sample predicts the first token of a segment.
    labels[offsets[:-1]], weights[offsets[:-1]] = -100, 0
    return pieces, tokens, labels, weights


BLOCK_TOKENS = 1 << 20  # of one bucket: 2 to 4 MB
WINDOW_BLOCKS = 16
_CHUNK_TOKENS = 1 << 22
# Facts of meta files that are wrong for the new documents, or describe the creation of the files.
_NOT_KEPT = {"document_begin_token", "document_end_token", "plan", "command", "imported_from"}
_ORDER = 6  # see megapack.data.steps.fold_key


@dataclass(frozen=True, kw_only=True)
class Arranger:
    """Writer of the shards of an arranged source.

    Attributes:
        source: shard manifest of the source.
        manifest: of the result; the folder of its shards has the same name.
        arranged: description of the order.
        num_shards: of the result.
        overwrite: replace shards that were made differently.
    """

    source: ShardedIndex
    manifest: Path
    arranged: Arranged
    num_shards: int
    overwrite: bool = False
    threads: int = 1

    def build(self, index: int, report: Report) -> PackedShard:
        """Write a shard, unless it is complete.

        Raises:
            ConfigError: a different shard exists, and ``overwrite`` is False.
            IndexMismatchError, FormatError, OSError: as raised by ``PackedDataset``.
        """
        prefix = self.folder / f"{index:06d}"
        samples = Path(f"{prefix}.samples")
        recipe = {**vars(self.arranged), "shard": index, "num_shards": self.num_shards}
        if samples.exists() and IndexedDataset.exists(prefix):
            if (read_meta(prefix) or {}).get("arranged") == recipe:
                return self._row(prefix, samples, SampleIndex.load(samples), report)
            if not self.overwrite:
                raise ConfigError(
                    f"{prefix} exists and was made differently; replace it with --overwrite, or "
                    "choose another --output"
                )
        if is_own_folder(self.folder):
            samples.unlink(missing_ok=True)  # written last: a shard that has it is complete
        return self._row(prefix, samples, self._write(index, prefix, samples, recipe), report)

    @property
    def folder(self) -> Path:
        """Folder of the shards."""
        return self.manifest.with_name(self.manifest.name.removesuffix(".json"))

    def _row(self, prefix: Path, samples: Path, index: SampleIndex, report: Report) -> PackedShard:
        dataset = IndexedDataset(prefix)
        index.check_source(dataset)
        shard = describe_shard(dataset, samples, index)
        report(Counted(documents=shard.num_documents, tokens=shard.num_tokens))
        tokens = {fact: {getattr(s, fact) for s in self.source.shards} for fact in BOUNDARY_TOKENS}
        common: Any = {fact: of.pop() if len(of) == 1 else None for fact, of in tokens.items()}
        return replace(shard, **common)

    def _write(
        self, number: int, prefix: Path, samples: Path, recipe: dict[str, Any]
    ) -> SampleIndex:
        make_own_folder(prefix.parent)
        data, chosen = self._data
        documents = data.datasets[0]
        tokens_meta, labels_meta, weights_meta = self._metadata
        all_pieces: list[Pieces] = []
        with ExitStack() as stack:

            def build(
                suffix: str, metadata: dict[str, Any], **options: Any
            ) -> IndexedDatasetBuilder:
                options |= {"metadata": {**metadata, "arranged": recipe}, "overwrite": True}
                return stack.enter_context(IndexedDatasetBuilder(f"{prefix}{suffix}", **options))

            like_source = {"dtype": documents.dtype, "vocab_size": documents.vocab_size}
            has_labels = any(shard.labels for shard in self.source.shards)
            has_weights = any(shard.weights for shard in self.source.shards)
            builders: list[IndexedDatasetBuilder | None] = [
                build("", tokens_meta, **like_source),
                build(LABELS, labels_meta, allow_negative=True) if has_labels else None,
                build(WEIGHTS, weights_meta, dtype=np.float16) if has_weights else None,
            ]
            for capacity, ids in self._chunks(number):
                pieces, *columns = cut_pieces(data, chosen, capacity, ids)
                for builder, values in zip(builders, columns, strict=True):
                    if builder is not None:
                        builder.add_documents(values, pieces.offsets)
                all_pieces.append(pieces)
        dataset = IndexedDataset(prefix)
        index = self._index(number, all_pieces, dataset)
        # The name without the folder: the file does not depend on where it is written.
        index.save(samples, source=describe_source(dataset, prefix.name), overwrite=True)
        return index

    @cached_property
    def _data(self) -> tuple[PackedDataset, PackedDataset | None]:
        """The source without labels and weights, and with them if it has some."""
        has_more = any(shard.labels or shard.weights for shard in self.source.shards)
        plain = PackedDataset(None, self.source, label_dataset=None, weight_dataset=None)
        return plain, PackedDataset(None, self.source) if has_more else None

    @cached_property
    def _metadata(self) -> list[dict[str, Any]]:
        """Metadata of tokens, labels and weights that is still true, such as the tokenizer."""
        metas = ShardedDocuments(self.source, with_labels=True).metadata()
        return [{k: value for k, value in m.items() if k not in _NOT_KEPT} for m in metas]

    def _chunks(self, number: int) -> Iterator[tuple[int, Ids]]:
        """Yield (capacity, sample ids) of a shard in order, in chunks."""
        offsets = self.source.bucket_sample_offsets.tolist()
        for b, capacity in enumerate(self.source.bucket_capacity.tolist()):
            size, step = offsets[b + 1] - offsets[b], max(1, _CHUNK_TOKENS // capacity)
            key = fold_key(self.arranged.seed, _ORDER, capacity)
            end = self._num_before(size, number + 1)
            for begin in range(self._num_before(size, number), end, step):
                samples = _core.permute_range(key, size, begin, min(step, end - begin))
                yield capacity, offsets[b] + samples

    def _num_before(self, size: int, number: int) -> int:
        """Return how many of a bucket's ``size`` samples are in the shards before a shard."""
        return size * number // self.num_shards

    def _index(self, number: int, pieces: list[Pieces], dataset: IndexedDataset) -> SampleIndex:
        sizes = np.diff(self.source.bucket_sample_offsets).tolist()
        counts_of_buckets = [
            self._num_before(size, number + 1) - self._num_before(size, number) for size in sizes
        ]
        empty = [np.zeros(0, np.int64)]
        counts = np.concatenate([*empty, *(p.counts for p in pieces)])
        lengths = np.concatenate([*empty, *(p.lengths for p in pieces)]).astype(np.int32)
        documents = dataset.document_lengths
        checked = _core.DocumentLengths(documents, capacity=int(self.source.bucket_capacity[-1]))
        index = SampleIndex(
            bucket_capacity=self.source.bucket_capacity.copy(),
            bucket_sample_offsets=np.cumsum([0, *counts_of_buckets], dtype=np.int64),
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
    """Plan the work of ``arrange``.

    Args:
        source: a shard manifest.
        output: the shard manifest of the result.
        seed: of the order.
        shard_bytes: approximate size of a shard's tokens.
        overwrite: replace an existing source that was made differently.

    Raises:
        ConfigError: a name or a size is invalid; the output is another source.
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
        existing = load_shards(path)
        has_same_shards = len(existing.shards) == arranger.num_shards
        is_same = existing.arranged == arranger.arranged and has_same_shards
        return None if is_same else "it is another source"

    check_target(path, overwrite=overwrite, difference=difference)
    return arranger


def arrange(
    arranger: Arranger,
    report: Report,
    *,
    part: tuple[int, int] | None = None,
    **how: Any,
) -> list[PackedShard]:
    """Write all missing shards, and the manifest.

    Args:
        part: (i, n): only the i-th of n parts of the shards, and no manifest.
        how: arguments of ``run_shards``.

    Raises:
        ConfigError, MegapackError, OSError: see ``Arranger.build`` and ``run_shards``.
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
