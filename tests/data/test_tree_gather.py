"""Batches of prefix trees from disk: tokens, depths, paths and summed loss weights, as defined."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megapack.data import BatchLayout, BucketBatchSampler, PackedDataset, Schedule
from megapack.data.blend import Stage
from megapack.data.fim import FimConfig, Sentinels
from megapack.errors import ConfigError, FormatError
from megapack.packing import pack
from megapack.packing.trees import tokens_of
from megapack.storage.column_edits import add_column
from megapack.storage.columns import ColumnSpec
from tests.data.corpora import write_documents, write_labels, write_weights
from tests.reference import trees as reference

TEXTS = [[9, 8, 7, *([k] * (k % 4 + 1))] for k in range(1, 7)] + [[5, 6], [9, 8], [5, 6], [4]]
texts = st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=9), min_size=1, max_size=14)


def opened(prefix: Path, documents: Any, capacity: int = 16, **options: Any) -> PackedDataset:
    dataset = write_documents(prefix, documents)
    for name, write in (("labels", write_labels), ("weights", write_weights)):
        if name in options:
            write(prefix, options.pop(name))
    lengths = dataset.document_lengths
    index = pack(lengths, "tree", buckets=capacity, **tokens_of(dataset, "tree"))
    index.save(f"{prefix}.samples", source=dataset)
    return PackedDataset(str(prefix), f"{prefix}.samples", attention="tree", **options)


def defined(data: PackedDataset, documents: Any, ids: list[int], *, weights: Any) -> dict[str, Any]:
    """Return a batch by the definition: sample after sample, padding as a root.

    ``weights``: a number per token of every document, None where it has no label.
    """
    index = data.samples.indices[0]
    rows: dict[str, list[Any]] = {name: [] for name in ("tokens", "labels", "position_ids")}
    rows |= {"loss_mask": [], "predecessors": []}
    ends, path_ends, keys = [0], [0], []
    for sample in ids:
        numbers = [document for document, _ in index.open(0).documents_of(sample)]
        tree = reference.tree_of({n: documents[n] for n in numbers})
        first, size = len(rows["tokens"]), sum(tree.node_lengths)
        for node in range(len(tree.node_lengths)):
            path = reference.path(tree, node)
            text = documents[tree.node_sequences[node]]
            rows["tokens"] += text[tree.node_depths[node] :][: tree.node_lengths[node]]
            keys += [first + row for row in path]
            ends.append(ends[-1] + tree.node_lengths[node])
            path_ends.append(len(keys))
        rows["position_ids"] += reference.position_ids(tree)
        before = reference.predecessors(tree)
        rows["predecessors"] += [row if row < 0 else first + row for row in before]
        mask, labels = [0.0] * size, [-100] * size
        for number, path in zip(tree.sequences, reference.token_index(tree), strict=True):
            for position, row in enumerate(path):
                weight = weights[number][position]
                if position and weight is not None:
                    mask[row] += weight
                    labels[row] = documents[number][position]
        rows["loss_mask"], rows["labels"] = rows["loss_mask"] + mask, rows["labels"] + labels
        padding = int(index.bucket_capacity[0]) - size
        if padding:
            start = len(rows["tokens"])
            keys += range(start, start + padding)
            ends.append(start + padding)
            path_ends.append(len(keys))
        rows["tokens"] += [0] * padding
        rows["labels"] += [-100] * padding
        rows["loss_mask"] += [0.0] * padding
        rows["position_ids"] += range(padding)
        rows["predecessors"] += [-1] * padding
    return {**rows, "cu_seqlens_q": ends, "cu_seqlens_k": path_ends, "kv_index": keys}


def check_batch(data: PackedDataset, documents: Any, weights: Any) -> None:
    ids = list(range(len(data)))
    batch = data.micro_batch(ids)
    for name, values in defined(data, documents, ids, weights=weights).items():
        expected = torch.tensor(values, dtype=batch[name].dtype)
        assert torch.allclose(batch[name].flatten(), expected), name
    assert torch.equal(batch["cu_seqlens"], batch["cu_seqlens_q"])
    assert batch["max_seqlen_q"] == int(batch["cu_seqlens_q"].diff().max())
    assert batch["max_seqlen_k"] == int(batch["cu_seqlens_k"].diff().max())
    totals = data.samples.label_totals(np.array(ids))
    counted = [sum(w is not None for w in row[1:]) for row in weights]
    assert totals.labels.sum() == sum(counted) == data.count_labels(ids).sum()
    assert totals.weight.sum() == pytest.approx(float(batch["loss_mask"].sum()), rel=1e-5)


@given(texts, st.integers(9, 20))
def test_batches_equal_the_definition(documents: Any, capacity: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        data = opened(Path(folder) / "d", documents, capacity)
        check_batch(data, documents, [[1.0] * len(document) for document in documents])


@given(texts, st.randoms(use_true_random=False))
def test_documents_add_their_own_labels_and_weights(documents: Any, random: Any) -> None:
    drawn = [[random.choice([None, 0.5, 1.0, 3.0]) for _ in text] for text in documents]
    labels = [
        [-1 if w is None else token for token, w in zip(text, row, strict=True)]
        for text, row in zip(documents, drawn, strict=True)
    ]
    weights = [[w or 0.25 for w in row] for row in drawn]
    with tempfile.TemporaryDirectory() as folder:
        data = opened(Path(folder) / "d", documents, labels=labels, weights=weights)
        check_batch(data, documents, drawn)


def test_with_sequence_mean_every_document_has_weight_one(tmp_path: Path) -> None:
    data = opened(tmp_path / "d", TEXTS, loss="sequence_mean")
    weights = [[1 / max(1, len(text) - 1)] * len(text) for text in TEXTS]
    batch = data.micro_batch(range(len(data)))
    expected = defined(data, TEXTS, list(range(len(data))), weights=weights)["loss_mask"]
    assert batch["loss_mask"].flatten().tolist() == pytest.approx(expected, rel=1e-6)
    assert batch["loss_mask"].sum() == pytest.approx(sum(len(text) > 1 for text in TEXTS))


def test_steps_divide_by_the_labels_of_all_documents_and_balance_paths(tmp_path: Path) -> None:
    data = opened(tmp_path / "d", TEXTS, 16)
    schedule = Schedule(data, tokens_per_step=16 * len(data))
    sampler = BucketBatchSampler(
        schedule,
        data_parallel_rank=0,
        data_parallel_size=1,
        micro_batch_tokens=16,
        weighted_loss=True,
    )
    [*batches] = sampler.micro_batches(0)
    labels = sum(len(text) - 1 for text in TEXTS)
    assert {b.num_step_label_tokens for b in batches} == {b.step_label_weight for b in batches}
    assert batches[0].step_label_weight == labels
    costs = data.samples.attention_cost(np.arange(len(data)), 16)
    for sample, cost in enumerate(costs.tolist()):
        _, segments = data.samples.segments(sample)
        padding = 16 - sum(n for _, _, n in segments)
        assert cost == sum((b + n) ** 2 - b * b for _, b, n in segments) + padding**2
    assert [i for i in range(len(data)) if i in data.samples.samples_of(0, 3)] == [
        i for i in range(len(data)) if 3 in dict(data.samples.indices[0].open(0).documents_of(i))
    ]
    assert schedule.identity()["attention"] == "tree"
    with pytest.raises(ConfigError, match="loss weights of all their documents"):
        BucketBatchSampler(
            schedule, data_parallel_rank=0, data_parallel_size=1, micro_batch_tokens=16
        )


def test_changed_tokens_and_foreign_labels_are_found(tmp_path: Path) -> None:
    opened(tmp_path / "d", TEXTS)
    tokens = np.memmap(tmp_path / "d.bin", np.uint16, "r+")
    tokens[0] = 3  # document 0 no longer begins like the others
    tokens.flush()
    data = PackedDataset(str(tmp_path / "d"), f"{tmp_path}/d.samples", attention="tree")
    with pytest.raises(FormatError, match=r"document \d no longer begins like the documents"):
        data.micro_batch(range(len(data)))
    labels = [[2] * len(text) for text in TEXTS]
    data = opened(tmp_path / "e", TEXTS, labels=labels)
    with pytest.raises(FormatError, match="has label 2 for token"):
        data.micro_batch(range(len(data)))


def test_everything_that_trees_do_not_have_is_refused_by_name(tmp_path: Path) -> None:
    data = opened(tmp_path / "d", TEXTS)
    prefix, samples = str(tmp_path / "d"), f"{tmp_path}/d.samples"
    np.save(tmp_path / "out.npy", np.array([1]))
    exclude = Stage(from_step=1, exclude={"d": str(tmp_path / "out.npy")})
    cases: list[tuple[dict[str, Any], str]] = [
        ({"positions": "sample"}, "positions is sample with attention: tree"),
        ({"label_boundary": "sample"}, "label_boundary is sample"),
        ({"alignment": 2}, "alignment is 2"),
        ({"num_mtp_targets": 1}, "num_mtp_targets is 1"),
        ({"attention_window": 8}, "attention_window is"),
        ({"names": ("d",), "stages": [exclude]}, "exclude is"),
        ({"attention": "document"}, "has prefix trees, and attention is document"),
        ({"attention": "group"}, "group"),
    ]
    for options, message in cases:
        with pytest.raises(ConfigError, match=message):
            PackedDataset(prefix, samples, **{"attention": "tree", **options})
    add_column(tmp_path / "d", "speed", TEXTS, ColumnSpec(dtype="int32", shape=(), fill=0))
    with pytest.raises(ConfigError, match=r"columns is \['speed'\]"):
        PackedDataset(prefix, samples, attention="tree", columns=["speed"])
    plain = pack([len(text) for text in TEXTS], buckets=[16])
    with pytest.raises(ConfigError, match="no prefix trees: pack it with --strategy tree"):
        PackedDataset(prefix, plain, attention="tree")
    with pytest.raises(ConfigError, match="one stream whose paths differ in length"):
        data.micro_batch([0], layout=BatchLayout(micro_batch_tokens=16, kind="rows"))
    schedule = Schedule(data, tokens_per_step=16 * len(data))
    with pytest.raises(ConfigError, match="sequence_parallel_size is 2 with attention: tree"):
        BucketBatchSampler(
            schedule,
            data_parallel_rank=0,
            data_parallel_size=2,
            micro_batch_tokens=16,
            sequence_parallel_size=2,
            weighted_loss=True,
        )
    fim = FimConfig(sentinels=Sentinels(prefix=100, suffix=101, middle=102), eod="none")
    with pytest.raises(ConfigError, match="fim is on with attention: tree"):
        PackedDataset(prefix, samples, attention="tree", fim=fim, fim_rates=[0.0])
