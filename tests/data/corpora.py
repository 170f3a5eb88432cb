"""Small datasets on disk, and indices with exactly the segments a test wants."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from numpy.typing import NDArray

from megapack import _core
from megapack.data import PackedDataset, PackedLoader, Schedule, build_loader
from megapack.packing import SampleIndex, pack
from megapack.packing.metrics import DocumentTotals
from megapack.packing.shard_packing import pack_shards, plan_packing
from megapack.packing.sharded import ShardedIndex, load_shards
from megapack.storage import IndexedDataset, IndexedDatasetBuilder
from megapack.storage.column_edits import add_column
from megapack.storage.columns import (
    DTYPES,
    INTERPRETED,
    LABELS,
    WEIGHTS,
    ColumnSpec,
    ColumnWriter,
)
from tests.reference.gather import Column

Segment = tuple[int, int, int]  # document, begin, length
STEP_TOKENS = 64 * 8


def write_documents(
    prefix: Path, documents: Sequence[Sequence[int]], dtype: str = "uint16"
) -> IndexedDataset:
    negative = any(token < 0 for document in documents for token in document)
    with IndexedDatasetBuilder(prefix, dtype=np.dtype(dtype), allow_negative=negative) as builder:
        for document in documents:
            builder.add_document(np.asarray(document, dtype))
        builder.finalize()
    return IndexedDataset(prefix)


def write_labels(prefix: Path, labels: Sequence[Sequence[int]]) -> None:
    add_column(prefix, LABELS, labels, INTERPRETED[LABELS])


def write_weights(
    prefix: Path, weights: Sequence[Sequence[float]], *, overwrite: bool = False
) -> None:
    add_column(prefix, WEIGHTS, weights, INTERPRETED[WEIGHTS], overwrite=overwrite)


def packed_documents(
    prefix: Path, documents: Sequence[Sequence[int]], buckets: Sequence[int]
) -> IndexedDataset:
    """Write documents and PREFIX.samples."""
    dataset = write_documents(prefix, documents)
    index = pack(dataset.document_lengths, "bucket", buckets=list(buckets))
    index.save(prefix.with_name(f"{prefix.name}.samples"), source=dataset)
    return dataset


def random_documents(lengths: Sequence[int], seed: int = 0, high: int = 120) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(1, high, int(length)).tolist() for length in lengths]


def index_of(
    buckets: dict[int, list[list[Segment]]], lengths: Sequence[int], *, begin_dtype: str = "int32"
) -> SampleIndex:
    """Return an index with exactly these samples: capacity -> samples -> segments."""
    samples = [sample for capacity in sorted(buckets) for sample in buckets[capacity]]
    segments = [segment for sample in samples for segment in sample]
    columns = np.array(segments, np.int64).reshape(-1, 3).T
    arrays = {
        "bucket_capacity": np.array(sorted(buckets), np.int64),
        "bucket_sample_offsets": _offsets([len(buckets[c]) for c in sorted(buckets)]),
        "sample_segment_offsets": _offsets([len(sample) for sample in samples]),
        "segment_document": columns[0].astype(begin_dtype),
        "segment_begin": columns[1].astype(begin_dtype),
        "segment_length": columns[2].astype(np.int32),
    }
    packed = np.asarray(lengths, np.int32)
    checked = _core.DocumentLengths(packed, capacity=max(buckets))
    made = {"strategy": "by hand", "parameters": {}, "seed": 0, "decisions": {}}
    made |= {"buckets": sorted(buckets), "dropped_tokens": 0, "repeated_tokens": 0}
    return SampleIndex(**arrays, **made, documents=DocumentTotals.of(packed, checked))


def packed_as(
    folder: Path, documents: Sequence[Sequence[int]], buckets: dict[int, Any], **options: Any
) -> PackedDataset:
    """Pack documents into the samples of ``buckets``, an argument of ``index_of``."""
    index = index_of(buckets, [len(document) for document in documents])
    return PackedDataset(write_documents(folder / "d", documents), index, **options)


def samples_of_buckets(counts: dict[int, int]) -> SampleIndex:
    """Return an index of ``counts[capacity]`` full samples of one document each."""
    buckets: dict[int, list[list[Segment]]] = {}
    lengths: list[int] = []
    for capacity, count in sorted(counts.items()):
        buckets[capacity] = [[(len(lengths) + i, 0, capacity)] for i in range(count)]
        lengths += [capacity] * count
    return index_of(buckets, lengths)


def packed_lengths(num_documents: int, longest: int, seed: int = 0) -> np.ndarray:
    """Return log-normal lengths between 1 and ``longest``: many short documents, some long ones."""
    rng = np.random.default_rng(seed)
    lengths = np.exp(rng.normal(np.log(longest / 6), 0.9, num_documents))
    return np.clip(np.rint(lengths), 1, 2 * longest).astype(np.int32)


def packed_index(
    num_documents: int = 400, buckets: Sequence[int] = (16, 32, 64), seed: int = 0
) -> SampleIndex:
    """Pack with ``promote="off"``: golden orders are those of these samples."""
    lengths = packed_lengths(num_documents, max(buckets), seed)
    return pack(lengths, "bucket", buckets=list(buckets), promote="off")


def packed_shards(manifest: Path | str, prefixes: Sequence[object], **options: Any) -> ShardedIndex:
    """Pack datasets as one source; options of packing, and ``overwrite``."""
    how = {"overwrite": options.pop("overwrite", False)}
    plan = plan_packing(str(manifest), [str(p) for p in prefixes], options, **how)
    pack_shards(plan, lambda _: None, **how)
    return load_shards(manifest)


def assert_same_batches(a: Sequence[dict[str, Any]], b: Sequence[dict[str, Any]]) -> None:
    """Assert that batches have equal keys, values and types."""
    assert len(a) == len(b) > 0
    for first_batch, second_batch in zip(a, b, strict=True):
        assert first_batch.keys() == second_batch.keys()
        for name, value in first_batch.items():
            if isinstance(value, torch.Tensor):
                assert value.dtype == second_batch[name].dtype and torch.equal(
                    value, second_batch[name]
                ), name
            else:
                assert value == second_batch[name] and type(value) is type(second_batch[name]), name


def _offsets(counts: Sequence[int]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(counts, dtype=np.int64)]).astype(np.int64)


def of_rank(rank: int = 0, size: int = 1, micro: int = 128, **options: Any) -> dict[str, Any]:
    """Return arguments of ``BucketBatchSampler`` and ``build_loader``."""
    ranks = {"data_parallel_rank": rank, "data_parallel_size": size}
    return {**ranks, "micro_batch_tokens": micro, **options}


def small_loader(data: PackedDataset, rank: int = 0, size: int = 2, **options: Any) -> PackedLoader:
    """Return a loader of six steps of STEP_TOKENS tokens; micro batches have 128 by default."""
    schedule = options.pop("schedule", None)
    schedule = schedule or Schedule(data, tokens_per_step=STEP_TOKENS, seed=2)
    return build_loader(data, schedule, **of_rank(rank, size, **{"num_steps": 6, **options}))


# ---- Columns


def write_columns(
    prefix: Path | str, columns: Mapping[str, tuple[ColumnSpec, NDArray[Any]]]
) -> None:
    """Write columns, given as stored rows, next to a dataset and its other columns."""
    path = Path(f"{prefix}.meta.json")
    meta = json.loads(path.read_text())
    meta.setdefault("columns", {})
    for name, (spec, rows) in columns.items():
        writer = ColumnWriter(prefix, name, spec)
        writer.append(rows)
        meta["columns"][name] = writer.finish()
        writer.target.take_name()
    path.write_text(json.dumps(meta))


@st.composite
def column_specs(draw: st.DrawFn, most_bytes: int = 4096) -> ColumnSpec:
    """Draw the type of a column with rows of 1 to ``most_bytes`` bytes."""
    dtype = draw(st.sampled_from(DTYPES))
    itemsize = np.dtype("uint16" if dtype == "bfloat16" else dtype).itemsize
    shapes = [(), (), (1,), (3,), (8,), (6, 32), (2, 1, 5), (61,), (most_bytes // itemsize,)]
    shape = draw(st.sampled_from([s for s in shapes if math.prod(s) * itemsize <= most_bytes]))
    fill, of = draw(st.sampled_from([0, 1, 7, 100])), draw(st.sampled_from(["token", "target"]))
    return ColumnSpec(dtype=dtype, shape=shape, fill=fill, of=of)


def random_rows(spec: ColumnSpec, num_tokens: int, seed: int = 0) -> NDArray[Any]:
    """Return rows of random bits, as stored: also NaN and infinite numbers."""
    data = np.random.default_rng(seed).bytes(num_tokens * spec.row_bytes)
    return np.frombuffer(data, spec.numpy_dtype).reshape(num_tokens, *spec.shape)


def column_of(spec: ColumnSpec, rows: NDArray[Any], lengths: Sequence[int]) -> Column:
    """Return a column of documents with these lengths for the reference."""
    ends = np.cumsum(lengths).tolist()
    of_documents = [
        [row.tobytes() for row in rows[end - n : end]] for end, n in zip(ends, lengths, strict=True)
    ]
    return Column(of_documents, spec.fill_row.tobytes(), spec.of)


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
