"""Rows for GPT-NeoX and Megatron-DeepSpeed: ``text``, ``label`` and extra keys.

- ``build_text_rows``: a data path and a split -> ``TextRowDataset``.
- ``hand_over_boundaries``: replaces host functions so boundaries, positions, mask reach the model.
- ``EvaluationLoss``: finite validation and test sets, with a loss that is a mean over all labels.
- ``split_bounds``, ``manifest_of_list``, ``shared_rows``: parsers of the hosts' arguments.

Both hosts read ``sequence_length + 1`` tokens and shift them to get inputs and labels. Rows have
either labels (``label``, -100 = none) or, where the host has no such key, a mask that drops labels
that differ from the next token of the row (``megapack.integrations.dialects``).
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import Dataset

from megapack.errors import ConfigError
from megapack.integrations import dialects
from megapack.integrations.dialects import BOUNDARIES, MASK, POSITIONS, Dialect
from megapack.integrations.host import Rebinding
from megapack.integrations.rows.dataset import RowDataset, RowOptions
from megapack.integrations.rows.open_rows import MANIFEST_SUFFIXES, Manifest, open_data_path

# ---- Boundaries for hosts that have no argument for them: GPT-NeoX and Megatron-DeepSpeed
# Their batches have only ``text``, and their attention treats a row as one sequence. megapack wraps
# three kinds of functions: ``broadcast_data`` also sends boundaries, positions and loss mask to all
# tensor-parallel ranks; ``get_ltor_masks_and_position_ids`` returns that mask and those positions;
# and flash-attn's functions attend segment by segment.
#
# The wrappers share the current micro batch in a global variable. So its forward pass,
# recomputation and backward pass must end before the next one is read: ``require_one_stage``
# refuses longer pipelines.

SPLITS = ("train", "valid", "test")
SIDE_KEYS = (BOUNDARIES, POSITIONS, MASK)  # keys of a sample in addition to "text"


@dataclass
class CurrentBatch:
    """Data of the current micro batch that the host's functions have no argument for."""

    cu_seqlens: Tensor  # int32 (segments + 1,), of all rows joined, on the device
    max_seqlen: int
    position_ids: Tensor  # int64 (mbs, row)
    loss_mask: Tensor  # float32 (mbs, row)
    attended: bool = False  # whether attention used the boundaries


_current: CurrentBatch | None = None


def current() -> CurrentBatch | None:
    """Return the micro batch that was read last; None: none was read yet."""
    return _current


def clear() -> None:
    """Forget the micro batch, for example before generation, which has no packed rows."""
    global _current  # noqa: PLW0603 - the host's functions share no object
    _current = None


