"""Weighted --data-path lists, blended inside megapack instead of sample by sample on top of it.

Megatron's BlendedDataset interleaves single samples of its datasets, which would put different
buckets on different ranks. Here the list becomes one manifest for one dataset, whose blend keeps
every block of rows in one bucket.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import torch.distributed as dist
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.utils import Split

from megapack.errors import ConfigError
from megapack.integrations.manifest import Manifest
from megapack.integrations.megatron.dataset import PackedGPTDataset
from megapack.integrations.megatron.host import HOST, script_arguments, version

__all__ = ["PackedDatasetBuilder", "fold_blends"]

Blend = tuple[Sequence[str], Sequence[float] | None]


class PackedDatasetBuilder(BlendedMegatronDatasetBuilder):  # type: ignore[misc]  # no stubs
    """BlendedMegatronDatasetBuilder that folds blends of packed datasets; else unchanged.

    Raises:
        ConfigError: flags of Megatron-LM's script under which rows would be misread.
    """

    needs_boundary_flag: ClassVar[bool] = False
    """Whether Megatron's own get_batch is to read the boundaries (``install()`` knows)."""

    def __init__(
        self,
        cls: type[Any],
        sizes: list[int | None],
        is_built_on_rank: Callable[[], bool],
        config: Any,
        *more: Any,
        **newer: Any,
    ) -> None:
        if isinstance(cls, type) and issubclass(cls, PackedGPTDataset):
            _check_flags(script_arguments(), boundaries=self.needs_boundary_flag)
            config = fold_blends(config)
        super().__init__(cls, sizes, is_built_on_rank, config, *more, **newer)


def _check_flags(args: Any | None, *, boundaries: bool) -> None:
    """Refuse what would train on wrong rows without a word: all such flags at once."""
    if args is None or not dist.is_initialized():  # nothing is going to be trained here
        return
    problems = list(_wrong_flags(args, boundaries=boundaries))
    if problems:
        raise ConfigError(". ".join(problems))


def _wrong_flags(args: Any, *, boundaries: bool) -> Iterator[str]:
    if getattr(args, "dataloader_type", None) == "cyclic":
        yield (
            "--dataloader-type is cyclic, which would shuffle buckets over ranks; rows are ordered "
            "already: --dataloader-type single"
        )
    flags = ["sft"] if version() < (0, 19) else ["sft", "dataloader_inter_document_masking"]
    if boundaries and not any(getattr(args, flag, False) for flag in flags):
        options = " or ".join(f"--{flag.replace('_', '-')}" for flag in reversed(flags))
        yield (
            f"get_batch of {HOST} drops cu_seqlens without {options}: attention would cross "
            f"documents. Add {options}, or run with --own-get-batch no if the script reads "
            "boundaries by itself"
        )


def fold_blends(config: Any) -> Any:
    """A copy of a dataset config in which every blend of several prefixes is one manifest.

    Several validation sets (``multiple_validation_sets``) stay apart, as the user wants them.
    """
    folded = copy.copy(config)
    if config.blend is not None:
        folded.blend = _fold(config.blend)
    if config.blend_per_split is not None:
        folded.blend_per_split = [
            blend
            if blend is None or (config.multiple_validation_sets and split is Split.valid)
            else _fold(blend)
            for split, blend in zip(Split, config.blend_per_split, strict=True)
        ]
    return folded


def _fold(blend: Blend) -> Blend:
    prefixes, weights = blend
    if len(prefixes) == 1:
        return list(prefixes), None
    return [Manifest.of_blend(prefixes, weights).to_json()], None
