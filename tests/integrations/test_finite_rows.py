"""Finite sets: every document once, then rows without loss, for any number of ranks.

The reference is the documents themselves, one by one, without an index or a row.
"""

from __future__ import annotations

import itertools
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy

from megapack.data import BucketBatchSampler, PackedDataset, Schedule, Stage
from megapack.errors import ConfigError
from megapack.integrations.rows.dataset import RowDataset, RowOptions
from megapack.integrations.rows.open_rows import Manifest, Source, open_data_path
from megapack.packing import pack
from megapack.storage import IndexedDataset, IndexedDatasetBuilder

ROW = 32
BUCKETS = (8, 16, 32)

Lengths = st.lists(st.integers(0, 70), min_size=1, max_size=25).filter(any)


def write(folder: Path, name: str, lengths: list[int], first: int) -> IndexedDataset:
    """Write documents of these lengths in which tokens have different ids, from ``first`` on."""
    with IndexedDatasetBuilder(folder / name, np.int32, overwrite=True) as builder:
        for length in lengths:
            builder.add_document(np.arange(first, first + length))
            first += length
    return IndexedDataset(folder / name)


def documents_of(datasets: list[IndexedDataset]) -> list[np.ndarray[Any, Any]]:
    return [dataset[i] for dataset in datasets for i in range(len(dataset))]


def finite(datasets: list[IndexedDataset], rows_per_block: int, **more: Any) -> RowDataset:
    """Return a finite set, which must ignore weights, stages and the attention window."""
    sources = tuple(
        Source(prefix=dataset.prefix, weight=weight)
        for dataset, weight in zip(datasets, (0.9, 0.1), strict=False)
    )
    of_training = {"stages": (Stage(from_step=1, order="grow-p2"),), "attention_window": 3}
    sizes: dict[str, Any] = {"buckets": BUCKETS, "rows_per_block": 5, "max_epochs": 1.0}
    manifest = Manifest(sources=sources, **sizes, **of_training)
    options = RowOptions(sequence_length=ROW, rows_per_block=rows_per_block, seed=3)
    return open_data_path(manifest, options, finite=True, **more)


@given(web=Lengths, code=Lengths, rows_per_block=st.integers(1, 9), data=st.data())
def test_finite_rows_have_every_token_and_label_once(
    tmp_path_factory: pytest.TempPathFactory,
    web: list[int],
    code: list[int],
    rows_per_block: int,
    data: st.DataObject,
) -> None:
    folder = tmp_path_factory.mktemp("finite")
    datasets = [write(folder, "web", web, 1), write(folder, "code", code, 1 + sum(web))]
    rows = finite(datasets, rows_per_block)
    more = data.draw(st.integers(0, 2 * rows_per_block), label="rows asked for beyond the end")
    rows.num_rows += more
    assert (len(rows) - more) % rows_per_block == 0
    order = data.draw(st.permutations(range(len(rows))), label="order of the rows")
    size = data.draw(st.integers(1, 7), label="rows at a time")
    tokens, labels = [], []
    for begin in range(0, len(order), size):
        batch = rows.micro_batch(order[begin : begin + size])
        counted = batch["loss_mask"] > 0
        assert torch.equal(counted, batch["labels"] >= 0)
        assert torch.equal(batch["labels"][counted], batch["tokens"][counted] + 1)
        assert (batch["cu_seqlens"][:, 0] == 0).all() and (batch["cu_seqlens"][:, -1] == ROW).all()
        assert (batch["cu_seqlens"].diff(dim=1).max(dim=1).values == batch["max_seqlen"]).all()
        tokens += batch["tokens"][batch["tokens"] > 0].tolist()
        labels += batch["labels"][counted].tolist()
    texts = [text.tolist() for text in documents_of(datasets)]
    assert sorted(tokens) == sorted(itertools.chain(*texts))
    assert sorted(labels) == sorted(itertools.chain(*(text[1:] for text in texts)))
    empty = [number for number in range(len(rows)) if not len(rows.samples_of(number))]
    assert len(empty) < len(BUCKETS) * rows_per_block + more
    again = pickle.loads(pickle.dumps(rows))
    assert all(torch.equal(again[order[0]][key], value) for key, value in rows[order[0]].items())


def tiny_model(vocabulary: int) -> torch.nn.Module:
    torch.manual_seed(0)
    layers = [torch.nn.Embedding(vocabulary, 16), torch.nn.Linear(16, vocabulary)]
    return torch.nn.ModuleList(layers)


def losses(model: Any, tokens: torch.Tensor, labels: torch.Tensor, ends: list[int]) -> Any:
    """Return (sum, labels) of a row: a token sees the mean of its segment up to itself."""
    embedded = model[0](tokens)
    seen = [
        embedded[begin:end].cumsum(0) / torch.arange(1, end - begin + 1)[:, None]
        for begin, end in itertools.pairwise(ends)
        if end > begin
    ]
    each = cross_entropy(model[1](torch.cat(seen)), labels, ignore_index=-100, reduction="none")
    return each.double().sum().item(), int((labels >= 0).sum())


