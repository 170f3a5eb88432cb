"""Rows for hosts that take an iterable: which rank takes which, what is kept, and the probe."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from megapack.errors import ConfigError, ResumeError
from megapack.integrations.dialects import (
    MEGATRON,
    OLMO_CORE,
    TORCHTITAN,
    TORCHTITAN_ROWS,
    Dialect,
)
from megapack.integrations.rows.dataset import RowDataset, RowOptions
from megapack.integrations.rows.open_rows import open_data_path
from megapack.integrations.rows.rank_rows import RankRows
from megapack.storage import IndexedDataset, IndexedDatasetBuilder
from megapack.storage.columns import ColumnSpec
from tests.data.corpora import random_rows, write_columns
from tests.hosts.cpu import on_cpu
from tests.hosts.processes import CHANGED, LEAK
from tests.integrations.harness import run_forked
from tests.integrations.samples import make_dataset

ROW, BLOCK, NUM_BLOCKS = 64, 12, 5


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> IndexedDataset:
    lengths = np.minimum(np.random.default_rng(0).lognormal(2.6, 0.9, 900).astype(int) + 1, 150)
    return make_dataset(tmp_path_factory.mktemp("rank rows"), lengths.tolist())


def rows_of(corpus: IndexedDataset, *, seed: int = 7, **manifest: Any) -> RowDataset:
    manifest = {"sources": [{"prefix": corpus.prefix}], "buckets": [16, 32, 64], **manifest}
    options = RowOptions(sequence_length=ROW, rows_per_block=BLOCK, seed=seed)
    return open_data_path(json.dumps(manifest), options, num_rows=NUM_BLOCKS * BLOCK)


def ranks_of(
    rows: RowDataset, size: int, micro_batch: int, dialect: Dialect = TORCHTITAN_ROWS, **more: Any
) -> list[RankRows]:
    shape = {"data_parallel_size": size, "micro_batch_rows": micro_batch, **more}
    return [RankRows(rows, dialect, data_parallel_rank=rank, **shape) for rank in range(size)]


def taken(ranks: list[RankRows], num_micro_steps: int | None = None) -> list[list[Tensor]]:
    """Return the tokens of each rank in every micro step."""
    iterators = [iter(rank) for rank in ranks]
    found = []
    while num_micro_steps is None or len(found) < num_micro_steps:
        batches = [next(iterator, None) for iterator in iterators]
        if None in batches:
            assert batches.count(None) == len(batches), "ranks end together"
            break
        found.append([batch["input"] for batch in batches if batch is not None])
    return found


@pytest.mark.parametrize(
    ("size", "micro_batch", "workers"), [(1, 1, 0), (2, 3, 0), (3, 2, 0), (4, 3, 0), (2, 2, 2)]
)
def test_steps_hold_the_same_rows_for_any_ranks_micro_batches_and_workers(
    corpus: IndexedDataset, size: int, micro_batch: int, workers: int
) -> None:
    rows = rows_of(corpus)
    found = taken(ranks_of(rows, size, micro_batch, num_workers=workers))
    assert len(found) == NUM_BLOCKS * BLOCK // size // micro_batch
    for k, micro_step in enumerate(found):
        numbers = range(k * size * micro_batch, (k + 1) * size * micro_batch)
        assert torch.equal(torch.cat(micro_step), rows.micro_batch(numbers)["tokens"])
        assert len({rows.bucket_of(i) for i in numbers}) == 1


def test_a_host_that_drops_columns_is_refused_before_training(tmp_path: Path) -> None:
    corpus = make_dataset(tmp_path, [20, 40, 7, 64, 100, 30] * 20)
    spec = ColumnSpec(dtype="uint8", shape=(6,))
    write_columns(corpus.prefix, {"experts": (spec, random_rows(spec, corpus.num_tokens))})
    rows = rows_of(corpus, columns=["experts"])
    with pytest.raises(ConfigError, match="torchtitan passes only its own keys to the model"):
        ranks_of(rows, 1, 1)
    (megatron,) = ranks_of(rows, 1, 2, MEGATRON)
    assert next(iter(megatron))["experts"].shape == (2, ROW, 6)


def test_state_resumes_on_other_ranks_and_is_equal_on_all(corpus: IndexedDataset) -> None:
    rows = rows_of(corpus)
    ranks = ranks_of(rows, 2, 3)
    before = taken(ranks, 4)  # two blocks
    states = [rank.state_dict() for rank in ranks]
    assert states[0] == states[1] and states[0]["consumed_rows"] == 2 * BLOCK
    assert set(states[0]) == {"consumed_rows", "program"}
    others = ranks_of(rows, 3, 2)
    for rank in others:
        rank.load_state_dict(json.loads(json.dumps(states[0])))
    tokens = torch.cat([part for step in before + taken(others) for part in step])
    assert torch.equal(tokens, rows.micro_batch(range(NUM_BLOCKS * BLOCK))["tokens"])


def test_state_inside_a_step_resumes_if_micro_steps_fit(
    corpus: IndexedDataset,
) -> None:
    rows = rows_of(corpus)
    (first,) = ranks_of(rows, 1, 3)
    taken([first], 2)
    (fits,) = ranks_of(rows, 1, 2)
    fits.load_state_dict(first.state_dict())
    assert torch.equal(taken([fits], 1)[0][0], rows.micro_batch([6, 7])["tokens"])
    (other,) = ranks_of(rows, 1, 4)
    with pytest.raises(ResumeError, match=r"6 rows are consumed.*a micro step takes 4 now"):
        other.load_state_dict(first.state_dict())


def test_state_of_other_rows_is_refused(corpus: IndexedDataset) -> None:
    (first,) = ranks_of(rows_of(corpus), 1, 3)
    taken([first], 1)
    (other,) = ranks_of(rows_of(corpus, seed=8), 1, 3)
    with pytest.raises(ResumeError, match="seed was 7 and is 8"):
        other.load_state_dict(first.state_dict())
    state = first.state_dict()
    for damaged in ({"consumed_rows": 3}, {**state, "consumed_rows": "x"}, {**state, "program": 7}):
        with pytest.raises(ResumeError, match=r"the saved state of the rows is damaged \("):
            first.load_state_dict(damaged)
    program = json.loads(state["program"])
    for changes in ({"step": None}, {"indices": 3}, {"data.content": 7}):
        with pytest.raises(ResumeError, match=r"the saved state of the data is damaged \("):
            first.load_state_dict({**state, "program": json.dumps(program | changes)})


def test_other_bytes_of_the_same_lengths_are_refused(
    corpus: IndexedDataset, tmp_path: Path
) -> None:
    (first,) = ranks_of(rows_of(corpus), 1, 3)
    state = first.state_dict()
    with IndexedDatasetBuilder(tmp_path / "other", corpus.dtype) as builder:
        builder.add_documents(corpus.tokens ^ 1, np.cumsum([0, *corpus.document_lengths]))
    (other,) = ranks_of(rows_of(IndexedDataset(tmp_path / "other")), 1, 3)
    with pytest.raises(ResumeError, match=r"data.content was .* and is .*former .* files$"):
        other.load_state_dict(state)


def test_stages_may_change_only_blocks_that_have_not_begun(
    corpus: IndexedDataset, caplog: pytest.LogCaptureFixture
) -> None:
    (first,) = ranks_of(rows_of(corpus), 1, 3)
    taken([first], 5)
    past, coming = (
        ranks_of(rows_of(corpus, stages=[{"from_step": step, "order": "uniform"}]), 1, 3)[0]
        for step in (1, 2)
    )
    with pytest.raises(ResumeError, match="order was 'proportional' and is 'uniform'"):
        past.load_state_dict(first.state_dict())
    coming.load_state_dict(first.state_dict())
    assert "from step 2 on order" in caplog.text


def test_sizes_that_do_not_divide_a_step_are_refused(corpus: IndexedDataset) -> None:
    with pytest.raises(ConfigError, match=r"12 rows, which is not a multiple of 5 ranks x 1 rows"):
        ranks_of(rows_of(corpus), 5, 1)


def test_attention_windows_are_refused_or_passed_on(corpus: IndexedDataset) -> None:
    windowed = rows_of(corpus, attention_window=8)
    for dialect in (TORCHTITAN, TORCHTITAN_ROWS):
        with pytest.raises(ConfigError, match=r"attention windows .*leave attention_window out"):
            ranks_of(windowed, 1, 1, dialect)
    (told,) = ranks_of(windowed, 1, 1, OLMO_CORE)
    batch = next(iter(told))
    assert batch["doc_lens"].max() <= 8 and batch["doc_lens"].sum() == ROW


class Model(nn.Module):
    """Every token sees the mean of its document so far; ``shift`` moves the documents' begins."""

    def __init__(self, shift: int = 0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(1000, 16)
        self.dropout = nn.Dropout(0.5)
        self.register_buffer("seen", torch.zeros(()))
        self.shift = shift

    def forward(self, told: dict[str, Any]) -> Tensor:
        self.seen += 1
        begins = (told["positions"] == 0).roll(self.shift)
        begins[0] = True
        of = begins.cumsum(0)
        sees = torch.tril(of[:, None] == of).float()
        states = self.dropout(self.embedding(told["input"]))
        logits = (sees @ states / sees.sum(1, keepdim=True)) @ self.embedding.weight.T
        labels = told["labels"].roll(getattr(self, "labels_moved", 0))
        return cross_entropy(logits, labels, reduction="none", ignore_index=-100)


def probe(ranks: RankRows, model: Model, arrived: dict[str, Any]) -> None:
    ranks.probe(model, arrived, consumed_rows=0, module=model)


def test_probe_restores_the_model(corpus: IndexedDataset, caplog: pytest.LogCaptureFixture) -> None:
    ranks, model = ranks_of(rows_of(corpus), 2, 3, TORCHTITAN)[1], Model()
    with caplog.at_level("INFO"):
        probe(ranks, model, next(iter(ranks)))
    assert "documents of a micro batch are kept apart: probed in" in caplog.text
    assert model.seen == 0 and model.training


def probed_on_mapped_cuda(corpus: IndexedDataset) -> None:
    on_cpu()
    ranks = ranks_of(rows_of(corpus), 1, 3, TORCHTITAN)[0]
    arrived = next(iter(ranks))
    probe(ranks, Model(), arrived)
    with pytest.raises(ConfigError, match=LEAK):
        probe(ranks, Model(1), arrived)


@pytest.mark.multiprocess
def test_probe_runs_where_tests_of_hosts_map_cuda_to_the_cpu(corpus: IndexedDataset) -> None:
    run_forked(probed_on_mapped_cuda, corpus)


def test_probe_refuses_moved_boundaries_and_labels(corpus: IndexedDataset) -> None:
    ranks = ranks_of(rows_of(corpus), 1, 3, TORCHTITAN)[0]
    arrived = next(iter(ranks))
    for shift in (-1, 1):
        with pytest.raises(ConfigError, match=LEAK):
            probe(ranks, Model(shift), arrived)
    moved = Model()
    moved.labels_moved = 1
    with pytest.raises(ConfigError, match="against the loss mask; this holds for"):
        probe(ranks, moved, arrived)


def test_probe_refuses_a_changed_micro_batch(corpus: IndexedDataset) -> None:
    ranks = ranks_of(rows_of(corpus), 1, 3, TORCHTITAN)[0]
    arrived = next(iter(ranks))
    arrived["labels"] = arrived["labels"].roll(1)
    with pytest.raises(ConfigError, match=rf"'labels' {CHANGED} .* \[0, 1, 2\]"):
        probe(ranks, Model(), arrived)


def test_the_rows_of_a_prefix_are_one_epoch(corpus: IndexedDataset, tmp_path: Path) -> None:
    options = RowOptions(sequence_length=ROW, rows_per_block=BLOCK, seed=1)
    rows = open_data_path(str(corpus.prefix), options, cache_directory=str(tmp_path))
    assert len(rows) == rows.rows_per_epoch and list(tmp_path.glob("*.samples"))
