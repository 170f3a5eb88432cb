"""Exported files, read by their host's rule: every input, label, mask and boundary is a sample's.

``MEGATRON_BRIDGE=/path/to/checkout`` and ``MEGATRON_LM`` (main, which it imports) have
Megatron-Bridge itself read its packed parquet; without them its rule is the one written here.
"""

from __future__ import annotations

import json
import os
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import needs_torch  # noqa: F401
import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from commands import printed

from megapack import IndexedDatasetBuilder, SampleIndex
from megapack.data import BatchLayout, PackedDataset
from megapack.probe import SegmentPlaces
from megapack.storage import read_document_lengths
from megapack.storage.column_edits import add_column
from megapack.storage.columns import INTERPRETED
from tests.hosts.processes import LAUNCHERS, environment_of, finish, trees_of

BUCKETS = (16, 32, 64)
BRIDGE, MEGATRON = trees_of("MEGATRON_BRIDGE"), trees_of("MEGATRON_LM")
Row = list[tuple[list[int], list[int], list[int]]]  # inputs, labels, mask of every sequence


def write_dataset(folder: Path, alignment: int, *, labels: str) -> None:
    """Write documents of 1 to 150 tokens, packed into buckets, with labels on some spans."""
    rng = np.random.default_rng(alignment)
    lengths = [1, 1, 2, *np.clip(rng.lognormal(2.8, 1, 70), 1, 150).astype(int)]
    columns = {} if labels == "none" else {"labels": INTERPRETED["labels"]}
    with IndexedDatasetBuilder(folder / "chats", np.uint16, columns=columns) as builder:
        for length in lengths:
            tokens = np.append(rng.integers(2, 60_000, length - 1), 1)
            learned = np.repeat(rng.random(length // 5 + 1) < 0.5, 5)[:length]
            rows = {"labels": np.where(learned, tokens + (labels == "other"), -100)}
            builder.add_document(tokens, columns=rows if columns else None)
    pack = ["pack", folder / "chats", "--output", folder / "chats.samples"]
    printed(*pack, "--buckets", ",".join(map(str, BUCKETS)), "--alignment", alignment)


def export(folder: Path, *more: object, status: int = 0) -> str:
    output = folder / "train.idx.parquet"
    command = ("export", folder / "chats.samples", "--format", "bridge", "--output", output)
    return printed(*command, *more, status=status)


def expected_rows(folder: Path) -> list[Row]:
    """Return the rows of micro batches of one sample, without the last token of a document, which
    predicts nothing."""
    dataset = PackedDataset(folder / "chats", folder / "chats.samples")
    index = SampleIndex.load(folder / "chats.samples")
    lengths = read_document_lengths(folder / "chats")
    rows = []
    bounds = pairwise(index.bucket_sample_offsets.tolist())
    for capacity, (begin, end) in zip(BUCKETS, bounds, strict=True):
        per_row = BUCKETS[-1] // capacity
        for first in range(begin, end, per_row):
            samples = range(first, min(end, first + per_row))
            row: Row = []
            for i in samples:
                row += sequences_of(dataset, i, capacity, index.sample(i)[1], lengths)
            rows += [row] if row else []
    return rows


def sequences_of(
    dataset: PackedDataset, sample: int, capacity: int, parts: Any, lengths: Any
) -> Row:
    batch = dataset.micro_batch(
        np.array([sample]), layout=BatchLayout(micro_batch_tokens=capacity), capacity=capacity
    )
    flat = {name: batch[name][0] for name in ("tokens", "labels", "loss_mask")}
    segments, found = SegmentPlaces.of(batch), []
    for begin, (document, at, length) in zip(segments.begins.tolist(), parts, strict=False):
        goes_on = at + length < lengths[document]
        inside = slice(begin, begin + length - (not goes_on))
        tokens, labels, mask = (values[inside].tolist() for values in flat.values())
        if tokens:
            found.append((tokens, labels, [int(counts) for counts in mask]))
    return found


def read_by_the_rule(folder: Path) -> list[dict[str, Any]]:
    """Return what Megatron-Bridge 067f987d reads from a row: the last token of a sequence is only a
    label, and the mask belongs to the token that predicts."""
    batches = []
    for row in pq.read_table(folder / "train.idx.parquet").to_pylist():
        ids, mask, starts = row["input_ids"], row["loss_mask"], row["seq_start_id"]
        assert len(ids) == len(mask) and starts[0] == 0
        bounds = list(pairwise([*starts, len(ids)]))
        ends = np.cumsum([0, *(b - a - 1 for a, b in bounds)])
        batch = {
            "tokens": [t for a, b in bounds for t in ids[a : b - 1]],
            "labels": [t for a, b in bounds for t in ids[a + 1 : b]],
            "loss_mask": [m for a, b in bounds for m in mask[a : b - 1]],
        }
        batches.append({name: torch.tensor([values]) for name, values in batch.items()})
        batches[-1]["cu_seqlens_q"] = torch.tensor([ends.tolist()])
    return batches


def read_by_bridge(folder: Path, alignment: int) -> list[dict[str, Any]]:
    environment = environment_of(MEGATRON[-1], "hosts")
    environment["PYTHONPATH"] += os.pathsep + str(BRIDGE[0] / "src")
    command = [sys.executable, str(LAUNCHERS / "read_bridge.py"), str(BRIDGE[0])]
    command += [str(folder / "train.idx.parquet"), str(alignment), str(folder / "read.pt")]
    finish(command, folder, environment, "Megatron-Bridge's reader")
    batches: list[dict[str, Any]] = torch.load(folder / "read.pt")
    return batches


def sequences_read(batch: dict[str, Any]) -> Row:
    """Return the sequences of a batch; padded bounds are the physical ones, if present."""
    bounds = batch.get("cu_seqlens_q_padded", batch["cu_seqlens_q"])[0].tolist()
    flat = [batch[name][0] for name in ("tokens", "labels", "loss_mask")]
    return [
        tuple(values[a:b].tolist() for values in flat)  # type: ignore[misc]
        for a, b in pairwise(bounds)
        if b > a
    ]


needs_bridge = pytest.mark.skipif(
    not (BRIDGE and MEGATRON), reason="MEGATRON_BRIDGE, MEGATRON_LM name no checkouts"
)


@pytest.mark.parametrize("reader", ["rule", pytest.param("bridge", marks=needs_bridge)])
@pytest.mark.parametrize(("alignment", "labels"), [(1, "auto"), (1, "none"), (8, "auto")])
def test_bridge_reads_the_samples(alignment: int, labels: str, reader: str, tmp_path: Path) -> None:
    write_dataset(tmp_path, alignment, labels=labels)
    export(tmp_path, *(["--eod-token", "1"] if alignment > 1 else []))
    expected = expected_rows(tmp_path)
    batches = (
        read_by_the_rule(tmp_path) if reader == "rule" else read_by_bridge(tmp_path, alignment)
    )
    assert len(batches) == len(expected) > 20
    learned = 0
    for batch, row in zip(batches, expected, strict=True):
        found = sequences_read(batch)
        if reader == "bridge" and len(found) > len(row):  # its padding of rows to 16 tokens
            assert not any(found.pop()[2])
        assert len(found) == len(row)
        for (tokens, following, mask), (inputs, wanted, counts) in zip(found, row, strict=True):
            size = len(inputs)
            assert len(tokens) == -(-size // alignment) * alignment
            assert (tokens[:size], mask[:size]) == (inputs, counts)
            read = [label if m else -100 for label, m in zip(following, mask, strict=True)]
            assert read[:size] == wanted
            assert set(tokens[size + 1 :]) <= {1} and not any(mask[size:])
            learned += sum(counts)
    [facts] = json.loads((tmp_path / "train.metadata.json").read_text())
    assert facts["num_labels"] == learned > 300
    assert facts["num_sequences"] == sum(map(len, expected)) > len(expected)
    assert facts["max_samples_per_bin"] == max(map(len, expected))
    assert facts["pack_size"] == BUCKETS[-1] >= facts["dataset_max_seqlen"] > 32


def test_export_refuses_unsupported_samples(tmp_path: Path) -> None:
    write_dataset(tmp_path, 8, labels="other")
    for more, reason in (
        ([], "give --eod-token"),
        (["--eod-token", 1 << 31], "Bridge's ids are int32"),
        (["--eod-token", "1"], "and Bridge takes labels from tokens"),
        (["--output", tmp_path / "train.npy"], "Bridge reads .parquet and .pq"),
    ):
        assert reason in export(tmp_path, *more, status=2)
        assert not list(tmp_path.glob("train*")), "nothing half-written"
    add_column(
        tmp_path / "chats",
        "weights",
        np.ones(read_document_lengths(tmp_path / "chats").sum()),
        INTERPRETED["weights"],
    )
    assert "has the columns weights, and Bridge's" in export(tmp_path, "--eod-token", 1, status=2)
    (tmp_path / "train.idx.parquet").touch()
    assert "exists already" in export(tmp_path, "--eod-token", "1", status=2)
