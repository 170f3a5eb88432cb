"""Rows of one length for hosts with fixed shapes, in an order that suits their samplers.

A row of R tokens holds ``R // capacity`` samples of one bucket. A block of rows is one step of the
``Schedule``: its rows share a bucket, and have nearly the same attention work. If the ranks of a
host read consecutive rows, and the rows of a micro step divide the block, all ranks have the same
bucket at every micro step. A row is a pure function of (documents, options, seed, position), so a
host resumes from its count of consumed samples, on any number of ranks. A stage added on resume
changes no earlier row (the host saves a count, so nothing detects an edit of earlier stages).

A finite set (evaluation) has every sample once: with 5 samples of a bucket, in blocks of 2 rows of
2 samples, the first block has 4 samples; the second has a row with one sample and an empty row.
Missing samples are padding without labels, so all batches are full, and sums of losses and labels
stay exact.
"""

from __future__ import annotations

import abc
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
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

# ---- Micro batches through the host's DataLoader
# Hosts build loaders with default_collate and worker processes: default_collate stacks rows key by
# key, and every tensor is sent to the training process in its own shared memory, which takes
# several times as long as gathering. So the rows of a micro batch are views of stacked tensors,
# collating returns those tensors, and a worker sends only row numbers. The worker's read has loaded
# the files into memory; the training process (its pin_memory thread if any) gathers the rows again,
# without the GIL.


class GatheredRows(abc.ABC):
    """Base of datasets whose ``micro_batch`` stacks rows faster than default_collate."""

    _key: str

    @abc.abstractmethod
    def micro_batch(self, numbers: Sequence[int]) -> dict[str, Tensor]:
        """Return these rows stacked: ``(rows, ...)`` under every key."""

    def _register(self) -> None:
        # The training process looks the dataset up by this key when a worker sends row numbers.
        self._key = uuid4().hex  # unique across processes
        _datasets[self._key] = self

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        _datasets.setdefault(self._key, self)

    def __getitems__(self, numbers: Sequence[int]) -> list[GatheredRow]:
        """Return several rows, gathered at once (torch's DataLoader calls this method)."""
        gathered = _Gathered(self._key, numbers, self.micro_batch(numbers))
        return [GatheredRow(gathered, i) for i in range(len(numbers))]


class GatheredRow(Mapping[str, Tensor]):
    """One row of a micro batch: a mapping from keys to views of its tensors."""

    def __init__(self, micro_batch: _Gathered, i: int) -> None:
        self.micro_batch, self.i = micro_batch, i

    def __getitem__(self, key: str) -> Tensor:
        return self.micro_batch.batch[key][self.i]

    def __iter__(self) -> Iterator[str]:
        return iter(self.micro_batch.batch)

    def __len__(self) -> int:
        return len(self.micro_batch.batch)


class _Gathered:
    """A micro batch, pickled as row numbers; the process that unpickles it gathers it again."""

    def __init__(self, key: str, numbers: Sequence[int], batch: dict[str, Tensor]) -> None:
        self.key, self.numbers, self.batch = key, numbers, batch

    def __reduce__(self) -> Any:
        return _gather, (self.key, self.numbers)


def _gather(key: str, numbers: Sequence[int]) -> dict[str, Tensor]:
    dataset = _datasets.get(key)
    if dataset is None:
        raise RuntimeError("a DataLoader worker sent rows to a process that lacks their dataset")
    return dataset.micro_batch(numbers)


_datasets: weakref.WeakValueDictionary[str, GatheredRows] = weakref.WeakValueDictionary()


def _collate(rows: Sequence[GatheredRow], **_: Any) -> Any:
    """Collate rows: return their micro batch if they are all its rows, else stack them."""
    whole = rows[0].micro_batch
    same = all(row.micro_batch is whole for row in rows)
    if not same or [row.i for row in rows] != list(range(len(whole.numbers))):
        return {key: torch.stack([row[key] for row in rows]) for key in rows[0]}
    return whole.batch if get_worker_info() is None else whole


default_collate_fn_map[GatheredRow] = _collate


ROW_KEYS = ("tokens", "labels", "loss_mask", "position_ids")
BLOCKS_IN_MEMORY = 4
PREFETCHED_BATCHES = 2  # micro batches; only for object stores


