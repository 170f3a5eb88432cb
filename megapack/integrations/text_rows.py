"""Rows as GPT-NeoX and Megatron-DeepSpeed read them: ``text``, ``label`` and a side channel.

Both hosts take ``sequence_length + 1`` tokens and make inputs and labels by shifting. A row of
megapack ends its documents where the text goes on with another one, so labels are either given
(``label``, -100 = none) or, where the host has no such key, those that differ from the next token
are masked.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from megapack.errors import ConfigError
from megapack.integrations.manifest import MANIFEST_SUFFIXES, Manifest
from megapack.integrations.open_rows import open_rows, open_sources
from megapack.integrations.rows import RowDataset, RowOptions
from megapack.integrations.segments import side_channel

__all__ = ["TextRowDataset", "build_text_rows", "manifest_of_list", "shared_rows", "split_bounds"]

IGNORED = -100


class TextRowDataset(Dataset[dict[str, Tensor]]):
    """Rows with the keys of the two hosts.

    Args:
        rows: the rows; their options say cu_seqlens="padded".
        with_labels: give ``label`` (GPT-NeoX with label data).
        varlen: give the side channel of ``megapack.integrations.segments``.
    """

    def __init__(self, rows: RowDataset, *, with_labels: bool, varlen: bool) -> None:
        self.rows = rows
        self.with_labels = with_labels
        self.varlen = varlen

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        """One row.

        Returns:
            text int64 ``(row + 1,)``; with labels label int64 ``(row + 1,)``, aligned with text
            (``label[j + 1]`` is what position j predicts), -100 = none; with varlen the side
            channel, all int64: boundaries ``(row + 1,)``, position ids and loss mask ``(row,)``.
        """
        row = self.rows[i]
        tokens, labels = row["tokens"], row["labels"]
        # The host takes the last label from behind the row; without one anything masked will do.
        text = torch.cat([tokens, labels[-1:].clamp(min=0)])
        sample = {"text": text}
        if self.with_labels:
            sample["label"] = torch.cat([labels.new_full((1,), IGNORED), labels])
        if self.varlen:
            mask = row["loss_mask"]
            if not self.with_labels:
                mask = mask * (labels == text[1:])
            sample |= side_channel(
                {**row, "loss_mask": mask}, self.rows.options.sequence_length + 1
            )
        return sample


def build_text_rows(
    data_path: str | Manifest,
    options: RowOptions,
    *,
    split: tuple[float, float],
    num_rows: int | None,
    num_epochs: int | None = None,
    cache_directory: str | None = None,
    with_labels: bool,
    varlen: bool,
) -> TextRowDataset | None:
    """One split of a data path, None for an empty one.

    Args:
        data_path: prefix, manifest file or JSON, or a Manifest.
        options: see ``RowOptions``.
        split: fractions of every source's documents.
        num_rows: rows to offer; None: ``num_epochs`` of the data.
        num_epochs: counts when num_rows is None; None: 1.
        cache_directory: see ``open_rows``.
        with_labels, varlen: see ``TextRowDataset``.

    Raises:
        ConfigError: the manifest has an attention window and rows have no boundaries (varlen).
    """
    if split[0] == split[1] or num_rows == 0:
        return None
    manifest = Manifest.read(data_path) if isinstance(data_path, str) else data_path
    rows = open_rows(
        manifest,
        open_sources(manifest),
        options,
        split=split,
        num_rows=num_rows,
        cache_directory=cache_directory,
    )
    if not varlen and rows.packed.samples.windows:
        raise ConfigError(
            f"the manifest has attention windows {rows.packed.samples.windows}, and attention in "
            "these rows is one causal row: switch on the host's flash attention, to which "
            "boundaries are handed (varlen=True), or leave attention_window out"
        )
    if num_rows is None:
        rows.num_rows = rows.rows_per_epoch * (num_epochs or 1)
    return TextRowDataset(rows, with_labels=with_labels, varlen=varlen)


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
