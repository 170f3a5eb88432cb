"""The shape of a micro batch: rows or one stream, and how its segments are listed.

- ``MicroBatch``, ``BatchLayout``: which samples, in which shape. ``Batch``: the tensors.
- ``longest_position``: how far position ids reach.
- ``cut_bounds``, ``cut_lengths``: segments cut at multiples of an attention window.
- ``cut_slice``: one rank's part of a micro batch that several share.
- ``segment_ids``, ``block_diagonal_mask``, ``flex_block_mask``: for models that take masks.
- ``Buffers``, ``allocate``, ``ReusedBuffers``: memory that is filled again and again.

    BatchLayout(micro_batch_tokens=64, kind="rows", row_tokens=32).rows(capacity=16)  # -> (2, 32)
    slot_tokens(capacity=10, row_tokens=32)                        # -> 10 10 12
    segment_ids(torch.tensor([0, 2, 5]), num_tokens=5)             # -> 0 0 1 1 1
    cut_bounds(Bounds([0, 5, 8], ...), window=4).cu_seqlens        # -> 0 4 5 8
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from megapack import _core
from megapack.config import check_positive, whole_numbers
from megapack.data.steps import StepView
from megapack.errors import ConfigError
from megapack.packing.sharded import SourceIndex

# tokens, labels, loss_mask, position_ids, cu_seqlens, ... and plain ints
Batch: TypeAlias = dict[str, Any]

# In this order in shared memory: the wide ones first, so that all are aligned.
_DTYPES = {
    "tokens": torch.int64,
    "labels": torch.int64,
    "position_ids": torch.int64,
    "loss_mask": torch.float32,
}


_NUMPY = {name: torch.empty(0, dtype=dtype).numpy().dtype for name, dtype in _DTYPES.items()}


class Imbalance(NamedTuple):
    """Largest over mean attention work of the ranks; 1.0 is perfect."""

    attention: float
    """As assigned."""
    attention_in_order: float
    """If the samples were assigned in the order of the schedule."""


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """One forward of one rank: which samples, and where in the run it stands.

    It is also a sequence of sample ids, which is what torch's DataLoader asks of a batch sampler.

    Attributes:
        sample_ids: (samples,) int64, global ids; fewer than fit where ranks are uneven.
        capacity: tokens per sample.
        bucket: number of the bucket.
        step, micro_step, num_micro_steps: position in the run; micro steps count from 0.
        num_step_label_tokens: tokens with a label in the whole step, over all ranks.
        imbalance: of attention work over the ranks, for this draw.
        source: (samples,) int64, number of the source (dataset) of every sample.
        view: what the step requires of these samples.
        step_label_weight: divisor of the sum of losses times loss masks: the sum of the loss mask
            over the whole step and all ranks; None: ``num_step_label_tokens``.
        sequence_parallel_size: ranks that share this micro batch, each a slice of its tokens.
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
        """Return facts that travel with the tensors of the batch."""
        left_out = ("view", "sequence_parallel_size")
        about = {name: value for name, value in vars(self).items() if name not in left_out}
        about["imbalance"], about["imbalance_in_order"] = self.imbalance
        about["attention_window"] = self.view.window
        arrays = {name: torch.from_numpy(about[name]) for name in ("sample_ids", "source")}
        return {name: value for name, value in about.items() if value is not None} | arrays


