"""Shape of a micro batch: rows or one stream, and the boundaries of its segments.

- ``MicroBatch``, ``BatchLayout``: samples and shape. ``Batch``: the tensors.
- ``longest_position``: upper bound of position ids.
- ``cut_bounds``, ``cut_lengths``: segments cut at multiples of an attention window.
- ``cut_slice``: one rank's part of a micro batch that several ranks share.
- ``mtp_targets``: targets of multi-token prediction.
- ``Buffers``, ``allocate``, ``ReusedBuffers``: memory of batches, tensors or numpy arrays.
- ``column_names``, ``per_token``: the columns of a batch, and all its tensors per token.

    BatchLayout(micro_batch_tokens=64, kind="rows", row_tokens=32).rows(capacity=16)  # -> (2, 32)
    last_slot(capacity=10, row_tokens=32)                          # -> 12, after 10 and 10
    cut_bounds(Bounds([0, 5, 8], ...), window=4).cu_seqlens        # -> 0 4 5 8
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from megapack import _core
from megapack.calls import checked_call
from megapack.config import check_positive, whole_numbers
from megapack.data.steps import StepView
from megapack.errors import ConfigError
from megapack.packing.sharded import SourceIndex
from megapack.storage.columns import RESERVED, ColumnSpec

# tokens, labels, loss_mask, position_ids, cu_seqlens, ... and plain ints
Batch: TypeAlias = dict[str, Any]

Framework: TypeAlias = Literal["torch", "numpy"]
"""Arrays of a batch: torch's tensors, or numpy's arrays, for which torch is not imported."""
PER_TOKEN = {"tokens": "int64", "labels": "int64", "position_ids": "int64", "loss_mask": "float32"}
"""Tensors of every batch with a number per token, and their dtypes."""
MTP_TARGETS = ("mtp_labels", "mtp_loss_mask")  # with ``num_mtp_targets``


class Imbalance(NamedTuple):
    """Largest over mean attention work of the ranks; 1.0 is perfect."""

    attention: float
    """Imbalance of the actual assignment."""
    attention_in_order: float
    """Imbalance if the samples were assigned in schedule order."""


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """Samples of one forward pass of one rank, and its position in the run.

    It is also a sequence of sample ids, as torch's DataLoader expects from a batch sampler.

    Attributes:
        sample_ids: (samples,) int64, global ids; may be fewer than fit with ``pad_last``.
        capacity: tokens per sample.
        bucket: number of the bucket.
        step, micro_step, num_micro_steps: position in the run; micro steps are numbered from 0.
        num_step_label_tokens: tokens with a label in the whole step, over all ranks.
        imbalance: imbalance of attention work over the ranks, for this draw.
        source: (samples,) int64, number of the source (dataset) of every sample.
        view: requirements of the step on these samples.
        step_label_weight: divisor of the sum of losses times loss masks: the sum of the loss mask
            over the whole step and all ranks; None: ``num_step_label_tokens``.
        sequence_parallel_size: number of ranks that share this micro batch.
    """

    sample_ids: NDArray[np.int64]
    capacity: int
    bucket: int
    step: int
    micro_step: int
    num_micro_steps: int
    num_step_label_tokens: int
    imbalance: Imbalance
    source: NDArray[np.int64]
    view: StepView
    step_label_weight: float | None
    sequence_parallel_size: int = 1

    def __len__(self) -> int:
        return len(self.sample_ids)

    def __iter__(self) -> Iterator[int]:
        return iter(self.sample_ids.tolist())

    def __getitem__(self, i: int) -> int:
        return int(self.sample_ids[i])

    @property
    def gathered_by(self) -> dict[str, Any]:
        """Arguments of ``PackedDataset.micro_batch``, without the layout."""
        return {"sample_ids": self.sample_ids, "capacity": self.capacity, "view": self.view}

    def about(self) -> Batch:
        """Return the entries of the batch that are not gathered."""
        fields: Batch = dict(vars(self))
        fields["imbalance"], fields["imbalance_in_order"] = self.imbalance
        fields["attention_window"] = self.view.window
        del fields["view"], fields["sequence_parallel_size"]
        return {name: value for name, value in fields.items() if value is not None}


@checked_call
@dataclass(frozen=True, kw_only=True)
class BatchLayout:
    """Layout of the samples in a micro batch.

    Attributes:
        micro_batch_tokens: tokens of a micro batch, padding included; the same for every bucket.
        kind: ``stream``: one row (1, micro_batch_tokens); ``rows``: (rows, row_tokens).
        row_tokens: tokens per row, with ``row_tokens // capacity`` samples at equal distances
            (``ScheduleConfig.row_tokens``); None: the capacity, one sample per row. With a fixed
            number, rows have the same shape in all buckets.
        cu_seqlens: ``exact``, or ``padded`` with their last value to a fixed number of entries.
        num_cu_seqlens: number of entries; None: enough for every micro batch of the bucket.
        cu_seqlens_per_row: one list per row (rows, entries) that starts at 0 (as in Megatron),
            instead of one list over all rows.
    """

    micro_batch_tokens: int
    kind: Literal["stream", "rows"] = "stream"
    row_tokens: int | None = None
    cu_seqlens: Literal["exact", "padded"] = "exact"
    num_cu_seqlens: int | None = None
    cu_seqlens_per_row: bool = False

    def __post_init__(self) -> None:
        names = ("micro_batch_tokens", "row_tokens", "num_cu_seqlens")
        whole_numbers("layout", self, *names, above=0)
        if self.row_tokens is not None and self.micro_batch_tokens % self.row_tokens:
            raise ConfigError(
                f"row_tokens {self.row_tokens} does not divide micro_batch_tokens "
                f"{self.micro_batch_tokens}"
            )

    def rows(self, capacity: int) -> tuple[int, int]:
        """Return (number of rows, tokens per row) for samples of ``capacity`` tokens."""
        row = self.row_tokens or capacity
        if capacity > row or self.micro_batch_tokens % row:
            raise ConfigError(
                f"a micro batch of {self.micro_batch_tokens} tokens in rows of {row} cannot hold "
                f"samples of {capacity}: make row_tokens a divisor of micro_batch_tokens and at "
                f"least {capacity}, or micro_batch_tokens a multiple of {capacity}"
            )
        return self.micro_batch_tokens // row, row

    def num_samples(self, capacity: int) -> int:
        """Return the number of samples of ``capacity`` tokens in a full micro batch."""
        rows, row = self.rows(capacity)
        return rows * (row // capacity)

    def most_entries(self, indices: Sequence[SourceIndex], capacity: int, *, whole: bool) -> int:
        """Return the maximum number of entries of a list of cu_seqlens in a batch of a bucket.

        Args:
            indices: indices of all sources, with or without this bucket.
            capacity: capacity of the bucket, tokens.
            whole: True if each sample is one segment.
        """
        rows, row = self.rows(capacity)
        slots = row // capacity * (1 if self.cu_seqlens_per_row else rows)
        num_segments = [
            most
            for index in indices
            for size, most in zip(index.bucket_capacity.tolist(), index.most_segments, strict=True)
            if size == capacity
        ]
        most = 1 if whole else max(num_segments, default=0)
        return slots * (most + 1) + 1  # the padding of a sample is a segment

    def listed(self, values: NDArray[np.int32], rows: int) -> NDArray[np.int32]:
        """Return entries of cu_seqlens in one list, or in one per row."""
        return values.reshape(rows, -1) if self.cu_seqlens_per_row else values


def last_slot(capacity: int, row_tokens: int) -> int:
    """Return the tokens of the last slot of a row; slots hold one sample each and are equal, but
    the last one also has the remainder, as in ``csrc/core/gather/plan.cpp``."""
    slots = row_tokens // capacity
    return row_tokens - (slots - 1) * (row_tokens // slots)


def longest_position(
    indices: Sequence[SourceIndex], *, positions: str = "segment", row_tokens: int | None = None
) -> int:
    """Return the maximum number of positions of a segment or of padding (largest id plus 1).

    Args:
        indices: indices of all sources.
        positions: see ``PackedDataset``.
        row_tokens: see ``BatchLayout``.
    """
    longest = 0
    for index in indices:
        for capacity in index.bucket_capacity.tolist():
            longest = max(longest, last_slot(capacity, max(row_tokens or capacity, capacity)))
        if positions == "document":
            longest = max(longest, index.longest_reach)
    return longest


class Bounds(NamedTuple):
    """Boundaries of the segments of a micro batch."""

    cu_seqlens: NDArray[np.int32]
    """Consecutive lists, each ascending from 0; repeated last values fill a list."""
    cu_seqlens_padded: NDArray[np.int32] | None
    """The same including the padding after every segment, if segments are aligned."""
    dataset_ids: NDArray[np.int32]
    """Source of every segment, -1 for padding."""
    max_seqlen: int
    """The longest segment with its padding, tokens."""
    trees: tuple[NDArray[np.int32], ...] | None = None
    """cu_seqlens_k, kv_index and predecessors of prefix trees."""


def cut_bounds(bounds: Bounds, window: int, *, num_rows: int = 1, entries: int = 0) -> Bounds:
    """Return the boundaries of segments cut at multiples of a window from their start.

    Args:
        bounds: boundaries of whole segments.
        window: tokens, at least 1; a multiple of the alignment.
        num_rows: number of lists in cu_seqlens, of equal length.
        entries: repeat the last value of every list up to this length; 0: the longest list's.

    Raises:
        ValueError: a list has more than ``entries``, or the window is not positive.
    """
    check_positive("micro batch", attention_window=window)
    lengths = np.diff(bounds.cu_seqlens.reshape(num_rows, -1)).astype(np.int64)
    padded_lengths = lengths
    if bounds.cu_seqlens_padded is not None:
        padded_lengths = np.diff(bounds.cu_seqlens_padded.reshape(num_rows, -1)).astype(np.int64)
    row, _ = np.nonzero(padded_lengths)
    lengths, padded_lengths = lengths[padded_lengths > 0], padded_lengths[padded_lengths > 0]
    counts = np.maximum(1, -(-lengths // window))
    segment = np.repeat(np.arange(len(counts)), counts)
    piece = within_groups(counts)
    begin = piece * window
    # The last piece of a segment includes the segment's padding.
    is_last = piece == counts[segment] - 1
    padded_piece = np.where(is_last, padded_lengths[segment] - begin, window)
    per_list = np.bincount(row[segment], minlength=num_rows)
    most = int(per_list.max()) + 1
    if entries and most > entries:
        raise ValueError(
            f"an attention window of {window} makes {most} entries of cu_seqlens, but there is "
            f"room for {entries}: raise num_cu_seqlens, or leave it out"
        )
    steps = np.zeros((2, num_rows, entries or most), np.int64)
    pieces = np.minimum(lengths[segment] - begin, window)
    steps[:, row[segment], within_groups(per_list) + 1] = pieces, padded_piece
    cut, padded = np.cumsum(steps, axis=2).astype(np.int32).reshape(2, -1)
    return Bounds(
        cu_seqlens=cut,
        cu_seqlens_padded=None if bounds.cu_seqlens_padded is None else padded,
        dataset_ids=bounds.dataset_ids[segment],
        max_seqlen=int(padded_piece.max()),
    )


def tree_entries(bounds: Bounds) -> Batch:
    """Return the entries of a batch of prefix trees that describe nodes and paths, with the names
    of ``megapack.data.trees``. Padding is a root."""
    assert bounds.trees is not None, "attention is not tree"
    cu_seqlens_k, kv_index, predecessors = bounds.trees
    return {
        "cu_seqlens_q": bounds.cu_seqlens,
        "cu_seqlens_k": cu_seqlens_k,
        "kv_index": kv_index,
        "predecessors": predecessors.astype(np.int64),
        "max_seqlen_q": bounds.max_seqlen,
        "max_seqlen_k": int(np.diff(cu_seqlens_k).max()),
    }


def within_groups(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return 0 .. count - 1 for every group, concatenated."""
    return np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)