def one_by_one(model: Any, documents: list[Any]) -> tuple[float, int]:
    total, count = 0.0, 0
    for text in documents:
        tokens = torch.from_numpy(text.astype(np.int64))
        labels = torch.cat([tokens[1:], torch.tensor([-100])])
        loss, labelled = losses(model, tokens, labels, [0, len(tokens)])
        total, count = total + loss, count + labelled
    return total, count


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> list[IndexedDataset]:
    """Write documents that are never cut, so each has the same loss alone as in a row."""
    folder = tmp_path_factory.mktemp("short")
    lengths = np.random.default_rng(2).integers(1, ROW + 1, 60).tolist()
    return [write(folder, "web", lengths[:50], 1), write(folder, "code", lengths[50:], 1000)]


@pytest.mark.parametrize(("ranks", "micro_batch", "blocks"), [(1, 1, 5), (4, 3, 1)])
def test_finite_loss_of_all_ranks_equals_that_of_single_documents(
    short: list[IndexedDataset], ranks: int, micro_batch: int, blocks: int
) -> None:
    model = tiny_model(3000)
    expected, count = one_by_one(model, documents_of(short))
    at_once = ranks * micro_batch
    rows = finite(short, at_once * blocks)
    found = torch.zeros(ranks, 2, dtype=torch.float64)
    for step in range(0, len(rows), at_once):
        for rank in range(ranks):
            first = step + rank * micro_batch
            batch = rows.micro_batch(range(first, first + micro_batch))
            for i in range(micro_batch):
                of_row = (batch["tokens"][i], batch["labels"][i], batch["cu_seqlens"][i].tolist())
                found[rank] += torch.tensor(losses(model, *of_row))
    total, labels = found.sum(0).tolist()
    assert labels == count
    assert total / labels == pytest.approx(expected / count, rel=1e-6)


@given(
    lengths=Lengths,
    ranks=st.integers(1, 5),
    mix=st.sampled_from([{}, {"mix": "micro_step", "micro_step_tokens": 64}]),
    dealing=st.sampled_from(["balanced", "in_order"]),
)
def test_finite_schedule_assigns_every_sample_once_on_any_ranks(
    lengths: list[int], ranks: int, mix: dict[str, Any], dealing: Any
) -> None:
    """Also check the sampler of a training loop, whose last micro batches hold fewer samples."""
    indices = [pack(part, "bucket", buckets=BUCKETS) for part in (lengths, [5, 9, 40])]
    options: dict[str, Any] = {"tokens_per_step": 128, "seed": 1, "order": "grow-p2", **mix}
    schedule = Schedule(indices, weights=[0, 1], finite=True, **options)
    of_all: dict[str, Any] = {"data_parallel_size": ranks, "micro_batch_tokens": 32}
    dealt = [
        list(
            BucketBatchSampler(
                schedule, data_parallel_rank=rank, dealing=dealing, pad_last=True, **of_all
            )
        )
        for rank in range(ranks)
    ]
    assert len({len(batches) for batches in dealt}) == 1
    for of_step in zip(*dealt, strict=True):
        assert len({(batch.step, batch.micro_step, batch.capacity) for batch in of_step}) == 1
        assert all(len(batch) * batch.capacity <= 32 for batch in of_step)
    ids = [sample for batches in dealt for batch in batches for sample in batch]
    assert sorted(ids) == list(range(schedule.samples.num_samples))
    ends = schedule.num_steps()
    steps = {s: i for i in range(ends + 2) for s in schedule.step(i).sample_ids.tolist()}
    assert max(steps.values()) < ends
    assert all(schedule.steps_of(sample, ends) == [step] for sample, step in steps.items())


def test_finite_schedule_of_one_dataset_needs_no_weights(short: list[IndexedDataset]) -> None:
    """A score order or a sequential order does not matter: every sample occurs."""
    index = pack(short[0].document_lengths, "bucket", buckets=BUCKETS)
    packed = PackedDataset(short[0], index)
    for order in ("proportional", "sequential"):
        schedule = Schedule(packed, tokens_per_step=64, order=order, finite=True)
        steps = [schedule.step(i) for i in range(schedule.num_steps())]
        assert sum(step.num_label_tokens for step in steps) == sum(
            max(0, n - 1) for n in short[0].document_lengths.tolist()
        )


def test_finite_schedule_refuses_an_index_that_drops_tokens() -> None:
    lengths = [5, 9, 40, 13, 70]
    whole, dropping = (pack(lengths, name, buckets=[32]) for name in ("bucket", "decompose"))
    assert Schedule(whole, tokens_per_step=64, finite=True).num_steps() == 3
    with pytest.raises(ConfigError, match="'decompose' has dropped 41 tokens and repeated 0"):
        Schedule([whole, dropping], tokens_per_step=64, finite=True)