@dataclass(frozen=True, kw_only=True)
class BatchLayout:
    """How samples are laid out in a micro batch.

    Attributes:
        micro_batch_tokens: tokens of a micro batch, padding included; the same for every bucket.
        kind: ``stream``: one row (1, micro_batch_tokens); ``rows``: (rows, row_tokens).
        row_tokens: tokens per row, ``row_tokens // capacity`` samples in each, which begin at equal
            distances (``ScheduleConfig.row_tokens``); None: the capacity, one sample per row. A
            fixed number gives rows of one shape whatever the bucket.
        cu_seqlens: ``exact``, or ``padded`` with their last value to a fixed number of entries.
        num_cu_seqlens: that number; None: what the fullest micro batch of the bucket needs.
        cu_seqlens_per_row: (rows, entries) that count from the row's begin, as Megatron has them,
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
        if self.kind not in ("stream", "rows"):
            raise ConfigError(f"layout is {self.kind!r}; it must be 'stream' or 'rows'")
        if self.cu_seqlens not in ("exact", "padded"):
            raise ConfigError(f"cu_seqlens is {self.cu_seqlens!r}; it is 'exact' or 'padded'")
        if self.row_tokens is not None and self.micro_batch_tokens % self.row_tokens:
            raise ConfigError(
                f"row_tokens {self.row_tokens} does not divide micro_batch_tokens "
                f"{self.micro_batch_tokens}"
            )

    def rows(self, capacity: int) -> tuple[int, int]:
        """(number of rows, tokens per row) for samples of ``capacity`` tokens."""
        row = self.row_tokens or capacity
        if capacity > row or self.micro_batch_tokens % row:
            raise ConfigError(
                f"a micro batch of {self.micro_batch_tokens} tokens in rows of {row} cannot hold "
                f"samples of {capacity}: make row_tokens a divisor of micro_batch_tokens and at "
                f"least {capacity}, or micro_batch_tokens a multiple of {capacity}"
            )
        return self.micro_batch_tokens // row, row

    def num_samples(self, capacity: int) -> int:
        """Samples of ``capacity`` tokens in a full micro batch."""
        rows, row = self.rows(capacity)
        return rows * (row // capacity)

    def most_entries(self, indices: Sequence[SourceIndex], capacity: int, *, whole: bool) -> int:
        """Entries of a list of cu_seqlens that are enough for every micro batch of a bucket.

        Args:
            indices: those without this bucket are passed over.
            capacity: of the bucket, tokens.
            whole: samples are one segment each.
        """
        rows, row = self.rows(capacity)
        slots = row // capacity * (1 if self.cu_seqlens_per_row else rows)
        of_each = [
            most
            for index in indices
            for size, most in zip(index.bucket_capacity.tolist(), index.most_segments, strict=True)
            if size == capacity
        ]
        most = 1 if whole else max(of_each, default=0)
        return slots * (most + 1) + 1  # the padding of a sample is a segment

    def listed(self, values: NDArray[np.int32], rows: int) -> torch.Tensor:
        """Entries of cu_seqlens as a tensor: one list, or one per row."""
        tensor = torch.from_numpy(values)
        return tensor.view(rows, -1) if self.cu_seqlens_per_row else tensor


def slot_tokens(capacity: int, row_tokens: int, alignment: int = 1) -> list[int]:
    """Tokens of the slots of a row, one sample each; a sample begins where its slot does.

    As ``csrc/core/gather/plan.cpp`` cuts it: slots are equal, what does not divide is the last's.
    """
    slots = row_tokens // capacity
    slot = row_tokens // slots // alignment * alignment
    return [*[slot] * (slots - 1), row_tokens - (slots - 1) * slot]


def longest_position(
    indices: Sequence[SourceIndex], *, positions: str = "segment", row_tokens: int | None = None
) -> int:
    """Return the most positions of a segment, tokens: the largest position id plus 1.

    Padding counts, too: in a sample that is almost empty it is as long as the sample.

    Args:
        indices: of all sources.
        positions: as of ``PackedDataset``.
        row_tokens: as of ``BatchLayout``.
    """
    longest = 0
    for index in indices:
        for capacity in index.bucket_capacity.tolist():
            slots = slot_tokens(capacity, max(row_tokens or capacity, capacity))
            longest = max(longest, slots[-1])
        if positions == "document":
            longest = max(longest, index.longest_reach)
    return longest


class Bounds(NamedTuple):
    """Where the segments of a micro batch begin and end, as the gather tells it."""

    cu_seqlens: NDArray[np.int32]
    """Lists one behind the other, each ascending from 0; a repeated last value is no segment."""
    cu_seqlens_padded: NDArray[np.int32] | None
    """The same with the room behind every segment, where segments are aligned."""
    dataset_ids: NDArray[np.int32]
    """Source of every segment, -1 for padding."""
    max_seqlen: int
    """The longest segment with its room, tokens."""


def cut_bounds(bounds: Bounds, window: int, *, num_rows: int = 1, entries: int = 0) -> Bounds:
    """Boundaries of segments cut at multiples of a window from where each begins.

    Args:
        bounds: of whole segments.
        window: tokens, at least 1; a multiple of the alignment keeps it.
        num_rows: lists in cu_seqlens, of equally many entries.
        entries: fill every list with its last value to so many; 0: to those of the longest.

    Raises:
        ValueError: a list has more than ``entries``, or the window is no number of tokens.
    """
    check_positive("micro batch", attention_window=window)
    lengths = np.diff(bounds.cu_seqlens.reshape(num_rows, -1)).astype(np.int64)
    rooms = lengths
    if bounds.cu_seqlens_padded is not None:
        rooms = np.diff(bounds.cu_seqlens_padded.reshape(num_rows, -1)).astype(np.int64)
    row, _ = np.nonzero(rooms)
    lengths, rooms = lengths[rooms > 0], rooms[rooms > 0]
    counts = np.maximum(1, -(-lengths // window))
    segment = np.repeat(np.arange(len(counts)), counts)
    place = _places(counts)
    room = np.where(place == counts[segment] - 1, rooms[segment] - place * window, window)
    per_list = np.bincount(row[segment], minlength=num_rows)
    most = int(per_list.max()) + 1
    if entries and most > entries:
        raise ValueError(
            f"an attention window of {window} makes {most} entries of cu_seqlens, and there is "
            f"room for {entries}: raise num_cu_seqlens, or leave it out"
        )
    steps = np.zeros((2, num_rows, entries or most), np.int64)
    steps[:, row[segment], _places(per_list) + 1] = (
        np.minimum(lengths[segment] - place * window, window),
        room,
    )
    cut, padded = np.cumsum(steps, axis=2).astype(np.int32).reshape(2, -1)
    return Bounds(
        cu_seqlens=cut,
        cu_seqlens_padded=None if bounds.cu_seqlens_padded is None else padded,
        dataset_ids=bounds.dataset_ids[segment],
        max_seqlen=int(room.max()),
    )


def _places(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """0 .. count - 1 of every group, one behind the other."""
    return np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)


def cut_lengths(lengths: NDArray[np.int64], window: int | None) -> NDArray[np.int64]:
    """Lengths of the pieces of segments of these lengths, in any order; None cuts nothing."""
    if window is None:
        return lengths
    rest = lengths % window
    whole = np.full(int((lengths // window).sum()), window, np.int64)
    return np.concatenate([whole, rest[rest > 0]])


def cut_slice(batch: Batch, rank: int, size: int) -> Batch:
    """One rank's part of a shared micro batch.

    Args:
        batch: a stream; its tokens divide by ``size``.
        rank: of the group.
        size: of the group.

    Returns:
        ``tokens``, ``labels``, ``loss_mask`` and ``position_ids`` as (1, tokens / size); cu_seqlens
        and max_seqlen are those of the whole; and ``sequence_parallel_rank``,
        ``sequence_parallel_size``.
    """
    length = batch["tokens"].shape[1] // size
    begin = rank * length
    return {
        **batch,
        **{name: batch[name][:, begin : begin + length] for name in _DTYPES},
        "sequence_parallel_rank": rank,
        "sequence_parallel_size": size,
    }


# ---- Masks follow from cu_seqlens alone and run on its device; none loops over segments ---------


def segment_ids(cu_seqlens: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """Number of the segment that every token lies in.

    Args:
        cu_seqlens: int32 (entries,), or (rows, entries) counted from each row's begin; fill at the
            end is harmless.
        num_tokens: tokens of the stream, or of a row.

    Returns:
        int32 (num_tokens,) or (rows, num_tokens), counted from 0 in every row.
    """
    positions = torch.arange(num_tokens, dtype=torch.int32, device=cu_seqlens.device)
    ends = cu_seqlens[..., 1:].contiguous()
    positions = positions.expand(*ends.shape[:-1], num_tokens).contiguous()
    return torch.searchsorted(ends, positions, right=True, out_int32=True)


def block_diagonal_mask(segments: torch.Tensor, *, causal: bool = True) -> torch.Tensor:
    """Dense mask in which a token sees its own segment.

    Args:
        segments: of ``segment_ids``, (tokens,) or (rows, tokens).
        causal: and only what stands before it, itself included.

    Returns:
        bool (rows, 1, tokens, tokens), True where attention is allowed (as torch's
        scaled_dot_product_attention has it; Megatron's masks are the inverse). Quadratic in
        memory: for short rows and for checking other backends.
    """
    rows = segments if segments.dim() == 2 else segments[None]
    mask = rows[:, :, None] == rows[:, None, :]
    if causal:
        mask = mask.tril()
    return mask[:, None]


def flex_block_mask(segments: torch.Tensor, *, causal: bool = True, **options: Any) -> Any:
    """The same as a BlockMask of ``torch.nn.attention.flex_attention``.

    Args:
        segments: of ``segment_ids``, (tokens,) or (rows, tokens).
        causal: as above.
        **options: of ``create_block_mask``, such as ``BLOCK_SIZE``.
    """
    from torch.nn.attention.flex_attention import create_block_mask  # noqa: PLC0415 (torch >= 2.5)

    rows = segments if segments.dim() == 2 else segments[None]

    def visible(b: Any, h: Any, q: Any, k: Any) -> Any:  # noqa: ARG001
        same = rows[b, q] == rows[b, k]
        return same & (q >= k) if causal else same

    tokens = rows.shape[1]
    return create_block_mask(
        visible, rows.shape[0], None, tokens, tokens, device=str(rows.device), **options
    )


class Buffers(dict[str, torch.Tensor]):
    """Memory of one micro batch: flat tensors by name, to be filled again and again."""

    def __init__(
        self, tensors: Mapping[str, torch.Tensor], arrays: dict[str, NDArray[Any]] | None = None
    ) -> None:
        super().__init__(tensors)
        self.arrays = arrays or {name: tensor.numpy() for name, tensor in tensors.items()}
        self._shaped: dict[tuple[int, ...], dict[str, torch.Tensor]] = {}

    def shaped(self, shape: tuple[int, int]) -> dict[str, torch.Tensor]:
        """Views of that shape."""
        if shape not in self._shaped:
            self._shaped[shape] = {
                name: tensor if tensor.shape == shape else tensor.view(shape)
                for name, tensor in self.items()
            }
        return self._shaped[shape]


def allocate(num_tokens: int, *, pin_memory: bool = False) -> Buffers:
    """New buffers for micro batches of ``num_tokens`` tokens."""
    return Buffers(
        {
            name: torch.empty(num_tokens, dtype=dtype, pin_memory=pin_memory)
            for name, dtype in _DTYPES.items()
        }
    )


class ReusedBuffers:
    """Buffers whose memory is filled again when nobody holds an array or tensor of it any more.

    New memory costs several times what is written into it: the kernel clears it page by page. At
    most ``MAX_BLOCKS`` blocks that nobody holds are kept. Threads may share it: a loader's
    pin_memory thread gathers, too.
    """

    MAX_BLOCKS = 8

    def __init__(self) -> None:
        self._pool = _core.MemoryPool(self.MAX_BLOCKS)

    def take(self, rows: int, row_tokens: int) -> Buffers:
        """Buffers of that shape, not cleared."""
        num_tokens = rows * row_tokens
        arrays, begin = {}, 0
        block = self._pool.take(num_tokens * sum(d.itemsize for d in _NUMPY.values()))
        for name, dtype in _NUMPY.items():
            end = begin + num_tokens * dtype.itemsize
            arrays[name] = block[begin:end].view(dtype)  # which keeps the block
            begin = end
        shape = (rows, row_tokens)
        # A tensor keeps the array that it was made from.
        tensors = {name: torch.from_numpy(flat.reshape(shape)) for name, flat in arrays.items()}
        return Buffers(tensors, arrays)