def cut_lengths(lengths: NDArray[np.int64], window: int | None) -> NDArray[np.int64]:
    """Return the lengths of the pieces of segments, in any order; window None cuts nothing."""
    if window is None:
        return lengths
    remainders = lengths % window
    whole = np.full(int((lengths // window).sum()), window, np.int64)
    return np.concatenate([whole, remainders[remainders > 0]])


def column_names(batch: Mapping[str, Any]) -> list[str]:
    """Return the keys of a batch that are columns: a column cannot have a name of megapack's."""
    return [name for name in batch if name not in RESERVED]


def per_token(batch: Mapping[str, Any]) -> list[str]:
    """Return the keys whose tensors have a value per token: (rows, R) and perhaps more."""
    targets = [name for name in MTP_TARGETS if name in batch]
    return [*PER_TOKEN, *targets, *column_names(batch)]


def cut_slice(batch: Batch, rank: int, size: int) -> Batch:
    """Return one rank's part of a shared micro batch.

    Args:
        batch: a stream; ``size`` divides its number of tokens.
        rank, size: rank in the group, and size of the group.

    Returns:
        ``tokens``, ``labels``, ``loss_mask`` and ``position_ids`` as (1, tokens / size), columns as
        (1, tokens / size, ...); cu_seqlens and max_seqlen of the whole; and
        ``sequence_parallel_rank``, ``sequence_parallel_size``.
    """
    length = batch["tokens"].shape[1] // size
    begin = rank * length
    return {
        **batch,
        **{name: batch[name][:, begin : begin + length] for name in per_token(batch)},
        "sequence_parallel_rank": rank,
        "sequence_parallel_size": size,
    }


# ---- Targets of multi-token prediction ----------------------------------------------------------
#
# A model with multi-token prediction predicts at position i not only token i + 1, the label, but at
# depth d also token i + 1 + d (DeepSeek-AI, *DeepSeek-V3*, 2024, section 2.2). That is the label of
# position i + d, if this position belongs to the same segment. Two documents of 4 and 2 tokens, of
# which the first continues with tokens 9 and 10 in another sample:
#
#     tokens          5  6  7  8 | 1  2
#     labels          6  7  8  9 | 2  -
#     depth 1         7  8  9  - | -  -      token 10 is known, but depth 1 at position 8 would need
#     depth 2         8  9  -  - | -  -      the embedding of token 9, which is not in the batch
#
# A target is missing (-100, weight 0) where its label is missing: beyond the end of a document, in
# padding, and where column ``labels`` has none. A target has the loss weight of its label.

NO_LABEL = -100


def check_targets(num_targets: int, options: Mapping[str, Any]) -> None:
    """Raise ConfigError if batches with these options (of ``PackedDataset``) do not show where
    documents are cut, so that targets could belong to another document."""
    attention, positions = options["attention"], options["positions"]
    if not num_targets or attention == "document":
        return
    boundary = options["label_boundary"]
    if attention != "sample" or boundary != "document" or positions != "segment":
        raise ConfigError(
            f"num_mtp_targets is {num_targets}, with attention: {attention}, label_boundary: "
            f"{boundary} and positions: {positions}, where batches do not show the ends of all "
            "documents: choose attention: document (or sample, with label_boundary: document and "
            "positions: segment)"
        )


def mtp_targets(batch: Batch, num_targets: int, *, attention: str) -> Batch:
    """Return ``mtp_labels`` int64 and ``mtp_loss_mask`` float32, (rows, R, depths 1, 2, ...).

    Args:
        batch: whole rows or a whole stream, gathered with options that ``check_targets`` accepts.
        attention: ``document``; or ``sample``, in which documents begin at position id 0.
    """
    labels, loss_mask = np.asarray(batch["labels"]), np.asarray(batch["loss_mask"])
    segments = _segments(batch)
    if attention == "sample":
        restarts = np.cumsum(np.asarray(batch["position_ids"]) == 0).reshape(labels.shape)
        # A window cuts segments between two restarts. Both numbers ascend, so their sum is unique.
        segments = segments + restarts
    targets = np.full((*labels.shape, num_targets), NO_LABEL, labels.dtype)
    weights = np.zeros(targets.shape, loss_mask.dtype)
    for depth in range(1, min(num_targets, labels.shape[1] - 1) + 1):
        inside = segments[:, depth:] == segments[:, :-depth]
        targets[:, :-depth, depth - 1] = np.where(inside, labels[:, depth:], NO_LABEL)
        weights[:, :-depth, depth - 1] = np.where(inside, loss_mask[:, depth:], 0)
    return dict(zip(MTP_TARGETS, (targets, weights), strict=True))


def _segments(batch: Batch) -> NDArray[np.int64]:
    """Return a number for the segment of every token, (rows, R); it ascends within a row."""
    # Aligned segments begin at their padded boundaries.
    ends = np.asarray(batch.get("cu_seqlens_padded", batch["cu_seqlens"]))
    rows, row_tokens = batch["labels"].shape
    if ends.ndim == 2:  # counted in each row
        ends = ends + row_tokens * np.arange(rows)[:, None]
    is_end = np.bincount(ends.reshape(-1), minlength=rows * row_tokens)
    return np.cumsum(is_end[: rows * row_tokens]).reshape(rows, row_tokens)


# ---- Memory --------------------------------------------------------------------------------------

Columns: TypeAlias = Mapping[str, ColumnSpec]


class _Field(NamedTuple):
    """An array of a batch. C++ reads columns as bytes."""

    name: str
    dtype: str  # torch's name
    numpy_dtype: np.dtype[Any]
    shape: tuple[int, ...]  # of a token's row
    is_column: bool

    @property
    def token_bytes(self) -> int:
        return math.prod(self.shape) * self.numpy_dtype.itemsize


def _fields(columns: Columns) -> list[_Field]:
    """Return the arrays of a batch: wide types first, so that all are aligned in one block."""
    fields = [_Field(name, dtype, np.dtype(dtype), (), False) for name, dtype in PER_TOKEN.items()]
    for name, spec in columns.items():
        fields.append(_Field(name, spec.dtype, spec.numpy_dtype, spec.shape, True))
    return sorted(fields, key=lambda field: -field.numpy_dtype.itemsize)


_PLAIN_FIELDS = _fields({})


@cache  # an import statement per batch would cost a microsecond
def wrapper(framework: Framework) -> Callable[[NDArray[Any]], Any]:
    """Return the function that turns numpy's arrays into those of a batch, without a copy."""
    if framework == "numpy":
        return lambda array: array
    try:
        from torch import from_numpy  # noqa: PLC0415 (other frameworks do without torch)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ModuleNotFoundError(
            "a batch consists of tensors, and torch is not installed: install the torch build "
            "that you want (pip install torch), or give PackedDataset framework='numpy'",
            name="torch",
        ) from None
    return from_numpy


class Buffers(dict[str, Any]):
    """Memory of one micro batch: tensors (or numpy arrays) by name, reused for several batches.

    Args:
        tensors: by name, with the same leading dimensions.
        arrays: the same memory for C++, flat: bytes for columns, else numbers.
        columns: the columns among them.
        num_leading: number of leading dimensions.
    """

    def __init__(
        self,
        tensors: Mapping[str, Any],
        arrays: dict[str, NDArray[Any]],
        columns: Columns,
        num_leading: int,
    ) -> None:
        super().__init__(tensors)
        self.arrays, self.columns, self._leading = arrays, columns, num_leading
        # An argument for C++, if there are columns.
        self.column_arrays = ([arrays[name] for name in columns],) if columns else ()
        self._shaped: dict[tuple[int, ...], dict[str, Any]] = {}

    def shaped(self, shape: tuple[int, int]) -> dict[str, Any]:
        """Return views of the given shape."""
        if shape not in self._shaped:
            leading, first = self._leading, next(iter(self.values()))
            if first.shape[:leading] == shape:  # so they all have it
                self._shaped[shape] = dict(self)
                return self._shaped[shape]
            shaped = {}
            for name, tensor in self.items():
                # torch's view is faster than its reshape; numpy's view is another function.
                reshape = tensor.reshape if isinstance(tensor, np.ndarray) else tensor.view
                shaped[name] = reshape(*shape, *tensor.shape[leading:])
            self._shaped[shape] = shaped
        return self._shaped[shape]


def allocate(
    num_tokens: int,
    *,
    columns: Columns | None = None,
    pin_memory: bool = False,
    framework: Framework = "torch",
) -> Buffers:
    """Return new buffers for micro batches of ``num_tokens`` tokens, and for columns
    (``PackedDataset.columns``). numpy has no bfloat16: such a column has its bits, uint16."""
    tensors: dict[str, Any] = {}
    arrays = {}
    fields = _fields(columns) if columns else _PLAIN_FIELDS
    if framework == "numpy":
        for name, _, numpy_dtype, shape, is_column in fields:
            tensors[name] = array = np.empty((num_tokens, *shape), numpy_dtype)
            arrays[name] = array.reshape(-1).view(np.uint8) if is_column else array
        return Buffers(tensors, arrays, columns or {}, 1)
    import torch  # noqa: PLC0415

    for name, dtype, _, shape, is_column in fields:
        kind = getattr(torch, dtype)
        tensors[name] = tensor = torch.empty(num_tokens, *shape, dtype=kind, pin_memory=pin_memory)
        arrays[name] = (tensor.view(-1).view(torch.uint8) if is_column else tensor).numpy()
    return Buffers(tensors, arrays, columns or {}, 1)


class ReusedBuffers:
    """Tensors or arrays whose memory is reused once nothing refers to it. Safe to share between
    threads. New memory costs several times what is written into it: the kernel clears it page by
    page. At most ``MAX_BLOCKS`` free blocks are kept."""

    MAX_BLOCKS = 8

    def __init__(self, columns: Columns | None = None) -> None:
        self._pool = _core.MemoryPool(self.MAX_BLOCKS)
        self._columns = columns or {}
        self._fields = [(field, field.token_bytes) for field in _fields(self._columns)]
        self._token_bytes = sum(token_bytes for _, token_bytes in self._fields)

    def take(self, rows: int, row_tokens: int) -> Buffers:
        """Return buffers of the given shape, not cleared."""
        import torch  # noqa: PLC0415

        num_tokens = rows * row_tokens
        tensors, arrays, begin = {}, {}, 0
        block = self._pool.take(num_tokens * self._token_bytes)
        for (name, dtype, numpy_dtype, shape, is_column), token_bytes in self._fields:
            end = begin + num_tokens * token_bytes
            # A tensor keeps a reference to its array, and the array to the block.
            array = block[begin:end]
            if is_column:
                numbers = torch.from_numpy(array).view(getattr(torch, dtype))
                tensors[name] = numbers.view(rows, row_tokens, *shape)
            else:
                array = array.view(numpy_dtype)
                tensors[name] = torch.from_numpy(array.reshape(rows, row_tokens))
            arrays[name] = array
            begin = end
        return Buffers(tensors, arrays, self._columns, 2)