def wrap_broadcast_data(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``broadcast_data(keys, data, datatype)``: send ``SIDE_KEYS`` along with ``text``. The
    wrapper raises ConfigError if no attention used the previous micro batch's boundaries, or if a
    micro batch has no label."""

    @functools.wraps(stock)
    def broadcast_data(keys: Sequence[str], data: Any, datatype: torch.dtype) -> Any:
        global _current  # noqa: PLW0603
        if "text" not in keys:
            return stock(keys, data, datatype)
        if _current is not None and not _current.attended:
            raise ConfigError(
                "the model's attention did not use the boundaries of the last micro batch, so its "
                "documents saw each other: switch on flash attention in every layer, and call "
                "install() before the model's modules are imported; or install(varlen=False)"
            )
        received = stock([*keys, *SIDE_KEYS], data, datatype)
        if evaluation.counted is None and not received[MASK].any():
            raise ConfigError(
                "a micro batch has no label (a stage excludes its documents, or they have one "
                "token each), so the host's loss would be NaN; take larger micro batches, or drop "
                "those documents when packing"
            )
        cu_seqlens = dialects.join_ends(received[BOUNDARIES])
        _current = CurrentBatch(
            cu_seqlens=cu_seqlens,
            max_seqlen=int(cu_seqlens.diff().max()),
            position_ids=received[POSITIONS],
            loss_mask=received[MASK].float(),
        )
        return received

    return broadcast_data


def wrap_masks_and_positions(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``get_ltor_masks_and_position_ids``: multiply its loss mask by ours, set positions."""

    @functools.wraps(stock)
    def get_ltor_masks_and_position_ids(*args: Any, **kwargs: Any) -> Any:
        mask, loss_mask, position_ids = stock(*args, **kwargs)
        batch = _current
        if batch is None:
            return mask, loss_mask, position_ids
        if position_ids.shape != batch.position_ids.shape:
            raise ConfigError(
                f"the host cut a micro batch of {tuple(batch.position_ids.shape)} to "
                f"{tuple(position_ids.shape)}: packed rows and a sequence length curriculum of "
                "the host exclude each other (set order in the manifest for megapack's curriculum)"
            )
        batch.loss_mask = loss_mask * batch.loss_mask
        return mask, batch.loss_mask, batch.position_ids

    return get_ltor_masks_and_position_ids


def wrap_flash_attn_func(
    stock: Callable[..., Tensor], varlen: Callable[..., Tensor]
) -> Callable[..., Tensor]:
    """Wrap ``flash_attn_func``: call ``flash_attn_varlen_func`` with the segments of the rows."""

    @functools.wraps(stock)
    def flash_attn_func(
        q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, *args: Any, **kwargs: Any
    ) -> Tensor:
        batch = _current
        if batch is None:
            return stock(q, k, v, dropout_p, *args, **kwargs)
        _check_row(q.shape[0] * q.shape[1], batch)
        flat = [tensor.flatten(0, 1) for tensor in (q, k, v)]
        bounds = (batch.cu_seqlens, batch.cu_seqlens, batch.max_seqlen, batch.max_seqlen)
        return varlen(*flat, *bounds, dropout_p, *args, **kwargs).view(*q.shape[:3], v.shape[-1])

    return flash_attn_func


def wrap_flash_attn_varlen_func(stock: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap ``flash_attn_varlen_func``: replace the boundaries of rows with those of segments."""

    @functools.wraps(stock)
    def flash_attn_varlen_func(
        q: Tensor, k: Tensor, v: Tensor, *arguments: Any, **kwargs: Any
    ) -> Tensor:
        batch, bounds, others = _current, arguments[:4], arguments[4:]
        if batch is not None:
            _check_row(q.shape[0], batch)
            names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
            kwargs = {name: value for name, value in kwargs.items() if name not in names}
            bounds = (batch.cu_seqlens, batch.cu_seqlens, batch.max_seqlen, batch.max_seqlen)
        return stock(q, k, v, *bounds, *others, **kwargs)

    return flash_attn_varlen_func


def _check_row(num_tokens: int, batch: CurrentBatch) -> None:
    batch.attended = True
    expected = batch.position_ids.numel()
    if num_tokens != expected:
        raise ConfigError(
            f"attention gets {num_tokens} tokens, but the current micro batch has {expected}: "
            "for generation call megapack.integrations.rows.text_rows.clear() first"
        )


def hand_over_boundaries(rebinding: Rebinding, parallel: str, *importers: str) -> None:
    """Wrap the functions that pass boundaries, positions and mask to attention and loss.
    ``parallel`` is the host's module with ``broadcast_data``; ``importers`` are its modules that
    import flash-attn's function by name. Raises ConfigError if the host lacks one of the names."""
    flash = importlib.import_module("flash_attn.flash_attn_interface")
    stock = flash.flash_attn_varlen_func
    dense = wrap_flash_attn_func(flash.flash_attn_func, stock)
    rebinding.replace(flash, "flash_attn_func", dense)
    varlen = wrap_flash_attn_varlen_func(stock)
    rebinding.replace(flash, "flash_attn_varlen_func", varlen)
    for name in importers:
        rebinding.replace(importlib.import_module(name), "flash_attn_varlen_func", varlen)
    masks = "get_ltor_masks_and_position_ids"
    for module, name, wrap in (
        (importlib.import_module(parallel), "broadcast_data", wrap_broadcast_data),
        (importlib.import_module("megatron.utils"), masks, wrap_masks_and_positions),
    ):
        rebinding.replace(module, name, wrap(getattr(module, name)))


def require_one_stage(pipeline_parallel_size: int) -> None:
    """Raise ConfigError for pipelines, which have several micro batches in flight at once."""
    if pipeline_parallel_size > 1:
        raise ConfigError(
            f"pipeline_parallel_size is {pipeline_parallel_size}; segment-wise attention works "
            "with one stage (several micro batches are in flight otherwise). Use tensor "
            "parallelism, or varlen=False for rows without boundaries"
        )


# ---- Evaluation of finite sets
# Both hosts evaluate a number of steps and average the mean losses of their micro batches. In a
# finite set some micro batches have few labels and, at the end, none:
#
#     labels of the micro batches     120      80     0
#     their mean losses               2.0     3.0     0 / 0
#     losses that the host gets     2.0 x 120/128   3.0 x 80/128   0     -> the host's mean is 1.25
#     divided by 200 labels / 384 tokens                                 -> 2.4, the mean of labels


class EvaluationLoss:
    """Loss of the current evaluation. ``counted``: numbers of labels and tokens in its micro
    batches on this rank, float64 (2,); None outside of an evaluation of finite sets."""

    counted: Tensor | None = None

    def weigh(self, loss: Tensor, loss_mask: Tensor) -> Tensor:
        """Return the mean loss of a micro batch times labels / tokens; 0 without a label."""
        if self.counted is None:
            return loss
        labels = loss_mask.sum().double()
        tokens = torch.full_like(labels, loss_mask.numel())
        self.counted = self.counted.to(labels.device) + torch.stack([labels, tokens])
        return torch.where(labels > 0, loss * (labels / tokens).to(loss.dtype), 0)

    def wrap(
        self, stock: Callable[..., Any], divide: Callable[[Any, float], None]
    ) -> Callable[..., Any]:
        """Wrap the host's ``evaluate``: ``divide`` its losses by labels per token."""

        @functools.wraps(stock)
        def evaluate(*args: Any, **kwargs: Any) -> Any:
            self.counted = torch.zeros(2, dtype=torch.float64)
            try:
                losses, counted = stock(*args, **kwargs), self.counted
            finally:
                self.counted = None
            if dist.is_initialized():
                dist.all_reduce(counted)
            labels, tokens = counted.tolist()
            divide(losses, labels / tokens)
            return losses

        return evaluate


evaluation = EvaluationLoss()


def whole_sets(parts: Sequence[TextRowDataset | None]) -> int:
    """Extend finite sets (validation and test) with empty rows to the longest one, because hosts
    evaluate both for the same number of steps; return that number."""
    datasets = [part.rows for part in parts if part is not None]
    num_rows = max(map(len, datasets), default=0)
    for dataset in datasets:
        dataset.num_rows = num_rows
    return num_rows // datasets[0].options.rows_per_block if datasets else 0


def of_first_rank(number: int) -> int:
    """Return rank 0's number on all ranks, because ranks without a loader do not know it."""
    numbers = [number]
    if dist.is_initialized():
        dist.broadcast_object_list(numbers, src=0)
    return numbers[0]


def require_loss_mask(*, varlen: bool, full_validation: bool) -> None:
    """Raise ConfigError for finite sets without a loss mask: their empty rows would count."""
    if full_validation and not varlen:
        raise ConfigError(
            "full_validation is True and varlen is False; then the host has no loss mask, and the "
            "empty rows at the end of a set would count. Leave one of the two out"
        )


class TextRowDataset(Dataset[dict[str, Tensor]]):
    """Rows with the keys of the two hosts.

    Args:
        rows: rows with ``cu_seqlens="padded"``.
        dialect: dialect of the host, with labels or without (``megapack.integrations.dialects``).
        varlen: include ``SIDE_KEYS``.
        times: number of repetitions of all rows.
    """

    def __init__(self, rows: RowDataset, dialect: Dialect, *, varlen: bool, times: int = 1) -> None:
        dialects.check_columns(rows.packed.columns, dialect)
        self.rows, self.dialect, self.varlen, self.times = rows, dialect, varlen, times

    def __len__(self) -> int:
        return len(self.rows) * self.times

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        """Return one row: text int64 ``(row + 1,)``; with labels label int64 ``(row + 1,)``,
        aligned with text (position j predicts ``label[j + 1]``), -100 = none; with varlen
        ``SIDE_KEYS``, all int64: boundaries ``(row + 1,)``, positions and loss mask ``(row,)``."""
        number = range(len(self))[i] % len(self.rows)
        batch = dialects.emit(self.rows.micro_batch([number]), self.dialect)
        keys = batch if self.varlen else batch.keys() - SIDE_KEYS
        return {key: batch[key][0] for key in keys}


def build_text_rows(
    manifest: Manifest,
    options: RowOptions,
    dialect: Dialect,
    *,
    split: tuple[float, float],
    num_rows: int | None,
    num_epochs: int | None = None,
    cache_directory: str | None = None,
    varlen: bool,
    times: int | None = None,
) -> TextRowDataset | None:
    """Return the rows of one split of a data path; None: it is empty. Raises ConfigError for
    attention windows without varlen.

    Args:
        split: fractions of every source's documents.
        num_rows: number of rows; None: ``num_epochs`` epochs (None: 1).
        cache_directory: see ``open_rows``.
        dialect, varlen: see ``TextRowDataset``.
        times: repetitions of a finite set, each document once (ignores num_rows); None: not finite.
    """
    if split[0] == split[1] or num_rows == 0:
        return None
    rows = open_data_path(
        manifest,
        options,
        split=split,
        num_rows=num_rows if times is None else None,
        finite=times is not None,
        cache_directory=cache_directory,
    )
    if not varlen:
        dialects.refuse_windows(
            rows.packed.samples.windows,
            "the host's attention treats a row as one sequence",
            remedy="switch on its flash attention, which gets boundaries (varlen=True)",
        )
    if num_rows is None and times is None:
        rows.num_rows = rows.rows_per_epoch * (num_epochs or 1)
    return TextRowDataset(rows, dialect, varlen=varlen, times=times or 1)


def split_bounds(splits: str) -> list[tuple[float, float]]:
    """Parse ``"969,30,1"`` (or with ``/``) to ranges of documents, as fractions, of train, valid
    and test. Raises ConfigError unless all parts are numbers and one is positive."""
    try:
        parts = [float(part) for part in splits.replace("/", ",").split(",")]
    except ValueError as error:
        raise ConfigError(f"split is {splits!r}; it must be numbers like 969,30,1") from error
    parts = (parts + [0.0] * 3)[:3]
    if min(parts) < 0 or sum(parts) <= 0:
        raise ConfigError(f"split is {splits!r}; its parts must be positive")
    ends = [math.fsum(parts[: i + 1]) / math.fsum(parts) for i in range(3)]
    return list(zip([0.0, *ends[:2]], ends, strict=True))


def manifest_of_list(data_prefix: str | Sequence[str]) -> Manifest:
    """Return the manifest of ``"prefix"``, ``["prefix"]`` or ``["0.3", "a", "0.7", "b"]``. Raises
    ConfigError for other forms, and for a manifest inside a blend."""
    items = [data_prefix] if isinstance(data_prefix, str) else [str(item) for item in data_prefix]
    if len(items) == 1:
        return Manifest.read(items[0].strip())
    if len(items) % 2:
        raise ConfigError(
            f"data path has {len(items)} parts; it must be one prefix, one manifest "
            f"({', '.join(MANIFEST_SUFFIXES)}), or weight prefix weight prefix ..."
        )
    try:
        weights = [float(weight) for weight in items[::2]]
    except ValueError as error:
        raise ConfigError(f"data path {items} does not alternate weights and prefixes") from error
    return Manifest.of_blend([prefix.strip() for prefix in items[1::2]], weights)


def shared_rows(global_batch_size: int, rampup: Sequence[Any] | None) -> int:
    """Return the rows per block: the greatest common divisor of the run's batch sizes.
    ``rampup`` is Megatron's ``--rampup-batch-size``: start, increment, samples; or None."""
    if not rampup:
        return global_batch_size
    return math.gcd(int(rampup[0]), int(rampup[1]))
