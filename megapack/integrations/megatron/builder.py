"""Weighted --data-path lists, blended inside megapack instead of sample by sample on top of it.

Megatron's BlendedDataset interleaves single samples of its datasets, which would put different
buckets on different ranks. Here the list becomes one manifest for one dataset, whose blend keeps
every block of rows in one bucket.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.utils import Split

from megapack.integrations.manifest import Manifest
from megapack.integrations.megatron.dataset import PackedGPTDataset

__all__ = ["PackedDatasetBuilder", "fold_blends"]

Blend = tuple[Sequence[str], Sequence[float] | None]


class PackedDatasetBuilder(BlendedMegatronDatasetBuilder):  # type: ignore[misc]  # no stubs
    """BlendedMegatronDatasetBuilder that folds blends of packed datasets; else unchanged."""

    def __init__(
        self,
        cls: type[Any],
        sizes: list[int | None],
        is_built_on_rank: Callable[[], bool],
        config: Any,
    ) -> None:
        if isinstance(cls, type) and issubclass(cls, PackedGPTDataset):
            config = fold_blends(config)
        super().__init__(cls, sizes, is_built_on_rank, config)


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
