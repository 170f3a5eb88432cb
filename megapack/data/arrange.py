"""Rewrite a source so that its tokens are stored in the order of the draws.

- ``plan_arrangement``, ``arrange``: write the shards of an arranged source and its manifest
- ``SourceReader``: reads samples as documents, with the columns of their tokens

The samples of every bucket are put in one random order, which the n shards split evenly. In a shard
every segment is a document, so a run that draws the samples in this order reads every bucket
sequentially. If a segment ends inside its document, the next token is stored, too: it is the label
of the segment's last token. Columns are copied with their tokens, second sizes with their segments,
so a sample is the same as in the source. But the numbers of documents and samples change, and a
segment loses its position in the document, so ``positions: document`` is refused. A shard is a
function of source, seed and number of shards, and is either complete or absent: a build can resume
on any number of machines.

Two buckets of 4 and 2 samples in two shards, the random orders 2 0 3 1 and 1 0:

    shard 0: samples 2, 0 of the first bucket, 1 of the second    # read from front to end
    shard 1: samples 3, 1 of the first bucket, 0 of the second
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from megapack import _core
from megapack.data.dataset import PackedDataset, SampleSegments
from megapack.data.documents import ShardedDocuments
from megapack.data.steps import fold_key
from megapack.errors import ConfigError
from megapack.executors import Counted, Report, run_shards
from megapack.packing import SampleIndex
from megapack.packing.metrics import DocumentTotals
from megapack.packing.sample_index import describe_source
from megapack.packing.second import second_checksum, second_of_segments
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
from megapack.storage.columns import LABELS, WEIGHTS
from megapack.storage.files import check_target
from megapack.storage.locks import is_own_folder, make_own_folder
from megapack.storage.metadata import BOUNDARY_TOKENS, read_meta
from megapack.storage.remote.reader import RemoteRows

# ---- Samples as documents: one per segment, with the next token of the original document

Ids = NDArray[np.int64]


class Pieces(NamedTuple):
    """Documents cut from samples."""

    offsets: Ids  # (documents + 1,), tokens
    lengths: Ids  # (documents,) tokens of the sample, without the next token
    counts: Ids  # (samples,) documents per sample
    second: Ids | None  # (documents,) second size of the original document; None: packed without


class SourceReader:
    """Reads samples of a source (``data``) with the columns of their tokens."""

    def __init__(self, source: ShardedIndex) -> None:
        self.data = PackedDataset(None, source)
        self._source, self._columns = source, source.columns
        self._arrays: dict[int, dict[str, Any]] = {}

    def read(self, ids: Ids) -> tuple[Pieces, NDArray[Any], dict[str, NDArray[Any]]]:
        """Return samples as documents, their tokens, and rows of every column, (tokens, ...)."""
        segments = self.data.segments(ids)
        lengths = segments.length + segments.continues
        counts = np.bincount(segments.sample, minlength=len(ids))
        has_second = "second_capacity" in self._source.parameters
        pieces = Pieces(
            np.concatenate([[0], np.cumsum(lengths)]),
            segments.length,
            counts,
            self._second_sizes(ids, counts) if has_second else None,
        )
        for shard in np.unique(segments.shard).tolist():
            self._open(shard)

        def copy() -> tuple[NDArray[Any], dict[str, NDArray[Any]]]:
            tokens = np.empty(int(pieces.offsets[-1]), self.data.datasets[0].dtype)
            self._copy("", segments, pieces.offsets, tokens)
            columns = {}
            for name, spec in self._columns.items():
                columns[name] = np.empty((len(tokens), *spec.shape), spec.numpy_dtype)
                self._copy(name, segments, pieces.offsets, columns[name])
            return tokens, columns

        return pieces, *self.data.remote_reads.read(ids, copy)

    def _second_sizes(self, ids: Ids, counts: Ids) -> Ids:
        """Return the second sizes of the segments of samples; ``counts``: segments per sample."""
        first, shards, first_in_shard = self._source.runs
        run = np.searchsorted(first, ids, side="right") - 1
        numbers = ids - first[run] + first_in_shard[run]
        begins, sizes = np.cumsum(counts) - counts, np.empty(counts.sum(), np.int64)
        for shard in np.unique(shards[run]).tolist():
            index = self.data.samples.shards.index(shard)
            assert index.segment_second is not None
            chosen = np.flatnonzero(shards[run] == shard)
            in_shard = np.asarray(index.sample_segment_offsets)[numbers[chosen]]
            target = _positions(begins[chosen], counts[chosen])
            sizes[target] = index.segment_second[_positions(in_shard, counts[chosen])]
        return sizes

    def _copy(self, name: str, segments: SampleSegments, offsets: Ids, rows: NDArray[Any]) -> None:
        """Copy the rows of a column, or (without a name) tokens, to ``rows``."""
        lengths = np.diff(offsets)
        for shard in np.unique(segments.shard).tolist():
            chosen = np.flatnonzero(segments.shard == shard)
            target = _positions(offsets[chosen], lengths[chosen])
            source = _positions(segments.begin[chosen], lengths[chosen])
            rows[target] = self._rows(shard, name, source)

    def _rows(self, shard: int, name: str, positions: Ids) -> Any:
        array = self._arrays[shard].get(name)
        if array is not None:
            mapped = array.mapped if isinstance(array, RemoteRows) else array
            return np.take(mapped, positions, axis=0)
        # Without the column: rows that have the same effect in batches.
        spec = self._columns[name]
        if name == LABELS:
            return spec.rows(self._rows(shard, "", positions))
        if name == WEIGHTS:
            return np.float16(1)
        return spec.fill_row.view(spec.numpy_dtype).reshape(spec.shape)

    def _open(self, shard: int) -> None:
        if shard in self._arrays:
            return
        dataset = self.data.documents(shard)
        columns = self.data.datasets[0].open_columns(dataset, self._columns)
        rows = {name: column.rows for name, column in columns.items()}
        self._arrays[shard] = {"": dataset.tokens, **rows}
        self.data.remote_reads.add(shard, *self._arrays[shard].values())


def _positions(begins: Ids, lengths: Ids) -> Ids:
    """Return all positions of the ranges, concatenated."""
    before = np.cumsum(lengths) - lengths
    return np.repeat(begins - before, lengths) + np.arange(lengths.sum())


BLOCK_TOKENS = 1 << 20  # tokens of one bucket per block: 2 to 4 MB
WINDOW_BLOCKS = 16
_CHUNK_BYTES = 1 << 25  # bytes of a chunk in the widest array
# Facts of meta files that are wrong for the new documents, or describe the creation of the files.
_NOT_KEPT = {"document_begin_token", "document_end_token", "plan", "command", "imported_from"}
_ORDER = 6  # see megapack.data.steps.fold_key


@dataclass(frozen=True, kw_only=True)
class Arranger:
    """Writer of the shards of an arranged source.

    Attributes:
        source: shard manifest of the source.
        manifest: shard manifest of the result; the folder of its shards has the same name.
        arranged: description of the order.
        overwrite: replace shards that were made differently.
    """

    source: ShardedIndex
    manifest: Path
    arranged: Arranged
    num_shards: int
    overwrite: bool = False
    threads: int = 1

    def build(self, index: int, report: Report) -> PackedShard:
        """Write a shard, unless it is complete. Raises ConfigError if a different shard exists and
        ``overwrite`` is False, and the errors of ``PackedDataset``."""
        prefix = self.folder / f"{index:06d}"
        samples = Path(f"{prefix}.samples")
        recipe = {**vars(self.arranged), "shard": index, "num_shards": self.num_shards}
        if self.source.columns:
            columns = [sorted(shard.columns.items()) for shard in self.source.shards]
            recipe["columns"] = xxhash.xxh3_64_hexdigest(repr(columns).encode())
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
        all_pieces: list[Pieces] = []
        documents = self._reader.data.datasets[0]
        with IndexedDatasetBuilder(
            str(prefix),
            documents.dtype,
            vocab_size=documents.vocab_size,
            columns=self.source.columns,
            metadata={**self._metadata, "arranged": recipe},
            overwrite=True,
        ) as builder:
            for _, ids in self._chunks(number):
                pieces, tokens, columns = self._reader.read(ids)
                builder.add_documents(tokens, pieces.offsets, columns=columns)
                all_pieces.append(pieces)
        dataset = IndexedDataset(prefix)
        index = self._index(number, all_pieces, dataset)
        # The name without the folder: the file does not depend on where it is written.
        index.save(samples, source=describe_source(dataset, prefix.name), overwrite=True)
        return index

    @cached_property
    def _reader(self) -> SourceReader:
        return SourceReader(self.source)

    def __getstate__(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @cached_property
    def _metadata(self) -> dict[str, Any]:
        """Metadata that is still true, such as the tokenizer."""
        meta = ShardedDocuments(self.source).metadata()
        return {key: value for key, value in meta.items() if key not in _NOT_KEPT}

    def _chunks(self, number: int) -> Iterator[tuple[int, Ids]]:
        """Yield (capacity, sample ids) of a shard in order, in chunks."""
        offsets = self.source.bucket_sample_offsets.tolist()
        widest = max((spec.row_bytes for spec in self.source.columns.values()), default=0)
        chunk_tokens = _CHUNK_BYTES // max(8, widest)
        for b, capacity in enumerate(self.source.bucket_capacity.tolist()):
            size, step = offsets[b + 1] - offsets[b], max(1, chunk_tokens // capacity)
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
            **self._second(pieces),
        )
        whole = _core.whole_documents(*index.segment_arrays(), documents)
        return replace(index, documents=replace(index.documents, num_whole=whole))

    def _second(self, pieces: list[Pieces]) -> dict[str, Any]:
        """Return the fields of the index that describe second sizes: a document per segment."""
        if "second_capacity" not in self.source.parameters:
            return {}
        sizes = [np.zeros(0, np.int64), *(p.second for p in pieces if p.second is not None)]
        of_documents = np.concatenate(sizes)
        of_segments = second_of_segments(of_documents, np.arange(len(of_documents)))
        return {"segment_second": of_segments, "second": second_checksum(of_documents)}


def plan_arrangement(
    source: str, output: str, *, seed: int = 0, shard_bytes: int = 1 << 30, overwrite: bool = False
) -> Arranger:
    """Plan the work of ``arrange``.

    Args:
        source, output: shard manifests of the source and of the result.
        shard_bytes: approximate size of a shard's tokens and columns.
        overwrite: replace an existing source that was made differently.

    Raises ConfigError if a name or a size is invalid or the output is another source, FormatError
    or OSError for a manifest that is damaged or cannot be read.
    """
    path = Path(output)
    if not path.name.endswith(SUFFIX) or path.resolve() == Path(source).resolve():
        raise ConfigError(f"--output {path} must be another NAME{SUFFIX} than {source}")
    if shard_bytes < 1:
        raise ConfigError(f"--bytes-per-shard is {shard_bytes}; it must be at least 1 byte")
    index = load_shards(source)
    num_bytes = 0
    for shard in index.shards:
        row_bytes = sum(column.spec.row_bytes for column in shard.columns.values())
        num_bytes += shard.num_tokens * (np.dtype(shard.dtype).itemsize + row_bytes)
    sizes = {"block_tokens": BLOCK_TOKENS, "window_blocks": WINDOW_BLOCKS}
    arranger = Arranger(
        source=index,
        manifest=path,
        arranged=Arranged(source=index.fingerprint, seed=seed, **sizes),
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
    arranger: Arranger, report: Report, *, part: tuple[int, int] | None = None, **how: Any
) -> list[PackedShard]:
    """Write all missing shards, and the manifest; with ``part`` (i, n), only the i-th of n parts of
    the shards, and no manifest. Raises the errors of ``Arranger.build`` and ``run_shards``, whose
    arguments ``how`` are."""
    i, n = part or (0, 1)
    if not 0 <= i < n:
        raise ConfigError(f"part {i}/{n}: parts are counted from 0 to {n - 1}")
    shards = run_shards(arranger, range(i, arranger.num_shards, n), report, **how)
    if part is None:
        index = arranger.source
        plan = {name: plain(getattr(index, name)) for name in PLAN}
        save_shards(arranger.manifest, plan, shards, arranged=arranger.arranged)
    return shards
