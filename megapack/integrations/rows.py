"""Rows of one length for hosts with fixed shapes, in an order that suits their samplers.

A row of R tokens holds ``R // capacity`` samples of one bucket. Rows come in blocks: a block is
one step of the ``Schedule``, so all its rows are of one bucket, and its samples are dealt to them
so that every row has nearly the same attention work. A host that takes consecutive rows, any number
at a time that divides the block, therefore has one bucket on all ranks at every micro step. The
row at a position is a pure function of (documents, options, seed, position): a host resumes by its
count of consumed samples, with any number of ranks.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from megapack.data import BatchLayout, PackedDataset, Schedule
from megapack.data.blend import open_blend
from megapack.data.dealing import equal_groups
from megapack.data.report import check_epochs, plan_run
from megapack.errors import ConfigError
from megapack.integrations.index_cache import Recipe, cached_index, is_first_rank
from megapack.integrations.manifest import Manifest, Source, default_buckets
from megapack.packing import SampleIndex
from megapack.storage import IndexedDataset

__all__ = ["RowDataset", "RowOptions", "open_rows", "open_sources"]

logger = logging.getLogger(__name__)

Row = dict[str, Tensor]

ROW_KEYS = ("tokens", "labels", "loss_mask", "position_ids")
BLOCKS_IN_MEMORY = 4


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


class RowDataset(Dataset[Row]):
    """Rows of constant length in schedule order.

    Args:
        packed: the samples.
        options: see ``RowOptions``.
        order: of buckets, a name of ``megapack.data.ORDERS``.
        num_rows: how many there are; None: one epoch, rounded up to a whole block.
    """

    def __init__(
        self,
        packed: PackedDataset,
        options: RowOptions,
        *,
        order: str = "proportional",
        num_rows: int | None = None,
    ) -> None:
        self.packed, self.options, self.order = packed, options, order
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
        )
        self.rows_per_epoch = self.schedule.num_steps(1) * self.options.rows_per_block
        self._blocks: OrderedDict[int, tuple[int, int, NDArray[np.int64]]] = OrderedDict()

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("packed", "options", "order", "num_rows")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._connect()

    def __len__(self) -> int:
        return self.num_rows

    def bucket_of(self, i: int) -> int:
        """Number of the bucket of row ``i``, by rising capacity."""
        return self._block(self._check(i) // self.options.rows_per_block)[0]

    def samples_of(self, i: int) -> NDArray[np.int64]:
        """Sample ids of row ``i``, int64 (row // capacity,), in their order in the row."""
        block, within = divmod(self._check(i), self.options.rows_per_block)
        samples: NDArray[np.int64] = self._block(block)[2][within]
        return samples

    def __getitem__(self, i: int) -> Row:
        """One row.

        Returns:
            tokens, labels (-100 where there is none), position_ids int64 and loss_mask float32,
            all ``(sequence_length,)``; cu_seqlens int32 from 0 to ``sequence_length``, a sample's
            padding its own segment; max_seqlen 0-d int32. With alignment cu_seqlens_padded too:
            cu_seqlens then counts tokens without the room between segments.
        """
        return self.__getitems__([i])[0]

    def __getitems__(self, numbers: Sequence[int]) -> list[Row]:
        """Several rows, those of one block gathered by one call (torch's DataLoader asks so)."""
        rows: list[Row] = []
        numbers = [self._check(i) for i in numbers]
        begin = 0
        while begin < len(numbers):
            block = numbers[begin] // self.options.rows_per_block
            end = begin
            while end < len(numbers) and numbers[end] // self.options.rows_per_block == block:
                end += 1
            first = block * self.options.rows_per_block
            rows += self._gather(block, [i - first for i in numbers[begin:end]])
            begin = end
        return rows

    def _check(self, i: int) -> int:
        number = i.__index__()
        if not 0 <= number < self.num_rows:
            raise IndexError(f"row {number} of {self.num_rows}")
        return number

    def _gather(self, block: int, within: list[int]) -> list[Row]:
        _, capacity, samples = self._block(block)
        row = self.options.sequence_length
        padded = self.options.cu_seqlens == "padded"
        layout = BatchLayout(
            micro_batch_tokens=len(within) * row,
            kind="rows",
            row_tokens=row,
            cu_seqlens=self.options.cu_seqlens,
            num_cu_seqlens=row + 1 if padded else None,
            cu_seqlens_per_row=True,
        )
        batch = self.packed.micro_batch(
            samples[within].reshape(-1), layout=layout, capacity=capacity
        )
        names = [*ROW_KEYS, "cu_seqlens"]
        if self.options.align > 1:
            names.append("cu_seqlens_padded")
        longest = batch[names[-1]].diff(dim=1).amax(dim=1).to(torch.int32)
        return [
            {name: batch[name][r] for name in names} | {"max_seqlen": longest[r]}
            for r in range(len(within))
        ]

    def _block(self, block: int) -> tuple[int, int, NDArray[np.int64]]:
        """(bucket, capacity, sample ids (rows_per_block, row // capacity)) of a block."""
        if block in self._blocks:
            return self._blocks[block]
        step = self.schedule.step(block)
        costs = self.packed.samples.attention_cost(step.sample_ids, step.capacity)
        rows = step.sample_ids[equal_groups(costs, len(costs) // self.options.rows_per_block)]
        self._blocks[block] = (step.bucket, step.capacity, rows)
        while len(self._blocks) > BLOCKS_IN_MEMORY:
            self._blocks.popitem(last=False)
        return self._blocks[block]


def open_sources(manifest: Manifest) -> list[IndexedDataset]:
    """The documents of a manifest, memory-mapped. Raises OSError or FormatError naming the file."""
    return [IndexedDataset(source.prefix) for source in manifest.sources]


def open_rows(
    manifest: Manifest,
    datasets: Sequence[IndexedDataset],
    options: RowOptions,
    *,
    split: tuple[float, float] = (0.0, 1.0),
    num_rows: int | None = None,
    cache_directory: str | Path | None = None,
) -> RowDataset:
    """Pack the sources of a manifest (or find them packed) and lay them out in rows.

    Args:
        manifest: sources and packing options; its seed, rows_per_block, align and cache_directory
            go before those of the host.
        datasets: ``open_sources(manifest)``.
        options: what the host asks for.
        split: part of every source's documents, as fractions; (0.99, 1.0) is the last percent.
        num_rows: see ``RowDataset``.
        cache_directory: of the host; None: ``megapack-cache`` beside the first source.

    Raises:
        ConfigError: options that exclude each other, a manifest with stages, or a split without
            documents.
        MegapackError, OSError: sources that cannot be read or packed.
    """
    if manifest.stages:
        raise ConfigError(
            f"the manifest has {len(manifest.stages)} stages, and rows for a host have one: leave "
            "them out, or train with launch/pretrain.py"
        )
    options = _overruled(options, manifest)
    where = manifest.cache_directory or cache_directory
    directory = Path(where or Path(datasets[0].prefix).parent / "megapack-cache")
    used = [
        (source, dataset, index)
        for source, dataset in zip(manifest.sources, datasets, strict=True)
        if (index := _index_of(source, dataset, manifest, options, split, directory)) is not None
    ]
    if not used:
        raise ConfigError(
            f"documents {split[0]:.4g} to {split[1]:.4g} of "
            f"{', '.join(source.prefix for source in manifest.sources)} hold no tokens; change "
            "--split"
        )
    sources, documents, indices = zip(*used, strict=True)
    packed = open_blend(
        sources, documents, indices, max_epochs=manifest.max_epochs, alignment=options.align
    )
    rows = RowDataset(packed, options, order=manifest.order, num_rows=num_rows)
    num_blocks = -(-len(rows) // options.rows_per_block)
    check_epochs(rows.schedule, num_blocks)
    if is_first_rank():
        logger.info(
            "blocks of %d rows:\n%s", options.rows_per_block, plan_run(rows.schedule, num_blocks)
        )
    return rows


def _index_of(
    source: Source,
    dataset: IndexedDataset,
    manifest: Manifest,
    options: RowOptions,
    split: tuple[float, float],
    directory: Path,
) -> SampleIndex | None:
    """The samples of one source's split, None where it has no tokens."""
    begin, end = (round(part * dataset.num_documents) for part in split)
    if begin == end:
        return None
    if source.index is not None:
        return _index_given(source, options, whole=(begin, end) == (0, dataset.num_documents))
    buckets = manifest.buckets or default_buckets(options.sequence_length, options.align)
    if max(buckets) > options.sequence_length:
        raise ConfigError(
            f"bucket {max(buckets)} is longer than the host's sequence length "
            f"{options.sequence_length}; raise --seq-length or drop the bucket"
        )
    recipe = Recipe(
        begin=begin,
        end=end,
        strategy=manifest.strategy,
        parameters=manifest.parameters,
        buckets=tuple(buckets),
        seed=options.seed,
        align=options.align,
    )
    index = cached_index(dataset, recipe, directory, node_local=manifest.node_local)
    return index if index.num_samples else None


def _index_given(source: Source, options: RowOptions, *, whole: bool) -> SampleIndex:
    """The .samples that a source names."""
    if not whole:
        raise ConfigError(
            f"source {source.prefix!r} names index {source.index}, which has all its documents, "
            "and the host asks for a part: give one split all of them (--split 100,0,0), or leave "
            "out index"
        )
    assert source.index is not None
    index = SampleIndex.load(source.index)
    if index.parameters.get("alignment", 1) % options.align:
        raise ConfigError(
            f"index {source.index} has no room for segments at multiples of {options.align}: pack "
            f"it with --alignment {options.align}, or leave out index"
        )
    return index


def _overruled(options: RowOptions, manifest: Manifest) -> RowOptions:
    """What the manifest says, where it says something."""
    given = {name: getattr(manifest, name) for name in ("seed", "rows_per_block", "align")}
    return replace(options, **{name: v for name, v in given.items() if v is not None})
