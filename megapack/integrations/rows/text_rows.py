"""Rows as GPT-NeoX and Megatron-DeepSpeed read them: ``text``, ``label`` and a side channel.

- ``build_text_rows``: a data path and a split -> ``TextRowDataset``.
- ``hand_over_boundaries``: the wraps by which boundaries, positions and mask reach the model.
- ``EvaluationLoss``: validation and test sets that end, and their loss as a mean over all labels.
- ``split_bounds``, ``manifest_of_list``, ``shared_rows``: arguments as these hosts write them.

Both hosts take ``sequence_length + 1`` tokens and make inputs and labels by shifting. Labels are
either given (``label``, -100 = none) or, where the host has no such key, those that differ from the
next token of the row are masked (``megapack.integrations.dialects``).
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
from megapack.integrations.dialects import BOUNDARIES, MASK, POSITIONS, Dialect, emit, join_ends
from megapack.integrations.rebinding import Rebinding
from megapack.integrations.rows.dataset import RowDataset, RowOptions
from megapack.integrations.rows.manifest import MANIFEST_SUFFIXES, Manifest
from megapack.integrations.rows.open_rows import open_data_path

# ---- Boundaries for hosts that have no argument for them: GPT-NeoX and Megatron-DeepSpeed -------
# Their batches carry ``text`` alone, and their attention is one causal row. Three small wraps close
# the gap: ``broadcast_data`` carries boundaries, positions and loss mask beside ``text`` to all
# tensor-parallel ranks; ``get_ltor_masks_and_position_ids`` returns that mask and those positions;
# and flash-attn's functions, called for the row, are answered segment by segment.
#
# What lies between the calls is the micro batch in flight, so forward, recomputation and backward
# of one must be over before the next is read: ``require_one_stage`` refuses longer pipelines.

SPLITS = ("train", "valid", "test")
SIDE_KEYS = (BOUNDARIES, POSITIONS, MASK)  # beside "text" in every sample


@dataclass
class CurrentBatch:
    """What the host's calls for one micro batch have no argument for."""

    cu_seqlens: Tensor
    """int32 (segments + 1,), of all rows one behind the other, on the device."""
    max_seqlen: int
    position_ids: Tensor
    """int64 (mbs, row)."""
    loss_mask: Tensor
    """float32 (mbs, row)."""
    attended: bool = False
    """Whether attention was handed the boundaries."""


_current: CurrentBatch | None = None


def current() -> CurrentBatch | None:
    """The micro batch that was read last, None before the first."""
    return _current


def clear() -> None:
    """Forget the micro batch, for generation or anything else that is not a packed row."""
    global _current  # noqa: PLW0603 - the host gives us no object to keep it in
    _current = None


def wrap_broadcast_data(stock: Callable[..., Any]) -> Callable[..., Any]:
    """``broadcast_data(keys, data, datatype)`` that brings the side channel along with ``text``.

    It raises ConfigError where no attention asked for the boundaries of the micro batch before, and
    where a micro batch has no label.
    """

    @functools.wraps(stock)
    def broadcast_data(keys: Sequence[str], data: Any, datatype: torch.dtype) -> Any:
        global _current  # noqa: PLW0603
        if "text" not in keys:
            return stock(keys, data, datatype)
        if _current is not None and not _current.attended:
            raise ConfigError(
                "the model's attention was not handed the boundaries of the last micro batch, so "
                "its documents saw each other: switch on flash attention in every layer, and call "
                "install() before the model's modules are imported; or install(varlen=False)"
            )
        received = stock([*keys, *SIDE_KEYS], data, datatype)
        if evaluation.counted is None and not received[MASK].any():
            raise ConfigError(
                "a micro batch has no label (a stage excludes its documents, or they have one "
                "token each): the host divides its loss by their number, and NaN would reach every "
                "weight; take larger micro batches, or leave those documents out when packing"
            )
        cu_seqlens = join_ends(received[BOUNDARIES])
        _current = CurrentBatch(
            cu_seqlens=cu_seqlens,
            max_seqlen=int(cu_seqlens.diff().max()),
            position_ids=received[POSITIONS],
            loss_mask=received[MASK].float(),
        )
        return received

    return broadcast_data


def wrap_masks_and_positions(stock: Callable[..., Any]) -> Callable[..., Any]:
    """``get_ltor_masks_and_position_ids`` with our loss mask (times theirs) and positions."""

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
                "the host exclude each other (megapack's schedule has its own: order in the "
                "manifest)"
            )
        batch.loss_mask = loss_mask * batch.loss_mask
        return mask, batch.loss_mask, batch.position_ids

    return get_ltor_masks_and_position_ids


