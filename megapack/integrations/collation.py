"""Micro batches through torch's DataLoader, whoever builds it.

Hosts build their loaders themselves, with default_collate and worker processes. That stacks rows
key by key, and every tensor of a worker crosses to the training process in shared memory of its
own, which takes several times as long as gathering a row. So the rows of a micro batch are views
of tensors that are stacked already, collating them gives those tensors back, and what leaves a
worker is the numbers of the rows: the worker has read them, so that their pages are in memory; the
training process, in its pin_memory thread where it has one, gathers them again without the GIL.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import get_worker_info
from torch.utils.data._utils.collate import default_collate_fn_map

__all__ = ["GathersRows", "LazyRow", "new_key", "rows_of"]


class GathersRows(Protocol):
    """A dataset that stacks rows better than default_collate can."""

    key: int
    """``new_key(self)``; pickled with the dataset."""

    def micro_batch(self, numbers: Sequence[int]) -> dict[str, Tensor]:
        """These rows, ``(rows, ...)`` under every key."""
        ...


class LazyRow(Mapping[str, Tensor]):
    """Row ``i`` of a micro batch: its keys, and views of its tensors when they are asked for."""

    def __init__(self, micro_batch: _Gathered, i: int) -> None:
        self.micro_batch, self.i = micro_batch, i

    def __getitem__(self, key: str) -> Tensor:
        return self.micro_batch.batch[key][self.i]

    def __iter__(self) -> Iterator[str]:
        return iter(self.micro_batch.batch)

    def __len__(self) -> int:
        return len(self.micro_batch.batch)


def rows_of(dataset: GathersRows, numbers: Sequence[int]) -> list[LazyRow]:
    """Rows of a dataset, gathered at once."""
    gathered = _Gathered(dataset.key, numbers, dataset.micro_batch(numbers))
    return [LazyRow(gathered, i) for i in range(len(numbers))]


class _Gathered:
    """A micro batch; in another process the same rows of the same dataset, gathered there."""

    def __init__(self, key: int, numbers: Sequence[int], batch: dict[str, Tensor]) -> None:
        self.key, self.numbers, self.batch = key, numbers, batch

    def __reduce__(self) -> Any:
        return _gather, (self.key, self.numbers)


def _gather(key: int, numbers: Sequence[int]) -> dict[str, Tensor]:
    dataset = _datasets.get(key)
    if dataset is None:
        raise RuntimeError("rows left a DataLoader's worker for a process without their dataset")
    return dataset.micro_batch(numbers)


_datasets: weakref.WeakValueDictionary[int, GathersRows] = weakref.WeakValueDictionary()
_keys = itertools.count()


def new_key(dataset: GathersRows) -> int:
    """By which this process finds the dataset again when a worker names its rows."""
    key = next(_keys)
    _datasets[key] = dataset
    return key


def _collate(rows: Sequence[LazyRow], **_: Any) -> Any:
    """``default_collate`` of rows: the micro batch whose rows they are, or a stack of them."""
    whole = rows[0].micro_batch
    if [row.i for row in rows] != list(range(len(whole.numbers))) or any(
        row.micro_batch is not whole for row in rows
    ):
        return {key: torch.stack([row[key] for row in rows]) for key in rows[0]}
    return whole.batch if get_worker_info() is None else whole


default_collate_fn_map[LazyRow] = _collate