@dataclass(frozen=True, kw_only=True)
class RowOptions:
    """Options of a host, in addition to its data path."""

    sequence_length: int  # tokens of a row
    rows_per_block: int
    """Consecutive rows of one bucket: a multiple of micro batch size x data-parallel size, for all
    sizes in use; usually the global batch size."""
    seed: int
    align: int = 1  # segments start at multiples of this number of tokens (see ``Manifest.align``)
    cu_seqlens: Literal["exact", "padded"] = "padded"
    """padded: repeat the last value up to ``sequence_length + 1`` entries."""

    def __post_init__(self) -> None:
        for name in ("sequence_length", "rows_per_block", "align"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be 1 or more")


class Block(NamedTuple):
    """Rows of one bucket, which are one step of the schedule."""

    step: Step
    places: NDArray[np.int64]
    """Indices into ``step.sample_ids``, (rows_per_block, row // capacity); -1: no sample."""


class RowDataset(GatheredRows, Dataset[dict[str, Tensor]]):
    """Rows of constant length in schedule order. Raises ConfigError for token weights.

    Args:
        order: order of buckets, a name of ``megapack.data.ORDERS``.
        num_rows: number of rows; None: one epoch, rounded up to a whole block.
        finite: every sample once, for any source weights; further rows are empty.
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
        self._register()
        self._connect()
        self.num_rows = self.rows_per_epoch if num_rows is None else num_rows

    def _connect(self) -> None:
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
        # Caches; a pin_memory thread uses them, too.
        self._block = lru_cache(BLOCKS_IN_MEMORY)(self._make_block)
        self._layout = cache(self._make_layout)
        self._buffers = ReusedBuffers(self.packed.columns)
        self._last_first_row = 0

    def __getstate__(self) -> dict[str, Any]:
        kept = ("packed", "options", "order", "finite", "num_rows", "_key")
        return {name: getattr(self, name) for name in kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._connect()

    def __len__(self) -> int:
        return self.num_rows

    def bucket_of(self, i: int) -> int:
        """Return the bucket of row ``i``; buckets are numbered by ascending capacity."""
        return self._block(self._check(i) // self.options.rows_per_block).step.bucket

    def samples_of(self, i: int) -> NDArray[np.int64]:
        """Return the sample ids of row ``i``, int64 (row // capacity,), fewer in a finite set."""
        block, within = divmod(self._check(i), self.options.rows_per_block)
        step, places = self._block(block)
        samples: NDArray[np.int64] = step.sample_ids[places[within][places[within] >= 0]]
        return samples

    def segments_of(self, i: int) -> list[tuple[int, list[tuple[int, int, int]]]]:
        """Return the source of every sample in row ``i`` with its segments (document, begin,
        length), without those of excluded documents."""
        view = self.schedule.stage_at(self._check(i) // self.options.rows_per_block).view
        samples = self.samples_of(i).tolist()
        return [self.packed.samples.segments(sample, view) for sample in samples]

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        """Return one row: tokens, labels (-100 for none), position_ids int64 and loss_mask float32,
        all ``(sequence_length,)``; cu_seqlens int32 from 0 to ``sequence_length``, in which the
        padding of a sample is a segment; max_seqlen 0-d int32; columns ``(sequence_length,
        *shape)``. With alignment also cu_seqlens_padded; cu_seqlens then excludes the padding
        between segments."""
        return {key: value[0] for key, value in self.micro_batch([i]).items()}

    def micro_batch(self, numbers: Sequence[int]) -> dict[str, Tensor]:
        """Return several rows, stacked: every key of ``[i]``, with rows as the first dimension."""
        numbers = [self._check(i) for i in numbers]
        if self.packed.remote_reads.any:
            self._prefetch(numbers)
        size = self.options.rows_per_block
        parts = [
            self._gather(block, [i - block * size for i in group])
            for block, group in groupby(numbers, lambda i: i // size)
        ]
        if len(parts) == 1:
            return parts[0]
        return {key: torch.cat([part[key] for part in parts]) for key in parts[0]}

    def _prefetch(self, numbers: list[int]) -> None:
        """Fetch the rows of the next micro batches from the object store in the background."""
        # The next micro batches of a rank are at equal distances.
        distance, self._last_first_row = numbers[0] - self._last_first_row, numbers[0]
        for times in range(PREFETCHED_BATCHES + 1):
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
        step, places = self._block(block)
        positions = places.take(within, axis=0).reshape(-1)
        if self.finite:
            # Samples must come before empty places: gather the rows in ascending order, then
            # reorder.
            if (np.diff(positions < 0) < 0).any():
                ascending, inverse = np.unique(within, return_inverse=True)
                rows = self._gather(block, ascending.tolist())
                return {key: value[inverse] for key, value in rows.items()}
            positions = positions[positions >= 0]
        layout = self._layout(len(within))
        batch = self.packed.micro_batch(
            step.sample_ids.take(positions),
            layout=layout,
            capacity=step.capacity,
            out=self._buffers.take(len(within), self.options.sequence_length),
            view=step.view.of(positions),
        )
        names = ["cu_seqlens"] if self.options.align == 1 else ["cu_seqlens", "cu_seqlens_padded"]
        rows = {name: batch[name] for name in (*ROW_KEYS, *self.packed.columns, *names)}
        return rows | {"max_seqlen": _longest(batch, names[-1])}

    def _make_layout(self, num_rows: int) -> BatchLayout:
        row = self.options.sequence_length
        return BatchLayout(
            micro_batch_tokens=num_rows * row,
            kind="rows",
            row_tokens=row,
            cu_seqlens=self.options.cu_seqlens,
            num_cu_seqlens=row + 1 if self.options.cu_seqlens == "padded" else None,
            cu_seqlens_per_row=True,
        )

    def _make_block(self, number: int) -> Block:
        step, size = self.schedule.step(number), self.options.rows_per_block
        num_samples = size * (self.options.sequence_length // step.capacity)
        if (missing := num_samples - len(step.sample_ids)) > 0:
            filled = np.arange(len(step.sample_ids))
            places = np.pad(filled, (0, missing), constant_values=-1).reshape(size, -1)
        else:
            costs = self.packed.samples.attention_cost(step.sample_ids, step.capacity, step.view)
            places = equal_groups(costs, num_samples // size)
        return Block(step, places)


def _refuse_weights(what: str, option: str) -> NoReturn:
    raise ConfigError(
        f"{what}, but a host that reads rows counts labels without weights: set {option}: "
        f"{'none' if option == 'token_weights' else 'token_mean'}, or train with megapack-pretrain "
        "or PackedTrainer"
    )


def _longest(batch: Batch, bounds: str) -> Tensor:
    """Return max_seqlen of every row, int32 (rows,)."""
    if len(batch[bounds]) == 1:
        # torch.tensor takes seven times as long.
        return torch.from_numpy(np.array([batch["max_seqlen"]], np.int32))
    ends = batch[bounds].numpy()
    return torch.from_numpy((ends[:, 1:] - ends[:, :-1]).max(axis=1))