def wrap_flash_attn_func(
    stock: Callable[..., Tensor], varlen: Callable[..., Tensor]
) -> Callable[..., Tensor]:
    """``flash_attn_func`` of a row, answered by ``flash_attn_varlen_func`` of its segments."""

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
    """``flash_attn_varlen_func`` called with one boundary per row, with ours instead."""

    @functools.wraps(stock)
    def flash_attn_varlen_func(
        q: Tensor, k: Tensor, v: Tensor, *bounds_and_more: Any, **kwargs: Any
    ) -> Tensor:
        batch, bounds, more = _current, bounds_and_more[:4], bounds_and_more[4:]
        if batch is not None:
            _check_row(q.shape[0], batch)
            names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
            kwargs = {name: value for name, value in kwargs.items() if name not in names}
            bounds = (batch.cu_seqlens, batch.cu_seqlens, batch.max_seqlen, batch.max_seqlen)
        return stock(q, k, v, *bounds, *more, **kwargs)

    return flash_attn_varlen_func


def _check_row(num_tokens: int, batch: CurrentBatch) -> None:
    batch.attended = True
    expected = batch.position_ids.numel()
    if num_tokens != expected:
        raise ConfigError(
            f"attention over {num_tokens} tokens, but the micro batch in flight has {expected}: "
            "for generation call megapack.integrations.rows.text_rows.clear() first"
        )


def hand_over_boundaries(rebinding: Rebinding, parallel: str, *bound: str) -> None:
    """Rebind what carries boundaries, positions and mask from the loader to attention and loss.

    Args:
        rebinding: the host's.
        parallel: its module that has ``broadcast_data``.
        bound: its modules that bind flash-attn's function when they are imported.

    Raises:
        ConfigError: the host lacks one of the names.
    """
    flash = importlib.import_module("flash_attn.flash_attn_interface")
    stock = flash.flash_attn_varlen_func
    dense = wrap_flash_attn_func(flash.flash_attn_func, stock)
    rebinding.replace(flash, "flash_attn_func", dense)
    varlen = wrap_flash_attn_varlen_func(stock)
    rebinding.replace(flash, "flash_attn_varlen_func", varlen)
    for name in bound:
        rebinding.replace(importlib.import_module(name), "flash_attn_varlen_func", varlen)
    masks = "get_ltor_masks_and_position_ids"
    for module, name, wrap in (
        (importlib.import_module(parallel), "broadcast_data", wrap_broadcast_data),
        (importlib.import_module("megatron.utils"), masks, wrap_masks_and_positions),
    ):
        rebinding.replace(module, name, wrap(getattr(module, name)))


def require_one_stage(pipeline_parallel_size: int) -> None:
    """Refuse pipelines in which several micro batches are in flight at once.

    Raises:
        ConfigError: more than one stage.
    """
    if pipeline_parallel_size > 1:
        raise ConfigError(
            f"pipeline_parallel_size is {pipeline_parallel_size}; segment-wise attention works "
            "with one stage (several micro batches are in flight otherwise). Use tensor "
            "parallelism, or varlen=False for rows without boundaries"
        )


# ---- Evaluation that ends ------------------------------------------------------------------------
# Both hosts evaluate a number of steps and take the mean of the means of their micro batches. A set
# that is evaluated as a whole has micro batches with few labels and, at its end, with none:
#
#     labels of the micro batches     120      80     0
#     their mean losses               2.0     3.0     0 / 0
#     what the host is given        2.0 x 120/128   3.0 x 80/128   0     -> its mean 1.25
#     divided by 200 labels / 384 tokens                                 -> 2.4, that of all labels


class EvaluationLoss:
    """An evaluation of either host in progress.

    Attributes:
        counted: labels and tokens of its micro batches on this rank, float64 (2,); None: none is
            in progress, or it is the host's own.
    """

    counted: Tensor | None = None

    def weigh(self, loss: Tensor, loss_mask: Tensor) -> Tensor:
        """The mean loss of a micro batch, times its labels by its tokens: 0 without a label."""
        if self.counted is None:
            return loss
        labels = loss_mask.sum().double()
        tokens = torch.full_like(labels, loss_mask.numel())
        self.counted = self.counted.to(labels.device) + torch.stack([labels, tokens])
        return torch.where(labels > 0, loss * (labels / tokens).to(loss.dtype), 0)

    def wrap(
        self, stock: Callable[..., Any], divide: Callable[[Any, float], None]
    ) -> Callable[..., Any]:
        """The host's ``evaluate``, whose losses ``divide`` divides by labels per token."""

        @functools.wraps(stock)
        def evaluate(*args: Any, **kwargs: Any) -> Any:
            self.counted = torch.zeros(2, dtype=torch.float64)
            try:
                found, counted = stock(*args, **kwargs), self.counted
            finally:
                self.counted = None
            if dist.is_initialized():
                dist.all_reduce(counted)
            labels, tokens = counted.tolist()
            divide(found, labels / tokens)
            return found

        return evaluate


