"""Rows of one length for hosts with fixed shapes, in an order that suits their samplers.

A row of R tokens holds ``R // capacity`` samples of one bucket. Rows come in blocks: a block is
one step of the ``Schedule``, so all its rows are of one bucket, and its samples are dealt to them
so that every row has nearly the same attention work. A host that takes consecutive rows, any number
at a time that divides the block, therefore has one bucket on all ranks at every micro step. The
row at a position is a pure function of (documents, options, seed, position): a host resumes by its
count of consumed samples, with any number of ranks.

A finite set (evaluation) has every sample once: of 5 samples of a bucket, in blocks of 2 rows of 2,
the first block has 4, the second a row of one and a row of none. Where there is no sample there is
padding without a label, so batches and ranks divide and whoever adds up losses and labels has those
of the documents one by one.

Stages of a manifest count blocks. One that is added when the host resumes leaves all rows before it
as they were; the host keeps a count and not the program, so nobody notices an edited past.
"""

from __future__ import annotations

import abc
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal, NamedTuple, NoReturn
from uuid import uuid4

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset, get_worker_info
from torch.utils.data._utils.collate import default_collate_fn_map

from megapack.data import BatchLayout, PackedDataset, Schedule
from megapack.data.batch import Batch, ReusedBuffers
from megapack.data.sampler import equal_groups, refuse_token_weights
from megapack.data.schedule import Step
from megapack.errors import ConfigError

# ---- Micro batches through torch's DataLoader, whoever builds it --------------------------------
# Hosts build their loaders themselves, with default_collate and worker processes. That stacks rows
# key by key, and every tensor of a worker crosses to the training process in shared memory of its
# own, which takes several times as long as gathering a row. So the rows of a micro batch are views
# of tensors that are stacked already, collating them gives those tensors back, and what leaves a
# worker is the numbers of the rows: the worker has read them, so that their pages are in memory;
# the training process, in its pin_memory thread where it has one, gathers them again without the
# GIL.


class GatheredRows(abc.ABC):
    """For a dataset that stacks rows (``micro_batch``) better than default_collate can."""

    _key: str

    @abc.abstractmethod
    def micro_batch(self, numbers: Sequence[int]) -> dict[str, Tensor]:
        """These rows, ``(rows, ...)`` under every key."""

    def _remember(self) -> None:
        """This process finds the dataset again when a worker names its rows."""
        self._key = uuid4().hex  # of no other dataset, whichever process has made it
        _datasets[self._key] = self

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        _datasets.setdefault(self._key, self)

    def __getitems__(self, numbers: Sequence[int]) -> list[GatheredRow]:
        """Several rows, gathered at once and collated for nothing (torch's DataLoader asks so)."""
        gathered = _Gathered(self._key, numbers, self.micro_batch(numbers))
        return [GatheredRow(gathered, i) for i in range(len(numbers))]


class GatheredRow(Mapping[str, Tensor]):
    """One row of a micro batch: its keys, and views of its tensors when they are asked for."""

    def __init__(self, micro_batch: _Gathered, i: int) -> None:
        self.micro_batch, self.i = micro_batch, i

    def __getitem__(self, key: str) -> Tensor:
        return self.micro_batch.batch[key][self.i]

    def __iter__(self) -> Iterator[str]:
        return iter(self.micro_batch.batch)

    def __len__(self) -> int:
        return len(self.micro_batch.batch)


class _Gathered:
    """A micro batch; in another process the same rows of the same dataset, gathered there."""

    def __init__(self, key: str, numbers: Sequence[int], batch: dict[str, Tensor]) -> None:
        self.key, self.numbers, self.batch = key, numbers, batch

    def __reduce__(self) -> Any:
        return _gather, (self.key, self.numbers)


def _gather(key: str, numbers: Sequence[int]) -> dict[str, Tensor]:
    dataset = _datasets.get(key)
    if dataset is None:
        raise RuntimeError("rows left a DataLoader's worker for a process without their dataset")
    return dataset.micro_batch(numbers)


_datasets: weakref.WeakValueDictionary[str, GatheredRows] = weakref.WeakValueDictionary()


def _collate(rows: Sequence[GatheredRow], **_: Any) -> Any:
    """``default_collate`` of rows: the micro batch whose rows they are, or a stack of them."""
    whole = rows[0].micro_batch
    if [row.i for row in rows] != list(range(len(whole.numbers))) or any(
        row.micro_batch is not whole for row in rows
    ):
        return {key: torch.stack([row[key] for row in rows]) for key in rows[0]}
    return whole.batch if get_worker_info() is None else whole


