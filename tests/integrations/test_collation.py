"""Micro batches of rows through torch's own DataLoader, with and without worker processes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, default_collate

from megapack.data.batch import ReusedBuffers
from megapack.integrations.manifest import Manifest, Source
from megapack.integrations.open_rows import open_rows, open_sources
from megapack.integrations.rows import RowDataset, RowOptions
from tests.integrations.samples import make_dataset

ROW = 64


@pytest.fixture
def rows(tmp_path: Path) -> RowDataset:
    make_dataset(tmp_path, [20, 40, 7, 64, 100, 30] * 40, "web")
    manifest = Manifest(sources=(Source(prefix=str(tmp_path / "web")),), buckets=(16, 32, 64))
    options = RowOptions(sequence_length=ROW, rows_per_block=8, seed=3)
    return open_rows(manifest, open_sources(manifest), options, num_rows=160)


# In order, across blocks of 8 rows, and backwards.
BATCHES = [[0, 1, 2, 3], [6, 7, 8, 9], [150, 20, 20, 3], [11], *([i, i + 1] for i in range(20, 80))]


@pytest.mark.parametrize(
    ("workers", "context"), [(0, None), (2, "fork"), (1, "spawn")], ids=["none", "fork", "spawn"]
)
def test_loaders_give_the_rows_stacked_whatever_their_workers(
    rows: RowDataset, workers: int, context: str | None
) -> None:
    loader = DataLoader(
        rows, batch_sampler=BATCHES, num_workers=workers, multiprocessing_context=context
    )
    batches = list(loader)  # all are held: none is filled again behind its holder's back
    assert len(batches) == len(BATCHES)
    for numbers, batch in zip(BATCHES, batches, strict=True):
        assert type(batch) is dict
        for key, value in batch.items():
            assert torch.equal(value, torch.stack([rows[i][key] for i in numbers])), key


def test_rows_that_are_no_whole_micro_batch_are_stacked(rows: RowDataset) -> None:
    first, second, third = rows.__getitems__([4, 5, 6])
    assert torch.equal(first["tokens"], rows[4]["tokens"]) and dict(first).keys() == rows[4].keys()
    for chosen in ([third, first], [first, rows.__getitems__([9])[0]], [second, third]):
        batch = default_collate(chosen)
        for key, value in batch.items():
            assert torch.equal(value, torch.stack([row[key] for row in chosen])), key


def test_memory_is_used_again_only_when_nobody_holds_a_tensor_of_it() -> None:
    pool = ReusedBuffers()
    first = pool.take(2, 8).shaped((2, 8))["tokens"]
    address = first.data_ptr()
    view = first[1]
    del first
    assert pool.take(2, 8)["tokens"].data_ptr() != address, "a view of it is held"
    del view
    addresses = {pool.take(2, 8)["tokens"].data_ptr() for _ in range(20)}
    assert len(addresses) <= 2, "and then it is free"
    held = [pool.take(2, 8)["tokens"] for _ in range(3 * ReusedBuffers.MAX_BLOCKS)]
    assert len({tensor.data_ptr() for tensor in held}) == len(held)