evaluation = EvaluationLoss()


def whole_sets(parts: Sequence[TextRowDataset | None]) -> int:
    """Give sets the rows of the longest one; the steps that an evaluation of each then takes.

    Args:
        parts: finite ones, or None: hosts have one number of steps for validation and test.
    """
    rows = [part.rows for part in parts if part is not None]
    most = max((len(one) for one in rows), default=0)
    for one in rows:
        one.num_rows = most
    return most // rows[0].options.rows_per_block if rows else 0


def of_first_rank(number: int) -> int:
    """The number that rank 0 has, on all ranks: those without a loader count no rows."""
    told = [number]
    if dist.is_initialized():
        dist.broadcast_object_list(told, src=0)
    return told[0]


def require_loss_mask(*, varlen: bool, full_validation: bool) -> None:
    """Refuse whole sets whose empty rows would count.

    Raises:
        ConfigError: the host is given no loss mask.
    """
    if full_validation and not varlen:
        raise ConfigError(
            "full_validation is True and varlen False, by which the host gets no loss mask: the "
            "empty rows at the end of a set would count. Leave one of them out"
        )


class TextRowDataset(Dataset[dict[str, Tensor]]):
    """Rows with the keys of the two hosts.

    Args:
        rows: the rows; their options say cu_seqlens="padded".
        dialect: the host's, with labels or without (``megapack.integrations.dialects``).
        varlen: give the side channel of ``megapack.integrations.rows.text_rows``.
        times: how often they are offered, one time after the other.
    """

    def __init__(self, rows: RowDataset, dialect: Dialect, *, varlen: bool, times: int = 1) -> None:
        self.rows, self.dialect, self.varlen, self.times = rows, dialect, varlen, times

    def __len__(self) -> int:
        return len(self.rows) * self.times

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        """One row.

        Returns:
            text int64 ``(row + 1,)``; with labels label int64 ``(row + 1,)``, aligned with text
            (``label[j + 1]`` is what position j predicts), -100 = none; with varlen the side
            channel, all int64: boundaries ``(row + 1,)``, position ids and loss mask ``(row,)``.
        """
        number = range(len(self))[i] % len(self.rows)
        batch = emit(self.rows.micro_batch([number]), self.dialect)
        kept = batch if self.varlen else batch.keys() - SIDE_KEYS
        return {key: batch[key][0] for key in kept}


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
    """One split of a data path, None for an empty one.

    Args:
        manifest: of the data path.
        options: see ``RowOptions``.
        split: fractions of every source's documents.
        num_rows: rows to offer; None: ``num_epochs`` of the data.
        num_epochs: counts when num_rows is None; None: 1.
        cache_directory: see ``open_rows``.
        dialect, varlen: see ``TextRowDataset``.
        times: of a set that ends, every document once, whatever num_rows; None: one that does not.

    Raises:
        ConfigError: the manifest has an attention window and rows have no boundaries (varlen).
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
    if not varlen and rows.packed.samples.windows:
        raise ConfigError(
            f"the manifest has attention windows {rows.packed.samples.windows}, and attention in "
            "these rows is one causal row: switch on the host's flash attention, to which "
            "boundaries are handed (varlen=True), or leave attention_window out"
        )
    if num_rows is None and times is None:
        rows.num_rows = rows.rows_per_epoch * (num_epochs or 1)
    return TextRowDataset(rows, dialect, varlen=varlen, times=times or 1)


def split_bounds(splits: str) -> list[tuple[float, float]]:
    """``"969,30,1"`` (or with ``/``) -> fractions of the documents of train, valid and test.

    Raises:
        ConfigError: no positive number, or not numbers.
    """
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
    """``"prefix"``, ``["prefix"]`` or ``["0.3", "a", "0.7", "b"]`` as a manifest.

    Raises:
        ConfigError: neither; or a manifest inside a blend.
    """
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
    """Rows per block: the global batch size, or what all batch sizes of a ramp-up share.

    Args:
        global_batch_size: rows of one optimizer step.
        rampup: Megatron's ``--rampup-batch-size``: start, increment, samples; None without.
    """
    if not rampup:
        return global_batch_size
    return math.gcd(int(rampup[0]), int(rampup[1]))
