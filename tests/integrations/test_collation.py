"""Micro batches of rows through torch's own DataLoader, with and without worker processes."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, default_collate

from megapack.data.batch import Buffers, ReusedBuffers
from megapack.integrations.rows import dataset as integration
from megapack.integrations.rows.dataset import RowDataset, RowOptions
from megapack.integrations.rows.open_rows import Manifest, Source, open_data_path
from megapack.storage.columns import ColumnSpec
from tests.data.corpora import bytes_of, random_rows, write_columns
from tests.integrations.samples import make_dataset

ROW = 64


@pytest.fixture
def rows(tmp_path: Path) -> RowDataset:
    lengths = [20, 40, 7, 64, 100, 30] * 40
    make_dataset(tmp_path, lengths, "web")
    specs = {
        "ids": ColumnSpec(dtype="uint32", shape=(3,), of="target"),
        "logits": ColumnSpec(dtype="bfloat16", shape=(2, 2)),
    }
    columns = {name: (spec, random_rows(spec, sum(lengths))) for name, spec in specs.items()}
    write_columns(tmp_path / "web", columns)
    manifest = Manifest(
        sources=(Source(prefix=str(tmp_path / "web")),),
        buckets=(16, 32, 64),
        columns=("ids", "logits"),
    )
    options = RowOptions(sequence_length=ROW, rows_per_block=8, seed=3)
    return open_data_path(manifest, options, num_rows=160)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (a.dtype, a.shape, bytes_of(a)) == (b.dtype, b.shape, bytes_of(b))


# In order, across blocks of 8 rows, and backwards.
BATCHES = [[0, 1, 2, 3], [6, 7, 8, 9], [150, 20, 20, 3], [11], *([i, i + 1] for i in range(20, 80))]


@pytest.mark.parametrize("workers", [0, 2])
def test_loaders_stack_rows_with_any_number_of_workers(rows: RowDataset, workers: int) -> None:
    loader = DataLoader(rows, batch_sampler=BATCHES, num_workers=workers)
    batches = list(loader)  # all are held: none is filled again behind its holder's back
    assert len(batches) == len(BATCHES)
    for numbers, batch in zip(BATCHES, batches, strict=True):
        assert type(batch) is dict
        for key, value in batch.items():
            assert same_bits(value, torch.stack([rows[i][key] for i in numbers])), key


def test_rows_of_different_micro_batches_are_stacked(rows: RowDataset) -> None:
    first, second, third = rows.__getitems__([4, 5, 6])
    assert torch.equal(first["tokens"], rows[4]["tokens"]) and dict(first).keys() == rows[4].keys()
    for chosen in ([third, first], [first, rows.__getitems__([9])[0]], [second, third]):
        batch = default_collate(chosen)
        for key, value in batch.items():
            assert same_bits(value, torch.stack([row[key] for row in chosen])), key


def test_rows_of_a_spawned_worker_are_gathered_from_the_right_dataset(
    rows: RowDataset,
) -> None:
    of_worker = pickle.loads(pickle.dumps(rows)).__getitems__([4, 5])[0].micro_batch
    batch = pickle.loads(pickle.dumps(of_worker))
    assert torch.equal(batch["tokens"], rows.micro_batch([4, 5])["tokens"])


def test_rows_of_a_dataset_from_another_process_are_not_mixed_up(
    rows: RowDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a training process is spawned with a dataset, and opens another one itself."""
    sent = pickle.dumps(rows)
    monkeypatch.setattr(integration, "_datasets", type(integration._datasets)())
    options = replace(rows.options, seed=4)
    other, copied = RowDataset(rows.packed, options, num_rows=160), pickle.loads(sent)
    for dataset in (copied, other):
        (batch,) = DataLoader(dataset, batch_sampler=[[0, 1, 2, 3]], num_workers=1)
        assert torch.equal(batch["tokens"], dataset.micro_batch(range(4))["tokens"])
    assert not torch.equal(copied[0]["tokens"], other[0]["tokens"])


VIEWS: dict[str, Callable[[Buffers], Any]] = {
    "tensor": lambda buffers: buffers["labels"],
    "array": lambda buffers: buffers.arrays["loss_mask"],
    "shaped": lambda buffers: buffers.shaped((2, 8))["tokens"],
    "slice of a slice": lambda buffers: buffers.shaped((2, 8))["position_ids"][1][2:4][:1],
    "slice of an array": lambda buffers: buffers.arrays["labels"][3:][:2][::2],
    "other dtype": lambda buffers: buffers.arrays["tokens"].view(np.uint8)[5:],
    "tensor of a slice": lambda buffers: torch.from_numpy(buffers.arrays["tokens"][4:]).view(2, 6),
    "array of a tensor": lambda buffers: buffers["tokens"][1].numpy()[2:],
    "memoryview": lambda buffers: memoryview(buffers.arrays["labels"])[1:],
    "detached": lambda buffers: buffers["loss_mask"].view(-1).detach()[:1],
    "all": lambda buffers: buffers,
}


@pytest.mark.parametrize("name", VIEWS)
def test_buffers_are_reused_only_without_views(name: str) -> None:
    pool = ReusedBuffers()
    buffers = pool.take(2, 8)
    memory = range(buffers["tokens"].data_ptr(), buffers["loss_mask"].data_ptr() + 2 * 8 * 4)
    view = VIEWS[name](buffers)
    del buffers
    for _ in range(10):
        assert pool.take(2, 8)["tokens"].data_ptr() not in memory, "a view of it is held"
    del view
    held = [pool.take(2, 8) for _ in range(2)]
    assert any(b["tokens"].data_ptr() in memory for b in held), "and then it is free"


def test_buffers_in_use_are_never_shared_and_few_are_kept() -> None:
    pool = ReusedBuffers()
    held = [pool.take(2, 8)["tokens"] for _ in range(3 * ReusedBuffers.MAX_BLOCKS)]
    addresses = {tensor.data_ptr() for tensor in held}
    assert len(addresses) == len(held)
    del held
    again = [pool.take(2, 8)["tokens"] for _ in range(ReusedBuffers.MAX_BLOCKS)]
    assert {tensor.data_ptr() for tensor in again} <= addresses
    first = pool.take(4, 8)["tokens"]
    del pool
    first.fill_(7)  # its memory outlives the pool
    assert (first == 7).all()


def test_threads_share_a_buffer_pool() -> None:
    pool = ReusedBuffers()

    def work(number: int) -> bool:
        for _ in range(300):
            tokens = pool.take(2, 64)["tokens"]
            tokens.fill_(number)
            if not (tokens == number).all():
                return False
        return True

    with ThreadPoolExecutor(6) as threads:
        assert all(threads.map(work, range(6)))