default_collate_fn_map[GatheredRow] = _collate


ROW_KEYS = ("tokens", "labels", "loss_mask", "position_ids")
BLOCKS_IN_MEMORY = 4
TAKES_AHEAD = 2  # of rows in object stores


@dataclass(frozen=True, kw_only=True)
class RowOptions:
    """What a host asks for, beside its data path."""

    sequence_length: int
    """Tokens of a row."""
    rows_per_block: int
    """Consecutive rows of one bucket: a multiple of every micro batch size x data-parallel size in
    use; mostly the global batch size."""
    seed: int
    align: int = 1
    """Segments start at multiples of this (see ``Manifest.align``)."""
    cu_seqlens: Literal["exact", "padded"] = "padded"
    """Padded: filled with their last value to ``sequence_length + 1`` entries."""

    def __post_init__(self) -> None:
        for name in ("sequence_length", "rows_per_block", "align"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be 1 or more")


class Block(NamedTuple):
    """Rows of one bucket: a step of the schedule."""

    step: Step
    places: NDArray[np.int64]
    """Positions in ``step.sample_ids``, (rows_per_block, row // capacity); -1: no sample."""


class RowDataset(GatheredRows, Dataset[dict[str, Tensor]]):
    """Rows of constant length in schedule order.

    Args:
        packed: the samples.
        options: see ``RowOptions``.
        order: of buckets, a name of ``megapack.data.ORDERS``.
        num_rows: how many there are; None: one epoch, rounded up to a whole block.
        finite: every sample once, whatever the weights; what is missing to ``num_rows`` is empty.

    Raises:
        ConfigError: samples have loss weights per token, which hosts cannot be told.
    """

    def __init__(
        self,
        packed: PackedDataset,
        options: RowOptions,
        *,
        order: str = "proportional",
        num_rows: int | None = None,
        finite: bool = False,
    ) -> None:
        refuse_token_weights(packed.samples, _refuse_weights)
        self.packed, self.options, self.order, self.finite = packed, options, order, finite
        self._remember()
        self._connect()
        self.num_rows = self.rows_per_epoch if num_rows is None else num_rows

    def _connect(self) -> None:
        """What follows from the rest and is not pickled."""
        row = self.options.sequence_length
        self.schedule = Schedule(
            self.packed,
            tokens_per_step=self.options.rows_per_block * row,
            seed=self.options.seed,
            order=self.order,
            row_tokens=row,
            finite=self.finite,
        )
        self.rows_per_epoch = self.schedule.num_steps(1) * self.options.rows_per_block
        self._blocks: OrderedDict[int, Block] = OrderedDict()
        self._layouts: dict[int, BatchLayout] = {}
        self._buffers = ReusedBuffers()
        self._asked = 0

    def __getstate__(self) -> dict[str, Any]:
        kept = ("packed", "options", "order", "finite", "num_rows", "_key")
        return {name: getattr(self, name) for name in kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._connect()

    def __len__(self) -> int:
        return self.num_rows

    def bucket_of(self, i: int) -> int:
        """Number of the bucket of row ``i``, by rising capacity."""
        return self._block(self._check(i) // self.options.rows_per_block).step.bucket

    def samples_of(self, i: int) -> NDArray[np.int64]:
        """Sample ids of row ``i``, int64 (row // capacity,), in their order in the row; fewer
        where a finite set ends."""
        block, within = divmod(self._check(i), self.options.rows_per_block)
        step, places = self._block(block)
        samples: NDArray[np.int64] = step.sample_ids[places[within][places[within] >= 0]]
        return samples

    def segments_of(self, i: int) -> list[tuple[int, list[tuple[int, int, int]]]]:
        """Of every sample of row ``i`` its source and its segments (document, begin, length), but
        those of documents that are masked."""
        view = self.schedule.stage_at(self._check(i) // self.options.rows_per_block).view
        samples = self.samples_of(i).tolist()
        return [self.packed.samples.segments(sample, view) for sample in samples]

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        """One row.

        Returns:
            tokens, labels (-100 where there is none), position_ids int64 and loss_mask float32,
            all ``(sequence_length,)``; cu_seqlens int32 from 0 to ``sequence_length``, a sample's
            padding its own segment; max_seqlen 0-d int32. With alignment cu_seqlens_padded too:
            cu_seqlens then counts tokens without the room between segments.
        """
        return {key: value[0] for key, value in self.micro_batch([i]).items()}

    def micro_batch(self, numbers: Sequence[int]) -> dict[str, Tensor]:
        """Several rows, stacked: every key of ``[i]`` with the rows as its first dimension."""
        numbers = [self._check(i) for i in numbers]
        if self.packed.remote_reads.any:
            self._fetch_ahead(numbers)
        size = self.options.rows_per_block
        parts = [
            self._gather(block, [i - block * size for i in group])
            for block, group in groupby(numbers, lambda i: i // size)
        ]
        if len(parts) == 1:
            return parts[0]
        return {key: torch.cat([part[key] for part in parts]) for key in parts[0]}

    def _fetch_ahead(self, numbers: list[int]) -> None:
        """Hosts take rows at equal distances; what they take next is on its way meanwhile."""
        distance, self._asked = numbers[0] - self._asked, numbers[0]
        for times in range(TAKES_AHEAD + 1):
            rows = [i + times * distance for i in numbers]
            if distance >= 0 and rows[-1] < self.num_rows:
                self.packed.remote_reads.prefetch(
                    np.concatenate([self.samples_of(i) for i in rows])
                )

    def _check(self, i: int) -> int:
        number = i.__index__()
        if not 0 <= number < self.num_rows:
            raise IndexError(f"row {number} of {self.num_rows}")
        return number

    def _gather(self, block: int, within: list[int]) -> dict[str, Tensor]:
        """Rows of one block."""
        step, places = self._block(block)
        positions = places[within].reshape(-1)
        if self.finite:
            # A sample after an empty place: gather the rows in their order, then pick them.
            if (np.diff(positions < 0) < 0).any():
                distinct, back = np.unique(within, return_inverse=True)
                rows = self._gather(block, distinct.tolist())
                return {key: value[back] for key, value in rows.items()}
            positions = positions[positions >= 0]
        layout = self._layout(len(within))
        batch = self.packed.micro_batch(
            step.sample_ids[positions],
            layout=layout,
            capacity=step.capacity,
            out=self._buffers.take(len(within), self.options.sequence_length),
            view=step.view.of(positions),
        )
        names = ["cu_seqlens"] if self.options.align == 1 else ["cu_seqlens", "cu_seqlens_padded"]
        rows = {name: batch[name] for name in (*ROW_KEYS, *names)}
        return rows | {"max_seqlen": _longest(batch, names[-1])}

    def _layout(self, num_rows: int) -> BatchLayout:
        if num_rows not in self._layouts:
            row = self.options.sequence_length
            self._layouts[num_rows] = BatchLayout(
                micro_batch_tokens=num_rows * row,
                kind="rows",
                row_tokens=row,
                cu_seqlens=self.options.cu_seqlens,
                num_cu_seqlens=row + 1 if self.options.cu_seqlens == "padded" else None,
                cu_seqlens_per_row=True,
            )
        return self._layouts[num_rows]

    def _block(self, block: int) -> Block:
        found = self._blocks.get(block)
        if found is not None:  # a loader's pin_memory thread gathers, too, and drops blocks
            return found
        step, size = self.schedule.step(block), self.options.rows_per_block
        num_samples = size * (self.options.sequence_length // step.capacity)
        if (missing := num_samples - len(step.sample_ids)) > 0:
            here = np.arange(len(step.sample_ids))
            places = np.pad(here, (0, missing), constant_values=-1).reshape(size, -1)
        else:
            costs = self.packed.samples.attention_cost(step.sample_ids, step.capacity, step.view)
            places = equal_groups(costs, num_samples // size)
        found = self._blocks[block] = Block(step, places)
        while len(self._blocks) > BLOCKS_IN_MEMORY:
            self._blocks.popitem(last=False)
        return found


def _refuse_weights(what: str, option: str) -> NoReturn:
    raise ConfigError(
        f"{what}, and a host of rows counts its labels in whole numbers: say {option}: "
        f"{'none' if option == 'token_weights' else 'token_mean'}, or train with megapack-pretrain "
        "or PackedTrainer"
    )


def _longest(batch: Batch, bounds: str) -> Tensor:
    """max_seqlen of every row, int32 (rows,)."""
    if len(batch[bounds]) == 1:
        return torch.tensor([batch["max_seqlen"]], dtype=torch.int32)
    ends = batch[bounds].numpy()
    return torch.from_numpy((ends[:, 1:] - ends[:, :-1]).max(axis=1))
